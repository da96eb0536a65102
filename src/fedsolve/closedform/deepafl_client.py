"""DeepAFL on the client's side: one pass over the rows answers any request of the server.

The server's side, with the paper and its symbols, is `deepafl`. Phi lives in memory while it fits the
participant's budget and in a mapped temporary file otherwise; the hidden features F are kept between
exchanges only if they fit as well. What is kept can always be rebuilt from the blocks.
"""

from __future__ import annotations

import tempfile

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import NUMPY, Kernels, host, kernels_of
from fedsolve.closedform.predictors import Network
from fedsolve.closedform.projections import check_projections
from fedsolve.closedform.solvers import Sandwich
from fedsolve.closedform.sums import LEVEL, Accumulator, Rows, blocks_with, cached_rows
from fedsolve.errors import TermError
from fedsolve.federation.messages import Block, Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, Workspace, step

KIND = "deepafl"

_KNOWN = {
    *LEVEL,
    *("anchor", "step_feature", "step_cross", "step_gram"),
    *("hidden_gram", "hidden_residual", "hidden_feature", "hidden_cross", "hidden_initial"),
}
"""Statistics that a request may ask for."""


@step(KIND, over_rows=True)
def answer_layer(data: ClientData, request: Request, memory: Memory) -> Term:
    """The statistics asked for, in one pass over the rows that also brings Phi to the request's layer.

    Statistics of a step belong to the last block: they are taken while it is applied.
    """
    features = _layer_features(data, memory)
    network, rows, workspace = features.network, features.rows, memory.workspace
    added = blocks_with(memory.chain, "layer")
    ask, goal = set(request.note["ask"]), request.step
    if unknown := ask - _KNOWN:
        raise TermError(f"unknown statistics {sorted(unknown)}. Install the fedsolve version of the server.")
    if goal != len(added):
        raise TermError(f"the request is for layer {goal}, but the model so far has {len(added)} blocks.")
    kernels = rows.kernels
    sums = Accumulator(workspace, network.precision, kernels)
    weight = None if "weight" not in request.arrays else kernels.array(request.arrays["weight"])
    tracks = weight is not None and request.note["track"] and rows.codes is not None
    correct = 0

    steps = "step_gram" in ask
    start, kept = features.begin(memory.chain, goal - 1 if steps else goal)
    blocks = [block_of(block, network.precision) for block in added[max(start, 0) :]]
    passed = [block and block.on(kernels) for block in blocks]
    for span in rows.spans(network.width):
        targets = rows.weighted(span, rows.targets(span))
        current = features.start(span) if start < 0 else features.load(span)
        for layer, block in enumerate(passed, max(start, 0)):
            hidden = features.hidden(span, current, layer, kept, workspace)
            output = network.output(hidden, block)
            if steps and layer == goal - 1:
                weighted = rows.weighted(span, output)
                sums.add_product("step_feature", rows.weighted(span, current), weighted)
                sums.add_product("step_cross", weighted, targets)
                sums.add_product("step_gram", weighted)
            features.step(current, output, block, workspace)
        features.keep(span, current)
        phi = rows.weighted(span, current)
        if "gram" in ask:
            sums.add_level(phi, targets)
        if "anchor" in ask:
            sums.add_product("anchor", phi, rows.weighted(span, features.initial(span)))
        if "hidden_gram" in ask:
            hidden = rows.weighted(span, features.hidden(span, current, goal, kept, workspace))
            sums.add_product("hidden_gram", hidden)
            if "hidden_residual" in ask:
                sums.add_product("hidden_residual", hidden, targets - phi @ weight)
            if "hidden_feature" in ask:
                sums.add_product("hidden_feature", hidden, phi)
            if "hidden_cross" in ask:
                sums.add_product("hidden_cross", hidden, targets)
            if "hidden_initial" in ask:
                sums.add_product("hidden_initial", hidden, rows.weighted(span, features.initial(span)))
        if tracks:
            correct += rows.is_right(span, current @ weight)
    features.commit(memory.chain, goal, goal if "hidden_gram" in ask else -1)
    ahead = goal + 1 if "hidden_gram" in ask else goal
    if kernels is not NUMPY and ahead < features.layers and network.projection == "random":
        network.draw(ahead, kernels)  # a device makes the next projection while the server solves

    tracked = {"correct": correct, "tracked": len(rows)} if tracks else {}
    return sums.finish(rows=len(rows), **tracked)


def _layer_features(data: ClientData, memory: Memory) -> LayerFeatures:
    """This client's features for the run that the chain describes; new when the run is new."""
    parameters = memory.chain.opening["parameters"]
    rows = cached_rows(data, memory, parameters["precision"], memory.kernels)
    cached = memory.cache.get(KIND)
    if isinstance(cached, LayerFeatures) and cached.rows is rows:
        return cached
    check_projections(memory.chain)
    memory.cache.pop(KIND, None)
    network = Network.from_parameters(data.width, parameters)
    made = memory.cache[KIND] = LayerFeatures(rows, network, memory, parameters["layers"])
    return made


def block_of(block: Block, precision: str) -> Sandwich | None:
    """A block of the network; None where the transformation is the identity."""
    if not block.arrays:
        return None
    return Sandwich(*(block.arrays[side].astype(precision, copy=False) for side in ("left", "right")))


class LayerFeatures:
    """Phi (rows, width) of one client, at one layer, with F beside it where it fits.

    Both live where the rows' kernels compute while they fit there; else Phi lives in the host's memory, or in
    a file, and parts of it are carried to the device and back.
    """

    def __init__(self, rows: Rows, network: Network, memory: Memory, layers: int) -> None:
        count = len(rows)
        size = np.dtype(network.precision).itemsize * count
        self.rows = rows
        self.network = network
        self.layers = layers
        self._kernels = rows.kernels
        budget = self._kernels.budget(memory.budget)
        needed = size * network.width * (2 if network.keeps_initial else 1)
        kernels = self._kernels if needed <= budget else NUMPY
        in_memory = needed <= kernels.budget(memory.budget)
        shape = (count, network.width)
        self.phi = _allocate(shape, network.precision, in_memory, memory, kernels)
        self._initial: Array | None = None
        if network.keeps_initial:
            self._initial = _allocate(shape, network.precision, in_memory, memory, kernels)
        self._hidden: Array | None = None
        if kernels is self._kernels and needed + size * network.hidden_width <= budget:
            self._hidden = kernels.empty((count, network.hidden_width), network.precision)
        self._digest: str | None = None
        self._layer = -1
        self._hidden_layer = -1

    def begin(self, chain: Chain, latest: int) -> tuple[int, int]:
        """Start a pass over the rows: the layers at which Phi and F stand now, -1 for nowhere.

        Features of another model, or beyond the layer `latest`, start afresh. Until `commit` they
        count as unusable, so that a pass that fails half way is simply done again.
        """
        usable = self._digest in chain.digests and self._layer <= latest
        start, kept = (self._layer, self._hidden_layer) if usable else (-1, -1)
        self._layer = self._hidden_layer = -1
        return start, kept

    def commit(self, chain: Chain, layer: int, hidden_layer: int) -> None:
        """End a pass: Phi now stands at `layer` of this chain's model, F at `hidden_layer`."""
        self._digest = chain.digest
        self._layer = layer
        self._hidden_layer = hidden_layer if self._hidden is not None else -1

    def start(self, span: slice) -> Array:
        """Phi_0 of these rows, computed; `keep` it after changing it."""
        phi = self.load(span)
        self.network.zero(self.rows.features(span), out=phi)
        if self._initial is not None:
            self._initial[span] = phi if kernels_of(self._initial) is self._kernels else host(phi)
        return phi

    def load(self, span: slice) -> Array:
        """Phi of these rows where the kernels compute; `keep` it after changing it."""
        return self._kernels.array(self.phi[span])

    def keep(self, span: slice, phi: Array) -> None:
        """Keep the Phi of these rows, which `start` or `load` gave; nothing to do where it is a view."""
        if kernels_of(self.phi) is not self._kernels:
            self.phi[span] = host(phi)

    def initial(self, span: slice) -> Array:
        """Phi_0 of these rows, whatever the layer."""
        assert self._initial is not None
        return self._kernels.array(self._initial[span])

    def hidden(self, span: slice, phi: Array, layer: int, kept: int, workspace: Workspace) -> Array:
        """F_layer of these rows, whose Phi this is: the kept one if it is of that layer, else computed."""
        if self._hidden is not None:
            out = self._hidden[span]
            if kept == layer:
                return out
        else:
            out = self._scratch("hidden", (len(phi), self.network.hidden_width), workspace)
        initial = None if self._initial is None else self.initial(span)
        return self.network.hidden(layer, phi, initial, out)

    def step(self, phi: Array, output: Array, block: Sandwich | None, workspace: Workspace) -> None:
        """Take these rows, whose Phi this is, past a block whose output is P."""
        scratch = self._scratch("update", phi.shape, workspace) if self._kernels is NUMPY else None
        self.network.add(phi, output, block, scratch)

    def _scratch(self, name: str, shape: tuple[int, ...], workspace: Workspace) -> Array:
        if self._kernels is NUMPY:
            return workspace.array(name, shape, self.network.precision)
        return self._kernels.empty(shape, self.network.precision)


def _allocate(shape: tuple[int, int], dtype: str, in_memory: bool, memory: Memory, kernels: Kernels) -> Array:
    if in_memory:
        return kernels.empty(shape, dtype)
    # The file has no name, so nothing is left behind however the process ends.
    with tempfile.TemporaryFile(dir=memory.scratch, prefix="fedsolve-") as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
