"""The model a gradient method gives: a network by name, with its weights and running statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from fedsolve.container import Array, with_prefix
from fedsolve.gradient import networks
from fedsolve.model import Model

_ROWS = 2048


class GradientModel(Model):
    """A classifier whose scores are a network's logits.

    device: where predictions are computed; "cpu" unless set.
    """

    family: ClassVar[str] = "gradient"

    def __init__(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        classes: Array | None,
        features: int,
        parameters: Mapping[str, Any],
    ) -> None:
        assert classes is not None
        self.weights = dict(weights)
        self.buffers = dict(buffers)
        self.classes = classes
        self.features = features
        self.outputs = len(classes)
        self.parameters = dict(parameters)
        self.device = "cpu"

    def network(self) -> Any:
        """The torch module with this model's weights, in eval mode."""
        import torch

        from fedsolve.gradient.learners import load

        parameters = self.parameters
        network = networks.build_network(
            parameters["network"],
            self.features,
            self.outputs,
            dtype=parameters["precision"],
            shape=self._shape(),
        )
        held = ({n: torch.as_tensor(a) for n, a in part.items()} for part in (self.weights, self.buffers))
        load(network, *held)
        return network.eval().to(self.device)

    def representation(self, features: Any) -> tuple[Array, Array]:
        """The input of the last layer (rows, width), and the scores."""
        passes = list(self._passes(self._checked(features)))
        if not passes:
            return np.zeros((0, 0)), np.zeros((0, self.outputs))
        return np.concatenate([seen for seen, _ in passes]), np.concatenate([scores for _, scores in passes])

    def _passes(self, rows: Array) -> Iterator[tuple[Array, Array]]:
        """Features of the last layer and scores, some thousand rows at a time."""
        import torch

        network = self.network()
        shape = networks.input_shape(self.parameters["network"], self.features, self._shape())
        dtype = getattr(torch, self.parameters["precision"])
        for start in range(0, len(rows), _ROWS):
            # A copy: stored features are mapped read-only, and torch wants to write.
            part = torch.from_numpy(np.array(rows[start : start + _ROWS])).to(self.device)
            with torch.no_grad():
                seen, scores = networks.features_of(network, networks.as_inputs(part, shape, dtype))
            yield seen.double().cpu().numpy(), scores.double().cpu().numpy()

    def _shape(self) -> list[int] | None:
        shape = self.parameters["shape"]
        return None if shape is None else [int(size) for size in shape.split(",")]

    def _scores(self, features: Array) -> Array:
        return np.concatenate(
            [np.zeros((0, self.outputs)), *(scores for _, scores in self._passes(features))]
        )

    def _arrays(self) -> dict[str, Array]:
        named = {f"weights.{name}": array for name, array in self.weights.items()}
        return named | {f"buffers.{name}": array for name, array in self.buffers.items()}

    def _note(self) -> dict[str, Any]:
        return {"parameters": self.parameters}

    @classmethod
    def _from(cls, arrays: dict[str, Array], note: dict[str, Any]) -> GradientModel:
        from fedsolve.labels import labels_from_note

        return cls(
            with_prefix(arrays, "weights."),
            with_prefix(arrays, "buffers."),
            labels_from_note(note["classes"]),
            note["features"],
            note["parameters"],
        )
