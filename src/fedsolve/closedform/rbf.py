"""The Gaussian kernel k(x, z) = exp(-|x - z|² / h), and the preconditioner that landmarks alone give.

Rudi, Carratino and Rosasco, "FALKON", NeurIPS 2017. With K_MM + 1e-8 M I = TᵀT and AᵀA = (N/M) T Tᵀ + ridge I
(T, A upper triangles) the system of N rows becomes, in coordinates v with weights T^-1 A^-1 v,

    A^-T [T^-T (KᵀK) T^-1 + ridge I] A^-1 v = A^-T T^-T KᵀY,

which is near the identity because KᵀK is near (N/M) K_MM².
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.linalg import LinAlgError

from fedsolve.arrays import Array
from fedsolve.backends import kernels_of
from fedsolve.backends.blas import block_spans, cholesky_below
from fedsolve.errors import DataError

_JITTER = 1e-8


def row_side(rows: Array, bandwidth: float) -> Array:
    """[2x/h, 1, -|x|²/h] (rows, d + 2): its product with `landmark_side` is -|x - z|²/h."""
    kernels = kernels_of(rows)
    ones, squares = kernels.array(np.ones((len(rows), 1))), kernels.row_squares(rows)
    return kernels.beside(rows * (2.0 / bandwidth), ones, squares * (-1.0 / bandwidth))


def landmark_side(points: Array, bandwidth: float) -> Array:
    """[z, -|z|²/h, 1] (landmarks, d + 2)"""
    kernels = kernels_of(points)
    ones = kernels.array(np.ones((len(points), 1)))
    return kernels.beside(points, kernels.row_squares(points) * (-1.0 / bandwidth), ones)


def kernel(rows: Array, landmarks: Array, out: Array | None = None) -> Array:
    """K (rows, landmarks) from both sides."""
    return kernels_of(rows).exp_product(rows, landmarks, out)


def kernel_panels(points: Array, bandwidth: float) -> Callable[[slice], Array]:
    """Columns of K_MM + 1e-8 M I from their diagonal on down, made when they are asked for."""
    columns, across = landmark_side(points, bandwidth), row_side(points, bandwidth)
    here, jitter = kernels_of(points), _JITTER * len(points)

    def panel(span: slice) -> Array:
        made = kernel(across[span.start :], columns[span])
        here.add_diagonal(made[: span.stop - span.start], jitter)
        return made

    return panel


def kernel_root(points: Array, bandwidth: float) -> Array:
    """L with L Lᵀ = K_MM + 1e-8 M I (M, M), a lower triangle."""
    here = kernels_of(points)
    root = here.empty((len(points), len(points)))
    root[...] = 0.0
    blocks = cholesky_below(kernel_panels(points, bandwidth), root, here.triangle, here.triangle_solve)
    for span, block in zip(block_spans(len(root)), blocks, strict=True):
        root[span, span] = block
    return root


class LandmarkFactors:
    """T and A in one square of float64: Tᵀ below its diagonal, A above, blocks of the diagonal apart.

    Nothing else of their size is ever made, on the host or on a device. Blocks are lower triangles, those of
    A transposed.
    """

    def __init__(self, points: Array, bandwidth: float, ridge: float, rows: float) -> None:
        count, here = len(points), kernels_of(points)
        self._here = here
        self._square = here.empty((count, count))
        self._spans = block_spans(count)
        self._share, self._ridge = rows / count, ridge
        panels = kernel_panels(points, bandwidth)
        try:  # L = Tᵀ with L Lᵀ = K_MM + 1e-8 M I, column of blocks by column
            self._lower = cholesky_below(panels, self._square, here.triangle, here.triangle_solve)
        except LinAlgError:
            raise self._trouble("landmarks are not distinct to working precision") from None

    @cached_property
    def _upper(self) -> list[Array]:
        """A with AᵀA = share LᵀL + ridge I, row of blocks by row; not needed by a system solved at once."""
        square, share, ridge = self._square, self._share, self._ridge
        blocks: list[Array] = []
        for place, span in enumerate(self._spans):
            own = self._lower[place]
            for other, beside in zip(self._spans[place + 1 :], self._lower[place + 1 :], strict=True):
                product = square[other, span].T @ beside
                product += square[other.stop :, span].T @ square[other.stop :, other]
                square[span, other] = share * product
            below = square[span.stop :, span]
            block = share * (own.T @ own + below.T @ below)
            self._here.add_diagonal(block, ridge)
            above = square[: span.start, span]
            block -= above.T @ above
            factor = self._here.triangle(block)
            if factor is None:
                raise self._trouble(f"the ridge of {ridge:g} is lost in rounding; raise it")
            blocks.append(factor)
            if span.stop < len(square):
                panel = square[span, span.stop :] - above.T @ square[: span.start, span.stop :]
                square[span, span.stop :] = self._here.triangle_solve(factor, panel)
        return blocks

    def _trouble(self, why: str) -> DataError:
        return DataError(f"the system of {len(self._square)} landmarks cannot be factorised: {why}.")

    def weights(self, coordinates: Array) -> Array:
        """T^-1 A^-1 v: what multiplies kernels."""
        return self.from_features(self.inner(coordinates))

    def inner(self, coordinates: Array) -> Array:
        """A^-1 v"""
        blocks = self._upper
        return self._back(coordinates, blocks, lambda span: self._square[span, span.stop :])

    def outer(self, values: Array) -> Array:
        """A^-T values"""
        blocks = self._upper
        return self._forth(values, blocks, lambda span: self._square[: span.start, span].T)

    def from_features(self, values: Array) -> Array:
        """T^-1 values"""
        return self._back(values, self._lower, lambda span: self._square[span.stop :, span].T)

    def to_features(self, sums: Array) -> Array:
        """T^-T sums"""
        return self._forth(sums, self._lower, lambda span: self._square[span, : span.start])

    def _forth(self, values: Array, blocks: list[Array], left: Callable[[slice], Array]) -> Array:
        """Solve with a lower triangle; left: what of a row of blocks stands before its diagonal."""
        found = self._here.copy(values)
        for span, block in zip(self._spans, blocks, strict=True):
            found[span] -= left(span) @ found[: span.start]
            found[span] = self._here.triangle_solve(block, found[span])
        return found

    def _back(self, values: Array, blocks: list[Array], right: Callable[[slice], Array]) -> Array:
        """Solve with an upper triangle; right: what of a row of blocks stands after its diagonal."""
        found = self._here.copy(values)
        for span, block in zip(reversed(self._spans), reversed(blocks), strict=True):
            found[span] -= right(span) @ found[span.stop :]
            found[span] = self._here.triangle_solve(block, found[span], transposed=True)
        return found


def factor_bytes(landmarks: int, width: int, outputs: int) -> int:
    """What the server needs for so many landmarks: the square, both sides of a kernel, a few M x C."""
    return 8 * (landmarks * landmarks + 3 * landmarks * (width + 2) + 10 * landmarks * outputs)


def factor_operations(landmarks: int, width: int, outputs: int, steps: int = 12) -> float:
    """Multiplications and additions of the server: two factors and a product of triangles, kernels, steps."""
    solves = 4 * outputs * (steps + 1)
    return float(landmarks) ** 2 * (landmarks + 2 * width + solves)


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
    """Bytes that this process may still use, as Linux reports; None where the system does not say."""
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
