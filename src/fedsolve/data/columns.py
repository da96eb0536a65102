"""Features, labels and owners from the columns of a csv or parquet file."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.data.layout import ColumnLayout, Columns, Wish, damaged
from fedsolve.data.text_tables import Dialect, TextSource, spelling_hint
from fedsolve.errors import DataError, did_you_mean
from fedsolve.labels import number
from fedsolve.schema import Column, Schema

LABEL_NAMES = ("label", "target", "class", "y")

_CHUNK = 4096
_DELIMITERS = (",", ";", "\t", "|")
_EMPTY = ("", "nan", "null")


@dataclass(frozen=True)
class _Places:
    features: list[int]
    label: int | None
    client: int | None


def _places(names: Sequence[str], wish: Wish) -> _Places:
    """Which columns are features, which one is the label and which one names the owner."""
    layout = wish.layout
    left = list(range(len(names)))
    client = None
    if layout.client is not None and (wish.owned or layout.client in names):
        client = column_position(names, layout.client, "client column")
        left.remove(client)
    for wanted in layout.drop:
        dropped = column_position(names, wanted, "column to drop")
        if dropped in left:
            left.remove(dropped)
    if not left:
        raise DataError(f"no feature columns are left of {', '.join(map(repr, names))}.")
    lowered = {names[index].strip().lower(): index for index in reversed(left)}
    label = next((lowered[name] for name in LABEL_NAMES if name in lowered), None)
    if layout.label is not None:
        label = column_position(names, layout.label, "label column")
        if label not in left:
            raise DataError(f"the label column '{names[label]}' is also the client column or dropped.")
    elif wish.labelled:
        label = left[-1] if label is None else label
    elif len(left) == wish.width:
        label = None
    if label is not None:
        left.remove(label)
    unnamed = [index for index in left if not names[index].strip()]
    if unnamed:
        raise DataError(
            f"column {unnamed[0]} has no name; it may be a row number. Name it, or leave it out "
            f"with --drop {unnamed[0]} (?drop={unnamed[0]} in an address)."
        )
    if wish.width is not None and len(left) != wish.width:
        raise DataError(
            f"the model takes {wish.width} features, but {len(left)} columns are left for them. "
            "Name the label column (--label, in an address ?label=), or leave columns out (--drop, ?drop=)."
        )
    return _Places(left, label if wish.labelled else None, client)


def _plain_schema(names: Sequence[str], places: _Places) -> Schema | None:
    """The columns that are used, as numbers in their order; all others as unused."""
    used = [names[index] for index in places.features]
    label, client = (None if place is None else names[place] for place in (places.label, places.client))
    named = [*used, *(name for name in (label, client) if name is not None)]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise DataError(
            f"more than one column is called {', '.join(map(repr, twice))}. Rename them, or leave the others "
            "out by position (--drop, ?drop= in an address)."
        )
    if not used:
        return None  # what is left of the file is refused elsewhere
    left_out = [name for name in dict.fromkeys(names) if name not in named]
    columns = [Column(name, missing="refuse") for name in used]
    columns += [Column(name, "unused") for name in left_out]
    return Schema(tuple(columns), label, (), client)


def column_position(names: Sequence[str], wanted: str, what: str) -> int:
    """Where the column of this name, or at this position, stands."""
    if wanted in names:
        if names.count(wanted) > 1:
            raise DataError(f"{what} '{wanted}' is not unique: {names.count(wanted)} columns have that name.")
        return names.index(wanted)
    if re.fullmatch(r"-?\d+", wanted) and -len(names) <= int(wanted) < len(names):
        return int(wanted) % len(names)
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    raise DataError(f"no {what} '{wanted}'.{did_you_mean(wanted, names)} The columns are {shown}.")


def read_csv(path: Path, wish: Wish) -> Columns:
    """What `wish` asks for; labels and owners as text.

    pyarrow reads it where it is there and can; else Python does, and names what is wrong.
    """
    layout = wish.layout
    source, dialect = TextSource(path), dialect_of(layout)
    with source.lines(dialect.encoding) as text:
        delimiter = _delimiter(text.readline(), layout.delimiter)
        text.seek(0)
        names = _csv_names(next(csv.reader(text, delimiter=delimiter), []), layout)
    places = _places(names, wish)
    schema = _plain_schema(names, places) if wish.learns and layout.header else None
    found = _by_arrow(source, dialect, delimiter, names, places)
    features, labels, owners = (
        _by_python(source, dialect, delimiter, names, places) if found is None else found
    )
    return features, labels, owners if wish.owned else None, schema


def dialect_of(layout: ColumnLayout, delimiter: str | None = None) -> Dialect:
    """How a file of this layout spells its cells."""
    return Dialect(
        delimiter or layout.delimiter, layout.decimal, layout.thousands, layout.encoding, layout.header
    )


def _by_arrow(
    source: TextSource, dialect: Dialect, delimiter: str, names: Sequence[str], places: _Places
) -> tuple[Array, Array | None, Array | None] | None:
    """Features, labels and owners by pyarrow; None where it is not there, or the file needs a second look."""
    if dialect.thousands or any("\n" in name or "\r" in name for name in names):
        return None
    try:
        import pyarrow as arrow
        from pyarrow import csv as arrow_csv
    except ImportError:
        return None
    kinds = {str(place): arrow.float64() for place in places.features}
    texts = [place for place in (places.label, places.client) if place is not None]
    kinds |= {str(place): arrow.string() for place in texts}
    try:
        with arrow.input_stream(str(source.path), compression="gzip" if source.packed else None) as stream:
            table = arrow_csv.read_csv(
                stream,
                arrow_csv.ReadOptions(
                    column_names=[str(place) for place in range(len(names))],
                    skip_rows=int(dialect.header),
                    encoding=dialect.encoding,
                ),
                arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=source.quoted),
                arrow_csv.ConvertOptions(
                    column_types=kinds,
                    include_columns=list(kinds),
                    null_values=[],
                    decimal_point=dialect.decimal,
                ),
            )
    except (arrow.ArrowException, OSError, UnicodeDecodeError, LookupError):
        return None
    features: Array = np.empty((table.num_rows, len(places.features)))
    for position, place in enumerate(places.features):
        features[:, position] = table.column(str(place))
    filled = [_stripped(table.column(str(place))) for place in texts]
    if not np.isfinite(features).all() or any(column is None for column in filled):
        return None
    found = dict(zip(texts, filled, strict=True))
    return (
        features,
        None if places.label is None else found[places.label],
        None if places.client is None else found[places.client],
    )


def _stripped(column: Any) -> Array | None:
    """A column of text without spaces around it; None where a cell is empty."""
    coded = column.combine_chunks().dictionary_encode()
    words = [str(word).strip() for word in coded.dictionary.to_pylist()]
    if any(word.lower() in _EMPTY for word in words):
        return None
    spelt: Array = np.array(words, dtype=str)[coded.indices.to_numpy()]
    return spelt


def _by_python(
    source: TextSource, dialect: Dialect, delimiter: str, names: Sequence[str], places: _Places
) -> tuple[Array, Array | None, Array | None]:
    """The same, a few thousand rows at a time; what cannot be used is named by line and column."""
    blocks: list[Array] = []
    labels: list[str] = []
    owners: list[str] = []
    with source.lines(dialect.encoding) as text:
        reader = csv.reader(text, delimiter=delimiter)
        if dialect.header:
            next(reader)
        for lines, rows in _chunks(reader, names):
            blocks.append(_numbers(rows, lines, names, places.features, dialect))
            for column, cells in ((places.label, labels), (places.client, owners)):
                if column is not None:
                    cells.extend(_filled(rows, lines, names[column], column))
    features = np.concatenate(blocks) if blocks else np.empty((0, len(places.features)))
    return (
        features,
        np.array(labels, dtype=str) if places.label is not None else None,
        np.array(owners, dtype=str) if places.client is not None else None,
    )


def _delimiter(line: str, wanted: str) -> str:
    if wanted == "auto":
        return max(_DELIMITERS, key=line.count)
    wanted = {"tab": "\t", "\\t": "\t"}.get(wanted, wanted)
    if len(wanted) != 1:
        raise DataError(f"the delimiter must be one character, 'tab' or 'auto'; got {wanted!r}.")
    if line.strip() and wanted not in line:
        other = max(_DELIMITERS, key=line.count)
        if other in line:
            name = "tab" if other == "\t" else f"'{other}'"
            sign = "tab" if other == "\t" else other
            raise DataError(
                f"the first line has no {wanted!r} in it; try --delimiter {name} "
                f"(?delimiter={sign} in an address)."
            )
    return wanted


def _csv_names(first: list[str], layout: ColumnLayout) -> list[str]:
    """Column names: the first line, or 0, 1, 2, ... for a file without a header."""
    if not first:
        raise DataError("no rows at all: the file is empty.")
    numbered = [str(index) for index in range(len(first))]
    if not layout.header:
        return numbered
    if all(number(cell) is not None for cell in first) and first != numbered:
        raise DataError(
            f"the first line holds numbers ({', '.join(first[:3])}, ...), not column names. "
            "Add a header, or pass --no-header (?header=no in an address)."
        )
    return [cell.strip() for cell in first]


def _chunks(reader: Any, names: Sequence[str]) -> Iterator[tuple[list[int], list[list[str]]]]:
    lines: list[int] = []
    rows: list[list[str]] = []
    for row in reader:
        if not row:
            continue
        if len(row) != len(names):
            raise DataError(f"line {reader.line_num} has {len(row)} cells, the first line {len(names)}.")
        lines.append(reader.line_num)
        rows.append(row)
        if len(rows) == _CHUNK:
            yield lines, rows
            lines, rows = [], []
    if rows:
        yield lines, rows


def _numbers(
    rows: list[list[str]], lines: list[int], names: Sequence[str], columns: list[int], dialect: Dialect
) -> Array:
    """The feature cells of these rows as float64; the first cell that is not a finite number is named."""
    plain = dialect.plain if dialect.differs else str
    try:
        values = np.array([[plain(row[column]) for column in columns] for row in rows], dtype=np.float64)
    except ValueError:
        values = np.full((1, 1), np.nan)
    if not np.all(np.isfinite(values)):
        for row, line in zip(rows, lines, strict=True):
            for column in columns:
                _check_cell(row[column], line, names[column], dialect)
    return values


_FILL = "Fill it in, leave the row out, or say in a schema what becomes of it ('fedsolve schema')."


def _check_cell(cell: str, line: int, name: str, dialect: Dialect) -> None:
    where = f"line {line}, column '{name}'"
    if not cell.strip():
        raise DataError(f"{where}: the cell is empty. {_FILL}")
    value = number(dialect.plain(cell) if dialect.differs else cell)
    if value is None:
        hint = spelling_hint(cell, dialect) or (
            "Describe categories, dates and text with a schema ('fedsolve schema'), or leave the column out "
            "(--drop, or ?drop= in an address)."
        )
        raise DataError(f"{where}: {cell!r} is not a number. {hint}")
    if not np.isfinite(value):
        raise DataError(f"{where}: {cell!r} is NaN or infinite. Remove or impute it.")


def _filled(rows: list[list[str]], lines: list[int], name: str, column: int) -> list[str]:
    cells = [row[column].strip() for row in rows]
    for cell, line in zip(cells, lines, strict=True):
        if cell.lower() in _EMPTY:
            raise DataError(f"line {line}, column '{name}': the cell is empty. {_FILL}")
    return cells


def read_parquet(path: Path, wish: Wish) -> Columns:
    """What `wish` asks for; labels and owners in the type of their column."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as problem:
        raise DataError(
            "parquet files need pyarrow. Install it: pip install 'fedsolve[tables]'."
        ) from problem
    try:
        with open(path, "rb") as stream:
            table = parquet.read_table(stream)
    except arrow.ArrowException as problem:
        raise damaged(path, "a parquet file", problem) from problem
    names = [str(name) for name in table.column_names]
    places = _places(names, wish)
    features = np.empty((table.num_rows, len(places.features)))
    for position, index in enumerate(places.features):
        kind = table.schema.field(index).type
        if not (
            arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)
        ):
            raise DataError(
                f"column '{names[index]}' holds {kind}, not numbers. Encode it, or leave it out "
                "(--drop, or ?drop= in an address)."
            )
        features[:, position] = _whole_column(table.column(index), names[index])
    labels = None if places.label is None else _whole_column(table.column(places.label), names[places.label])
    owners = None
    if places.client is not None and wish.owned:
        owners = _whole_column(table.column(places.client), names[places.client])
    return features, labels, owners, _plain_schema(names, places) if wish.learns else None


def _whole_column(column: Any, name: str) -> Array:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"row {row}, column '{name}': the cell is empty. {_FILL}")
    return np.asarray(column.to_pylist()) if column.type.num_fields else _primitive(column)


def _primitive(column: Any) -> Array:
    values = np.asarray(column.to_numpy())
    return values.astype(str) if values.dtype.kind == "O" else values
