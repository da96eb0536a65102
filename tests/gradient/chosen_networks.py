"""Functions that make networks, named by tests."""

from __future__ import annotations

from typing import Any


def plain(features: int, outputs: int) -> Any:
    """A linear layer."""
    from torch import nn

    return nn.Linear(features, outputs)
