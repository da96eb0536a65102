"""Local steps on a GPU, recorded once and replayed.

A step of a deep network on a small batch is a thousand small kernels, and starting them one by one from
Python costs several times what running them does. A CUDA graph starts them all at once. The arithmetic is
that of the recorded step, kernel by kernel.

A graph knows addresses. Where a method's steps read tensors alone (`GradientMethod.tensors_only`), what was
recorded with one client serves all that train in the same slot: their values are copied to where the graph
looks.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fedsolve.backends.torch_later import Tensor, torch
from fedsolve.gradient.learners import NetworkOutput
from fedsolve.gradient.optimisers import Optimiser

if TYPE_CHECKING:
    from fedsolve.gradient.feedback import Feedback
    from fedsolve.gradient.steps import Step

WORTH = 4
"""How many steps of one size, still to come or done so far, it takes for recording to pay off."""

MOST = 192
"""Graphs that a slot keeps; short last batches have many sizes."""

_ONE_AT_A_TIME = threading.Lock()
"""Held while steps are recorded: torch allows one recording at a time in a process."""

_ONE_MORE = threading.Lock()
_HANDS: dict[int, int] = {}
_THREADS = [ThreadPoolExecutor(1, thread_name_prefix=f"steps-{number}") for number in range(8)]
"""Threads that run and record steps, and which of them each size of a batch has."""

Made = TypeVar("Made")

Key = tuple[int, tuple[str, ...]]
"""The rows of a batch, and the layers of feedback alignment."""


def replays(device: torch.device) -> bool:
    """Whether steps can be recorded and replayed there."""
    return device.type == "cuda"


@dataclass
class Recording:
    """A recorded step: what starts it, the tensors it reads, and where it leaves losses and output."""

    replay: Callable[[], None]
    reads: list[Tensor]
    results: tuple[Tensor, ...]

    def run(self, step: Step) -> None:
        """Do to the weights what this step would; its losses and output are filled in."""
        for place, tensor in zip(self.reads, step.reads, strict=True):
            place.copy_(tensor)
        self.replay()
        step.losses = self.results[0]
        step.output = NetworkOutput(*self.results[1:]) if len(self.results) == 3 else None


class Recorder:
    """Takes the steps of one client, runs the first as it is, and replays those worth recording.

    advance: everything a step does to the weights, given what it reads. sizes: rows of all batches
    to come. layers: of feedback alignment. recordings: what was recorded before, and how many steps were not;
    what is recorded is added.
    """

    def __init__(
        self,
        advance: Callable[[Step], None],
        sizes: Sequence[int],
        layers: tuple[str, ...],
        recordings: Recordings,
        pool: Pool,
    ) -> None:
        self._advance = advance
        self._left = {size: sizes.count(size) for size in set(sizes)}
        self._layers = layers
        self._graphs, self._done = recordings.graphs, recordings.done
        self._pool = pool

    def run(self, step: Step) -> None:
        """Run or replay this step; its losses and output are filled in."""
        size = step.targets.shape[1]
        self._left[size] -= 1
        key = size, self._layers
        if key not in self._graphs:
            # The first step of a size, with whatever layers, makes the optimiser's buffers, and cuDNN's
            # handles and plans, which a graph must find in place.
            is_first = not any(rows == size for rows, _ in self._done)
            if is_first or max(self._done[key], self._left[size] + 1) < WORTH:
                self._done[key] += 1
                on_thread_of_size(size, lambda: self._advance(step))
                return
            self._graphs[key] = on_thread_of_size(size, lambda: self._record(step))
        self._graphs[key].run(step)

    def _record(self, step: Step) -> Recording:
        recorded = step.copied()

        def work() -> tuple[Tensor, ...]:
            self._advance(recorded)
            recorded.gradients = []
            assert recorded.losses is not None
            output = recorded.output
            return (recorded.losses, *(() if output is None else (output.features, output.logits)))

        replay, results = capture(work, self._pool)
        return Recording(replay, recorded.reads, tuple(r.detach() for r in results))


def on_thread_of_size(size: int, work: Callable[[], Made]) -> Made:
    """Do work that starts kernels one by one, for a batch of this size, on the current stream.

    cuDNN plans every convolution for every size of a batch, for seconds in a deep network, and keeps the
    plans with the thread that made them. So each size has a thread that stays, forward and backward; work
    for different sizes is planned at the same time.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def there() -> Made:
        with torch.autograd.set_multithreading_enabled(False):
            if stream is None:
                return work()
            with torch.cuda.stream(stream):
                return work()

    with _ONE_MORE:
        number = _HANDS.setdefault(size, len(_HANDS)) % len(_THREADS)
    return _THREADS[number].submit(there).result()


class Pool:
    """Memory that the graphs of a slot share, one after the other; kept alive by a graph of its own."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._keeper: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def handle(self) -> Any:
        """What torch knows this memory by."""
        if self._keeper is None:
            self._handle = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with _ONE_AT_A_TIME:
                graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
                placeholder = torch.zeros(1, device="cuda")
                graph.capture_end()
            self._keeper = graph, placeholder
        return self._handle


def capture(
    work: Callable[[], tuple[Tensor, ...]], pool: Pool
) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Record work on the current stream: a function that replays it, and the tensors it fills.

    Not by `torch.cuda.graph`, which waits for everybody's work and hands all spare memory back each time.
    """
    handle = pool.handle()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream().synchronize()
    with _ONE_AT_A_TIME:
        graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        try:
            results = work()
        finally:
            graph.capture_end()
    return graph.replay, results


class Recordings:
    """Graphs kept from client to client, with the tensors they read and their optimiser."""

    def __init__(self) -> None:
        self._method: Any = None
        self._tensors: dict[Any, Tensor] = {}
        self._feedback: dict[tuple[str, ...], Feedback] = {}
        self.optimiser: Optimiser | None = None
        self.graphs: RecentRecordings = RecentRecordings()
        self.done: Counter[Key] = Counter()

    def receive(self, method: Any, tensors: Mapping[Any, Tensor]) -> Mapping[Any, Tensor]:
        """Put a client's tensors where recorded steps look: the tensors there, by the same names.

        Where they are of another run, nothing that was recorded is kept.
        """
        kinds, known = ({name: (t.shape, t.dtype) for name, t in s.items()} for s in (tensors, self._tensors))
        if method == self._method and kinds == known:
            torch._foreach_copy_(list(self._tensors.values()), [tensors[name] for name in self._tensors])
        else:
            self._method, self._tensors = method, dict(tensors)
            self._feedback, self.optimiser, self.graphs, self.done = {}, None, RecentRecordings(), Counter()
        return self._tensors

    def feedback(self, layers: tuple[str, ...], make: Callable[[], Feedback | None]) -> Feedback | None:
        """Feedback alignment in these layers, whose matrices stay where they are."""
        if layers not in self._feedback:
            made = make()
            if made is None:
                return None
            self._feedback[layers] = made
        return self._feedback[layers]


class RecentRecordings(OrderedDict[Key, Recording]):
    """The graphs used last, as many as are kept."""

    def __setitem__(self, key: Key, recording: Recording) -> None:
        super().__setitem__(key, recording)
        while len(self) > MOST:
            self.popitem(last=False)

    def __getitem__(self, key: Key) -> Recording:
        self.move_to_end(key)
        return super().__getitem__(key)
