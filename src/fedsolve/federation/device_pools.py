"""Clients that share a device answer as one: one set of products over the rows of all of them.

A step whose term is a sum over rows gives the sum of the clients' terms when it is shown all their rows.
Nothing else differs from asking them one by one: what each would have sent is counted, and a client that
cannot answer is found by asking it alone. Secure sums and methods that gather ask each client by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve import registry
from fedsolve.container import Array
from fedsolve.federation.blocks import BlockSum
from fedsolve.federation.client_data import ClientData, shown_by
from fedsolve.federation.cohort import CohortReport
from fedsolve.federation.members import Members
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.participant import Memory, Participant, adds_up, answered_by
from fedsolve.federation.parts import Part, part_of
from fedsolve.federation.running_sum import RunningSum


class DevicePool:
    """The clients of a federation that share a device other than the host."""

    def __init__(self, device: str, members: Sequence[Participant]) -> None:
        self.members = tuple(members)
        self.names = [member.name for member in members]
        self.empty = [member.name for member in members if len(member) == 0]
        budget = sum(member.memory_budget for member in members)
        self._memory = Memory(device=device, budget=budget, name=members[0].name, scratch=members[0].scratch)
        self._unions: dict[Part | None, tuple[list[ClientData], ClientData, Memory]] = {}
        self._seen: dict[Part | None, tuple[str, str]] = {}

    @staticmethod
    def answers(request: Request, chain: Chain) -> bool:
        """Whether clients may be asked this as one."""
        opening = chain.blocks[0].note.get("opening", {}) if len(chain) else {}
        known = request.position > 0 and adds_up(request.kind)
        return known and not registry.is_foreign(opening.get("method"))

    def lacking(self, request: Request, chain: Chain) -> int:
        """Bytes of the model blocks that each member must be sent besides the request."""
        known = self.members[0].chain
        have = len(known) if known.digests == chain.digests[: len(known) + 1] else 0
        return 0 if have >= request.first else request.starting_at(have, chain).nbytes

    def answer(self, request: Request, chain: Chain) -> Term:
        """The sum of the members' terms, where it was computed."""
        shared = self._memory.chain = chain.copy(request.position)
        for member in self.members:
            member.take_back(shared)
        part, (_, mark) = part_of(request, shared), shown_by(shared)
        if self._seen.get(part) != mark:
            self._union(part, [member.view(request)[0] for member in self.members])
            self._seen[part] = mark
        _, data, memory = self._unions[part]
        memory.chain = shared
        return answered_by(request.kind, data, request, memory)

    def place_rows(self) -> None:
        """Copy the rows to the device now; otherwise the first exchange does."""
        self._union(None, [member.data for member in self.members])
        _, data, memory = self._unions[None]
        data.placed(memory.kernels)

    def _union(self, part: Part | None, views: list[ClientData]) -> None:
        """See to it that the rows of this part, as the members see them, are known together."""
        known = self._unions.get(part)
        if known is None or not all(old is new for old, new in zip(known[0], views, strict=True)):
            # Copies of other rows on the device are released before these are made.
            self._unions.pop(part, None)
            self._unions[part] = (views, _together(views), replace(self._memory, cache={}))


class PooledData(ClientData):
    """The rows of several clients, one client after the other."""

    def __init__(self, parts: Sequence[ClientData]) -> None:
        self._members = [part for part in parts if len(part)] or [parts[0]]
        self._ends = np.cumsum([len(part) for part in self._members])
        self.labels = np.concatenate([part.own_labels() for part in self._members])
        weights = [part.own_weights() for part in self._members]
        self.weights = None
        if any(weight is not None for weight in weights):
            self.weights = np.concatenate(
                [
                    np.ones(len(part)) if weight is None else weight
                    for part, weight in zip(self._members, weights, strict=True)
                ]
            )
        self.rows = None
        self.schema = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def width(self) -> int:
        return self._members[0].width

    @cached_property
    def source(self) -> Array:
        return self.features(slice(None), None)

    def features(self, span: slice, dtype: Any = np.float64) -> Array:
        start, stop, _ = span.indices(len(self))
        first = int(np.searchsorted(self._ends, start, side="right"))
        found: list[Array] = []
        for part, end in zip(self._members[first:], self._ends[first:], strict=True):
            begin = int(end) - len(part)
            if begin >= stop and found:
                break
            found.append(part.features(slice(max(start - begin, 0), max(stop - begin, 0)), dtype))
        return np.concatenate(found or [self._members[0].features(slice(0, 0), dtype)])


def _together(views: Sequence[ClientData]) -> ClientData:
    """The rows of all; where they lie in the same arrays, without copying any."""
    first = views[0]
    same = all(
        type(view) is ClientData
        and view.source is first.source
        and view.labels is first.labels
        and view.weights is first.weights
        for view in views
    )
    if not same:
        return PooledData(views)
    rows = np.concatenate([np.arange(len(v.source)) if v.rows is None else v.rows for v in views])
    return ClientData(first.source, first.labels, rows, first.weights, checked=True, schema=first.schema)


_Held = tuple[Participant, str, ClientData]
"""A participant, where it computes, and its rows."""


class DevicePools:
    """The pools of a federation, one for each device that some of its participants compute on."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._pools: dict[tuple[_Held, ...], DevicePool] = {}

    def ask(
        self,
        members: Members,
        request: Request,
        chain: Chain,
        report: CohortReport,
        sums: RunningSum,
    ) -> Exception | None:
        """Add the terms of all pools, and enter their members; the others must be asked one by one.

        Gives what was wrong with a pool that could not answer: whose failure it is shows when its members are
        asked alone.
        """
        if not DevicePool.answers(request, chain):
            return None
        problem: Exception | None = None
        for pool in self._current(members):
            try:
                catch_up = pool.lacking(request, chain)
                answer = sums.check(pool.names[0], pool.answer(request, chain))
            except Exception as found:
                problem = found
                continue
            sums.add(answer)
            count, each = len(pool.names), answer.term.nbytes
            report.enter_block(
                BlockSum(answer.term, pool.names, pool.empty, {}, count * each, count * catch_up)
            )
        return problem

    def place_rows(self, members: Members) -> None:
        """Copy the rows to their devices now; otherwise the first exchange does."""
        for pool in self._current(members):
            pool.place_rows()

    def _current(self, members: Members) -> Iterable[DevicePool]:
        """The participants by device, those on the host left out; a pool of the same members, with the same
        rows, is kept.
        """
        held = [(participant, participant.device, participant.data) for participant in members.everybody]
        if held != self._held:
            devices = sorted({device for _, device, _ in held if device != "cpu"})
            groups = {device: tuple(each for each in held if each[1] == device) for device in devices}
            self._pools = {
                group: self._pools.get(group) or DevicePool(device, [member for member, *_ in group])
                for device, group in groups.items()
            }
            self._held = held
        return self._pools.values()
