"""Propose a schema from one site's table, with a remark on each column for people to review.

Left out: what looks like an identifier, what never changes, what is the label under another name,
and text with many different values. Everything else is proposed as what it looks like.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError, damaged, did_you_mean, naming
from fedsolve.labels import Task, spelled_labels, task_of
from fedsolve.tables.csv_text import PLAIN, Dialect, is_empty
from fedsolve.tables.encoder import (
    MISSING,
    category_text,
    coded_cells,
    column_array,
    moment_in,
)
from fedsolve.tables.schema import (
    DAYS_A_YEAR,
    LEFT_OUT,
    MONEY,
    NUMBER,
    SIGNS,
    Column,
    Schema,
    signed_number,
)
from fedsolve.tables.table_file import (
    LABEL_NAMES,
    ColumnLayout,
    TableFile,
    Unreadable,
    column_position,
    label_place,
)

ROWS = 100_000
"""Rows that a proposal looks at."""

_GLANCE = 2_000_000
"""Cells of a table of numbers alone that are looked at."""

_YEARS_FIRST = ("%Y/%m/%d", "%Y.%m.%d")
_DAYS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", *_YEARS_FIRST, "%d.%m.%y", "%d/%m/%y", "%m/%d/%y")
_MONTHS = ("%d-%b-%Y", "%d-%b-%y", "%d %b %Y", "%d%b%Y", "%b %d, %Y", "%d %B %Y", "%B %d, %Y")
FORMATS = (
    None,
    *_DAYS,
    *_MONTHS,
    *("%d%b%Y:%H:%M:%S", "%d-%b-%Y %H:%M:%S", "%H:%M", "%H:%M:%S"),
    *(f"{day} {time}" for time in ("%H:%M", "%H:%M:%S", "%I:%M %p") for day in _DAYS),
)
"""Formats of dates that are tried; None is ISO 8601. Of those that fit, the first is taken."""

_DASHES = ("?", "-", "--", "---", ".", "..", "*", "\\n")  # the last one is MySQL's
_ERRORS = ("#div/0!", "#value!", "#ref!", "#name?", "#num!", "#null!")  # of spreadsheets
_SPECIAL = tuple(f".{letter}" for letter in "_abcdefghijklmnopqrstuvwxyz")  # of SAS and Stata
_WORDS_FOR_IT = ("unknown", "missing", "none", "n.a.", "nd", "n/d", "k.a.", "unbekannt")
_ABSENT = frozenset((*_DASHES, *_ERRORS, *_SPECIAL, *_WORDS_FOR_IT))
"""Lower-case words for a missing number or date."""

_NO_LEVEL = frozenset(("?", ".", "..", *_ERRORS, *_SPECIAL))
"""Those that are no name of a category either."""

_NO_DAY = re.compile(r"0000\D00\D00.*|00\D00\D0000.*|.*\b9999\b.*")
"""Dates of databases that stand for a missing one."""

_NAMED = frozenset(("None", "NA"))
"""Words that are categories of their own, not missing values, in a column of categories."""

_IDENTIFIER = re.compile(r"(?i:(^|[_\W])(id|ids|uuid|guid|mrn)($|[_\W\d]))|(?<=[a-z])(Id|ID)$")
_NUMERIC = ("int", "uint", "float", "double", "halffloat", "bool")
_CODE = re.compile(r"0\d")
_CONSTANT = "constant, always"
_NESTED = "a list or a structure"
_OR_TEXT = "or make it a text"
_WORDS = 5
_FEW = 20
_NEARLY = 0.95
_MOSTLY = 0.8
_MANY_LABELS = 50


def propose(
    table: Any,
    label: str | None = None,
    client: str | None = None,
    dialect: Dialect | None = None,
    rows: int = ROWS,
    weight: str | None = None,
    task: Task | None = None,
    labels: Sequence[str] = (),
) -> Schema:
    """A schema for a file (csv, gz, parquet, "-") or a table, from its first rows.

    label: the column of the labels; found by its usual names when None. client: the column of owners.
    weight: the column that says how much a row counts. task: what the labels are; as they look when None.
    labels: instead of one, the columns of several labels a row, each 0 or 1.
    """
    if not isinstance(table, str | Path):
        return _of_texts(_texts(table, rows), label, client, weight, task, labels)
    with naming(table):
        texts = _texts(TableFile(table, dialect or Dialect()), rows)
        return _of_texts(texts, label, client, weight, task, labels)


def propose_for(
    paths: Sequence[str | Path],
    layout: ColumnLayout,
    task: Task | None = None,
    fewest: int | None = None,
    glance: bool = True,
) -> Schema | None:
    """A schema to train with on all these files; None if every column is a complete number of which nothing
    is to be told.

    fewest: where others are told of it, which they are of numbers alone too; see `_tellable`. glance: whether
    a table of numbers alone is looked at. The label is the column that `layout` names, one of the usual name,
    or the last.
    """
    files = []
    with naming(paths[0]):
        files.append(TableFile(paths[0], layout))
        names = files[0].names
        dropped = {names[column_position(names, wanted, "column to drop")] for wanted in layout.drop}
        client = layout.client and names[column_position(names, layout.client, "client column")]
        left = [place for place, name in enumerate(names) if name not in {*dropped, client}]
        if not left:
            return None
        labels = [names[column_position(names, one, "label column")] for one in layout.label_names]
        label = None if labels else names[label_place(names, left, layout.label) or 0]
    features = [name for name in names if name not in {*dropped, client, label, *labels}]
    for path in paths[1:]:
        with naming(path):
            files.append(TableFile(path, layout))
    numbers = fewest is None and all(_all_numbers(file, features) for file in files)
    if numbers and not glance:
        return None
    rows = max(1000, _GLANCE // len(names)) if numbers else ROWS
    found = []
    for file in files:
        with naming(file.path):
            found.append(_texts(file, rows))
    kept = [name for name in names if name not in dropped]
    whole = [each for each in found if set(kept) <= set(each)]  # others are refused when they are read
    texts = {name: np.concatenate([each[name] for each in whole]) for name in kept}
    with naming(paths[0]):
        proposed = _of_texts(texts, label, client, None, task, labels)
    # A constant does no harm, and a number is plain where there is nothing to tell about it.
    told = re.compile(r"\bleak\b|\babsent\b")
    if numbers and all(
        not column.absent and not told.search(column.remark)
        if column.kind == "number"
        else column.remark.startswith(f"unused: {_CONSTANT}")
        for column in proposed.columns
    ):
        return None
    if fewest is not None:
        proposed = _tellable(proposed, texts, fewest)
    others = tuple(Column(name, "unused", remark="unused: dropped") for name in sorted(dropped))
    return replace(proposed, columns=proposed.columns + others)


def _tellable(proposed: Schema, texts: dict[str, Array], fewest: int) -> Schema:
    """What may be told of a proposal: categories, classes and words for missing values that so many rows
    have; words that everybody uses; and rounded places of columns that have ten times as many values.
    Remarks, which stay here, say what is left out and name the categories that are not told.
    """
    columns = []
    for column in proposed.columns:
        cells = texts[column.name].tolist()
        often = {text for text, count in Counter(cells).items() if count >= fewest}
        usual = [text for text in column.absent if text.lower() in _ABSENT or NUMBER.fullmatch(text)]
        absent = tuple(text for text in column.absent if text in usual or text in often)
        kept = tuple(category for category in column.categories if category in often)
        rare = [category for category in column.categories if category not in often]
        remark = column.remark if column.kind in LEFT_OUT else ""
        if rare:
            remark = f"not told, each in fewer than {fewest} rows: {_few_of(rare)}"
        if column.kind == "category" and not kept:
            column = Column(column.name, "unused")
        elif column.kind == "number" and sum(text not in MISSING for text in cells) < 10 * fewest:
            column = replace(column, reference=0.0, scale=1.0)
        columns.append(replace(column, absent=absent, categories=kept, remark=remark))
    if proposed.labels:
        return replace(proposed, columns=tuple(columns))
    labels = spelled_labels([text for text in texts[str(proposed.label)] if not is_empty(text)])
    known, counts = np.unique(labels, return_counts=True)
    classes = tuple(known[counts >= fewest].tolist()) if proposed.classes else ()
    return replace(proposed, columns=tuple(columns), classes=classes if len(classes) > 1 else ())


def merged(proposals: Mapping[str, Schema]) -> Schema:
    """One schema, without classes, from the proposals of several sites, by name.

    A column that all sites have is used where half of them or more would use it, all of those for the same
    kind, and none takes it for an identifier; of all others it is said why they are left out.
    """
    labels = {schema.label_columns: name for name, schema in proposals.items()}
    tasks = {schema.task for schema in proposals.values()}
    if len(labels) > 1:
        told = "; ".join(f"{', '.join(map(repr, label))} ({name})" for label, name in labels.items())
        raise DataError(f"the sites' label columns have different names: {told}. Rename them.")
    every = [{column.name: column for column in schema.columns} for schema in proposals.values()]
    names = dict.fromkeys(name for columns in every for name in columns)
    columns = tuple(
        _merged(name, {site: own.get(name) for site, own in zip(proposals, every, strict=True)})
        for name in names
    )
    # Few different numbers at one site may look like classes there.
    several = next(iter(proposals.values())).labels
    label = None if several else labels.popitem()[0][0]
    task: Task | None = "regression" if "regression" in tasks else None
    return Schema(columns, label, task=task, labels=several)


def alone(proposal: Schema) -> Schema:
    """The schema of a run in which all sites propose the same as this one."""
    made = merged({"this site": proposal})
    return replace(made, classes=proposal.classes, task=None if proposal.classes else made.task)


def _merged(name: str, found: Mapping[str, Column | None]) -> Column:
    """One column from what several sites propose, by site."""
    there = [column for column in found.values() if column is not None]
    if any(column.kind == "identifier" for column in there):
        return Column(name, "identifier", remark="unused: an identifier")
    users = [column for column in there if column.kind != "unused"]
    kinds = dict.fromkeys(column.kind for column in users)
    why = ""
    if len(there) < len(found):
        lacking = [site for site, column in found.items() if column is None]
        why = f"{_few_of(lacking)} {'do' if len(lacking) > 1 else 'does'} not have it"
    elif 2 * len(users) < len(found):
        idle = [site for site, column in found.items() if column is not None and column.kind == "unused"]
        why = f"{_few_of(idle)} {'leave' if len(idle) > 1 else 'leaves'} it out"
    elif len(kinds) > 1:
        at = {kind: [site for site, one in found.items() if one and one.kind == kind] for kind in kinds}
        told = " and ".join(f"a {kind} at {_few_of(sites)}" for kind, sites in at.items())
        why = f"it is {told}; give all sites one schema"
    elif len({column.format for column in users}) > 1:
        why = f"dates are written as {' and as '.join(sorted({str(c.format or 'ISO 8601') for c in users}))}"
    elif len({"%" in column.signs for column in users}) > 1:
        why = "some sites write it with a % sign"
    if why:
        return Column(name, "unused", remark=f"unused: {why}")
    placed = [column for column in users if (column.reference, column.scale) != (0.0, 1.0)] or users
    middle = sorted(placed, key=lambda column: (column.reference, column.scale))[len(placed) // 2]
    rules = [column.missing for column in users]
    return replace(
        middle,
        # A site of which nothing is missing today, or that left the column out, may have a gap tomorrow.
        missing="flag"
        if "flag" in rules or (len(users) < len(found) and middle.kind != "text")
        else rules[0],
        absent=tuple(sorted({text for column in users for text in column.absent})),
        signs="".join(sign for sign in SIGNS if any(sign in column.signs for column in users)),
        categories=tuple(sorted({text for column in users for text in column.categories})),
    )


def _few_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])} and {len(names) - 5} more" if len(names) > 6 else ", ".join(names)


def propose_columns(
    paths: Sequence[str | Path], dialect: Dialect, categories: Collection[str], asked: Callable[[str], bool]
) -> tuple[Column, ...]:
    """What columns of all these files are that are asked about: categories, or as they look. Text of many
    different values is unused.
    """
    found: dict[str, list[Array]] = {}
    for path in paths:
        with naming(path):
            every = _texts(TableFile(path, dialect), 10 * ROWS)
        for name in filter(asked, every):
            found.setdefault(name, []).append(every[name])

    def column(name: str, texts: Array) -> Column:
        look = _Look(name, texts)
        if not look.counts:
            return Column(name)
        if name not in categories:
            if (plain := _number_column(look, texts) or _date_column(look, texts)) is not None:
                return plain
            if len(look.counts) > _MANY_LABELS:
                return Column(name, "unused", remark=f"unused: {_many(look)}")
        look = _Look(name, texts, (cell for cell in look.counts if cell.lower() in _NO_LEVEL))
        return Column(
            name, "category", categories=tuple(look.counts), absent=look.absent, remark=look.remark()
        )

    return tuple(column(name, np.concatenate(parts)) for name, parts in found.items())


def summary(schema: Schema, levels: bool = False) -> list[str]:
    """The kinds of the columns, what is left out and why, in a few lines; levels: with the categories."""
    lines = []
    titles = {"number": "numbers", "category": "categories", "date": "dates", "text": "text"}
    for kind, title in titles.items():
        names = [
            f"{column.name} ({_few_of(column.categories)}; others as one)" * (levels and kind == "category")
            or column.name
            for column in schema.used
            if column.kind == kind
        ]
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        lines += [f"{title}: {', '.join(names[:12])}{more}"] if names else []
    for column in schema.columns:
        if column.remark:
            told = column.remark.removeprefix("unused: ")
            lines.append(f"{'left out' if column.kind in LEFT_OUT else 'note'}: '{column.name}': {told}")
    return lines


def _all_numbers(file: TableFile, names: list[str]) -> bool:
    """Whether all cells of these columns are numbers."""
    with naming(file.path):
        places = {name: place for place, name in enumerate(file.names)}
        wanted = {name: Column(name) for name in names if name in places}
        try:
            table = file.cells(wanted, places)
        except (Unreadable, DataError):
            return False
        columns = [(table.column(name), str(table.column(name).type)) for name in wanted]
        return all(
            all(map(NUMBER.fullmatch, cells.unique().to_pylist()))
            if kind.startswith("dictionary")
            else kind.startswith(_NUMERIC) and not cells.null_count
            for cells, kind in columns
        )


def _of_texts(
    texts: dict[str, Array],
    label: str | None,
    client: str | None,
    weight: str | None,
    task: Task | None = None,
    several: Sequence[str] = (),
) -> Schema:
    names = list(texts)
    if label is None and not several:
        lowered = {name.lower(): name for name in reversed(names)}
        label = next((lowered[name] for name in LABEL_NAMES if name in lowered), None)
        if label is None:
            raise DataError(
                f"which column is the label? None is called {' or '.join(LABEL_NAMES)}; there are "
                f"{', '.join(names[:12])}{', ...' * (len(names) > 12)}. Name it (label)."
            )
    own = [(name, "label") for name in several or (label,)]
    for wanted, what in (*own, (client, "client"), (weight, "weight")):
        if wanted is not None and wanted not in names:
            raise DataError(f"no {what} column '{wanted}'.{did_you_mean(wanted, names)}")
    if not names or not len(texts[names[0]]):
        raise DataError("no rows at all. Check the file or the query that made it.")
    if several:
        classes: tuple[Any, ...] = ()
        together = zip(*(texts[name] for name in several), strict=True)
        labels = np.array([" ".join(row) for row in together], dtype=object)
    else:
        labels = texts[str(label)]
        known = spelled_labels([text for text in labels if not is_empty(text)])
        classes = ()
        if (task or task_of(known, f"the label column '{label}'")) != "regression":
            classes = tuple(np.unique(known).tolist())
            if len(classes) < 2:
                raise DataError(
                    f"the label column '{label}' has one value only ({[*classes]}); two classes are needed."
                )
    left_out = {label, client, weight, *several}
    columns = [_proposed(name, texts[name], labels) for name in names if name not in left_out]
    if not any(column.kind not in LEFT_OUT for column in columns):
        told = "; ".join(f"'{column.name}': {column.remark}" for column in columns)
        few = f" {len(labels)} rows are too few to tell." if len(labels) < _FEW else ""
        raise DataError(f"no column looks like one to learn from: {told or 'the label is alone'}.{few}")
    found: Task | None = None if classes else "regression"
    return Schema(tuple(columns), label, classes, client, None, weight, found, tuple(several))


def _texts(table: Any, rows: int) -> dict[str, Array]:
    """The first cells of every column of a file or a table as text, numbers written as 1234.5."""
    own = Dialect(decimal=".", thousands="")
    if isinstance(table, TableFile):
        own = table.dialect if table.is_csv else own
        twice = sorted({name for name in table.names if table.names.count(name) > 1})
        if twice:
            raise DataError(f"more than one column is called {', '.join(map(repr, twice))}; rename them.")
        places = {name: place for place, name in enumerate(table.names)}
        try:
            table = table.cells(places, places, table.names, rows=rows)
        except Unreadable as problem:
            faults = table.faults()
            raise faults.error() if faults.found else damaged(table.path, "a csv file", problem) from problem
    if hasattr(table, "to_pandas"):
        columns = {name: table.column(name).slice(0, rows).combine_chunks() for name in table.column_names}
    else:
        columns = {str(name): column_array(table[name][:rows]) for name in table}
    found = {}
    for name, cells in columns.items():
        spelled = []
        try:
            codes, distinct = coded_cells(cells)
        except DataError:
            codes, distinct = np.zeros(len(cells), dtype=np.intp), [_NESTED]
        for cell in distinct:
            text = cell.isoformat() if hasattr(cell, "isoformat") else category_text(cell)
            if (own.decimal, own.thousands) != PLAIN and own.value(text) is not None:
                text = own.plain(text)
            spelled.append("" if text == "NaT" else text)
        found[name] = np.array([*spelled, ""], dtype=object)[codes]
    return found


class _Look:
    """What a column holds: its distinct cells that are not missing, sorted, with their counts.

    absent: texts that stand for a missing value here, other than the usual ones. signs: around its numbers.
    there: how many of the rows have a value. rule: for missing values, a flag column if some are missing.
    """

    def __init__(self, name: str, texts: Array, absent: Iterable[str] = (), signs: str = "") -> None:
        self.name, self.signs = name, signs
        self.absent = tuple(sorted(absent))
        gone, found = MISSING.union(self.absent), Counter(texts.tolist())
        self.counts = {text: found[text] for text in sorted(found) if text not in gone}
        self.rows, self.there = len(texts), sum(self.counts.values())
        self.rule = "flag" if self.there < self.rows else ""

    def remark(self, *noticed: str) -> str:
        parts = [*noticed]
        if self.absent:
            parts.append(f"taken as missing: {', '.join(map(repr, self.absent))}")
        if self.signs:
            parts.append(f"the sign{'s' * (len(self.signs) > 1)} {' '.join(self.signs)} left out")
        if self.there < self.rows:
            parts.append(f"{self.rows - self.there} of {self.rows} missing")
        if self.rows < 2 * _WORDS:
            parts.append(f"{self.rows} rows are too few to be sure")
        return "; ".join(part for part in parts if part)


def _proposed(name: str, texts: Array, labels: Array) -> Column:
    look = _Look(name, texts)
    pairs = set(zip(texts.tolist(), labels.tolist(), strict=True))
    known = {(text, label) for text, label in pairs if text in look.counts and label}
    values, classes = ({pair[side] for pair in known} for side in (0, 1))
    why = ""
    if not look.counts:
        why = "no values at all"
    elif len(look.counts) == 1 and not _NAMED.intersection(texts.tolist()):
        why = f"{_CONSTANT} {next(iter(look.counts))!r}"
    elif len(known) == len(values) == len(classes) > 1 and _is_the_label(known, len(labels)):
        why = "leak: one value for each label and one label for each value, so it is the label"
    if why:
        return Column(name, "unused", remark=f"unused: {why}")
    if all(re.fullmatch(r"(19|20)\d{6}(\d{6})?", text) for text in look.counts):  # 20240131 is a date
        for format_ in ("%Y%m%d", "%Y%m%d%H%M%S"):
            if all(moment_in(text, format_) for text in look.counts):
                return _dates(look, format_, False)
    if _is_identifier(look):
        seen = f"{len(look.counts)} different values in {look.there} rows"
        return Column(name, "identifier", remark=f"unused: looks like an identifier ({seen})")
    leak = ""
    often = look.there >= max(_FEW, 5 * len(look.counts))
    if often and len(known) == len(look.counts) and len(classes) > 1:
        leak = f"a leak? Each of its {len(look.counts)} values goes with one label only"
    numbers = _number_column(look, texts, leak)
    return numbers or _date_column(look, texts) or _text_column(look, texts, leak)


def _text_column(look: _Look, texts: Array, leak: str) -> Column:
    words = sum(len(cell.split()) for cell in look.counts) / len(look.counts)
    many = len(look.counts) > max(_FEW, min(_MANY_LABELS, look.there // 20))
    why = _many(look) if many else ""
    if words >= 4 or (words >= 3 and why.endswith(_OR_TEXT)):
        told = look.remark(f"looks like text, {words:.0f} words on average; hashed")
        return Column(look.name, "text", remark=told)
    if many:
        return Column(look.name, "unused", remark=f"unused: {why}")
    # A word such as None or NA is a value of its own among others; where nothing stands, it is missing.
    named = {text: count for text, count in Counter(texts.tolist()).items() if text in _NAMED}
    if named:
        look.counts = dict(sorted({**look.counts, **named}.items()))
        look.there += sum(named.values())
        look.rule = "flag" if look.there < look.rows else ""
    noticed = f"{', '.join(map(repr, sorted(named)))} taken for a category" if named else ""
    if len(look.counts) > 2 and all(map(_date_like, look.counts)):
        noticed = "dates, but not all of one known form; write them as 2024-01-31 if they are to be dates"
    remark = look.remark(noticed, leak)
    return Column(look.name, "category", None, tuple(look.counts), look.rule, remark=remark)


def _many(look: _Look) -> str:
    """Why many different texts are left out, and what to do about it."""
    others = [cell for cell in look.counts if not NUMBER.fullmatch(cell)]
    seen = f"many values ({len(look.counts)} different ones in {look.there} rows)"
    if not others:
        return f"{seen} with zeros in front or very many digits: codes. List the frequent ones as categories"
    if len(others) > _FEW and all(re.match(r"\W*\d", cell) and not _date_like(cell) for cell in look.counts):
        return f"{seen} with numbers in them, such as {others[0]!r}: leave nothing but numbers in the cells"
    if 2 * len(others) < len(look.counts):
        some = f"{len(others)} different cells are none, such as {', '.join(map(repr, others[:3]))}"
        return f"nearly numbers, but {some}. Correct them, or make it a number with these cells under absent"
    return f"{seen}; list the frequent ones as categories, {_OR_TEXT}"


def _is_identifier(look: _Look) -> bool:
    numbers = _numbers(look.counts)
    whole = numbers is not None and all(value.is_integer() for value in numbers)
    single = numbers is None and all(len(text.split()) <= 2 for text in look.counts)
    spelled = any(signed_number(text) and not text.isdecimal() for text in look.counts)
    if not whole and (spelled or not single):
        return False
    if _IDENTIFIER.search(look.name) and len(look.counts) >= max(_FEW, look.there // 10):
        return True  # it may repeat: a patient has several rows
    if whole:
        return numbers_the_rows(np.repeat(numbers, [*look.counts.values()]))  # type: ignore[arg-type]
    if all(re.fullmatch(r"\W*\d[\d.,'’ ]*\s*[^\W\d]{0,8}\W?", text) for text in look.counts):
        return False  # numbers in a form, or with a unit, that is not known
    nearly_unique = look.there >= _FEW and len(look.counts) >= _NEARLY * look.there
    return nearly_unique and _date_format([*look.counts]) is None


def numbers_the_rows(values: Array) -> bool:
    """Whether these number the rows: whole, nearly all different, close together, and no years.

    Amounts of money may be all different, too, but they lie far apart.
    """
    if len(values) < _FEW or not np.all(values == np.rint(values)):
        return False
    low, high = values.min(), values.max()
    near = high - low < 3 * len(values) and not 1900 <= low <= high <= 2100
    return bool(near and len(np.unique(values)) >= _NEARLY * len(values))


def _date_like(text: str) -> bool:
    """Whether a text has a year and something besides it."""
    return bool(re.search(r"(?<!\d)(19|20)\d\d(?!\d)", text)) and len(text) > 5


def _number_column(look: _Look, texts: Array, leak: str = "") -> Column | None:
    """The column as numbers: with signs around them, and with words or sentinels that mean missing."""
    read = {cell: found for cell in look.counts if (found := signed_number(cell)) is not None}
    others = look.counts.keys() - read.keys()
    if _are_codes(read):
        return None
    used = {sign for _, around in read.values() for sign in around}
    if "%" in used and not all("%" in around for _, around in read.values()):
        return None  # 97 % and 0.97 in one column cannot be told apart
    if len(used.intersection(MONEY)) > 1:
        return None
    if others and not _few_strangers(look, others):
        return None
    if 2 * sum(look.counts[cell] for cell in read) < look.there:
        return None
    counts: Counter[float] = Counter()
    for cell, (value, _) in read.items():
        counts[value] += look.counts[cell]
    # A number such as -99 or -999 stands for a missing one: it repeats, and no other is below zero.
    below = [value for value in counts if value < 0]
    if len(below) == 1 and counts[below[0]] > 1 and len(counts) > 2:
        others |= {text for text in [f"{below[0]:g}"] if re.fullmatch(r"-(9+|8+|7+)", text)}
    look = _Look(look.name, texts, others, "".join(sign for sign in SIGNS if sign in used))
    values = np.repeat([read[cell][0] for cell in look.counts], [*look.counts.values()])
    few = 2 < len(look.counts) <= 10 and bool(np.all(values == np.rint(values)))
    codes = f"only {len(look.counts)} different whole numbers; a category if they are codes" if few else ""
    # A number such as 999 that repeats far above all others may mean missing, too.
    distinct, times = np.unique(values, return_counts=True)
    seen = ""
    if len(distinct) > 2 and distinct[0] == -1 and times[0] > 1 and distinct[1] >= 0:
        seen = f"-1 occurs {times[0]} times, alone below zero"
    elif len(distinct) > 2 and times[-1] > 1 and re.fullmatch(r"9{2,}|1e\+\d+", f"{distinct[-1]:g}"):
        far = distinct[-1] >= 3 * max(abs(distinct[-2]), abs(distinct[0]))
        seen = f"{distinct[-1]:g} occurs {times[-1]} times, far above the others" * bool(far)
    told = f"{seen}: list it under absent if it means missing" if seen else ""
    remark = look.remark(codes, told, leak)
    reference, scale = rounded_place(values)
    return Column(
        look.name,
        missing=look.rule,
        reference=reference,
        scale=scale,
        absent=look.absent,
        signs=look.signs,
        remark=remark,
    )


def _few_strangers(look: _Look, others: Collection[str]) -> bool:
    """Whether few enough of these cells are unknown words, so that all may count as missing.

    Words without a digit may be more: they are no values that were written otherwise.
    """
    strange = [cell for cell in others if cell.lower() not in _ABSENT]
    share = _NEARLY if any(re.search(r"\d", cell) for cell in strange) else _MOSTLY
    return len(strange) <= _WORDS and sum(look.counts[cell] for cell in strange) <= (1 - share) * look.there


def _is_the_label(pairs: Collection[tuple[str, str]], rows: int) -> bool:
    """Whether values and labels that go together one by one do so too often for it to be chance."""
    if 2 * len(pairs) <= rows >= _WORDS:
        return True
    # Numbers that hardly repeat go with each other by chance: is the one the other in another unit?
    numbers = [_numbers(side) for side in zip(*pairs, strict=True)]
    return len(pairs) > _WORDS and None not in numbers and abs(np.corrcoef(numbers)[0, 1]) > 1 - 1e-9  # type: ignore[arg-type]


def _numbers(texts: Collection[str]) -> list[float] | None:
    """The texts as numbers without signs, or None."""
    if _are_codes(texts) or not all(map(NUMBER.fullmatch, texts)):
        return None
    return [float(text) for text in texts]


def _are_codes(texts: Collection[str]) -> bool:
    """Whether digits are names: 007 is a code, and so are numbers so long that float64 takes two for one."""
    long = [text for text in texts if len(text) > 15 and text.isdecimal()]
    return any(map(_CODE.match, texts)) or len(set(map(float, long))) < len(long)


def rounded_place(values: Array) -> tuple[float, float]:
    """Rounded location (two significant digits) and spread (one digit) of the values.

    Where they lie far from zero compared with their spread, more digits of the place are kept: as many as
    bring it within some ten spreads of the values.
    """
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    spread = float(high - low) / 2.56 or float(np.std(values)) or 1.0
    scale = float(f"{spread:.0e}")
    step = 10.0 ** (math.floor(math.log10(abs(middle))) - 1) if middle else 1.0
    step = min(step, 10.0 ** (math.floor(math.log10(scale)) + 1))
    return float(f"{round(float(middle) / step) * step:.12g}"), scale


def _date_column(look: _Look, texts: Array) -> Column | None:
    """The column as dates, of which a few may be words; None where they are of no one format."""
    absent = {cell for cell in look.counts if cell.lower() in _ABSENT or _NO_DAY.fullmatch(cell)}
    there = [cell for cell in look.counts if cell not in absent]
    fitting = _date_format(there) if there else None
    if fitting is None and there:  # a word now and then
        read = [[cell for cell in there if moment_in(cell, format_)] for format_ in FORMATS]
        most = max(read, key=len)
        others = set(there) - set(most)
        if most and len(most) > len(others) and _few_strangers(look, others):
            absent, fitting = absent | others, _date_format(most)
    return None if fitting is None else _dates(_Look(look.name, texts, absent), *fitting)


def _date_format(texts: Sequence[str]) -> tuple[str | None, bool] | None:
    """The format that all these texts have, and whether another one fits as well."""
    fitting = [format_ for format_ in FORMATS if all(moment_in(text, format_) for text in texts)]
    return (fitting[0], len(fitting) > 1) if fitting else None


def _dates(look: _Look, format_: str | None, ambiguous: bool) -> Column:
    years = sorted(moment.year for text in look.counts if (moment := moment_in(text, format_)))
    start = date(years[len(years) // 2], 1, 1)
    remark = f"looks like a date, {format_ or 'ISO 8601'}"
    if format_ is not None and "%y" in format_:
        remark += "; of the years, 00 to 68 are read as 2000 to 2068"
    if ambiguous:
        remark += "; another format fits as well (day and month?): check it"
    return Column(
        look.name,
        "date",
        missing=look.rule,
        reference=float((start - date(1970, 1, 1)).days),
        scale=DAYS_A_YEAR,
        format=format_,
        absent=look.absent,
        remark=look.remark(remark),
    )
