"""The client's side: owns data, answers requests, keeps only what it can rebuild.

`answer(request)` is repeatable: the same request gives the same term, bit for bit. A method's own
file registers its client steps with `@step(kind)`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsolve import registry
from fedsolve.backends import Kernels, kernels_on
from fedsolve.backends.devices import resolve
from fedsolve.errors import DataError, TermError
from fedsolve.federation.client_data import ClientData, rows_for
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.parts import Part, part_of
from fedsolve.federation.states import StateStore
from fedsolve.federation.workspace import Workspace
from fedsolve.permissions import check_allowed

if TYPE_CHECKING:
    from fedsolve.model import Model

__all__ = [
    "ClientData",
    "Memory",
    "Participant",
    "adds_up",
    "answer_together",
    "group_size",
    "group_step",
    "step",
    "step_of",
]

DEFAULT_MEMORY = 1 << 30
"""Bytes a participant may keep in memory for what it derives from its rows."""


@dataclass
class Memory:
    """What a participant keeps between requests.

    All but `states` can be rebuilt from the chain; `states` is the client's own share of a method's
    state, by run and exchange. `device` is where steps compute.
    """

    chain: Chain = field(default_factory=Chain)
    cache: dict[str, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    budget: int = DEFAULT_MEMORY
    scratch: Path | None = None
    name: str = ""
    states: StateStore = field(default_factory=StateStore)
    device: str = "cpu"

    @property
    def kernels(self) -> Kernels:
        """The kernels of the participant's device."""
        return kernels_on(self.device)

    def scratch_folder(self) -> Path:
        """Where mapped arrays live; the system's temporary folder unless one was named."""
        return self.scratch if self.scratch is not None else Path(tempfile.gettempdir())


Step = Callable[[ClientData, Request, Memory], Term]
GroupStep = Callable[[Sequence[ClientData], Request, Sequence[Memory]], list[Term]]

Guarding = Callable[[Request, Chain, ClientData], None]
"""Refuses a request, by raising; the chain is that of the request."""

_STEPS: dict[str, Step] = {}
_GROUP_STEPS: dict[str, tuple[GroupStep, Callable[[Request, Chain, str], int]]] = {}
_ADDING_UP: set[str] = set()


def step(kind: str, *, over_rows: bool = False) -> Callable[[Step], Step]:
    """Register a client step: the function that answers requests of this kind.

    over_rows: whether the term is a sum over rows, so that the answer of clients who pool their rows is the
        sum of their answers. Engines with very many clients then ask neighbours as
        one, and clients that share a device answer as one.
    """

    def register(function: Step) -> Step:
        if function.__module__.partition(".")[0] != "fedsolve":
            registry.enter_all()  # what is there already must be known
        known = _STEPS.get(kind)
        if known is not None and _place(known) != _place(function):
            raise DataError(
                f"requests of kind '{kind}' are answered by {_place(known)} already. Choose another kind, "
                f"such as '{function.__module__}.{kind}'."
            )
        _STEPS[kind] = function
        if over_rows:
            _ADDING_UP.add(kind)
        return function

    return register


def adds_up(kind: str) -> bool:
    """Whether answers to requests of this kind are sums over rows."""
    _is_known(kind)
    return kind in _ADDING_UP


TOGETHER = "together"
"""In the note of a request: how many answers each client gives in one, over all requests of a run."""


def answers_in(request: Request) -> int:
    """How many answers each client gives to this request."""
    return int(request.note.get(TOGETHER, 1))


def step_of(kind: str) -> Step:
    """The client step that answers requests of this kind."""
    if not _is_known(kind):
        raise TermError(
            f"requests of kind '{kind}' are not known here. Install the same fedsolve version as the server."
        )
    return _STEPS[kind]


def _is_known(kind: str) -> bool:
    if kind not in _STEPS:
        registry.enter_all()
    return kind in _STEPS


def _place(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def group_step(kind: str, together: Callable[[Request, Chain, str], int]) -> Callable[[GroupStep], GroupStep]:
    """Register a step that answers for several clients of one process at once, each with its own term.

    together: how many clients a group should have for this request on this device. It may not depend on the
        machine otherwise, so that results do not depend on the number of workers. A term does not live in
        the workspace.
    """

    def register(function: GroupStep) -> GroupStep:
        _GROUP_STEPS[kind] = (function, together)
        _STEPS[kind] = lambda data, request, memory: function([data], request, [memory])[0]
        return function

    return register


def group_size(request: Request, chain: Chain, device: str = "cpu") -> int:
    """How many clients of one process answer this request together on this device."""
    _is_known(request.kind)
    entry = _GROUP_STEPS.get(request.kind)
    return 1 if entry is None else max(1, entry[1](request, chain, device))


def answered_by(kind: str, data: ClientData, request: Request, memory: Memory) -> Term:
    """The term of these rows, where it was computed."""
    return step_of(kind)(data, request, memory)


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
        """
        self.name = name
        self.data = data
        self._own_states = states
        self._parts: dict[Part, tuple[ClientData, dict[str, Any]]] = {}
        self._parts_of: list[str] = []
        self._channels: dict[str, Callable[[bytes], bytes]] = {}
        self._guard: Guarding | None = None
        self._memory = Memory(
            budget=memory_budget,
            scratch=scratch,
            name=name,
            states=StateStore(states, name),
            device=resolve(device),
        )

    def __len__(self) -> int:
        return len(self.data)

    def answer(self, request: Request, workspace: Workspace | None = None) -> Term | Needs:
        """This participant's term for the request, or what it needs before it can answer.

        The term lives in `workspace` when one is given, until that workspace is used again.
        """
        if not self._memory.chain.accept(request):
            return Needs(len(self._memory.chain))
        self._admit_method()
        if not _is_known(request.kind):
            raise TermError(
                f"'{self.name}' does not know requests of kind '{request.kind}'. "
                "Install the same fedsolve version as the server."
            )
        if self._guard is not None:
            self._guard(request, self._memory.chain, self.data)
        self._memory.workspace = workspace if workspace is not None else Workspace()
        data, memory = self.view(request)
        return _STEPS[request.kind](data, request, memory).on_host()

    def view(self, request: Request) -> tuple[ClientData, Memory]:
        """The rows as steps see them, and what is kept of them: of the part that the request is about,
        prepared as the run says.
        """
        chain = self._memory.chain
        if self._parts_of != chain.digests[:2]:  # another run: what was derived for parts went with the last
            self._parts_of = chain.digests[:2]
            self._parts.clear()
        part = part_of(request, chain)
        data, memory = (self.data, self._memory) if part is None else self._part(part)
        if request.position == 0:  # a question without a model, such as an evaluation
            return data, memory
        return rows_for(data, request.kind, memory.chain, memory.cache), memory

    def _part(self, part: Part) -> tuple[ClientData, Memory]:
        if part not in self._parts:
            self._parts[part] = part.of(self.data), {}
        data, cache = self._parts[part]
        budget = int(part.fraction * self._memory.budget)
        return data, replace(self._memory, cache=cache, budget=budget)

    def _admit_method(self) -> None:
        """Refuse a method from outside that nobody here allowed; import one that was."""
        blocks = self._memory.chain.blocks
        key = blocks[0].note.get("opening", {}).get("method") if blocks else None
        if registry.is_foreign(key):
            check_allowed("method", key)
            registry.method_class(key)

    @property
    def memory_budget(self) -> int:
        """Bytes it may keep in memory for what it derives from its rows."""
        return self._memory.budget

    @property
    def scratch(self) -> Path | None:
        """Where its mapped arrays live."""
        return self._memory.scratch

    @property
    def device(self) -> str:
        """Where its steps compute."""
        return self._memory.device

    def move(self, device: str) -> None:
        """Compute on this device from now on; what was derived from the rows is forgotten."""
        if resolve(device) != self._memory.device:
            self._memory.device = resolve(device)
            self._memory.cache.clear()

    def keep_states(self, folder: Path | None) -> None:
        """Keep the client's share of a method's state in this folder from now on; None: as at the start."""
        wanted = self._own_states if folder is None else folder
        if wanted != self._memory.states.folder:
            self._memory.states = StateStore(wanted, self.name)

    @property
    def chain(self) -> Chain:
        """The model so far as this participant knows it, to be kept for a process that starts anew."""
        return self._memory.chain

    def take_back(self, chain: Chain) -> None:
        """Go on from this model so far; participants of one process may share one."""
        self._memory.chain = chain

    def kept(self, name: str) -> Any:
        """What the steps of a method keep here under this name between requests; None where nothing is."""
        return self._memory.cache.get(name)

    @property
    def states(self) -> StateStore:
        """This client's share of the methods' state."""
        return self._memory.states

    def personalise(self, model: Model) -> Model:
        """This participant's own predictor from a shared model and its rows; nothing is sent to anybody.

        It takes no exchange, so a participant that joined after training has it too. Save it here:
        `participant.personalise(model).save(path)`.
        """
        return model.personalised(self.data, self.states)

    def obey(self, guard: Guarding | None) -> None:
        """Let this function refuse requests from now on, by raising, before a step computes anything."""
        self._guard = guard

    def attend(self, channel: str, answer: Callable[[bytes], bytes]) -> None:
        """Let letters of this channel be answered by this function from now on."""
        self._channels[channel] = answer

    def reply(self, channel: str, letter: bytes) -> bytes:
        """What this participant answers to a letter."""
        if channel not in self._channels:
            raise TermError(f"'{self.name}' takes no letters of the kind '{channel}'.")
        return self._channels[channel](letter)

    def forget(self) -> None:
        """Drop everything derived from earlier requests, as a restart would; states on disk stay."""
        memory = self._memory
        self._parts.clear()
        self._memory = Memory(
            budget=memory.budget,
            scratch=memory.scratch,
            name=self.name,
            states=StateStore(memory.states.folder, self.name),
            device=memory.device,
        )


def answer_together(
    participants: Sequence[Participant], request: Request, workspace: Workspace
) -> list[Term] | None:
    """The terms of a group in its order; None when one of them must be asked by itself first."""
    if not all(participant._memory.chain.accept(request) for participant in participants):
        return None
    for participant in participants:
        participant._memory.workspace = workspace
    function, _ = _GROUP_STEPS[request.kind]
    views = [participant.view(request) for participant in participants]
    return function([data for data, _ in views], request, [memory for _, memory in views])
