"""Class labels of any type: read, listed, encoded as positions, and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.checks import check_classes
from fedsolve.container import Array
from fedsolve.errors import DataError


def plain_labels(labels: Any) -> Array:
    """Labels as an array of numbers or text; lists of Python objects are looked into."""
    given = isinstance(labels, np.ndarray) or hasattr(labels, "__array__")
    array: Array = np.asarray(labels) if given else _untyped(labels)
    if array.dtype.kind == "S":
        return array.astype(str)
    if array.dtype.kind != "O":
        return array
    kinds = sorted({type(label).__name__ for label in array.ravel().tolist()})
    found: Array = np.asarray(array.tolist())
    if (len(kinds) > 1 and found.dtype.kind not in "fiu") or found.dtype.kind == "O":
        raise DataError(f"labels mix values of types {kinds}; use one type, numbers or text.")
    return found


def _untyped(labels: Any) -> Array:
    """A sequence as an array of Python objects, so that numpy does not turn numbers into text."""
    try:
        return np.asarray(labels, dtype=object)
    except ValueError as problem:
        raise DataError(f"labels must be one per row; got a ragged sequence ({problem}).") from problem


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
                raise DataError(f"labels must be one-dimensional; got shape {labels.shape}.")
        distinct = [np.unique(labels) for labels in label_sets if len(labels)]
        if not distinct:
            raise DataError("no rows at all: every client is empty. Check the data and the partition.")
        classes = np.unique(np.concatenate(distinct))
    check_classes(len(classes), f" ({classes.tolist()})")
    return classes


def encode_labels(labels: Array, classes: Array) -> Array:
    """Position of every label in `classes`; a label outside them is refused by value."""
    if len(labels) == 0:
        return np.zeros(0, dtype=np.intp)
    if (labels.dtype.kind in "US") != (classes.dtype.kind in "US"):
        raise DataError(
            f"labels of type {labels.dtype} do not match classes of type {classes.dtype} "
            f"(such as {classes[0]!r})."
        )
    codes = np.searchsorted(classes, labels)
    codes[codes == len(classes)] = 0
    wrong = classes[codes] != labels
    if np.any(wrong):
        row = int(np.flatnonzero(wrong)[0])
        shown = ", ".join(map(str, classes[:10].tolist())) + (", ..." if len(classes) > 10 else "")
        raise DataError(
            f"label {labels[row].item()!r} in row {row} is not one of the {len(classes)} classes "
            f"({shown}). Declare it among the classes, or remove the row."
        )
    return codes


def positions(labels: Any, classes: Array) -> Array:
    """Position of every label in the sorted `classes`; -1 for one that is none of them."""
    labels = np.asarray(labels)
    found = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    return np.where(classes[found] == labels, found, -1)


def regression_targets(values: Array, outputs: int) -> Array:
    """Targets as (rows, outputs); text, and another number of targets per row, are refused."""
    if len(values) == 0:
        return np.zeros((0, outputs))
    if values.dtype.kind not in "fiub":
        raise DataError(
            f"targets of type {values.dtype} (such as {values.ravel()[0].item()!r}); "
            "regression needs numbers."
        )
    found: Array = values.reshape(len(values), -1)
    if found.shape[1] != outputs:
        raise DataError(
            f"targets of shape {values.shape} have {found.shape[1]} values per row; the model has {outputs}. "
            "All clients must have the same targets."
        )
    return found


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
