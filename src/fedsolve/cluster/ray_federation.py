"""The engine on a Ray cluster: workers answer for clients and add what they can; sums meet in a tree.

What is a place of the tree, and the shape of the tree, depend on the cohort alone; every worker computes with
one BLAS thread. So the model has the same bits whatever the number of workers, their speed and their losses.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsolve.backends.devices import check_name
from fedsolve.checks import check_arrays, check_choice, check_whole
from fedsolve.cluster import require_ray
from fedsolve.cluster.placing import Placing, packets_of
from fedsolve.cluster.row_file import RowFile
from fedsolve.cluster.shard import Packet, Seen
from fedsolve.cluster.sum_tree import SumTree
from fedsolve.cluster.workers import Crew, WorkerLost
from fedsolve.errors import DataError
from fedsolve.federation.blocks import BLOCK, blocks_of_clients
from fedsolve.federation.cohort import CohortReport, Missing, plain
from fedsolve.federation.engine import Spec
from fedsolve.federation.holdings import Held, Holdings
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.members import Deal
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import adds_up, group_size
from fedsolve.federation.running_sum import Answer, RunningSum
from fedsolve.labels import class_list, plain_labels
from fedsolve.owners import owners_of, rows_by_client
from fedsolve.schema import Schema
from fedsolve.streamed import as_features

if TYPE_CHECKING:
    from fedsolve.model import Model

MANY = 8 * BLOCK
"""Cohorts of at least so many clients are summed in blocks, where they share arrays and answer with sums over
rows; fewer are spread one by one. What is a block depends on the cohort alone."""

Told = Callable[[int, int], None]
"""Told how many of the clients asked have answered."""


class RayFederation:
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
        sources: Mapping[str, RowFile | Sequence[RowFile]] | Deal,
        *,
        classes: Sequence[Any] | None = None,
        task: Literal["classification", "regression"] = "classification",
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
        check_choice("task", task, ("classification", "regression"))
        device = "cpu" if device is None else check_name(device)
        self.task = task
        self.missing = missing
        self.min_clients = min_clients
        self.progress = progress
        self._declared = classes
        self._deal = sources if isinstance(sources, Deal) else None
        files = {} if isinstance(sources, Deal) else _seats(sources)
        self._parts = {seat: name for name, seats in files.items() for seat in seats}
        self._split = {name: list(seats) for name, seats in files.items() if len(seats) > 1}
        self._names = tuple(sorted(files if self._deal is None else self._deal.places))
        if not self._names:
            raise DataError("a federation needs at least one participant; got none.")
        own = {seat: file for seats in files.values() for seat, file in seats.items()}
        self._seen: dict[str, Seen] = {}
        self._spec: Spec | None = None
        self._folder = tempfile.TemporaryDirectory(
            prefix="fedsolve-ray-", dir=None if scratch is None else str(scratch)
        )
        seats = len(own) or len(self._names)
        self._crew = Crew(
            self._deal,
            own,
            memory_budget,
            None if scratch is None else str(scratch),
            workers=workers,
            most=seats,
            address=address,
            gpus=gpus,
            device=device,
            restarts=restarts,
        )
        bound = {seat: file.machine for seat, file in own.items() if file.machine is not None}
        self._placing = Placing(self._crew.machines, bound)
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
        features, labels = as_features(features), plain_labels(labels)
        weights = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        check_arrays(features, labels, weights, missing=schema is not None)
        if len(features) == 0:
            raise DataError("no rows at all: features and labels are empty. Check the file or the query.")
        names, owners, count = owners_of(owners, len(features), clients)
        folder = None if scratch is None else Path(scratch)
        dealt = rows_by_client(owners, count)
        deal = Deal(features, labels, weights, schema, *dealt, memory_budget, folder, names)
        if classes is None and schema is not None and schema.classes:
            classes = schema.classes
        return cls(deal, classes=classes, memory_budget=memory_budget, scratch=scratch, **keywords)

    @classmethod
    def of(cls, federation: LocalFederation, **keywords: Any) -> RayFederation:
        """The clients of a federation of this process whose rows lie in common arrays, on its device."""
        keywords = {"device": federation.device, **keywords}
        return cls(federation.deal, classes=federation.classes, task=federation.task, **keywords)

    # -- what a method sees ------------------------------------------------------------------------

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients, sorted: the order of every sum."""
        return self._names

    def describe(self) -> Spec:
        """What a method needs to know; workers look into the files the first time."""
        if self._spec is None:
            self._spec = self._described()
        return self._spec

    def holdings(self) -> Holdings:
        """Who holds what: a run is resumed only with the rows that its clients had."""
        if self._deal is not None:
            return Holdings(self._deal.held, dealt=True)
        self.describe()
        found: dict[str, list[Held]] = {}
        for seat, seen in sorted(self._seen.items()):
            found.setdefault(self._client(seat), []).append(seen.held)
        joined = {n: (sum(rows for rows, _ in h), " ".join(mark for _, mark in h)) for n, h in found.items()}
        return Holdings(joined, dealt=False)

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder; None: in one that ends with this."""
        self._states = str(Path(self._folder.name if folder is None else folder).absolute())
        self._crew.tell("keep_states", self._states)

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, the same whatever the timing."""
        started = time.perf_counter()
        report = CohortReport.of(request, set(self._names))
        cohort = [name for name in report.asked if name not in report.absent]
        leaves = self._leaves(request, chain, cohort)
        tree = SumTree(len(leaves))
        outcome = _Roll(report, self._parts, self._split, self.missing == "error")
        work = {worker: packets_of(own) for worker, own in self._placing.divided(leaves, self._rows).items()}
        told = 0
        for found in self._crew.exchange(replace(request, cohort=()), chain, work, len(leaves)):
            if isinstance(found.result, WorkerLost):
                outcome.lose(found.names, found.result)
                for place, _ in found.leaves:
                    tree.add(0, place, Term())
            else:
                outcome.enter(found.result)
                for node in found.result.nodes:
                    tree.add(*node)
            report.catch_up_bytes += found.catch_up_bytes
            if found.again:
                report.again |= dict.fromkeys(map(self._client, found.names), found.again)
            told += len(found.names)
            if self.progress is not None:
                self.progress(told, sum(map(len, leaves)))
        outcome.settle()
        report.seconds = time.perf_counter() - started
        if outcome.failure is not None:
            raise report.stopped(*outcome.failure)
        sums = RunningSum()
        if report.answered:
            sums.add(Answer(report.answered[0], tree.root(), empty=False))
        return report.total(sums, request, self.min_clients)

    def evaluate(self, model: Model) -> float:
        """Federated accuracy (R² for regression): each client scores its own rows and sends sums."""
        from fedsolve.federation.evaluation import evaluate

        return evaluate(self, model)

    # -- the workers ---------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """The processes of the workers."""
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

    # -- inside ----------------------------------------------------------------------------------------

    def _leaves(self, request: Request, chain: Chain, cohort: list[str]) -> list[list[str]]:
        """What is one place of the tree: a client, a group, a block, or a part of a client's rows."""
        size = 1 if self._placing.binds else group_size(request, chain)
        if not self._split:
            blocks = self._deal is not None and len(cohort) >= MANY and adds_up(request.kind)
            if size == 1 and blocks:
                return blocks_of_clients(cohort)
            return [cohort[first : first + size] for first in range(0, len(cohort), size)]
        split = [name for name in cohort if name in self._split]
        if split and not adds_up(request.kind):
            raise DataError(
                f"the rows of '{split[0]}' lie in {len(self._split[split[0]])} places, and requests of kind "
                f"'{request.kind}' need all of a client's rows in one. Bring them together, or use a method "
                "of sums over rows, such as DeepAFL."
            )
        return [[seat] for name in cohort for seat in self._split.get(name, [name])]

    def _client(self, seat: str) -> str:
        return self._parts.get(seat, seat)

    def _rows(self, seat: str) -> int:
        if self._deal is not None:
            return self._deal.size(self._deal.places[seat])
        found = self._seen.get(seat)
        return 1 if found is None else found.rows

    def _described(self) -> Spec:
        if self._deal is not None:
            width, sets = int(self._deal.features.shape[1]), [self._deal.labels]
            outputs = {1 if sets[0].ndim == 1 else int(sets[0].shape[1])}
        else:
            self._look()
            seen = self._seen
            widths = sorted({found.width for found in seen.values()})
            if len(widths) > 1:
                odd = next(s for s in sorted(seen) if seen[s].width != seen[min(seen)].width)
                raise DataError(
                    f"'{odd}' has {seen[odd].width} features per row, the others "
                    f"{[w for w in widths if w != seen[odd].width]}. All must use the same backbone."
                )
            width, sets = widths[0], [found.labels for found in seen.values()]
            outputs = {found.outputs for found in seen.values()}
        if self.task == "regression":
            for labels in sets:
                if labels.dtype.kind not in "fiub":
                    raise DataError(f"targets of type {labels.dtype}; regression needs numbers.")
            if len(outputs) > 1:
                raise DataError(f"participants have different numbers of targets: {sorted(outputs)}.")
            return Spec(width, None, outputs.pop(), self.prefers)
        classes = class_list(self._declared, sets)
        return Spec(width, classes, len(classes), self.prefers)

    def _look(self) -> None:
        seats = [[seat] for seat in self._parts]
        failed: dict[str, str] = {}
        for found in self._crew.look(self._placing.divided(seats, lambda seat: 1), self.task):
            for seat, what in found.items():
                if isinstance(what, Seen):
                    self._seen[seat] = what
                else:
                    failed[seat] = plain(": ".join(what))
        # A worker that takes another's place opens the files anew.
        self._crew.tell("expect", {seat: seen.marks for seat, seen in self._seen.items()})
        if not failed:
            return
        seat = min(failed)
        if self.missing == "error" or not self._seen:
            raise DataError(f"participant '{self._parts[seat]}': {failed[seat].removeprefix('DataError: ')}")


class _Roll:
    """Who is in the sum: packets in any order, entered in that of the clients."""

    def __init__(
        self,
        report: CohortReport,
        parts: Mapping[str, str],
        split: Mapping[str, Sequence[str]],
        stops: bool,
    ) -> None:
        self.failure: tuple[str, Exception] | None = None
        self._report = report
        self._parts = parts
        self._split = split
        self._stops = stops
        self._answered: set[str] = set()
        self._empty: set[str] = set()
        self._failed: dict[str, Exception] = {}
        self._counted: set[str] = set()

    def enter(self, packet: Packet) -> None:
        for leaf in packet.leaves:
            self._answered.update(leaf.answered)
            self._empty.update(leaf.empty)
            names = {self._parts.get(seat, seat) for seat in leaf.answered}
            if not names & self._counted:  # a client with several parts sends one term
                self._report.bytes_up += leaf.bytes_up
            self._counted |= names & self._split.keys()
            for seat, (kind, text) in leaf.failed.items():
                self._failed[seat] = _Told(kind, text)

    def lose(self, seats: Sequence[str], problem: WorkerLost) -> None:
        self._failed |= dict.fromkeys(seats, Missing("absent", str(problem)))

    def settle(self) -> None:
        """Enter everything into the report."""
        report = self._report
        for seat, problem in sorted(self._failed.items()):
            name = self._parts.get(seat, seat)
            told = problem.args[0] if isinstance(problem, _Told) else None
            if isinstance(problem, _Told):
                report.failed[name] = plain(f"{problem.kind}: {told}")
            else:
                report.lose(name, problem)
            if self.failure is None and (self._stops or name in self._split):
                # The sum has the other parts of a client already.
                self.failure = name, problem
        for name in report.asked:
            seats = self._split.get(name, (name,))
            if all(seat in self._answered for seat in seats):
                report.answered.append(name)
                if all(seat in self._empty for seat in seats):
                    report.empty.append(name)


class _Told(Exception):
    """An error in another process."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


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
