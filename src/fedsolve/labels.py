"""Labels of any type, classes or numbers: read, listed, encoded as positions, and stored."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedsolve.arrays import Array, check_rows
from fedsolve.errors import DataError, SpellingWarning

Task = Literal["classification", "regression"]
TASKS: tuple[Task, ...] = ("classification", "regression")

FEW_CLASSES, LEVELS = 20, 5
"""Numbers are classes up to so many different ones: whole ones, and others such as 0.5 that repeat often."""

ROWS_A_CLASS, HARDLY = 10, 3
"""Rows for each different number, on average: as of classes, and as of numbers that hardly repeat."""

# Leading zeros make a code, such as 007, not a number.
_WHOLE_NUMBER = re.compile(r"[+-]?(0|[1-9]\d{0,17})")
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d{0,17})(\.\d*)?")


def plain_labels(labels: Any) -> Array:
    """Labels as an array of numbers or text; lists of Python objects are looked into."""
    typed = isinstance(labels, np.ndarray) or hasattr(labels, "__array__")
    try:  # a sequence as Python objects, so that numpy does not turn numbers into text
        array: Array = np.asarray(labels) if typed else np.asarray(labels, dtype=object)
    except ValueError as problem:
        raise DataError(f"labels must be one per row; got a ragged sequence ({problem}).") from problem
    if array.dtype.kind == "S":
        return array.astype(str)
    if array.dtype.kind != "O":
        return array
    values = array.ravel().tolist()
    # None, NaN, or what pandas has for a missing value (its NA equals nothing).
    empty = (label is None or type(label).__name__ == "NAType" or bool(label != label) for label in values)
    missing = [row for row, absent in enumerate(empty) if absent]
    if missing:
        rows = ", ".join(map(str, missing[:3])) + ", ..." * (len(missing) > 3)
        raise DataError(f"{len(missing)} labels are missing (rows {rows}). Fill them in or remove the rows.")
    kinds = sorted({type(label).__name__ for label in values})
    plain: Array = np.asarray(array.tolist())
    if (len(kinds) > 1 and plain.dtype.kind not in "fiu") or plain.dtype.kind == "O":
        raise DataError(f"labels mix values of types {kinds}; use one type, numbers or text.")
    return plain


def spelled_labels(texts: Sequence[str] | Array) -> Array:
    """Labels from text: the one rule for csv cells, folders and options.

    Whole numbers where every label spells one, else real numbers where every label does (1.0 is one, and
    equals the class 1), else booleans where every label is True or False, else the text as it is.
    """
    distinct, codes = np.unique(np.asarray(texts, dtype=str), return_inverse=True)
    labels: list[str] = distinct.tolist()
    if all(_WHOLE_NUMBER.fullmatch(label) for label in labels):
        return np.array([int(label) for label in labels], dtype=np.int64)[codes]
    if all(_NUMBER.fullmatch(label) for label in labels):
        return np.array([float(label) for label in labels])[codes]
    if {*labels} <= {"True", "False"}:
        return np.array([label == "True" for label in labels])[codes]
    return np.asarray(distinct[codes])


def task_of(labels: Array, name: str = "the label") -> Task:
    """Classes or numbers, by what the labels are; refused where they may be either.

    Text, booleans and few whole numbers are classes, and so are codes 0, 1, 2, ... with many rows each. Real
    numbers are a regression, and so are whole ones of which hardly any repeat.
    """
    if labels.dtype.kind not in "iuf" or labels.ndim > 1 or not labels.size:
        return "classification"
    distinct = np.unique(labels)
    count, whole = len(distinct), bool(np.all(distinct == np.rint(distinct)))
    often = len(labels) / count
    if whole and count <= FEW_CLASSES:
        return "classification"
    codes = are_codes(distinct)
    if codes and often >= ROWS_A_CLASS:
        return "classification"
    if count <= LEVELS and often >= ROWS_A_CLASS:
        return "classification"
    if (often < HARDLY and not codes) or (not whole and (often < ROWS_A_CLASS or count > FEW_CLASSES)):
        return "regression"
    seen = f"{count:,} different {'whole ' * whole}numbers in {len(labels):,} rows"
    raise DataError(
        f"{name} has {seen} (such as {', '.join(f'{value:g}' for value in distinct[:3].tolist())}): classes, "
        "or a quantity? Say which: task classification or regression (--task; in Python task=)."
    )


def are_codes(distinct: Array) -> bool:
    """Whether these sorted numbers are 0, 1, 2, ... or 1, 2, 3, ..., but for a few that are left out."""
    whole = bool(np.all(distinct == np.rint(distinct)))
    return whole and distinct[0] in (0, 1) and bool(distinct[-1] - distinct[0] < 1.2 * len(distinct))


def class_list(declared: Sequence[Any] | None, label_sets: Sequence[Array] = ()) -> Array:
    """The classes in order: those declared, or the sorted union of all labels seen."""
    if declared is not None:
        classes = plain_labels(declared)
        if classes.ndim != 1 or len(np.unique(classes)) != len(classes):
            raise DataError(f"classes must be a list of different labels; got {list(declared)!r}.")
        classes = np.sort(classes)
    else:
        for labels in label_sets:
            if labels.ndim != 1:
                raise DataError(
                    f"labels must be one-dimensional; got shape {labels.shape}. Several labels a row, each 0 "
                    "or 1, have names (label_names=[...]); several numbers are task='regression'."
                )
        distinct = [np.unique(labels) for labels in label_sets if len(labels)]
        if not distinct:
            raise DataError("no rows at all: every client is empty. Check the data and the partition.")
        classes = np.unique(np.concatenate(distinct))
    check_rows(None, len(classes), f" ({classes.tolist()})")
    return classes


def warn_of_alike(classes: Array) -> None:
    """Name texts that differ in case or spaces only, as sites may spell one class."""
    spelled: dict[str, list[str]] = {}
    for text in classes.tolist() if classes.dtype.kind == "U" else ():
        spelled.setdefault("".join(text.casefold().split()), []).append(text)
    # Single letters are names of their own.
    alike = [" and ".join(map(repr, texts)) for key, texts in spelled.items() if len(texts) > 1 < len(key)]
    if alike:
        warnings.warn(
            f"classes differ in case or spaces only: {', '.join(alike[:5])}{', ...' * (len(alike) > 5)}. If "
            "they are one, spell them alike.",
            SpellingWarning,
            stacklevel=3,
        )


def encode_labels(labels: Any, classes: Array, *, known: bool = True) -> Array:
    """Position of every label in the sorted `classes`.

    known: a label outside them is refused by value; otherwise its position is -1.
    """
    labels = np.asarray(labels)
    if len(labels) == 0:
        return np.zeros(0, dtype=np.intp)
    if known and (labels.dtype.kind in "US") != (classes.dtype.kind in "US"):
        raise DataError(
            f"labels of type {labels.dtype} do not match classes of type {classes.dtype} "
            f"(such as {classes[0]!r})."
        )
    places = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    codes = np.where(classes[places] == labels, places, -1)
    if known and len(wrong := np.flatnonzero(codes < 0)):
        raise unknown_label(labels, int(wrong[0]), classes)
    return codes


def unknown_label(labels: Array, row: int, classes: Array) -> DataError:
    """The error for a row whose label is none of the classes."""
    return DataError(
        f"label {labels[row].item()!r} in row {row} is not one of the {len(classes)} classes "
        f"({listed(classes)}). Declare it among the classes, or remove the row."
    )


def labels_like(labels: Array, classes: Array) -> Array:
    """Labels in the type of `classes`; a label outside them is refused by value and row.

    Text matches numbers and booleans that it spells (`spelled_labels`), numbers of any type match by value
    (1.0 is the class 1), and booleans match the classes 0 and 1 alone.
    """
    if classes.dtype.kind in "US":
        labels = labels.astype(str)
    elif labels.dtype.kind in "US":
        texts, labels = labels, spelled_labels(labels)
        if labels.dtype.kind == "U":
            distinct = np.unique(texts)
            text = next((text for text in distinct if spelled_labels([text]).dtype.kind == "U"), distinct[0])
            raise unknown_label(texts, int(np.flatnonzero(texts == text)[0]), classes)
    if labels.dtype.kind == "b" and len(labels) and not set(classes.tolist()) <= {0, 1}:
        raise unknown_label(labels, 0, classes)
    encode_labels(labels, classes)
    return labels.astype(classes.dtype)


def number(text: str) -> float | None:
    """The number that a text spells, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def listed(classes: Array) -> str:
    """The classes for a message: the first ten of them."""
    return ", ".join(map(str, classes[:10].tolist())) + (", ..." if len(classes) > 10 else "")


def regression_targets(values: Array, outputs: int) -> Array:
    """Targets as (rows, outputs); text, and another number of targets per row, are refused."""
    if len(values) == 0:
        return np.zeros((0, outputs))
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"targets of type {values.dtype} (such as {values.ravel()[0].item()!r}); "
            "regression needs numbers."
        )
    targets: Array = values.reshape(len(values), -1)
    if targets.shape[1] != outputs:
        raise DataError(
            f"targets of shape {values.shape} have {targets.shape[1]} values per row; the model has "
            f"{outputs}. All clients must have the same targets."
        )
    return targets


def label_matrix(values: Array, names: Sequence[str]) -> Array:
    """Several labels a row as (rows, labels) of 0.0 and 1.0; another value is refused by label and row."""
    matrix = regression_targets(values, len(names)).astype(np.float64)
    wrong = np.argwhere((matrix != 0) & (matrix != 1))
    if len(wrong):
        row, place = wrong[0]
        raise DataError(
            f"label '{names[place]}' is {matrix[row, place]:g} in row {row}; each of several labels must be "
            "0 or 1."
        )
    return matrix


def labels_note(classes: Array | None) -> dict[str, Any] | None:
    """A class list as a JSON value that keeps its type."""
    if classes is None:
        return None
    if classes.dtype.kind not in "USifub":
        raise DataError(f"class labels of type {classes.dtype} cannot be stored; use numbers or text.")
    return {"dtype": classes.dtype.str, "values": classes.tolist()}


def labels_from_note(note: Mapping[str, Any] | None) -> Array | None:
    """The class list of `labels_note`."""
    return None if note is None else np.asarray(note["values"], dtype=note["dtype"])
