"""Landmarks of a kernel machine that are nobody's rows: drawn by seed from the Gaussians of the classes.

    z_j = mu_c + L n_j,   c = j mod C,   L Lᵀ = S_w + 1e-8 tr(S_w)/d I          S_w: covariance within classes

A client rebuilds them from the class means and the Cholesky factor L, which is unique and smooth in S_w
(eigenvectors would bring signs of their own). n_j are whole numbers times 2**-16, each the sum of twelve
uniform ones of 16 bits less its mean: variance 1, and the same bits on every machine. What two sides compare
is a hash of those whole numbers, not of products, whose last bits are the BLAS's own.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, cholesky

from fedsolve import version
from fedsolve.arrays import HALVES, Array, philox_normals
from fedsolve.backends import NUMPY, Kernels
from fedsolve.closedform.projections import check_agreement
from fedsolve.closedform.rbf import landmark_side
from fedsolve.errors import DataError
from fedsolve.federation.messages import Block, Chain, pack_triangle, unpack_triangle

_JITTER = 1e-8
_BLOCK = 1024

_SMALL = 1 << 18
_SIDES_BYTES = 64 << 20

_lock = threading.Lock()
_sides: dict[tuple[str, str], Array] = {}


@dataclass(frozen=True)
class Landmarks:
    """What the landmarks follow from: means (Gaussians, d), factor L (d, d), how many, and the seed."""

    means: Array
    factor: Array
    count: int
    seed: int

    @classmethod
    def drawn(cls, means: Array, within: Array, count: int, seed: int) -> Landmarks:
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
        return cls(means, factor, count, seed)

    def block(self, note: dict[str, Any]) -> Block:
        """A block of the model so far; the factor travels as a triangle."""
        return Block(
            {"landmarks": {"count": self.count, "seed": self.seed} | note},
            {"means": self.means, "factor": pack_triangle(self.factor.T)},
        )

    @classmethod
    def from_block(cls, block: Block) -> Landmarks:
        """The landmarks that `block` described."""
        note = block.note["landmarks"]
        return cls.from_arrays(block.arrays["means"], block.arrays["factor"], note["count"], note["seed"])

    @classmethod
    def from_arrays(cls, means: Array, packed: Array, count: int, seed: int) -> Landmarks:
        return cls(means, np.tril(unpack_triangle(packed)), count, seed)

    def points(self, kernels: Kernels = NUMPY) -> Array:
        """Z (count, d), where these kernels compute."""
        width = self.means.shape[1]
        if kernels is not NUMPY:
            means = kernels.array(self.means[np.arange(self.count) % len(self.means)])
            drawn = kernels.normals(_key(self.seed, width), self.count * width).reshape(self.count, width)
            means += drawn @ kernels.array(self.factor).T
            return means
        points = self.means[np.arange(self.count) % len(self.means)]
        if self.count <= _BLOCK and self.count * width <= _SMALL:
            points += _small_draw(self.seed, self.count, width) @ self.factor.T
            return points
        stream = np.random.Philox(key=_key(self.seed, width))
        for start in range(0, self.count, _BLOCK):
            some = slice(start, min(start + _BLOCK, self.count))
            points[some] += normals(stream, some.stop - some.start, width) @ self.factor.T
        return points


def normals(stream: np.random.Philox, rows: int, columns: int) -> Array:
    """The next numbers of a stream, (rows, columns), nearly normal with mean 0 and variance 1."""
    return philox_normals(stream, rows * columns).reshape(rows, columns)


@lru_cache(maxsize=8)
def _small_draw(seed: int, rows: int, columns: int) -> Array:
    """The first normals of a stream, remembered: many small machines that are compared begin with them."""
    return normals(np.random.Philox(key=_key(seed, columns)), rows, columns)


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


def check_landmarks(opening: dict[str, Any]) -> None:
    """Refuse a run whose landmarks this participant would draw otherwise."""
    check_agreement(landmark_agreement(opening["parameters"]["seed"]), opening, "landmarks")


def landmark_block(chain: Chain) -> int:
    """Where the model so far describes its landmarks."""
    return next(place for place, block in enumerate(chain.blocks) if "landmarks" in block.note)


def shared_side(chain: Chain, kernels: Kernels = NUMPY) -> Array:
    """The landmarks' side of every kernel of a run, shared by all clients of a process while it is in use.

    The latest is kept, and others as far as all of them are small.
    """
    place = landmark_block(chain)
    digest, block = (chain.digests[place + 1], kernels.device), chain.blocks[place]
    with _lock:
        side = _sides.pop(digest, None)
        if side is None:
            width = block.arrays["means"].shape[1] + 2
            room = _SIDES_BYTES - 8 * width * int(block.note["landmarks"]["count"])
            while _sides and sum(each.nbytes for each in _sides.values()) > room:
                del _sides[next(iter(_sides))]  # the one not used for longest, before the next is made
            points = Landmarks.from_block(block).points(kernels)
            side = landmark_side(points, block.note["landmarks"]["bandwidth"])
        _sides[digest] = side
        return side
