"""The engine on a Ray cluster: workers answer for batches of clients, and their sums meet in a tree.

Batches, lanes and the tree follow from the clients asked and their rows; every worker computes with one BLAS
thread. So the model has the same bits whatever the number of workers, their speed and their losses. Workers
add each other's sums: one term of an exchange comes to this process, whatever their number.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from fedsolve.arrays import Array, check_choice, check_whole
from fedsolve.backends.devices import check_name
from fedsolve.cluster import require_ray
from fedsolve.cluster.crew import Crew, Errand, WorkerLost
from fedsolve.cluster.lanes import Lane, Node, in_lanes, shares
from fedsolve.cluster.row_file import RowFile
from fedsolve.cluster.worker import Seen
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.cohort import UNKNOWN, Answer, CohortReport, Missing, RunningSum, plain
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.fingerprints import Held, Holdings
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.members import PartitionedRows, batched, partitioned, task_for
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import kind_of
from fedsolve.labels import Task
from fedsolve.tables.schema import Schema

_PACKETS = 4
"""Packets of lanes that a worker is asked for where somebody wants to hear how many clients have answered."""

Told = Callable[[int, int], None]
"""Told how many of the clients asked have answered."""


class RayFederation(Federation):
    """Clients on a Ray cluster: one that is there already, or one that is started here and ends with this.

    sources: by client, where its rows are. Several files are one client whose rows lie in several places: its
        term is the sum of theirs, which only methods of sums over rows can take.
    workers: actors; when None, one for each CPU of the cluster, or for each GPU where these are reserved.
    address: of the cluster, as `ray.init` takes it; the one this process is connected to, or a new one on
        this machine, when None.
    gpus:    GPUs that Ray reserves for each worker; they may be parts. When None, those of the cluster are
        shared out where the device is "cuda" or "auto"; none are for "cuda:1", which counts a machine's GPUs.
    device:  where the workers compute, "cpu" when None: "cuda", "cuda:1", "auto" (a GPU if any) or
        "torch:cpu". Workers check that they have it; the server solves in this process, on the CPU.
    missing, min_clients: as for `LocalFederation`.
    restarts: how often a lost worker is replaced; its clients are asked again.
    memory_budget, scratch: as for `LocalFederation`, for all workers together. States of methods that have
        some are kept in `scratch` or beside the checkpoint, which workers on other machines must reach.
    progress: told within an exchange how many clients have answered.
    """

    prefers: Literal["bytes", "exchanges"] = "bytes"

    def __init__(
        self,
        sources: Mapping[str, RowFile | Sequence[RowFile]] | PartitionedRows,
        *,
        classes: Sequence[Any] | None = None,
        task: Task | None = None,
        workers: int | None = None,
        address: str | None = None,
        gpus: float | None = None,
        device: str | None = None,
        missing: Literal["error", "continue"] = "error",
        min_clients: int = 1,
        restarts: int = 3,
        memory_budget: int = LOCAL_MEMORY,
        scratch: str | Path | None = None,
        progress: Told | None = None,
    ) -> None:
        require_ray()
        if workers is not None:
            check_whole(1, workers=workers)
        check_whole(0, restarts=restarts)
        check_choice("missing", missing, ("error", "continue"))
        device = "cpu" if device is None else check_name(device)
        self.missing = missing
        self.min_clients = min_clients
        self.progress = progress
        self._declared = classes
        self._partition = sources if isinstance(sources, PartitionedRows) else None
        shown = (None, ()) if self._partition is None else (self._partition.schema, (self._partition.labels,))
        self.task = task_for(task, classes, *shown)
        files = {} if isinstance(sources, PartitionedRows) else _seats(sources)
        self._files = {seat: file for seats in files.values() for seat, file in seats.items()}
        self._client_of = {seat: name for name, seats in files.items() for seat in seats}
        self._split = {name: list(seats) for name, seats in files.items() if len(seats) > 1}
        self._names = tuple(sorted(files if self._partition is None else self._partition.places))
        if not self._names:
            raise DataError("a federation needs at least one participant; got none.")
        self._seen: dict[str, Seen] = {}
        self._spec: Spec | None = None
        folder = None if scratch is None else str(scratch)
        self._folder = tempfile.TemporaryDirectory(prefix="fedsolve-ray-", dir=folder)
        self._crew = Crew(
            self._partition,
            self._files,
            frozenset(seat for seats in self._split.values() for seat in seats[1:]),
            memory_budget,
            folder,
            workers=workers,
            most=len(self._files) or len(self._names),
            address=address,
            gpus=gpus,
            device=device,
            restarts=restarts,
        )
        self._workers: dict[str, int] = {}
        self._restarts = restarts
        self.keep_states(None)

    @classmethod
    def from_arrays(
        cls,
        features: Any,
        labels: Any,
        owners: Any,
        clients: int | None = None,
        *,
        sample_weight: Any = None,
        schema: Schema | None = None,
        memory_budget: int = LOCAL_MEMORY,
        scratch: str | Path | None = None,
        classes: Sequence[Any] | None = None,
        **keywords: Any,
    ) -> RayFederation:
        """A federation whose client `k` owns the rows where `owners == k`; owners may be names too.

        Rows in memory are put into Ray's store once; a mapped .npy and `ParquetRows` are read by the workers,
        on all machines under the same path. The rest as for `LocalFederation.from_arrays`.
        """
        rows = partitioned(features, labels, owners, clients, sample_weight, memory_budget, scratch, schema)
        if classes is None and schema is not None:
            classes = schema.classes or None
        return cls(rows, classes=classes, memory_budget=memory_budget, scratch=scratch, **keywords)

    @classmethod
    def of(cls, federation: LocalFederation, **keywords: Any) -> RayFederation:
        """The clients of a federation of this process whose rows lie in common arrays, on its device."""
        keywords = {"device": federation.device, **keywords}
        return cls(federation.partition, classes=federation.classes, task=federation.task, **keywords)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients, sorted: the order of every sum."""
        return self._names

    def describe(self) -> Spec:
        """What a method needs to know; workers look into the files the first time."""
        if self._spec is None:
            labels = [("a client", self._partition.labels)] if self._partition is not None else self._look()
            self._spec = Spec.of(self._width(), labels, self.task, self._declared, self.prefers)
        return self._spec

    def holdings(self) -> Holdings:
        """Who holds what: a run is resumed only with the rows that its clients had."""
        if self._partition is not None:
            return Holdings(self._partition.held, dealt=True)
        self.describe()
        found: dict[str, list[Held]] = {}
        for seat, seen in sorted(self._seen.items()):
            found.setdefault(self._client_of[seat], []).append(seen.held)
        joined = {n: (sum(rows for rows, _ in h), " ".join(mark for _, mark in h)) for n, h in found.items()}
        return Holdings(joined, dealt=False)

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder; None: in one that ends with this."""
        self._states = str(Path(self._folder.name if folder is None else folder).absolute())
        self._crew.tell("keep_states", self._states)

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, the same whatever the timing."""
        started = time.perf_counter()
        self.describe()  # lanes follow from the rows
        for attempt in range(self._restarts + 1):
            report = CohortReport(request.exchange, request.kind, tuple(sorted(request.cohort)))
            known = {*self._names}
            report.absent = {name: UNKNOWN for name in report.asked if name not in known}
            lanes = self._lanes([name for name in report.asked if name not in report.absent], request, chain)
            try:
                term = self._asked(replace(request, cohort=()), chain, lanes, report)
                break
            except WorkerLost as lost:  # with sums that were not added yet
                if attempt == self._restarts:
                    raise CohortError(f"sums were lost: {lost}.") from lost
        report.seconds = time.perf_counter() - started
        for name, why in sorted(report.failed.items() | report.absent.items()):
            # The sum has the other parts of a client in several files already.
            stops = self.missing == "error" or name in self._split or why.startswith("Contradiction: ")
            if stops and name in self._names:
                raise report.stopped(name, CohortError(why))
        sums = RunningSum()
        if report.answered:
            sums.add(Answer(tuple(report.answered), term, (), 0))
        return report.total(sums, request, self.min_clients)

    def _asked(self, request: Request, chain: Chain, lanes: list[Lane], report: CohortReport) -> Term:
        """The sum of these lanes; who is in it is noted in the report."""
        done: list[Errand] = []
        missing: list[Node] = []
        answered: set[str] = set()
        empty: set[str] = set()
        told, asked = 0, sum(len(names) for _, batches in lanes for names in batches)
        for errand in self._crew.exchange(request, chain, self._work(lanes), len(lanes)):
            names = errand.names
            if isinstance(errand.report, CohortReport):
                done.append(errand)
                answered.update(errand.report.answered)
                empty.update(errand.report.empty)
                report.bytes_up += errand.report.bytes_up
                report.failed |= {self._client(s): why for s, why in sorted(errand.report.failed.items())}
            else:
                missing += [(0, place, Term()) for place, _ in errand.lanes]
                for seat in names:
                    report.lose(self._client(seat), Missing("absent", str(errand.report)))
            report.catch_up_bytes += errand.catch_up_bytes
            told += len(names)
            if self.progress is not None:
                self.progress(told, asked)
        for name in report.asked:
            seats = self._split.get(name, (name,))
            if answered.issuperset(seats):
                report.answered.append(name)
                if empty.issuperset(seats):
                    report.empty.append(name)
        return self._crew.joined(done, len(lanes), missing) if lanes else Term()

    @property
    def pids(self) -> list[int]:
        return self._crew.pids()

    def close(self) -> None:
        """End the workers, and the cluster where it was started here."""
        self._crew.close()
        self._folder.cleanup()

    def __enter__(self) -> RayFederation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RayFederation({len(self._names)} clients, workers={len(self._crew)})"

    def _lanes(self, cohort: list[str], request: Request, chain: Chain) -> list[Lane]:
        """The cohort in lanes of batches; batches are of clients that one machine can answer for."""
        everybody, split = len(cohort) == len(self._names), [name for name in cohort if name in self._split]
        if split and not kind_of(request.kind).over_rows:
            raise DataError(
                f"the rows of '{split[0]}' lie in {len(self._split[split[0]])} places, and requests of kind "
                f"'{request.kind}' need all of a client's rows in one. Bring them together, or use a method "
                "of sums over rows, such as DeepAFL."
            )
        seats = [seat for name in cohort for seat in self._split.get(name, [name])]
        batches: list[tuple[str, ...]] = [(seat,) for seat in seats]
        if not self._split:
            runs = [list(run) for _, run in groupby(seats, self._machine)]
            batches = [each for run in runs for each in batched(run, self._rows, request, chain, everybody)]
        return in_lanes(batches, self._rows, self._machine)

    def _work(self, lanes: list[Lane]) -> dict[int, list[list[Lane]]]:
        """The lanes of every worker, in packets."""
        own: dict[int, list[Lane]] = {}
        for lane in lanes:
            own.setdefault(self._worker_of(lane[1][0][0]), []).append(lane)
        packets = 1 if self.progress is None else _PACKETS
        sizes = {worker: -(-len(mine) // packets) for worker, mine in own.items()}
        return {
            worker: [mine[first : first + sizes[worker]] for first in range(0, len(mine), sizes[worker])]
            for worker, mine in own.items()
        }

    def _worker_of(self, seat: str) -> int:
        """The worker that answers for a client, always the same: it keeps what it derived from the rows."""
        if not self._workers:
            seats = sorted(self._client_of) if self._client_of else list(self._names)
            for machine in {self._machine(seat) for seat in seats}:
                mine = [seat for seat in seats if self._machine(seat) == machine]
                at = [w for w, own in enumerate(self._crew.machines) if machine is None or own == machine]
                parts = shares([max(1, self._rows(seat)) for seat in mine], len(at))
                self._workers |= {seat: at[part] for seat, part in zip(mine, parts, strict=True)}
        return self._workers[seat]

    def _client(self, seat: str) -> str:
        return self._client_of.get(seat, seat)

    def _machine(self, seat: str) -> str | None:
        return self._files[seat].machine if seat in self._files else None

    def _rows(self, seat: str) -> int:
        if self._partition is not None:
            return int(self._partition.sizes[self._partition.places[seat]])
        return self._seen[seat].rows if seat in self._seen else 1

    def _width(self) -> int:
        if self._partition is not None:
            return int(self._partition.features.shape[1])
        width = self._seen[min(self._seen)].width
        for seat, seen in sorted(self._seen.items()):
            if seen.width != width:
                has = f"'{seat}' has {seen.width} features per row, the others {[width]}."
                raise DataError(f"{has} All must use the same backbone.")
        return width

    def _look(self) -> list[tuple[str, Array]]:
        """Look into the files; gives the labels of every client."""
        asked: dict[int, list[str]] = {}
        for seat in sorted(self._client_of):
            asked.setdefault(self._worker_of(seat), []).append(seat)
        found = self._crew.look(asked, self.task)
        self._seen = {seat: seen for seat, seen in found.items() if isinstance(seen, Seen)}
        # A worker that takes another's place opens the files anew.
        self._crew.tell("expect", {seat: seen.stamps for seat, seen in self._seen.items()})
        failed = {seat: plain(why) for seat, why in found.items() if not isinstance(why, Seen)}
        if failed and (self.missing == "error" or not self._seen):
            seat = min(failed)
            raise DataError(f"participant '{self._client(seat)}': {failed[seat].removeprefix('DataError: ')}")
        return [(seat, seen.labels) for seat, seen in sorted(self._seen.items())]


def _seats(sources: Mapping[str, RowFile | Sequence[RowFile]]) -> dict[str, dict[str, RowFile]]:
    """By client, its files, each under a name of its own; a single one has the client's."""
    seats: dict[str, dict[str, RowFile]] = {}
    for name, given in sources.items():
        files = [given] if isinstance(given, RowFile) else list(given)
        if not files or not all(isinstance(file, RowFile) for file in files):
            raise DataError(f"'{name}' needs a RowFile, or several; got {type(given).__name__}.")
        several = len(files) > 1
        seats[name] = {f"{name} (part {number})" if several else name: f for number, f in enumerate(files, 1)}
    known = [seat for each in seats.values() for seat in each]
    if len(known) != len(set(known)):
        raise DataError("two clients' parts have the same name; rename one of the clients.")
    return seats
