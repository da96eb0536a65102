"""Softmax on the client's side: loss, gradient and, where asked for, Hessian of its rows at given weights."""

from __future__ import annotations

import numpy as np

from fedsolve.closedform.curvature import hessian_block
from fedsolve.closedform.sums import Accumulator, cached_rows, check_opening, chunks
from fedsolve.federation.messages import Request, Term
from fedsolve.federation.participant import ClientData, Memory, step

KIND = "softmax"


@step(KIND, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """sum CE, sum xᵀ(p - y) and sum (p - y); rows that are classified rightly; the Hessian where asked for.

    One column of weights means two classes, of which it is the second.
    """
    check_opening(data, memory.chain)
    kernels = memory.kernels
    rows = cached_rows(data, memory, np.float64, kernels)
    weight, intercept = (kernels.array(request.arrays[name]) for name in ("weight", "intercept"))
    single, exact = len(intercept) == 1, bool(request.note["exact"])
    side = (rows.width + 1) * len(intercept)
    sums = Accumulator(memory.workspace, np.float64, kernels)
    sums.declare("loss", (1,))
    sums.declare("gradient", tuple(weight.shape))
    sums.declare("residual", tuple(intercept.shape))
    if exact:
        sums.declare("diagonal", (len(intercept), rows.width + 1, rows.width + 1))
        if not single:
            sums.declare("crossed", (side, side), symmetric=True)
    correct = counted = 0
    for span in chunks(len(rows), side if exact else rows.width, kernels):
        features, targets = rows.features(span), rows.targets(span)
        scores = features @ weight + intercept
        root = rows.ones(span)
        probabilities, losses, right = kernels.likelihood(scores, targets)
        residual = root * (probabilities - (targets[:, 1:] if single else targets))
        sums.add("loss", (root[:, 0] ** 2 * losses).sum()[None])
        sums.add_product("gradient", root * features, residual)
        sums.add("residual", (root.T @ residual)[0])
        if exact and single:
            spread = root * kernels.sqrt(probabilities * (1.0 - probabilities))
            bent = kernels.beside(spread * features, spread)
            sums.add("diagonal", (bent.T @ bent)[None])
        elif exact:
            diagonal, crossed = hessian_block(kernels.beside(root * features, root), probabilities)
            sums.add("diagonal", kernels.stacked([bent.T @ bent for bent in diagonal]))
            sums.add_gram("crossed", crossed)
        correct += int((right & (root[:, 0] > 0)).sum())
        counted += int((root > 0).sum())
    term = sums.finish()
    term.counts |= {"rows": len(rows), "correct": correct, "counted": counted}
    return term
