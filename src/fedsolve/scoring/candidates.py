"""What is tried on which rows, and which candidate is the best: folds, sizes, marks and costs.

Of classes the fewest mistakes count, of targets the least squared error, and candidates within half a
standard error of the best count as equals. Among them wins the kind of method with the fewest exchanges, then
with the fewest numbers told; and of that kind the candidate with the least squared error.

Candidates with layers are compared after some of them (`RUNGS`), and the better ones go on: none that the
last layers did not improve, nor one that would stay behind the best of all if the layers to come gained as
much again as the last ones did. A candidate that is stopped can still be the best, with as many layers as it
did best with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.federation.engine import Spec
from fedsolve.federation.folds import FOLDS, Part
from fedsolve.federation.method import Method
from fedsolve.federation.recipe import Tried

FEW = 40
"""With fewer rows nothing is tried: too few are left to tell candidates apart."""

ONE_FOLD = 4_000
"""From so many rows on, one fold is held out; below that, each in turn."""

LEAST_TRIAL, MOST_TRIAL, TRIAL_RATIO = 2_000, 12_000, 24
"""Rows that a trial takes where there are more: so many for each feature, within these bounds."""

RUNGS: tuple[tuple[int, int], ...] = ((2, 3), (4, 2), (8, 1))
"""After so many layers so many candidates go on."""

_TOLERANCE = 0.5
_AGAIN = 2.0
_ERRORS = 2.0
_WORSE = 1.1


@dataclass(frozen=True)
class Fold:
    """A part to train on and one to compare on, which share no row.

    taken: the share of rows that a trial leaves out on purpose, beyond those held out, is one minus this.
    """

    training: Part
    held_out: Part
    taken: float = 1.0


def folds_for(rows: int, features: int) -> list[Fold]:
    """The folds that candidates are tried on, by the numbers of all rows and of features alone."""
    if rows < ONE_FOLD:
        return [Fold(Part((fold,)).rest, Part((fold,))) for fold in range(FOLDS)]
    wanted = min(0.6, min(MOST_TRIAL, max(LEAST_TRIAL, TRIAL_RATIO * features)) / rows)
    count = FOLDS
    while wanted * count < 2:
        count *= 2
    trained = max(1, round(wanted * count))
    held = min(count - trained, max(1, round(max(0.5 * wanted, LEAST_TRIAL / rows) * count)))
    training = Part(tuple(range(count - trained, count)), count)
    return [Fold(training, Part(tuple(range(held)), count), len(training.folds) / count)]


def entry(method: Method[Any], **outcome: Any) -> Tried:
    """The candidate with the settings that are not defaults, and its outcome."""
    changed = {
        field.name: getattr(method, field.name)
        for field in dataclasses.fields(method)  # type: ignore[arg-type]
        if getattr(method, field.name) != field.default
    }
    return Tried(method.key, changed, **outcome)


def layers_of(chooser: Method[Any], candidate: Method[Any]) -> int:
    """The layers of a candidate of which the number is to be chosen; 0 where it is not."""
    return int(getattr(candidate, "layers", 0)) if getattr(chooser, "any_layers", False) else 0


def rungs_of(layers: int) -> int:
    """How many comparisons come before the last one, for candidates of so many layers."""
    return sum(after < layers for after, _ in RUNGS)


@dataclass
class CandidateMarks:
    """Marks of candidates by number (3, stages), summed over folds: weight, mistakes and squared error; of
    targets, the square of the squared error in place of mistakes.

    counts: whether mistakes count, which they do of classes. rows: how many were held out. kinds: the method
    of each candidate. costs: exchanges and numbers told of each.
    """

    counts: bool
    rows: int = 0
    of: dict[int, Array] = field(default_factory=dict)
    kinds: Mapping[int, str] = field(default_factory=dict)
    costs: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def best(self, among: Collection[int] | None = None) -> tuple[int, int]:
        """The best candidate and its best stage, of some candidates or of all."""
        numbers = sorted(self.of if among is None else among)
        marks = [self.of[number] for number in numbers]
        weights, errors, losses = np.concatenate(marks, axis=1)
        owners = np.repeat(numbers, [mark.shape[1] for mark in marks])
        if self.counts:
            mistakes = errors * self.rows / weights[0]
            good = mistakes <= mistakes.min() + _TOLERANCE * np.sqrt(mistakes.min() + 1.0)
        else:
            least = int(np.argmin(losses))
            noise = errors[least] - losses[least] ** 2 / weights[least]
            # Weights of whole numbers stand for rows that are there so often; shares of one do not.
            noise *= max(1.0, weights[least] / max(1, self.rows))
            good = losses <= losses[least] + _TOLERANCE * np.sqrt(max(0.0, noise))
        kinds = np.array([self.kinds.get(number, "") for number in owners.tolist()])

        costs: dict[str, tuple[int, int]] = {}  # the least of each kind
        for number, cost in self.costs.items():
            kind = self.kinds.get(number, "")
            costs[kind] = min(cost, costs.get(kind, cost))
        good &= kinds == min(sorted({*kinds[good].tolist()}), key=lambda kind: costs.get(kind, (0, 0)))
        best = int(np.argmin(np.where(good, losses, np.inf)))
        return int(owners[best]), int(best - np.flatnonzero(owners == owners[best])[0])

    def going_on(self, running: Collection[int], rung: int) -> list[int]:
        """Those of the candidates under way that are trained further after this rung."""
        most, before = RUNGS[rung][1], RUNGS[rung - 1][0] if rung else 0
        left, ahead = set(running), list[int]()
        while left and len(ahead) < most:
            ahead.append(self.best(left)[0])
            left.discard(ahead[-1])
        return sorted(
            number for number in ahead if self.best([number])[1] > before and not self._lost(number, before)
        )

    def _lost(self, number: int, before: int) -> bool:
        """Whether a candidate stays behind the best of all, even if it gains as much again."""
        row = 1 if self.counts else 2
        unit = float(self.of[number][0, 0]) / self.rows
        own = self.of[number][row] / unit
        now, earlier = float(own.min()), float(own[: before + 1].min())
        hoped = now - _AGAIN * max(0.0, earlier - now)
        best = min(float(marks[row].min()) for marks in self.of.values()) / unit
        return hoped > (best + _ERRORS * np.sqrt(best + 1.0) if self.counts else _WORSE * best)


@dataclass(frozen=True)
class Bill:
    """What trying candidates, calibrating and training take, as far as can be told.

    trainings: how often the chosen one is trained after the trials; besides: exchanges other than those of
    trials and trainings. up, down: numbers of each client for all trials; last: (exchanges, up, down) of the
    dearest candidate's training. rungs: comparisons on the way. told, received: numbers that a client tells
    in all, its sums, and that it is sent.
    """

    spec: Spec
    rows: int
    folds: int
    trainings: int
    besides: int
    up: int = 0
    down: int = 0
    last: tuple[int, int, int] = (0, 0, 0)
    rungs: int = 0
    told: int = 0
    received: int = 0

    def adding(self, method: Method[Any], trial: Method[Any], layers: int) -> Bill:
        """The bill with one candidate more, and the smaller one by which it is tried.

        layers: those of which the number is to be chosen.
        """
        if rungs_of(layers) and layers > RUNGS[1][0]:
            trial = dataclasses.replace(trial, layers=RUNGS[1][0])  # type: ignore[type-var]
        (up, down), run = trial.traffic(self.spec, self.rows), method.start(self.spec)
        exchanges, sent, received = self.last
        more = method.traffic(self.spec, self.rows)
        last = (max(exchanges, run.exchanges), max(sent, more[0]), max(received, more[1]))
        up = self.up + self.folds * up
        down = self.down + 2 * self.folds * down  # a model is sent once more, to be compared
        sums = sums_of_rows(self.spec)
        return dataclasses.replace(
            self,
            up=up,
            down=down,
            told=self.folds * sums + up + self.trainings * (sums + last[1]),
            received=down + self.trainings * last[2],
            last=last,
            rungs=max(self.rungs, rungs_of(layers)),
        )

    @property
    def exchanges(self) -> int:
        """At most."""
        return 1 + self.rungs + self.besides + (1 + self.trainings) * self.last[0]


def sums_of_rows(spec: Spec) -> int:
    """How many numbers AFL's sums have, which all closed forms begin with."""
    return spec.features * (spec.features + 7) // 2 + (spec.features + 3) * spec.outputs


def cost_of(method: Method[Any], spec: Spec, rows: int) -> tuple[int, int]:
    """Exchanges and numbers told that a training is likely to take."""
    return method.start(spec).expected, sums_of_rows(spec) + method.traffic(spec, rows)[0]
