"""A run that tries candidates on rows held out, and then trains the best of them on all rows.

    rows         how many there are, which decides folds and sizes                         1 exchange
    trials       every candidate on all rows but a fold, for every fold, in lockstep       of the longest
    comparison   mistakes and squared errors on the folds held out: of candidates with     1 exchange each
                 layers after some of them (`race`), and of all at the end
    refit        the best one on all rows                                                  its own

Folds are chosen by the content of rows (`fedsolve.held_out`), so that the choice is the same however rows are
divided among clients. Of many rows a trial takes some, and a candidate that can be made smaller is tried in
that proportion (`scaled`): as many rows for each of its features, as strong penalties beside them. One with a
classifier after every layer is compared after each, which chooses the number of layers in the same exchange.
Preparation by a schema is by all rows: means and deviations know of the rows held out, labels of
them do not enter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from fedsolve.checks import check_rows
from fedsolve.closedform import comparison
from fedsolve.closedform.candidates import (
    FEW,
    MANY,
    Fold,
    Tried,
    bytes_of,
    entry,
    folds_for,
    method_of,
    scaled,
)
from fedsolve.closedform.lockstep import Lockstep, share_of
from fedsolve.closedform.race import RUNGS, Marks, rungs_of
from fedsolve.container import Array, with_prefix
from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Request, Term, Total
from fedsolve.federation.method import Method, Run
from fedsolve.federation.participant import TOGETHER, ClientData, Memory, step
from fedsolve.model import Model

ROWS = "choosing-rows"

M = TypeVar("M", bound=Model)


class Chooses(Protocol):
    """What a method that chooses has: its candidates, and how much trying and training may cost."""

    max_exchanges: int | None
    max_bytes: int | None
    any_layers: bool
    """Whether a candidate may stop at any of its layers."""

    def candidates(self, spec: Spec, rows: int) -> Sequence[Method[Any]]: ...


class ChoosingRun(Run[M]):
    """Rows, trials with their comparisons, refit: see the module.

    A member of the lockstep is called by the numbers of its candidate and of its fold: "3-0".
    """

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
        self._rung = 0
        self._marks = Marks(spec.classes is not None)
        self._compared: list[str] = []
        self._failed: dict[str, str] = {}
        self._trials: list[Tried] = []

    # -- the exchanges -----------------------------------------------------------------------------

    @property
    def exchanges(self) -> int:
        if self._phase == "rows":
            candidates = self._chooses.candidates(self.spec, MANY)
            longest = max(method.start(self.spec).exchanges for method in candidates)
            return 2 + 2 * longest + self._rungs(candidates)
        assert self._steps is not None
        if self._phase == "refit":
            done = sum(record.kind != "refit" for record in self.history)
            return done + self._steps.exchanges
        return 2 + 2 * self._steps.exchanges + self._rungs(self._tried)

    def request(self, clients: tuple[str, ...]) -> Request | None:
        self._clients = len(clients)
        if self._phase == "rows":
            return self.ask(ROWS, 0, clients)
        assert self._steps is not None
        if self._phase == "trials" and self._at_a_rung():
            self._phase = "rung"
        if self._phase in ("trials", "refit"):
            request = self._steps.request(clients)
            if request is not None or self._phase == "refit":
                return request
            self._phase = "comparison"
        return self._comparison(clients)

    def absorb(self, total: Total) -> None:
        if self._phase == "rows":
            self._rows = total.count("rows")
            check_rows(self._rows)
            self._open_trials(total.cohort)
            self.record(total, "rows")
        elif self._phase in ("rung", "comparison"):
            self._take_marks(total)
            if self._phase == "rung" and self._go_on():
                self.record(total, "rung")
                return
            self._refit(self._decide())
            self.record(total, metrics={"tried": [trial.as_dict() for trial in self._trials]})
        else:
            assert self._steps is not None
            self._leave_out(self._steps.absorb(total))
            self.record(total, "trials" if self._phase == "trials" else "refit")
            if not self._steps.members:
                self._refit(self._decide())

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
        self._refit(method_of(choice["refit"]))

    # -- trials ------------------------------------------------------------------------------------

    def _open_trials(self, cohort: tuple[str, ...]) -> None:
        self._clients = len(cohort)
        self._take_candidates()
        alone = len(self._tried) == 1 and not self._staged(self._tried[0])
        if self._rows < FEW or alone:
            first = self._tried[0]
            why = f"{self._rows} rows are too few to try candidates" if self._rows < FEW else ""
            self._trials = [entry(first, chosen=True, left_out=why), *self._left_out]
            self._refit(first)
            return
        self._steps = Lockstep(self, self._members(), self._together)
        self._phase = "trials"

    def _take_candidates(self) -> None:
        """Candidates and folds, which follow from the rows."""
        self._folds = folds_for(self._rows, self.spec.features)
        candidates = list(self._chooses.candidates(self.spec, self._rows))
        self._tried, self._left_out = self._affordable(candidates)

    @property
    def _together(self) -> int:
        """How many candidates and folds each client answers for in one exchange; 1 where nothing is tried."""
        return max(1, len(self._tried) * len(self._folds))

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
            rungs = self._rungs([*taken, method])
            needed = 2 + rungs + self._besides + (1 + self._trainings) * max(longest, exchanges)
            if limit is not None and needed > limit:
                left.append(entry(method, left_out=f"takes {needed} exchanges in all"))
                continue
            price, compared = (0, 0) if most is None else bytes_of(method, self.spec)
            trial = self._clients * len(self._folds) * (price + (1 + self._rungs([method])) * compared)
            price *= self._clients
            cost = spent + trial + self._trainings * max(dearest, price)
            if most is not None and cost > most:
                left.append(entry(method, left_out=f"takes {cost:,} bytes with those before it"))
                continue
            taken.append(method)
            longest, dearest = max(longest, exchanges), max(dearest, price)
            spent += trial
        if not taken:
            raise DataError(
                "the budget is too small for any candidate: "
                + "; ".join(dict.fromkeys(f"{trial.method} {trial.left_out}" for trial in left))
                + ". Raise max_exchanges or max_bytes, or train one method by name"
                + (", or leave out the calibration (--no-calibrate)." if self._besides else ".")
            )
        return taken, left

    def _leave_out(self, failed: Mapping[str, DataError]) -> None:
        """Try those no further that cannot be trained on these rows; somebody must be left."""
        assert self._steps is not None
        for name, problem in failed.items():
            if self._phase == "refit":
                raise problem
            self._failed[str(_number(name))] = str(problem)
            for other in [each for each in self._steps.members if _number(each) == _number(name)]:
                del self._steps.members[other]
        if failed and not self._steps.members and not self._marks.of:
            raise next(iter(failed.values()))

    def _staged(self, method: Method[Any]) -> bool:
        """Whether a candidate has layers of which the number is to be chosen."""
        return self._chooses.any_layers and bool(getattr(method, "layers", 0))

    def _rungs(self, methods: Sequence[Method[Any]]) -> int:
        """How many comparisons these candidates take before the last one."""
        return max((rungs_of(m.layers) for m in methods if self._staged(m)), default=0)  # type: ignore[attr-defined]

    # -- comparisons -------------------------------------------------------------------------------

    def _under_way(self) -> dict[str, Run[Any]]:
        """The members with layers that are trained further."""
        assert self._steps is not None
        members = self._steps.members.items()
        return {name: run for name, run in members if self._staged(self._tried[_number(name)])}

    def _at_a_rung(self) -> bool:
        """Whether members with layers have so many that they are compared, and more to come."""
        runs = self._under_way()
        methods = [self._tried[_number(name)] for name in runs]
        return self._rung < self._rungs(methods) and all(
            run.stages > RUNGS[self._rung][0] for run in runs.values()
        )

    def _comparison(self, clients: tuple[str, ...]) -> Request:
        """Asks for marks: at a rung of all that have layers or are complete, at the end of all."""
        assert self._steps is not None
        layered, members = self._under_way(), self._steps.members
        training = {
            _number(name) for name in members.keys() - layered.keys() if members[name].request(clients)
        }
        self._compared = [name for name in members if _number(name) not in training]
        models = {
            name: (members[name].model(), self._folds[_place(name)].held_out) for name in self._compared
        }
        note, arrays = comparison.question(models)
        return self.ask(comparison.KIND, self._rung, clients, {**note, TOGETHER: self._together}, arrays)

    def _take_marks(self, total: Total) -> None:
        numbers = sorted({_number(name) for name in self._compared})
        for number in numbers:
            names = [f"{number}-{place}" for place in range(len(self._folds))]
            whole = np.sum([total[f"{name}.marks"] for name in names], axis=0)
            self._marks.of[number] = whole if self._chooses.any_layers else whole[:, -1:]
            self._marks.rows = sum(share_of(total, name).count("rows") for name in names)
            if not np.any(whole[0] > 0):
                raise DataError("no row that counts was held out; name a method and its settings instead.")

    def _go_on(self) -> bool:
        """Keep the members that are trained further; whether there are any."""
        assert self._steps is not None
        running = {_number(name) for name in self._under_way()}
        kept = self._marks.going_on(running, self._rung)
        for name in self._compared:
            if _number(name) not in kept:
                del self._steps.members[name]
        self._rung += 1
        self._phase = "trials"
        return bool(self._steps.members)

    def _decide(self) -> Method[Any]:
        """The best candidate with its best number of layers; enters all of them into the table."""
        best, stage = self._marks.best()
        for number, method in enumerate(self._tried):
            if number not in self._marks.of:
                self._trials.append(entry(method, left_out=self._failed[str(number)]))
                continue
            its = stage if number == best else self._marks.best([number])[1]
            weight, mistakes, loss = self._marks.of[number][:, its]
            staged = self._staged(method)
            self._trials.append(
                entry(
                    method,
                    layers=its if staged else None,
                    errors=None if self.spec.classes is None else float(mistakes / weight),
                    loss=float(loss / weight),
                    rows=self._marks.rows,
                    chosen=number == best,
                    trained=self._marks.of[number].shape[1] - 1 if staged else None,
                )
            )
        self._trials += self._left_out
        chosen = self._tried[best]
        return dataclasses.replace(chosen, layers=stage) if self._staged(chosen) else chosen  # type: ignore[type-var]

    def _refit(self, method: Method[Any]) -> None:
        self._steps = Lockstep(self, {"refit": method.start(self.spec)}, self._together)
        self._phase = "refit"

    # -- saving and resuming -----------------------------------------------------------------------

    def stored(self) -> tuple[dict[str, Array], dict[str, Any]]:
        members = {} if self._steps is None else self._steps.members
        arrays = {
            f"member.{name}": np.frombuffer(run.to_bytes(), dtype=np.uint8) for name, run in members.items()
        }
        arrays |= {f"marks.{number}": marks for number, marks in self._marks.of.items()}
        race = {"rung": self._rung, "held_out": self._marks.rows, "failed": self._failed}
        return arrays, {"phase": self._phase, **race, **self._about_the_choice()}

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
        self._take_candidates()
        self._rung, self._marks.rows, self._failed = note["rung"], note["held_out"], dict(note["failed"])
        marks, members = with_prefix(arrays, "marks."), with_prefix(arrays, "member.")
        self._marks.of = {int(number): array for number, array in marks.items()}
        runs = self._members()
        if note["refit"] is not None:
            runs = {"refit": method_of(note["refit"]).start(self.spec)}
        for name, stored in members.items():
            runs[name].restore(stored.tobytes(), "of a candidate")
        self._steps = Lockstep(self, {name: runs[name] for name in members}, self._together)


def _number(member: str) -> int:
    return int(member.partition("-")[0])


def _place(member: str) -> int:
    return int(member.partition("-")[2])


# -- the client's side ----------------------------------------------------------------------------


@step(ROWS, over_rows=True)
def answer_rows(data: ClientData, request: Request, memory: Memory) -> Term:
    """How many rows there are."""
    return Term({"rows": np.zeros(1)}, {"rows": len(data)})
