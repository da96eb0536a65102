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


class DivergenceError(TermError):
    """A loss or a model that is no number any more."""


class CohortError(FedsolveError):
    """Too few participants answered, or one of them failed."""


class ModelFileError(FedsolveError):
    """A model, checkpoint or data file that cannot be read, or must not be overwritten."""


class ConditionWarning(UserWarning):
    """A linear system was singular to working precision; the minimum-norm solution was taken."""


class CalibrationWarning(UserWarning):
    """Probabilities could not be calibrated; the model is otherwise what it would be."""


class CategoryWarning(UserWarning):
    """Many values of a column are none of the categories that its schema has."""


class TrackingWarning(UserWarning):
    """A tracker's store failed while a training went on; the model is what it would be."""


def did_you_mean(word: str, known: Iterable[object]) -> str:
    """The end of a message, " Did you mean 'x'?", with the known word nearest to one that was mistyped.

    Nothing where none is near. Capitals do not count.
    """
    spelt = {str(name).lower(): str(name) for name in known}
    near = get_close_matches(word.lower(), spelt, 1)
    return f" Did you mean '{spelt[near[0]]}'?" if near else ""
