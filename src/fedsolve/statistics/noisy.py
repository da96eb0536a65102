"""Regressions and descriptions with noise: what `fs.Private` makes of `fs.GLM` and `fs.Describe`.

The schema bounds every number, and so every column of a formula: those of rows drawn over all that the schema
allows have a middle c and a half range h, and

    a = clip((x - c) / h, -1, 1) / sqrt(p)       is never longer than 1, whatever a row holds

A linear model follows from the noisy Gram matrix of [a, y] as those of a `Release` do. A logistic regression
takes four Newton steps on noisy sums, the last with most of the budget: from b, with errors E and e of
information and gradient, a step ends H^-1 (e + E step) from where it should; standard errors include that.

A description is one noisy vector of length 1 at most a row: counts, moments, products, and 20 bins for each
number between its bounds. What is missing, or no number, counts nowhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.client_data import run_schema
from fedsolve.federation.dialogue import Ask, DialogueRun, Talk
from fedsolve.federation.method import Chain, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.statistics.design import MOST_BINS, RowView, added, level_counts
from fedsolve.statistics.release import NoisyFit, in_units, noisy_least_squares, unweighted
from fedsolve.tables.formula import INTERCEPT, categories_of, evaluate, frame

if TYPE_CHECKING:
    from fedsolve.statistics.describe import ColumnSummary, Describe
    from fedsolve.statistics.glm import GLM, GLMModel

GRAM, STEP, SUMS = "noisy-gram", "noisy-glm", "noisy-describe"
REACH = 3.0
"""Scales from the reference at which numbers are cut off that have no bounds."""

_STEPS = (0.1, 0.1, 0.1, 0.7)
"""Shares of the budget that Newton steps of a logistic regression take."""

_CLEAR, _DRAWN = 3.0, 4096


class _Bounds(RowView):
    """What the schema says of numbers: low and high ends by name."""

    def __init__(self, chain: Chain, width: int) -> None:
        super().__init__(chain, width)
        schema = run_schema(chain)
        if schema is None or schema.extractor is not None:
            raise DataError("with noise a schema must say between which bounds every number lies.")
        self.categories = categories_of(schema)
        self.ends: dict[str, tuple[float, float]] = {}
        for _, column in schema.places("number"):
            reach = REACH * column.scale
            ends = column.bounds or (column.reference - reach, column.reference + reach)
            if column.bounds or (column.reference, column.scale) != (0.0, 1.0):
                self.ends[column.name] = (ends[0], ends[1])

    def of(self, name: str) -> tuple[float, float]:
        if name not in self.ends:
            raise DataError(f"'{name}' has no bounds in the schema, which noise is measured by. State them.")
        return self.ends[name]


class _FormulaBounds(_Bounds):
    """A formula's columns with their middle and half range; and those of its outcome."""

    def __init__(self, chain: Chain, width: int) -> None:
        super().__init__(chain, width)
        if self.plan.scaled or INTERCEPT not in self.plan.names:
            raise DataError("with noise a formula has an intercept, and neither center() nor scale().")
        random, levels = np.random.Generator(np.random.Philox(0)), self.categories
        encoded, place = np.zeros((_DRAWN, self.schema.width)), 0
        for column in self.schema.used:
            if column.name in levels:
                drawn = random.integers(0, len(levels[column.name]), _DRAWN)
                encoded[np.arange(_DRAWN), place + drawn] = 1.0
            elif column.name in self.plan.used:
                low, high = self.of(column.name)
                share = np.concatenate([[0.0, 1.0], random.random(_DRAWN - 2)])
                encoded[:, place] = low + (high - low) * share
            place += len(column.names)
        labels = None
        if (label := self.schema.label) in self.plan.used:
            known = levels.get(str(label))
            labels = np.resize(np.array(known), _DRAWN) if known else np.full(_DRAWN, self.of(str(label))[0])
        rows = frame(self.schema, encoded, labels, False)
        with np.errstate(all="ignore"):
            self.middle, self.half = self._range(self.plan.columns(rows))
            constant = np.array([name == INTERCEPT for name in self.plan.names])
            self.middle[constant], self.half[constant] = 0.0, 1.0
            middle, half = self._range(evaluate(self.plan.outcome[0], rows)[:, None])
            self.outcome = float(middle[0]), float(half[0])

    @staticmethod
    def _range(table: Array) -> tuple[Array, Array]:
        low, high = np.min(table, axis=0), np.max(table, axis=0)
        if not np.all(np.isfinite([low, high])):
            raise DataError("the formula is no finite number everywhere between the bounds of the schema.")
        return (low + high) / 2, np.where(high > low, high - low, 2.0) / 2

    def rows(self, data: ClientData, binomial: bool) -> tuple[Array, Array]:
        """a (rows, columns), and y between -1 and 1, or as 0 and 1."""
        parts = []
        for rows, _, _ in self.frames(unweighted(data), self.plan.used):
            with np.errstate(all="ignore"):
                a = np.clip((self.plan.columns(rows) - self.middle) / self.half, -1.0, 1.0)
                y = evaluate(self.plan.outcome[0], rows)
            y = np.clip(y, 0, 1) if binomial else np.clip((y - self.outcome[0]) / self.outcome[1], -1, 1)
            parts.append((np.nan_to_num(a) / math.sqrt(len(self.half)), np.nan_to_num(y)))
        return np.concatenate([a for a, _ in parts]), np.concatenate([y for _, y in parts])


def _facts(run: DialogueRun[Any], total: Total) -> dict[str, Any]:
    facts = {name: getattr(run.method, name) for name in ("epsilon", "delta")}
    facts |= {"noise_by": "sites" if total.noised else "server", "exchanges": len(run.history)}
    return facts | {"sites": len(run.history[-1].cohort)}


# -- generalised linear models -----------------------------------------------------------------------


def private_glm(method: GLM, run: DialogueRun[Any], mu: float) -> Talk[GLMModel]:
    """A linear or logistic regression; standard errors are those of rows and noise. mu: what it may cost."""
    from fedsolve.statistics.glm import GLM, GLMModel

    plain = GLM(method.formula, family=method.family)
    if method.family not in ("gaussian", "binomial") or method != plain:
        raise DataError(
            "with noise a GLM is gaussian or binomial with its canonical link, and has no offset, weights, "
            "robust errors or other settings: how much one row changes its sums is bounded only then."
        )
    columns, binomial = _FormulaBounds(run.chain, run.spec.features), method.family == "binomial"
    names, width = columns.plan.names, len(columns.half)
    place, outcome = names.index(INTERCEPT), (0.0, 1.0)
    if binomial:
        found, total, rows = yield from _newton(method.formula, width, place, mu)
    else:
        total, outcome = (yield Ask(GRAM, {"mu": mu})), columns.outcome
        rows = 2 * width * float(total["gram"][place, place])
        found = noisy_least_squares(total["gram"], total.noise["gram"], rows, method.formula)
    known = in_units(names, columns.middle, columns.half * math.sqrt(width), outcome, found)
    facts: dict[str, Any] = {"formula": method.formula, "family": method.family, "link": method.chosen_link}
    facts |= {"rows": round(rows), "errors": "of rows and noise", **_facts(run, total)}
    facts |= columns.event(run.remarks)
    known["parameters"] = {**method.parameters(), "epsilon": facts["epsilon"], "noise": facts["noise_by"]}
    known |= {"ranges": np.array([columns.middle, columns.half]), "ratio": "odds ratio" if binomial else ""}
    return GLMModel(run.spec.features, facts, remarks=run.remarks, scales={}, degrees=0.0, **known)


def _newton(formula: str, width: int, place: int, mu: float) -> Talk[tuple[NoisyFit, Total, float]]:
    """The fit, the last total, and about how many rows there are."""
    b, rows = np.zeros(width), 0.0
    for share in _STEPS:
        total = yield Ask(STEP, {"mu": mu * math.sqrt(share)}, {"weight": b})
        values, vectors = np.linalg.eigh(total["curvature"])
        noise = total.noise["curvature"] * math.sqrt(2 * width)
        rows = rows or 4 * width * float(total["curvature"][place, place])
        clear = np.maximum(values, noise / 2)
        moved = vectors @ ((vectors.T @ total["gradient"]) / clear)
        moved *= min(1.0, 5 * math.sqrt(width) / max(float(np.linalg.norm(moved)), 1e-300))
        b = b - moved
    if values[0] < _CLEAR * noise:
        raise DataError(
            f"the noise is too large for '{formula}': its columns vary by {values[0]:.3g} in their weakest "
            f"direction, and noise alone by {noise:.3g}. Choose fewer columns, or raise epsilon."
        )
    inverse = np.linalg.inv(total["curvature"])
    by_moved = (moved @ moved) * np.eye(width) + np.outer(moved, moved)
    spread = total.noise["gradient"] ** 2 * np.eye(width) + total.noise["curvature"] ** 2 / 2 * by_moved
    return (b, inverse @ spread @ inverse, inverse), total, rows


@step(GRAM, releases={"gram": 1.0})
def answer_gram(data: ClientData, request: Request, memory: Memory) -> Term:
    """The Gram matrix of [a, y] / sqrt 2."""
    a, y = _FormulaBounds(memory.chain, data.width).rows(data, False)
    both = np.column_stack([a, y]) / math.sqrt(2)
    return Term({"gram": both.T @ both}, {}, frozenset({"gram"}))


@step(STEP, releases={"gradient": 1.0, "curvature": 0.25})
def answer_step(data: ClientData, request: Request, memory: Memory) -> Term:
    """Gradient and information of a logistic regression."""
    a, y = _FormulaBounds(memory.chain, data.width).rows(data, True)
    mean = 1 / (1 + np.exp(-np.clip(a @ request.arrays["weight"], -500, 500)))
    gram = (a * (mean * (1 - mean))[:, None]).T @ a
    return Term({"gradient": (mean - y) @ a, "curvature": gram}, {}, frozenset({"curvature"}))


# -- descriptions ------------------------------------------------------------------------------------


class _Described(_Bounds):
    """Where in the noisy vector what stands: rows; for each number rows that have it, sum and square; bins;
    products of numbers; levels of categories.
    """

    def __init__(self, chain: Chain, width: int) -> None:
        super().__init__(chain, width)
        self.numbers = [column.name for _, column in self.schema.places("number")]
        ends = np.array([self.of(name) for name in self.numbers]).reshape(-1, 2)
        self.middle, self.half = ends.mean(axis=1), (ends[:, 1] - ends[:, 0]) / 2
        wide = len(self.numbers)
        levels = sum(map(len, self.categories.values()))
        self.sizes = (1, wide, wide, wide, MOST_BINS * wide, wide * (wide - 1) // 2, levels)
        square = 1 + 4 * wide + wide * (wide - 1) / 2 + len(self.categories)
        self.length = math.sqrt(square)
        """The largest length of a row's vector."""


def private_description(method: Describe, run: DialogueRun[Any], mu: float) -> Talk[ColumnSummary]:
    """Counts, means, deviations, bins, quantiles within a bin, correlations, categories. mu: its cost."""
    from fedsolve.statistics.describe import QUANTILES, ColumnSummary, correlations, rounded

    if method.by is not None:
        raise DataError("with noise all rows are described together; leave `by` out.")
    known = _Described(run.chain, run.spec.features)
    total = yield Ask(SUMS, {"mu": mu})
    parts = np.split(known.length * total["sums"], np.cumsum(known.sizes)[:-1])
    (rows,), there, first, second, bins, products, levels = parts
    seen, counts = np.maximum(there, 1), np.maximum(bins.reshape(-1, MOST_BINS), 0)
    spread = np.sqrt(np.maximum(second / seen - (first / seen) ** 2, 0.0))
    lines: list[dict[str, Any]] = []
    for k, name in enumerate(known.numbers):
        low, width = known.middle[k] - known.half[k], 2 * known.half[k] / MOST_BINS
        below = np.concatenate([[0.0], np.cumsum(counts[k])])
        places = np.interp(np.array(QUANTILES) * below[-1], below, np.arange(MOST_BINS + 1))
        line = {"column": name, "rows": round(there[k]), "missing": max(0, round(rows - there[k]))}
        line["mean"] = known.middle[k] + known.half[k] * first[k] / seen[k]
        cell = low + width * np.clip(np.floor(places), 0, MOST_BINS - 1)
        quantiles = rounded(low + width * places, cell, cell + width).tolist()
        line |= {"sd": known.half[k] * spread[k], "quantiles": quantiles}
        line |= {"within": [width] * len(QUANTILES), "bins": np.rint(counts[k]).tolist()}
        lines.append(line | {"edges": (low + width * np.arange(1, MOST_BINS)).tolist()})
    told = iter(np.rint(np.maximum(levels, 0)).astype(int).tolist())
    for name, some in known.categories.items():
        found = {level: next(told) for level in some}
        there_of = sum(found.values())
        line = {"column": name, "rows": there_of, "missing": max(0, round(rows - there_of))}
        lines.append(line | {"categories": found})
    facts = {"rows": round(rows), "noise_of_counts": known.length * total.noise["sums"], **_facts(run, total)}
    # As if values were missing by chance: of how many rows have two numbers, nothing is told.
    share, both = np.maximum(there, 1) / max(rows, 1.0), np.diag(second)
    both[np.triu_indices(len(both), 1)] = products
    sums = {"products": both + np.triu(both, 1).T, "both": np.outer(seen, share)}
    sums |= {"with": np.outer(first, share), "squares": np.outer(second, share)}
    tables, names = {"correlation": np.clip(correlations(sums), -1.0, 1.0)}, tuple(known.numbers)
    return ColumnSummary(
        run.spec.features, facts, lines=lines, names=names, groups=[], patterns=[], tables=tables
    )


@step(SUMS, releases={"sums": 1.0})
def answer_sums(data: ClientData, request: Request, memory: Memory) -> Term:
    """The vector of `_Described`, divided by the length that a row's has at most."""
    known = _Described(memory.chain, data.width)

    def sums(rows: Any) -> Array:
        u = (rows[known.numbers].to_numpy(dtype=np.float64) - known.middle) / known.half
        m = np.isfinite(u)
        u = np.where(m, np.clip(u, -1.0, 1.0), 0.0)
        place = np.minimum((u + 1) / 2 * MOST_BINS, MOST_BINS - 1).astype(np.intp)
        bins = [np.bincount(place[m[:, k], k], minlength=MOST_BINS) for k in range(u.shape[1])]
        moments = [each.sum(axis=0) for each in (m, u, u**2)]
        products = (u.T @ u)[np.triu_indices(u.shape[1], 1)]
        levels = level_counts(rows, known.categories)
        return np.concatenate([[len(rows)], *moments, *bins, products, levels])

    found = added({"sums": sums(rows)} for rows, _, _ in known.frames(unweighted(data)))
    return Term({"sums": found["sums"] / known.length})
