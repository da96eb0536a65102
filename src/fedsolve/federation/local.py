"""The engine in one process: workers over clients, one BLAS thread each, sums in client order."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsolve.backends.devices import resolve
from fedsolve.checks import check_arrays, check_choice, check_whole
from fedsolve.container import Array
from fedsolve.errors import DataError, TermError
from fedsolve.federation.cohort import UNKNOWN, CohortReport, Missing
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Chain, Needs, Request, Term, Total
from fedsolve.federation.participant import (
    DEFAULT_MEMORY,
    ClientData,
    Participant,
    answer_together,
    group_size,
)
from fedsolve.federation.running_sum import Answer, Contradiction, RunningSum
from fedsolve.federation.workspace import Workspace
from fedsolve.labels import class_list, plain_labels
from fedsolve.owners import owned_rows
from fedsolve.schema import Schema
from fedsolve.threads import blas_threads, usable_cores

if TYPE_CHECKING:
    from fedsolve.model import Model

LOCAL_MEMORY = 4 * DEFAULT_MEMORY
"""Bytes that all participants of a local federation may keep together."""


class LocalFederation:
    """Participants in this process.

    The result does not depend on `workers`: terms are added in client order, and at most
    workers + 1 of them exist at a time. With more than one client every worker uses one BLAS
    thread; a single client has all of them.

    missing: "error" stops at the first participant that fails, naming it; "continue" goes on
        with those present (exact for them) as long as `min_clients` answered.
    device: where clients and the server compute: "cpu", "cuda", "cuda:1", "auto" (a GPU if any), or
        "torch:cpu". None leaves each participant's own, and the server on the CPU.
    """

    prefers: Literal["bytes", "exchanges"] = "bytes"

    def __init__(
        self,
        participants: Sequence[Participant],
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
        self._participants: dict[str, Participant] = {}
        self._states: Path | None = None
        self._device = None if device is None else resolve(device)
        for participant in participants:
            self.add(participant)
        if not self._participants:
            raise DataError("a federation needs at least one participant; got none.")
        self.task = task
        self.workers = workers if workers is not None else usable_cores()
        self.missing = missing
        self.min_clients = min_clients
        self._declared = classes
        self._slots: list[Workspace] = []

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

        features: (rows, width); not copied. labels: (rows,). owners: (rows,) integers from 0.
        clients:  number of clients, empty ones included; the largest owner + 1 when None.
        memory_budget: bytes that all clients together may keep for derived features; what does not
            fit is mapped from `scratch` (the system's temporary folder when None).
        schema: what the features are, where `encoder.encode` made them of a table; its classes are those of
            the federation unless others are declared.
        """
        features, labels, owners = _as_array(features), plain_labels(labels), np.asarray(owners)
        weights = None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        check_arrays(features, labels, weights, missing=schema is not None)
        if len(features) == 0:
            raise DataError("no rows at all: features and labels are empty. Check the file or the query.")
        if owners.shape != (len(features),) or owners.dtype.kind not in "iu":
            raise DataError(
                f"owners must be {len(features)} integers, one client per row; "
                f"got shape {owners.shape}, dtype {owners.dtype}."
            )
        count = int(owners.max()) + 1 if clients is None else clients
        if owners.min() < 0 or owners.max() >= count:
            raise DataError(
                f"owners must lie between 0 and {count - 1}; got {owners.min()} to {owners.max()}. "
                "Raise clients= or fix the partition."
            )
        digits = len(str(count - 1))
        folder = None if scratch is None else Path(scratch)
        participants = []
        for client, rows in enumerate(owned_rows(owners, count)):
            data = ClientData(features, labels, rows, weights, checked=True, schema=schema)
            share = memory_budget * len(rows) // len(features)
            name = f"client-{client:0{digits}d}"
            participants.append(Participant(name, data, memory_budget=share, scratch=folder))
        if classes is None and schema is not None and schema.classes:
            classes = schema.classes
        return cls(
            participants,
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
        return self._device or "cpu"

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the participants, sorted: the order of every sum."""
        return tuple(sorted(self._participants))

    @property
    def participants(self) -> tuple[Participant, ...]:
        return tuple(self._participants[name] for name in self.clients)

    def add(self, participant: Participant) -> None:
        """Let a participant join; it takes part from the next exchange on."""
        if participant.name in self._participants:
            raise DataError(f"two participants are called '{participant.name}'; names must differ.")
        widths = {other.data.width for other in self._participants.values()} | {participant.data.width}
        if len(widths) > 1:
            raise DataError(
                f"'{participant.name}' has {participant.data.width} features per row, the others "
                f"{sorted(widths - {participant.data.width})}. All must use the same backbone."
            )
        self._participants[participant.name] = participant
        if self._device is not None:
            participant.move(self._device)
        if self._states is not None:
            participant.keep_states(self._states)

    def remove(self, client: str) -> Participant:
        """Let a participant leave; it is not asked any more."""
        if client not in self._participants:
            raise DataError(f"no participant is called '{client}'.")
        return self._participants.pop(client)

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder, so that a resumed run finds them.

        Participants that join later follow. None: in each participant's own folder, or in memory.
        """
        self._states = folder
        for participant in self.participants:
            participant.keep_states(folder)

    def describe(self) -> Spec:
        """What a method needs to know before the first exchange."""
        participants = self.participants
        width = participants[0].data.width
        if self.task == "regression":
            for participant in participants:
                if participant.data.labels.dtype.kind not in "fiub":
                    raise DataError(
                        f"'{participant.name}' has targets of type {participant.data.labels.dtype}; "
                        "regression needs numbers."
                    )
            outputs = {1 if p.data.labels.ndim == 1 else p.data.labels.shape[1] for p in participants}
            if len(outputs) > 1:
                raise DataError(f"participants have different numbers of targets: {sorted(outputs)}.")
            return Spec(width, None, outputs.pop(), self.prefers, self.device)
        classes = class_list(self._declared, [p.data.own_labels() for p in participants])
        return Spec(width, classes, len(classes), self.prefers, self.device)

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, added in client order."""
        started = time.perf_counter()
        report, sums = CohortReport.of(request, self._participants), RunningSum()
        cohort = [name for name in report.asked if name not in report.absent]
        size = group_size(request, chain)
        groups = [cohort[first : first + size] for first in range(0, len(cohort), size)]
        workers = max(1, min(self.workers, len(groups)))
        while len(self._slots) < workers + 1:
            self._slots.append(Workspace())
        ledger = _Ledger(report, sums, groups, self._slots[: workers + 1], self.missing == "error")

        def work() -> None:
            while (task := ledger.take()) is not None:
                turn, workspace = task
                try:
                    asked = [self._participants[name] for name in groups[turn]]
                    ledger.deliver(turn, workspace, _ask_group(asked, request, chain, workspace, sums))
                except BaseException:
                    ledger.stop()  # the other workers must not wait for a turn that never comes
                    raise

        with blas_threads(None if len(self._participants) == 1 else 1):
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
        if ledger.failure is not None:
            name, cause = ledger.failure
            raise report.stopped(name, cause) from cause
        return report.total(sums, request, self.min_clients)

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int | None = None
    ) -> Iterator[tuple[str, bytes | Exception]]:
        """The clients' replies to letters, as many at a time as there are workers."""

        def ask(name: str) -> bytes | Exception:
            try:
                if name not in self._participants:
                    raise Missing("absent", UNKNOWN)
                return self._participants[name].reply(channel, letters[name])
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
        rows = sum(len(participant) for participant in self.participants)
        return f"LocalFederation({len(self._participants)} clients, {rows} rows, workers={self.workers})"


_Outcome = tuple[Answer, int] | Exception
"""An answer and the bytes of the model blocks that its client lacked, or what went wrong."""


def _ask(
    participant: Participant, request: Request, chain: Chain, workspace: Workspace, sums: RunningSum
) -> tuple[Answer, int]:
    term = participant.answer(request, workspace)
    catch_up = 0
    # Twice at most: that a participant holds blocks of another run shows only when newer ones do not
    # continue them; then it asks for everything.
    for _ in range(2):
        if not isinstance(term, Needs):
            break
        fuller = request.starting_at(term.have, chain)
        catch_up += fuller.nbytes
        term = participant.answer(fuller, workspace)
    if isinstance(term, Needs):
        raise TermError(
            f"it still lacks model blocks from {term.have} on after being sent them. Restart it "
            "(participant.forget()) and resume."
        )
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
            failed = problem  # asked one by one below, which shows whose failure it is
    outcomes: list[_Outcome] = []
    for participant in group:
        try:
            outcomes.append(_ask(participant, request, chain, workspace, sums))
        except Exception as problem:  # reported with the participant's name by the ledger
            outcomes.append(problem)
    if failed is not None and not any(isinstance(outcome, Exception) for outcome in outcomes):
        warnings.warn(
            f"{len(group)} clients from '{group[0].name}' on could not answer together "
            f"({type(failed).__name__}: {failed}) and answered one by one, which is slower.",
            RuntimeWarning,
            stacklevel=2,
        )
    return outcomes


class _Ledger:
    """Hands out groups of clients in order and adds their terms in the same order.

    A term keeps its workspace until it has been added, and a group is only started with a
    workspace in hand: at most as many groups' terms exist as there are workspaces, and the earliest
    unfinished group always holds one, so the sum cannot deadlock.

    failure: the participant that stops the exchange, and why.
    """

    def __init__(
        self,
        report: CohortReport,
        sums: RunningSum,
        groups: list[list[str]],
        workspaces: list[Workspace],
        stop_on_failure: bool,
    ) -> None:
        self.failure: tuple[str, Exception] | None = None
        self._report = report
        self._sums = sums
        self._groups = groups
        self._free = workspaces
        self._stop_on_failure = stop_on_failure
        self._changed = threading.Condition()
        self._stopped = False
        self._taken = 0
        self._added = 0
        self._waiting: dict[int, tuple[Workspace, list[_Outcome]]] = {}

    def take(self) -> tuple[int, Workspace] | None:
        """The next group's turn and a workspace for it, or None when there is nothing left to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._finished())
            if self._finished():
                return None
            self._taken += 1
            return self._taken - 1, self._free.pop()

    def stop(self) -> None:
        """Start no further client, so that an interrupted exchange ends soon."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _finished(self) -> bool:
        return self._stopped or self.failure is not None or self._taken == len(self._groups)

    def deliver(self, turn: int, workspace: Workspace, outcomes: list[_Outcome]) -> None:
        """Add these outcomes and all waiting ones whose turn has come."""
        with self._changed:
            self._waiting[turn] = (workspace, outcomes)
            while self._added in self._waiting:
                workspace, outcomes = self._waiting.pop(self._added)
                for name, outcome in zip(self._groups[self._added], outcomes, strict=True):
                    self._enter(name, outcome)
                self._added += 1
                self._free.append(workspace)
            self._changed.notify_all()

    def _enter(self, name: str, outcome: _Outcome) -> None:
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
        self._report.lose(name, outcome)
        if self.failure is None and (self._stop_on_failure or isinstance(outcome, Contradiction)):
            self.failure = name, outcome


def _as_array(features: Any) -> Array:
    return features if isinstance(features, np.ndarray) else np.asarray(features)
