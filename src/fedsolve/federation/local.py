"""The engine in one process: workers over clients, one BLAS thread each, sums in client order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsolve.checks import check_arrays, check_choice, check_whole
from fedsolve.errors import DataError, TermError
from fedsolve.federation.blocks import BlockSum, ask, block_sum, blocks_of_clients, blocks_of_rows, warn_apart
from fedsolve.federation.cohort import UNKNOWN, CohortReport, Missing
from fedsolve.federation.device_pools import DevicePools
from fedsolve.federation.engine import Spec
from fedsolve.federation.holdings import Holdings
from fedsolve.federation.members import Deal, Members, Pools
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import (
    DEFAULT_MEMORY,
    Participant,
    adds_up,
    answer_together,
    answers_in,
    group_size,
)
from fedsolve.federation.running_sum import Answer, Contradiction, RunningSum
from fedsolve.federation.workspace import Workspace
from fedsolve.html_view import html_table
from fedsolve.labels import class_list, plain_labels
from fedsolve.owners import owners_of, rows_by_client
from fedsolve.schema import Schema
from fedsolve.streamed import as_features
from fedsolve.threads import blas_threads, usable_cores

if TYPE_CHECKING:
    from fedsolve.model import Model

LOCAL_MEMORY = 4 * DEFAULT_MEMORY
"""Bytes that all participants of a local federation may keep together."""

MANY = 1024
"""Cohorts that give at least so many answers are summed in blocks, where a step's answer is a sum over rows.

Terms of one client each would cost more to make and to add than the products in them.
"""

SEVERAL = 64
"""Clients from which on neighbours with few rows are summed in blocks, where everybody is asked."""

SMALL_TERM = 32 << 20
"""Bytes of a client's latest term up to which more than one for each worker may wait to be added."""


class LocalFederation:
    """Participants in this process.

    The result does not depend on `workers`: terms are added in client order, and at most workers + 1 of them
    exist at a time, or twice as many where they are small (32 MB), so that nobody waits for a client with
    many rows. With more than one client every worker uses one BLAS
    thread; a single client has all of them.

    missing: "error" stops at the first participant that fails, naming it; "continue" goes on
        with those present (exact for them) as long as `min_clients` answered.
    device: where clients and the server compute: "cpu", "cuda", "cuda:1", "auto" (a GPU if any), or
        "torch:cpu". None leaves each participant's own, and the server on the CPU.
    """

    prefers: Literal["bytes", "exchanges"] = "bytes"

    def __init__(
        self,
        participants: Sequence[Participant] | Deal,
        *,
        classes: Sequence[Any] | None = None,
        task: Literal["classification", "regression"] = "classification",
        workers: int | None = None,
        missing: Literal["error", "continue"] = "error",
        min_clients: int = 1,
        device: str | None = None,
    ) -> None:
        if workers is not None:
            check_whole(1, workers=workers)
        check_choice("missing", missing, ("error", "continue"))
        check_choice("task", task, ("classification", "regression"))
        self._members = Members(participants if isinstance(participants, Deal) else None, device)
        self._pools = Pools()
        self._device_pools = DevicePools()
        for participant in () if isinstance(participants, Deal) else participants:
            self.add(participant)
        if not len(self._members):
            raise DataError("a federation needs at least one participant; got none.")
        self.task = task
        self.workers = workers if workers is not None else usable_cores()
        self.missing = missing
        self.min_clients = min_clients
        self._declared = classes
        self._slots: list[Workspace] = []
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
        task: Literal["classification", "regression"] = "classification",
        sample_weight: Any = None,
        memory_budget: int = LOCAL_MEMORY,
        scratch: str | Path | None = None,
        missing: Literal["error", "continue"] = "error",
        min_clients: int = 1,
        schema: Schema | None = None,
        device: str | None = None,
    ) -> LocalFederation:
        """A federation whose client `k` owns the rows where `owners == k`.

        features: (rows, width); not copied, and read as they are used where they are mapped or `ParquetRows`.
        labels: (rows,). owners: (rows,) integers from 0, or the names of clients as text.
        clients:  number of clients, empty ones included; the largest owner + 1 when None.
        memory_budget: bytes that all clients together may keep for derived features; what does not
            fit is mapped from `scratch` (the system's temporary folder when None).
        schema: what the features are, where `encoder.encode` made them of a table; its classes are those of
            the federation unless others are declared.
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
        return cls(
            deal,
            classes=classes,
            task=task,
            workers=workers,
            missing=missing,
            min_clients=min_clients,
            device=device,
        )

    @property
    def device(self) -> str:
        """Where the server solves."""
        return self._members.device or "cpu"

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the participants, sorted: the order of every sum."""
        return self._members.names

    @property
    def participants(self) -> tuple[Participant, ...]:
        return self._members.everybody

    @property
    def deal(self) -> Deal:
        """The rows of all clients, where they lie in common arrays."""
        return self._members.deal

    @property
    def classes(self) -> Sequence[Any] | None:
        """The classes that were declared."""
        return self._declared

    def client_rows(self) -> dict[str, int]:
        """How many rows each client has."""
        return {name: self._members.rows(name) for name in self.clients}

    def add(self, participant: Participant) -> None:
        """Let a participant join; it takes part from the next exchange on."""
        self._members.add(participant)

    def remove(self, client: str) -> Participant:
        """Let a participant leave; it is not asked any more."""
        return self._members.remove(client)

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder, so that a resumed run finds them.

        Participants that join later follow. None: in each participant's own folder, or in memory.
        """
        self._members.keep_states(folder)

    def holdings(self) -> Holdings:
        """Who holds what: a run is resumed only with the rows that its clients had."""
        return self._members.holdings()

    def describe(self) -> Spec:
        """What a method needs to know before the first exchange."""
        width = self._members.width
        if self.task == "regression":
            outputs = set()
            for name, labels in self._members.label_sets():
                if labels.dtype.kind not in "fiub":
                    raise DataError(f"'{name}' has targets of type {labels.dtype}; regression needs numbers.")
                outputs.add(1 if labels.ndim == 1 else labels.shape[1])
            if len(outputs) > 1:
                raise DataError(f"participants have different numbers of targets: {sorted(outputs)}.")
            return Spec(width, None, outputs.pop(), self.prefers, self.device)
        classes = class_list(self._declared, [labels for _, labels in self._members.label_sets()])
        return Spec(width, classes, len(classes), self.prefers, self.device)

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, added in client order."""
        started = time.perf_counter()
        report, sums = CohortReport.of(request, self._members), RunningSum()
        cohort = [name for name in report.asked if name not in report.absent]
        apart: Exception | None = None
        if len(cohort) == len(self._members) and self._members.elsewhere:
            # Only where everybody is asked: who is asked now and then keeps features of its own.
            apart = self._device_pools.ask(self._members, request, chain, report, sums)
            answered = set(report.answered)
            cohort = [name for name in cohort if name not in answered]
        size = group_size(request, chain, self.device)
        answers = len(cohort) * answers_in(request)
        sums_rows = size == 1 and len(cohort) > 1 and adds_up(request.kind)
        in_blocks = sums_rows and (answers >= MANY or SEVERAL <= len(cohort) == len(self._members))
        if not in_blocks:
            groups = [cohort[first : first + size] for first in range(0, len(cohort), size)]
        elif answers >= MANY:
            groups = blocks_of_clients(cohort)
        else:
            # Who is asked now and then keeps features of its own.
            groups = blocks_of_rows(cohort, self._members.rows)
        if in_blocks:
            self._pools.begin(groups, self._members, request, chain)
        workers = max(1, min(self.workers, len(groups)))
        slots = (workers + 1) * (2 if self._term_bytes <= SMALL_TERM else 1)
        while len(self._slots) < slots:
            self._slots.append(Workspace())
        sizes = [sum(self._members.rows(name) for name in group) for group in groups]
        ledger = _Ledger(report, sums, groups, sizes, self._slots[:slots], self.missing == "error")

        def work() -> None:
            while (task := ledger.take()) is not None:
                turn, workspace = task
                try:
                    if in_blocks:
                        outcomes: list[_Outcome] = [self._block(groups[turn], request, chain, workspace)]
                    else:
                        asked = [self._members[name] for name in groups[turn]]
                        outcomes = _ask_group(asked, request, chain, workspace, sums)
                    ledger.deliver(turn, workspace, outcomes)
                except BaseException:
                    ledger.stop()  # the other workers must not wait for a turn that never comes
                    raise

        with blas_threads(None if len(self._members) == 1 or not cohort else 1):
            if workers == 1:
                work()
            else:
                with ThreadPoolExecutor(workers) as pool:
                    try:
                        for worker in [pool.submit(work) for _ in range(workers)]:
                            worker.result()
                    except BaseException:
                        ledger.stop()
                        raise
        report.seconds = time.perf_counter() - started
        if report.answered:
            self._term_bytes = report.bytes_up // len(report.answered)
        if ledger.failure is not None:
            name, cause = ledger.failure
            raise report.stopped(name, cause) from cause
        if apart is not None and not report.missing:
            warn_apart(len(cohort), cohort[0], apart)
        return report.total(sums, request, self.min_clients)

    def place_rows(self) -> None:
        """Copy the rows of clients that compute on a device there now, not in the first exchange."""
        self._device_pools.place_rows(self._members)

    def _block(self, names: list[str], request: Request, chain: Chain, workspace: Workspace) -> BlockSum:
        members = self._members
        pool = self._pools.of(names)
        return block_sum(names, members.__getitem__, members.rows, pool, request, chain, workspace)

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int | None = None
    ) -> Iterator[tuple[str, bytes | Exception]]:
        """The clients' replies to letters, as many at a time as there are workers."""

        def ask(name: str) -> bytes | Exception:
            try:
                if name not in self._members:
                    raise Missing("absent", UNKNOWN)
                return self._members[name].reply(channel, letters[name])
            except Exception as problem:  # one client's failure does not affect the others
                return problem

        names = sorted(letters)
        with ThreadPoolExecutor(self.workers) as pool:
            for first in range(0, len(names), self.workers):
                some = names[first : first + self.workers]
                with blas_threads(1):
                    replies = list(pool.map(ask, some))
                yield from zip(some, replies, strict=True)

    def evaluate(self, model: Model) -> float:
        """Federated accuracy (R² for regression): each client scores its own rows and sends sums."""
        from fedsolve.federation.evaluation import evaluate

        return evaluate(self, model)

    def __repr__(self) -> str:
        rows = sum(self.client_rows().values())
        return f"LocalFederation({len(self._members)} clients, {rows} rows, workers={self.workers})"

    def _repr_html_(self) -> str:
        """For notebooks: the clients with their rows, the first and the last of many."""
        rows: list[tuple[str, object]] = list(self.client_rows().items())
        shown = rows if len(rows) <= 20 else [*rows[:10], ("…", "…"), *rows[-5:]]
        return html_table(repr(self), shown, ("client", "rows"))


_Outcome = tuple[Answer, int] | BlockSum | Exception
"""An answer and the bytes of the model blocks that its client lacked; those of a block; what went wrong."""


def _ask(
    participant: Participant, request: Request, chain: Chain, workspace: Workspace, sums: RunningSum
) -> tuple[Answer, int]:
    term, catch_up = ask(participant, request, chain, workspace)
    return _checked(participant, term, sums), catch_up


def _checked(participant: Participant, term: Term, sums: RunningSum) -> Answer:
    return sums.check(participant.name, term, empty=len(participant) == 0)


def _ask_group(
    group: list[Participant], request: Request, chain: Chain, workspace: Workspace, sums: RunningSum
) -> list[_Outcome]:
    """The outcome of every client of a group, in order; one client's failure does not affect the others."""
    failed: Exception | None = None
    if len(group) > 1:
        try:
            terms = answer_together(group, request, workspace)
            if terms is not None:
                return [(_checked(p, term, sums), 0) for p, term in zip(group, terms, strict=True)]
        except Exception as problem:
            # Asked one by one below, which shows whose failure it is; what the group held is let go.
            failed = problem.with_traceback(None)
    outcomes: list[_Outcome] = []
    for participant in group:
        try:
            outcomes.append(_ask(participant, request, chain, workspace, sums))
        except Exception as problem:  # reported with the participant's name by the ledger
            outcomes.append(problem)
    if failed is not None and not any(isinstance(outcome, Exception) for outcome in outcomes):
        warn_apart(len(group), group[0].name, failed)
    return outcomes


class _Ledger:
    """Hands out groups of clients, large ones first, and adds their terms in the order of the groups.

    A term keeps its workspace until it has been added, and a group is only started with a workspace in hand.
    Of those that come next, as many as there are workspaces, the one with most rows is started first; no
    others are, so that a workspace is always left for the earliest and the sum cannot deadlock.

    failure: the participant that stops the exchange, and why.
    """

    def __init__(
        self,
        report: CohortReport,
        sums: RunningSum,
        groups: list[list[str]],
        sizes: list[int],
        workspaces: list[Workspace],
        stop_on_failure: bool,
    ) -> None:
        self.failure: tuple[str, Exception] | None = None
        self._report = report
        self._sums = sums
        self._groups = groups
        self._sizes = sizes
        self._window = len(workspaces)
        self._free = workspaces
        self._stop_on_failure = stop_on_failure
        self._changed = threading.Condition()
        self._stopped = False
        self._taken: set[int] = set()
        self._added = 0
        self._waiting: dict[int, tuple[Workspace, list[_Outcome]]] = {}

    def take(self) -> tuple[int, Workspace] | None:
        """The next group's turn and a workspace for it, or None when there is nothing left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._finished())
            if self._finished():
                return None
            near = range(self._added, min(self._added + self._window, len(self._groups)))
            turn = max((turn for turn in near if turn not in self._taken), key=self._sizes.__getitem__)
            self._taken.add(turn)
            return turn, self._free.pop()

    def stop(self) -> None:
        """Start no further client, so that an interrupted exchange ends soon."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _finished(self) -> bool:
        return self._stopped or self.failure is not None or len(self._taken) == len(self._groups)

    def deliver(self, turn: int, workspace: Workspace, outcomes: list[_Outcome]) -> None:
        """Add these outcomes and all waiting ones whose turn has come."""
        with self._changed:
            self._waiting[turn] = (workspace, outcomes)
            while self._added in self._waiting:
                workspace, outcomes = self._waiting.pop(self._added)
                for name, outcome in zip(self._groups[self._added], outcomes, strict=False):
                    if isinstance(outcome, BlockSum):
                        self._enter_block(outcome)
                    else:
                        self._enter(name, outcome)
                self._added += 1
                self._free.append(workspace)
            self._changed.notify_all()

    def _enter_block(self, block: BlockSum) -> None:
        if block.answered:
            try:
                self._sums.add(block.answer)
            except TermError as problem:
                block.failed |= dict.fromkeys(block.answered, problem)
            else:
                self._report.enter_block(block)
        for name, cause in sorted(block.failed.items()):
            self._lose(name, cause)

    def _enter(self, name: str, outcome: tuple[Answer, int] | Exception) -> None:
        if not isinstance(outcome, Exception):
            answer, catch_up_bytes = outcome
            try:
                self._sums.add(answer)
            except TermError as problem:
                outcome = problem
            else:
                self._report.enter(answer)
                self._report.catch_up_bytes += catch_up_bytes
                return
        self._lose(name, outcome)

    def _lose(self, name: str, problem: Exception) -> None:
        self._report.lose(name, problem)
        if self.failure is None and (self._stop_on_failure or isinstance(problem, Contradiction)):
            self.failure = name, problem
