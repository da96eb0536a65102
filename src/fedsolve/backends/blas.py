"""Symmetric rank-k updates, products that are added, and factors: in place and outside the interpreter lock.

scipy's wrappers hold the lock, and numpy's products write a fresh result, of a symmetric one both triangles;
all of it is costly for the workers of a federation. scipy publishes the same routines as C pointers, which a
foreign call runs without the lock.

Cholesky factors are LAPACK's up to `LARGE` columns, beyond that made block by block: OpenBLAS's routine for
several threads (dpotrf) has been seen to crash at 16,384 columns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cholesky, cython_blas, cython_lapack

from fedsolve.arrays import Array
from fedsolve.threads import Parts, in_parts

LARGE = 8192
BLOCK = 1024
PART = 512
"""Rows or columns of a block that one thread computes at a time."""

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _routine(name: str, arguments: int, library: Any = cython_blas) -> Callable[..., Any]:
    capsule = library.__pyx_capi__[name]
    pointer = _capsule_pointer(capsule, _capsule_name(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(pointer)


_REALS = {np.dtype(np.float64): ("d", ctypes.c_double), np.dtype(np.float32): ("s", ctypes.c_float)}
_SYRK = {dtype: _routine(f"{letter}syrk", 10) for dtype, (letter, _) in _REALS.items()}
_GEMM = {dtype: _routine(f"{letter}gemm", 13) for dtype, (letter, _) in _REALS.items()}
_POTRF = _routine("dpotrf", 5, cython_lapack)
_TRTRS = _routine("dtrtrs", 10, cython_lapack)


def _call(routine: Callable[..., Any], dtype: np.dtype[Any], *arguments: Any) -> None:
    """Call a routine with letters, whole numbers, real numbers of this type, and arrays, all by address."""
    found: list[Any] = []
    for value in arguments:
        if isinstance(value, np.ndarray):
            found.append(value.ctypes.data)
        elif isinstance(value, bytes):
            found.append(ctypes.c_char_p(value))
        else:
            kind: Any = ctypes.c_int if isinstance(value, int) else _REALS[dtype][1]
            found.append(ctypes.byref(kind(value)))
    routine(*found)


def add_product(left: Array, right: Array, out: Array) -> None:
    """out += left @ right, with left (rows, inner), right (inner, columns) whose columns are contiguous."""
    rows, columns = out.shape
    inner = left.shape[1]
    if left.shape != (rows, inner) or right.shape != (inner, columns) or not inner:
        raise ValueError(f"shapes do not fit: {left.shape}, {right.shape}, {out.shape}")
    if not (left.flags.c_contiguous and right.T.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("left, the transpose of right, and out must be C-contiguous")
    # Fortran sees the transposes: out' += right' left'.
    sizes = columns, rows, inner
    routine = _GEMM[out.dtype]
    _call(routine, out.dtype, b"T", b"N", *sizes, 1.0, right.T, inner, left, inner, 1.0, out, columns)


def factor_in_place(system: Array) -> bool:
    """Overwrite the upper triangle of a symmetric float64 matrix by its factor U, with UᵀU = system.

    Gives whether it has one. The lower triangle is not touched.
    """
    width = len(system)
    if system.shape != (width, width) or system.dtype != np.float64 or not system.flags.c_contiguous:
        raise ValueError("the system must be a C-contiguous float64 square")
    failed = np.zeros(1, dtype=np.intc)
    _call(_POTRF, system.dtype, b"L", width, system, max(1, width), failed)
    return not failed[0]


def add_gram(rows: Array, out: Array, accumulate: bool = True) -> None:
    """Upper triangle of `out` (+)= rowsᵀ rows, with rows (samples, width) and out (width, width).

    Counts samples * width² operations, half of a full product. The lower triangle is not touched.
    """
    samples, width = rows.shape
    routine = _SYRK[rows.dtype]
    if out.shape != (width, width) or out.dtype != rows.dtype:
        raise ValueError(f"out must be ({width}, {width}) of {rows.dtype}; got {out.shape}, {out.dtype}")
    if not (rows.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("rows and out must be C-contiguous")
    # Fortran sees the transposes: out's upper triangle is its lower one, rows is (width, samples).
    leading, beta = max(1, width), 1.0 if accumulate else 0.0
    _call(routine, rows.dtype, b"L", b"N", width, samples, 1.0, rows, leading, beta, out, leading)


def block_spans(width: int) -> list[slice]:
    """Columns of a matrix in blocks."""
    return [slice(start, min(start + BLOCK, width)) for start in range(0, width, BLOCK)]


def triangle(system: Array) -> Array | None:
    """L with L Lᵀ = a symmetric system, which is overwritten; None where it is not positive definite."""
    try:
        return np.asarray(cholesky(system, lower=True, overwrite_a=True, check_finite=False))
    except LinAlgError:
        return None


def triangle_solve(lower: Array, right: Array, transposed: bool = False) -> Array:
    """The solution of L x = right, or of Lᵀ x = right."""
    found, width = np.array(right, dtype=np.float64, order="F"), len(lower)
    if lower.shape != (width, width) or len(found) != width or lower.dtype != found.dtype:
        raise ValueError(f"shapes or types do not fit: {lower.shape} {lower.dtype}, {right.shape}")
    if not (by_columns := lower.flags.f_contiguous):
        lower = np.ascontiguousarray(lower)  # for Fortran an upper triangle, its transpose
    kind, turned = (b"L" if by_columns else b"U"), (b"T" if by_columns == transposed else b"N")
    sizes, failed = (width, found.shape[1]), np.zeros(1, dtype=np.intc)
    leading = max(1, width)
    _call(_TRTRS, found.dtype, kind, turned, b"N", *sizes, lower, leading, found, leading, failed)
    if failed[0]:
        raise LinAlgError("singular")
    return found


def cholesky_below(
    entries: Callable[[slice, slice], Array],
    square: Array,
    factor: Callable[[Array], Array | None] = triangle,
    solve: Callable[[Array, Array], Array] = triangle_solve,
    parts: Callable[[], AbstractContextManager[Parts]] = in_parts,
) -> list[Array]:
    """L with L Lᵀ = a symmetric matrix, written into `square`; nothing above its diagonal blocks is touched.

    Returns the diagonal blocks, each by itself. entries: a block of the matrix, by rows and columns; may be
    overwritten, and is asked for once, on the diagonal and below it. factor, solve, parts: of the place where
    these lie. Raises LinAlgError where the matrix is not positive definite.
    """
    blocks: list[Array] = []
    with parts() as each:
        for span in block_spans(len(square)):
            before = slice(0, span.start)

            def reduce(rows: slice, span: slice = span, before: slice = before) -> None:
                columns = slice(span.start, min(span.stop, rows.stop))
                found = entries(rows, columns)
                found -= square[rows, before] @ square[columns, before].T
                square[rows, columns] = found

            each(reduce, slice(span.start, len(square)), PART)
            block = factor(square[span, span])
            if block is None:
                raise LinAlgError("not positive definite")
            square[span, span] = block
            blocks.append(block)

            def divide(rows: slice, span: slice = span, block: Array = block) -> None:
                square[rows, span] = solve(block, square[rows, span].T).T

            each(divide, slice(span.stop, len(square)), PART)
    return blocks


def cholesky_factor(system: Array, lower: bool = False, overwrite: bool = False) -> tuple[Array, bool]:
    """scipy's `cho_factor` for a symmetric matrix of any size; `cho_solve` takes the result.

    overwrite: the system is not needed any more.
    """
    if len(system) <= LARGE:
        factor: tuple[Array, bool] = cho_factor(
            system, lower=lower, overwrite_a=overwrite, check_finite=False
        )
        return factor
    rows = system if system.flags.c_contiguous else system.T  # the same matrix, row after row
    square = rows if overwrite and rows.flags.c_contiguous else np.array(rows, order="C")
    cholesky_below(lambda rows, columns: square[rows, columns].copy(), square)
    return (square, True) if lower else (square.T, False)
