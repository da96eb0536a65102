"""The Gaussian kernel k(x, z) = exp(-|x - z|² / h), and the preconditioner that landmarks alone give.

Rudi, Carratino and Rosasco, "FALKON", NeurIPS 2017. With K_MM + 1e-8 M I = TᵀT and AᵀA = (N/M) T Tᵀ + ridge I
(T, A upper triangles) the system of N rows becomes, in coordinates v with weights T^-1 A^-1 v,

    A^-T [T^-T (KᵀK) T^-1 + ridge I] A^-1 v = A^-T T^-T KᵀY,

which is near the identity because KᵀK is near (N/M) K_MM².
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from scipy.linalg import LinAlgError

from fedsolve.arrays import Array
from fedsolve.backends import kernels_of
from fedsolve.backends.blas import PART, block_spans, cholesky_below
from fedsolve.errors import DataError

_JITTER = 1e-8
_THIN_PART = 128  # rows of a product with few columns, which is short


class LandmarkKernel:
    """k(x, z) of rows and landmarks (M, d), where these lie.

    [2x/h, 1, -|x|²/h] is a row's side and [z, -|z|²/h, 1] a landmark's: their product is -|x - z|²/h.
    """

    def __init__(self, points: Array, bandwidth: float) -> None:
        self.here, self.points, self._bandwidth = kernels_of(points), points, bandwidth
        ones = self.here.array(np.ones((len(points), 1)))
        self._columns = self.here.beside(points, self.here.row_squares(points) * (-1.0 / bandwidth), ones)

    def row_side(self, rows: Array) -> Array:
        ones, squares = self.here.array(np.ones((len(rows), 1))), self.here.row_squares(rows)
        return self.here.beside(rows * (2.0 / self._bandwidth), ones, squares * (-1.0 / self._bandwidth))

    def of(self, rows: Array, out: Array | None = None) -> Array:
        """K (rows, landmarks)"""
        return self.here.exp_product(self.row_side(rows), self._columns, out)

    def features(self, kernels: Array) -> Array:
        """Φ = K T^-1 (rows, landmarks), whose inner products are nearly the kernel."""
        return self.here.contiguous(self.factors.to_features(self.here.contiguous(kernels.T)).T)

    @cached_property
    def factors(self) -> LandmarkFactors:
        """T, without A."""
        return LandmarkFactors(self)

    def entries(self, across: Array, rows: slice, columns: slice) -> Array:
        """A block of K_MM + 1e-8 M I, by rows and columns; across: the row's side of all points."""
        made = self.here.exp_product(across[rows], self._columns[columns])
        first, last = max(rows.start, columns.start), min(rows.stop, columns.stop)
        if first < last:
            crossing = made[first - rows.start : last - rows.start]
            jitter = _JITTER * len(self.points)
            self.here.add_diagonal(crossing[:, first - columns.start : last - columns.start], jitter)
        return made


class LandmarkFactors:
    """T and A in one square of float64: Tᵀ below its diagonal, A above, blocks of the diagonal apart.

    Nothing else of their size is ever made, on the host or on a device. Blocks are lower triangles, those of
    A transposed. Features Φ = K T^-1 need no A: ridge and rows are of A alone.
    """

    def __init__(self, kernel: LandmarkKernel, ridge: float = 0.0, rows: float = 0.0) -> None:
        count, here = len(kernel.points), kernel.here
        self._here = here
        self._square = here.empty((count, count))
        self._spans = block_spans(count)
        self._share, self._ridge = rows / count, ridge
        try:  # L = Tᵀ with L Lᵀ = K_MM + 1e-8 M I, column of blocks by column
            entries = partial(kernel.entries, kernel.row_side(kernel.points))
            self._lower = cholesky_below(
                entries, self._square, here.triangle, here.triangle_solve, here.parts
            )
        except LinAlgError:
            raise self._trouble("landmarks are not distinct to working precision") from None

    @cached_property
    def _upper(self) -> list[Array]:
        """A with AᵀA = share LᵀL + ridge I, row of blocks by row; not needed by a system solved at once."""
        square, here = self._square, self._here
        blocks: list[Array] = []
        with here.parts() as each:
            for place, span in enumerate(self._spans):
                block = here.empty((span.stop - span.start, span.stop - span.start))
                each(partial(self._reduce, place, block), slice(span.start, len(square)), PART)
                here.add_diagonal(block, self._ridge)
                factor = here.triangle(block)
                if factor is None:
                    raise self._trouble(f"the ridge of {self._ridge:g} is lost in rounding; raise it")
                blocks.append(factor)
                each(partial(self._divide, span, factor), slice(span.stop, len(square)), PART)
        return blocks

    def _reduce(self, place: int, block: Array, part: slice) -> None:
        """Columns of share LᵀL less what rows of A above account for: beside the diagonal into the square.

        Those of the diagonal's block, which is symmetric, from their own row on and into `block`.
        """
        square, span = self._square, self._spans[place]
        for other in self._spans[place:]:
            columns = slice(max(other.start, part.start), min(other.stop, part.stop))
            if columns.start >= columns.stop:
                continue
            rows = slice(columns.start, span.stop) if other == span else span
            product = self._share * (square[columns.start :, rows].T @ square[columns.start :, columns])
            if other == span:
                product -= square[: span.start, rows].T @ square[: span.start, columns]
                half = block[columns.start - span.start :]
                half[:, columns.start - span.start : columns.stop - span.start] = product
            else:
                square[span, columns] = product
        after = slice(max(span.stop, part.start), part.stop)
        if span.start and after.start < after.stop:
            square[span, after] -= square[: span.start, span].T @ square[: span.start, after]

    def _divide(self, span: slice, factor: Array, part: slice) -> None:
        """Columns of A beside a block of its diagonal."""
        self._square[span, part] = self._here.triangle_solve(factor, self._square[span, part])

    def _trouble(self, why: str) -> DataError:
        return DataError(f"the system of {len(self._square)} landmarks cannot be factorised: {why}.")

    def weights(self, coordinates: Array) -> Array:
        """T^-1 A^-1 v: what multiplies kernels."""
        return self.from_features(self.inner(coordinates))

    def inner(self, coordinates: Array) -> Array:
        """A^-1 v"""
        return self._solved(coordinates, self._upper, lambda rows, others: self._square[rows, others], True)

    def outer(self, values: Array) -> Array:
        """A^-T values"""
        return self._solved(values, self._upper, lambda rows, others: self._square[others, rows].T)

    def from_features(self, values: Array) -> Array:
        """T^-1 values"""
        return self._solved(values, self._lower, lambda rows, others: self._square[others, rows].T, True)

    def to_features(self, sums: Array) -> Array:
        """T^-T sums"""
        return self._solved(sums, self._lower, lambda rows, others: self._square[rows, others])

    def _solved(
        self,
        values: Array,
        blocks: list[Array],
        entries: Callable[[slice, slice], Array],
        upper: bool = False,
    ) -> Array:
        """Solve with a lower triangle, or an upper one.

        entries: those of the triangle outside its diagonal blocks, by rows and columns.
        """
        found, here = self._here.copy(values), self._here
        order = list(zip(self._spans, blocks, strict=True))
        with here.parts() as each:
            for span, block in reversed(order) if upper else order:
                known = slice(span.stop, len(found)) if upper else slice(0, span.start)

                def reduce(rows: slice, known: slice = known) -> None:
                    found[rows] -= entries(rows, known) @ found[known]

                def divide(columns: slice, span: slice = span, block: Array = block) -> None:
                    found[span, columns] = here.triangle_solve(block, found[span, columns], transposed=upper)

                each(reduce, span, _THIN_PART)
                each(divide, slice(0, found.shape[1]), PART)
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
