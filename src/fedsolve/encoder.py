"""Raw columns as features, by the schema alone: the same bits at every site and on every machine.

* A number is itself, NaN where it is missing; True and False are 1 and 0.
* A date is (days since the reference) / scale, NaN where it is missing. A time with an offset counts in UTC.
* A category is one column of 0 and 1 for each value of the schema, and a last one for every other value.
* A text is its words, hashed: words are runs of letters, digits and underscores of the text in Unicode's
  compatible form (NFKC) without case. BLAKE2b (8 bytes) of a word modulo `buckets` names its feature, the top
  bit its sign; the row of signed counts is divided by its length, so that long texts weigh as much as short
  ones. Text without words is all zeros.

A cell is missing when it is null, NaN or one of `MISSING`, unless the schema lists that very text as a
category. Tables may be a mapping of arrays, a pandas DataFrame or a pyarrow Table; the latter two are never
imported here.
"""

from __future__ import annotations

import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import CategoryWarning, DataError
from fedsolve.schema import Column, Schema

MISSING = frozenset(
    ("", "#N/A", "#N/A N/A", "#NA", "-NaN", "-nan", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan")
) | {"null"}
"""Texts that stand for a missing value."""

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
"""How a cell spells a number; neither underscores nor infinity."""

_BLOCK = 16384
_EXAMPLES = 3
_MANY = 0.1
"""Share of a column's cells from which on values of no category are worth a word: rare ones are grouped."""
_DAY = 86_400_000_000
_WHOLE = re.compile(r"([+-]?(?:0|[1-9]\d{0,17}))\.0*")
_WORDS = re.compile(r"\w+")


def column_names(table: Any) -> list[str]:
    """The names of a table's columns, whatever kind of table it is."""
    names = table.column_names if hasattr(table, "column_names") else table.keys()
    return [str(name) for name in names]


def is_table(value: Any) -> bool:
    """Whether this has named columns: a DataFrame, a pyarrow Table or a mapping."""
    return hasattr(value, "column_names") or isinstance(value, Mapping) or hasattr(value, "columns")


def encode(
    schema: Schema, table: Any, labelled: bool = False, extra: Literal["refuse", "ignore"] = "refuse"
) -> Array:
    """The features (rows, schema.width) of a table, float64, NaN where a number or a date is missing.

    Columns are found by name. What does not fit is refused, all columns at once; see `Schema.check_columns`.
    """
    if schema.extractor is not None:
        raise DataError("this schema describes features of images; a table has none.")
    schema.check_columns(column_names(table), labelled, extra)
    encoder = _Encoder(schema)
    blocks = list(_blocks(schema, table))
    features = np.zeros((sum(rows for rows, _ in blocks), schema.width))
    first = 0
    for rows, columns in blocks:
        encoder.write(columns, features[first : first + rows], first)
        first += rows
    encoder.check()
    encoder.warn_of_strangers(len(features))
    return features


def _blocks(schema: Schema, table: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The used columns, some thousand rows at a time, so that a block of features stays in the cache."""
    wanted = [column.name for column in schema.used]
    if hasattr(table, "to_batches"):
        for batch in table.select(wanted).unify_dictionaries().to_batches():
            yield batch.num_rows, {name: batch.column(name) for name in wanted}
        return
    columns = {name: _array(table[name]) for name in wanted}
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        told = ", ".join(f"'{name}' {len(column)}" for name, column in columns.items())
        raise DataError(f"columns must have as many rows as each other; these have {told}.")
    rows = lengths.pop()
    for start in range(0, rows, _BLOCK):
        stop = min(start + _BLOCK, rows)
        yield stop - start, {name: column[start:stop] for name, column in columns.items()}


def _array(values: Any) -> Array:
    """A column of a mapping or a DataFrame as an array: numbers, times, or Python objects."""
    if hasattr(values, "to_numpy"):
        kind = str(getattr(values, "dtype", ""))
        if kind.startswith("datetime64"):  # with a time zone pandas would give objects
            values = values.to_numpy(dtype="datetime64[us]")
        elif kind[:1] in "IUF" and hasattr(values, "isna"):  # pandas' numbers that may be missing
            values = values.to_numpy(dtype=np.float64, na_value=np.nan)
        else:
            values = values.to_numpy()
    array = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=object)
    if array.ndim != 1:
        raise DataError(f"a column has one value per row; got an array of shape {array.shape}.")
    return array


@dataclass
class _Faults:
    """What is wrong with a column: how many cells, and the first of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, rows: Array, say: Callable[[int], str]) -> None:
        self.count += len(rows)
        for row in rows[: _EXAMPLES - len(self.examples)]:
            self.examples.append(say(int(row)))


@dataclass
class _Coded:
    """Cells as positions in a list of their different values; -1 where null."""

    codes: Array
    values: list[Any]


class _Encoder:
    """Writes blocks of rows and gathers what is wrong with them, by column."""

    def __init__(self, schema: Schema) -> None:
        self._columns = schema.places("number", "category", "date", "text")
        self._faults: dict[str, _Faults] = {}
        self._known: dict[str, dict[Any, Any]] = {column.name: {} for column in schema.used}
        self._words: dict[str, tuple[int, int]] = {}
        self._strangers: dict[str, _Faults] = {}

    def write(self, block: Mapping[str, Any], out: Array, first: int) -> None:
        """Encode these cells into `out`, which is zero; `first` is the number of the first row."""
        for place, column in self._columns:
            part = out[:, place : place + len(column.names)]
            cells = block[column.name]
            if column.kind in ("number", "date"):
                self._write_numbers(column, cells, part, first)
            elif column.kind == "category":
                self._write_category(column, _coded(cells), part, first)
            else:
                self._write_text(column, _coded(cells), part, first)

    def check(self) -> None:
        """Refuse what was written if any cell could not be used."""
        if self._faults:
            told = "; ".join(
                f"column '{name}': {faults.count} cell{'s' * (faults.count > 1)} "
                f"({', '.join(faults.examples)}{', ...' * (faults.count > len(faults.examples))})"
                for name, faults in self._faults.items()
            )
            raise DataError(
                f"values do not fit the schema: {told}. Mend the cells, or change the kind of the column or "
                "its rule for missing values at all sites."
            )

    def warn_of_strangers(self, rows: int) -> None:
        """Say which columns hold many values that no category has: they all count as the same one."""
        for name, found in self._strangers.items():
            if found.count > _MANY * rows:
                warnings.warn(
                    f"column '{name}': {found.count} of {rows} values are none of its categories "
                    f"({', '.join(found.examples)}{', ...' * (found.count > len(found.examples))}) and "
                    "count as 'other'. If they should not, mend the cells, or add the categories to the "
                    "schema and train again.",
                    CategoryWarning,
                    stacklevel=3,
                )

    def _write_numbers(self, column: Column, cells: Any, out: Array, first: int) -> None:
        values = _direct(column, cells)
        if values is None:
            coded = _coded(cells)
            known = self._known[column.name]
            read = _number if column.kind == "number" else _date(column)
            parsed = np.array([*(_remember(known, value, read) for value in coded.values), math.nan])
            values = parsed[coded.codes]
        if math.isfinite(values.sum()):  # one look at most columns: nothing missing, nothing wrong
            out[:, 0] = (values - column.reference) / column.scale if column.kind == "date" else values
            return
        missing = np.isnan(values)
        # Infinity marks what cannot be read, and what is infinite cannot be used either.
        wrong = np.flatnonzero(np.isinf(values))
        what = "number" if column.kind == "number" else "date"
        if len(wrong):
            self._fault(column).add(
                wrong, lambda row: f"row {first + row}: {_cell(cells, row)!r} is not a {what}"
            )
        out[:, 0] = (values - column.reference) / column.scale if column.kind == "date" else values
        self._missing(column, missing, out, first)

    def _write_category(self, column: Column, coded: _Coded, out: Array, first: int) -> None:
        known = self._known[column.name]
        if not known:
            known.update({category: number for number, category in enumerate(column.categories)})
        other = len(column.categories)
        absent = other + 1 if column.missing == "flag" else (other if column.missing == "other" else -1)

        def place(value: Any) -> int:
            text = category_text(value)
            number: int = known.get(text, absent if text in MISSING else other)
            return number

        places = np.array([*(place(value) for value in coded.values), absent], dtype=np.intp)[coded.codes]
        texts = [category_text(value) for value in coded.values]
        strange = np.array([*(text not in known and text not in MISSING for text in texts), False])
        if strange.any():
            rows = np.flatnonzero(strange[coded.codes])
            found = self._strangers.setdefault(column.name, _Faults())
            found.add(rows, lambda row: f"row {first + row}: {texts[coded.codes[row]]!r}")
        seen = places >= 0
        out[np.flatnonzero(seen), places[seen]] = 1.0
        if not seen.all():
            self._missing(column, ~seen, out, first)

    def _write_text(self, column: Column, coded: _Coded, out: Array, first: int) -> None:
        rows = np.zeros((len(coded.values) + 1, column.buckets))
        absent = np.zeros(len(coded.values) + 1, dtype=bool)
        absent[-1] = True
        for row, value in enumerate(coded.values):
            text = str(value)
            absent[row] = text.strip() in MISSING
            if absent[row]:
                continue
            for word in _WORDS.findall(unicodedata.normalize("NFKC", text).casefold()):
                number, sign = self._hashed(word)
                rows[row, number % column.buckets] += sign
        lengths = np.sqrt(np.sum(rows**2, axis=1, keepdims=True))
        rows /= np.where(lengths > 0, lengths, 1.0)
        out[...] = rows[coded.codes]
        if column.missing == "refuse":
            self._missing(column, absent[coded.codes], out, first)

    def _hashed(self, word: str) -> tuple[int, int]:
        known = self._words.get(word)
        if known is None:
            number = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
            known = self._words[word] = number & (2**63 - 1), -1 if number >> 63 else 1
        return known

    def _missing(self, column: Column, missing: Array, out: Array, first: int) -> None:
        if column.missing == "refuse" and missing.any():
            self._fault(column).add(
                np.flatnonzero(missing), lambda row: f"row {first + row} is empty, which the schema refuses"
            )
        elif column.missing == "flag" and column.kind in ("number", "date"):
            out[:, 1] = missing

    def _fault(self, column: Column) -> _Faults:
        return self._faults.setdefault(column.name, _Faults())


# -- cells -------------------------------------------------------------------------------------------


def _direct(column: Column, cells: Any) -> Array | None:
    """Numbers as float64 and times as days, where the cells are such; None where they must be read."""
    if hasattr(cells, "null_count"):  # pyarrow
        kind = str(cells.type)
        if kind.startswith(("timestamp", "date")):
            cells = np.asarray(cells.to_numpy(zero_copy_only=False)).astype("datetime64[us]")
        elif kind.startswith(("int", "uint", "float", "double", "halffloat", "bool")):
            cells = np.asarray(cells.to_numpy(zero_copy_only=False))
            if cells.dtype.kind == "O":  # booleans with nulls
                cells = np.array([math.nan if cell is None else cell for cell in cells], dtype=np.float64)
        else:
            return None
    kind = cells.dtype.kind
    if column.kind == "number":
        if kind == "M":
            return np.full(len(cells), math.inf)
        return cells.astype(np.float64, copy=False) if kind in "fiub" else None
    if kind == "M":
        micros = cells.astype("datetime64[us]")
        return np.where(np.isnat(micros), math.nan, micros.astype(np.int64) / _DAY)
    if kind in "fiub":
        return np.where(np.isnan(cells), math.nan, math.inf) if kind == "f" else np.full(len(cells), math.inf)
    return None


def _coded(cells: Any) -> _Coded:
    """The cells by their different values."""
    if hasattr(cells, "null_count"):
        if not hasattr(cells, "indices"):
            cells = cells.dictionary_encode()
        codes = np.asarray(cells.indices.fill_null(-1).to_numpy(zero_copy_only=False)).astype(np.intp)
        return _Coded(codes, cells.dictionary.to_pylist())
    places: dict[Any, int] = {}
    values = cells.tolist() if cells.dtype.kind in "biufUS" else cells
    try:
        codes = np.fromiter((places.setdefault(value, len(places)) for value in values), np.intp, len(values))
    except TypeError as problem:
        raise DataError(f"cells must be numbers, text or times ({problem}).") from problem
    distinct = list(places)
    null = np.array([_is_null(value) for value in distinct], dtype=bool)
    if null.any():
        codes = np.where(null[codes], -1, codes)
    return _Coded(codes, distinct)


def _is_null(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return bool(isinstance(value, float | np.floating) and math.isnan(value))


def _cell(cells: Any, row: int) -> Any:
    value = cells[row]
    value = value.as_py() if hasattr(value, "as_py") else value
    return value.item() if isinstance(value, np.generic) and value.dtype.kind != "M" else value


def category_text(value: Any) -> str:
    """A category as text: 3, 3.0, "3.0" and " 3 " are "3", and "007" is a code of its own."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    text = str(value).strip()
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def _remember(known: dict[Any, Any], value: Any, read: Callable[[Any], float]) -> float:
    if value not in known:
        known[value] = read(value)
    found: float = known[value]
    return found


def _number(value: Any) -> float:
    """The number that a cell holds or spells; NaN where it is missing, infinity where it is none."""
    if isinstance(value, str):
        text = value.strip()
        if NUMBER.fullmatch(text):
            return float(text)
        return math.nan if text in MISSING else math.inf
    try:
        return math.nan if _is_null(value) else float(value)
    except (TypeError, ValueError):
        return math.inf


def _date(column: Column) -> Callable[[Any], float]:
    """Reads a cell as days since 1970-01-01; NaN where it is missing, infinity where it is no date."""

    def read(value: Any) -> float:
        if _is_null(value):
            return math.nan
        if not isinstance(value, str):
            value = value.isoformat() if hasattr(value, "isoformat") else "?"
        text = value.strip()
        if text in MISSING:
            return math.nan
        try:
            moment = (
                datetime.fromisoformat(text)
                if column.format is None
                else datetime.strptime(text, column.format)
            )
        except ValueError:
            return math.inf
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        since = moment - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * _DAY + since.seconds * 1_000_000 + since.microseconds) / _DAY

    return read


def reads_as(column: Column) -> Callable[[str], float]:
    """How a cell of text in this column is read: NaN where it is missing, infinity where it fails."""
    if column.kind in ("number", "date"):
        return _number if column.kind == "number" else _date(column)
    known = set(column.categories)
    return lambda text: math.nan if text.strip() in MISSING - known else 0.0


__all__: Sequence[str] = (
    "MISSING",
    "NUMBER",
    "category_text",
    "column_names",
    "encode",
    "is_table",
    "reads_as",
)
