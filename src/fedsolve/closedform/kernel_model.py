"""What KernelAFL gives: weights on the kernels between a row and the landmarks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import kernels_on
from fedsolve.closedform.landmarks import Landmarks, landmark_agreement
from fedsolve.closedform.predictors import preparation_arrays, preparation_from
from fedsolve.closedform.projections import check_agreement
from fedsolve.closedform.rbf import kernel, kernel_root, landmark_side, row_side
from fedsolve.closedform.sums import chunks
from fedsolve.errors import ModelFileError
from fedsolve.federation.messages import pack_triangle
from fedsolve.labels import labels_from_note
from fedsolve.model import Model
from fedsolve.tables.preparation import Preparation


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
        self._sided: tuple[str, Array] | None = None
        self._rooted: tuple[str, Array] | None = None

    def _side(self) -> Array:
        """The landmarks' side of kernels, where the model computes."""
        if self._sided is None or self._sided[0] != self.device:
            points = self.landmarks.points(kernels_on(self.device))
            self._sided = self.device, landmark_side(points, self.bandwidth)
        return self._sided[1]

    def scores(self, features: Array) -> Array:
        here, side = kernels_on(self.device), self._side()
        weights = here.array(self.weights)
        scores = np.empty((len(features), self.outputs))
        for span in chunks(len(features), self.landmarks.count, here):
            rows = row_side(here.array(self.preparation.apply(features[span])), self.bandwidth)
            scores[span] = here.host(kernel(rows, side) @ weights)
        return np.asarray(scores + self.preparation.target_mean)

    @property
    def column_moments(self) -> Preparation | None:
        """As for every model; where rows were only centred, with the spread that landmarks were drawn by."""
        known = super().column_moments
        if known is not None or self.preparing is not None:
            return known
        drawn = (self.landmarks.factor**2).sum(axis=1) + self.landmarks.means.var(axis=0)
        return Preparation(self.preparation.mean, np.sqrt(drawn))

    @property
    def width(self) -> int:
        """Columns of `transform`."""
        return self.landmarks.count

    def _root(self) -> Array:
        """L with L Lᵀ = K_MM + 1e-8 M I, where the model computes."""
        if self._rooted is None or self._rooted[0] != self.device:
            points = self.landmarks.points(kernels_on(self.device))
            self._rooted = self.device, kernel_root(points, self.bandwidth)
        return self._rooted[1]

    def whitening(self) -> Array:
        """L^-T (landmarks, landmarks): what `transform` multiplies kernels by."""
        here = kernels_on(self.device)
        return here.host(here.triangle_solve(self._root(), here.array(np.eye(self.width)))).T

    def transform(self, features: Any) -> Array:
        """phi(x) = k(x, Z) L^-T (rows, landmarks): features whose inner products are nearly the kernel."""
        rows = self._checked(features)
        here, found = kernels_on(self.device), np.empty((len(rows), self.width))
        for span in chunks(len(rows), self.width, here):
            side = row_side(here.array(self.preparation.apply(rows[span])), self.bandwidth)
            found[span] = here.host(here.triangle_solve(self._root(), kernel(side, self._side()).T).T)
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
        check_agreement(landmark_agreement(seed), note, "landmarks of the model", ModelFileError)
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
