"""Classes that arrive later: AFL's sums grow by a column, and nobody is asked again.

Rows of another class add to G, and their one-hot targets to a new column of H; in the column of a class, rows
of the others are zeros. So the sums of the first clients, with a column of zeros for each class that they did
not know, plus the sums of the newcomers, are those of joint training.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Term, Total

_BY_CLASS = ("cross", "label_square", "target", "class_rows")


def united(first: Total, first_spec: Spec, second: Total, second_spec: Spec) -> tuple[Total, Spec]:
    """The total of both federations over the classes of both; each row must be in one of them only."""
    mine, theirs = first_spec.classes, second_spec.classes
    if mine is None or theirs is None:
        raise DataError("classes can be added to a classifier; these are targets of a regression.")
    if first_spec.features != second_spec.features:
        raise DataError(
            f"rows of {first_spec.features} and of {second_spec.features} features cannot be added. All must "
            "use the same backbone."
        )
    if mine.dtype.kind != theirs.dtype.kind:
        raise DataError(f"classes such as {mine[0]!r} and {theirs[0]!r} are of different types.")
    classes = np.union1d(mine, theirs)
    term = _spread(first.term, mine, classes) + _spread(second.term, theirs, classes)
    term.mirror()
    missing = {**first.missing, **second.missing}
    whole = Total(term, tuple(sorted({*first.cohort, *second.cohort})), missing)
    return whole, replace(first_spec, classes=classes, outputs=len(classes))


def _spread(term: Term, known: Array, classes: Array) -> Term:
    """The same sums with a column for every class, zeros for those that were not known."""
    places = np.searchsorted(classes, known)
    arrays = dict(term.arrays)
    for name in _BY_CLASS:
        if name in arrays:
            wide = np.zeros((*arrays[name].shape[:-1], len(classes)))
            wide[..., places] = arrays[name]
            arrays[name] = wide
    return Term(arrays, dict(term.counts), term.symmetric, dict(term.factors))
