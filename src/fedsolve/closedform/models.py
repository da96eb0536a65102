"""The predictors that closed-form methods give: a linear one (AFL) and a deep one (DeepAFL)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from fedsolve.closedform.layers import Network
from fedsolve.closedform.moments import Preparation
from fedsolve.closedform.solvers import Sandwich
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.labels import labels_from_note
from fedsolve.model import Model

_PASS_BYTES = 128 << 20


class LinearModel(Model):
    """Scores x W + b, with weight (features, outputs) and intercept (outputs,)."""

    family: ClassVar[str] = "linear"

    def __init__(
        self,
        weight: Array,
        intercept: Array,
        classes: Array | None,
        preparation: Preparation | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(weight.shape[0], classes, weight.shape[1])
        self.weight = weight
        self.intercept = intercept
        self.preparation = preparation
        self.parameters = parameters or {}

    def _scores(self, features: Array) -> Array:
        if self.preparation is not None:
            features = self.preparation.apply(features)
        return np.asarray(features, dtype=np.float64) @ self.weight + self.intercept

    def _arrays(self) -> dict[str, Array]:
        return {"weight": self.weight, "intercept": self.intercept} | _preparation_arrays(self.preparation)

    def _note(self) -> dict[str, Any]:
        return {"parameters": self.parameters}

    @classmethod
    def _from(cls, arrays: dict[str, Array], note: dict[str, Any]) -> LinearModel:
        return cls(
            arrays["weight"],
            arrays["intercept"],
            labels_from_note(note["classes"]),
            _preparation_from(arrays),
            note["parameters"],
        )


class DeepModel(Model):
    """A residual network in thin form: T blocks Omega_t = left rightᵀ and T + 1 classifiers W_t.

    Every prediction may stop early: `layers=t` uses the first t blocks and W_t.
    """

    family: ClassVar[str] = "deep"

    def __init__(
        self,
        network: Network,
        classes: Array | None,
        outputs: int,
        classifiers: Sequence[Array],
        blocks: Sequence[Sandwich],
        preparation: Preparation | None = None,
        parameters: dict[str, Any] | None = None,
        risk: Array | None = None,
    ) -> None:
        super().__init__(network.features, classes, outputs)
        self.network = network
        self.classifiers = tuple(classifiers)
        self.blocks = tuple(blocks)
        self.preparation = preparation
        self.parameters = parameters or {}
        self.risk = risk if risk is not None else np.full(len(classifiers), np.nan)

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def decision_function(self, features: Any, layers: int | None = None) -> Array:
        """Scores (rows, outputs) after `layers` blocks, all of them when None."""
        last = self._depth(layers)
        checked = self._checked(features)
        scores = np.empty((len(checked), self.outputs))
        for span, stages in self._passes(checked, last):
            for layer, phi in enumerate(stages):
                if layer == last:
                    scores[span] = self._classify(phi, layer)
        return scores

    def predict(self, features: Any, layers: int | None = None) -> Array:
        """The class with the largest score (or the targets) after `layers` blocks."""
        return self._decide(self.decision_function(features, layers))

    def score(self, features: Any, labels: Any, layers: int | None = None) -> float:
        """Accuracy (or mean R²) after `layers` blocks."""
        return self._rate(self.predict(features, layers), labels)

    def staged_decision_function(self, features: Any) -> Array:
        """Scores after 0, 1, ..., T blocks: (T + 1, rows, outputs), in one pass."""
        checked = self._checked(features)
        scores = np.empty((self.layers + 1, len(checked), self.outputs))
        for span, stages in self._passes(checked, self.layers):
            for layer, phi in enumerate(stages):
                scores[layer, span] = self._classify(phi, layer)
        return scores

    def staged_predict(self, features: Any) -> Array:
        """Predictions after 0, 1, ..., T blocks, stacked."""
        return np.stack([self._decide(scores) for scores in self.staged_decision_function(features)])

    def staged_score(self, features: Any, labels: Any) -> Array:
        """Accuracy (or mean R²) after 0, 1, ..., T blocks: T + 1 numbers."""
        return np.array([self._rate(predicted, labels) for predicted in self.staged_predict(features)])

    def transform(self, features: Any, layers: int | None = None) -> Array:
        """The learned representation Phi (rows, width) after `layers` blocks."""
        last = self._depth(layers)
        checked = self._checked(features)
        out = np.empty((len(checked), self.network.width), dtype=self.network.precision)
        for span, stages in self._passes(checked, last):
            for layer, phi in enumerate(stages):
                if layer == last:
                    out[span] = phi
        return out

    def _scores(self, features: Array) -> Array:
        return self.decision_function(features)

    def _classify(self, phi: Array, layer: int) -> Array:
        scores = phi @ self.classifiers[layer]
        return scores if self.preparation is None else scores + self.preparation.target_mean

    def _depth(self, layers: int | None) -> int:
        if layers is None:
            return self.layers
        if not 0 <= layers <= self.layers:
            raise DataError(f"layers must lie between 0 and {self.layers}; got {layers}.")
        return layers

    def _passes(self, features: Array, last: int) -> Iterator[tuple[slice, Iterator[Array]]]:
        """Spans of rows with their features after 0, 1, ..., last blocks."""
        length = max(256, _PASS_BYTES // (8 * self.network.width))
        for index in range(math.ceil(len(features) / length)):
            span = slice(index * length, (index + 1) * length)
            yield span, self._stages(features[span], last)

    def _stages(self, features: Array, last: int) -> Iterator[Array]:
        network = self.network
        if self.preparation is not None:
            features = self.preparation.apply(features)
        phi = network.zero(np.ascontiguousarray(features, dtype=network.precision))
        initial = phi.copy() if network.block_input == "initial" else phi
        hidden = np.empty((len(phi), network.hidden_width), dtype=phi.dtype)
        yield phi
        for layer, block in enumerate(self.blocks[:last]):
            network.hidden(layer, initial, hidden)
            left, right = (m.astype(phi.dtype, copy=False) for m in (block.left, block.right))
            phi += (hidden @ left) @ right.T
            yield phi

    def _arrays(self) -> dict[str, Array]:
        arrays = {f"classifier.{t}": weight for t, weight in enumerate(self.classifiers)}
        for t, block in enumerate(self.blocks):
            arrays |= {f"left.{t}": block.left, f"right.{t}": block.right}
        return arrays | {"risk": self.risk} | _preparation_arrays(self.preparation)

    def _note(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "layers": self.layers}

    @classmethod
    def _from(cls, arrays: dict[str, Array], note: dict[str, Any]) -> DeepModel:
        layers = note["layers"]
        return cls(
            Network.from_parameters(note["features"], note["parameters"]),
            labels_from_note(note["classes"]),
            note["outputs"],
            [arrays[f"classifier.{t}"] for t in range(layers + 1)],
            [Sandwich(arrays[f"left.{t}"], arrays[f"right.{t}"]) for t in range(layers)],
            _preparation_from(arrays),
            note["parameters"],
            arrays["risk"],
        )


def _preparation_arrays(preparation: Preparation | None) -> dict[str, Array]:
    if preparation is None:
        return {}
    return {f"preparation.{name}": array for name, array in preparation.arrays().items()}


def _preparation_from(arrays: dict[str, Array]) -> Preparation | None:
    if "preparation.mean" not in arrays:
        return None
    prefix = "preparation."
    found = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    return Preparation.from_arrays(found)
