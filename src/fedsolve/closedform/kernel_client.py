"""KernelAFL on the client's side: sums of the kernels between its rows and the landmarks.

Kernels are made some rows at a time, and kept from one exchange to the next as far as they fit into the
client's memory budget; the others are made again. The sums are the same either way.
"""

from __future__ import annotations

import numpy as np

from fedsolve.backends import NUMPY
from fedsolve.closedform.landmarks import check_landmarks, landmark_block, shared_side
from fedsolve.closedform.rbf import kernel, row_side
from fedsolve.closedform.sums import Accumulator, Rows, cached_rows, check_opening, chunks
from fedsolve.container import Array
from fedsolve.errors import TermError
from fedsolve.federation.messages import Request, Term
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.workspace import Workspace

KIND = "kernel"


@step(KIND, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """KᵀY ("cross"), KᵀK ("gram") or Kᵀ(K u) ("product"), rows counted by their weight."""
    check_opening(data, memory.chain)
    here = memory.kernels
    rows = cached_rows(data, memory, np.float64, here)
    near, ask = _near(rows, memory), set(request.note["ask"])
    count, weights = near.count, request.arrays.get("weights")
    weights = None if weights is None else here.array(weights)
    sums = Accumulator(memory.workspace, np.float64, here)
    shapes = {"cross": (count, rows.outputs), "gram": (count, count), "product": (count, rows.outputs)}
    if ask - shapes.keys():
        raise TermError(f"unknown sums {sorted(ask - shapes.keys())}. Install the server's fedsolve version.")
    for name in sorted(ask):
        sums.declare(f"kernel_{name}", shapes[name], symmetric=name == "gram")
    for span in chunks(len(rows), count, here):
        block = rows.weighted(span, near.block(span, memory.workspace))
        if "cross" in ask:
            sums.add_product("kernel_cross", block, rows.weighted(span, rows.targets(span)))
        if "gram" in ask:
            sums.add_gram("kernel_gram", block)
        if weights is not None:
            sums.add_product("kernel_product", block, block @ weights)
    term = sums.finish()
    term.counts["rows"] = len(rows)
    return term


class KernelBlocks:
    """K of a client's rows, span by span, where the rows' kernels compute."""

    def __init__(self, rows: Rows, landmarks: Array, bandwidth: float, precision: str, budget: int) -> None:
        self.rows = rows
        self.count = len(landmarks)
        self._kernels = rows.kernels
        self._landmarks = self._kernels.array(landmarks)
        self._bandwidth = bandwidth
        self._precision = np.dtype(precision)
        self._budget = self._kernels.budget(budget)
        self._kept: dict[int, Array] = {}

    def block(self, span: slice, workspace: Workspace) -> Array:
        """K (span, landmarks) in float64; of precision float32, its values as float32 has them."""
        here, kept = self._kernels, self._kept.get(span.start)
        if kept is not None:
            return here.array(kept, np.float64)
        shape = span.stop - span.start, self.count
        made = workspace.array("kernel", shape) if here is NUMPY else here.empty(shape)
        kernel(row_side(self.rows.features(span), self._bandwidth), self._landmarks, made)
        if self._precision == np.float32:
            made[...] = here.array(made, np.float32)
        size = shape[0] * shape[1] * self._precision.itemsize
        # On a device others keep theirs too: what is free there now decides.
        if size <= min(self._budget, here.budget(self._budget)):
            self._budget -= size
            self._kept[span.start] = here.copy(here.array(made, self._precision))
        return made


def _near(rows: Rows, memory: Memory) -> KernelBlocks:
    """This client's kernels for the landmarks of the model so far."""
    chain = memory.chain
    place = landmark_block(chain)
    cached = memory.cache.get(KIND)
    if cached is None or cached[0] != chain.digests[place + 1] or cached[1].rows is not rows:
        opening = chain.blocks[0].note["opening"]
        check_landmarks(opening)
        note = chain.blocks[place].note["landmarks"]
        side = shared_side(chain)
        made = KernelBlocks(rows, side, note["bandwidth"], opening["parameters"]["precision"], memory.budget)
        cached = memory.cache[KIND] = (chain.digests[place + 1], made)
    near: KernelBlocks = cached[1]
    return near
