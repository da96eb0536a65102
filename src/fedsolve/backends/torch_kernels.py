"""The kernels in torch, for the CPU and for CUDA: nothing but the device differs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg.lapack import dpocon

from fedsolve.arrays import HALVES, philox_normals, philox_uniforms
from fedsolve.backends.activations import known
from fedsolve.backends.devices import torch_type, triton_works
from fedsolve.backends.kernels import EPS, PIVOT, STEP, Kernels
from fedsolve.backends.torch_factors import BlockFactors, inverted
from fedsolve.backends.torch_replays import Replays
from fedsolve.threads import Parts, blas_threads, run_beside

Tensor = Any
"""Tensors stand where numpy's arrays are expected: see `Kernels`."""

_DEVICE_CHUNK = 1 << 30
_HOST_CHUNK = 64 << 20
_SHIFTED_COLUMNS = 128
"""Systems of width 1024 that a GPU factors together in about the time of one eigendecomposition."""
_BATCH_BYTES = 8 << 30
_REPLAYED = 1024
"""Width of systems up to which starting the kernels of a solution takes longer than they do."""
_SHARE = 0.6
"""Of the device's free memory, what clients may keep there; chunks and sums need the rest."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda values: values,
    "gelu": partial(torch.ops.aten.gelu_, approximate="tanh"),
    "gelu_erf": torch.ops.aten.gelu_,
    "relu": torch.relu_,
    "leaky_relu": torch.nn.functional.leaky_relu_,
    "tanh": torch.tanh_,
    # Not torch's own, whose sixth has float32's digits on a GPU.
    "hardswish": lambda values: values.mul_((values + 3.0).clamp_(0.0, 6.0)).div_(6.0),
    "softshrink": lambda values: values.sub_(values.clamp(-0.5, 0.5)),
    "sigmoid": torch.sigmoid_,
}
"""The activations in place, by the names of `activations.ACTIVATIONS`."""


class TorchKernels(Kernels):
    """Arrays are tensors of one device."""

    _library = cast(Any, torch)
    _expit = staticmethod(torch.sigmoid)

    def __init__(self, device: str) -> None:
        self.device = device
        self._place = torch.device(device.removeprefix("torch:"))
        self._cuda = self._place.type == "cuda"
        self._aside: Any = None
        self._beside: Any = None
        self._replays = Replays()

    def array(self, values: Any, dtype: Any = None) -> Tensor:
        if not isinstance(values, torch.Tensor):
            values = np.asarray(values)
            values = values.astype(torch_type(values.dtype), copy=False)
            if not values.flags.writeable or min(values.strides, default=0) < 0:
                values = values.copy() if not self._cuda else np.ascontiguousarray(values)
            values = _from_numpy(values)
        return values.to(device=self._place, dtype=None if dtype is None else _type(dtype))

    def host(self, array: Tensor) -> NDArray[Any]:
        values: NDArray[Any] = array.detach().contiguous().cpu().numpy()
        return values

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float64) -> Tensor:
        return torch.empty(shape, dtype=_type(dtype), device=self._place)

    def copy(self, array: Tensor) -> Tensor:
        return array.clone(memory_format=torch.contiguous_format)

    def contiguous(self, array: Tensor) -> Tensor:
        return array.contiguous()

    def chunk_rows(self, width: int) -> int:
        return max(1024, (_DEVICE_CHUNK if self._cuda else _HOST_CHUNK) // (8 * width))

    def budget(self, granted: int, aside: int = 0) -> int:
        if not self._cuda:
            return granted
        free, _ = torch.cuda.mem_get_info(self._place)
        reserved = torch.cuda.memory_reserved(self._place) - torch.cuda.memory_allocated(self._place)
        return int(_SHARE * (free + reserved)) - aside

    def threads(self, width: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def parts(self) -> AbstractContextManager[Parts]:
        return nullcontext(lambda work, span, length: work(span) if span.start < span.stop else None)

    def add_matmul(self, left: Tensor, right: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        out.addmm_(left, right)

    def gram(self, rows: Tensor, out: Tensor, accumulate: bool = False) -> None:
        self.cross(rows, rows, out, accumulate)

    def cross(
        self, left: Tensor, right: Tensor, out: Tensor, accumulate: bool = False, scratch: Any = None
    ) -> None:
        if accumulate:
            out.addmm_(left.T, right)
        else:
            torch.matmul(left.T, right, out=out)

    def mirror(self, matrix: Tensor) -> Tensor:
        return torch.triu(matrix) + torch.triu(matrix, 1).T

    def activate(self, name: str, values: Tensor) -> Tensor:
        return known(name, _ACTIVATIONS)(values)

    def one_hot(self, codes: Tensor, outputs: int, dtype: Any = np.float64) -> Tensor:
        values = torch.zeros((len(codes), outputs), dtype=_type(dtype), device=self._place)
        return values.scatter_(1, codes[:, None], 1.0)

    def uniforms(self, key: int, count: int) -> Tensor:
        if not self._cuda or not triton_works():
            return self.array(philox_uniforms(key, count))
        from fedsolve.backends.triton_philox import drawn_on

        return drawn_on(self._place, key, count)

    def normals(self, key: int, count: int) -> Tensor:
        if not self._cuda or not triton_works():
            return self.array(philox_normals(np.random.Philox(key=key), count))
        from fedsolve.backends.triton_philox import drawn_on

        words = drawn_on(self._place, key, count * HALVES // 4, halves=True)
        sums = words.view(count, HALVES // 4).sum(dim=1)
        return sums.sub_(HALVES * 0xFFFF // 2).mul_(2.0**-16)

    def aside(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if not self._cuda:
            return super().aside(make)
        if self._aside is None:
            self._aside = torch.cuda.Stream(self._place)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._aside):
            made = make()
            ready = self._aside.record_event()

        def taken() -> Tensor:
            stream = torch.cuda.current_stream(self._place)
            stream.wait_event(ready)
            # Its memory is used again only after what is in line now.
            made.record_stream(stream)
            return made

        return taken

    def row_squares(self, rows: Tensor) -> Tensor:
        return (rows**2).sum(dim=1, keepdim=True)

    def add_diagonal(self, matrix: Tensor, number: float) -> None:
        matrix.diagonal().add_(number)

    def finite_sums(self, arrays: Sequence[Tensor]) -> list[bool]:
        found: list[bool] = torch.stack([array.sum() for array in arrays]).isfinite().tolist()
        return found

    def cholesky(self, system: Tensor, least: float = 0.0) -> Any | None:
        width = len(system)
        size = system.abs().sum(dim=0).max() if width else system.new_zeros(())
        factor, info = torch.linalg.cholesky_ex(system)
        # The device is waited for once.
        norm, failed = torch.stack([size.double(), info.double()]).tolist()
        if failed:
            return None
        # Eigenvalues of at least `least` bound the norm of the inverse; otherwise it must be estimated, which
        # takes LAPACK's routine on the host.
        if least < width**1.5 * EPS * norm:
            lower = np.asfortranarray(self.host(factor))
            if float(dpocon(lower, norm, uplo="L")[0]) < width * EPS:
                return None
        return factor

    def cholesky_solve(self, factor: Any, right: Tensor) -> Tensor:
        if not self._cuda or len(factor) > _REPLAYED:
            return torch.cholesky_solve(right, factor).contiguous()
        return self._replays.run("cholesky", _solved_by_inverse, factor, right)[0]

    def triangle(self, system: Tensor) -> Tensor | None:
        lower, failed = torch.linalg.cholesky_ex(system)
        return None if bool(failed) else lower

    def triangle_solve(self, lower: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
        return torch.linalg.solve_triangular(lower.T if transposed else lower, right, upper=transposed)

    def prefers_shifts(self, width: int, columns: int) -> bool:
        if not self._cuda:
            return super().prefers_shifts(width, columns)
        return columns <= _SHIFTED_COLUMNS

    def shifted_solve(self, matrix: Tensor, scales: Tensor, ridge: float, right: Tensor) -> Tensor | None:
        solution = torch.empty_like(right)
        together = max(1, _BATCH_BYTES // (8 * matrix.numel()))
        replayed = self._cuda and len(matrix) <= _REPLAYED
        solve = partial(_shifted, ridge=ridge)
        certain = []
        for first in range(0, len(scales), together):
            part = slice(first, first + together)
            asked = matrix, scales[part], right[:, part]
            found, sure = self._replays.run(("shifted", ridge), solve, *asked) if replayed else solve(*asked)
            solution[:, part] = found
            certain.append(sure)
        return solution if all(map(bool, certain)) else None

    def eigh(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.linalg.eigh(matrix))

    def thin_svd(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Through a triangle of the shorter side, whose SVD is faster on the host than on a GPU: LAPACK's
        # own way (gesdd) wherever the sides differ this much, so that signs are those of the other backends.
        rows, columns = matrix.shape
        if columns and rows >= columns * 11 // 6:
            directions, triangle = torch.linalg.qr(matrix)
            left, singular, right = self._svd(triangle)
            return directions @ left, singular, right
        if rows and columns >= rows * 11 // 6:
            directions, triangle = torch.linalg.qr(matrix.T)
            left, singular, right = self._svd(triangle.T)
            return left, singular, right @ directions.T
        return self._svd(matrix)

    def _svd(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Made on the host, and brought back."""
        values = self.host(matrix)
        # A second thread would keep a processor from the one that launches the device's work.
        with blas_threads(1):
            left, singular, right = np.linalg.svd(values, full_matrices=False)
        return self.array(left), self.array(singular), self.array(right)

    def begin_svd(self, matrix: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]] | None:
        rows, columns = matrix.shape
        if not self._cuda or not columns or rows < columns * 11 // 6:
            return None
        # The device has other work while the host, which has little, decomposes the triangle. It is carried
        # there and back in a line of its own: what is in the other one meanwhile is not waited for.
        directions, triangle = torch.linalg.qr(matrix)
        ready = torch.cuda.current_stream(self._place).record_event()
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._place)  # type: ignore[no-untyped-call]

        def decomposed() -> tuple[Tensor, ...]:
            with torch.cuda.stream(self._beside):
                self._beside.wait_event(ready)
                return self._svd(triangle)

        begun = run_beside(decomposed)

        def found() -> tuple[Tensor, Tensor, Tensor]:
            left, singular, right = begun.result()
            for tensor in (left, singular, right):
                # Its memory is used again only after what is in line now.
                tensor.record_stream(torch.cuda.current_stream(self._place))
            return directions @ left, singular, right

        return found


def _shifted(matrix: Tensor, scales: Tensor, right: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """The columns of `shifted_solve`, and whether they are to be trusted."""
    systems = matrix * scales[:, None, None]
    systems.diagonal(dim1=1, dim2=2).add_(ridge)
    factors = BlockFactors(systems)
    found = factors.solve(right)
    step = factors.solve(right - ridge * found - scales * (matrix @ found))
    small = step.norm(dim=0) <= STEP * found.norm(dim=0)
    return found + step, (factors.least_pivot >= PIVOT * ridge) & small.all()


def _solved_by_inverse(factor: Tensor, right: Tensor) -> tuple[Tensor]:
    inverse = inverted(factor[None])[0]
    return (inverse.T @ (inverse @ right),)


@cache
def _type(dtype: Any) -> torch.dtype:
    found: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return found


def _from_numpy(values: NDArray[Any]) -> Tensor:
    if values.flags.writeable:
        return torch.from_numpy(values)
    with warnings.catch_warnings():
        # Of arrays that may not be written: what is made of them here is not written either.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)
