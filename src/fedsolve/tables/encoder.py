"""Raw columns as features, by the schema alone: the same bits at every site and on every machine.

* A number is itself, NaN where it is missing; True and False are 1 and 0.
* A date is (days since the reference) / scale, NaN where it is missing. A time with an offset counts in UTC.
* A category is one column of 0 and 1 for each value of the schema, and a last one for every other value.
* A text is its words, hashed: words are runs of letters, digits and underscores of the text in Unicode's
  compatible form (NFKC) without case. BLAKE2b (8 bytes) of a word modulo `buckets` names its feature, the top
  bit its sign; the row of signed counts is divided by its length, so that long texts weigh as much as short
  ones. Text without words is all zeros. With a backbone, a text is the features that this gives of it.

A cell is missing when it is null, NaN or one of `MISSING`, unless the schema lists that very text as a
category. Tables may be a mapping of arrays, a pandas DataFrame or a pyarrow Table; the latter two are never
imported here.
"""

from __future__ import annotations

import math
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import CategoryWarning, DataError, naming
from fedsolve.labels import number
from fedsolve.tables.schema import Column, Schema, signed_number

MISSING = frozenset(
    ("", "#N/A", "#N/A N/A", "#NA", "-NaN", "-nan", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan")
) | {"null"}
"""Texts that stand for a missing value."""

_BLOCK = 16384
_EXAMPLES = 3
_MANY = 0.1
"""Warn when more than this share of a column's cells are in none of its categories."""
_DAY = 86_400_000_000
_WHOLE = re.compile(r"([+-]?(?:0|[1-9]\d{0,17}))\.0*")
_WORDS = re.compile(r"\w+")


def is_table(value: Any) -> bool:
    """Whether this has named columns: a DataFrame, a pyarrow Table or a mapping."""
    return hasattr(value, "column_names") or isinstance(value, Mapping) or hasattr(value, "columns")


def encode(
    schema: Schema,
    table: Any,
    labelled: bool = False,
    extra: Literal["refuse", "ignore"] = "refuse",
    faults: Faults | None = None,
) -> Array:
    """The features (rows, schema.width) of a table, float64, NaN where a number or a date is missing.

    Columns are found by name. What does not fit is refused, all columns at once; see `Schema.check_columns`.
    faults: takes the cells that cannot be used. Who gives it refuses them, and has checked the columns; both
    are done here when None.
    """
    if schema.extractor is not None:
        raise DataError("this schema describes features of images; a table has none.")
    if faults is None:
        names = table.column_names if hasattr(table, "column_names") else table.keys()
        schema.check_columns(names, labelled, extra)
    encoder = _Encoder(faults or Faults())
    wanted = [column.name for column in schema.used]
    blocks: list[tuple[int, Mapping[str, Any]]]
    if hasattr(table, "to_batches"):
        batches = table.select(wanted).unify_dictionaries().to_batches()
        blocks = [(batch.num_rows, {name: batch.column(name) for name in wanted}) for batch in batches]
    else:
        columns = {name: column_array(table[name]) for name in wanted}
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            told = ", ".join(f"'{name}' {len(column)}" for name, column in columns.items())
            raise DataError(f"columns must have as many rows as each other; these have {told}.")
        # Some thousand rows at a time, so that a block of features stays in the cache.
        spans = [slice(start, start + _BLOCK) for start in range(0, max(lengths), _BLOCK)]
        each = ({name: column[span] for name, column in columns.items()} for span in spans)
        blocks = [(len(block[wanted[0]]), block) for block in each]
    features = np.zeros((sum(rows for rows, _ in blocks), schema.width))
    writers = {"category": encoder.write_category, "text": encoder.write_text}
    first = 0
    for rows, block in blocks:
        place = 0
        for column in schema.used:
            write = writers.get(column.kind, encoder.write_numbers)
            out = features[first : first + rows, place : place + column.width]
            with naming(f"column '{column.name}'"):
                write(column, block[column.name], out, first)
            place += column.width
        first += rows
    if faults is None and encoder.faults.found:
        raise encoder.faults.error()
    if encoder.strangers:
        encoder.warn_of_strangers(len(features))
    return features


def column_array(values: Any) -> Array:
    """A column of a mapping or a DataFrame as an array: numbers, times, or Python objects."""
    if hasattr(values, "to_numpy"):
        kind = str(getattr(values, "dtype", ""))
        if kind.startswith("datetime64"):  # with a time zone pandas would give objects
            values = values.to_numpy(dtype="datetime64[us]")
        elif kind[:1] in "IUF" and hasattr(values, "isna"):  # pandas' numbers that may be missing
            long = kind[0] != "F" and bool((values.abs() > 2**53).any())  # float64 would change them
            kept, gap = (object, None) if long else (np.float64, np.nan)
            values = values.to_numpy(dtype=kept, na_value=gap)
        else:
            values = values.to_numpy()
    array = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=object)
    if array.ndim != 1:
        raise DataError(f"a column has one value per row; got an array of shape {array.shape}.")
    return array


@dataclass
class _Noticed:
    """Some cells of a column: their number, and the first few as text."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, rows: Any, say: Callable[[int], str]) -> None:
        self.count += len(rows)
        self.examples += [say(int(row)) for row in rows[: _EXAMPLES - len(self.examples)]]

    def __str__(self) -> str:
        return f"({', '.join(self.examples)}{', ...' * (self.count > len(self.examples))})"


@dataclass
class Faults:
    """What is wrong with the cells of a table, by column.

    where: names a row. remedy: what to do about a cell that cannot be read. found: nothing where all is well.
    """

    where: Callable[[int], str] = "row {}".format
    remedy: Callable[[str], str] = lambda cell: _MEND
    found: dict[str, _Noticed] = field(default_factory=dict, init=False)
    _remedies: set[str] = field(default_factory=set, init=False)

    def empty(
        self, name: str, rows: Any, cell: Callable[[int], Any] = lambda row: "", remedy: str | None = None
    ) -> None:
        """Cells that must not be missing."""

        def say(row: int) -> str:
            text = cell(row)
            empty = is_null(text) or not str(text).strip()
            shown = "it is empty" if empty else f"{text!r} counts as empty"
            return f"{self.where(row)}: {shown}"

        self.add(name, rows, say, _FILL if remedy is None else remedy)

    def unreadable(self, column: Column, rows: Any, cell: Callable[[int], Any]) -> None:
        """Cells that are no numbers or dates, or infinite."""

        def say(row: int) -> str:
            value = cell(row)
            value = value.removesuffix(" ?") if isinstance(value, str) else value  # `Dialect.plain` adds it
            if column.kind == "date":
                iso = "in ISO 8601 (2024-01-31)"
                how = f"not a date {iso if column.format is None else f'of the format {column.format}'}"
            elif (read := number(str(value))) is not None and math.isinf(read) and "_" not in str(value):
                how = "infinite"
            elif read is not None and "%" in column.signs:
                how = "without the % that all others have"
            else:
                how = "not a number"
                self._remedies.add(self.remedy(str(value)))
            return f"{self.where(row)}: {value!r} is {how}"

        self.add(column.name, rows, say)

    def add(self, name: str, rows: Sequence[int], say: Callable[[int], str], remedy: str = "") -> None:
        """Other faults of a column; those of whole lines have no name."""
        if len(rows):
            self.found.setdefault(name, _Noticed()).add(rows, say)
            self._remedies |= {remedy} - {""}

    def error(self) -> DataError:
        """Names them all."""
        told = []
        for name, one in self.found.items():
            cells = f"cell{'s' * (one.count > 1)} in column '{name}'" if name else "lines of another length"
            told.append(f"{one.count} {cells} {one}")
        remedies = " ".join(sorted(self._remedies)) or "Correct or remove them."
        return DataError(f"{'; '.join(told)}. {remedies}")


_MEND = "Mend the cells, or change the kind of the column or its rule for missing values in the schema."
_FILL = "Fill them in, leave these rows out, or say in a schema what becomes of them ('fedsolve schema')."


@dataclass
class _Encoder:
    """Encodes a column's cells of a block of rows into `out`, which holds zeros; `first` is the first row.

    faults: takes what is wrong with them. known, words: what distinct cells and words became so far.
    strangers: cells that are in none of their column's categories.
    """

    faults: Faults
    known: dict[str, dict[Any, float]] = field(default_factory=dict)
    words: dict[str, tuple[int, int]] = field(default_factory=dict)
    strangers: dict[str, _Noticed] = field(default_factory=dict)

    def warn_of_strangers(self, rows: int) -> None:
        """Warn about columns with many values outside their categories."""
        for name, found in self.strangers.items():
            if found.count > _MANY * rows:
                warnings.warn(
                    f"column '{name}': {found.count} of {rows} values are none of its categories {found} and "
                    "count as 'other'. If they should not, mend the cells, or add the categories to the "
                    "schema and train again.",
                    CategoryWarning,
                    stacklevel=3,
                )

    def write_numbers(self, column: Column, cells: Any, out: Array, first: int) -> None:
        values = _direct(column, cells)
        if values is None:
            codes, distinct = coded_cells(cells)
            known, read = self.known.setdefault(column.name, {}), _reader(column)
            known.update({value: read(value) for value in distinct if value not in known})
            values = np.array([*(known[value] for value in distinct), math.nan])[codes]
        if column.sentinels:
            values = np.where(np.isin(values, column.sentinels), math.nan, values)
        if column.bounds:  # infinity marks what cannot be read
            least, most = column.bounds
            values = np.where(np.isinf(values), values, np.clip(values, least, most))
        out[:, 0] = (values - column.reference) / column.scale if column.kind == "date" else values
        if math.isfinite(values.sum()):  # one look at most columns: nothing missing, nothing wrong
            return
        # Infinity marks what cannot be read, and what is infinite cannot be used either.
        wrong = first + np.flatnonzero(np.isinf(values))
        self.faults.unreadable(column, wrong, lambda row: _cell(cells, row - first))
        self._missing(column, np.isnan(values), out, first, cells)

    def write_category(self, column: Column, cells: Any, out: Array, first: int) -> None:
        codes, distinct = coded_cells(cells)
        known = {category: number for number, category in enumerate(column.categories)}
        other = len(column.categories)
        absent = {**known, "flag": other + 1, "other": other, "refuse": -1}[column.missing]
        texts = [category_text(value) for value in distinct]
        numbers = [known.get(text, absent if text in MISSING else other) for text in texts]
        places = np.array([*numbers, absent], dtype=np.intp)[codes]
        strange = np.array([*(text not in known and text not in MISSING for text in texts), False])
        if strange.any():
            found = self.strangers.setdefault(column.name, _Noticed())
            found.add(np.flatnonzero(strange[codes]), lambda row: f"row {first + row}: {texts[codes[row]]!r}")
        seen = places >= 0
        out[np.flatnonzero(seen), places[seen]] = 1.0
        if not seen.all():
            self._missing(column, ~seen, out, first, cells)

    def write_text(self, column: Column, cells: Any, out: Array, first: int) -> None:
        codes, distinct = coded_cells(cells)
        texts = [str(value) for value in distinct]
        absent = np.array([*(text.strip() in MISSING for text in texts), True])
        rows = np.zeros((len(texts) + 1, out.shape[1]))
        there = np.flatnonzero(~absent)
        if column.backbone is not None:
            from fedsolve.data.text_rows import text_features

            rows[there] = text_features([texts[row] for row in there], column.backbone)
        else:
            for row in there:
                for word in _WORDS.findall(unicodedata.normalize("NFKC", texts[row]).casefold()):
                    if word not in self.words:
                        hashed = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
                        self.words[word] = hashed & (2**63 - 1), -1 if hashed >> 63 else 1
                    place, sign = self.words[word]
                    rows[row, place % column.buckets] += sign
            lengths = np.sqrt(np.sum(rows**2, axis=1, keepdims=True))
            rows /= np.where(lengths > 0, lengths, 1.0)
        out[...] = rows[codes]
        if column.missing == "refuse":
            self._missing(column, absent[codes], out, first, cells)

    def _missing(self, column: Column, missing: Array, out: Array, first: int, cells: Any) -> None:
        if column.missing == "refuse":
            rows = first + np.flatnonzero(missing)
            self.faults.empty(column.name, rows, lambda row: _cell(cells, row - first))
        elif column.missing == "flag" and column.kind in ("number", "date"):
            out[:, 1] = missing


# -- cells -------------------------------------------------------------------------------------------


def _direct(column: Column, cells: Any) -> Array | None:
    """Numeric cells as float64, times as days; None if the cells are text."""
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
    numbers = column.kind == "number"
    if cells.dtype.kind in "fiub":
        values = cells.astype(np.float64, copy=False)
        return values if numbers else np.where(np.isnan(values), math.nan, math.inf)
    if cells.dtype.kind != "M":
        return None
    micros = cells.astype("datetime64[us]")
    days = np.where(np.isnat(micros), math.nan, micros.astype(np.int64) / _DAY)
    return np.full(len(cells), math.inf) if numbers else days


def coded_cells(cells: Any) -> tuple[Array, list[Any]]:
    """The cells as positions in a list of distinct values, -1 where null; and that list."""
    if hasattr(cells, "null_count"):
        if getattr(cells.type, "num_fields", 0):
            raise DataError(f"cells must be numbers, text or times; these are {cells.type}.")
        if not hasattr(cells, "indices"):
            cells = cells.dictionary_encode()
        codes = np.asarray(cells.indices.fill_null(-1).to_numpy(zero_copy_only=False)).astype(np.intp)
        return codes, cells.dictionary.to_pylist()
    places: dict[Any, int] = {}
    values = cells.tolist() if cells.dtype.kind in "biufUS" else cells
    try:
        codes = np.fromiter((places.setdefault(value, len(places)) for value in values), np.intp, len(values))
    except TypeError as problem:
        raise DataError(f"cells must be numbers, text or times ({problem}).") from problem
    distinct = list(places)
    null = np.array([is_null(value) for value in distinct], dtype=bool)
    if null.any():
        codes = np.where(null[codes], -1, codes)
    return codes, distinct


def is_null(value: Any) -> bool:
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


def _reader(column: Column) -> Callable[[Any], float]:
    """Reads numbers, and dates as days since 1970-01-01: NaN if missing, infinity if it is neither."""
    absent, known, dates = MISSING.union(column.absent), set(column.signs), column.kind == "date"

    def read(value: Any) -> float:
        if is_null(value):
            return math.nan
        text = value.isoformat() if dates and hasattr(value, "isoformat") else value
        if not isinstance(text, str):
            try:
                return math.inf if dates else float(text)
            except (TypeError, ValueError, OverflowError):
                return math.inf
        if text.strip() in absent:
            return math.nan
        if dates:
            moment = moment_in(text.strip(), column.format)
            if moment is None:
                return math.inf
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
            return (moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(days=1)
        number, signs = signed_number(text) or (math.inf, "")
        return number if set(signs) <= known and ("%" in signs) == ("%" in known) else math.inf

    return read


def moment_in(text: str, format_: str | None) -> datetime | None:
    """The time in a text of this format, or of ISO 8601 if that is None; None if it is no time."""
    try:
        return datetime.fromisoformat(text) if format_ is None else datetime.strptime(text, format_)
    except ValueError:
        return None
