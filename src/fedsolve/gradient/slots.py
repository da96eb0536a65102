"""Slots: what a client trains with while it trains, kept for the next one.

A slot has the modules of a network, the steps recorded with them, and on a GPU a stream of its own. Clients
in different slots train side by side: the kernels of a small network fill a small part of a large GPU, and
those of different streams run at the same time. What a client computes does not depend on who trains beside
it.

A step of a deep network on a small batch is a thousand small kernels, and starting them one by one from
Python costs several times what running them does. A CUDA graph, recorded once, starts them all at once. The
arithmetic is that of the recorded step, kernel by kernel.

A graph knows addresses. Where a method's steps read tensors alone (`GradientMethod.tensors_only`), what was
recorded with one client serves all that train in the same slot: their values are copied to where the graph
looks.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from fedsolve.backends.torch_later import Tensor, nn, torch
from fedsolve.gradient import networks
from fedsolve.gradient.learners import NetworkOutput
from fedsolve.gradient.optimisers import Optimiser

if TYPE_CHECKING:
    from fedsolve.gradient.feedback import Feedback
    from fedsolve.gradient.gradient_method import GradientMethod
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
Work = Callable[[], tuple["Tensor", ...]]
Advance = Callable[["Step"], None]
Key = tuple[int, bool]
"""The rows of a batch, and whether layers take feedback alignment."""


def replays(device: torch.device) -> bool:
    """Whether steps can be recorded and replayed there."""
    return device.type == "cuda"


def has_room(device: torch.device) -> bool:
    """Whether half of the device's memory is free: recorded steps of a deep network take a gigabyte."""
    free, whole = torch.cuda.mem_get_info(device)
    return 2 * free > whole


def on_thread_of_size(size: int, work: Callable[[], Made]) -> Made:
    """Do work that starts kernels one by one, for a batch of this size, on the current stream.

    cuDNN plans every convolution for every size of a batch, for seconds in a deep network, and keeps the
    plans with the thread that made them. So each size has a thread that stays, forward and backward; work
    for different sizes is planned at the same time.
    """
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def there() -> Made:
        with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
            return work()

    with _ONE_MORE:
        number = _HANDS.setdefault(size, len(_HANDS)) % len(_THREADS)
    return _THREADS[number].submit(there).result()


class Pool:
    """Memory that the graphs of a slot share, one after the other; kept alive by a graph of its own."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._keeper: Any = None

    def record(self, work: Work) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        """Record work on the current stream: a function that replays it, and the tensors it fills."""
        if self._keeper is None:
            self._handle = torch.cuda.graph_pool_handle()
            self._keeper = self._captured(lambda: (torch.zeros(1, device="cuda"),))
        return self._captured(work)

    def _captured(self, work: Work) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        # Not `torch.cuda.graph`, which waits for everybody's work and hands all spare memory back each time.
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        with _ONE_AT_A_TIME:
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                results = work()
            finally:
                graph.capture_end()
        return graph.replay, results


class Recordings:
    """Graphs kept from client to client, with the tensors they read and their optimiser.

    pool: memory of the graphs. done: steps of each kind that were not recorded.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._method: Any = None
        self._tensors: dict[Any, Tensor] = {}
        self._begin()

    def _begin(self) -> None:
        self._feedback: Feedback | None = None
        self.optimiser: Optimiser | None = None
        self.graphs: OrderedDict[Key, Advance] = OrderedDict()
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
            self._begin()
        return self._tensors

    def feedback(self, make: Callable[[], Feedback]) -> Feedback:
        """Feedback alignment, whose matrices stay where they are."""
        if self._feedback is None:
            self._feedback = make()
        return self._feedback

    def stepper(self, advance: Advance, sizes: Sequence[int], aligned: bool) -> Advance:
        """A function that runs the first steps of one client as they are and replays those worth recording.

        advance: everything a step does to the weights, given what it reads. sizes: rows of all batches to
        come. aligned: whether layers take feedback alignment; one recording serves any choice of them.
        """
        left = Counter(sizes)

        def run(step: Step) -> None:
            size = step.targets.shape[1]
            left[size] -= 1
            key = size, aligned
            if key not in self.graphs:
                # The first step of a size, aligned or not, makes the optimiser's buffers, and cuDNN's
                # handles and plans, which a graph must find in place.
                is_first = not any(rows == size for rows, _ in self.done)
                if is_first or max(self.done[key], left[size] + 1) < WORTH:
                    self.done[key] += 1
                    on_thread_of_size(size, lambda: advance(step))
                    return
                self.graphs[key] = on_thread_of_size(size, lambda: self._recorded(step.copied(), advance))
                if len(self.graphs) > MOST:
                    self.graphs.popitem(last=False)
            self.graphs.move_to_end(key)
            self.graphs[key](step)

        return run

    def _recorded(self, step: Step, advance: Advance) -> Advance:
        """A function that does to the weights what its step would, and fills in its losses and output."""

        def work() -> tuple[Tensor, ...]:
            advance(step)
            step.gradients = []
            assert step.losses is not None
            return (step.losses, *(() if step.output is None else (step.output.features, step.output.logits)))

        replay, results = self._pool.record(work)
        losses, *output = (result.detach() for result in results)
        reads = step.reads

        def run(step: Step) -> None:
            for place, tensor in zip(reads, step.reads, strict=True):
                place.copy_(tensor)
            replay()
            step.losses = losses
            step.output = NetworkOutput(*output) if output else None

        return run


_POOL: OrderedDict[tuple[Any, ...], list[Slot]] = OrderedDict()
_KINDS = 4
"""How many kinds of slots are kept for reuse: the most recently used ones."""

_LOCK = threading.Lock()


class Slot:
    """Modules of one kind, the steps recorded with them, and a stream of the GPU.

    user: the method that the slot was last used by. recordings: with each module, by its id. pool: their
    memory.
    """

    def __init__(self, make: Callable[[], nn.Module], device: torch.device) -> None:
        self._make = make
        self._modules: list[tuple[nn.Module, dict[str, Tensor]]] = []
        self.lent = 0
        self.recordings: dict[int, Recordings] = {}
        self.user: Any = None
        self.pool = Pool()
        on_gpu = device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def lend(self) -> nn.Module:
        """A module in training mode, lent to one user until the slot is given back.

        Building a deep network costs more than a step of training it, so modules are used again. Buffers
        that do not travel, such as counters of batches, start as they were built, since who used them last
        is chance.
        """
        if self.lent == len(self._modules):
            network = self._make()
            fresh = {name: counter.clone() for name, counter in _counters(network).items()}
            self._modules.append((network, fresh))
        network, fresh = self._modules[self.lent]
        self.lent += 1
        for name, counter in _counters(network).items():
            counter.copy_(fresh[name])
        return network.train()


@contextmanager
def borrowed(method: GradientMethod, features: int, outputs: int, device: torch.device) -> Iterator[Slot]:
    """A slot for the method's network, at work on its own stream; it comes back at the end."""
    networks.check_allowed(method.network)  # also where the module was made for somebody else
    kind = method.network, networks.custom.serial(method.network)
    key = (*kind, features, outputs, method.precision, method.shape, str(device))
    with _LOCK:
        slot = _chosen(_POOL.get(key, []), method, device)
    if slot is None:
        slot = Slot(lambda: method.build(features, outputs).to(device), device)
    slot.user, slot.lent = method, 0
    try:
        with nullcontext() if slot.stream is None else torch.cuda.stream(slot.stream):
            yield slot
        if slot.stream is not None:
            slot.stream.synchronize()
    finally:
        with _LOCK:
            _POOL.setdefault(key, []).append(slot)
            _POOL.move_to_end(key)
            while len(_POOL) > _KINDS:
                _POOL.popitem(last=False)


def _chosen(spare: list[Slot], method: GradientMethod, device: torch.device) -> Slot | None:
    """The slot that this method used last; else the oldest, unless its steps are worth keeping."""
    for place in reversed(range(len(spare))):
        if spare[place].user == method:
            return spare.pop(place)
    return None if not spare or (replays(device) and has_room(device)) else spare.pop(0)


def _counters(network: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in network.named_buffers() if not value.is_floating_point()}
