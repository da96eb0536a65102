"""The client's side: owns data, answers requests, keeps only what it can rebuild.

`answer(request)` is repeatable: the same request gives the same term, bit for bit. A method's own
file registers its client steps with `@step(kind)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.backends import NUMPY, Kernels, kernels_on
from fedsolve.errors import DataError, TermError
from fedsolve.federation.client_data import ClientData as ClientData
from fedsolve.federation.client_data import rows_for
from fedsolve.federation.folds import Part, part_of
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.noisy_sums import release_of
from fedsolve.federation.states import StateStore
from fedsolve.registry import check_allowed

if TYPE_CHECKING:
    from fedsolve.model import Model

DEFAULT_MEMORY = 1 << 30
"""Bytes a participant may keep in memory for what it derives from its rows."""


@dataclass(eq=False)
class Workspace:
    """Named scratch arrays of one worker, kept between calls and grown when needed: fresh ones would cost as
    much in page faults as the arithmetic in them. A buffer is valid until its name is asked for again.
    """

    _buffers: dict[str, Array] = field(default_factory=dict)
    _sums: dict[str, Array] = field(default_factory=dict)
    _within: dict[str, dict[str, Array]] = field(default_factory=dict, init=False)

    def within(self, name: str) -> Workspace:
        """A workspace with sums of its own and the same scratch arrays."""
        return Workspace(self._buffers, self._within.setdefault(name, {}))

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> Array:
        """An array of this shape with unspecified contents."""
        size = int(np.prod(shape, dtype=np.int64))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != np.dtype(dtype) or buffer.size < size:
            buffer = self._buffers[name] = np.zeros(size, dtype=dtype)
        view: np.ndarray[Any, Any] = buffer[:size].reshape(shape)
        return view

    def sums(self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float64) -> Array:
        """An array for a term. It is zeroed when first made, so that an unused lower triangle stays zero."""
        array = self._sums.get(name)
        if array is None or array.shape != shape or array.dtype != np.dtype(dtype):
            array = self._sums[name] = np.zeros(shape, dtype=dtype)
        return array


@dataclass
class Memory:
    """What a participant keeps between requests.

    All but `states` can be rebuilt from the chain; `states` is the client's own share of a method's
    state, by run and exchange. `kernels` say where steps compute, `scratch` where mapped arrays live: in the
    system's temporary folder when None.
    """

    chain: Chain = field(default_factory=Chain)
    cache: dict[str, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    budget: int = DEFAULT_MEMORY
    scratch: Path | None = None
    name: str = ""
    states: StateStore = field(default_factory=StateStore)
    kernels: Kernels = NUMPY


Step = Callable[[ClientData, Request, Memory], Term]
GroupStep = Callable[[Sequence[ClientData], Request, Sequence[Memory]], list[Term]]

Guarding = Callable[[Request, Chain, ClientData], None]
"""Refuses a request, by raising; the chain is that of the request."""


@dataclass(frozen=True)
class Kind:
    """What answers requests of a kind; see `step` and `group_step`."""

    step: Step
    over_rows: bool = False
    releases: Mapping[str, float] | None = None
    counts: Collection[str] = ()
    group: GroupStep | None = None
    together: Callable[[Request, Chain, str], int] = lambda request, chain, device: 1


_KINDS: dict[str, Kind] = {}
_UNKNOWN = Kind(lambda data, request, memory: Term())


def step(
    kind: str,
    *,
    over_rows: bool = False,
    releases: Mapping[str, float] | None = None,
    counts: Collection[str] = (),
) -> Callable[[Step], Step]:
    """Register a client step: the function that answers requests of this kind.

    over_rows: whether the term is a sum over rows, so that clients who bring their rows together answer with
        the sum of their answers (`members`).
    releases: by array, what one row changes at most (`noisy_sums`); without them it answers no private run.
    counts: arrays that are numbers of rows; they tell less than others do.
    """

    def register(function: Step) -> Step:
        if function.__module__.partition(".")[0] != "fedsolve":
            registry.enter_all()  # what is there already must be known
        known = _KINDS.get(kind)
        if known is not None and _place(known.step) != _place(function):
            raise DataError(
                f"requests of kind '{kind}' are answered by {_place(known.step)} already. Choose another "
                f"kind, such as '{function.__module__}.{kind}'."
            )
        _KINDS[kind] = Kind(function, over_rows, releases, counts)
        return function

    return register


def group_step(kind: str, together: Callable[[Request, Chain, str], int]) -> Callable[[GroupStep], GroupStep]:
    """Register a step that answers for several clients of one process at once, each with its own term.

    together: gives the number of clients in a group, for a request, a chain and a device. Nothing else about
        the machine may matter, so that results do not depend on the number of workers. Terms do not live in
        the workspace.
    """

    def register(function: GroupStep) -> GroupStep:
        def alone(data: ClientData, request: Request, memory: Memory) -> Term:
            return function([data], request, [memory])[0]

        _KINDS[kind] = Kind(alone, group=function, together=together)
        return function

    return register


def kind_of(kind: str) -> Kind:
    """What answers requests of this kind; of one that is not known, nothing adds up or is released."""
    if kind not in _KINDS:
        registry.enter_all()
    return _KINDS.get(kind, _UNKNOWN)


TOGETHER = "together"
"""In the note of a request: how many answers each client gives in one, over all requests of a run."""


def _place(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


class Participant:
    """One silo: a name, its data, and the memory it needs to answer."""

    def __init__(
        self,
        name: str,
        data: ClientData,
        *,
        memory_budget: int = DEFAULT_MEMORY,
        scratch: Path | None = None,
        states: Path | None = None,
        device: str = "cpu",
    ) -> None:
        """states: folder for the client's share of a method's state; kept in memory when None.

        device: where its steps compute, see `backends`; what it sends has the same form from any.
        guard, set later, refuses requests by raising, before a step computes anything.
        channels, filled later, has what answers letters, by what they are about.
        """
        self.name = name
        self.data = data
        self._own_states = states
        self._parts: dict[Part | None, tuple[ClientData, dict[str, Any]]] = {}
        self._parts_of: tuple[ClientData, list[str]] = data, []
        self.guard: Guarding | None = None
        self.channels: dict[str, Callable[[bytes], bytes]] = {}
        self.memory = Memory(
            budget=memory_budget,
            scratch=scratch,
            name=name,
            states=StateStore(states, name),
            kernels=kernels_on(device),
        )

    def __len__(self) -> int:
        return len(self.data)

    def answer(
        self,
        request: Request,
        workspace: Workspace | None = None,
        rows: ClientData | None = None,
        permit: Guarding | None = None,
    ) -> Term | Needs:
        """This participant's term for the request, or what it needs before it can answer.

        The term lies where it was computed: in `workspace` when one is given, until that is used again, or on
        the participant's device.
        rows: those that take part, where not all do. permit: refuses this request, by raising.
        """
        chain = self.memory.chain
        if not chain.accept(request):
            return Needs(len(chain.blocks))
        if registry.is_foreign(key := chain.opening.get("method")):  # imported only if it is allowed here
            check_allowed("method", key)
            registry.method_class(key)
        kind, release = kind_of(request.kind), None
        if kind.releases is not None or (request.position and "privacy" in chain.opening):
            release = release_of(request, chain, kind.releases)
        if kind is _UNKNOWN:
            raise TermError(
                f"requests of kind '{request.kind}' are not known here. Install the same fedsolve version as "
                "the server."
            )
        for guard in (self.guard, permit):
            if guard is not None:
                guard(request, chain, self.data if rows is None else rows)
        self.memory.workspace = workspace if workspace is not None else Workspace()
        data, memory = self.view(request, rows)
        term = kind.step(data, request, memory)
        return term if release is None else release.check(term)

    def view(self, request: Request, rows: ClientData | None = None) -> tuple[ClientData, Memory]:
        """The rows as steps see them, and what is kept of them: of the part that the request is about,
        prepared as the run says.
        """
        chain, whole = self.memory.chain, self.data if rows is None else rows
        # In another run, or with other rows, what was derived for parts went with the last.
        if self._parts_of[0] is not whole or self._parts_of[1] != chain.digests[:2]:
            self._parts_of = whole, chain.digests[:2]
            self._parts.clear()
        data, memory, part = self.data, self.memory, part_of(request, chain)
        if part is not None or whole is not self.data:
            if part not in self._parts:
                self._parts[part] = (whole if part is None else part.of(whole)), {}
            data, cache = self._parts[part]
            share = 1.0 if part is None else len(part.folds) / part.count
            memory = replace(memory, cache=cache, budget=int(share * memory.budget))
        if request.position == 0:  # a question without a model, such as an evaluation
            return data, memory
        return rows_for(data, request.kind, memory.chain, memory.cache), memory

    def move(self, device: str) -> None:
        """Compute on this device from now on; what was derived from the rows is forgotten."""
        if kernels_on(device) is not self.memory.kernels:
            self.memory.kernels = kernels_on(device)
            self.memory.cache.clear()

    def keep_states(self, folder: Path | None) -> None:
        """Keep the client's share of a method's state in this folder from now on; None: as at the start."""
        wanted = self._own_states if folder is None else folder
        if wanted != self.memory.states.folder:
            self.memory.states = StateStore(wanted, self.name)

    def personalise(self, model: Model) -> Model:
        """This participant's own predictor from a shared model and its rows; nothing is sent to anybody.

        It takes no exchange, so a participant that joined after training has it too. Save it here:
        `participant.personalise(model).save(path)`.
        """
        return model.personalised(self.data, self.memory.states)

    def place_rows(self) -> None:
        """Copy the rows to the device now; otherwise the first exchange does."""
        self.data.placed(self.memory.kernels)

    def reply(self, channel: str, letter: bytes) -> bytes:
        if channel not in self.channels:
            raise TermError(f"'{self.name}' takes no letters of the kind '{channel}'.")
        return self.channels[channel](letter)

    def forget(self) -> None:
        """Drop everything derived from earlier requests, as a restart would; states on disk stay."""
        memory = self.memory
        self._parts.clear()
        states = StateStore(memory.states.folder, self.name)
        self.memory = replace(memory, chain=Chain(), cache={}, workspace=Workspace(), states=states)


def ask(
    participant: Participant, request: Request, chain: Chain, workspace: Workspace | None = None, **rules: Any
) -> tuple[Term, int]:
    """A participant's term, and the bytes of the model blocks that it lacked. rules: as of its `answer`."""
    term = participant.answer(request, workspace, **rules)
    catch_up = 0
    # Twice at most: that a participant holds blocks of another run shows only when newer ones do not
    # continue them; then it asks for everything.
    for _ in range(2):
        if not isinstance(term, Needs):
            break
        fuller = request.starting_at(term.have, chain)
        catch_up += fuller.nbytes
        term = participant.answer(fuller, workspace, **rules)
    if isinstance(term, Needs):
        raise TermError(
            f"it still lacks model blocks from {term.have} on after being sent them. Restart it "
            "(participant.forget()) and resume."
        )
    return term, catch_up
