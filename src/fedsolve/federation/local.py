"""The engine in one process: workers over clients, one BLAS thread each, sums in client order."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedsolve.checks import check_arrays, check_choice, check_whole
from fedsolve.container import Array
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Chain, Needs, Request, Term, Total
from fedsolve.federation.participant import (
    DEFAULT_MEMORY,
    ClientData,
    Participant,
    answer_together,
    group_size,
)
from fedsolve.federation.workspace import Workspace
from fedsolve.labels import class_list, plain_labels
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
    ) -> None:
        if workers is not None:
            check_whole(1, workers=workers)
        check_choice("missing", missing, ("error", "continue"))
        check_choice("task", task, ("classification", "regression"))
        self._participants: dict[str, Participant] = {}
        self._states: Path | None = None
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
        order = np.argsort(owners, kind="stable")
        bounds = np.searchsorted(owners[order], np.arange(count + 1))
        digits = len(str(count - 1))
        folder = None if scratch is None else Path(scratch)
        participants = []
        for client in range(count):
            rows = order[bounds[client] : bounds[client + 1]]
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
        )

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
        if self._states is not None:
            participant.keep_states(self._states)

    def remove(self, client: str) -> Participant:
        """Let a participant leave; it is not asked any more."""
        if client not in self._participants:
            raise DataError(f"no participant is called '{client}'.")
        return self._participants.pop(client)

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder, so that a resumed run finds them.

        Participants that join later follow. None: where each participant was told to, or in memory.
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
            return Spec(width, None, outputs.pop(), self.prefers)
        classes = class_list(self._declared, [p.data.own_labels() for p in participants])
        return Spec(width, classes, len(classes), self.prefers)

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, added in client order."""
        started = time.perf_counter()
        cohort = [name for name in sorted(request.cohort) if name in self._participants]
        size = group_size(request, chain)
        groups = [cohort[first : first + size] for first in range(0, len(cohort), size)]
        workers = max(1, min(self.workers, len(groups)))
        while len(self._slots) < workers + 1:
            self._slots.append(Workspace())
        ledger = _Ledger(request, groups, self._slots[: workers + 1], self.missing == "error")
        for name in set(request.cohort) - set(cohort):
            ledger.missing[name] = "not part of the federation"

        def work() -> None:
            while (task := ledger.take()) is not None:
                turn, workspace = task
                try:
                    asked = [self._participants[name] for name in groups[turn]]
                    ledger.deliver(turn, workspace, _ask_group(asked, request, chain, workspace))
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
        return ledger.total(max(1, self.min_clients), time.perf_counter() - started)

    def evaluate(self, model: Model) -> float:
        """Federated accuracy (R² for regression): each client scores its own rows and sends sums."""
        from fedsolve.federation.evaluation import evaluate

        return evaluate(self, model)

    def __repr__(self) -> str:
        rows = sum(len(participant) for participant in self.participants)
        return f"LocalFederation({len(self._participants)} clients, {rows} rows, workers={self.workers})"


@dataclass
class _Answer:
    term: Term
    catch_up_bytes: int
    rows: int


def _ask(participant: Participant, request: Request, chain: Chain, workspace: Workspace) -> _Answer:
    answer = participant.answer(request, workspace)
    catch_up = 0
    # Twice at most: that a participant holds blocks of another run shows only when newer ones do not
    # continue them; then it asks for everything.
    for _ in range(2):
        if not isinstance(answer, Needs):
            break
        fuller = request.starting_at(answer.have, chain)
        catch_up += fuller.nbytes
        answer = participant.answer(fuller, workspace)
    if isinstance(answer, Needs):
        raise TermError(
            f"it still lacks model blocks from {answer.have} on after being sent them. Restart it "
            "(participant.forget()) and resume."
        )
    answer.check_finite(f"'{participant.name}'")
    return _Answer(answer, catch_up, len(participant))


def _ask_group(
    group: list[Participant], request: Request, chain: Chain, workspace: Workspace
) -> list[_Answer | Exception]:
    """The outcome of every client of a group, in order; one client that fails does not take others along."""
    failed: Exception | None = None
    if len(group) > 1:
        try:
            terms = answer_together(group, request, workspace)
            if terms is not None:
                for participant, term in zip(group, terms, strict=True):
                    term.check_finite(f"'{participant.name}'")
                return [_Answer(t, 0, len(p)) for p, t in zip(group, terms, strict=True)]
        except Exception as problem:
            failed = problem  # asked one by one below, where the failure finds its client
    outcomes: list[_Answer | Exception] = []
    for participant in group:
        try:
            outcomes.append(_ask(participant, request, chain, workspace))
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
    unfinished group always holds one, so the sum never waits for ever.
    """

    def __init__(
        self,
        request: Request,
        groups: list[list[str]],
        workspaces: list[Workspace],
        stop_on_failure: bool,
    ) -> None:
        self.missing: dict[str, str] = {}
        self._request = request
        self._groups = groups
        self._free = workspaces
        self._stop_on_failure = stop_on_failure
        self._changed = threading.Condition()
        self._stopped = False
        self._taken = 0
        self._added = 0
        self._waiting: dict[int, tuple[Workspace, list[_Answer | Exception]]] = {}
        self._term = Term()
        self._answered: list[str] = []
        self._empty: list[str] = []
        self._bytes_up = 0
        self._catch_up_bytes = 0
        self._failure: tuple[str, Exception] | None = None

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
        return self._stopped or self._failure is not None or self._taken == len(self._groups)

    def deliver(self, turn: int, workspace: Workspace, outcomes: list[_Answer | Exception]) -> None:
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

    def _enter(self, name: str, outcome: _Answer | Exception) -> None:
        if isinstance(outcome, _Answer):
            try:
                self._term.check_fits(outcome.term)
            except TermError as problem:
                outcome = problem
        if isinstance(outcome, Exception):
            self.missing[name] = f"{type(outcome).__name__}: {outcome}"
            if self._stop_on_failure and self._failure is None:
                self._failure = (name, outcome)
            return
        self._term.add(outcome.term)
        self._answered.append(name)
        self._bytes_up += outcome.term.nbytes
        self._catch_up_bytes += outcome.catch_up_bytes
        if outcome.rows == 0:
            self._empty.append(name)

    def total(self, min_clients: int, seconds: float) -> Total:
        """The total of all answers, or the error that stands in its way."""
        exchange = f"exchange {self._request.exchange} ({self._request.kind})"
        if self._failure is not None:
            name, problem = self._failure
            reason = str(problem).rstrip(".")
            if isinstance(problem, DataError):
                raise DataError(f"participant '{name}': {problem}") from problem
            raise CohortError(
                f"participant '{name}' failed in {exchange}: {type(problem).__name__}: {reason}. "
                "Mend it and resume; in Python, missing='continue' lets the federation go on without it."
            ) from problem
        if len(self._answered) < min_clients:
            reasons = "; ".join(f"'{name}': {why}" for name, why in sorted(self.missing.items())[:3])
            raise CohortError(
                f"{exchange}: {len(self._answered)} of {len(self._request.cohort)} participants answered, "
                f"at least {min_clients} needed. {reasons or 'Nobody was asked.'} "
                "Mend them and resume, or lower min_clients."
            )
        self._term.mirror()
        return Total(
            term=self._term,
            cohort=tuple(self._answered),
            missing=dict(sorted(self.missing.items())),
            empty=tuple(self._empty),
            bytes_up=self._bytes_up,
            bytes_down=self._request.nbytes * len(self._answered),
            catch_up_bytes=self._catch_up_bytes,
            seconds=seconds,
        )


def _as_array(features: Any) -> Array:
    return features if isinstance(features, np.ndarray) else np.asarray(features)
