"""The predictors that closed-form methods give: a linear one (AFL) and a deep one (DeepAFL)."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import NUMPY, Kernels, host, kernels_of, kernels_on
from fedsolve.closedform.projections import Projection, check_model, projection, projection_agreement
from fedsolve.closedform.solvers import Sandwich
from fedsolve.container import with_prefix
from fedsolve.errors import DataError
from fedsolve.labels import labels_from_note
from fedsolve.model import Model, model_from_contents
from fedsolve.tables.preparation import Preparation

PREPARATION = "preparation."
"""How the names of arrays begin by which a model prepares rows."""

_PASS_BYTES = 128 << 20


@dataclass(eq=False, repr=False)
class LinearModel(Model):
    """Scores x W + b, with weight (features, outputs) and intercept (outputs,)."""

    family: ClassVar[str] = "linear"

    weight: Array
    intercept: Array
    classes: Array | None
    preparation: Preparation | None = None
    parameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.features, self.outputs = self.weight.shape
        self.parameters = self.parameters or {}

    def scores(self, features: Array) -> Array:
        here = kernels_on(self.device)
        weight, scores = here.array(self.weight), np.empty((len(features), self.outputs))
        length = len(features) if here is NUMPY else here.chunk_rows(self.features)
        for start in range(0, len(features), max(1, length)):
            rows = features[start : start + length]
            rows = rows if self.preparation is None else self.preparation.apply(rows)
            scores[start : start + length] = host(here.array(rows, np.float64) @ weight)
        return scores + self.intercept

    def plain(self) -> tuple[Array, Array]:
        """Weights (features, outputs) and intercepts for rows as they come: neither centred nor scaled."""
        if self.preparation is None:
            return self.weight, self.intercept
        weight = self.weight / self.preparation.scale[:, None]
        return weight, self.intercept - self.preparation.mean @ weight

    def arrays(self) -> dict[str, Array]:
        known = {} if self.preparation is None else self.preparation.arrays(PREPARATION)
        return {"weight": self.weight, "intercept": self.intercept, **known}

    def note(self) -> dict[str, Any]:
        return {"parameters": self.parameters}

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> Self:
        prepared = any(name.startswith(PREPARATION) for name in arrays)
        preparation = Preparation.from_arrays(arrays, PREPARATION) if prepared else None
        classes = labels_from_note(note["classes"])
        return cls(arrays["weight"], arrays["intercept"], classes, preparation, note["parameters"])


@dataclass(eq=False, repr=False)
class SoftmaxModel(LinearModel):
    """Logits x W + b and their softmax.

    base: the model whose representation the weights belong to.
    """

    family: ClassVar[str] = "softmax"
    logits = True

    base: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.features = len(self.weight) if self.base is None else self.base.features

    def scores(self, features: Array) -> Array:
        if self.base is not None:
            features = self.base.placed(self.device).transform(features)
        return super().scores(features)

    @property
    def column_moments(self) -> Preparation | None:
        """As for every model: of the columns that come in, not of a representation of them."""
        if self.base is None or self.preparing is not None:
            return super().column_moments
        found: Preparation | None = self.base.column_moments
        return found

    def arrays(self) -> dict[str, Array]:
        base = {} if self.base is None else self.base.contents()[0]
        return super().arrays() | {f"base.{name}": array for name, array in base.items()}

    def note(self) -> dict[str, Any]:
        return super().note() | ({} if self.base is None else {"base": self.base.contents()[1]})

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> Self:
        model = super().restored(arrays, note)
        if "base" in note:
            model.base = model_from_contents(with_prefix(arrays, "base."), note["base"])
            model.features = note["features"]
        return model


class StagedModel(Model):
    """A model that has a classifier W_t after every layer t = 0, ..., T and can stop at any of them.

    Subclasses give the features after each layer (`_stages`); every prediction may stop early:
    `layers=t` uses the first t layers and W_t.
    """

    width: int
    precision: str = "float64"
    classifiers: Sequence[Array]
    parameters: dict[str, Any]
    preparation: Preparation | None

    def agreement(self) -> dict[str, Any]:
        """Scheme and fingerprint of the random projections that the weights belong to."""
        return projection_agreement(self.parameters["seed"])

    def arrays(self) -> dict[str, Array]:
        return {f"classifier.{t}": weight for t, weight in enumerate(self.classifiers)}

    def note(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "layers": self.layers} | self.agreement()

    @abstractmethod
    def _stages(self, features: Array, last: int) -> Iterator[Array]:
        """Features (rows, width) after 0, 1, ..., last layers; each may be overwritten by the next."""

    @property
    def layers(self) -> int:
        return len(self.classifiers) - 1

    def decision_function(self, features: Any, layers: int | None = None) -> Array:
        """Scores (rows, outputs) after `layers` layers, all of them when None."""
        last, checked = self._depth(layers), self._checked(features)
        scores = np.empty((len(checked), self.outputs))
        for span, layer, phi in self._passes(checked, last):
            if layer == last:
                scores[span] = self._classify(phi, layer)
        return scores

    def stopped(self, layers: int) -> Self:
        """The model that stops after `layers` layers, of which rows held out have told nothing."""
        short = copy.copy(self)
        short.classifiers = self.classifiers[: self._depth(layers) + 1]
        short.calibration = short.spread = None
        return short

    def predict(self, features: Any, layers: int | None = None) -> Array:
        """The class with the largest score (or the targets) after `layers` layers."""
        return self.decided(self.decision_function(features, layers), layers in (None, self.layers))

    def score(self, features: Any, labels: Any, layers: int | None = None) -> float:
        """Accuracy (or mean R²) after `layers` layers."""
        return self._rate(self.predict(features, layers), labels)

    def staged_decision_function(self, features: Any) -> Array:
        """Scores after 0, 1, ..., T layers: (T + 1, rows, outputs), in one pass."""
        checked = self._checked(features)
        scores = np.empty((self.layers + 1, len(checked), self.outputs))
        for span, layer, phi in self._passes(checked, self.layers):
            scores[layer, span] = self._classify(phi, layer)
        return scores

    def staged_predict(self, features: Any) -> Array:
        """Predictions after 0, 1, ..., T layers, stacked."""
        stages = enumerate(self.staged_decision_function(features))
        return np.stack([self.decided(scores, layer == self.layers) for layer, scores in stages])

    def staged_score(self, features: Any, labels: Any) -> Array:
        """Accuracy (or mean R²) after 0, 1, ..., T layers: T + 1 numbers."""
        return np.array([self._rate(predicted, labels) for predicted in self.staged_predict(features)])

    def transform(self, features: Any, layers: int | None = None) -> Array:
        """The learned representation Phi (rows, width) after `layers` layers."""
        last, checked = self._depth(layers), self._checked(features)
        out = np.empty((len(checked), self.width), dtype=self.precision)
        for span, layer, phi in self._passes(checked, last):
            if layer == last:
                out[span] = host(phi)
        return out

    def stages(self, features: Any) -> Iterator[tuple[Array, Array]]:
        """Features (rows, width) and scores (rows, outputs) after 0, 1, ..., T layers, all rows at once.

        The features of a stage may be overwritten by the next; copy what is to be kept.
        """
        for layer, phi in enumerate(self._stages(self._checked(features), self.layers)):
            yield phi, self._classify(phi, layer)

    def scores(self, features: Array) -> Array:
        return self.decision_function(features)

    def _classify(self, phi: Array, layer: int) -> Array:
        here = kernels_of(phi)
        if here is not NUMPY:  # torch multiplies arrays of one type only
            phi = here.array(phi, np.float64)
        scores = host(phi @ here.array(self.classifiers[layer]))
        return scores if self.preparation is None else scores + self.preparation.target_mean

    def _depth(self, layers: int | None) -> int:
        if layers is None:
            return self.layers
        if not 0 <= layers <= self.layers:
            raise DataError(f"layers must lie between 0 and {self.layers}; got {layers}.")
        return layers

    def _passes(self, features: Array, last: int) -> Iterator[tuple[slice, int, Array]]:
        """Spans of rows, each after 0, 1, ..., last layers: span, layer and features."""
        length = max(256, _PASS_BYTES // (8 * self.width))
        for start in range(0, len(features), length):
            span = slice(start, start + length)
            for layer, phi in enumerate(self._stages(features[span], last)):
                yield span, layer, phi


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
    reconstruction: float
    precision: str
    seed: int
    bias: bool = True

    @classmethod
    def from_parameters(cls, features: int, parameters: dict[str, Any]) -> Network:
        chosen = {part.name: parameters[part.name] for part in fields(cls) if part.name in parameters}
        chosen["hidden_width"] = chosen["hidden_width"] or chosen["width"]
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


@dataclass(eq=False, repr=False)
class DeepModel(StagedModel):
    """A residual network in thin form: T blocks Omega_t = left rightᵀ and T + 1 classifiers W_t."""

    family: ClassVar[str] = "deep"

    network: Network
    classes: Array | None
    outputs: int
    classifiers: Sequence[Array]
    blocks: Sequence[Sandwich | None]
    preparation: Preparation | None
    parameters: dict[str, Any]
    risk: Array

    def __post_init__(self) -> None:
        super().__init__(self.network.features, self.classes, self.outputs)
        self.width, self.precision = self.network.width, self.network.precision
        self.classifiers, self.blocks = tuple(self.classifiers), tuple(self.blocks)

    def _stages(self, features: Array, last: int) -> Iterator[Array]:
        network = self.network
        if self.preparation is not None:
            features = self.preparation.apply(features)
        here = kernels_on(self.device)
        phi = network.zero(here.array(np.ascontiguousarray(features, dtype=network.precision)))
        initial = here.copy(phi) if network.keeps_initial else None
        hidden = here.empty((len(phi), network.hidden_width), network.precision)
        scratch = here.empty(phi.shape, network.precision)
        yield phi
        for layer, block in enumerate(self.blocks[:last]):
            network.hidden(layer, phi, initial, hidden)
            if block is not None:
                block = block.astype(network.precision).on(here)
            network.add(phi, network.output(hidden, block), block, scratch)
            yield phi

    def shortened(self, layers: int) -> DeepModel:
        """The model of the first layers."""
        short = copy.copy(self)
        short.classifiers, short.risk = self.classifiers[: layers + 1], self.risk[: layers + 1]
        short.blocks = self.blocks[:layers]
        return short

    def arrays(self) -> dict[str, Array]:
        arrays = super().arrays() | {"risk": self.risk}
        if self.preparation is not None:
            arrays |= self.preparation.arrays(PREPARATION)
        for t, block in enumerate(self.blocks):
            if block is not None:
                arrays |= {f"left.{t}": block.left, f"right.{t}": block.right}
        return arrays

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> DeepModel:
        check_model(note)
        layers, parameters = note["layers"], note["parameters"]
        prepared = any(name.startswith(PREPARATION) for name in arrays)
        preparation = Preparation.from_arrays(arrays, PREPARATION) if prepared else None
        network = Network.from_parameters(note["features"], parameters)
        known = labels_from_note(note["classes"]), note["outputs"]
        classifiers = [arrays[f"classifier.{t}"] for t in range(layers + 1)]
        blocks: list[Sandwich | None] = [None] * layers
        if parameters["transformation"] != "identity":
            blocks = [Sandwich(arrays[f"left.{t}"], arrays[f"right.{t}"]) for t in range(layers)]
        return cls(network, *known, classifiers, blocks, preparation, parameters, arrays["risk"])
