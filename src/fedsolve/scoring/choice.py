"""The choice of a method or of its settings: candidates are tried on rows held out, and the best one wins.

    trials       every candidate on all rows but a fold, for every fold, in lockstep       of the longest
    comparison   mistakes and squared errors on the folds held out: of candidates with     1 exchange each
                 layers after some of them (`candidates`), and of all at the end

Folds are chosen by the content of rows, so that the choice is the same however rows are divided among
clients. Of many rows a trial takes some, and a candidate that can be made smaller is tried in that proportion
(`scaled`). Preparation by a schema is by all rows: means and deviations know of the rows held out, labels of
them do not enter. The models of the best candidate, each with its fold, are what a calibration needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.federation.folds import FOLDS, Part
from fedsolve.federation.messages import Request, Total
from fedsolve.federation.method import SCORES, Method, Run
from fedsolve.federation.participant import TOGETHER
from fedsolve.federation.recipe import Stage, StagedRun, Tried
from fedsolve.model import model_from_contents
from fedsolve.scoring.calibrating import CALIBRATION, room
from fedsolve.scoring.candidates import (
    FEW,
    RUNGS,
    Bill,
    CandidateMarks,
    cost_of,
    entry,
    folds_for,
    layers_of,
    rungs_of,
)
from fedsolve.scoring.evaluation import models_question
from fedsolve.scoring.lockstep import COMPARISON, alike, joined, share_of

_MEGABYTES = 8e-6
"""Of a number."""
_MUCH = "would tell too much of what the rows hold"


class ChoiceRun(Run[Any]):
    """Trials with their comparisons: see the module.

    A member is called by the numbers of its candidate and of its fold: "3-0". members: those that are trained
    further; models: of those that are not. numbers: of the candidate and the fold of every member.
    """

    def __init__(
        self, method: Method[Any], spec: Spec, rows: int, tried: Sequence[Method[Any]], left: Sequence[Tried]
    ) -> None:
        super().__init__(method, spec)
        self.folds = folds_for(rows, spec.features)
        self._tried, self._left_out = tried, left
        self._layers = [layers_of(method, candidate) for candidate in self._tried]
        self._rungs = [rungs_of(layers) for layers in self._layers]  # comparisons before the last one
        self._together = len(self._tried) * len(self.folds)  # answers of each client in one exchange, at most
        self.members: dict[str, Run[Any]] = {}
        self._numbers: dict[str, tuple[int, int]] = {}
        for number, candidate in enumerate(self._tried):
            for place, fold in enumerate(self.folds):
                run = candidate.scaled(fold.taken).start(spec)
                run.agree(fold.training.note())
                run.member = f"{number}-{place}"
                self.members[run.member] = run
                self._numbers[run.member] = number, place
        self._models: dict[str, Any] = {}
        self._scores: dict[str, list[Any] | None] = {}
        self._rung = 0
        self._marks = CandidateMarks(
            spec.classes is not None,
            kinds={number: candidate.key for number, candidate in enumerate(self._tried)},
            costs={number: cost_of(candidate, spec, rows) for number, candidate in enumerate(self._tried)},
        )
        self._compared: list[str] = []
        self._failed: dict[str, str] = {}
        self._open: dict[str, str] = {}
        self.chosen: Method[Any] | None = None
        self.tried: tuple[Tried, ...] = ()

    @property
    def exchanges(self) -> int:
        longest = max((run.exchanges for run in self.members.values()), default=0)
        return len(self.history) if self.chosen is not None else 1 + longest + max(self._rungs)

    @property
    def expected(self) -> int:
        longest = max((run.expected for run in self.members.values()), default=0)
        return len(self.history) if self.chosen is not None else 1 + longest + max(self._rungs)

    # -- the exchanges -----------------------------------------------------------------------------

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self.chosen is not None:
            return None
        if self._at_a_rung():
            return self._comparison(clients)
        asked = ((name, run, run.request(clients)) for name, run in self.members.items())
        open_ = {name: (run, request) for name, run, request in asked if request is not None}
        self._open = alike(open_)
        if not open_:
            return self._comparison(clients)
        first = {name: one for name, one in open_.items() if self._open[name] == name}
        return joined(self, first, clients, self._together)

    def absorb(self, total: Total) -> None:
        if self._asked.kind == COMPARISON:
            for number in sorted({self._numbers[name][0] for name in self._compared}):
                names = [f"{number}-{place}" for place in range(len(self.folds))]
                whole = np.sum([total[f"{name}.marks"] for name in names], axis=0)
                self._marks.of[number] = whole if getattr(self.method, "any_layers", False) else whole[:, -1:]
                self._marks.rows = sum(share_of(total, name).count("rows") for name in names)
                if not np.any(whole[0] > 0):
                    raise DataError(
                        "no row that counts was held out; name a method and its settings instead."
                    )
            running = set(self._under_way())
            going_on = self._marks.going_on(running, self._rung) if self._at_a_rung() else []
            for name in (name for name in self._compared if self._numbers[name][0] not in going_on):
                run = self.members.pop(name)  # trained no further; its model stays
                self._models[name] = run.model()
                self._scores[name] = run.history[-1].metrics.get(SCORES) if run.history else None
            self._rung += 1
            kind = "rung" if self.members else "comparison"
        else:
            self._train(total)
            kind = "trials"
        if not self.members:
            self._decide()
        tried = {"tried": [one.as_dict() for one in self.tried]} if self.chosen else {}
        self.record(total, kind, metrics=tried)

    def _train(self, total: Total) -> None:
        """Give every member its share; try those no further that cannot be trained on these rows."""
        problem: DataError | None = None
        for name, first in self._open.items():
            share, run = share_of(total, first), self.members[name]
            try:
                run.absorb(share)
            except DataError as failed:
                problem = failed
                self._failed[str(self._numbers[name][0])] = str(failed)
        self.members = {
            n: run for n, run in self.members.items() if str(self._numbers[n][0]) not in self._failed
        }
        if problem is not None and not self.members and not self._marks.of:
            raise problem

    # -- comparisons -------------------------------------------------------------------------------

    def _under_way(self) -> set[int]:
        """The candidates with layers that are trained further."""
        return {self._numbers[name][0] for name in self.members if self._layers[self._numbers[name][0]]}

    def _at_a_rung(self) -> bool:
        """Whether members with layers have so many that they are compared, and more to come."""
        numbers = self._under_way()
        more = any(self._rung < self._rungs[number] for number in numbers)
        layered = [run for name, run in self.members.items() if self._numbers[name][0] in numbers]
        return more and all(run.depth > RUNGS[self._rung][0] for run in layered)

    def _comparison(self, clients: tuple[str, ...]) -> Request:
        """Asks for marks: at a rung of all that have layers or are complete, at the end of all."""
        layered = self._under_way()
        training = {
            self._numbers[name][0]
            for name, run in self.members.items()
            if self._numbers[name][0] not in layered and run.request(clients)
        }
        self._compared = [name for name in self.members if self._numbers[name][0] not in training]
        models = {
            name: (self.members[name].model(), self.folds[self._numbers[name][1]].held_out)
            for name in self._compared
        }
        note, arrays = models_question(models)
        return self.ask(COMPARISON, self._rung, clients, {**note, TOGETHER: self._together}, arrays)

    def _decide(self) -> None:
        """The best candidate with its best number of layers; enters all of them into the table."""
        best, stage = self._marks.best()
        trials = []
        for number, method in enumerate(self._tried):
            if number not in self._marks.of:
                trials.append(entry(method, left_out=self._failed[str(number)]))
                continue
            its = stage if number == best else self._marks.best([number])[1]
            weight, mistakes, loss = self._marks.of[number][:, its]
            staged = self._layers[number]
            exchanges, numbers = self._marks.costs[number]
            trials.append(
                entry(
                    method,
                    layers=its if staged else None,
                    errors=None if self.spec.classes is None else float(mistakes / weight),
                    loss=float(loss / weight),
                    rows=self._marks.rows,
                    chosen=number == best,
                    trained=self._marks.of[number].shape[1] - 1 if staged else None,
                    exchanges=exchanges,
                    numbers=numbers,
                )
            )
        self.tried = (*trials, *self._left_out)
        winner = self._tried[best]
        self.chosen = replace(winner, layers=stage) if self._layers[best] else winner  # type: ignore[type-var]
        self._models = {name: model for name, model in self._models.items() if self._numbers[name][0] == best}

    # -- saving and resuming -----------------------------------------------------------------------

    def stored(self) -> dict[str, Any]:
        return {
            "marks": {str(number): marks for number, marks in self._marks.of.items()},
            "runs": {name: run.parts() for name, run in self.members.items()},
            "models": {name: model.contents() for name, model in self._models.items()},
            "rung": self._rung,
            "rows": self._marks.rows,
            "failed": self._failed,
            "scores": self._scores,
        }

    def take_stored(self, kept: dict[str, Any]) -> None:
        self._rung, self._marks.rows, self._failed = kept["rung"], kept["rows"], kept["failed"]
        self._marks.of = {int(number): marks for number, marks in kept["marks"].items()}
        self.members = {name: run for name, run in self.members.items() if name in kept["runs"]}
        for name, run in self.members.items():
            run.take_parts(kept["runs"][name], "of a candidate")
        self._models = {name: model_from_contents(*parts) for name, parts in kept["models"].items()}
        self._scores = kept["scores"]
        if not self.members:
            self._decide()


# -- the stage -------------------------------------------------------------------------------------


def _affordable(whole: StagedRun[Any], clients: int) -> tuple[list[Method[Any]], list[Tried], Bill]:
    """Those whose trials and training fit the budget, in order, all counted together; those that are left
    out, with why; and what it takes.

    None are tried where sums are secure and trials would tell too much: the first is trained then.
    """
    method, spec, rows = whole.recipe.method, whole.spec, whole.rows
    limit = getattr(method, "max_exchanges", None)
    # Without a budget, in megabytes: 256, and 200 times as many as the rows have.
    most = getattr(method, "budget", None) or 256.0 + 200 * 8e-6 * rows * spec.features
    folds = folds_for(rows, spec.features)
    most_told = math.inf if whole.recipe.told is None else room(whole)
    calibrates = whole.recipe.calibrate
    before = sum(record.stage == "preparation" for record in whole.history)
    besides = before + (CALIBRATION.expected(whole) if calibrates else 0)
    bill = Bill(spec, rows, len(folds), 2 if calibrates and folds[0].taken < 1.0 else 1, besides)
    taken: list[Method[Any]] = []
    left: list[Tried] = []
    for candidate in method.candidates(spec, rows):
        larger = bill.adding(candidate, candidate.scaled(folds[0].taken), layers_of(method, candidate))
        cost = _MEGABYTES * clients * (larger.told + larger.received)
        why = ""
        if limit is not None and larger.exchanges > limit:
            why = f"takes {larger.exchanges} exchanges in all"
        elif cost > most:
            why = f"takes {cost:.3g} MB with those before it"
        elif larger.told > most_told:
            why = f"{_MUCH}, with those before it"
        if why:
            left.append(entry(candidate, left_out=why))
        else:
            taken.append(candidate)
            bill = larger
    if not taken and most_told < math.inf:
        return [], left, bill
    if not taken:
        raise DataError(
            "the budget is too small for any candidate: "
            + "; ".join(dict.fromkeys(f"{trial.method} {trial.left_out}" for trial in left))
            + ". Raise max_exchanges or the budget, train one method by name, or leave out the calibration "
            "(--no-calibrate)."
        )
    return taken, left, bill


def _start(whole: StagedRun[Any]) -> ChoiceRun | None:
    method, rows = whole.recipe.method, whole.rows
    first, *others = method.candidates(whole.spec, rows)
    staged = layers_of(method, first)
    if rows < FEW or not (others or staged):
        why = f"{rows} rows are too few to try candidates" if rows < FEW else "it is the only candidate"
        whole.method, whole.tried = first, (entry(first, chosen=True, left_out=why),)
        return None
    clients = len(next(record.cohort for record in whole.history if record.stage == "preparation"))
    taken, left, bill = _affordable(whole, clients)
    if not taken or (len(taken) < 2 and not staged):
        why = "the limits leave no other candidate"
        if not taken:  # the first of those left out is trained all the same
            cost, *left = left
            told = _MUCH in cost.left_out
            why = f"{rows:,} rows are too few to be told about twice" if told else f"a trial {cost.left_out}"
        whole.method = taken[0] if taken else first
        whole.tried = (entry(whole.method, chosen=True, left_out=why), *left)
        return None
    run = ChoiceRun(method, whole.spec, rows, taken, left)
    whole.opened(run)
    up, down = (_MEGABYTES * clients * numbers for numbers in (bill.told, bill.received))
    trainings = [candidate.start(whole.spec).expected for candidate in taken]
    calibration = f"{CALIBRATION.expected(whole)} to calibrate, " if whole.recipe.calibrate else ""
    whole.outlook = (
        f"{len(taken)} candidates are compared in about {run.expected} exchanges, then {calibration}"
        f"{min(trainings)} to about {max(trainings)} to train the best"
        f"{f'; {len(left)} more exceed the limits' if left else ''}; in all about {up:.3g} MB up "
        f"and {down:.3g} MB down."
    )
    return run


def _end(whole: StagedRun[Any], run: ChoiceRun) -> None:
    assert run.chosen is not None
    whole.method, whole.tried = run.chosen, run.tried
    count = run.folds[0].held_out.count
    whole.held_out = Part(tuple(range(count // FOLDS)), count)
    if not whole.recipe.calibrate:
        return
    whole.scores = [run._scores[name] for name in run._models]
    # Models that were made smaller for many rows calibrate none of all rows.
    for name, model in run._models.items() if run.folds[0].taken == 1.0 else ():
        place = run._numbers[name][1]
        if hasattr(model, "shortened"):  # to as many layers as did best
            model = model.shortened(getattr(run.chosen, "layers", model.layers))
        whole.folded[str(place)] = whole.described(model), run.folds[place].held_out


def _expected(whole: StagedRun[Any]) -> int:
    """Before the rows are counted: as many exchanges as the longest candidate takes, and a comparison."""
    method = whole.recipe.method
    candidates = method.candidates(whole.spec, whole.rows)
    longest = max(candidate.start(whole.spec).expected for candidate in candidates)
    return 1 + longest + max(rungs_of(layers_of(method, candidate)) for candidate in candidates)


CHOICE = Stage("choice", _start, _end, _expected)
