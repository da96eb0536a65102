"""Described tables from files, by pyarrow where it is: csv, packed csv, standard input and parquet.

pyarrow reads a csv several times as fast as Python; where it refuses a file, or a cell cannot be used, Python
looks at the file once more and names every fault by line and column. Without pyarrow, Python reads csv alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsolve.container import Array
from fedsolve.data.layout import damaged
from fedsolve.data.text_tables import NOTHING, Dialect, TextSource, read_names, read_texts
from fedsolve.encoder import MISSING, NUMBER, category_text, encode
from fedsolve.errors import DataError, ModelFileError
from fedsolve.labels import labels_like, spelled_labels
from fedsolve.schema import Column, Schema

CSV = (".csv", ".tsv", ".txt")
PARQUET = (".parquet", ".pq")

NEEDS_PYARROW = "parquet files need pyarrow. Install it: pip install 'fedsolve[tables]'."


@dataclass(frozen=True)
class DescribedRows:
    """Rows of a file, encoded by a schema: features (rows, width), NaN where a number or a date is missing.

    labels: (rows,) or None. owners: (rows,) as text or None. kept: columns that were asked for as they are,
    as text. weights: (rows,) or None, how much a row counts.
    """

    features: Array
    labels: Array | None
    owners: Array | None
    source: str
    kept: dict[str, Array] = field(default_factory=dict)
    weights: Array | None = None

    def __len__(self) -> int:
        return len(self.features)


def read_described(
    path: str | Path,
    schema: Schema,
    dialect: Dialect | None = None,
    *,
    labelled: bool = True,
    owned: bool = False,
    weighted: bool = False,
    keep: Sequence[str] = (),
    extra: Literal["refuse", "ignore"] = "refuse",
) -> DescribedRows:
    """The rows of a csv or parquet file ("-": csv from standard input), encoded by the schema.

    labelled: whether labels are wanted; they get the type of the schema's classes. owned: whether the client
    column is. weighted: whether weights are, where the schema has a column of them. keep: columns to give
    back as they are. extra: what to do about columns that the schema does not know.
    """
    try:
        rows = _Reader(
            path, schema, dialect or Dialect(), labelled, owned, weighted, tuple(keep), extra
        ).read()
        if len(rows) == 0:
            raise DataError("no rows at all. Check the file or the query that made it.")
    except DataError as problem:
        name = "standard input" if str(path) == "-" else path
        raise DataError(f"{name}: {problem}") from problem
    except OSError as problem:
        raise ModelFileError(f"cannot read {path}: {problem.strerror or problem}.") from problem
    return rows


def file_columns(path: str | Path, dialect: Dialect | None = None) -> list[str]:
    """The names of a file's columns, in its order."""
    try:
        if table_kind(path) == "csv":
            return read_names(TextSource(path), dialect or Dialect())[0]
        return _parquet_names(path)
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from problem
    except OSError as problem:
        raise ModelFileError(f"cannot read {path}: {problem.strerror or problem}.") from problem


def _parquet_names(path: str | Path) -> list[str]:
    arrow, parquet = _pyarrow()
    try:
        with open(path, "rb") as stream:
            return [str(name) for name in parquet.ParquetFile(stream).schema_arrow.names]
    except arrow.ArrowException as problem:
        raise damaged(path, "a parquet file", problem) from problem


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as problem:
        raise DataError(NEEDS_PYARROW) from problem
    return pyarrow, parquet


def table_kind(path: str | Path) -> Literal["csv", "parquet"]:
    """What a file is, by its name; packed csv ends in .csv.gz."""
    if str(path) == "-":
        return "csv"
    suffix = Path(Path(path).stem if str(path).lower().endswith(".gz") else path).suffix.lower()
    if suffix in CSV:
        return "csv"
    if suffix in PARQUET:
        return "parquet"
    raise DataError(
        f"unknown kind of table '{Path(path).suffix}'; known are .csv, .tsv, .txt (or .csv.gz) and .parquet."
    )


class _Reader:
    def __init__(
        self,
        path: str | Path,
        schema: Schema,
        dialect: Dialect,
        labelled: bool,
        owned: bool,
        weighted: bool,
        keep: tuple[str, ...],
        extra: Literal["refuse", "ignore"],
    ) -> None:
        if labelled and schema.label is None:
            raise DataError('the schema names no label column. Add label = "NAME" to it.')
        if owned and schema.client is None:
            raise DataError('the schema names no client column. Add client = "NAME" to it.')
        self.path, self.schema, self.dialect = path, schema, dialect
        self.label = schema.label if labelled else None
        self.client = schema.client if owned else None
        self.weight = schema.weight if weighted else None
        self.keep, self.extra = keep, extra

    def read(self) -> DescribedRows:
        if table_kind(self.path) == "parquet":
            return self._encoded(self._parquet())
        source = TextSource(self.path)
        names, delimiter = read_names(source, self.dialect)
        self._check(names)
        try:
            return self._encoded(self._arrow_csv(source, names, delimiter))
        except ModuleNotFoundError:
            return self._encoded(self._texts(source))
        except (_Unreadable, DataError) as problem:
            try:
                # It names what is wrong; what pyarrow alone cannot read, it reads.
                return self._encoded(self._texts(source))
            except DataError as explained:
                raise explained from problem

    def _check(self, names: Sequence[str]) -> None:
        self.schema.check_columns(names, self.label is not None, self.extra, self.weight is not None)
        absent = [name for name in (self.client, *self.keep) if name is not None and name not in names]
        if absent:
            raise DataError(f"no column is called {', '.join(map(repr, absent))}.")

    def _wanted(self) -> dict[str, Column | None]:
        """The columns to read: those of the schema, and others whose cells are only carried along."""
        plain: dict[str, Column | None] = dict.fromkeys(
            [name for name in (self.label, self.client, self.weight) if name], None
        )
        plain |= {name: Column(name, "text") for name in self.keep}
        return plain | {column.name: column for column in self.schema.used}

    def _encoded(self, table: Any) -> DescribedRows:
        features = encode(self.schema, table, extra="ignore")
        labels = None if self.label is None else self._labels(_texts_of(table, self.label))
        owners = None if self.client is None else _filled(_texts_of(table, self.client), self.client)
        kept = {name: _as_it_is(table, name) for name in self.keep}
        weights = None if self.weight is None else self._weights(_texts_of(table, self.weight))
        return DescribedRows(features, labels, owners, str(self.path), kept, weights)

    def _weights(self, texts: Array) -> Array:
        assert self.weight is not None
        plain = [self.dialect.plain(text) for text in _filled(texts, self.weight).tolist()]
        wrong = [row for row, text in enumerate(plain) if not NUMBER.fullmatch(text) or float(text) < 0]
        if wrong:
            raise DataError(
                f"column '{self.weight}' of weights: {texts[wrong[0]]!r} in row {wrong[0]} is no number of "
                f"at least 0{f' ({len(wrong)} such cells)' if len(wrong) > 1 else ''}. Correct them."
            )
        return np.array([float(text) for text in plain])

    def _labels(self, texts: Array) -> Array:
        assert self.label is not None
        texts = _filled(texts, self.label)
        classes = self.schema.class_array
        return spelled_labels(texts) if classes is None else labels_like(texts, classes)

    def _texts(self, source: TextSource) -> dict[str, Array]:
        return read_texts(source, self.dialect, self._wanted())

    def _parquet(self) -> Any:
        arrow, parquet = _pyarrow()
        try:
            with open(self.path, "rb") as stream:
                file = parquet.ParquetFile(stream)
                self._check([str(name) for name in file.schema_arrow.names])
                return file.read(columns=list(self._wanted()))
        except arrow.ArrowException as problem:
            raise damaged(self.path, "a parquet file", problem) from problem

    def _arrow_csv(self, source: TextSource, names: list[str], delimiter: str) -> Any:
        import pyarrow as arrow
        from pyarrow import csv

        wanted = self._wanted()
        coded = arrow.dictionary(arrow.int32(), arrow.string())
        spelled = self.dialect.thousands != ""
        kinds = {
            name: arrow.float64() if column is not None and column.kind == "number" and not spelled else coded
            for name, column in wanted.items()
        }
        for name in self.keep:
            kinds[name] = arrow.string()
        place = str(source.path) if source.path is not None else arrow.BufferReader(source.content)
        try:
            with arrow.input_stream(place, compression="gzip" if source.packed else None) as stream:
                table = csv.read_csv(
                    stream,
                    read_options=csv.ReadOptions(
                        column_names=names,
                        skip_rows=int(self.dialect.header),
                        encoding=self.dialect.encoding,
                    ),
                    parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=source.quoted),
                    convert_options=csv.ConvertOptions(
                        column_types=kinds,
                        include_columns=list(wanted),
                        null_values=sorted(MISSING),
                        strings_can_be_null=False,
                        decimal_point=self.dialect.decimal,
                        auto_dict_encode=False,
                    ),
                )
        except (arrow.ArrowException, OSError, UnicodeDecodeError, LookupError) as problem:
            raise _Unreadable(str(problem)) from problem
        return self._spelled(table, wanted) if spelled else table

    def _spelled(self, table: Any, wanted: dict[str, Column | None]) -> Any:
        """The table with numbers spelled as everybody does."""
        columns = {name: table.column(name) for name in wanted}
        for name, column in wanted.items():
            if column is not None and column.kind == "number":
                texts = columns[name].unify_dictionaries().combine_chunks()
                values = [self.dialect.plain(cell) for cell in texts.dictionary.to_pylist()]
                columns[name] = np.array(values, dtype=object)[texts.indices.to_numpy()]
            else:
                columns[name] = columns[name].to_numpy()
        return columns


class _Unreadable(Exception):
    """pyarrow could not read a file; why is for the second look to say."""


def _texts_of(table: Any, name: str) -> Array:
    """A column as text, null as nothing; numbers as categories are spelled."""
    column = table.column(name).to_numpy() if hasattr(table, "column_names") else table[name]
    values = np.asarray(column, dtype=object)
    spelled = {value: "" if value is None else category_text(value) for value in dict.fromkeys(values)}
    return np.array([spelled[value] for value in values], dtype=str)


def _as_it_is(table: Any, name: str) -> Array:
    """A column as text, as the file spells it; null as nothing."""
    column = table.column(name).to_numpy() if hasattr(table, "column_names") else table[name]
    values = np.asarray(column, dtype=object)
    if len(values) and isinstance(values[0], str) and None not in values:
        return values
    return np.array(["" if value is None else _spelt(value) for value in values.tolist()], dtype=object)


def _spelt(value: Any) -> str:
    return value if isinstance(value, str) else category_text(value)


def _filled(texts: Array, name: str) -> Array:
    """The texts, refused by row where one is missing."""
    empty = np.flatnonzero(np.isin(texts, NOTHING))
    if len(empty):
        rows = ", ".join(str(row) for row in empty[:3]) + ", ..." * (len(empty) > 3)
        raise DataError(f"column '{name}': {len(empty)} cells are empty (rows {rows}). Fill them in.")
    return texts
