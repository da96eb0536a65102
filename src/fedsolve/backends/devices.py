"""Where arrays are computed: devices by name, their kernels, and with how many threads torch uses them."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array, philox_uniforms
from fedsolve.backends.kernels import Kernels
from fedsolve.errors import DataError
from fedsolve.threads import thread_count

if TYPE_CHECKING:
    import torch


NUMPY = Kernels()


@cache
def kernels_on(device: str) -> Kernels:
    """The kernels of a device: "cpu" (numpy), "cuda", "cuda:1", "torch:cpu", or "auto"."""
    place = resolve(device)
    if place != device:
        return kernels_on(place)
    if place == "cpu":
        return NUMPY
    from fedsolve.backends.torch_kernels import TorchKernels

    return TorchKernels(place)


def kernels_of(array: Any) -> Kernels:
    """The kernels of the place where this array lies."""
    if isinstance(array, np.ndarray | np.generic):
        return NUMPY
    place = str(array.device)
    return kernels_on("torch:cpu" if place == "cpu" else place)


def host(array: Any) -> Array:
    """The array in the host's memory, as numpy's; the same one where it lies there already."""
    return array if isinstance(array, np.ndarray) else kernels_of(array).host(array)


_NAMES = "'cpu', 'torch:cpu', 'cuda', 'cuda:1' or 'auto'"


def check_name(name: str) -> str:
    """Check the name of a device for closed forms; this machine may lack the device itself."""
    _check_text(name)
    if re.fullmatch(r"cpu|torch:cpu|auto|cuda(:[0-9]+)?", name) is None:
        raise DataError(f"device '{name}' is not one to compute on; use {_NAMES}.")
    return name


def resolve(name: str) -> str:
    """A device by its name, checked: "cpu", "torch:cpu" (torch instead of numpy), "cuda", "cuda:1".

    "auto" is a GPU where torch finds one, and "cpu" otherwise.
    """
    if name == "cpu" or (name == "auto" and find_spec("torch") is None):
        return "cpu"
    device = find_device(name)
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    if name not in ("auto", "torch:cpu"):
        raise DataError(f"device '{name}' cannot compute these; use {_NAMES}.")
    return "cpu" if name == "auto" else name


def find_device(name: str) -> Any:
    """The torch device of this name; "auto" is a GPU where there is one."""
    _check_text(name)
    try:
        import torch
    except ImportError as problem:
        raise DataError(
            f"device '{name}' needs torch: pip install 'fedsolve[torch]'. Without it, use the device cpu."
        ) from problem
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name.removeprefix("torch:"))
    except RuntimeError as problem:
        raise DataError(f"device '{name}' is not one that torch knows; use {_NAMES}.") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DataError(f"device '{name}' was asked for, and torch finds no GPU here. Use the device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DataError(
            f"device '{name}' was asked for, and torch finds {torch.cuda.device_count()} GPUs here."
        )
    return device


def _check_text(name: object) -> None:
    if not isinstance(name, str):
        raise DataError(f"device must be a name; got {name!r}. Use {_NAMES}.")


def torch_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which torch computes with numbers of this one: the same in this machine's byte order, or
    float64 where torch lacks it.
    """
    lacking = (dtype.kind == "f" and dtype.itemsize > 8) or (dtype.kind == "u" and dtype.itemsize > 1)
    return np.dtype(np.float64) if lacking else dtype.newbyteorder("=")


@cache
def triton_works() -> bool:
    """Whether Triton works here and is right; besides the package it needs a C compiler."""
    try:
        import torch

        from fedsolve.backends.triton_philox import drawn_on

        return bool(drawn_on(torch.device("cuda"), 7, 9).tolist() == philox_uniforms(7, 9).tolist())
    except Exception as problem:
        warnings.warn(
            f"Triton makes no kernels here ({type(problem).__name__}: {problem}), so slower ones are used on "
            "the GPU. It comes with torch on Linux, and needs a C compiler such as gcc.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


_USERS: list[tuple[bool, bool, bool]] = []
_LOCK = threading.Lock()


@contextmanager
def surroundings(device: torch.device) -> Iterator[None]:
    """One torch thread while several clients train at once, and no kernel chosen by timing it."""
    with (
        nullcontext() if thread_count() > 1 else one_thread(),
        _repeatable() if device.type == "cuda" else nullcontext(),
    ):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: on small work several spend more time waiting for each other than computing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Let cuDNN choose kernels without timing; its flags hold for all threads until the last one leaves."""
    from torch.backends import cudnn

    with _LOCK:
        _USERS.append((cudnn.enabled, cudnn.benchmark, cudnn.deterministic))
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = True, False, True
    try:
        yield
    finally:
        with _LOCK:
            # Who comes later finds the flags as set, so the first entry is always what was there before.
            before = _USERS[0]
            _USERS.pop()
            if not _USERS:
                cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before
