"""torch, loaded when something of it is first used: fedsolve works without it, and it takes seconds to load.

from fedsolve.backends.torch_later import F, Tensor, nn, torch
"""

from __future__ import annotations

import importlib
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["GENERATOR", "F", "Tensor", "nn", "torch"]

GENERATOR = threading.RLock()
"""Held by whoever draws from torch's own generator, which all threads share."""


class Later(ModuleType):
    """A module by its name; asking for anything in it loads it, and what was asked for is kept."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
else:
    torch, nn, F = Later("torch"), Later("torch.nn"), Later("torch.nn.functional")
    Tensor = Any  # for annotations
