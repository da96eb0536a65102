"""What numbers of the closed forms mean to others: equality for sites that check, bounds for secure sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.closedform.afl import AFLRun
from fedsolve.closedform.deepafl import DeepAFLRun
from fedsolve.closedform.solvers import EPS, Sandwich, solves
from fedsolve.closedform.sums import LEVEL
from fedsolve.federation.meaning import ADDITIVE, TOLERANCE, differing, differs
from fedsolve.federation.method import bounds

_ROWS = frozenset(LEVEL)
_HIDDEN = _ROWS | {"hidden_gram", "hidden_cross", "hidden_feature"}
_KERNELS = _ROWS | {"class_rows", "feature_gram"}
_LIKELIHOOD = _ROWS | {"loss", "diagonal"}
ADDITIVE |= {**dict.fromkeys(("afl", "apfl", "cascade"), _ROWS), "deepafl": _HIDDEN, "kernelafl": _KERNELS}
ADDITIVE |= {"softmax": _LIKELIHOOD, "kernelsoftmax": _LIKELIHOOD | _KERNELS, "auto": _HIDDEN | _KERNELS}


@differs.register
def _afl_differs(run: AFLRun, mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> str | None:
    """A classifier means the solution of its system."""
    if run.system is not None and "weight" in theirs and solves(*run.system, theirs["weight"]):
        mine, theirs = ({n: a for n, a in m.items() if n != "weight"} for m in (mine, theirs))
    return differing(mine, theirs)


@differs.register
def _deepafl_differs(run: DeepAFLRun, mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> str | None:
    """A block means its product and orthonormal columns; a classifier, the solution of its system.

    Of a personal model, the arrays of its primary stream are compared by their own names.
    """
    mine, theirs = ({n.removeprefix("primary."): a for n, a in m.items()} for m in (mine, theirs))
    if mine.keys() != theirs.keys():
        return differing(mine, theirs)
    same: set[str] = set()
    for left in [name for name in mine if name.startswith("left")]:
        sides = left, right = left, left.replace("left", "right", 1)
        if any(mine[side].shape != theirs[side].shape for side in sides):
            return f"'{left}' and '{right}' have shapes that this network's blocks have not"
        one, other = (
            Sandwich(*(arrays[side] for side in sides)).astype(np.float64) for arrays in (mine, theirs)
        )
        gap = one.gap(other)
        if not gap <= TOLERANCE or theirs[left].dtype != mine[left].dtype:
            return f"the product of '{left}' and '{right}' differs by {gap:.1e} of its size"
        same |= {*sides}
    if run.sums is not None and len(run.classifiers) == run.sums.layer + 1:
        newest = ("weight", f"classifier.{run.sums.layer}")
        system = run.sums.gram, run.sums.cross, run.ridge
        same |= {n for n in newest if n in theirs and solves(*system, theirs[n])}
    mine, theirs = ({n: a for n, a in arrays.items() if n not in same} for arrays in (mine, theirs))
    return differing(mine, theirs)


@bounds.register
def _deepafl_bounds(run: DeepAFLRun, note: Mapping[str, Any]) -> dict[str, float]:
    """What a number of a client's answer about a block or a step hardly exceeds.

    Block: squares of R follow from this layer's sums, those of F are taken to be at most 16 times those of
    the layer before. Step: by Cauchy and Schwarz, squares of P = F A being known from the Gram matrix of F,
    those of Phi and Y from this layer's sums.
    """
    sums, hidden = run.sums, float(run.hidden_square)
    if sums is None:
        return {}
    if note.get("phase") == "step" and run.hidden_gram is not None:
        left = run.block.left
        output = float((left * (run.hidden_gram @ left)).sum(axis=0).max())
        feature, label = float(sums.gram.diagonal().max()), float(sums.label_square.max())
        return {
            "step_gram": output,
            "step_feature": math.sqrt(max(0.0, feature * output)),
            "step_cross": math.sqrt(max(0.0, label * output)),
        }
    if note.get("phase") == "block" and sums.layer == len(run.blocks) and hidden > 0:
        weight = run.weight
        squares = sums.label_square + (weight * (sums.gram @ weight - 2.0 * sums.cross)).sum(axis=0)
        error = max(float(squares.max()), EPS * float(sums.label_square.max()))
        return {"hidden_residual": 4.0 * math.sqrt(hidden * error)}
    return {}
