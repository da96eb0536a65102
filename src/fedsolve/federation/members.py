"""The clients of one process by name, and in batches that answer together with the union of their rows.

A participant takes some kilobytes by itself. Those whose rows lie in common arrays are made when they are
needed: a hundred thousand of them that only ever take part in sums over rows are never made.

A step that gives a sum over rows answers for a batch with one term: it sees the rows of all its clients as
those of one, in one set of products. Where the rows cannot be brought together, the clients answer one by one
and their terms are added. A step of groups (gradient methods) trains the clients of a batch at once; each has
its own term. A client that cannot answer is found by asking it alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array, check_choice, rows_by_client
from fedsolve.backends.devices import resolve
from fedsolve.errors import DataError
from fedsolve.federation.client_data import ClientData, joined
from fedsolve.federation.cohort import Answer, RunningSum
from fedsolve.federation.fingerprints import Held, Holdings, held_by
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.participant import TOGETHER, Participant, Workspace, ask, kind_of
from fedsolve.labels import TASKS, Task, task_of
from fedsolve.tables.schema import Schema

BLOCK = 64
"""Clients of a batch where there are very many. Bits of sums depend on it."""

ROWS = 1024
"""Rows of a batch where clients are fewer: products of so many reach nearly a processor's rate. Bits of sums
depend on it."""

MANY = 1024
"""Answers of a cohort from which on clients answer in batches of `BLOCK`: terms of one client each would cost
more to make and to add than the products in them."""

SEVERAL = 64
"""Clients from which on those with few rows answer in batches of `ROWS`, where everybody is asked."""


@dataclass(frozen=True)
class PartitionedRows:
    """Rows of common arrays, divided among clients.

    places: the clients' names, in their order, each with its number.
    order, bounds: client k has the rows order[bounds[k]:bounds[k + 1]], `sizes[k]` of them.
    memory: bytes that all clients together may keep.
    """

    features: Array
    labels: Array
    weights: Array | None
    schema: Schema | None
    places: Mapping[str, int]
    order: Array
    bounds: Array
    sizes: Array
    memory: int
    scratch: Path | None

    @cached_property
    def held(self) -> dict[str, Held]:
        return {name: held_by(self.participant(name, name, "cpu").data) for name in self.places}

    def participant(self, first: str, last: str, device: str) -> Participant:
        """One participant with the rows of these clients and of those between them."""
        name = first if first == last else f"{first} to {last}"
        rows = self.order[self.bounds[self.places[first]] : self.bounds[self.places[last] + 1]]
        share = self.memory * len(rows) // len(self.features)
        data = ClientData(self.features, self.labels, rows, self.weights, checked=True, schema=self.schema)
        return Participant(name, data, memory_budget=share, scratch=self.scratch, device=device)


def partitioned(
    features: Any,
    labels: Any,
    owners: Any,
    clients: int | None = None,
    sample_weight: Any = None,
    memory: int = 0,
    scratch: str | Path | None = None,
    schema: Schema | None = None,
) -> PartitionedRows:
    """The rows where `owners == k` for client k, checked; see `LocalFederation.from_arrays`."""
    rows = ClientData(features, labels, weights=sample_weight, schema=schema)
    if len(rows) == 0:
        raise DataError("no rows at all: features and labels are empty. Check the file or the query.")
    names, order, bounds = rows_by_client(owners, len(rows), clients)
    count = len(bounds) - 1
    if names is None:
        names = tuple(f"client-{client:0{len(str(count - 1))}d}" for client in range(count))
    places = {name: client for client, name in enumerate(names)}
    folder = None if scratch is None else Path(scratch)
    sizes = np.diff(bounds)
    return PartitionedRows(
        rows.source, rows.labels, rows.weights, schema, places, order, bounds, sizes, memory, folder
    )


def task_for(
    task: Task | None, classes: Sequence[Any] | None, schema: Schema | None, labels: Iterable[Array]
) -> Task:
    """The task: as given, or as declared classes, the schema or else the labels imply."""
    if task is not None:
        check_choice("task", task, TASKS)
        return task
    if classes is not None:
        return "classification"
    if schema is not None and schema.task is not None:
        return schema.task
    found = [each for each in labels if len(each)]
    return task_of(np.concatenate(found)) if found else "classification"


def batched(
    cohort: Sequence[str],
    rows: Callable[[str], int],
    request: Request,
    chain: Chain,
    everybody: bool,
    device: str = "cpu",
    device_of: Callable[[str], str] = lambda name: "cpu",
) -> list[tuple[str, ...]]:
    """A sorted cohort in batches: first the clients of each device, then neighbours among the rest.

    Batches depend on the clients asked and on their rows, and bits of sums on the batches; neither depends on
    the number of workers. Clients that are asked now and then (not `everybody`) answer by themselves, so that
    they keep what they derived from their rows.

    device: where the server solves; groups of gradient methods have as many clients as suit it.
    """
    kind = kind_of(request.kind)
    size = max(1, kind.together(request, chain, device))
    if size == 1 and kind.over_rows:
        devices = {name: device_of(name) for name in cohort} if everybody else {}
        if places := sorted({*devices.values()} - {"cpu"}):
            batches = [tuple(name for name in cohort if devices[name] == place) for place in places]
            rest = [name for name in cohort if devices[name] == "cpu"]
            return batches + batched(rest, rows, request, chain, False)
        if len(cohort) > 1 and len(cohort) * request.note.get(TOGETHER, 1) >= MANY:
            size = BLOCK
        elif everybody and len(cohort) >= SEVERAL:
            return _by_rows(cohort, rows)
    return [tuple(cohort[first : first + size]) for first in range(0, len(cohort), size)]


def _by_rows(cohort: Sequence[str], rows: Callable[[str], int]) -> list[tuple[str, ...]]:
    """Batches of at least `ROWS` rows; of fewer towards the end, so that workers end together."""
    batches: list[list[str]] = [[]]
    held, left = 0, sum(map(rows, cohort))
    for name in cohort:
        if held >= min(ROWS, max(ROWS // 4, left // 8)):
            batches.append([])
            held = 0
        batches[-1].append(name)
        held += rows(name)
        left -= rows(name)
    return [tuple(batch) for batch in batches]


Outcome = tuple[list[Answer], dict[str, Exception]]
"""What came of a batch: answers that can be added, in client order, and who failed."""


@dataclass(frozen=True)
class Batch:
    """Clients that are asked together.

    union: one participant with the rows of all, where these can be brought together.
    lacking: bytes of the model blocks that each client must be sent in addition to the request.
    """

    names: tuple[str, ...]
    members: Members
    union: Participant | None = None
    lacking: int = 0

    def ask(self, request: Request, chain: Chain, workspace: Workspace, sums: RunningSum) -> Outcome:
        """What the clients answer, checked by `sums`; terms live in `workspace` until it is used again."""
        apart: Exception | None = None
        if len(self.names) > 1:
            try:
                together = self._together(request, workspace, sums)
                if together is not None:
                    return together, {}
            except Exception as problem:
                # Asking one by one below shows which client failed; the memory of the batch is freed.
                apart = problem.with_traceback(None)
        answers: list[Answer] = []
        failed: dict[str, Exception] = {}
        # Of a step that gives sums their sum is kept, since each term reuses the workspace.
        partial = RunningSum() if len(self.names) > 1 and kind_of(request.kind).over_rows else None
        for name in self.names:
            try:
                participant = self.members[name]
                term, catch_up = ask(participant, request, chain, workspace)
                empty = () if len(participant.data) else (name,)
                answer = sums.check(term, name, empty=empty, catch_up_bytes=catch_up)
                if partial is not None:
                    partial.add(answer)
            except Exception as problem:  # reported with the client's name
                failed[name] = problem
            else:
                answers.append(answer)
        if apart is not None and not failed:
            warnings.warn(
                f"{len(self.names)} clients from '{self.names[0]}' on could not answer together "
                f"({type(apart).__name__}: {apart}) and answered one by one, which is slower.",
                RuntimeWarning,
                stacklevel=2,
            )
        return answers if partial is None else _whole(answers, partial.term), failed

    def _together(self, request: Request, workspace: Workspace, sums: RunningSum) -> list[Answer] | None:
        """Answers of a union or of a group; None where the clients must be asked one by one."""
        empty = tuple(name for name in self.names if self.members.rows(name) == 0)
        if self.union is not None:
            term = self.union.answer(request, workspace)
            assert not isinstance(term, Needs)
            lacked = len(self.names) * self.lacking
            return [sums.check(term, *self.names, empty=empty, catch_up_bytes=lacked)]
        if (group := kind_of(request.kind).group) is None:
            return None
        members = [self.members[name] for name in self.names]
        if not all(member.memory.chain.accept(request) for member in members):
            return None
        for member in members:
            member.memory.workspace = workspace
        data, memories = zip(*(member.view(request) for member in members), strict=True)
        return [
            sums.check(term, name, empty=(name,) if name in empty else ())
            for name, term in zip(self.names, group(data, request, memories), strict=True)
        ]


def _whole(answers: Sequence[Answer], term: Term) -> list[Answer]:
    """Answers whose terms were added, as one; none where nobody answered."""
    whole = Answer(
        clients=tuple(name for answer in answers for name in answer.clients),
        term=term,
        empty=tuple(name for answer in answers for name in answer.empty),
        bytes_up=sum(answer.bytes_up for answer in answers),
        catch_up_bytes=sum(answer.catch_up_bytes for answer in answers),
    )
    return [whole] if answers else []


@dataclass(frozen=True)
class Union:
    """A participant that has the rows of several clients.

    made_of: the rows that were joined; none where they lie in common arrays.
    """

    participant: Participant
    made_of: tuple[ClientData, ...]


class Members:
    """Participants by name. A name that is taken, or features of another width, are refused.

    made: those that were needed so far.
    """

    def __init__(self, partition: PartitionedRows | None = None, device: str | None = None) -> None:
        """device: where all participants compute; where each one says when None."""
        self.made: dict[str, Participant] = {}
        self._device = None if device is None else resolve(device)
        self._partition = partition
        self._unmade: dict[str, int] = {} if partition is None else dict(partition.places)
        self._sorted: tuple[str, ...] | None = None
        self._states: Path | None = None
        self._held: dict[str, tuple[ClientData, Held]] = {}
        self._width = None if partition is None else int(partition.features.shape[1])
        self._unions: dict[tuple[str, ...], Union | None] = {}
        self._unions_before: dict[tuple[str, ...], Union | None] = {}
        self._asked: tuple[Any, ...] = ()
        self._known = Chain()

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of all, sorted: the order of every sum."""
        if self._sorted is None:
            self._sorted = tuple(sorted([*self.made, *self._unmade]))
        return self._sorted

    @property
    def schema(self) -> Schema | None:
        """The schema of the rows: of the partition, or of the first participant that has one."""
        if self._partition is not None:
            return self._partition.schema
        return next((each.data.schema for each in self.made.values() if each.data.schema is not None), None)

    def __len__(self) -> int:
        return len(self.made) + len(self._unmade)

    def __contains__(self, name: object) -> bool:
        return name in self.made or name in self._unmade

    def __getitem__(self, name: str) -> Participant:
        # Two workers never ask for the same client at a time.
        if name in self._unmade:
            assert self._partition is not None
            participant = self._partition.participant(name, name, self._device or "cpu")
            if self._states is not None:
                participant.keep_states(self._states)
            self.made[name] = participant
            del self._unmade[name]
        return self.made[name]

    @property
    def participants(self) -> tuple[Participant, ...]:
        return tuple(self[name] for name in self.clients)

    def add(self, participant: Participant) -> None:
        """Let a participant join; it takes part from the next exchange on."""
        name, width = participant.name, participant.data.width
        if name in self:
            raise DataError(f"two participants are called '{name}'; names must differ.")
        if self._width is None:
            self._width = width
        if width != self._width:
            raise DataError(
                f"'{name}' has {width} features per row, the others {[self._width]}. "
                "All must use the same backbone."
            )
        self.made[name] = participant
        self._sorted = None
        if self._device is not None:
            participant.move(self._device)
        participant.keep_states(self._states)

    def remove(self, name: str) -> Participant:
        """Let a participant leave; it is not asked any more."""
        if name not in self:
            raise DataError(f"no participant is called '{name}'.")
        participant = self[name]
        del self.made[name]
        self._sorted = None
        if not len(self):
            self._width = None
        return participant

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder, so that a resumed run finds them.

        Those that join or are made later follow. None: in each participant's own folder, or in memory.
        """
        self._states = folder
        for participant in self.made.values():
            participant.keep_states(folder)

    def device_of(self, name: str) -> str:
        return self.made[name].memory.kernels.device if name in self.made else self._device or "cpu"

    def rows(self, name: str) -> int:
        client = self._unmade.get(name)
        if client is None:
            return len(self.made[name].data)
        assert self._partition is not None
        return int(self._partition.sizes[client])

    def holdings(self) -> Holdings:
        """Who holds what: a run is resumed only with the rows that its clients had.

        Computed once for as long as a client has the same rows.
        """
        partition = self._partition
        if partition is not None and not self.made and len(self._unmade) == len(partition.places):
            return Holdings(partition.held, dealt=True)  # of a hundred thousand clients, too
        found = {}
        for name in self.clients:
            if partition is not None and self._as_given(name):
                found[name] = partition.held[name]
                continue
            data = self.made[name].data
            if name not in self._held or self._held[name][0] is not data:
                self._held[name] = (data, held_by(data))
            found[name] = self._held[name][1]
        return Holdings(found, partition is not None and found.keys() == partition.places.keys())

    @property
    def partition(self) -> PartitionedRows:
        """The common arrays, if all clients still have the rows they were given and none joined or left."""
        found = self._partition
        if (
            found is None
            or len(self.clients) != len(found.places)
            or not all(map(self._as_given, self.clients))
        ):
            raise DataError("these clients have separate arrays; there are no common arrays with all rows.")
        return found

    def _as_given(self, name: str) -> bool:
        """Whether a client still has the rows of the common arrays that it was given."""
        common = self._partition
        if common is None or name in self._unmade:
            return common is not None
        data = self.made[name].data
        return (
            name in common.places
            and data.source is common.features
            and data.labels is common.labels
            and data.rows is not None
            and data.rows.base is common.order
            and len(data.rows) == common.sizes[common.places[name]]
        )

    # -- clients that answer together --------------------------------------------------------------

    def batches(
        self, batches: Sequence[tuple[str, ...]], request: Request, chain: Chain, *, whole: bool = True
    ) -> list[Batch]:
        """These clients as batches for an exchange. Batches that stay the same keep what they derived from
        their rows; what earlier exchanges kept for others is dropped.

        whole: whether these are all batches of the exchange; otherwise it may ask for more of them.
        """
        if not kind_of(request.kind).over_rows:
            return [Batch(names, self) for names in batches]
        asked = request.exchange, request.kind, request.step, request.digest
        if whole or asked != self._asked:
            self._asked, self._unions_before, self._unions = asked, self._unions, {}
        for names in batches:
            if len(names) > 1:
                kept = self._unions.get(names) or self._unions_before.get(names)
                self._unions[names] = self.union(names, kept)
        if whole:
            self._unions_before = {}
        lacking = self._share_model(request, chain) if any(self._unions.values()) else 0
        unions = {names: union.participant for names, union in self._unions.items() if union is not None}
        return [Batch(names, self, unions.get(names), lacking) for names in batches]

    def _share_model(self, request: Request, chain: Chain) -> int:
        """Give all batches the model so far; returns how many bytes of it each client lacked."""
        if request.position == 0:
            return 0
        have = len(self._known) if self._known.digests == chain.digests[: len(self._known) + 1] else 0
        self._known = chain.copy(request.position)
        for names, union in self._unions.items():
            if union is not None:
                union.participant.memory.chain = self._known
                for name in names:
                    if name in self.made:
                        self.made[name].memory.chain = chain.copy(request.position)
        return 0 if have >= request.first else request.starting_at(have, chain).nbytes

    def union(self, names: Sequence[str], kept: Union | None = None) -> Union | None:
        """One participant with the rows of all these clients; None if they should be asked one by one.

        kept: an earlier one of the same names, which is used again where the rows are the same.
        """
        device = self.device_of(names[0])
        for each in (self.made[name] for name in names if name in self.made):
            if each.memory.kernels.device != device or each.guard is not None or each.data.cells is not None:
                return None  # it computes elsewhere, may refuse, or answers about whole cells of its own rows
        common, neighbours, made_of = self._partition, False, tuple[ClientData, ...]()
        if common is not None and all(map(self._as_given, names)):
            neighbours = common.places[names[-1]] - common.places[names[0]] + 1 == len(names)
        if not neighbours:
            if device == "cpu":
                return None  # to copy rows would take longer than it saves
            made_of = tuple(self[name].data for name in names)
        if kept is not None and kept.participant.memory.kernels.device == device and kept.made_of == made_of:
            return kept
        if common is not None and neighbours:
            return Union(common.participant(names[0], names[-1], device), ())
        budget = sum(self[name].memory.budget for name in names)
        size = sum(len(data) * data.width * 8 for data in made_of)
        if any(data.schema != made_of[0].schema for data in made_of) or size > budget:
            return None
        name, scratch = f"{names[0]} to {names[-1]}", self[names[0]].memory.scratch
        whole = Participant(name, joined(made_of), memory_budget=budget, scratch=scratch, device=device)
        return Union(whole, made_of)
