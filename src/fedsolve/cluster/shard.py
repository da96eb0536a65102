"""The worker's side: answers for any of the clients and folds their terms, whatever process it is in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedsolve import registry
from fedsolve.backends.devices import resolve
from fedsolve.cluster.row_file import RowFile
from fedsolve.cluster.sum_tree import Node, SumTree
from fedsolve.container import Array
from fedsolve.data.file_mark import FileMark
from fedsolve.data.npz import read_npy
from fedsolve.errors import FedsolveError
from fedsolve.federation import evaluation as _  # noqa: F401 - its step answers evaluations
from fedsolve.federation.blocks import BlockSum, block_sum, warn_apart
from fedsolve.federation.cohort import error_kind
from fedsolve.federation.holdings import Held, held_by
from fedsolve.federation.members import Deal, Members
from fedsolve.federation.messages import Chain, Needs, Request, Term, pack_triangle
from fedsolve.federation.participant import (
    DEFAULT_MEMORY,
    ClientData,
    Participant,
    answer_together,
    group_size,
)
from fedsolve.federation.running_sum import RunningSum
from fedsolve.federation.workspace import Workspace
from fedsolve.threads import blas_threads


@dataclass
class Leaf:
    """What became of one place of the tree: a client, or neighbours that answered together.

    failed: by client, the kind of the error and what it says.
    """

    place: int
    answered: list[str]
    empty: list[str]
    failed: dict[str, tuple[str, str]]
    bytes_up: int


@dataclass
class Packet:
    """Sums of some places of the tree as far as they meet, and what became of each place."""

    nodes: list[Node] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """What a client's rows are: how many, of what width, with which labels (targets: none of them).

    held: by which a run that is resumed knows them again. marks: of its files, as they were when opened.
    """

    rows: int
    width: int
    labels: Array
    outputs: int
    held: Held
    marks: tuple[FileMark, ...] = ()


class Shard:
    """Answers for clients whose rows are dealt from common arrays, or lie in files.

    deal:  rows in common arrays; `mapped` tells the file of its features where they are not sent.
    files: by client, where its rows are.
    """

    def __init__(
        self,
        deal: Deal | None,
        mapped: FileMark | None,
        files: Mapping[str, RowFile],
        memory: int,
        scratch: str | None,
        device: str,
    ) -> None:
        self._unfit: FedsolveError | None = None
        if deal is not None and mapped is not None:
            try:
                mapped.check()
                deal = replace(deal, features=read_npy(mapped.path, mapped=True))
            except FedsolveError as problem:
                self._unfit = problem  # told when asked: a worker that cannot start would be started again
        self._members = Members(deal, resolve(device))
        self._files = files
        self._marks: dict[str, tuple[FileMark, ...]] = {}
        self._expected: Mapping[str, tuple[FileMark, ...]] = {}
        self._memory = memory // max(1, len(files))
        self._scratch = None if scratch is None else Path(scratch)
        self._chain = Chain()
        self._workspace = Workspace()
        self._pools: dict[tuple[str, ...], Participant | None] = {}

    def pid(self) -> int:
        """The process that answers here."""
        self._check_fit()
        return os.getpid()

    def expect(self, marks: Mapping[str, tuple[FileMark, ...]]) -> None:
        """Refuse files that are not those, by client, that somebody looked into before."""
        self._expected = marks

    def keep_states(self, folder: str | None) -> None:
        """Keep the clients' states of a method in this folder, which every worker can reach."""
        self._members.keep_states(None if folder is None else Path(folder))

    def look(self, names: Sequence[str], task: str) -> dict[str, Seen | tuple[str, str]]:
        """What these clients have, or why nobody knows."""
        found: dict[str, Seen | tuple[str, str]] = {}
        for name in names:
            try:
                data = self._member(name).data
                labels = data.own_labels()
                outputs = 1 if labels.ndim == 1 else int(labels.shape[1])
                kept = labels[:1] if task == "regression" else np.unique(labels)
                marks = self._marks.get(name, ())
                found[name] = Seen(len(data), data.width, kept, outputs, held_by(data), marks)
            except Exception as problem:
                found[name] = (error_kind(problem), str(problem))
        return found

    def answer(
        self, request: Request, leaves: Sequence[tuple[int, Sequence[str]]], places: int
    ) -> Packet | Needs:
        """The sums of these places of the tree, or what is needed before that."""
        self._check_fit()
        if not self._chain.accept(request):
            return Needs(len(self._chain))
        self._know_method()
        packet, tree = Packet(), SumTree(places)
        with blas_threads(1):
            size = group_size(request, self._chain)
            for place, names in leaves:
                block = self._block(list(names), request, together=size > 1)
                told = {name: (error_kind(e), str(e)) for name, e in block.failed.items()}
                packet.leaves.append(Leaf(place, block.answered, block.empty, told, block.bytes_up))
                if block.answered:
                    tree.add(0, place, _own(block.term))
                else:
                    tree.add(0, place, Term())
        packet.nodes = [(level, place, _packed(term)) for level, place, term in tree.nodes()]
        return packet

    def _check_fit(self) -> None:
        if self._unfit is not None:
            raise self._unfit

    def _know_method(self) -> None:
        """Import the method of the run, which registers the steps that answer it."""
        opening = self._chain.blocks[0].note.get("opening", {}) if len(self._chain) else {}
        if "method" in opening:
            registry.method_class(opening["method"])

    def _block(self, names: list[str], request: Request, together: bool) -> BlockSum:
        if together and len(names) > 1:
            found = self._group(names, request)
            if found is not None:
                return found
        pool = None
        if len(names) > 1 and not together:
            pool = self._pool(tuple(names))
        return block_sum(names, self._joined, self._rows, pool, request, self._chain, self._workspace)

    def _group(self, names: list[str], request: Request) -> BlockSum | None:
        """The sum of a group that answers together; None where they are better asked one by one."""
        try:
            group = [self._joined(name) for name in names]
            terms = answer_together(group, request, self._workspace)
            if terms is None:
                return None
            sums, found = RunningSum(), BlockSum()
            for name, term in zip(names, terms, strict=True):
                sums.add(sums.check(name, term))
                found.bytes_up += term.nbytes
        except Exception as problem:
            warn_apart(len(names), names[0], problem)
            return None  # asked one by one, which shows whose failure it is
        found.term = sums.so_far().on_host()
        found.answered = names
        found.empty = [name for name in names if self._rows(name) == 0]
        return found

    def _joined(self, name: str) -> Participant:
        """A participant that knows the model so far."""
        participant = self._member(name)
        participant.take_back(self._chain)
        return participant

    def _member(self, name: str) -> Participant:
        if name not in self._members:
            memory = self._memory or DEFAULT_MEMORY
            data = self._opened(name)
            self._members.add(Participant(name, data, memory_budget=memory, scratch=self._scratch))
        elif name in self._files and isinstance(self._members[name].data.source, np.memmap):
            _check(self._marks[name])  # what is mapped changes with its file
        return self._members[name]

    def _opened(self, name: str) -> ClientData:
        """The rows in a client's files, which did not change meanwhile."""
        file = self._files[name]
        _check(self._expected.get(name, ()))
        self._marks[name] = file.marks()
        data = file.open()
        _check(self._marks[name])
        return data

    def _rows(self, name: str) -> int:
        return self._members.rows(name)

    def _pool(self, names: tuple[str, ...]) -> Participant | None:
        if names not in self._pools:
            if len(self._pools) > 4096:  # cohorts that change make new ones every time
                self._pools.clear()
            self._pools[names] = self._members.pooled(names)
        pool = self._pools[names]
        if pool is not None:
            pool.take_back(self._chain)
        return pool


def _check(marks: Sequence[FileMark]) -> None:
    for mark in marks:
        mark.check()


def _own(term: Term) -> Term:
    """A term that does not live in the workspace, in float64, with its factors multiplied in."""
    own = Term()
    own.add(term)
    return own


def _packed(term: Term) -> Term:
    """A term as it travels: symmetric arrays as triangles."""
    arrays = {
        name: pack_triangle(array) if name in term.symmetric and array.ndim == 2 else array
        for name, array in term.arrays.items()
    }
    return Term(arrays, term.counts, term.symmetric)
