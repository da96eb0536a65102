"""The Gaussian kernel k(x, z) = exp(-|x - z|² / h), and the preconditioner that landmarks alone give.

Rudi, Carratino and Rosasco, "FALKON", NeurIPS 2017. With K_MM + 1e-8 M I = TᵀT and AᵀA = (N/M) T Tᵀ + ridge I
(T, A upper triangles) the system of N rows becomes, in coordinates v with weights T^-1 A^-1 v,

    A^-T [T^-T (KᵀK) T^-1 + ridge I] A^-1 v = A^-T T^-T KᵀY,

which is near the identity because KᵀK is near (N/M) K_MM².
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.linalg.blas import dtrsm
from scipy.linalg.lapack import dlauum, dpotrf

from fedsolve.container import Array
from fedsolve.errors import DataError

_JITTER = 1e-8
_BLOCK = 1024


def row_side(rows: Array, bandwidth: float) -> Array:
    """[2x/h, 1, -|x|²/h] (rows, d + 2): its product with `landmark_side` is -|x - z|²/h."""
    squares = np.einsum("ij,ij->i", rows, rows)[:, None]
    return np.hstack([rows * (2.0 / bandwidth), np.ones((len(rows), 1)), squares * (-1.0 / bandwidth)])


def landmark_side(points: Array, bandwidth: float) -> Array:
    """[z, -|z|²/h, 1] (landmarks, d + 2)"""
    squares = np.einsum("ij,ij->i", points, points)[:, None]
    return np.hstack([points, squares * (-1.0 / bandwidth), np.ones((len(points), 1))])


def kernel(rows: Array, landmarks: Array, out: Array | None = None) -> Array:
    """K (rows, landmarks) from both sides."""
    out = np.matmul(rows, landmarks.T, out=out)
    return np.asarray(np.exp(out, out=out))


class LandmarkFactors:
    """T and A in one square of float64: A in the upper triangle, T in the lower, its diagonal apart.

    T = D T1 with T1 of unit diagonal, so that both triangles fit; nothing else of their size is ever made.
    """

    def __init__(self, points: Array, bandwidth: float, ridge: float, rows: float) -> None:
        count = len(points)
        square = np.empty((count, count), order="F")
        self._square = square
        columns, across = landmark_side(points, bandwidth), row_side(points, bandwidth)
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            # Written as the transpose of a C-ordered product: the square is Fortran's.
            square[:stop, start:stop] = kernel(across[start:stop], columns[:stop]).T
        del columns, across
        square.flat[:: count + 1] += _JITTER * count
        self._cholesky("the landmarks are not distinct to working precision")
        self._scale = square.diagonal().copy()
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            corner = np.triu(square[start:stop, start:stop], 1) / self._scale[start:stop, None]
            square[start:stop, start:stop] += corner.T - np.tril(square[start:stop, start:stop], -1)
            square[stop:, start:stop] = (square[start:stop, stop:] / self._scale[start:stop, None]).T
        _, info = dlauum(square, lower=0, overwrite_c=1)
        assert info == 0
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            square[:start, start:stop] *= rows / count
            inside = square[start:stop, start:stop]
            inside[np.triu_indices(stop - start)] *= rows / count
        square.flat[:: count + 1] += ridge
        self._cholesky(f"the ridge of {ridge:g} is lost in rounding; raise it")

    def _cholesky(self, trouble: str) -> None:
        _, info = dpotrf(self._square, lower=0, clean=0, overwrite_a=1)
        if info:
            raise DataError(f"the system of {len(self._square)} landmarks cannot be factorised: {trouble}.")

    # Results are C-ordered whatever LAPACK likes, so that a resumed run adds numbers in the same order.

    def weights(self, coordinates: Array) -> Array:
        """T^-1 A^-1 v: what multiplies kernels."""
        return self.from_features(self.inner(coordinates))

    def inner(self, coordinates: Array) -> Array:
        """A^-1 v"""
        return np.ascontiguousarray(dtrsm(1.0, self._square, coordinates, lower=0))

    def outer(self, values: Array) -> Array:
        """A^-T values"""
        return np.ascontiguousarray(dtrsm(1.0, self._square, values, lower=0, trans_a=1))

    def from_features(self, values: Array) -> Array:
        """T^-1 values"""
        scaled = values / self._scale[:, None]
        return np.ascontiguousarray(dtrsm(1.0, self._square, scaled, lower=1, trans_a=1, diag=1))

    def to_features(self, sums: Array) -> Array:
        """T^-T sums"""
        return np.ascontiguousarray(dtrsm(1.0, self._square, sums, lower=1, diag=1) / self._scale[:, None])


def factor_bytes(landmarks: int, width: int, outputs: int) -> int:
    """What the server needs for so many landmarks: the square, both sides of a kernel, a few M x C."""
    return 8 * (landmarks * landmarks + 3 * landmarks * (width + 2) + 10 * landmarks * outputs)


def check_memory(landmarks: int, width: int, outputs: int, available: int | None) -> None:
    """Refuse more landmarks than the server has memory for, naming how many fit."""
    needed = factor_bytes(landmarks, width, outputs)
    if available is None or needed <= available:
        return
    fit = landmarks
    while fit > 1 and factor_bytes(fit, width, outputs) > available:
        fit = fit * 15 // 16
    raise DataError(
        f"{landmarks} landmarks need {needed / 1e9:.1f} GB at the server, and {available / 1e9:.1f} GB are "
        f"free. Set landmarks={fit}, which fits, or run the server on a larger machine."
    )


def available_memory() -> int | None:
    """Bytes that this process may still take, as Linux tells; None where nobody tells."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        found += [] if limit == "max" else [max(0, int(limit) - used)]
    except (OSError, ValueError):
        pass
    return min(found, default=None)
