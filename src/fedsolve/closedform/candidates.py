"""What is tried on which rows: folds by the content of rows, candidates of a fitting size, and the best one.

Of classes, the fewest mistakes count first; candidates within half a standard error of the fewest count as
equals, and the one with the least squared error is taken. Of targets, the least squared error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.federation.engine import Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.method import Method
from fedsolve.federation.parts import Part

KEY = "choice"
"""The key of the marks: other than the one of rows that are held out from a whole run."""

FEW = 40
"""Rows below which nothing is tried: too few are left to tell candidates apart."""

MANY = 4_000
"""Rows from which on fewer candidates are tried, of a larger size."""

FOLDS = 5
ONE_FOLD = 2_000
"""Rows from which on one fold is held out; below, as many fifths in turn as have 800 rows together."""

HELD_OUT = 2_000
"""Rows that are held out at least, where that leaves enough to train on."""

LEAST_TRIAL, MOST_TRIAL, TRIAL_RATIO = 2_000, 12_000, 24
"""Rows that a trial takes where there are more: so many for each feature, within these bounds."""

_TOLERANCE = 0.5


@dataclass(frozen=True)
class Tried:
    """A candidate, and how it did on the rows held out.

    layers: of a candidate with layers, the best number; trained: how many it was tried with. errors: share of
    mistakes, None for targets. loss: mean squared error. rows: held out in all. left_out: why it was not
    tried.
    """

    method: str
    settings: Mapping[str, Any]
    layers: int | None = None
    errors: float | None = None
    loss: float | None = None
    rows: int = 0
    chosen: bool = False
    left_out: str = ""
    trained: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def entry(method: Method[Any], **outcome: Any) -> Tried:
    """The candidate with the settings that are not defaults, and its outcome."""
    changed = {
        field.name: getattr(method, field.name)
        for field in dataclasses.fields(method)  # type: ignore[arg-type]
        if getattr(method, field.name) != field.default
    }
    return Tried(method.key, changed, **outcome)


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
        count = min(FOLDS, math.ceil(2 * ONE_FOLD / max(rows, 1)))
        windows = [(1 / FOLDS, KEY, place / FOLDS) for place in range(count)]
        return [Fold(Part("training", *window), Part("held out", *window)) for window in windows]
    trial = min(MOST_TRIAL, max(LEAST_TRIAL, TRIAL_RATIO * features))
    taken = min(0.6, trial / rows)
    others = min(max(0.5 * taken, HELD_OUT / rows), 1 - taken)
    return [Fold(Part("held out", taken, KEY, others), Part("held out", others, KEY), taken)]


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


def method_of(note: Sequence[Any]) -> Method[Any]:
    """The method of a key and parameters."""
    from fedsolve import registry

    key, parameters = note
    made: Method[Any] = registry.method_class(key)(**parameters)
    return made


def bytes_of(method: Method[Any], spec: Spec) -> tuple[int, int]:
    """Bytes up and down that training takes for each client, found by training on a few rows of noise, and
    those of the model."""
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
    model = method.fit(federation)
    travelled = sum(record.bytes_up + record.bytes_down for record in model.history)
    return travelled, sum(array.nbytes for array in model.contents()[0].values())
