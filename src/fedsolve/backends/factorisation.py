"""Cholesky factors of any size: LAPACK's up to `LARGE` columns, beyond that block by block.

LAPACK's routine for several threads (OpenBLAS's dpotrf) has been seen to crash at 16,384 columns. By blocks
it is products, and factors and triangular solves of `BLOCK` columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cholesky, solve_triangular

Array = NDArray[Any]

LARGE = 8192
BLOCK = 1024


def block_spans(width: int) -> list[slice]:
    """Columns of a matrix in blocks."""
    return [slice(start, min(start + BLOCK, width)) for start in range(0, width, BLOCK)]


def cholesky_below(panel: Callable[[slice], Array], square: Array) -> list[Array]:
    """L with L Lᵀ = a symmetric matrix: the blocks of its diagonal; the others are written into `square`,
    below its diagonal blocks, and nothing else there is touched.

    panel: columns of the matrix from their diagonal block on down, (width - span.start, span); may be
    overwritten, and is asked for once and in order. Raises LinAlgError where the matrix is not positive
    definite.
    """
    blocks: list[Array] = []
    for span in block_spans(len(square)):
        below = panel(span)
        below -= square[span.start :, : span.start] @ square[span, : span.start].T
        width = span.stop - span.start
        blocks.append(np.asarray(cholesky(below[:width], lower=True, check_finite=False)))
        solved = solve_triangular(blocks[-1], below[width:].T, lower=True, check_finite=False)
        square[span.stop :, span] = solved.T
    return blocks


def cholesky_factor(system: Array, lower: bool = False, overwrite: bool = False) -> tuple[Array, bool]:
    """What scipy's `cho_factor` gives, and `cho_solve` takes, of a symmetric matrix of any size.

    overwrite: the system is not needed any more.
    """
    if len(system) <= LARGE:
        factor: tuple[Array, bool] = cho_factor(
            system, lower=lower, overwrite_a=overwrite, check_finite=False
        )
        return factor
    rows = system if system.flags.c_contiguous else system.T  # the same matrix, row after row
    square = rows if overwrite and rows.flags.c_contiguous else np.array(rows, order="C")
    blocks = cholesky_below(lambda span: square[span.start :, span].copy(), square)
    for span, block in zip(block_spans(len(square)), blocks, strict=True):
        square[span, span] = block
    return (square, True) if lower else (square.T, False)
