"""A run that tries candidates on rows held out, and then trains the best of them on all rows.

    rows         how many there are, which decides folds and sizes                         1 exchange
    trials       every candidate on all rows but a fold, for every fold, in lockstep       of the longest
    comparison   mistakes and squared errors of all of them on the folds held out          1 exchange
    refit        the best one on all rows                                                  its own

Folds are chosen by the content of rows (`fedsolve.held_out`), so that the choice is the same however rows are
divided among clients. Of many rows a trial takes some, and a candidate that can be made smaller is tried in
that proportion (`scaled`): as many rows for each of its features, as strong penalties beside them. One with a
classifier after every layer is compared after each, which chooses the number of layers in the same exchange.
Preparation by a schema is by all rows: means and deviations know of the rows held out, labels of
them do not enter.

Of classes, the fewest mistakes count first; candidates within half a standard error of the fewest count as
equals, and the one with the least squared error is taken. Of targets, the least squared error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from fedsolve.checks import check_rows
from fedsolve.closedform.lockstep import Lockstep, known_members, share_of
from fedsolve.closedform.predictors import StagedModel
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Request, Term, Total
from fedsolve.federation.method import Method, Run, opening_classes
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.parts import Part
from fedsolve.labels import encode_labels, regression_targets
from fedsolve.model import Model, model_from_contents

ROWS = "choosing-rows"
COMPARISON = "choosing-comparison"

KEY = "choice"
"""The key of the marks: other than the one of rows that are held out from a whole run."""

FEW = 40
"""Rows below which nothing is tried: too few are left to tell candidates apart."""

FOLDS = 5
MANY = 4_000
"""Rows from which on one fold is held out instead of every one in turn."""

TRIAL_ROWS = 12_000
"""About how many rows a trial takes where there are more; half as many again are held out to compare."""

_TOLERANCE = 0.5
_ROWS_AT_ONCE = 16384

M = TypeVar("M", bound=Model)


class Chooses(Protocol):
    """What a method that chooses has: its candidates, and how much trying and training may cost."""

    max_exchanges: int | None
    max_bytes: int | None
    any_layers: bool
    """Whether a candidate may stop at any of its layers."""

    def candidates(self, spec: Spec, rows: int) -> Sequence[Method[Any]]: ...


@dataclass(frozen=True)
class Tried:
    """A candidate, and how it did on the rows held out.

    layers: of a candidate with layers, the best number. errors: share of mistakes, None for targets. loss:
    mean squared error. rows: held out in all. left_out: why it was not tried.
    """

    method: str
    settings: Mapping[str, Any]
    layers: int | None = None
    errors: float | None = None
    loss: float | None = None
    rows: int = 0
    chosen: bool = False
    left_out: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Fold:
    """A part to train on and one to compare on, which share no row.

    taken: the share of rows that a trial leaves out on purpose, beyond those held out, is one minus this.
    """

    training: Part
    held_out: Part
    taken: float = 1.0


def folds_for(rows: int) -> list[Fold]:
    """The folds that candidates are tried on, by the number of all rows alone."""
    if rows < MANY:
        windows = [(1 / FOLDS, KEY, place / FOLDS) for place in range(FOLDS)]
        return [Fold(Part("training", *window), Part("held out", *window)) for window in windows]
    share = 0.2
    if rows * (1 - share) <= TRIAL_ROWS:
        return [Fold(Part("training", share, KEY), Part("held out", share, KEY))]
    taken = TRIAL_ROWS / rows
    others = min(0.5 * taken, 1 - taken)
    return [Fold(Part("held out", taken, KEY, others), Part("held out", others, KEY), taken)]


class ChoosingRun(Run[M]):
    """Rows, trials, comparison, refit: see the module."""

    method: Method[M]

    def __init__(self, method: Method[M], spec: Spec) -> None:
        super().__init__(method, spec)
        self._chooses: Chooses = method  # type: ignore[assignment]
        self._clients = 1
        self._trainings, self._besides = 1, 0
        self._phase = "rows"
        self._rows = 0
        self._tried: list[Method[Any]] = []
        self._left_out: list[Tried] = []
        self._folds: list[Fold] = []
        self._steps: Lockstep | None = None
        self._trials: list[Tried] = []

    # -- the exchanges -----------------------------------------------------------------------------

    @property
    def exchanges(self) -> int:
        if self._phase == "rows":
            longest = max(m.start(self.spec).exchanges for m in self._chooses.candidates(self.spec, MANY))
            return 2 + 2 * longest
        assert self._steps is not None
        if self._phase == "refit":
            done = sum(record.kind != "refit" for record in self.history)
            return done + self._steps.exchanges
        return 2 + 2 * self._steps.exchanges

    def request(self, clients: tuple[str, ...]) -> Request | None:
        self._clients = len(clients)
        if self._phase == "rows":
            return self.ask(ROWS, 0, clients)
        assert self._steps is not None
        if self._phase == "comparison":
            return self._comparison(clients)
        request = self._steps.request(clients)
        if request is None and self._phase == "trials":
            self._phase = "comparison"
            return self._comparison(clients)
        return request

    def absorb(self, total: Total) -> None:
        if self._phase == "rows":
            self._rows = total.count("rows")
            check_rows(self._rows)
            self._open_trials(total.cohort)
            self.record(total, "rows")
        elif self._phase == "comparison":
            chosen = self._compare(total)
            self._refit(chosen)
            self.record(total, metrics={"tried": [trial.as_dict() for trial in self._trials]})
        else:
            assert self._steps is not None
            self._steps.absorb(total)
            self.record(total, "trials" if self._phase == "trials" else "refit")

    def model(self) -> M:
        assert self._steps is not None
        model: M = self._steps.members["refit"].model()
        model.history = tuple(self.history)
        model.tried = tuple(self._trials)
        return model

    def within(self) -> Mapping[str, Run[Any]]:
        members = {} if self._steps is None else self._steps.members
        named = {f"{name}.": run for name, run in members.items()}
        return named | ({"": members["refit"]} if "refit" in members else {})

    def expect(self, trainings: int, besides: int) -> None:
        self._trainings, self._besides = trainings, besides

    def choice(self) -> dict[str, Any] | None:
        return self._about_the_choice() if self._phase == "refit" else None

    def take_choice(self, choice: Mapping[str, Any]) -> None:
        self._rows, self._clients = choice["rows"], choice["clients"]
        self._trials = [Tried(**trial) for trial in choice["trials"]]
        self._refit(_method_of(choice["refit"]))

    # -- trials ------------------------------------------------------------------------------------

    def _open_trials(self, cohort: tuple[str, ...]) -> None:
        self._clients = len(cohort)
        candidates = list(self._chooses.candidates(self.spec, self._rows))
        self._folds = folds_for(self._rows)
        self._tried, self._left_out = self._affordable(candidates)
        alone = len(self._tried) == 1 and not self._staged(self._tried[0])
        if self._rows < FEW or alone:
            first = self._tried[0]
            why = f"{self._rows} rows are too few to try candidates" if self._rows < FEW else ""
            self._trials = [_entry(first, chosen=True, left_out=why), *self._left_out]
            self._refit(first)
            return
        self._steps = Lockstep(self, self._members())
        self._phase = "trials"

    def _members(self) -> dict[str, Run[Any]]:
        members = {}
        for number, method in enumerate(self._tried):
            for place, fold in enumerate(self._folds):
                run = scaled(method, fold.taken).start(self.spec)
                run.agree(fold.training.note())
                members[f"{number}-{place}"] = run
        return members

    def _affordable(self, candidates: list[Method[Any]]) -> tuple[list[Method[Any]], list[Tried]]:
        """Those whose trials and refit fit the budget, in order; all are counted together."""
        limit, most = self._chooses.max_exchanges, self._chooses.max_bytes
        taken: list[Method[Any]] = []
        left: list[Tried] = []
        longest, dearest, spent = 0, 0, 0
        for method in candidates:
            exchanges = method.start(self.spec).exchanges
            needed = 2 + self._besides + (1 + self._trainings) * max(longest, exchanges)
            if limit is not None and needed > limit:
                left.append(_entry(method, left_out=f"takes {needed} exchanges in all"))
                continue
            price = 0 if most is None else self._clients * bytes_of(method, self.spec)
            cost = spent + len(self._folds) * price + self._trainings * max(dearest, price)
            if most is not None and cost > most:
                left.append(_entry(method, left_out=f"takes {cost:,} bytes with those before it"))
                continue
            taken.append(method)
            longest, dearest = max(longest, exchanges), max(dearest, price)
            spent += len(self._folds) * price
        if not taken:
            raise DataError(
                "the budget is too small for any candidate: "
                + "; ".join(dict.fromkeys(f"{trial.method} {trial.left_out}" for trial in left))
                + ". Raise max_exchanges or max_bytes, or train one method by name"
                + (", or leave out the calibration (--no-calibrate)." if self._besides else ".")
            )
        return taken, left

    # -- comparison --------------------------------------------------------------------------------

    def _comparison(self, clients: tuple[str, ...]) -> Request:
        assert self._steps is not None
        notes: dict[str, Any] = {}
        arrays: dict[str, Array] = {}
        for name, run in self._steps.members.items():
            contents, note = run.model().contents()
            held_out = self._folds[int(name.partition("-")[2])].held_out
            notes[name] = {"model": note, **held_out.note()}
            arrays |= {f"{name}.{key}": array for key, array in contents.items()}
        return self.ask(COMPARISON, 0, clients, {"models": notes}, arrays)

    def _compare(self, total: Total) -> Method[Any]:
        """The best candidate with its best number of layers; enters all of them into the table."""
        marks = []
        for number in range(len(self._tried)):
            names = [f"{number}-{place}.marks" for place in range(len(self._folds))]
            whole = np.sum([total[name] for name in names], axis=0)
            marks.append(whole if self._chooses.any_layers else whole[:, -1:])
        # Rows of (weight, mistakes, squared error), a column for every stage of every candidate.
        weights, errors, losses = np.concatenate(marks, axis=1)
        if not np.any(weights > 0):
            raise DataError("no row that counts was held out; name a method and its settings instead.")
        rows = sum(share_of(total, f"0-{place}").count("rows") for place in range(len(self._folds)))
        owners = np.repeat(np.arange(len(marks)), [mark.shape[1] for mark in marks])
        mistakes = errors if self.spec.classes is not None else None
        unit = float(weights[0]) / rows
        best = best_of(mistakes, losses, unit)
        for number, method in enumerate(self._tried):
            own = np.flatnonzero(owners == number)
            its = own[best_of(None if mistakes is None else mistakes[own], losses[own], unit)]
            if owners[best] == number:
                its = best
            self._trials.append(
                _entry(
                    method,
                    layers=int(its - own[0]) if self._staged(method) else None,
                    errors=None if mistakes is None else float(mistakes[its] / weights[its]),
                    loss=float(losses[its] / weights[its]),
                    rows=rows,
                    chosen=bool(its == best),
                )
            )
        self._trials += self._left_out
        chosen = self._tried[int(owners[best])]
        layers = int(best - np.flatnonzero(owners == owners[best])[0])
        return dataclasses.replace(chosen, layers=layers) if self._staged(chosen) else chosen  # type: ignore[type-var]

    def _staged(self, method: Method[Any]) -> bool:
        """Whether a candidate has layers of which the number is to be chosen."""
        return self._chooses.any_layers and bool(getattr(method, "layers", 0))

    def _refit(self, method: Method[Any]) -> None:
        self._steps = Lockstep(self, {"refit": method.start(self.spec)})
        self._phase = "refit"

    # -- saving and resuming -----------------------------------------------------------------------

    def stored(self) -> tuple[dict[str, Array], dict[str, Any]]:
        members = {} if self._steps is None else self._steps.members
        arrays = {name: np.frombuffer(run.to_bytes(), dtype=np.uint8) for name, run in members.items()}
        return arrays, {"phase": self._phase, **self._about_the_choice()}

    def _about_the_choice(self) -> dict[str, Any]:
        refit = self._steps.members["refit"].method if self._steps and self._phase == "refit" else None
        return {
            "rows": self._rows,
            "clients": self._clients,
            "trials": [trial.as_dict() for trial in self._trials],
            "refit": None if refit is None else [refit.key, refit.parameters()],
        }

    def take_stored(self, arrays: dict[str, Array], note: dict[str, Any]) -> None:
        self._phase, self._rows, self._clients = note["phase"], note["rows"], note["clients"]
        self._trials = [Tried(**trial) for trial in note["trials"]]
        if self._phase == "rows":
            return
        self._folds = folds_for(self._rows)
        candidates = list(self._chooses.candidates(self.spec, self._rows))
        self._tried, self._left_out = self._affordable(candidates)
        if note["refit"] is not None:
            members = {"refit": _method_of(note["refit"]).start(self.spec)}
        else:
            members = self._members()
        for name, run in members.items():
            run.restore(arrays[name].tobytes(), "of a candidate")
        self._steps = Lockstep(self, members)


def _method_of(note: Sequence[Any]) -> Method[Any]:
    """The method of a key and parameters."""
    from fedsolve import registry

    key, parameters = note
    made: Method[Any] = registry.method_class(key)(**parameters)
    return made


def scaled(method: Method[Any], share: float) -> Method[Any]:
    """The candidate as it is tried on this share of the rows: smaller, where it knows how."""
    smaller: Callable[[float], Method[Any]] | None = getattr(method, "scaled", None)
    return method if smaller is None or share == 1.0 else smaller(share)


def best_of(errors: Array | None, losses: Array, weight: float) -> int:
    """The place of the best: fewest mistakes within half a standard error, then the least squared error.

    weight: the mean weight of a row, the unit in which mistakes are counted.
    """
    if errors is None:
        return int(np.argmin(losses))
    counts = errors / weight
    fewest = float(counts.min())
    good = counts <= fewest + _TOLERANCE * np.sqrt(fewest + 1.0)
    return int(np.argmin(np.where(good, losses, np.inf)))


def _entry(method: Method[Any], **outcome: Any) -> Tried:
    changed = {
        field.name: getattr(method, field.name)
        for field in dataclasses.fields(method)  # type: ignore[arg-type]
        if getattr(method, field.name) != field.default
    }
    return Tried(method.key, changed, **outcome)


def bytes_of(method: Method[Any], spec: Spec) -> int:
    """Bytes up and down that training takes for each client, found by training on a few rows of noise."""
    count = 4 * max(2, spec.outputs)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((count, spec.features))
    labels = (
        rng.standard_normal((count, spec.outputs)) if spec.classes is None else np.resize(spec.classes, count)
    )
    federation = LocalFederation.from_arrays(
        features,
        labels,
        np.zeros(count, dtype=np.intp),
        classes=None if spec.classes is None else spec.classes.tolist(),
        task="regression" if spec.classes is None else "classification",
    )
    federation.prefers = spec.prefers
    history = method.fit(federation).history
    return sum(record.bytes_up + record.bytes_down for record in history)


# -- the client's side ----------------------------------------------------------------------------


@step(ROWS)
def answer_rows(data: ClientData, request: Request, memory: Memory) -> Term:
    """How many rows there are."""
    return Term({"rows": np.zeros(1)}, {"rows": len(data)})


@step(COMPARISON)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """Of every model, on the rows it was not trained on: weight, mistakes and squared error, by stage."""
    known, classes = known_members(memory), opening_classes(memory.chain)
    term = Term()
    for name, one in request.note["models"].items():
        prefix = f"{name}."
        arrays = {k.removeprefix(prefix): a for k, a in request.arrays.items() if k.startswith(prefix)}
        model = model_from_contents(arrays, one["model"])
        rows = known.part(data, one["part"])
        term.arrays[f"{name}.marks"] = _marks(model, rows, classes)
        term.counts[f"{name}.rows"] = len(rows)
    return term


def _marks(model: Model, rows: ClientData, classes: Array | None) -> Array:
    stages: Callable[[Array], Array] = (
        model.staged_decision_function
        if isinstance(model, StagedModel)
        else lambda features: model.estimates(features)[None]
    )
    labels, weights = rows.own_labels(), rows.own_weights()
    codes = None if classes is None else encode_labels(labels, classes)
    count = model.layers + 1 if isinstance(model, StagedModel) else 1
    marks = np.zeros((3, count))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        span = slice(start, start + _ROWS_AT_ONCE)
        scores = stages(rows.features(span))
        counted = np.ones(scores.shape[1]) if weights is None else weights[span]
        if codes is None:
            targets = regression_targets(labels[span], model.outputs).astype(np.float64)
            wrong = np.zeros(scores.shape[:2])
        else:
            targets = np.eye(model.outputs)[codes[span]]
            wrong = np.argmax(scores, axis=2) != codes[span]
        marks[0] += counted.sum()
        marks[1] += wrong @ counted
        marks[2] += np.sum((scores - targets) ** 2, axis=2) @ counted
    return marks
