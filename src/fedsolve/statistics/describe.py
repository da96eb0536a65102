"""What columns hold, over all sites: counts, means, deviations, quantiles, categories, correlations, gaps.

Moments are exact. A histogram has at most 20 bins of ten rows on average, on one grid; quantiles are found by
halving the bin that holds them, as long as ten rows or none stay on either side. Sums over a group are asked
for only where it has ten rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsolve.arrays import Array, check_rows
from fedsolve.errors import DataError
from fedsolve.federation.dialogue import Ask, DialogueRun, Talk
from fedsolve.federation.method import Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.pages.templates import render
from fedsolve.pages.written_tables import plain
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.statistics.design import FEWEST_ROWS, MOST_BINS, RowView, StatisticMethod, added, level_counts
from fedsolve.statistics.hiding import check_groups, hidden_pairs
from fedsolve.statistics.noisy import private_description
from fedsolve.statistics.results import Lines, StatisticModel, number
from fedsolve.tables.formula import categories_of, unknown, variables
from fedsolve.tables.preparation import mean_and_deviation

GROUPS, SUMS, COUNTS = "describe-groups", "describe-sums", "describe-counts"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_GAPS = 4
"""Columns whose patterns of missing values are told: 16 patterns at most."""

_WIDEST = 4.0
"""Deviations that a bin has at most from which a quantile is told."""

_FAR = 10.0
"""Deviations from the mean between which quantiles are looked for."""


class ColumnSummary(StatisticModel):
    """What is known of every column; `page` draws it."""

    family: ClassVar[str] = "describe"
    title: ClassVar[str] = "Description"
    lines: list[dict[str, Any]]  # what `records` gives
    groups: list[dict[str, Any]]  # rows and means by group
    patterns: list[dict[str, Any]]  # rows by the columns that are missing together
    tables: dict[str, Array]  # correlations of `names`, and rows in which two columns are missing
    names: tuple[str, ...]

    def records(self) -> list[dict[str, Any]]:
        return self.lines

    def printed(self) -> list[tuple[str, Lines]]:
        heads = ("column", "rows", "missing", "mean", "sd")
        rows: Lines = [(*heads, *(f"{100 * q:g}%" for q in QUANTILES), "categories")]
        for line in self.lines:
            known = [*map(line.get, heads), *map(_digits, line.get("quantiles", [None] * len(QUANTILES)))]
            counts = (f"{name} {count}" for name, count in line.get("categories", {}).items())
            rows.append((*map(number, known), ", ".join(counts)))
        parts = [("", rows)]
        if self.groups:
            named: Lines = [("group", "rows", *self.names)]
            for each in self.groups:
                means = map(each.get("means", {}).get, self.names)
                named.append((each["group"], number(each["rows"]) or "few", *map(number, means)))
            parts.append(("Means by group", named))
        if len(self.names) > 1:
            table = zip(self.names, self.tables["correlation"], strict=True)
            cells = [
                (name, *(f"{round(v, 2) + 0.0:.2f}" if np.isfinite(v) else "" for v in values))
                for name, values in table
            ]
            parts.append(("Correlations", [("", *self.names), *cells]))
        if self.patterns:
            gaps = [(each["missing"], number(each["rows"])) for each in self.patterns]
            parts.append(("Missing together", [("columns", "rows"), *gaps]))
        return parts

    def document(self) -> dict[str, Any]:
        found = {"groups": self.groups, "patterns": self.patterns, "columns": self.names, **self.tables}
        return {**super().document(), **plain(found)}

    def page(self) -> str:
        """An HTML page with a small picture of every column."""
        (_, (heads, *_)), *parts = self.printed()
        known: dict[str, Any] = {"lines": self.lines, "facts": self.told_facts(), "parts": parts}
        known |= {"quantiles": list(heads[5:-1]), "number": _short}
        return render("describe.html", title=self.title, kind="evaluation", **known)


def _digits(value: Any) -> Any:
    """A quantile with the digits that it has."""
    return f"{value:.15g}" if isinstance(value, float) else value


def _short(value: Any) -> str:
    """A number with four digits, as a page has room for; counts whole."""
    whole = value is None or isinstance(value, str) or float(value).is_integer()
    return number(value) if whole else f"{value:.4g}"


class _Columns(RowView):
    """The columns of a run: numbers with what they are counted from and in which unit, so that large ones do
    not cancel, and categories with their levels.
    """

    def __init__(self, chain: Chain, width: int) -> None:
        super().__init__(chain, width)
        self.categories = categories_of(self.schema)
        self.numbers = [name for name in variables(self.schema) if name not in self.categories]
        self.all = [*self.numbers, *self.categories]
        known = {column.name: (column.reference, column.scale) for _, column in self.schema.places("number")}
        pairs = np.array([known.get(name, (0.0, 1.0)) for name in self.numbers]).reshape(-1, 2)
        self.origin, self.unit = pairs.T
        self.dates = {column.name: column for _, column in self.schema.places("date")}
        ends = {column.name: column.bounds for _, column in self.schema.places("number") if column.bounds}
        self.ends = [ends.get(name, (-np.inf, np.inf)) for name in self.numbers]

    def values(self, rows: Any) -> tuple[Array, Array]:
        """(rows, numbers) whether a number is there, and how far it is from its origin; 0 where it is not."""
        z = (rows[self.numbers].to_numpy(dtype=np.float64) - self.origin) / self.unit
        return (~np.isnan(z)).astype(np.float64), np.nan_to_num(z, nan=0.0)


@register(
    exchanges="2, and up to 7 for quantiles",
    up="counts, sums, squares and cross products; counts in bins",
    down="edges of bins",
)
@dataclass(frozen=True)
class Describe(StatisticMethod[ColumnSummary]):
    """Describe the columns over all sites."""

    by: str | None = parameter(None, "A category, or site: means of every group.", none="all rows together")
    refine: int = parameter(6, "How often the bins of quantiles are halved.", least=0, most=20)

    @property
    def usual(self) -> int:
        return 2 + (self.by is not None) + self.refine

    def talk(self, run: DialogueRun[ColumnSummary]) -> Talk[ColumnSummary]:
        columns = _Columns(run.chain, run.spec.features)
        categories = columns.categories
        if self.by not in (None, "site", *categories):
            raise unknown(str(self.by), ["site", *categories])
        named = {None: ["all"], "site": list(run.clients)} | categories
        note: dict[str, Any] = {"by": self.by or "", "groups": named[self.by], "rows": 0}
        note["large"], sizes, asked = [True] * len(note["groups"]), np.zeros(0), 0
        if self.by is not None:
            total = yield Ask(GROUPS, note)
            sizes, asked = total["groups"], total.count("rows")
            note["large"] = [bool(size >= FEWEST_ROWS) for size in sizes]
            if not any(note["large"]):
                raise DataError(f"every group of '{self.by}' has fewer than {FEWEST_ROWS} rows.")
        total = yield Ask(SUMS, note)
        sums, rows = total.term.arrays, total.count("rows")
        check_rows(rows)
        missing = dict(zip(columns.all, np.diag(sums["gaps"]).tolist(), strict=True))
        gaps = [name for name in sorted(missing, key=lambda each: -missing[each])[:_GAPS] if missing[name]]
        hidden = [name for name, sites in zip(columns.all, sums["hidden"], strict=True) if sites]
        note |= {"rows": rows, "gaps": gaps, "pairs": True, "hidden": hidden}
        spread, patterns = _Spread(columns, sums["moments"].sum(axis=1)), np.zeros(0)
        correlation = np.zeros((0, 0))
        if columns.numbers:
            total = yield Ask(COUNTS, note, {"edges": spread.edges})
            spread.begin(total["below"])
            patterns = total.term.arrays.get("patterns", patterns)
            told = ~np.isin(columns.numbers, hidden)
            known = np.outer(told, told) | np.eye(len(told), dtype=bool)
            correlation = np.where(known, correlations(total.term.arrays), np.nan)
            if hidden:
                run.remark(f"too few rows lack {', '.join(hidden)} to tell correlations with these columns.")
            for _ in range(self.refine):
                middle = spread.bracket[:2].mean(axis=0)
                if not spread.halve(
                    (yield Ask(COUNTS, note | {"gaps": [], "pairs": False}, {"edges": middle}))["below"]
                ):
                    break
        if spread.names and (width := spread.width):
            run.remarks.append(
                f"quantiles are exact to a bin, of up to about {width:.1g} standard deviations."
            )
        facts = {"rows": rows, "rows_left_out": asked - rows if self.by else None}
        facts |= {"complete_rows": sums["complete"][0], "exchanges": len(run.history)}
        facts["sites"] = len(run.history[-1].cohort)
        lines, counts = spread.lines(missing), iter(sums["categories"].astype(int).tolist())
        for name, levels in categories.items():
            line = {"column": name, "rows": rows - missing[name], "missing": missing[name]}
            lines.append(line | {"categories": {level: next(counts) for level in levels}})
        parts: dict[str, Any] = {
            "lines": plain(lines),
            "names": tuple(columns.numbers),
            "patterns": _by_gaps(gaps, patterns),
        }
        parts["groups"] = _by_group(columns, named[self.by], sizes, sums["moments"])
        parts["tables"] = {"correlation": correlation, "gaps": sums["gaps"]}
        return ColumnSummary(run.spec.features, facts, remarks=run.remarks, **parts)

    privately = private_description


def rounded(found: Array, low: Array, high: Array) -> Array:
    """Quantiles of a column, with no more digits than their bins (low, high] need to hold a number each.

    So those of a column of whole numbers are whole where bins are narrow.
    """
    told, out = np.isfinite(found), np.full(len(found), np.nan)
    found, low, high = found[told], low[told], high[told]
    unit = wide = 10.0 ** np.floor(np.log10(high - low))
    for digits in range(1 - int(np.floor(np.log10(np.min(wide, initial=1.0))))):
        unit = np.maximum(wide, 10.0**-digits)
        first, last = np.floor(low / unit + 1e-9) + 1, np.floor(high / unit + 1e-9)
        if np.all(first <= last):
            break
    out[told] = [float(f"{each:.15g}") for each in np.clip(np.rint(found / unit), first, last) * unit]
    return out


class _Spread:
    """How numbers spread: moments, a histogram, and brackets around their quantiles.

    edges: inner edges of bins between three deviations below and above the mean (edges, numbers), of which
    each number has `bins`; the others have no width.
    """

    def __init__(self, columns: _Columns, moments: Array) -> None:
        self.columns, self.names, (self.n, first, second) = columns, columns.numbers, moments
        mean, deviation = mean_and_deviation(np.maximum(self.n, 1), first, second)
        constant = second / np.maximum(self.n, 1) - mean**2 <= 1e-13 * mean**2
        self.mean = columns.origin + columns.unit * mean
        self.deviation = columns.unit * np.where(constant, 0.0, deviation)
        self.unit = np.where(self.deviation > 0, self.deviation, 1.0)
        self.bins = [int(np.clip(rows // FEWEST_ROWS, 2, MOST_BINS)) for rows in self.n]
        edges = np.zeros((max(self.bins, default=2) - 1, len(mean)))
        for k, bins in enumerate(self.bins):
            inner = np.linspace(-3, 3, bins - 1) if bins > 2 else np.zeros(1)
            edges[:, k] = np.append(inner, np.full(len(edges) - len(inner), inner[-1]))
        self.edges = self.mean + edges * self.unit

    def begin(self, below: Array) -> None:
        """Find the bins that hold the quantiles; below: rows at or below each edge."""
        self.below, column = below, np.arange(len(self.n))
        edges = np.vstack([self.mean - _FAR * self.unit, self.edges, self.mean + _FAR * self.unit])
        counts = np.vstack([np.zeros_like(self.n), below, self.n])
        place = np.array([(below < q * self.n).sum(axis=0) for q in QUANTILES])
        # Ends of the bins that hold the quantiles, and the rows below either: (4, quantiles, numbers).
        ends = [table[place + more, column] for table in (edges, counts) for more in (0, 1)]
        self.bracket = np.array(ends)

    def halve(self, below: Array) -> bool:
        """Halve brackets, of which so many rows lie at or below the middle; whether any could be."""
        low, high, under, over = self.bracket
        wanted, middle = np.array(QUANTILES)[:, None] * self.n, (low + high) / 2
        # Ten rows, or none, stay on either side.
        sides = below - under, over - below
        split = np.all([(side >= FEWEST_ROWS) | (side == 0) for side in sides], axis=0)
        left, right = split & (below >= wanted), split & (below < wanted)
        ends = [(right, middle, low), (left, middle, high), (right, below, under), (left, below, over)]
        self.bracket = np.array([np.where(*each) for each in ends])
        return bool(np.any(split))

    def lines(self, missing: Mapping[str, float]) -> list[dict[str, Any]]:
        """What is known of every number."""
        out = []
        for k, name in enumerate(self.names):
            n, own, (low, high, under, over) = self.n[k], self.bins[k] - 1, self.bracket[:, :, k]
            share = (np.array(QUANTILES) * n - under) / np.maximum(over - under, 1)
            line: dict[str, Any] = {"column": name, "rows": n, "missing": missing[name], "mean": self.mean[k]}
            line["sd"] = self.deviation[k] * np.sqrt(n / max(n - 1, 1))
            found = low + np.clip(share, 0, 1) * (high - low)
            found[high - low > _WIDEST * self.unit[k]] = np.nan
            date = self.columns.dates.get(name)
            if not self.deviation[k]:
                found = np.full(len(QUANTILES), self.mean[k])
            elif date is None:
                least, most = self.columns.ends[k]
                found = np.clip(rounded(found, low, high), least, most)
            line |= {"quantiles": found, "within": high - low, "edges": self.edges[:own, k]}
            line["bins"] = np.diff(np.concatenate([[0], self.below[:own, k], [n]]))
            if date is not None:
                told = {head: [*map(date.day, line[head])] for head in ("quantiles", "edges")}
                sd, within = f"{date.scale * line['sd']:.4g} days", date.scale * line["within"]
                line |= {**told, "mean": date.day(line["mean"]), "sd": sd, "within": within}
            unknown = {"mean": None, "sd": None, "quantiles": [None] * len(QUANTILES)}
            out.append(line if n else line | unknown)
        return out

    @property
    def width(self) -> float:
        """Deviations that a bin has at most from which a quantile is told."""
        low, high, *_ = self.bracket
        wide = (high - low) / self.unit
        return float(np.max(wide[(wide <= _WIDEST) & (self.n > 0) & (self.deviation > 0)], initial=0.0))


def _by_gaps(names: list[str], patterns: Array) -> list[dict[str, Any]]:
    """Rows by the columns that they lack; patterns of fewer than ten rows together."""
    out, few = [], 0
    for pattern, count in enumerate(patterns.astype(int).tolist()):
        lacking = [name for place, name in enumerate(names) if pattern >> place & 1]
        if count >= FEWEST_ROWS:
            out.append({"missing": ", ".join(lacking) or "none of them", "rows": count})
        few += count if count < FEWEST_ROWS else 0
    return [*out, {"missing": "other patterns", "rows": few}] if few else out


def correlations(sums: Mapping[str, Array]) -> Array:
    """Pearson's, over the rows that have both."""
    both, first, product, second = (sums[name] for name in ("both", "with", "products", "squares"))
    seen = np.maximum(both, 1)
    with np.errstate(all="ignore"):
        spread = second / seen - (first / seen) ** 2
        found = (product / seen - first * first.T / seen**2) / np.sqrt(spread * spread.T)
    return np.where(np.isfinite(found), found, 0.0)


def _by_group(columns: _Columns, groups: list[str], sizes: Array, moments: Array) -> list[dict[str, Any]]:
    """Rows and means of every group; none where it has fewer than ten rows."""
    out: list[dict[str, Any]] = []
    for place, size in enumerate(sizes):
        n, first, _ = moments[:, place]
        means = (columns.origin + columns.unit * first / np.maximum(n, 1)).tolist()
        dated = columns.dates
        told = {
            name: dated[name].day(v) if name in dated else v
            for name, v in zip(columns.numbers, means, strict=True)
        }
        known = {"rows": int(size), "means": told}
        out.append({"group": groups[place], **(known if size >= FEWEST_ROWS else {"rows": None})})
    return out


# -- at the client -----------------------------------------------------------------------------------


def _grouped(data: ClientData, request: Request, memory: Memory) -> Iterator[tuple[_Columns, Any, Array]]:
    """Rows of groups that are large enough, with the place of their group; the others would be known from
    what is left when sums over groups are taken off sums over all.
    """
    by, groups = request.note["by"], list(request.note["groups"])
    large = np.append(np.array(request.note["large"]), False)  # the last place is that of no group
    columns = _Columns(memory.chain, data.width)
    if by == "site" and memory.name not in groups:  # the rows with which secure sums try a question
        raise DataError(
            "by='site' tells each site's own sums, which secure sums hide. Describe all rows together, "
            "or without secure sums."
        )
    if data.cells is not None:
        check_groups(data, columns.whole(data, [by]), by, columns.numbers)
    for rows, _, _ in columns.frames(data):
        if by in ("", "site"):
            group = np.full(len(rows), groups.index(memory.name) if by else 0)
        else:
            group = np.asarray(rows[by].cat.codes, dtype=np.intp)
        yield columns, rows[large[group]], group[large[group]]


@step(GROUPS, counts=("groups",))
def answer_groups(data: ClientData, request: Request, memory: Memory) -> Term:
    """Rows by group."""
    size = len(request.note["groups"])
    parts = ({"groups": np.bincount(group, minlength=size)} for *_, group in _grouped(data, request, memory))
    return Term(added(parts), {"rows": len(data)})


@step(SUMS, counts=("both", "gaps", "categories", "complete"))
def answer_sums(data: ClientData, request: Request, memory: Memory) -> Term:
    """n, sum z and sum z² by group; categories and gaps, and columns whose gaps would tell rows apart."""

    def sums(columns: _Columns, rows: Any, group: Array) -> dict[str, Any]:
        m, z = columns.values(rows)
        here = [group == place for place in range(len(request.note["groups"]))]
        absent = rows[columns.all].isna().to_numpy(dtype=np.float64)
        return {
            "rows": len(rows),
            "moments": [[each[own].sum(axis=0) for own in here] for each in (m, z, z**2)],
            "categories": level_counts(rows, columns.categories),
            "gaps": absent.T @ absent,
            "complete": [np.sum(~absent.any(axis=1))],
        }

    found = added(sums(*part) for part in _grouped(data, request, memory))
    count, found["hidden"] = int(found.pop("rows")), np.zeros(len(found["gaps"]))
    if data.cells is not None:
        columns = _Columns(memory.chain, data.width)
        found["hidden"] += hidden_pairs(data, columns.whole(data)[columns.all])
    return Term(found, {"rows": count})


@step(COUNTS, over_rows=True, counts=("below", "patterns"))
def answer_counts(data: ClientData, request: Request, memory: Memory) -> Term:
    """Rows at or below every edge (edges, numbers); when first asked also products of every two numbers."""
    edges, gaps = request.arrays["edges"], list(request.note["gaps"])[:_GAPS]
    rows_told = max(int(request.note["rows"]), 6 * FEWEST_ROWS)
    if len(edges) >= MOST_BINS or (len(edges) + 1) * FEWEST_ROWS > rows_told:
        raise DataError(
            f"{len(edges) + 1} bins are asked for; {MOST_BINS} of {FEWEST_ROWS} rows each are told."
        )

    def sums(columns: _Columns, rows: Any, group: Array) -> dict[str, Any]:
        values = (np.sort(rows[name].dropna().to_numpy(dtype=np.float64)) for name in columns.numbers)
        below = [np.searchsorted(v, own, side="right") for v, own in zip(values, edges.T, strict=True)]
        found = {"below": np.array(below).T}
        if gaps:
            lacking = rows[gaps].isna().to_numpy() @ (1 << np.arange(len(gaps)))
            found["patterns"] = np.bincount(lacking.astype(np.intp), minlength=2 ** len(gaps))
        if request.note["pairs"]:
            m, z = (each * ~np.isin(columns.numbers, request.note["hidden"]) for each in columns.values(rows))
            found |= {"both": m.T @ m, "with": z.T @ m, "products": z.T @ z, "squares": (z**2).T @ m}
        return found

    return Term(added(sums(*part) for part in _grouped(data, request, memory)))
