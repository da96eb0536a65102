"""How many rows of a cohort lie in which cells and set which columns: counts that all sites see.

Before the first question of a run, secure sums in two stages, or four, each shown to all sites:

    cells    min(own, fewest_rows) rows of each cell that no total was about yet: they decide who takes part
    columns  of the rows that were just taken in: rows in which a column, or a target, has another value than
             in most; of all rows and of each fold. A site with one row or two adds nothing that shows.
             Where every site finds that its own rows hide each other, that is all
    pairs    rows in which two indicators, classes among them, are set together, as products would tell
    crowded  columns that sites need left out, so that no row has more than a third of a combination

All sites see the same sums and draw the same conclusions. Each stage that was shown enters the history of
their accounts, and the history enters the keys of all masks after it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import canonical_json
from fedsolve.errors import TermError, explained
from fedsolve.federation.folds import FOLDS, mixed_words
from fedsolve.federation.messages import Term
from fedsolve.labels import labels_from_note
from fedsolve.privacy.ring import Field, Layout

DIVISIONS = (1, 2, FOLDS)
"""Of how many folds the rows of a class may be: the most that they carry."""

STARTS = {count: sum(DIVISIONS[:place]) for place, count in enumerate(DIVISIONS)}
"""Where the cells of so many folds begin, among the numbers of a class."""

LEVERAGE = 1 / 3
"""Share that a row may have, at most, of a combination of indicator columns."""

EPSILON_MOST = 8.0
"""Epsilon beyond which noise hides no row."""

_ALONE = 3  # rows of a site from which on they are told beside those of others: one row shows in no count
_SALT = np.uint64(172)  # with which the coins of 0 and 1, and of 1 and 2, fall differently


@dataclass(frozen=True)
class Limits:
    """What the disclosure rules ask for.

    fewest_rows:    of the cohort in every cell, and with a column set or unset; below 2 no rule holds.
    colluders:      sites that may take their own rows off a cell.
    rows_per_width: rows for each column of weights in a product; below 20 a site warns.
    told:           numbers told, at most, for each number held.
    epsilon:        that all noisy answers about a row cost together, at most; noise lifts the other rules.
    """

    fewest_rows: int = 10
    colluders: int = 1
    rows_per_width: float = 2.0
    told: float = 0.5
    epsilon: float = EPSILON_MOST

    @property
    def off(self) -> bool:
        return self.fewest_rows <= 1


OFF = Limits(fewest_rows=1, colluders=0, rows_per_width=0.0, told=math.inf, epsilon=math.inf)
"""No rule at all."""


@dataclass(frozen=True)
class CensusStage:
    """One sum of a census: its name, run, earlier history, classes and limits.

    columns: indicators that pairs are counted of. labels: several a row, indicators too, after the features;
    then targets, where there are no classes.
    """

    name: str
    run: str
    history: str
    limits: Limits
    classes: Any = None
    columns: tuple[int, ...] = ()
    labels: int = 0

    def note(self) -> dict[str, Any]:
        limits = [self.limits.fewest_rows, self.limits.colluders, self.limits.rows_per_width]
        own = {name: value for name, value in vars(self).items() if name != "labels" or value}
        return {**own, "limits": limits, "columns": list(self.columns)}

    @classmethod
    def from_note(cls, note: Mapping[str, Any], run: str) -> CensusStage:
        """The stage that a request asks for in this run; anything else is refused."""
        with explained("the request for a census is damaged", error=TermError):
            limits, columns = Limits(*note["limits"]), tuple(int(place) for place in note["columns"])
            stage = cls(**{**note, "limits": limits, "columns": columns})
            labels_from_note(stage.classes)
        if stage.name not in ("cells", "columns", "pairs", "crowded"):
            raise TermError(f"a census has no stage {ascii(stage.name)[:40]}.")
        if stage.run != run:
            raise TermError("what is asked for is not the census of this run.")
        return stage

    def layout(self, features: int, outputs: int) -> Layout:
        """The layout of the sum."""
        features += self.labels
        targets = outputs if self.classes is None and not self.labels else 0
        labels = labels_from_note(self.classes)
        classes = 1 if labels is None else len(labels)
        pairs = len(self.columns) + classes
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "cells": {"cells": (classes, sum(DIVISIONS)), "fresh": (classes,)},
            "columns": {"columns": (8, 1 + FOLDS, features + targets), "numbers": (features + targets,)},
            "pairs": {"pairs": (1 + FOLDS, pairs, pairs)},
            "crowded": {"crowded": (2, features)},
        }
        fields = tuple(Field(name, shape) for name, shape in shapes[self.name].items())
        return Layout(fields, ("rows", "singled", "sites") if self.name == "columns" else ())

    def shown(self, total: Term) -> tuple[str, CensusStage | None]:
        """The history of accounts that this stage, with this total, was shown to; and what is counted next,
        None at the end."""
        arrays, name, columns = total.arrays, "", self.columns
        counts = {each: np.rint(array).astype(np.int64).tolist() for each, array in arrays.items()}
        told = canonical_json([self.note(), counts, {each: int(n) for each, n in total.counts.items()}])
        history = hashlib.sha256(told.encode()).hexdigest()[:32]
        if self.name == "cells":
            name = "columns" if np.any(arrays["cells"][:, 0] >= self.limits.fewest_rows) else ""
        elif self.name == "columns":
            numbers = arrays["numbers"]
            set_somewhere = arrays["columns"][6, 0, : len(numbers)] > 0
            columns = tuple(np.flatnonzero(set_somewhere & (numbers == 0)).tolist())
            several = len(columns) > (self.classes is None)
            name = "pairs" if several and total.counts["singled"] and not self.limits.off else ""
        elif self.name == "pairs":
            name = "crowded"
        if not name:
            return history, None
        return history, CensusStage(name, self.run, history, self.limits, self.classes, columns, self.labels)


def column_counts(values: Array, folds: Array, cap: int) -> Array:
    """(8, 4, columns) rows in which a column differs from the value that most of a site's rows have, and rows
    on either side of a coin that its value throws: `cap` at most, and 0 below three; then as they are; then
    rows that differ from 0, and from 1. Each of all rows, and by fold of three. NaN is no value.
    """
    bits = (np.asarray(values, dtype=np.float64) + 0.0).view(np.uint64)  # -0.0 counts as 0.0
    there, coin = ~np.isnan(values), mixed_words(bits ^ _SALT) >> np.uint64(63) == 1
    found = np.zeros((5, 1 + FOLDS, values.shape[1]))
    for place in range(1 + FOLDS):
        rows = slice(None) if place == 0 else folds == place - 1
        here, side, known = values[rows], coin[rows], there[rows]
        marks = (known & side, known & ~side, known & (here != 0), known & (here != 1))
        found[1:, place] = [mark.sum(axis=0) for mark in marks]
        if not len(here):
            continue
        # Rows that differ, at least, from whatever value a column has. One that more than half of them have
        # is their median; others are on fewer places of the ordered rows.
        several, ordered = known.sum(axis=0), np.sort(np.ascontiguousarray(here.T), axis=1)  # NaN comes last
        middle = ordered[np.arange(len(ordered)), np.minimum(several // 2, len(here) - 1)]
        other = several - (here == middle).sum(axis=0)
        most, length = np.maximum(several // 2, 1), 2
        while length <= len(here) // 2 and (most >= length).any():  # where no value comes so often
            often = (ordered[:, : 1 - length] == ordered[:, length - 1 :]).any(axis=1)
            most, length = np.where(often, most, np.minimum(most, length - 1)), length + 1 + length // 4
        found[0, place] = np.where(2 * other < several, other, several - np.minimum(most, several))
    capped = np.where(found[:3] >= min(_ALONE, cap), np.minimum(found[:3], cap), 0)
    return np.concatenate([capped, found])


def few_columns(columns: Array, limits: Limits, sites: int) -> Array:
    """(2, columns) columns that have one value in all but few rows: of all rows; of a fold. sites: with rows.

    Whatever that value is, the rows that differ from a site's commonest one differ from it, or from one that
    is as common there; and so do all rows for which the coin falls otherwise. A column of 0, or of 1, is told
    as it is.
    """
    capped, whole = columns[:3], columns[3:6]
    fewest, colluders = limits.fewest_rows, min(limits.colluders, sites - 1)
    alone = fewest + colluders * (min(_ALONE, fewest) - 1)
    many = (capped >= fewest * (1 + colluders)) | ((capped == 0) & (whole >= alone))
    few = ~(many[0] | (many[1] & many[2]) | (columns[6] == 0) | (columns[7] == 0))
    return np.stack([few[0], few.any(axis=0)])


def singled_out(design: Array, pairs: Array | None = None) -> tuple[float, Array]:
    """The largest leverage of these rows, and the weights (columns,) of the combination that has it.

    pairs: of all rows that these are among; of these alone when None.

    The share of row x in the best combination of indicators is its leverage x' P⁻ x, P being the pair counts.
    """
    pairs = design.T @ design if pairs is None else pairs
    weights = design @ np.linalg.pinv(pairs, rcond=1e-9, hermitian=True)
    leverage = np.sum(weights * design, axis=1)
    worst = int(np.argmax(leverage))
    return float(leverage[worst]) - 1e-9, np.abs(weights[worst])


def crowded(design: Array, pairs: Array, free: int) -> Array:
    """(free,) which of the first columns are to be left out so that none of these rows has more than a third
    of a combination; the others, such as classes, stay.

    pairs: of all rows, these among them. Fewer columns never raise a leverage, so that sites may leave out
    each what it needs; and more rows never do, so that a site whose own rows suffice needs nothing.
    """
    out = np.zeros(design.shape[1], dtype=bool)
    while len(design) and not out[:free].all():
        kept = np.flatnonzero(~out)
        most, share = singled_out(design[:, kept], pairs[np.ix_(kept, kept)])
        if most <= LEVERAGE:
            break
        share = share[kept < free]
        out[kept[np.flatnonzero(share >= share.max() * (1 - 1e-6))[-1]]] = True
    return out[:free]
