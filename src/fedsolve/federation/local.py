"""The engine in one process: workers ask batches of clients, one BLAS thread each, sums in client order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsolve.arrays import check_choice, check_whole
from fedsolve.errors import DataError
from fedsolve.federation.cohort import UNKNOWN, CohortReport, Contradiction, Missing, RunningSum
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.members import (
    Batch,
    Members,
    Outcome,
    PartitionedRows,
    batched,
    partitioned,
    task_for,
)
from fedsolve.federation.messages import Chain, Request, Total
from fedsolve.federation.participant import DEFAULT_MEMORY, Participant, Workspace
from fedsolve.labels import Task, label_matrix
from fedsolve.pages.templates import html_table
from fedsolve.tables.schema import Schema
from fedsolve.threads import blas_threads, usable_cores

LOCAL_MEMORY = 4 * DEFAULT_MEMORY
"""Bytes that all participants of a local federation may keep together."""

SMALL_TERM = 32 << 20
"""Bytes of a client's latest term up to which more than one for each worker may wait to be added."""


class LocalFederation(Members, Federation):
    """Participants in this process.

    The result does not depend on `workers`: terms are added in client order. At most workers + 1 exist at
    a time, or twice as many where they are small (32 MB), so that nobody waits for a client with many rows.
    With more than one client every worker uses one BLAS thread; a single client has all of them.

    task: "classification" or "regression"; by what the labels are when None (`labels.task_of`).
    missing: "error" stops at the first participant that fails, naming it; "continue" goes on
        with those present (exact for them) as long as `min_clients` answered.
    device: where clients and the server compute: "cpu", "cuda", "cuda:1", "auto" (a GPU if any), or
        "torch:cpu". None leaves each participant's own, and the server on the CPU.
    label_names: names of several labels a row, each 0 or 1; those of the schema when None.
    """

    prefers: Literal["bytes", "exchanges"] = "bytes"

    def __init__(
        self,
        participants: Sequence[Participant] | PartitionedRows,
        *,
        classes: Sequence[Any] | None = None,
        task: Task | None = None,
        workers: int | None = None,
        missing: Literal["error", "continue"] = "error",
        min_clients: int = 1,
        device: str | None = None,
        label_names: Sequence[str] | None = None,
    ) -> None:
        if workers is not None:
            check_whole(1, workers=workers)
        check_choice("missing", missing, ("error", "continue"))
        common = participants if isinstance(participants, PartitionedRows) else None
        super().__init__(common, device)
        for participant in () if isinstance(participants, PartitionedRows) else participants:
            self.add(participant)
        if not self.clients:
            raise DataError("a federation needs at least one participant; got none.")
        made = (participant.data.own_labels for participant in self.made.values())
        given = made if common is None else [common.labels]
        self.label_names = tuple(map(str, label_names or (() if self.schema is None else self.schema.labels)))
        self.task = task_for("regression" if self.label_names else task, classes, self.schema, given)
        self.workers = workers if workers is not None else usable_cores()
        self.missing = missing
        self.min_clients = min_clients
        self.classes = classes
        self.device = self._device or "cpu"
        self.column_names: tuple[str, ...] = ()
        self._spaces: list[Workspace] = []
        self._term_bytes = SMALL_TERM + 1

    @classmethod
    def from_arrays(
        cls,
        features: Any,
        labels: Any,
        owners: Any,
        clients: int | None = None,
        workers: int | None = None,
        *,
        classes: Sequence[Any] | None = None,
        task: Task | None = None,
        sample_weight: Any = None,
        memory_budget: int = LOCAL_MEMORY,
        scratch: str | Path | None = None,
        missing: Literal["error", "continue"] = "error",
        min_clients: int = 1,
        schema: Schema | None = None,
        device: str | None = None,
        label_names: Sequence[str] | None = None,
    ) -> LocalFederation:
        """A federation whose client `k` owns the rows where `owners == k`.

        features: (rows, width); not copied, and read as they are used where they are mapped or `ParquetRows`.
            Of a DataFrame the model knows the columns and finds them by name.
        labels: (rows,); targets may be (rows, targets), and with label_names several labels a row are
            (rows, labels) of 0 and 1. owners: (rows,) integers from 0, or names as text.
        task:     "classification" or "regression"; by what the labels are when None (`labels.task_of`).
        clients:  number of clients, empty ones included; the largest owner + 1 when None.
        memory_budget: bytes that all clients together may keep for derived features; what does not
            fit is mapped from `scratch` (the system's temporary folder when None).
        schema: what the features are, where `encoder.encode` made them of a table; its classes are those of
            the federation unless others are declared.
        """
        rows = partitioned(features, labels, owners, clients, sample_weight, memory_budget, scratch, schema)
        if classes is None and schema is not None:
            classes = schema.classes or None
        made = cls(
            rows,
            classes=classes,
            task=task,
            workers=workers,
            missing=missing,
            min_clients=min_clients,
            device=device,
            label_names=label_names,
        )
        if schema is None:
            made.column_names = tuple(map(str, getattr(features, "columns", ())))
        return made

    def client_rows(self) -> dict[str, int]:
        return {name: self.rows(name) for name in self.clients}

    def describe(self) -> Spec:
        assert self._width is not None
        labels = {name: participant.data.own_labels for name, participant in sorted(self.made.items())}
        if self._unmade:  # these come as one array
            assert self._partition is not None
            together, order, bounds = self._partition.labels, self._partition.order, self._partition.bounds
            if len(self._unmade) < len(bounds) - 1:
                spans = [order[bounds[client] : bounds[client + 1]] for client in self._unmade.values()]
                together = together[np.concatenate(spans)]
            labels[next(iter(self._unmade))] = together
        found = Spec.of(self._width, labels.items(), self.task, self.classes, self.prefers, self.device)
        for each in labels.values() if self.label_names else ():
            label_matrix(each, self.label_names)
        return dataclasses.replace(found, labels=self.label_names)

    def exchange(self, request: Request, chain: Chain) -> Total:
        started = time.perf_counter()
        report = CohortReport(request.exchange, request.kind, tuple(sorted(request.cohort)))
        sums, known = RunningSum(), {*self.clients}
        report.absent = {name: UNKNOWN for name in report.asked if name not in known}
        present = [name for name in report.asked if name in known]
        everybody = len(present) == len(self.clients)
        names = batched(present, self.rows, request, chain, everybody, self.device, self.device_of)
        batches = self.batches(names, request, chain)
        workers = max(1, min(self.workers, len(batches)))
        window = (workers + 1) * (2 if self._term_bytes <= SMALL_TERM else 1)
        self._spaces += [Workspace() for _ in range(window - len(self._spaces))]
        # A single client, and clients that share a device, have all threads.
        alone = len(self.clients) == 1 or all(
            batch.union is not None and batch.union.memory.kernels.device != "cpu" for batch in batches
        )
        ask = partial(Batch.ask, request=request, chain=chain, sums=sums)
        outcomes = _in_order(batches, ask, workers, self._spaces[:window])
        with blas_threads(None if alone else 1), closing(outcomes):  # its threads end here, whatever happens
            for answers, failed in outcomes:
                for name, cause in sorted(report.take(sums, answers, failed).items()):
                    if self.missing == "error" or isinstance(cause, Contradiction):
                        raise report.stopped(name, cause) from cause
        report.seconds = time.perf_counter() - started
        if report.answered:
            self._term_bytes = report.bytes_up // len(report.answered)
        return report.total(sums, request, self.min_clients)

    def place_rows(self) -> None:
        """Copy rows to the devices that clients compute on now, instead of in the first exchange."""
        # Clients of a device are one batch in every question about sums over rows.
        about = Request("evaluate", 0, 0, self.clients), Chain()
        names = batched(self.clients, self.rows, *about, True, self.device, self.device_of)
        for batch in self.batches(names, *about):
            if self.device_of(batch.names[0]) != "cpu":
                (batch.union or self[batch.names[0]]).place_rows()

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        """The clients' replies to letters, as many at a time as there are workers."""
        known, names = {*self.clients}, sorted(letters)
        for first in range(0, len(names), self.workers):
            some = names[first : first + self.workers]
            # No thread outlives its replies: a generator that is given up would wait for it wherever it is
            # collected, which may be where threads are started.
            with ThreadPoolExecutor(len(some)) as pool, blas_threads(1):
                asked = {
                    name: pool.submit(self[name].reply, channel, letters[name])
                    for name in some
                    if name in known
                }
            for name in some:  # one client's failure does not affect the others
                problem = asked[name].exception() if name in asked else Missing("absent", UNKNOWN)
                yield name, problem if isinstance(problem, Exception) else asked[name].result()

    def __repr__(self) -> str:
        rows = sum(self.client_rows().values())
        what = f"{len(self.label_names)} labels, " if self.label_names else f"{self.task}, "
        what = "" if self.task == "classification" else what
        return f"LocalFederation({len(self.clients)} clients, {rows} rows, {what}workers={self.workers})"

    def _repr_html_(self) -> str:
        """For notebooks: the clients with their rows, the first and the last of many."""
        rows: list[tuple[str, object]] = list(self.client_rows().items())
        shown = rows if len(rows) <= 20 else [*rows[:10], ("…", "…"), *rows[-5:]]
        return html_table(repr(self), shown, ("client", "rows"))


def _in_order(
    batches: Sequence[Batch],
    ask: Callable[..., Outcome],
    workers: int,
    spaces: Sequence[Workspace],
) -> Generator[Outcome, None, None]:
    """The outcomes of batches, in order. There are never more of them in memory than workspaces.

    A term keeps its workspace until the next outcome is asked for. Of the batches that come next the one with
    most rows is started first.
    """
    if workers == 1:
        for batch in batches:
            yield ask(batch, workspace=spaces[0])
        return
    free, window = list(spaces), len(spaces)
    begun: dict[int, tuple[Workspace, Future[Outcome]]] = {}
    pool = ThreadPoolExecutor(workers)
    try:
        for turn in range(len(batches)):
            near = (number for number in range(turn, min(turn + window, len(batches))) if number not in begun)
            for number in sorted(near, key=lambda n: -sum(map(batches[n].members.rows, batches[n].names))):
                workspace = free.pop()
                begun[number] = workspace, pool.submit(ask, batches[number], workspace=workspace)
            workspace, outcome = begun.pop(turn)
            yield outcome.result()
            free.append(workspace)
    finally:
        pool.shutdown(cancel_futures=True)
