"""A client's features at the current layer: a cache that can always be rebuilt from the blocks.

Phi lives in memory while it fits the participant's budget and in a mapped temporary file
otherwise; the hidden features F are kept between exchanges only if they fit as well.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.closedform.activations import activate
from fedsolve.closedform.projections import projection
from fedsolve.closedform.solvers import Sandwich
from fedsolve.closedform.statistics import Rows
from fedsolve.container import Array
from fedsolve.federation.messages import Chain
from fedsolve.federation.participant import Memory
from fedsolve.federation.workspace import Workspace


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
    precision: str
    seed: int

    @classmethod
    def from_parameters(cls, features: int, parameters: dict[str, Any]) -> Network:
        width = parameters["width"]
        return cls(
            features=features,
            width=width,
            hidden_width=width if parameters["hidden_width"] is None else parameters["hidden_width"],
            **{n: parameters[n] for n in ("activation", "zero_activation", "gain")},
            **{n: parameters[n] for n in ("block_input", "precision", "seed")},
        )

    def zero(self, inputs: Array, out: Array | None = None) -> Array:
        """Phi_0 = zero_activation(X A + a) (Eq. 10)."""
        first = projection(self.seed, "zero", 0, self.features, self.width, 1.0, self.precision)
        return activate(self.zero_activation, first.apply(inputs, out))

    def hidden(self, layer: int, source: Array, out: Array | None = None) -> Array:
        """F_t = activation(Phi B_t + b_t) (Eq. 14); source is Phi_t, or Phi_0 for block_input "initial"."""
        block = projection(
            self.seed, "hidden", layer, self.width, self.hidden_width, self.gain, self.precision
        )
        return activate(self.activation, block.apply(source, out))


class LayerFeatures:
    """Phi (rows, width) of one client, at one layer, with F beside it where it fits."""

    def __init__(self, rows: Rows, network: Network, memory: Memory) -> None:
        count = len(rows)
        size = np.dtype(network.precision).itemsize * count
        self.rows = rows
        self.network = network
        keeps_initial = network.block_input == "initial"
        needed = size * network.width * (2 if keeps_initial else 1)
        in_memory = needed <= memory.budget
        shape = (count, network.width)
        self.phi = _allocate(shape, network.precision, in_memory, memory)
        self._initial = _allocate(shape, network.precision, in_memory, memory) if keeps_initial else None
        self._hidden: Array | None = None
        if in_memory and needed + size * network.hidden_width <= memory.budget:
            self._hidden = np.empty((count, network.hidden_width), dtype=network.precision)
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

    def start(self, span: slice) -> None:
        """Phi_0 of these rows."""
        self.network.zero(self.rows.features(span), out=self.phi[span])
        if self._initial is not None:
            self._initial[span] = self.phi[span]

    def hidden(self, span: slice, layer: int, kept: int, workspace: Workspace) -> Array:
        """F_layer of these rows: the kept one if it is of that layer, else computed."""
        if self._hidden is not None:
            out = self._hidden[span]
            if kept == layer:
                return out
        else:
            out = workspace.array(
                "hidden", (span.stop - span.start, self.network.hidden_width), self.phi.dtype
            )
        source = self.phi if self._initial is None else self._initial
        return self.network.hidden(layer, source[span], out)

    def step(self, span: slice, output: Array, block: Sandwich, workspace: Workspace) -> None:
        """Phi += P Uᵀ, with P = F A of these rows."""
        phi = self.phi[span]
        update = workspace.array("update", phi.shape, phi.dtype)
        phi += np.matmul(output, block.right.T, out=update)


def _allocate(shape: tuple[int, int], dtype: str, in_memory: bool, memory: Memory) -> Array:
    if in_memory:
        return np.empty(shape, dtype=dtype)
    # The file has no name, so nothing is left behind however the process ends.
    with tempfile.TemporaryFile(dir=memory.scratch_folder(), prefix="fedsolve-") as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
