"""What differs between backends; the rest is done by operators that arrays of all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

Place = NDArray[Any]
"""An array where the kernels compute: numpy's, or a torch tensor of their device, of which nothing is used
but what numpy's has too."""


PIVOT = 0.999
"""Share of a ridge that every pivot of ridge I + a positive semidefinite matrix reaches, rounding apart."""

STEP = 1e-6
"""Share of a solution that a step of refinement may change where the factorisation can be trusted."""


class Kernels(ABC):
    """The kernels of one device. Arrays are float64 unless a `dtype`, named as numpy does, says otherwise.

    Arguments and results lie on the device, except where `array` and `host` carry them there and back.
    """

    device: str

    # -- to and from the host ---------------------------------------------------------------------

    @abstractmethod
    def array(self, values: Any, dtype: Any = None) -> Place:
        """The values here; not copied where they are here and of this type."""

    @abstractmethod
    def host(self, array: Place) -> NDArray[Any]:
        """The array as numpy's, in the host's memory."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any = np.float64) -> Place:
        """An array with unspecified contents."""

    @abstractmethod
    def copy(self, array: Place) -> Place:
        """An independent, contiguous copy."""

    @abstractmethod
    def contiguous(self, array: Place) -> Place:
        """The array, row after row in memory."""

    # -- how much at a time -----------------------------------------------------------------------

    @abstractmethod
    def chunk_rows(self, width: int) -> int:
        """Rows of this width that a pass takes at a time; depends on nothing else."""

    @abstractmethod
    def budget(self, granted: int) -> int:
        """Bytes that may be kept here between passes, of the host's memory or of the device's own.

        granted: what the participant may keep in the host's memory.
        """

    @abstractmethod
    def threads(self, limit: int | None) -> AbstractContextManager[Any]:
        """Within this context products here use at most so many of the host's threads."""

    # -- products ---------------------------------------------------------------------------------

    @abstractmethod
    def matmul(self, left: Place, right: Place, out: Place | None = None) -> Place:
        """left @ right"""

    @abstractmethod
    def affine(self, rows: Place, weight: Place, bias: Place, out: Place | None = None) -> Place:
        """rows @ weight + bias"""

    @abstractmethod
    def add_matmul(self, left: Place, right: Place, out: Place, scratch: Place | None = None) -> None:
        """out += left @ right; scratch has the shape of out."""

    @abstractmethod
    def gram(self, rows: Place, out: Place, accumulate: bool = False) -> None:
        """out (+)= rowsᵀ rows, of which at least the upper triangle is written."""

    @abstractmethod
    def cross(
        self, left: Place, right: Place, out: Place, accumulate: bool = False, scratch: Place | None = None
    ) -> None:
        """out (+)= leftᵀ right; scratch has the shape of out."""

    @abstractmethod
    def mirror(self, matrix: Place) -> Place:
        """The symmetric matrix of which this is the upper triangle; may be written in place."""

    # -- elementwise ------------------------------------------------------------------------------

    @abstractmethod
    def activate(self, name: str, values: Place) -> Place:
        """An activation (`activations.ACTIVATIONS`) in place."""

    @abstractmethod
    def exp_distances(self, rows: Place, centres: Place, scale: float, out: Place | None = None) -> Place:
        """exp(-scale |x - c|²) of every row x and centre c: (rows, centres)."""

    @abstractmethod
    def one_hot(self, codes: Place, outputs: int, dtype: Any = np.float64) -> Place:
        """A row for each code, 1 at its place."""

    @abstractmethod
    def uniforms(self, key: int, count: int) -> Place:
        """`count` uniforms in [0, 1), with the bits of `uniforms.philox_uniforms`."""

    @abstractmethod
    def where(self, condition: Place, values: Place, otherwise: float) -> Place:
        """values where the condition holds."""

    @abstractmethod
    def beside(self, *parts: Place) -> Place:
        """Columns of all, the first before the others."""

    @abstractmethod
    def stacked(self, parts: Sequence[Place]) -> Place:
        """Arrays of one shape, one after the other along a new first axis."""

    @abstractmethod
    def sqrt(self, values: Place) -> Place:
        """Square roots."""

    @abstractmethod
    def row_squares(self, rows: Place) -> Place:
        """|x|² of every row: (rows, 1)."""

    @abstractmethod
    def exp_product(self, left: Place, right: Place, out: Place | None = None) -> Place:
        """exp(left @ rightᵀ)"""

    @abstractmethod
    def likelihood(self, scores: Place, targets: Place) -> tuple[Place, Place, Place]:
        """Probabilities (rows, columns), losses (rows,), and whether the right class alone scores highest.

        One column of scores means two classes, of which it is the second's; targets are one-hot rows.
        """

    @abstractmethod
    def add_diagonal(self, matrix: Place, number: float) -> None:
        """matrix += number I, in place."""

    @abstractmethod
    def finite_sums(self, arrays: Sequence[Place]) -> list[bool]:
        """Of each array, whether the sum of all numbers is finite: NaN or infinity anywhere makes it not so.

        The device is waited for once.
        """

    def aside(self, make: Callable[[], Place]) -> Callable[[], Place]:
        """Make an array that depends on no other beside the device's other work, where that is possible.

        What is returned gives the array, in line after its making.
        """
        made = make()
        return lambda: made

    # -- factorisations ---------------------------------------------------------------------------

    @abstractmethod
    def cholesky(self, system: Place, least: float = 0.0) -> Place | None:
        """A factor for `cholesky_solve`; None where the system is singular to working precision.

        That is: not positive definite, or its reciprocal condition number is below width * eps.
        system: symmetric; may be overwritten. least: a number that no eigenvalue lies below, rounding apart,
        such as a ridge that was added.
        """

    @abstractmethod
    def cholesky_solve(self, factor: Place, right: Place) -> Place:
        """The solution of system @ x = right (width, columns)."""

    @abstractmethod
    def prefers_shifts(self, width: int, columns: int) -> bool:
        """Whether `shifted_solve` of so many systems takes less time than one `eigh`; follows from sizes."""

    @abstractmethod
    def shifted_solve(self, matrix: Place, scales: Place, ridge: float, right: Place) -> Place | None:
        """Columns x_j with (ridge I + scale_j matrix) x_j = right_j, each refined by one step; ridge > 0.

        None where the matrix is not positive semidefinite beside the ridge (a pivot falls below it), or where
        a step of refinement changes more than a millionth: then eigenvalues must be looked at.
        """

    @abstractmethod
    def eigh(self, matrix: Place) -> tuple[Place, Place]:
        """Eigenvalues, smallest first, and eigenvectors in columns, of a symmetric matrix."""

    @abstractmethod
    def thin_svd(self, matrix: Place) -> tuple[Place, Place, Place]:
        """U, s, Zᵀ with matrix = U diag(s) Zᵀ and as many columns in U as the shorter side."""

    def begin_svd(self, matrix: Place) -> Callable[[], tuple[Place, Place, Place]] | None:
        """Begin a `thin_svd`, to be asked for later; None where that saves nothing."""
        return None
