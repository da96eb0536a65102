"""Softmax on the client's side: loss, gradient and, where asked for, Hessian of its rows at given weights."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from fedsolve.closedform.curvature import hessian_block
from fedsolve.closedform.sums import Accumulator, cached_rows, check_opening, chunks
from fedsolve.container import Array
from fedsolve.federation.messages import Request, Term
from fedsolve.federation.participant import ClientData, Memory, step

KIND = "softmax"


@step(KIND, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """sum CE, sum xᵀ(p - y) and sum (p - y); rows that are classified rightly; the Hessian where asked for.

    One column of weights means two classes, of which it is the second.
    """
    check_opening(data, memory.chain)
    rows = cached_rows(data, memory, np.float64)
    weight, intercept = request.arrays["weight"], request.arrays["intercept"]
    single, exact = len(intercept) == 1, bool(request.note["exact"])
    side = (rows.width + 1) * len(intercept)
    sums = Accumulator(memory.workspace, np.float64)
    sums.declare("loss", (1,))
    sums.declare("gradient", weight.shape)
    sums.declare("residual", intercept.shape)
    if exact:
        sums.declare("diagonal", (len(intercept), rows.width + 1, rows.width + 1))
        if not single:
            sums.declare("crossed", (side, side), symmetric=True)
    correct = counted = 0
    for span in chunks(len(rows), side if exact else rows.width):
        features, targets = rows.features(span), rows.targets(span)
        scores = features @ weight + intercept
        root = rows.weighted(span, np.ones((len(features), 1)))
        probabilities, losses, right = (one_column if single else all_columns)(scores, targets)
        residual = root * (probabilities - (targets[:, 1:] if single else targets))
        sums.add("loss", np.sum(root[:, 0] ** 2 * losses, keepdims=True))
        sums.add_product("gradient", root * features, residual)
        sums.add("residual", (root.T @ residual)[0])
        if exact and single:
            spread = root * np.sqrt(probabilities * (1.0 - probabilities))
            bent = np.hstack([spread * features, spread])
            sums.add("diagonal", (bent.T @ bent)[None])
        elif exact:
            diagonal, crossed = hessian_block(np.hstack([root * features, root]), probabilities)
            sums.add("diagonal", np.stack([bent.T @ bent for bent in diagonal]))
            sums.add_gram("crossed", crossed)
        correct += int(np.sum(right & (root[:, 0] > 0)))
        counted += int(np.sum(root > 0))
    term = sums.finish()
    term.counts |= {"rows": len(rows), "correct": correct, "counted": counted}
    return term


def all_columns(scores: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Probabilities (rows, classes), losses (rows,), and whether the right class alone scores highest."""
    own = np.sum(scores * targets, axis=1)
    top = np.max(scores, axis=1)
    raised = np.exp(scores - top[:, None])
    whole = np.sum(raised, axis=1)
    others = np.where(targets > 0, -np.inf, scores).max(axis=1)
    return raised / whole[:, None], np.log(whole) + (top - own), own > others


def one_column(scores: Array, targets: Array) -> tuple[Array, Array, Array]:
    """The same of two classes: the probability of the second (rows, 1) from its score alone."""
    margin = np.where(targets[:, 1] > 0, scores[:, 0], -scores[:, 0])
    return expit(scores), np.logaddexp(0.0, -margin), margin > 0
