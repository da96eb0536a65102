"""Local steps on a GPU, recorded once and replayed.

A step of a deep network on a small batch is a thousand small kernels, and starting them one by one from
Python costs several times what running them does. A CUDA graph starts them all at once. The arithmetic is
that of the recorded step, kernel by kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedsolve.gradient.steps import Step

WORTH = 4
"""How many more steps of one size it takes for recording to pay off."""

_local = threading.local()


class Recorder:
    """Takes the steps of one client, runs the first of each batch size as it is, and replays the others.

    advance: everything a step does to the weights, given its inputs and targets.
    """

    def __init__(self, advance: Callable[[Step], None], sizes: list[int]) -> None:
        self._advance = advance
        self._left = {size: sizes.count(size) for size in set(sizes)}
        self._seen: set[int] = set()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Step]] = {}

    def run(self, step: Step) -> None:
        """Run or replay this step; its losses and output are filled in."""
        size = step.targets.shape[1]
        self._left[size] -= 1
        if size not in self._graphs:
            # The first step of a round makes the optimiser's buffers, which a graph must find in place.
            if not self._seen or self._left[size] + 1 < WORTH:
                self._seen.add(size)
                self._advance(step)
                return
            self._graphs[size] = self._record(step)
        graph, recorded = self._graphs[size]
        recorded.inputs.copy_(step.inputs)
        recorded.targets.copy_(step.targets)
        graph.replay()
        step.losses, step.output = recorded.losses, recorded.output

    def _record(self, step: Step) -> tuple[torch.cuda.CUDAGraph, Step]:
        import torch

        recorded = step.copied(step.inputs.clone(), step.targets.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool(step.inputs.device), capture_error_mode="thread_local"):
            self._advance(recorded)
        return graph, recorded


def _pool(device: torch.device) -> Any:
    """Memory that the graphs of this thread share, one after the other; kept alive by a graph of its own."""
    import torch

    kept: dict[str, tuple[Any, torch.cuda.CUDAGraph, Tensor]] = _local.__dict__.setdefault("pools", {})
    if str(device) not in kept:
        handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle, capture_error_mode="thread_local"):
            placeholder = torch.zeros(1, device=device)
        kept[str(device)] = (handle, graph, placeholder)
    return kept[str(device)][0]
