"""The layers of a DeepAFL network: how features are made, and a client's cache of them.

Phi lives in memory while it fits the participant's budget and in a mapped temporary file
otherwise; the hidden features F are kept between exchanges only if they fit as well. The cache
can always be rebuilt from the blocks.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import NUMPY, Kernels, host, kernels_of
from fedsolve.closedform.projections import Projection, projection
from fedsolve.closedform.solvers import Sandwich
from fedsolve.closedform.sums import Rows
from fedsolve.federation.messages import Chain
from fedsolve.federation.participant import Memory, Workspace


@dataclass(frozen=True)
class Network:
    """The fixed part of a DeepAFL network: everything but the solved blocks and classifiers."""

    features: int
    width: int
    hidden_width: int
    activation: str
    zero_activation: str
    gain: float
    block_input: str
    skip: bool
    projection: str
    transformation: str
    reconstruction: float
    precision: str
    seed: int
    bias: bool = True

    @classmethod
    def from_parameters(cls, features: int, parameters: dict[str, Any]) -> Network:
        known = {field.name for field in fields(cls)}
        chosen = {name: value for name, value in parameters.items() if name in known}
        if chosen["hidden_width"] is None:
            chosen["hidden_width"] = chosen["width"]
        return cls(features=features, **chosen)

    @property
    def keeps_initial(self) -> bool:
        """Whether Phi_0 is needed beyond the first layer."""
        return self.block_input == "initial" or self.reconstruction > 0

    def zero(self, inputs: Array, out: Array | None = None) -> Array:
        """Phi_0 = zero_activation(X A + a) (Eq. 10, which has no a: bias=False)."""
        kernels = kernels_of(inputs)
        return kernels.activate(self.zero_activation, self.first(kernels).apply(inputs, out))

    def first(self, kernels: Kernels = NUMPY) -> Projection:
        """The projection of layer 0."""
        shape = self.features, self.width
        return projection(self.seed, "zero", 0, *shape, 1.0, self.precision, kernels, self.bias)

    def hidden(self, layer: int, phi: Array, initial: Array | None, out: Array) -> Array:
        """F_t = activation(Phi B_t + b_t) (Eq. 14) of Phi_t, or of Phi_0 (Eq. 89); no B_t when "identity"."""
        kernels = kernels_of(out)
        source = initial if self.block_input == "initial" and initial is not None else phi
        if self.projection == "identity":
            out[...] = source
        else:
            self.draw(layer, kernels).apply(source, out)
        return kernels.activate(self.activation, out)

    def draw(self, layer: int, kernels: Kernels) -> Projection:
        """The projection of a block, made where the kernels compute and remembered for when it is applied."""
        shape = self.width, self.hidden_width
        return projection(self.seed, "hidden", layer, *shape, self.gain, self.precision, kernels, self.bias)

    def output(self, hidden: Array, block: Sandwich | None) -> Array:
        """P = F A, the block's output before Uᵀ; F itself where no transformation is solved."""
        return hidden if block is None else kernels_of(hidden).matmul(hidden, block.left)

    def add(self, phi: Array, output: Array, block: Sandwich | None, scratch: Array | None = None) -> None:
        """Phi_{t+1} = Phi_t + P Uᵀ in place (Eq. 19), without Phi_t when there is no skip."""
        kernels = kernels_of(phi)
        if block is None and self.skip:
            phi += output
        elif block is None:
            phi[...] = output
        elif self.skip:
            kernels.add_matmul(output, block.right.T, phi, scratch)
        else:
            kernels.matmul(output, block.right.T, phi)


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

    @property
    def mapped(self) -> bool:
        """Whether Phi did not fit the budget and lives in a file."""
        return isinstance(self.phi, np.memmap)

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
