"""The kernels in numpy and scipy: the default, whose bits depend on no device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve, eigh, svd
from scipy.linalg.lapack import dpocon
from scipy.special import expit

from fedsolve.backends.activations import activate
from fedsolve.backends.blas import add_gram, add_product, factor_in_place
from fedsolve.backends.factorisation import LARGE, cholesky_factor
from fedsolve.backends.kernels import PIVOT, STEP, Kernels
from fedsolve.threads import blas_threads, several_threads, usable_cores
from fedsolve.uniforms import philox_uniforms

Array = NDArray[Any]

_EPS = float(np.finfo(np.float64).eps)
_CHUNK_BYTES = 16 << 20
_TRIANGLE_ROWS = 128
_THIN = 128
"""Columns up to which a product with a wide factor takes up to a third less time as its transpose."""
_SHIFTED_WIDTH, _SHIFTED_COLUMNS = 1024, 12
"""From this width on, and up to so many columns, systems are factored sooner than eigenvectors are found."""


class NumpyKernels(Kernels):
    """Arrays are numpy's, in the host's memory."""

    device = "cpu"

    def array(self, values: Any, dtype: Any = None) -> Array:
        return np.asarray(values, dtype=dtype)

    def host(self, array: Array) -> Array:
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
        return np.empty(shape, dtype=dtype)

    def copy(self, array: Array) -> Array:
        return np.array(array, order="C")

    def contiguous(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def chunk_rows(self, width: int) -> int:
        return max(256, min(8192, _CHUNK_BYTES // (8 * width)))

    def budget(self, granted: int) -> int:
        return granted

    def threads(self, limit: int | None) -> AbstractContextManager[Any]:
        return blas_threads(limit)

    def matmul(self, left: Array, right: Array, out: Array | None = None) -> Array:
        return np.asarray(np.matmul(left, right, out=out))

    def affine(self, rows: Array, weight: Array, bias: Array, out: Array | None = None) -> Array:
        out = np.matmul(rows, weight, out=out)
        out += bias
        return out

    def add_matmul(self, left: Array, right: Array, out: Array, scratch: Array | None = None) -> None:
        fits = left.flags.c_contiguous and right.T.flags.c_contiguous and out.flags.c_contiguous
        if fits and left.size and not several_threads():
            add_product(left, right, out)  # the same numbers without the scratch
        else:
            out += np.matmul(left, right, out=scratch)

    def gram(self, rows: Array, out: Array, accumulate: bool = False) -> None:
        if several_threads():
            # numpy and scipy may each bring a BLAS whose idle threads spin: used in turn, they take the cores
            # from each other. numpy computes the large products, so it computes this one too.
            self.cross(rows, rows, out, accumulate)
        else:
            add_gram(rows, out, accumulate)

    def cross(
        self, left: Array, right: Array, out: Array, accumulate: bool = False, scratch: Array | None = None
    ) -> None:
        if right.shape[1] <= _THIN < left.shape[1]:
            # The same sums in the same order; a library reads the wide factor in the order it lies in.
            thin = np.matmul(right.T, left).T
            if accumulate:
                out += thin
            else:
                out[...] = thin
        elif accumulate:
            out += np.matmul(left.T, right, out=scratch)
        else:
            np.matmul(left.T, right, out=out)

    def mirror(self, matrix: Array) -> Array:
        for row in range(0, matrix.shape[0], _TRIANGLE_ROWS):
            stop = min(row + _TRIANGLE_ROWS, matrix.shape[0])
            matrix[stop:, row:stop] = matrix[row:stop, stop:].T
            corner = matrix[row:stop, row:stop]
            lower = np.tril_indices(stop - row, -1)
            corner[lower] = corner.T[lower]
        return matrix

    def activate(self, name: str, values: Array) -> Array:
        return activate(name, values)

    def exp_distances(self, rows: Array, centres: Array, scale: float, out: Array | None = None) -> Array:
        out = np.matmul(rows, centres.T, out=out)
        out *= -2.0
        out += np.sum(rows**2, axis=1)[:, None]
        out += np.sum(centres**2, axis=1)
        np.maximum(out, 0.0, out=out)
        out *= -scale
        return np.asarray(np.exp(out, out=out))

    def one_hot(self, codes: Array, outputs: int, dtype: Any = np.float64) -> Array:
        values = np.zeros((len(codes), outputs), dtype=dtype)
        values[np.arange(len(codes)), codes] = 1.0
        return values

    def uniforms(self, key: int, count: int) -> Array:
        return philox_uniforms(key, count)

    def where(self, condition: Array, values: Array, otherwise: float) -> Array:
        return np.where(condition, values, otherwise)

    def beside(self, *parts: Array) -> Array:
        return np.hstack(parts)

    def stacked(self, parts: Sequence[Array]) -> Array:
        return np.stack(parts)

    def sqrt(self, values: Array) -> Array:
        return np.asarray(np.sqrt(values))

    def row_squares(self, rows: Array) -> Array:
        return np.asarray(np.einsum("ij,ij->i", rows, rows))[:, None]

    def exp_product(self, left: Array, right: Array, out: Array | None = None) -> Array:
        out = np.matmul(left, right.T, out=out)
        return np.asarray(np.exp(out, out=out))

    def likelihood(self, scores: Array, targets: Array) -> tuple[Array, Array, Array]:
        if scores.shape[1] == 1:
            margin = np.where(targets[:, 1] > 0, scores[:, 0], -scores[:, 0])
            return expit(scores), np.logaddexp(0.0, -margin), margin > 0
        own = np.sum(scores * targets, axis=1)
        top = np.max(scores, axis=1)
        raised = np.exp(scores - top[:, None])
        whole = np.sum(raised, axis=1)
        others = np.where(targets > 0, -np.inf, scores).max(axis=1)
        return raised / whole[:, None], np.log(whole) + (top - own), own > others

    def add_diagonal(self, matrix: Array, number: float) -> None:
        matrix.flat[:: len(matrix) + 1] += number

    def finite_sums(self, arrays: Sequence[Array]) -> list[bool]:
        # Overflow or NaN anywhere makes the sum non-finite: one pass, no temporary.
        with np.errstate(invalid="ignore", over="ignore"):
            return [bool(np.isfinite(np.add.reduce(array, axis=None))) for array in arrays]

    def cholesky(self, system: Array, least: float = 0.0) -> Any | None:
        norm = float(np.max(np.sum(np.abs(system), axis=0), initial=0.0))
        try:
            factor = cholesky_factor(system)
        except LinAlgError:
            return None
        # Eigenvalues of at least `least` bound the norm of the inverse; otherwise it must be estimated.
        if least >= len(system) ** 1.5 * _EPS * norm:
            return factor
        return factor if float(dpocon(factor[0], norm)[0]) >= len(system) * _EPS else None

    def cholesky_solve(self, factor: Any, right: Array) -> Array:
        return np.ascontiguousarray(cho_solve(factor, right, check_finite=False))

    def prefers_shifts(self, width: int, columns: int) -> bool:
        return width >= _SHIFTED_WIDTH and columns <= _SHIFTED_COLUMNS

    def shifted_solve(self, matrix: Array, scales: Array, ridge: float, right: Array) -> Array | None:
        def solve(column: int) -> Array | None:
            return self._solve_shifted(matrix, scales[column], ridge, right[:, column])

        columns = range(len(scales))
        if several_threads():  # each system by all threads, one after the other
            found = list(map(solve, columns))
        else:
            with ThreadPoolExecutor(usable_cores()) as pool:
                found = list(pool.map(solve, columns))
        known = [column for column in found if column is not None]
        return np.stack(known, axis=1) if len(known) == len(found) else None

    def _solve_shifted(self, matrix: Array, scale: float, ridge: float, wanted: Array) -> Array | None:
        system = np.multiply(matrix, scale, order="C")
        self.add_diagonal(system, ridge)
        if len(system) <= LARGE:
            if not factor_in_place(system):
                return None
            factor = (system.T, True)
        else:
            try:
                factor = cholesky_factor(system, lower=True, overwrite=True)
            except LinAlgError:
                return None
        if np.min(np.diagonal(factor[0])) ** 2 < PIVOT * ridge:
            return None
        found: Array = cho_solve(factor, wanted, check_finite=False)
        step = cho_solve(factor, wanted - ridge * found - scale * (matrix @ found), check_finite=False)
        return found + step if np.linalg.norm(step) <= STEP * np.linalg.norm(found) else None

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        values, vectors = eigh(matrix, driver="evd", check_finite=False)
        return values, vectors

    def thin_svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        left, singular, right = svd(matrix, full_matrices=False, check_finite=False)
        return left, singular, right
