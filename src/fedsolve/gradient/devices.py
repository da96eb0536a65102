"""Where torch computes, and with how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedsolve.errors import DataError
from fedsolve.threads import several_threads

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> Any:
    """The torch device of this name; "auto" is a GPU where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise DataError(f"device '{name}' is not one that torch knows ('cpu', 'cuda', 'auto').") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DataError(f"device '{name}' was asked for, and torch finds no GPU here. Use the device cpu.")
    return device


@contextmanager
def surroundings(device: torch.device) -> Iterator[None]:
    """One torch thread while several clients train at once, and no kernel chosen by timing it."""
    import torch

    before = torch.get_num_threads()
    if not several_threads():
        torch.set_num_threads(1)
    try:
        if device.type == "cuda":
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
                yield
        else:
            yield
    finally:
        torch.set_num_threads(before)
