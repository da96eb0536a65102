"""What KernelAFL gives: weights on the kernels between a row and the landmarks."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import solve_triangular

from fedsolve.closedform.landmarks import Landmarks, landmark_agreement
from fedsolve.closedform.moments import Preparation
from fedsolve.closedform.predictors import preparation_arrays, preparation_from
from fedsolve.closedform.rbf import kernel, kernel_root, landmark_side, row_side
from fedsolve.closedform.sums import chunks
from fedsolve.container import Array
from fedsolve.errors import ModelFileError
from fedsolve.federation.messages import pack_triangle
from fedsolve.labels import labels_from_note
from fedsolve.model import Model


class KernelModel(Model):
    """Scores k(x, Z) weights + mean of the targets. Z is drawn again from what describes it."""

    family: ClassVar[str] = "kernel"

    def __init__(
        self,
        landmarks: Landmarks,
        bandwidth: float,
        weights: Array,
        classes: Array | None,
        preparation: Preparation,
        parameters: dict[str, Any],
    ) -> None:
        super().__init__(landmarks.means.shape[1], classes, weights.shape[1])
        self.landmarks = landmarks
        self.bandwidth = bandwidth
        self.weights = weights
        self.preparation = preparation
        self.parameters = parameters

    @cached_property
    def _side(self) -> Array:
        return landmark_side(self.landmarks.points(), self.bandwidth)

    def scores(self, features: Array) -> Array:
        scores = np.empty((len(features), self.outputs))
        for span in chunks(len(features), self.landmarks.count):
            rows = row_side(self.preparation.apply(features[span]), self.bandwidth)
            scores[span] = kernel(rows, self._side) @ self.weights
        return np.asarray(scores + self.preparation.target_mean)

    @property
    def width(self) -> int:
        """Columns of `transform`."""
        return self.landmarks.count

    @cached_property
    def _root(self) -> Array:
        """L with L Lᵀ = K_MM + 1e-8 M I."""
        return kernel_root(self.landmarks.points(), self.bandwidth)

    def whitening(self) -> Array:
        """L^-T (landmarks, landmarks): what `transform` multiplies kernels by."""
        return np.asarray(solve_triangular(self._root, np.eye(self.width), lower=True, check_finite=False)).T

    def transform(self, features: Any) -> Array:
        """phi(x) = k(x, Z) L^-T (rows, landmarks): features whose inner products are nearly the kernel."""
        rows = self._checked(features)
        found = np.empty((len(rows), self.width))
        for span in chunks(len(rows), self.width):
            side = row_side(self.preparation.apply(rows[span]), self.bandwidth)
            found[span] = solve_triangular(
                self._root, kernel(side, self._side).T, lower=True, check_finite=False
            ).T
        return found

    def arrays(self) -> dict[str, Array]:
        return {
            "weights": self.weights,
            "means": self.landmarks.means,
            "factor": pack_triangle(self.landmarks.factor.T),
        } | preparation_arrays(self.preparation)

    def note(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "landmarks": self.landmarks.count,
            "bandwidth": self.bandwidth,
            **landmark_agreement(self.landmarks.seed),
        }

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> KernelModel:
        seed = note["parameters"]["seed"]
        mine = landmark_agreement(seed)
        stored = {name: note[name] for name in mine}
        if mine != stored:
            raise ModelFileError(
                f"the model's landmarks are {stored}, this fedsolve draws {mine}. "
                "Use the fedsolve version that wrote it."
            )
        preparation = preparation_from(arrays)
        assert preparation is not None
        return cls(
            Landmarks.from_arrays(arrays["means"], arrays["factor"], note["landmarks"], seed),
            note["bandwidth"],
            arrays["weights"],
            labels_from_note(note["classes"]),
            preparation,
            note["parameters"],
        )
