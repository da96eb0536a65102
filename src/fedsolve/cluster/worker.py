"""The worker's side: answers for any of the clients and adds their terms, whatever process it is in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.backends.devices import resolve
from fedsolve.cluster.lanes import Lane, Node, SumTree
from fedsolve.cluster.row_file import RowFile
from fedsolve.data.parquet_rows import FileStamp
from fedsolve.errors import FedsolveError
from fedsolve.federation.cohort import CohortReport, RunningSum, error_kind
from fedsolve.federation.fingerprints import Held, held_by
from fedsolve.federation.members import Members, PartitionedRows, Union
from fedsolve.federation.messages import Chain, Needs, Request
from fedsolve.federation.participant import DEFAULT_MEMORY, Participant, Workspace
from fedsolve.scoring import evaluation as _  # noqa: F401 - its step answers evaluations
from fedsolve.tables.table_file import read_npy
from fedsolve.threads import blas_threads


@dataclass(frozen=True)
class Seen:
    """What a client's rows are: how many, of what width, with which labels (of targets: the first).

    held: by which a run that is resumed knows them again. stamps: of its files, as they were when opened.
    """

    rows: int
    width: int
    labels: Array
    held: Held
    stamps: tuple[FileStamp, ...] = ()


class Clients(Members):
    """The clients that a worker may be asked about; those in files are opened when they are needed.

    chain: the model so far, which all of them know. expected: files, by client, that were looked into before.
    """

    def __init__(
        self,
        partition: PartitionedRows | None,
        files: Mapping[str, RowFile],
        memory: int,
        scratch: Path | None,
        device: str,
    ) -> None:
        super().__init__(partition, device)
        self.chain = Chain()
        self.stamps: dict[str, tuple[FileStamp, ...]] = {}
        self.expected: Mapping[str, tuple[FileStamp, ...]] = {}
        self._files = files
        self._memory = memory // max(1, len(files)) or DEFAULT_MEMORY
        self._scratch = scratch

    def __getitem__(self, name: str) -> Participant:
        if name not in self:
            self._open(name)
        participant = super().__getitem__(name)
        if name in self._files and isinstance(participant.data.source, np.memmap):
            _check(self.stamps[name])  # what is mapped changes with its file
        participant.memory.chain = self.chain
        return participant

    def _open(self, name: str) -> None:
        file = self._files[name]
        _check(self.expected.get(name, ()))
        self.stamps[name] = file.stamps()
        data = file.open()
        _check(self.stamps[name])
        self.add(Participant(name, data, memory_budget=self._memory, scratch=self._scratch))

    def union(self, names: Sequence[str], kept: Union | None = None) -> Union | None:
        return None if self._files else super().union(names, kept)


class Worker:
    """Answers for clients whose rows lie in common arrays, or in files.

    partition: rows in common arrays; `mapped` tells the file of its features where they are not sent.
    files:     by client, where its rows are. further: those of them that are a further part of a client.
    """

    def __init__(
        self,
        partition: PartitionedRows | None,
        mapped: FileStamp | None,
        files: Mapping[str, RowFile],
        further: frozenset[str],
        memory: int,
        scratch: str | None,
        device: str,
    ) -> None:
        self._unfit: FedsolveError | None = None
        if partition is not None and mapped is not None:
            try:
                mapped.check()
                partition = replace(partition, features=read_npy(mapped.path, mapped=True))
            except FedsolveError as problem:
                self._unfit = problem  # told when asked: a worker that cannot start would be started again
        folder = None if scratch is None else Path(scratch)
        self._clients = Clients(partition, files, memory, folder, resolve(device))
        self._further = further
        self._workspace = Workspace()

    def pid(self) -> int:
        self._check_fit()
        return os.getpid()

    def expect(self, stamps: Mapping[str, tuple[FileStamp, ...]]) -> None:
        """Refuse files that are not those, by client, that somebody looked into before."""
        self._clients.expected = stamps

    def keep_states(self, folder: str) -> None:
        """Keep the clients' states of a method in this folder, which every worker can reach."""
        self._clients.keep_states(Path(folder))

    def look(self, names: Sequence[str], task: str) -> dict[str, Seen | str]:
        """What these clients have, or why nobody knows."""
        found: dict[str, Seen | str] = {}
        for name in names:
            try:
                data = self._clients[name].data
                labels = data.own_labels
                kept = labels[:1] if task == "regression" else np.unique(labels)
                found[name] = Seen(len(data), data.width, kept, held_by(data), self._clients.stamps[name])
            except Exception as problem:
                found[name] = f"{error_kind(problem)}: {problem}"
        return found

    def answer(
        self, request: Request, lanes: Sequence[Lane], places: int
    ) -> tuple[CohortReport | Needs, list[Node]]:
        """Who answered in these lanes, and their sums as far as they meet; or what is needed before that."""
        self._check_fit()
        chain = self._clients.chain
        if not chain.accept(request):
            return Needs(len(chain)), []
        opening = chain.opening
        if "method" in opening:  # whose module registers the steps that answer it
            registry.method_class(opening["method"])
        report, tree = CohortReport(request.exchange, request.kind, ()), SumTree(places)
        asked = [names for place, lane in lanes for names in lane]
        batches = {b.names: b for b in self._clients.batches(asked, request, chain, whole=False)}
        with blas_threads(1):
            for place, lane in lanes:
                sums = RunningSum()
                for names in lane:
                    before = report.bytes_up
                    report.take(sums, *batches[names].ask(request, chain, self._workspace, sums))
                    if names[0] in self._further:
                        report.bytes_up = before  # a client sends one term, whatever its parts
                tree.add(0, place, sums.term.on_host())
        report.catch_up_bytes = 0  # counted by whoever sends the blocks
        return report, _sent(tree)

    def join(self, places: int, *sums: list[Node]) -> list[Node]:
        """Sums of the tree as far as they meet."""
        tree = SumTree(places)
        for node in (node for nodes in sums for node in nodes):
            tree.add(*node)
        return _sent(tree)

    def _check_fit(self) -> None:
        if self._unfit is not None:
            raise self._unfit


def _check(stamps: Sequence[FileStamp]) -> None:
    for stamp in stamps:
        stamp.check()


def _sent(tree: SumTree) -> list[Node]:
    return [(level, place, term.packed()) for level, place, term in tree.nodes()]
