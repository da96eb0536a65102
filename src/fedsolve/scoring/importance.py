"""How much a model relies on each column: its loss when the column is replaced by draws.

A value is drawn from the histogram of the column over all clients, a sum, by a hash of the row itself:
neither depends on how rows are divided among clients, as permuting within each of them would. Three
exchanges: sums for the scale of every column; its histogram, in steps of a power of two near an eighth of its
spread; the losses.

A column is all features that a schema makes of it, replaced together: a category by another, a missing value
by a number. Of a text, every hashed word is drawn by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation
from fedsolve.federation.folds import Part, row_hashes
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, Participant, step
from fedsolve.labels import Task
from fedsolve.model import Model
from fedsolve.scoring.evaluation import about, model_about
from fedsolve.scoring.quality import truth_of
from fedsolve.tables.preparation import mean_and_deviation
from fedsolve.tables.table_file import Table

MOST = 256
"""Columns of which the importance is measured unless they are named: each costs a prediction of all rows."""
STEPS = 64
"""Steps of a histogram to either side of a column's mean; values further out count as the last."""

_ROWS = 4096
_LEAST = np.finfo(np.float64).eps


@dataclass(frozen=True)
class Importance:
    """What replacing a column does: rise of the log loss, its standard error, and accuracy that is lost.

    Of a regression: rise of the squared error, its standard error, and rise of the absolute error.
    """

    column: str
    loss: float
    error: float
    accuracy: float


@dataclass(frozen=True)
class LabelsImportance(Importance):
    """Of several labels a row: means over the labels, and each label by its name."""

    labels: Mapping[str, Importance]


def feature_importances(
    federation: Federation,
    model: Model,
    part: Part | None = None,
    columns: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Importance]:
    """The columns by importance, the most important first; three exchanges.

    columns: which of them; all when None. Without a schema they are called "feature 0", "feature 1", ...
    """
    groups = column_groups(model)
    names = list(groups) if columns is None else list(columns)
    unknown = [name for name in names if name not in groups]
    if unknown:
        raise DataError(
            f"the model has no column called {unknown[0]!r}; it has {', '.join(list(groups)[:10])}."
        )
    if len(names) > MOST:
        raise DataError(
            f"the model has {len(names)} columns, each of which takes a prediction of all rows. Name up to "
            f"{MOST} of them: feature_importances(..., columns=[...]), or --column NAME."
        )

    def ask(kind: str, arrays: dict[str, Array], **note: Any) -> Any:
        request = about(kind, model, federation.clients, part, arrays, importance=note)
        return federation.exchange(request, Chain())

    reference, scale = _reference(model)
    count, first, second = ask("column-scales", {})["moments"]
    mean, deviation = mean_and_deviation(np.maximum(count, 1), first, second, 1e-12)
    # Middle and width of every histogram's steps: powers of two, so that rounding does not move them.
    unit = 2.0 ** (np.floor(np.log2(deviation * scale) + 1e-6) - 3)
    origin = np.rint((reference + mean * scale) / unit) * unit
    counts = np.rint(ask("column-histograms", {"origin": origin, "unit": unit})["counts"])
    told = ask("column-losses", {"origin": origin, "unit": unit, "counts": counts}, columns=names, seed=seed)
    rows = max(1, told.count("rows"))
    found = []
    for name, sums in zip(names, told["losses"], strict=True):
        rises, squares, lost = np.atleast_2d(sums).T / rows
        errors = np.sqrt(np.maximum(0.0, squares - rises**2) / rows)
        first, *labels = zip(rises.tolist(), errors.tolist(), lost.tolist(), strict=True)
        of_label = {label: Importance(name, *one) for label, one in zip(model.labels, labels, strict=True)}
        found.append(LabelsImportance(name, *first, of_label) if of_label else Importance(name, *first))
    return sorted(found, key=lambda one: -one.loss)


def column_groups(model: Model) -> dict[str, list[int]]:
    """The features of every column, by its name."""
    schema = model.schema
    if schema is None or not schema.columns:
        return {f"feature {place}": [place] for place in range(model.features)}
    groups, place = {}, 0
    for column in schema.used:
        groups[column.name] = list(range(place, place + len(column.names)))
        place += len(column.names)
    return groups


def _reference(model: Model) -> tuple[Array, Array]:
    """About which point and in which unit sums lose no digits: those of the model's preparation."""
    known = model.preparing
    return (np.zeros(model.features), np.ones(model.features)) if known is None else (known.mean, known.scale)


@step("column-scales")
def answer_scales(data: ClientData, request: Request, memory: Memory) -> Term:
    """n, sum z and sum z² of every feature, over the rows that have it."""
    reference, scale = _reference(model_about(request, memory))
    sums = np.zeros((3, data.width))
    for values in map(data.features, data.spans(_ROWS)):
        there = ~np.isnan(values)
        scaled = np.where(there, (values - reference) / scale, 0.0)
        sums += [there.sum(axis=0), scaled.sum(axis=0), (scaled**2).sum(axis=0)]
    return Term({"moments": sums}, {"rows": len(data)})


@step("column-histograms", counts=("counts",))
def answer_histograms(data: ClientData, request: Request, memory: Memory) -> Term:
    """Rows in every step of every feature, and those that lack it: (features, 2 STEPS + 2)."""
    origin, unit = (request.arrays[f"at.{name}"] for name in ("origin", "unit"))
    counts = np.zeros((data.width, 2 * STEPS + 2))
    for values in map(data.features, data.spans(_ROWS)):
        places = np.rint(np.clip((values - origin) / unit, -STEPS, STEPS)) + STEPS
        places = np.where(np.isnan(values), 2 * STEPS + 1, places).astype(np.int64)
        for number in range(data.width):
            counts[number] += np.bincount(places[:, number], minlength=2 * STEPS + 2)
    return Term({"counts": counts}, {"rows": len(data)})


@step("column-losses")
def answer_losses(data: ClientData, request: Request, memory: Memory) -> Term:
    """For every column: the sum over rows of the rise of the log loss, of its square, and of answers lost."""
    model, note = model_about(request, memory), request.note["importance"]
    groups, labels = column_groups(model), data.own_labels
    truth = truth_of(model, labels)
    asked = {name: request.arrays[f"at.{name}"] for name in ("origin", "unit", "counts")}
    several = (1 + len(model.labels),) if model.labels else ()
    sums = np.zeros((len(note["columns"]), *several, 3))
    for span in data.spans(_ROWS):
        values = data.features(span)
        before, right = _losses(model, values, truth[span], data.source.dtype)
        for place, name in enumerate(note["columns"]):
            hashes = row_hashes(values, labels[span], f"importance|{note['seed']}|{name}")
            changed = _replaced(model, values, groups[name], hashes, **asked)
            after, still = _losses(model, changed, truth[span], data.source.dtype)
            rise = after - before
            lost = right.sum(axis=0) - still.sum(axis=0)
            sums[place] += np.stack([rise.sum(axis=0), (rise**2).sum(axis=0), lost], axis=-1)
    return Term({"losses": sums}, {"rows": len(data)})


def _replaced(
    model: Model, values: Array, group: list[int], hashes: Array, origin: Array, unit: Array, counts: Array
) -> Array:
    """The rows with the features of one column drawn anew."""
    changed = values.copy()
    schema = model.schema
    names = () if schema is None else schema.names[group[0] : group[-1] + 1]
    columns = [] if schema is None else [c for c in schema.used if c.names == names]
    kind = columns[0].kind if columns else "number"
    flagged = bool(columns) and columns[0].missing == "flag"
    if kind == "category":
        # The rows of each category are those where its feature is 1: one step of its histogram.
        ones = np.rint((1.0 - origin[group]) / unit[group]).astype(np.int64) + STEPS
        shares = counts[group, np.clip(ones, 0, 2 * STEPS)]
        changed[:, group] = np.eye(len(group))[_drawn(shares, hashes)]
        return changed
    for offset, feature in enumerate(group):
        if flagged and offset == len(group) - 1:
            changed[:, feature] = np.isnan(changed[:, group[0]])
            continue
        # Words of a text share a row's hash; each takes bits of its own.
        turned = row_hashes(hashes.astype(np.float64)[:, None], key=offset) if offset else hashes
        places = _drawn(counts[feature], turned)
        drawn = origin[feature] + (places - STEPS) * unit[feature]
        changed[:, feature] = np.where(places == 2 * STEPS + 1, np.nan, drawn)
    return changed


def _drawn(counts: Array, hashes: Array) -> Array:
    """A place of the histogram for every row, by its hash, as often as the histogram has rows there."""
    ends = np.cumsum(counts)
    shares = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    places: Array = np.searchsorted(ends, shares * ends[-1], side="right")
    return np.minimum(places, len(counts) - 1)


def _losses(model: Model, values: Array, truth: Array, dtype: Any) -> tuple[Array, Array]:
    """Log loss of every row, and whether its answer is right; of a regression e² and -|e|.

    Of several labels a row (rows, 1 + labels): their mean, and each.
    """
    # As they are stored: a network reads bytes on another scale than numbers.
    values = values.astype(dtype, copy=False)
    if model.regression and model.judged is None:
        errors = truth - model.estimates(values)
        return (errors**2).sum(axis=1), -np.abs(errors).sum(axis=1)
    answers, probabilities = model.told(values)
    if model.labels:
        given = np.where(truth == 1, probabilities, 1.0 - probabilities)
        each = -np.log(np.maximum(given, _LEAST)), (answers == truth).astype(np.float64)
        losses, right = (np.column_stack([one.mean(axis=1), one]) for one in each)
        return losses, right
    given = np.take_along_axis(probabilities, truth[:, None], axis=1)[:, 0]
    return -np.log(np.maximum(given, _LEAST)), answers == truth


def importance_on(model: Model, data: Table, columns: Sequence[str]) -> list[Importance]:
    """What these rows lose without each column, or without those that are named."""
    rows = ClientData(
        data.features, data.labels, schema=model.schema if model.preparing is not None else None
    )
    classes = None if model.classes is None else model.classes.tolist()
    task: Task = "classification" if classes else "regression"
    one = [Participant("these rows", rows)]
    silo = LocalFederation(one, classes=classes, task=task, label_names=model.labels or None)
    return feature_importances(silo, model, columns=columns or None)
