"""A model's evaluation group by group: by the values of a column, or by site.

Every group is evaluated by the same sums as all rows are. No group has fewer than `FEWEST` rows: smaller ones
are put together, with the smallest of the others where they would still be too few, so that nothing can be
found by taking groups off the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError, did_you_mean
from fedsolve.federation.engine import Federation
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.labels import number
from fedsolve.model import Model
from fedsolve.scoring.evaluation import (
    COUNTS,
    Found,
    about,
    evaluation_from,
    evaluation_of,
    model_about,
    sums_of,
    tally_term,
)
from fedsolve.scoring.lockstep import enter_term, share_of
from fedsolve.scoring.quality import LabelsEvaluation
from fedsolve.scoring.residuals import FEWEST
from fedsolve.tables.table_file import Table

OTHERS = "(others)"
MISSING = "(missing)"
MOST_VALUES = 12
"""Different numbers up to which each is a group of its own; more are put into fourths."""
MOST_GROUPS = 100
KIND = "grouped-tally"


@dataclass(frozen=True)
class Grouped:
    """Evaluations by group. by: the column, or "site". joined: what is in the group "(others)"."""

    by: str
    found: Mapping[str, Found]
    joined: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values; of several labels a row, groups by label."""
        groups: list[dict[str, Any]] = []
        if "" not in (labels := self.by_label()):
            told = {label: one.as_dict()["groups"] for label, one in labels.items()}
            return {"column": self.by, "labels": told, "joined": list(self.joined)}
        for name, one in self.found.items():
            values, intervals = measures_of(one)
            pairs = {key: list(pair) for key, pair in intervals.items()}
            groups.append({"group": name, "rows": one.rows, **values, "intervals": pairs})
        return {"column": self.by, "groups": groups, "joined": list(self.joined)}

    def by_label(self) -> dict[str, Grouped]:
        """The same of each label by its name; of one label a row, all of it under no name."""
        found = self.found.items()
        several = {group: one.by_label for group, one in found if isinstance(one, LabelsEvaluation)}
        if not several:
            return {"": self}
        return {
            label: Grouped(self.by, {group: of[label] for group, of in several.items()}, self.joined)
            for label in next(iter(several.values()))
        }


def measures_of(found: Found) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """The measures of a group by name, and their intervals."""
    return found.measures() | found.rates, found.intervals | found.rate_intervals


def by_column(model: Model, data: Table, column: str) -> Grouped:
    """The evaluation of rows that lie here, by a column that was kept when they were read."""
    assert data.labels is not None
    names, codes, joined = groups_of(data.kept[column])
    found = {
        name: evaluation_of(model, data.features[codes == code], data.labels[codes == code])
        for code, name in enumerate(names)
    }
    return Grouped(column, found, joined)


def groups_of(cells: Array) -> tuple[list[str], Array, tuple[str, ...]]:
    """Names of the groups, which one each row is in, and the values that are in "(others)"."""
    texts = [str(cell).strip() or MISSING for cell in cells]
    if len(texts) < FEWEST:
        raise DataError(f"{len(texts)} rows are too few for groups; each has {FEWEST} rows at least.")
    known: dict[str, Any] = {text: number(text.replace(",", ".")) for text in set(texts) - {MISSING}}
    if len(known) > MOST_VALUES and all(value is not None and np.isfinite(value) for value in known.values()):
        values = [known[text] for text in texts if text != MISSING]
        edges = np.unique(np.quantile(values, [0.0, 0.25, 0.5, 0.75, 1.0]))
        named = {MISSING: MISSING}  # by the fourth of the rows that a number lies in, as a range of numbers
        for text, value in known.items():
            fourth = int(np.searchsorted(edges[1:-1], value, side="left"))
            named[text] = f"{fourth + 1}. {edges[fourth]:.6g} to {edges[fourth + 1]:.6g}"
        texts = [named[text] for text in texts]
    sizes = dict(sorted(Counter(texts).items(), key=lambda one: (one[0] == MISSING, one[0])))
    if len(sizes) > MOST_GROUPS:
        raise DataError(
            f"{len(sizes):,} different values, such as {', '.join(map(repr, list(sizes)[:3]))}, are too many "
            f"groups; {MOST_GROUPS} are the most."
        )
    small = {value for value, count in sizes.items() if count < FEWEST}
    while small and sum(sizes[value] for value in small) < FEWEST:
        small.add(min(sizes.keys() - small, key=lambda value: sizes[value]))
    names = [value for value in sizes if value not in small] + [OTHERS] * bool(small)
    place = {value: names.index(OTHERS if value in small else value) for value in sizes}
    return names, np.array([place[text] for text in texts]), tuple(sorted(small))


# -- over a federation -----------------------------------------------------------------------------


def evaluate_by(federation: Federation, model: Model, by: str | None = None) -> Grouped:
    """The evaluation of a model group by group, from sums: by a category of its schema, or by site.

    by: the column; each client's rows by themselves when None, an exchange for each. Groups and clients of
    fewer than ten rows are left out. Secure sums refuse it: a group divides the rows that they keep together,
    and a site's sum is what they hide.
    """
    if by is None:
        own = (about("tally", model, (name,)) for name in federation.clients)
        totals = (federation.exchange(request, Chain()) for request in own)
        each = zip(federation.clients, totals, strict=True)
    else:
        names = _category(model, by)
        total = federation.exchange(about(KIND, model, federation.clients, by=by), Chain())
        each = zip(names, (share_of(total, str(place)) for place in range(len(names))), strict=True)
    found: dict[str, Found] = {}
    few: list[str] = []
    for name, share in each:
        if share.count("rows") < FEWEST:
            few.append(name)
        else:
            found[name] = evaluation_from(model, share)
    return Grouped(by or "site", found, tuple(few))


def _category(model: Model, by: str) -> dict[str, int]:
    """The features of a category, by the names of its values."""
    known = {} if model.schema is None else {c.name: (p, c) for p, c in model.schema.places("category")}
    if by not in known:
        raise DataError(
            f"'{by}' is no category of the model's schema.{did_you_mean(by, known)} It has "
            f"{', '.join(known) or 'none'}; other columns divide rows where they lie ('fedsolve evaluate')."
        )
    first, column = known[by]
    return {name.removeprefix(f"{by}="): first + n for n, name in enumerate(column.names)}


@step(KIND, over_rows=True, counts=COUNTS)
def answer_groups(data: ClientData, request: Request, memory: Memory) -> Term:
    """The tally of every group of this client's rows, each under its number."""
    model = model_about(request, memory)
    whole = Term()
    for name, place in enumerate(_category(model, request.note["by"]).values()):
        inside = data.features(slice(None))[:, place] == 1
        rows = data.taking(inside)
        enter_term(whole, str(name), tally_term(sums_of(model, rows), len(rows)))
    return whole
