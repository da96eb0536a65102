"""The one tree of errors. Each message names the value seen and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedsolveError(Exception):
    """Everything fedsolve raises on purpose."""


class DataError(FedsolveError, ValueError):
    """Features, labels or parameters that cannot be used as they are."""


class TermError(FedsolveError):
    """A request or a term that is damaged, out of place or of the wrong shape."""


class CohortError(FedsolveError):
    """Too few participants answered, or one of them failed."""


class ModelFileError(FedsolveError):
    """A model, checkpoint or data file that cannot be read, or must not be overwritten."""


class ConditionWarning(UserWarning):
    """A linear system was singular to working precision; the minimum-norm solution was taken."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint of an error message with a space before it; nothing where no known name is near."""
    close = get_close_matches(name, list(known), 1)
    return f" did you mean '{close[0]}'?" if close else ""
