"""The one tree of errors. Each message names the value seen and what to do about it."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class FedsolveError(Exception):
    """Everything fedsolve raises on purpose, with what a command says of it: its kind, and an exit code."""

    kind, exit_code = "data", 2


class DataError(FedsolveError, ValueError):
    """Features, labels or parameters that cannot be used as they are."""


class TermError(FedsolveError):
    """A request or a term that is damaged, out of place or of the wrong shape."""

    kind, exit_code = "participants", 3


class DivergenceError(TermError):
    """A loss or a model that is no number any more."""

    kind, exit_code = "diverged", 5


class CohortError(FedsolveError):
    """Too few participants answered, or one of them failed."""

    kind, exit_code = "participants", 3


class ModelFileError(FedsolveError):
    """A model, checkpoint or data file that cannot be read, or must not be overwritten."""

    kind, exit_code = "file", 4


class ConditionWarning(UserWarning):
    """A linear system was singular to working precision; the minimum-norm solution was taken."""


class CalibrationWarning(UserWarning):
    """Probabilities could not be calibrated; the model is otherwise what it would be."""


class CategoryWarning(UserWarning):
    """Many values of a column are none of the categories that its schema has."""


class DialectWarning(UserWarning):
    """How the cells of a csv file are read where that is not as 1234.5 between commas."""


class SpellingWarning(UserWarning):
    """Numbers of a csv file, or classes, may mean something else than what they are read as."""


class TruncationWarning(UserWarning):
    """Texts are longer than what a backbone reads of them; the rest of them is left out."""


class TrackingWarning(UserWarning):
    """A tracker's store failed while a training went on; the model is what it would be."""


def did_you_mean(word: str, known: Iterable[object]) -> str:
    """The end of a message, " Did you mean 'x'?", with the known word nearest to one that was mistyped.

    Nothing where none is near. Capitals do not count.
    """
    spelt = {str(name).lower(): str(name) for name in known}
    begun = [name for name in spelt if word and name.startswith(word.lower())]
    alike = [name for name in spelt if len(word) > 4 and name.startswith(word.lower()[:5])]
    near = begun[:1] or get_close_matches(word.lower(), spelt, 1) or alike
    return f" Did you mean '{spelt[near[0]]}'?" if near else ""


def require(module: str, extra: str | None, what: str) -> Any:
    """The module, or an error that says what needs it and which extra installs it; None: no extra does."""
    try:
        return importlib.import_module(module)
    # A torchvision that was built for another torch fails with a RuntimeError.
    except (ImportError, RuntimeError, AttributeError) as problem:
        remedy = f"Install it: pip install 'fedsolve[{extra}]'."
        if extra is None:
            other = "efficientnet-lite0, onnx:FILE or hf:NAME"
            remedy = f"Install the version that belongs to your torch, or use {other} instead."
        raise DataError(
            f"{what} needs {module.partition('.')[0]}, which cannot be imported "
            f"({type(problem).__name__}: {first_line(problem)}). {remedy}"
        ) from problem


@contextmanager
def explained(
    what: str,
    remedy: str = "",
    error: type[FedsolveError] | None = None,
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> Iterator[None]:
    """A block in which errors of other people's code become ours: what failed, why, and what to do.

    error: a `DataError` unless given. kinds: which errors; all, if a library has no common base for its own.
    """
    try:
        yield
    except FedsolveError:
        raise
    except kinds as problem:
        reason = getattr(problem, "strerror", None) or f"{type(problem).__name__}: {first_line(problem)}"
        raise (error or DataError)(f"{what}: {reason.rstrip('.')}. {remedy}".rstrip()) from problem


@contextmanager
def naming(what: object) -> Iterator[None]:
    """A block in which a `DataError` gets the name of what it is about, such as a file, in front."""
    try:
        yield
    except DataError as problem:
        raise DataError(f"{'standard input' if str(what) == '-' else what}: {problem}") from problem
    except OSError as problem:
        raise unreadable(what, problem) from problem


def first_line(problem: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def damaged(path: object, what: str, problem: BaseException) -> ModelFileError:
    """The error for a file that cannot be decoded."""
    return ModelFileError(
        f"{path} is damaged, truncated or not {what} ({first_line(problem)}). Fetch or write it again."
    )


def unreadable(path: object, problem: OSError) -> ModelFileError:
    """The error for a file that is not there or must not be read."""
    # Not `strerror`: pyarrow's repeats the path.
    return ModelFileError(f"cannot read {path}: {os.strerror(problem.errno) if problem.errno else problem}.")


@contextmanager
def reading(path: object, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """A block that reads a file; one that is not there, or damaged, is told by its name.

    kinds: errors that tell of damage, besides those of the system.
    """
    damage: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except FedsolveError:
        raise
    except damage as problem:
        # Damage shows in errors without a number, and in places in the file that make no sense.
        if isinstance(problem, OSError) and problem.errno not in (None, errno.EINVAL):
            raise unreadable(path, problem) from problem
        raise damaged(path, what, problem) from problem
