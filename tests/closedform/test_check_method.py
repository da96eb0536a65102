"""`check_method`: every registered method passes, and a method broken in one way fails that one check."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedsolve import registry
from fedsolve.closedform.sums import OneExchangeRun
from fedsolve.extend import (
    ClientData,
    LinearModel,
    Memory,
    Method,
    OneExchange,
    Request,
    Rows,
    Run,
    Spec,
    Term,
    Total,
    cached_rows,
    parameter,
    ridge_solve,
    step,
)
from fedsolve.federation.folds import row_hashes
from fedsolve.testing import CHECKS, LawBroken, check_method

OURS = [
    info.key
    for info in registry.methods()
    if not registry.is_foreign(info.key) and info.key not in ("private", "release")  # noise
]


QUICK = {
    "afl",
    "apfl",
    "cascade",
    "deepafl",
    "kernelafl",
    "kernelsoftmax",
    "softmax",
    "fedavg",
    "ditto",
    "scaffold",
}


@pytest.mark.parametrize(
    "key", [key if key in QUICK else pytest.param(key, marks=pytest.mark.slow) for key in OURS]
)
def test_every_registered_method_keeps_the_laws(key: str) -> None:
    method: Any = registry.method_class(key)
    passed = check_method(method)
    exempt = set() if method.laws.partition is not None else {"partition", "number of clients", "order"}
    exempt |= set() if method.laws.empty else {"empty clients"}
    exempt |= set() if method.laws.partition is not None else {"cells"}
    assert set(CHECKS) - set(passed) == exempt


def test_closed_forms_declare_that_the_partition_does_not_matter() -> None:
    laws = {key: registry.method_class(key).laws.partition for key in OURS}  # type: ignore[attr-defined]
    invariant = {key: law for key, law in laws.items() if law is not None}
    closed = {"afl", "apfl", "auto", "cascade", "deepafl", "kernelafl", "kernelsoftmax", "softmax"}
    statistics = {"describe", "glm", "kaplan-meier"}
    assert set(invariant) == closed | statistics
    assert max(invariant.values()) <= 1e-9


class RidgeParts:
    """Ridge regression on class indicators; the methods below change one thing each."""

    def answer(self, rows: Rows) -> Term:
        term = Term({"gram": np.zeros((rows.width, rows.width))})
        term.arrays["cross"] = np.zeros((rows.width, rows.outputs))
        for features, targets in rows.blocks():
            term.arrays["gram"] += features.T @ features
            term.arrays["cross"] += features.T @ targets
        return term

    def solve(self, total: Total, spec: Spec) -> LinearModel:
        weight = ridge_solve(total["gram"], total["cross"], 1.0)
        return LinearModel(weight, np.zeros(spec.outputs), spec.classes)


@dataclass(frozen=True)
class Sound(RidgeParts, OneExchange[LinearModel]):
    """Keeps every law."""


class TwoSteps(Run[LinearModel]):
    """The same in two exchanges: the mean of all rows first, which is taken off them."""

    kind = "test-two-steps"

    def __init__(self, method: Any, spec: Spec) -> None:
        super().__init__(method, spec)
        self.middle: Any = None
        self.sums: dict[str, Any] = {}

    @property
    def exchanges(self) -> int:
        return 2

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self.middle is None:
            return self.ask(self.kind, 0, clients, {"pair": (1, 2)})
        return (
            None if self.sums else self.ask(self.kind, 1, clients, {"pair": (1, 2)}, {"middle": self.middle})
        )

    def absorb(self, total: Total) -> None:
        if self.middle is None:
            self._check(total)
            self.middle = total["feature"] / max(1, total.count("rows"))
        else:
            self.sums = {name: total[name] for name in ("gram", "cross")}
        self.record(total)

    def _check(self, total: Total) -> None:
        if total.count("rows") == 0:
            raise registry.DataError("no rows at all.")

    def model(self) -> LinearModel:
        weight = ridge_solve(self.sums["gram"], self.sums["cross"], 1.0)
        model = self._made(weight, -self.middle @ weight)
        model.history = tuple(self.history)
        return model

    def _made(self, weight: Any, intercept: Any) -> LinearModel:
        return LinearModel(weight, intercept, self.spec.classes)


@step("test-two-steps")
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    rows = cached_rows(data, memory, np.float64)
    features, targets = rows.features(slice(None)), rows.targets(slice(None))
    if request.step == 0:
        term = Term({"feature": features.sum(axis=0)}, {"rows": len(rows)})
    else:
        features = features - request.arrays["middle"]
        term = Term({"gram": features.T @ features, "cross": features.T @ targets})
    change = memory.chain.opening["method"].partition(":")[2]
    if change == "ByName" and memory.name == "north":
        term = term + term
    if change == "NoSum":
        term.arrays[f"width@{memory.name}"] = np.array([float(rows.width)])
    if change == "Tuples" and isinstance(request.note["pair"], tuple):
        term = term + term
    return term


@dataclass(frozen=True)
class SoundInTwo(Method[LinearModel]):
    """Keeps every law."""

    def start(self, spec: Spec) -> Run[LinearModel]:
        return TwoSteps(self, spec)


@dataclass
class Loose(RidgeParts, OneExchange[LinearModel]):
    """Can be changed after it was made."""


class ByDivision(Sound):
    """Adds a ridge where a client has one class only."""

    def answer(self, rows: Rows) -> Term:
        term = super().answer(rows)
        term.arrays["gram"] += np.eye(rows.width) * (len(np.unique(rows.codes)) == 1)  # type: ignore[arg-type]
        return term


class ByNumber(Sound):
    """Adds a ridge for every client that has rows."""

    def answer(self, rows: Rows) -> Term:
        term = super().answer(rows)
        term.arrays["gram"] += np.eye(rows.width) * (len(rows) > 0)
        return term


class ByName(SoundInTwo):
    """Counts the rows of 'north' twice."""


class ByThread(Sound):
    """Adds something that depends on the thread."""

    def answer(self, rows: Rows) -> Term:
        term = super().answer(rows)
        if threading.current_thread() is not threading.main_thread():
            term.arrays["gram"] *= 1.0 + 1e-13
        return term


class ByEmpty(Sound):
    """Doubles the scores for every client that has no rows."""

    def solve(self, total: Total, spec: Spec) -> LinearModel:
        model = super().solve(total, spec)
        model.weight *= 1 + len(total.empty)
        return model


class Nameless(OneExchangeRun[LinearModel]):
    """Does not tell history who had no rows."""

    def record(self, total: Total, *details: Any, **more: Any) -> None:
        total.empty = ()
        super().record(total, *details, **more)


class ForgetsEmpty(Sound):
    def start(self, spec: Spec) -> Run[LinearModel]:
        return Nameless(self, spec)


class Counting(Sound):
    """Answers the same request in another way the second time."""

    def answer(self, rows: Any) -> Term:
        term = super().answer(rows)
        rows.asked = getattr(rows, "asked", 0) + 1
        term.arrays["gram"] *= 1.0 + 1e-15 * (rows.asked - 1)
        return term


class Forgetful(SoundInTwo):
    """Stores the mean in single precision."""

    def start(self, spec: Spec) -> Run[LinearModel]:
        class Run(TwoSteps):
            def stored(self) -> dict[str, Any]:
                kept = super().stored()
                if isinstance(middle := kept.get("middle"), np.ndarray):
                    kept["middle"] = middle.astype(np.float32).astype(np.float64)
                return kept

        return Run(self, spec)


class Endless(SoundInTwo):
    """Forgets what it solved, and asks for ever after a resume."""

    def start(self, spec: Spec) -> Run[LinearModel]:
        class Run(TwoSteps):
            def stored(self) -> dict[str, Any]:
                return {}

        return Run(self, spec)


class Tuples(SoundInTwo):
    """Tells a tuple from a list, which no message does."""


class LossyModel(LinearModel):
    """Saves its weights in single precision."""

    def arrays(self) -> dict[str, Any]:
        return {name: array.astype(np.float32).astype(float) for name, array in super().arrays().items()}


class Lossy(SoundInTwo):
    def start(self, spec: Spec) -> Run[LinearModel]:
        class Run(TwoSteps):
            def _made(self, weight: Any, intercept: Any) -> LinearModel:
                return LossyModel(weight, intercept, self.spec.classes)

        return Run(self, spec)


class Credulous(SoundInTwo):
    """Makes a model of no rows at all."""

    def start(self, spec: Spec) -> Run[LinearModel]:
        class Run(TwoSteps):
            def _check(self, total: Total) -> None:
                """Nothing is refused."""

        return Run(self, spec)


class NoSum(SoundInTwo):
    """Sends an array under each client's own name without saying so."""


class Divides(Sound):
    """Sends a sum over half of the rows, without saying so."""

    def answer(self, rows: Rows) -> Term:
        term = super().answer(rows)
        features = rows.features(slice(None))
        term.arrays["half"] = features[row_hashes(features) % 2 == 0].sum(axis=0)
        return term


@pytest.mark.parametrize("method", [Sound, SoundInTwo])
def test_a_sound_method_passes(method: Any) -> None:
    assert check_method(method) == list(CHECKS)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (Loose, "declaration"),
        (ByDivision, "partition"),
        (ByNumber, "number of clients"),
        (ByName, "order"),
        (ByThread, "workers"),
        (ByEmpty, "empty clients"),
        (ForgetsEmpty, "empty clients"),
        (Counting, "repeat"),
        (Forgetful, "resume"),
        (Endless, "resume"),
        (Tuples, "encoding"),
        (Lossy, "files"),
        (Credulous, "bad input"),
        (NoSum, "gathers"),
        (Divides, "cells"),
    ],
)
def test_a_broken_method_fails_that_check_and_no_other(method: Any, name: str) -> None:
    failed = []
    for check, run in CHECKS.items():
        try:
            run(method())
        except AssertionError:
            failed.append(check)
    assert failed == [name]
    with pytest.raises(LawBroken, match=f"{method.__name__} fails the check '{name}'") as caught:
        check_method(method)
    assert caught.value.check == name


@dataclass(frozen=True)
class Seeded(Sound):
    """Has parameters whose names mean something in other methods."""

    seed: int = parameter(3, "Seed of nothing.", least=0)
    band_width: int = parameter(10**9, "A width of nothing.", least=1)


def test_names_of_parameters_are_the_authors_own() -> None:
    assert check_method(Seeded) == list(CHECKS)
    spec = Spec(4, np.arange(2), 2, "bytes")
    assert Seeded().largest_side(spec) == 4, "no width is guessed from a name"


def test_a_declared_gatherer_may_send_arrays_of_its_own() -> None:
    class Declared(NoSum):
        gathers = True

    CHECKS["gathers"](Declared())


def test_every_check_is_broken_by_some_method() -> None:
    marks = test_a_broken_method_fails_that_check_and_no_other.pytestmark  # type: ignore[attr-defined]
    assert {name for _, name in marks[0].args[1]} == set(CHECKS)
