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


class LandmarkKernel:
    """k(x, z) of rows and landmarks (M, d), where these lie.

    [2x/h, 1, -|x|²/h] is a row's side and [z, -|z|²/h, 1] a landmark's: their product is -|x - z|²/h.
    """

    def __init__(self, points: Array, bandwidth: float) -> None:
        self.here, self._points, self._bandwidth = kernels_of(points), points, bandwidth
        ones = self.here.array(np.ones((len(points), 1)))
        self._columns = self.here.beside(points, self.here.row_squares(points) * (-1.0 / bandwidth), ones)

    def _row_side(self, rows: Array) -> Array:
        ones, squares = self.here.array(np.ones((len(rows), 1))), self.here.row_squares(rows)
        return self.here.beside(rows * (2.0 / self._bandwidth), ones, squares * (-1.0 / self._bandwidth))

    def of(self, rows: Array, out: Array | None = None) -> Array:
        """K (rows, landmarks)"""
        return self.here.exp_product(self._row_side(rows), self._columns, out)

    def features(self, kernels: Array) -> Array:
        """Φ = K T^-1 (rows, landmarks), whose inner products are nearly the kernel."""
        return self.here.contiguous(self.factors.to_features(self.here.contiguous(kernels.T)).T)

    @cached_property
    def factors(self) -> LandmarkFactors:
        """T, without A."""
        return LandmarkFactors(self)

    def panels(self) -> Callable[[slice], Array]:
        """Columns of K_MM + 1e-8 M I from their diagonal on down, made when they are asked for."""
        across, jitter = self._row_side(self._points), _JITTER * len(self._points)

        def panel(span: slice) -> Array:
            made = self.here.exp_product(across[span.start :], self._columns[span])
            self.here.add_diagonal(made[: span.stop - span.start], jitter)
            return made

        return panel

    def __len__(self) -> int:
        return len(self._points)


class LandmarkFactors:
    """T and A in one square of float64: Tᵀ below its diagonal, A above, blocks of the diagonal apart.

    Nothing else of their size is ever made, on the host or on a device. Blocks are lower triangles, those of
    A transposed. Features Φ = K T^-1 need no A: ridge and rows are of A alone.
    """

    def __init__(self, kernel: LandmarkKernel, ridge: float = 0.0, rows: float = 0.0) -> None:
        count, here = len(kernel), kernel.here
        self._here = here
        self._square = here.empty((count, count))
        self._spans = block_spans(count)
        self._share, self._ridge = rows / count, ridge
        try:  # L = Tᵀ with L Lᵀ = K_MM + 1e-8 M I, column of blocks by column
            self._lower = cholesky_below(kernel.panels(), self._square, here.triangle, here.triangle_solve)
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
        return self._back(coordinates, self._upper, lambda span: self._square[span, span.stop :])

    def outer(self, values: Array) -> Array:
        """A^-T values"""
        return self._forth(values, self._upper, lambda span: self._square[: span.start, span].T)

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
