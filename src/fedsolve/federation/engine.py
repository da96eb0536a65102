"""What every engine offers a method, and what a method learns before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.messages import Chain, Request, Total


@dataclass(frozen=True)
class Spec:
    """The federation as a method sees it: feature width, classes (None: regression), what is dear."""

    features: int
    classes: Array | None
    outputs: int
    prefers: Literal["bytes", "exchanges"]


class Federation(Protocol):
    """Carries a request to a cohort and returns the total. Knows nothing of least squares."""

    prefers: Literal["bytes", "exchanges"]

    @property
    def clients(self) -> tuple[str, ...]: ...

    def describe(self) -> Spec: ...

    def exchange(self, request: Request, chain: Chain) -> Total: ...


def class_list(declared: Sequence[Any] | None, label_sets: Sequence[Array] = ()) -> Array:
    """The classes in order: those declared, or the sorted union of all labels seen."""
    if declared is not None:
        classes = np.asarray(declared)
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
    if classes.dtype.kind == "O":
        classes = np.sort(np.asarray([str(label) for label in classes]))
    if len(classes) < 2:
        raise DataError(
            f"only one class in the whole federation ({classes.tolist()}); a classifier needs at least two."
        )
    return classes


def encode_labels(labels: Array, classes: Array) -> Array:
    """Position of every label in `classes`; a label outside them is refused by value."""
    if labels.dtype.kind == "O":
        labels = labels.astype(str)
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
            f"({shown}). Declare it (classes=...) or remove the row."
        )
    return codes
