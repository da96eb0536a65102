"""What a formula may ask of rows under secure sums, so that no sum is about few of them.

The census counts the columns of a table. A formula makes others of them, leaves rows out and divides times:
by a threshold, by two powers that differ in one row, or by one missing value it could single a row out. Each
site holds its own rows to four rules, over all questions that it ever answered about them (`RowCells.book`):

    words    columns, C(), their products, log, sqrt and the powers 2 and 3 of a column: nothing with a number
             that the asker chooses. Weights, times and events are columns
    columns  what products and functions make is set, and an indicator unset, in no rows or in fewest_rows;
             and no row, nor rows of equal values that are fewer, have more than two thirds of a
             combination of these columns, all that were made so far, and those that they are made of;
             nor of the weights that a product has
    rows     those that lack a value of the columns in use, and the others, are none or enough for a product
    times    a grid has edges of the grid before it, or new rows have come since

What holds for the rows of a site holds for the cohort: more rows never raise a share.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import TermError
from fedsolve.federation.meaning import ADDITIVE
from fedsolve.federation.participant import ClientData
from fedsolve.tables.formula import FormulaPlan, evaluate, one_parser

_LEAVING = frozenset({"deaths", "censored"})
ADDITIVE |= {"kaplan-meier": _LEAVING, "cox": _LEAVING | {"s0", "d0"}, "mixed": frozenset({"gram"})}
ADDITIVE |= {"glm": frozenset({"curvature", "deviance", "pearson"})}

_SHARE, _SHARE_OF_GAPS = 2 / 3, 1 / 3
"""Of a combination of made columns, or of gaps, among a site's own rows; of the cohort's it is less."""

_FUNCTIONS = ("log", "log2", "log10", "log1p", "sqrt")
WEIGHTS = "(weights)"
"""The name of the schema's weights among columns."""

_MASK = "\x1f"
"""Before each column in the word for rows that have all of some columns."""

Term = tuple[str, ...]
"""A product of columns, functions of columns, and of which rows are kept."""


def check_formula(
    data: ClientData, rows: Any, plan: FormulaPlan, weights: str | None, uncounted: set[str]
) -> None:
    """Hold a formula to the rules. rows: all of the site, as a frame. uncounted: columns without a census."""
    names, sides = [*rows], list(plan.outcome)
    if "==" in sides[-1]:
        sides[-1] = _word(sides[-1], rows)
    terms = [tuple(_word(each, rows) for each in term if each != "1") for term in plan.terms]
    chosen = [*plan.offsets, *([weights] if weights else []), *(sides if len(sides) == 2 else [])]
    for expression in chosen:
        if expression not in names and not (expression in plan.offsets and _word(expression, rows)):
            raise _refused(f"'{expression}' must be the name of a column")
    if len(sides) == 1:
        terms.append((_word(sides[0], rows),))
    else:
        terms.append(tuple(sides))
    if weights or data.own_weights is not None:
        weight = weights or WEIGHTS
        rows = rows if weights else rows.assign(**{WEIGHTS: data.own_weights})
        uncounted = uncounted | {WEIGHTS}
        terms = [*terms, *((weight, *term) for term in [(), *terms])]
    mask = check_left_out(data, rows, [*plan.used, *([weights] if weights else [])], len(plan.names))
    _check_columns(data, rows, [(*mask, *term) for term in [mask, *terms] if (*mask, *term)], uncounted)


def check_left_out(data: ClientData, rows: Any, used: Sequence[str], width: int) -> Term:
    """Refuse to leave out rows that lack one of these columns, where they are too few for a product of this
    width; the word for those that are kept, or none where all are.
    """
    book, batches, limits = _account(data)
    word, lacking = "".join(_MASK + name for name in sorted(set(used))), rows[list(used)].isna().to_numpy()
    if not lacking.any():
        return ()
    masks = {word, *(each for term in _told(book, rows) for each in term if each.startswith(_MASK))}
    flags = [_values((each,), rows) for each in sorted(masks)]
    together = np.unique(np.column_stack([batches, *flags]), axis=0, return_counts=True)[1]
    least = max(limits.fewest_rows, limits.rows_per_width * width)
    if together.min() < least:
        gaps = [name for name in sorted(set(used)) if rows[name].isna().any()]
        raise _refused(
            f"few rows of this site lack {', '.join(gaps)} (an empty cell, or a value that is not listed), "
            f"or few do not; what is left out, and what is not, must be at least {least:g} rows of a site",
            "Fill values by the schema's rule (missing='schema'), or leave these columns out.",
        )
    return (word,)


def _check_columns(data: ClientData, rows: Any, terms: Iterable[Term], uncounted: set[str]) -> None:
    """Refuse columns that single a row out, with those that earlier questions made."""
    book, batches, limits = _account(data)
    fewest = limits.fewest_rows
    asked = {tuple(sorted(set(term))) for term in terms}
    made = {term for term in asked if len(term) > 1 or term[0] not in {*rows} - uncounted}
    known = {tuple(term) for term in book.get("columns", [])}
    last = int(batches.max(initial=0))
    if not made or (made <= known and last <= book.get("batch", -1)):
        return
    every = sorted(made | _told(book, rows))
    words = {word for term in every for word in term if not word.startswith(_MASK)}
    bases = {(name,) for word in words for name in _columns(word, rows)}
    table = np.hstack([_values(term, rows) for term in [*sorted(bases - {*every}), *every]])
    for batch in np.unique(batches):
        here = batches == batch
        for term in sorted(made):
            _check_few(term, _values(term, rows)[here], fewest)
        equal, size = np.unique(table[here], axis=0, return_inverse=True, return_counts=True)[1:]
        share = np.bincount(equal.ravel(), _shares(table[here]))[size < fewest]
        if share.max(initial=0.0) > _SHARE:
            told = ", ".join(map(_said, sorted(made)))
            left = any(word.startswith(_MASK) for term in made for word in term)
            fill = ", or fill what is missing (missing='schema')" * left
            raise _refused(
                f"with what was told before, {told} would single a row out: it "
                f"has {share.max():.2f} of a combination of columns, and at most {_SHARE:.2f} may be",
                f"Leave it out, or bring numbers closer together (bounds in the schema){fill}.",
            )
    book["columns"], book["batch"] = sorted(map(list, known | made)), last


def check_weights(data: ClientData, weight: Array) -> None:
    """Refuse a product in which one row has most of the weight: squared residuals that are 0 but for it."""
    if data.cells is None or len(weight) < data.cells.limits.fewest_rows:
        return
    if np.isfinite(weight).all() and weight.max() > _SHARE * weight.sum():
        raise _refused(
            f"one row has {weight.max() / weight.sum():.2f} of the weight in a product, which would show it",
            "Ask for model-based errors (robust), or leave out a column that all but explains the outcome.",
        )


def _account(data: ClientData) -> tuple[dict[str, Any], Array, Any]:
    """What was told of these rows, their batches, and the limits; refused of a part of the rows."""
    cells = data.cells
    if cells is None or cells.book is None or cells.batches is None:
        raise _refused("statistics are of all rows, and a part of them is asked about")
    return cells.book, cells.batches, cells.limits


def _check_few(term: Term, table: Array, fewest: int) -> None:
    """Refuse a column that few rows set, or an indicator that few do not."""
    for column in table.T:
        on, indicator = int(np.count_nonzero(column)), bool(np.isin(column, (0, 1)).all())
        for count, what in ((on, "set"), (len(column) - on if indicator else 0, "not set")):
            if 0 < count < fewest:
                raise _refused(
                    f"'{_said(term)}' has a column that is {what} in few rows of this site; none, or "
                    f"at least {fewest}, must be (fewest_rows)",
                    "Leave it out, or put categories together in the tables.",
                )


def check_groups(data: ClientData, rows: Any, by: str, numbers: Sequence[str]) -> None:
    """Refuse sums by group where those that have none are too few. by: a category, or nothing."""
    mask = check_left_out(data, rows, [by] if by else [], 1)
    _check_columns(data, rows, [(*mask, name) for name in numbers] if mask else [], set())


def hidden_pairs(data: ClientData, rows: Any) -> Array:
    """(columns,) numbers whose pairs with others are not described: gaps would tell rows apart."""
    (book, batches, limits), gaps = _account(data), rows.isna().to_numpy()
    fewest = limits.fewest_rows
    there = gaps.any(axis=0)
    told = sorted(term for term in _told(book, rows) if len(term) == 1 and term[0].startswith(_MASK))
    flags = np.hstack([gaps[:, there], *(_values(term, rows) for term in told)]) != 0
    for batch in np.unique(batches) if there.any() else ():
        part = flags[batches == batch]
        for lacking in [np.zeros(len(part), dtype=bool), *part.T]:  # of all rows, and of those that have one
            left = part[~lacking].astype(np.float64)
            sides = np.stack([left.sum(axis=0), len(left) - left.sum(axis=0)])
            few = np.any((sides > 0) & (sides < fewest)) and len(left) > 0
            if few or np.any(_shares(left) > _SHARE_OF_GAPS):
                return np.asarray(there)
    masks = [[_MASK + name] for name in rows.columns[there] if (_MASK + name,) not in told]
    book["columns"] = sorted([*book.get("columns", []), *masks])
    return np.zeros(len(there), dtype=bool)


def check_grid(data: ClientData, time: str, what: str, edges: Array) -> None:
    """Refuse a second grid of times, whose cells would differ from those of the first by few rows."""
    if data.cells is None:
        return
    grids = _account(data)[0].setdefault("times", {})
    known = grids.setdefault(f"{what} {time}", edges.tolist())
    beyond = [edge for edge in edges.tolist() if not known or edge > known[-1]]  # where hardly a row is
    if not {*edges.tolist()} <= {*known, *(beyond[:1] if what == "counts" else [])}:
        raise _refused(
            f"{what} by '{time}' have been told on another grid, of {len(known) + 1} cells",
            "Ask for cells that are whole numbers of those (grid), or for a baseline for each site.",
        )


@one_parser
def _word(expression: str, rows: Any) -> str:
    """The column, or function of one, that a factor is; refused where it is anything else.

    Which rows have a level of a category says what the category says, whose levels are counted.
    """
    names = [*rows]
    if expression in names:
        return expression
    body: Any = ast.parse(expression.strip(), mode="eval").body
    while isinstance(body, ast.Call) and getattr(body.func, "id", "") == "I" and len(body.args) == 1:
        body = body.args[0]
    function: str = ""
    inner: Any = body
    if isinstance(body, ast.Compare) and [*map(type, body.ops)] == [ast.Eq]:
        inner, level = body.left, getattr(body.comparators[0], "value", None)
        levels = getattr(rows[inner.id], "cat", None) if getattr(inner, "id", "") in names else None
        function = "" if levels is not None and level in levels.categories else "?"
    elif isinstance(body, ast.Call) and body.args:
        function, inner = getattr(body.func, "id", "?"), body.args[0]
    elif isinstance(body, ast.BinOp) and isinstance(body.op, ast.Pow):
        inner = body.left
        function = "power" if getattr(body.right, "value", None) in (2, 3) else "?"
    column = inner.id if isinstance(inner, ast.Name) and inner.id in names else None
    if column is not None and function in ("", "C", "center", "scale"):
        return column
    if column is not None and (function == "power" or (function in _FUNCTIONS and len(body.args) == 1)):
        return ast.unparse(body)
    raise _refused(
        f"'{expression}' is no column, C(), log, sqrt, power of 2 or 3 of a column, or product of these",
        "What else is needed becomes a column of the tables at the sites.",
    )


@one_parser
def _columns(word: str, rows: Any) -> list[str]:
    """The columns that a word is about; none where these rows have them not."""
    if word.startswith(_MASK) or word in rows:
        names = word.split(_MASK)[1:] or [word]
        return names if {*names} <= {*rows} else []
    with contextlib.suppress(SyntaxError):
        return [e.id for e in ast.walk(ast.parse(word)) if isinstance(e, ast.Name) and e.id in rows]
    return []


def _told(book: dict[str, Any], rows: Any) -> set[Term]:
    """What earlier questions made of the columns that these rows have."""
    terms = {tuple(term) for term in book.get("columns", [])}
    return {term for term in terms if all(_columns(word, rows) for word in term)}


def _said(term: Term) -> str:
    return ":".join(word for word in term if not word.startswith(_MASK)) or "the choice of rows"


def _values(term: Term, rows: Any) -> Array:
    """(rows, columns) of a product, 0 where a value is missing; a category has one for each level."""
    found = np.ones((len(rows), 1))
    for word in term:
        if word.startswith(_MASK):
            own = ~rows[word.split(_MASK)[1:]].isna().to_numpy().any(axis=1, keepdims=True)
        elif word in rows and hasattr(rows[word], "cat"):
            codes = rows[word].cat.codes.to_numpy()[:, None]
            own = codes == np.arange(len(rows[word].cat.categories))
        else:
            own = np.nan_to_num(evaluate(word, rows)[:, None])
        found = (found[:, :, None] * own[:, None, :]).reshape(len(rows), found.shape[1] * own.shape[1])
    return found


def _shares(columns: Array) -> Array:
    """(rows,) the share that a row has of the best combination of columns and a constant: its leverage."""
    columns = columns - columns.mean(axis=0)
    size = np.linalg.norm(columns, axis=0)
    left, values, _ = np.linalg.svd(columns[:, size > 0] / size[size > 0], full_matrices=False)
    kept = values > 1e-10 * values.max(initial=0.0)
    return np.asarray(1 / max(len(columns), 1) + np.sum(left[:, kept] ** 2, axis=1) - 1e-9)


def _refused(why: str, remedy: str = "") -> TermError:
    return TermError(f"under secure sums, {why}.{' ' * bool(remedy)}{remedy}")
