"""Landmarks of a kernel machine that are nobody's rows, drawn by seed from the Gaussians of the classes; and
the model that has weights on their kernels.

    z_j = mu_c + L n_j,   c = j mod C,   L Lᵀ = S_w + 1e-8 tr(S_w)/d I          S_w: covariance within classes

A client rebuilds them from the class means and the Cholesky factor L, which is unique and smooth in S_w
(eigenvectors would bring signs of their own). n_j are whole numbers times 2**-16, each the sum of twelve
uniform ones of 16 bits less its mean: variance 1, and the same bits on every machine. What two sides compare
is a hash of those whole numbers, not of products, whose last bits are the BLAS's own.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
from scipy.linalg import LinAlgError, cholesky

from fedsolve import version
from fedsolve.arrays import HALVES, Array, philox_normals
from fedsolve.backends import NUMPY, Kernels, host, kernels_on
from fedsolve.closedform.predictors import PREPARATION
from fedsolve.closedform.projections import check_agreement
from fedsolve.closedform.rbf import LandmarkKernel
from fedsolve.closedform.sums import chunks
from fedsolve.errors import DataError, ModelFileError
from fedsolve.federation.messages import Block, Chain, pack_triangle, unpack_triangle
from fedsolve.labels import labels_from_note
from fedsolve.model import Model
from fedsolve.tables.preparation import Preparation

_JITTER = 1e-8
_BLOCK = 1024

_lock = threading.Lock()
_shared: WeakValueDictionary[tuple[str, str], LandmarkKernel] = WeakValueDictionary()


@dataclass(frozen=True)
class Landmarks:
    """What the landmarks follow from, and the bandwidth h of their kernel.

    means: (Gaussians, d). factor: L (d, d). count: how many there are.
    """

    means: Array
    factor: Array
    count: int
    seed: int
    bandwidth: float = 1.0

    @classmethod
    def drawn(cls, means: Array, within: Array, count: int, seed: int, bandwidth: float = 1.0) -> Landmarks:
        """Landmarks about these means with this covariance."""
        size = float(np.trace(within)) / len(within)
        none = "all rows of a class are alike: there is no spread to draw landmarks from."
        if not size > 0:
            raise DataError(none)
        system = within.copy()
        system.flat[:: len(system) + 1] += _JITTER * size
        try:
            factor = np.asarray(cholesky(system, lower=True, check_finite=False))
        except LinAlgError:  # what there is of a spread is rounding
            raise DataError(none) from None
        return cls(means, factor, count, seed, bandwidth)

    def block(self) -> Block:
        """A block of the model so far; the factor travels as a triangle."""
        note = {"count": self.count, "seed": self.seed, "bandwidth": self.bandwidth}
        return Block({"landmarks": note}, {"means": self.means, "factor": pack_triangle(self.factor.T)})

    @classmethod
    def from_block(cls, block: Block) -> Landmarks:
        """The landmarks that `block` described."""
        means, factor = block.arrays["means"], np.tril(unpack_triangle(block.arrays["factor"]))
        return cls(means, factor, **block.note["landmarks"])

    def points(self, kernels: Kernels = NUMPY) -> Array:
        """Z (count, d), where these kernels compute."""
        width, points = self.means.shape[1], self.means[np.arange(self.count) % len(self.means)]
        if kernels is not NUMPY:
            placed, drawn = kernels.array(points), kernels.normals(_key(self.seed, width), points.size)
            placed += drawn.reshape(points.shape) @ kernels.array(self.factor).T
            return placed
        stream = np.random.Philox(key=_key(self.seed, width))
        for start in range(0, self.count, _BLOCK):
            some = slice(start, min(start + _BLOCK, self.count))
            drawn = philox_normals(stream, (some.stop - some.start) * width).reshape(-1, width)
            points[some] += drawn @ self.factor.T
        return points


def _key(seed: int, width: int) -> int:
    text = f"fedsolve landmarks {version.LANDMARKS}|{seed}|{width}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def landmark_agreement(seed: int) -> dict[str, Any]:
    """What two sides compare before they trust that they draw the same landmarks."""
    return {"landmark_scheme": version.LANDMARKS, "landmark_fingerprint": _fingerprint(seed)}


@lru_cache(maxsize=64)
def _fingerprint(seed: int) -> str:
    drawn = philox_normals(np.random.Philox(key=_key(seed, 7)), 63)
    numbers = (drawn * 2.0**16 + HALVES * 0xFFFF // 2).astype("<i8")
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:32]


def landmarks_in(chain: Chain) -> tuple[str, Landmarks] | None:
    """The landmarks of the model so far, with the digest of the chain up to them, if there are any."""
    for place, block in enumerate(chain.blocks):
        if "landmarks" in block.note:
            return chain.digests[place + 1], Landmarks.from_block(block)
    return None


def shared_kernel(digest: str, landmarks: Landmarks, kernels: Kernels) -> LandmarkKernel:
    """The kernel of a run's landmarks, which all clients of a process share while one of them keeps it."""
    with _lock:
        found = _shared.get((digest, kernels.device))
        if found is None:
            found = LandmarkKernel(landmarks.points(kernels), landmarks.bandwidth)
            _shared[digest, kernels.device] = found
        return found


@dataclass(eq=False, repr=False)
class KernelModel(Model):
    """Scores k(x, Z) weights + mean of the targets. Z is drawn again from what describes it.

    width: columns of `transform`.
    """

    family: ClassVar[str] = "kernel"

    landmarks: Landmarks
    weights: Array
    classes: Array | None
    preparation: Preparation
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        super().__init__(self.landmarks.means.shape[1], self.classes, self.weights.shape[1])
        self.width = self.landmarks.count
        self._made: tuple[str, LandmarkKernel] | None = None

    @property
    def kernel(self) -> LandmarkKernel:
        """The kernel of the landmarks, where the model computes."""
        if self._made is None or self._made[0] != self.device:
            points = self.landmarks.points(kernels_on(self.device))
            self._made = self.device, LandmarkKernel(points, self.landmarks.bandwidth)
        return self._made[1]

    def _kernels(self, features: Array) -> Iterator[tuple[slice, Array]]:
        """Spans of rows with their K (rows, landmarks), where the model computes."""
        here = kernels_on(self.device)
        for span in chunks(len(features), self.width, here):
            yield span, self.kernel.of(here.array(self.preparation.apply(features[span])))

    def scores(self, features: Array) -> Array:
        weights = kernels_on(self.device).array(self.weights)
        scores = np.empty((len(features), self.outputs))
        for span, kernels in self._kernels(features):
            scores[span] = host(kernels @ weights)
        return np.asarray(scores + self.preparation.target_mean)

    @property
    def column_moments(self) -> Preparation | None:
        """As for every model; where rows were only centred, with the spread that landmarks were drawn by."""
        known = super().column_moments
        if known is not None or self.preparing is not None:
            return known
        drawn = (self.landmarks.factor**2).sum(axis=1) + self.landmarks.means.var(axis=0)
        return Preparation(self.preparation.mean, np.sqrt(drawn))

    def whitening(self) -> Array:
        """T^-1 (landmarks, landmarks): what `transform` multiplies kernels by."""
        return host(self.kernel.features(kernels_on(self.device).array(np.eye(self.width))))

    def transform(self, features: Any) -> Array:
        """Φ (rows, landmarks): features whose inner products are nearly the kernel."""
        rows = self._checked(features)
        found = np.empty((len(rows), self.width))
        for span, kernels in self._kernels(rows):
            found[span] = host(self.kernel.features(kernels))
        return found

    def arrays(self) -> dict[str, Array]:
        drawn = self.landmarks.block().arrays
        return {"weights": self.weights, **drawn, **self.preparation.arrays(PREPARATION)}

    def note(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "landmarks": self.landmarks.count,
            "bandwidth": self.landmarks.bandwidth,
            **landmark_agreement(self.landmarks.seed),
        }

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> KernelModel:
        seed = note["parameters"]["seed"]
        check_agreement(landmark_agreement(seed), note, "landmarks of the model", ModelFileError)
        preparation = Preparation.from_arrays(arrays, PREPARATION)
        described = {"count": note["landmarks"], "seed": seed, "bandwidth": note["bandwidth"]}
        landmarks = Landmarks.from_block(Block({"landmarks": described}, arrays))
        classes = labels_from_note(note["classes"])
        return cls(landmarks, arrays["weights"], classes, preparation, note["parameters"])
