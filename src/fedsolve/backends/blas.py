"""Symmetric rank-k updates, products that are added, and factors: in place and outside the interpreter lock.

scipy's wrappers hold the lock, and numpy's products write a fresh result, of a symmetric one both triangles;
all of it is costly for the workers of a federation. scipy publishes the same routines as C pointers, which a
foreign call runs without the lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

from fedsolve.container import Array

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _routine(name: str, arguments: int, library: Any = cython_blas) -> Callable[..., Any]:
    capsule = library.__pyx_capi__[name]
    pointer = _capsule_pointer(capsule, _capsule_name(capsule))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(pointer)


_SYRK = {
    np.dtype(np.float64): (_routine("dsyrk", 10), ctypes.c_double),
    np.dtype(np.float32): (_routine("ssyrk", 10), ctypes.c_float),
}


_GEMM = {
    np.dtype(np.float64): (_routine("dgemm", 13), ctypes.c_double),
    np.dtype(np.float32): (_routine("sgemm", 13), ctypes.c_float),
}
_POTRF = _routine("dpotrf", 5, cython_lapack)


def add_product(left: Array, right: Array, out: Array) -> None:
    """out += left @ right, with left (rows, inner), right (inner, columns) whose columns are contiguous."""
    rows, columns = out.shape
    inner = left.shape[1]
    routine, real = _GEMM[out.dtype]
    if left.shape != (rows, inner) or right.shape != (inner, columns) or not inner:
        raise ValueError(f"shapes do not fit: {left.shape}, {right.shape}, {out.shape}")
    if not (left.flags.c_contiguous and right.T.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("left, the transpose of right, and out must be C-contiguous")
    # Fortran sees the transposes: out' += right' left'.
    one = real(1.0)
    routine(
        ctypes.c_char_p(b"T"),
        ctypes.c_char_p(b"N"),
        ctypes.byref(ctypes.c_int(columns)),
        ctypes.byref(ctypes.c_int(rows)),
        ctypes.byref(ctypes.c_int(inner)),
        ctypes.byref(one),
        right.T.ctypes.data,
        ctypes.byref(ctypes.c_int(inner)),
        left.ctypes.data,
        ctypes.byref(ctypes.c_int(inner)),
        ctypes.byref(one),
        out.ctypes.data,
        ctypes.byref(ctypes.c_int(columns)),
    )


def factor_in_place(system: Array) -> bool:
    """Overwrite the upper triangle of a symmetric float64 matrix by its factor U, with UᵀU = system.

    Gives whether it has one. The lower triangle is not touched.
    """
    width = len(system)
    if system.shape != (width, width) or system.dtype != np.float64 or not system.flags.c_contiguous:
        raise ValueError("the system must be a C-contiguous float64 square")
    info, size = ctypes.c_int(0), ctypes.c_int(width)
    leading = ctypes.c_int(max(1, width))
    _POTRF(
        ctypes.c_char_p(b"L"),
        ctypes.byref(size),
        system.ctypes.data,
        ctypes.byref(leading),
        ctypes.byref(info),
    )
    return info.value == 0


def add_gram(rows: Array, out: Array, accumulate: bool = True) -> None:
    """Upper triangle of `out` (+)= rowsᵀ rows, with rows (samples, width) and out (width, width).

    Counts samples * width² operations, half of a full product. The lower triangle is not touched.
    """
    samples, width = rows.shape
    routine, real = _SYRK[rows.dtype]
    if out.shape != (width, width) or out.dtype != rows.dtype:
        raise ValueError(f"out must be ({width}, {width}) of {rows.dtype}; got {out.shape}, {out.dtype}")
    if not (rows.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError("rows and out must be C-contiguous")
    # Fortran sees the transposes: out's upper triangle is its lower one, rows is (width, samples).
    n, k, leading = ctypes.c_int(width), ctypes.c_int(samples), ctypes.c_int(max(1, width))
    alpha, beta = real(1.0), real(1.0 if accumulate else 0.0)
    routine(
        ctypes.c_char_p(b"L"),
        ctypes.c_char_p(b"N"),
        ctypes.byref(n),
        ctypes.byref(k),
        ctypes.byref(alpha),
        rows.ctypes.data,
        ctypes.byref(leading),
        ctypes.byref(beta),
        out.ctypes.data,
        ctypes.byref(leading),
    )
