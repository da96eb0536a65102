"""The kernels: what differs between backends. Here in numpy and scipy, whose bits depend on no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from scipy.linalg import LinAlgError, cho_solve, eigh, svd
from scipy.linalg.lapack import dpocon
from scipy.special import expit

from fedsolve.arrays import Array, philox_normals, philox_uniforms
from fedsolve.backends import blas
from fedsolve.backends.activations import activate
from fedsolve.backends.blas import LARGE, add_gram, add_product, cholesky_factor, factor_in_place
from fedsolve.threads import Parts, blas_threads, in_parts, thread_count, usable_cores

PIVOT = 0.999
"""Share of a ridge that every pivot of ridge I + a positive semidefinite matrix reaches, rounding apart."""

STEP = 1e-6
"""Share of a solution that a step of refinement may change where the factorisation can be trusted."""

EPS = float(np.finfo(np.float64).eps)
_CHUNK_BYTES = 16 << 20
_TRIANGLE_ROWS = 128
_THIN = 128
"""Columns up to which a product with a wide factor takes up to a third less time as its transpose."""
_ONE_THREAD_WIDTH = 2048
"""Systems up to this width are solved on one BLAS thread: more gain little on free cores, lose a factor
of ten on busy ones, and would make the last bits depend on the number of cores."""
_SHIFTED_WIDTH, _SHIFTED_COLUMNS = 1024, 12
"""From this width on, and up to so many columns, systems are factored sooner than eigenvectors are found."""


class Functions(Protocol):
    """Functions that numpy and torch call alike."""

    def __getattr__(self, name: str) -> Callable[..., Array]: ...


class Kernels:
    """The kernels of one device: those of the host, in numpy. Other backends override them.

    Arrays are float64 unless a `dtype`, named as numpy does, says otherwise. Arguments and results lie on the
    device, except that `array` and `host` copy them there and back. They are numpy arrays, or torch tensors,
    of which only what numpy arrays also have is used.
    """

    device = "cpu"
    _library: Functions = cast(Any, np)
    _expit = staticmethod(expit)

    # -- to and from the host --------------------------------------------------------------------------------

    def array(self, values: Any, dtype: Any = None) -> Array:
        """The values here; not copied where they are here and of this type."""
        return np.asarray(values, dtype=dtype)

    def host(self, array: Array) -> Array:
        """The array as numpy's, in the host's memory."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
        """An array with unspecified contents."""
        return np.empty(shape, dtype=dtype)

    def copy(self, array: Array) -> Array:
        """An independent, contiguous copy."""
        return np.array(array, order="C")

    def contiguous(self, array: Array) -> Array:
        """The array, row after row in memory."""
        return np.ascontiguousarray(array)

    # -- how much at a time ----------------------------------------------------------------------------------

    def chunk_rows(self, width: int) -> int:
        """Rows of this width that a pass takes at a time; depends on nothing else."""
        return max(256, min(8192, _CHUNK_BYTES // (8 * width)))

    def budget(self, granted: int, aside: int = 0) -> int:
        """Bytes that may be kept here between passes, of the host's memory or of the device's own.

        granted: what the participant may keep in the host's memory. aside: what a server that computes on the
        same device needs there.
        """
        return granted

    def threads(self, width: int) -> AbstractContextManager[Any]:
        """Within this context a system of this width is solved on as many of the host's threads as help."""
        return blas_threads(1 if width <= _ONE_THREAD_WIDTH else None)

    def parts(self) -> AbstractContextManager[Parts]:
        """Within this context: what calls a function for parts of a span; a device takes it whole."""
        return in_parts()

    # -- products --------------------------------------------------------------------------------------------

    def matmul(self, left: Array, right: Array, out: Array | None = None) -> Array:
        """left @ right"""
        return self._library.matmul(left, right, out=out)

    def affine(self, rows: Array, weight: Array, bias: Array, out: Array | None = None) -> Array:
        """rows @ weight + bias"""
        # Not addmm, for which cuBLAS has slower kernels: on an H200 half as fast.
        product = self.matmul(rows, weight, out)
        product += bias
        return product

    def add_matmul(self, left: Array, right: Array, out: Array, scratch: Array | None = None) -> None:
        """out += left @ right; scratch has the shape of out."""
        fits = left.flags.c_contiguous and right.T.flags.c_contiguous and out.flags.c_contiguous
        if fits and left.size and thread_count() == 1:
            add_product(left, right, out)  # the same numbers without the scratch
        else:
            out += np.matmul(left, right, out=scratch)

    def gram(self, rows: Array, out: Array, accumulate: bool = False) -> None:
        """out (+)= rowsᵀ rows, of which at least the upper triangle is written."""
        if thread_count() > 1:
            # numpy and scipy may each bring a BLAS whose idle threads spin: used in turn, they take the cores
            # from each other. numpy computes the large products, so it computes this one too.
            self.cross(rows, rows, out, accumulate)
        else:
            add_gram(rows, out, accumulate)

    def cross(
        self, left: Array, right: Array, out: Array, accumulate: bool = False, scratch: Array | None = None
    ) -> None:
        """out (+)= leftᵀ right; scratch has the shape of out."""
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
        """The symmetric matrix of which this is the upper triangle; may be written in place."""
        for row in range(0, matrix.shape[0], _TRIANGLE_ROWS):
            stop = min(row + _TRIANGLE_ROWS, matrix.shape[0])
            matrix[stop:, row:stop] = matrix[row:stop, stop:].T
            corner = matrix[row:stop, row:stop]
            lower = np.tril_indices(stop - row, -1)
            corner[lower] = corner.T[lower]
        return matrix

    # -- elementwise -----------------------------------------------------------------------------------------

    def activate(self, name: str, values: Array) -> Array:
        """An activation (`activations.ACTIVATIONS`) in place."""
        return activate(name, values)

    def one_hot(self, codes: Array, outputs: int, dtype: Any = np.float64) -> Array:
        """A row for each code, 1 at its place."""
        values = np.zeros((len(codes), outputs), dtype=dtype)
        values[np.arange(len(codes)), codes] = 1.0
        return values

    def uniforms(self, key: int, count: int) -> Array:
        """`count` uniforms in [0, 1), with the bits of `arrays.philox_uniforms`."""
        return philox_uniforms(key, count)

    def normals(self, key: int, count: int) -> Array:
        """The first `count` nearly normal numbers of a key, with the bits of `arrays.philox_normals`."""
        return philox_normals(np.random.Philox(key=key), count)

    def where(self, condition: Array, values: Array, otherwise: float) -> Array:
        """values where the condition holds."""
        return self._library.where(condition, values, otherwise)

    def beside(self, *parts: Array) -> Array:
        """Columns of all, the first before the others."""
        return self._library.hstack(parts)

    def stacked(self, parts: Sequence[Array]) -> Array:
        """Arrays of one shape, one after the other along a new first axis."""
        return self._library.stack(list(parts))

    def row_squares(self, rows: Array) -> Array:
        """|x|² of every row: (rows, 1)."""
        return np.asarray(np.einsum("ij,ij->i", rows, rows))[:, None]

    def exp_product(self, left: Array, right: Array, out: Array | None = None) -> Array:
        """exp(left @ rightᵀ)"""
        product = self.matmul(left, right.T, out)
        return self._library.exp(product, out=product)

    def likelihood(self, scores: Array, targets: Array) -> tuple[Array, Array, Array]:
        """Probabilities (rows, columns), losses (rows,), and whether the right class alone scores highest.

        One column of scores means two classes, of which it is the second's; targets are one-hot rows.
        """
        of = self._library
        if scores.shape[1] == 1:
            margin = of.where(targets[:, 1] > 0, scores[:, 0], -scores[:, 0])
            return self._expit(scores), of.logaddexp(of.zeros_like(margin), -margin), margin > 0
        own = of.sum(scores * targets, axis=1)
        top = of.amax(scores, axis=1)
        raised = of.exp(scores - top[:, None])
        whole = of.sum(raised, axis=1)
        others = of.amax(of.where(targets > 0, -np.inf, scores), axis=1)
        return raised / whole[:, None], of.log(whole) + (top - own), own > others

    def add_diagonal(self, matrix: Array, number: float) -> None:
        """matrix += number I, in place."""
        matrix.flat[:: len(matrix) + 1] += number

    def finite_sums(self, arrays: Sequence[Array]) -> list[bool]:
        """For each array, whether its sum is finite, which it is not with NaN or infinity anywhere.

        Waits for the device once.
        """
        # Overflow or NaN anywhere makes the sum non-finite: one pass, no temporary.
        with np.errstate(invalid="ignore", over="ignore"):
            return [bool(np.isfinite(np.add.reduce(array, axis=None))) for array in arrays]

    def aside(self, make: Callable[[], Array]) -> Callable[[], Array]:
        """Make an array at the same time as the device's other work, where that is possible.

        Returns a function that gives the array.
        """
        made = make()
        return lambda: made

    # -- factorisations --------------------------------------------------------------------------------------

    def cholesky(self, system: Array, least: float = 0.0) -> Any | None:
        """A factor for `cholesky_solve`; None where the system is singular to working precision.

        That is: not positive definite, or its reciprocal condition number is below width * eps.
        system: symmetric; may be overwritten. least: a number that no eigenvalue lies below, rounding apart,
        such as a ridge that was added.
        """
        norm = float(np.max(np.sum(np.abs(system), axis=0), initial=0.0))
        try:
            factor = cholesky_factor(system)
        except LinAlgError:
            return None
        # Eigenvalues of at least `least` bound the norm of the inverse; otherwise it must be estimated.
        if least >= len(system) ** 1.5 * EPS * norm:
            return factor
        return factor if float(dpocon(factor[0], norm)[0]) >= len(system) * EPS else None

    def cholesky_solve(self, factor: Any, right: Array) -> Array:
        """The solution of system @ x = right (width, columns)."""
        return np.ascontiguousarray(cho_solve(factor, right, check_finite=False))

    triangle = staticmethod(blas.triangle)
    triangle_solve = staticmethod(blas.triangle_solve)

    def prefers_shifts(self, width: int, columns: int) -> bool:
        """Whether `shifted_solve` of so many systems takes less time than one `eigh`; follows from sizes."""
        return width >= _SHIFTED_WIDTH and columns <= _SHIFTED_COLUMNS

    def shifted_solve(self, matrix: Array, scales: Array, ridge: float, right: Array) -> Array | None:
        """Columns x_j with (ridge I + scale_j matrix) x_j = right_j, each refined by one step; ridge > 0.

        None where the matrix is not positive semidefinite beside the ridge (a pivot falls below it), or where
        a step of refinement changes more than a millionth: then eigenvalues must be looked at.
        """
        solve = partial(self._solve_shifted, matrix, ridge)
        if thread_count() > 1:  # each system by all threads, one after the other
            found = list(map(solve, scales, right.T))
        else:
            with ThreadPoolExecutor(usable_cores()) as pool:
                found = list(pool.map(solve, scales, right.T))
        known = [column for column in found if column is not None]
        return np.stack(known, axis=1) if len(known) == len(found) else None

    def _solve_shifted(self, matrix: Array, ridge: float, scale: float, wanted: Array) -> Array | None:
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
        """Eigenvalues, smallest first, and eigenvectors in columns, of a symmetric matrix."""
        found: tuple[Array, Array] = eigh(matrix, driver="evd", check_finite=False)
        return found

    def thin_svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        """U, s, Zᵀ with matrix = U diag(s) Zᵀ and as many columns in U as the shorter side."""
        found: tuple[Array, Array, Array] = svd(matrix, full_matrices=False, check_finite=False)
        return found

    def begin_svd(self, matrix: Array) -> Callable[[], tuple[Array, Array, Array]] | None:
        """Begin a `thin_svd`, to be asked for later; None where that saves nothing."""
        return None
