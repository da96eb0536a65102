"""Work of many small kernels on a GPU, recorded once and replayed.

Starting kernels one by one from Python takes longer than they run for where matrices are small. A CUDA graph
starts them all at once; the arithmetic is that of the recorded work, kernel by kernel.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = Any
Work = Callable[..., tuple[Tensor, ...]]

MOST = 4
"""Recordings that are kept: each holds the memory of its work."""


@dataclass(frozen=True)
class _Recording:
    replay: Callable[[], None]
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


class Replays:
    """Recorded work of one device, by what it is and the shapes it is for."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Recording | None] = OrderedDict()
        self._refused: set[Hashable] = set()
        self._lock = threading.Lock()

    def run(self, name: Hashable, work: Work, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What `work` makes of these tensors; the same name stands for the same work on any numbers.

        The first time it runs as it is, so that libraries can set up what they keep; from the second time on
        it is replayed. It may neither wait for the device nor look at numbers. What cannot be recorded, for
        lack of memory for instance, runs as it is.
        """
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            return work(*inputs)
        key = name, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        with self._lock:
            if key in self._refused:
                return work(*inputs)
            if key not in self._known:
                self._known[key] = None
                while len(self._known) > MOST:
                    self._known.popitem(last=False)
                return work(*inputs)
            recording = self._known[key]
            if recording is None:
                try:
                    recording = self._record(work, inputs)
                except RuntimeError as problem:
                    self._refused.add(key)
                    warnings.warn(
                        f"work of the GPU cannot be recorded ({problem}); it is done kernel by kernel, with "
                        "the same result, which takes longer.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return work(*inputs)
                self._known[key] = recording
            self._known.move_to_end(key)
            for place, tensor in zip(recording.inputs, inputs, strict=True):
                place.copy_(tensor)
            recording.replay()
            return tuple(result.clone() for result in recording.results)

    @staticmethod
    def _record(work: Work, inputs: tuple[Tensor, ...]) -> _Recording:
        places = tuple(tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = work(*places)
        return _Recording(graph.replay, places, results)
