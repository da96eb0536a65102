"""The one reader of tables: csv (also packed, or standard input), parquet and npz.

pyarrow reads csv and parquet. Where a csv file cannot be read as numbers, or a cell cannot be used, all cells
are read once more as text, and every fault is named by line and column. A table is read by a schema; without
one, every column but the label is a number that must be there. A file that cannot be opened or decoded is a
`ModelFileError`; contents that cannot be used are a `DataError`.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsolve.arrays import Array, check_arrays
from fedsolve.errors import (
    DataError,
    DialectWarning,
    SpellingWarning,
    damaged,
    did_you_mean,
    naming,
    reading,
)
from fedsolve.labels import label_matrix, labels_like, number, plain_labels, spelled_labels
from fedsolve.tables.csv_text import PLAIN, Dialect, TextSource, is_empty, read_start
from fedsolve.tables.encoder import MISSING, Faults, category_text, encode, is_null
from fedsolve.tables.schema import Column, Schema

TrainOrTest = Literal["train", "test"]
PARTS: tuple[TrainOrTest, ...] = ("test", "train")

LABEL_NAMES = ("label", "target", "class", "y")

_BLOCK = 1 << 24
"""Bytes of a csv file that pyarrow reads at once; a line must fit into them."""

_FILL = "Fill them in, or leave these rows out."

_UNEVEN = "Correct or remove them; lines above the names of the columns, too."

SUFFIXES = {"npz": (".npz",), "csv": (".csv", ".tsv", ".txt"), "parquet": (".parquet", ".pq")}


@dataclass(frozen=True)
class ColumnLayout(Dialect):
    """Where a file has its features, labels and owners, and how a csv file spells its cells.

    features_key, labels_key: arrays of an npz; found by their usual names when None.
    label:  label column of a csv or parquet file, by name or by position (from 0; -1 is the last).
    labels: instead, names of several labels a row with commas between: columns, or those of an npz matrix.
    client: column or npz array that says who owns each row.
    drop:   columns to leave out.
    """

    features_key: str | None = None
    labels_key: str | None = None
    label: str | None = None
    labels: str | None = None
    client: str | None = None
    drop: tuple[str, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of several labels a row."""
        names = tuple(name.strip() for name in (self.labels or "").split(",") if name.strip())
        if self.label is not None and names:
            raise DataError("a row has one label (--label), or several (--labels); leave out one of them.")
        return names


@dataclass(frozen=True)
class Table:
    """Rows of a file: features (rows, width), labels (rows,) or None, owners (rows,) as text or None.

    features: NaN where the schema allows a number or a date to be missing.
    schema:   what the columns are, where the file names them and its rows may become a model.
    weights:  (rows,) or None, how much a row counts.
    kept:     columns that were asked for as they are, by name.
    """

    features: Array
    labels: Array | None
    owners: Array | None
    source: str
    schema: Schema | None = None
    weights: Array | None = None
    kept: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.features)


def read_table(
    path: str | Path,
    schema: Schema | None = None,
    layout: Dialect | None = None,
    *,
    part: TrainOrTest | None = None,
    labelled: bool = True,
    owned: bool = False,
    weighted: bool = False,
    classes: Array | None = None,
    width: int | None = None,
    keep: Sequence[str] = (),
    extra: Literal["refuse", "ignore"] = "refuse",
    images: bool = False,
) -> Table:
    """The rows of a file ("-": csv from standard input), checked.

    schema:   what the columns are. Without one, all but the label are numbers, and none may be missing.
    layout:   how a csv file is spelled and, without a schema, where the label is.
    part:     which part of an npz with x_train and x_test; the test part when None.
    labelled: whether labels are wanted. owned: whether owners are. weighted: whether weights are, where the
              schema has a column of them.
    classes:  the labels a model knows, in whose type labels are given (`labels_like`); others are refused.
              When None, labels have the type of the schema's classes or of the file; those of a csv have the
              type that they spell.
    width:    features a model without a schema expects; an unlabelled file's label column is left out.
    keep:     columns to give back as they are. extra: what to do about columns that the schema lacks.
    images:   whether the features of an npz may be images, of three or four dimensions.
    """
    given = layout if isinstance(layout, ColumnLayout) else ColumnLayout(**asdict(layout or Dialect()))
    with naming(path):
        if owned and schema is None and given.client is None:
            raise DataError("owners are wanted, but no client column or key is named.")
        if table_kind(path) == "npz":
            if schema is not None:
                raise DataError("a schema describes the columns of a csv or parquet file.")
            table = _npz_table(Path(path), given, part, labelled, owned)
        else:
            roles = {"label": labelled, "client": owned, "weight": weighted}
            table = _file_table(TableFile(path, given), schema, given, roles, tuple(keep), width, extra)
        if schema is None and not (images and table.features.ndim in (3, 4)):
            check_arrays(table.features, np.zeros(len(table)) if table.labels is None else table.labels)
        if len(table) == 0:
            raise DataError("no rows at all. Check the file or the query that made it.")
        if width is not None and table.features.shape[1] != width:
            raise DataError(f"rows of {width} features are expected; these have {table.features.shape[1]}.")
        if table.labels is None:
            return table
        return table if classes is None else replace(table, labels=labels_like(table.labels, classes))


def parts(path: str | Path) -> tuple[TrainOrTest, ...]:
    """Which of x_train and x_test an npz file has; nothing for files that hold one set of rows."""
    with naming(path):
        if table_kind(path) != "npz":
            return ()
    with open_npz(path) as arrays:
        return tuple(part for part in PARTS if {f"x_{part}", f"X_{part}"} & set(arrays.files))


def file_columns(path: str | Path, dialect: Dialect | None = None) -> list[str]:
    """The names of a file's columns, in its order."""
    with naming(path):
        return TableFile(path, dialect or Dialect()).names


def table_kind(path: str | Path) -> Literal["npz", "csv", "parquet"]:
    """What a file is, by its name; packed csv ends in .csv.gz, and "-" is csv."""
    if str(path) == "-":
        return "csv"
    packed = str(path).lower().endswith(".gz")
    suffix = Path(Path(path).stem if packed else path).suffix.lower()
    for kind, suffixes in SUFFIXES.items():
        if suffix in suffixes and (kind == "csv" or not packed):
            return kind  # type: ignore[return-value]
    if Path(path).is_dir():
        raise DataError(f"{path} is a folder: name a table in it, or folder:{path} for images by class.")
    raise DataError(f"unknown kind of file '{suffix}'; known are .npz, .csv(.gz), .tsv, .txt and .parquet.")


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


class TableFile:
    """A csv or parquet file: the names of its columns, and their cells."""

    def __init__(self, path: str | Path, dialect: Dialect) -> None:
        self.path, self._given = path, dialect
        self.is_csv = table_kind(path) == "csv"
        if self.is_csv:
            self._source = TextSource(path)
            self.names, self._delimiter, self._start = read_start(self._source, dialect)
        else:
            self.names = [str(name) for name in self._parquet.schema_arrow.names]

    @cached_property
    def dialect(self) -> Dialect:
        """The dialect, found from the first rows where it is not given."""
        if not self.is_csv or "auto" not in (self._given.decimal, self._given.thousands):
            return self._given
        found, width = self._given.found(self._start, self._delimiter), len(self.names)
        point, groups, source = found.decimal, found.thousands, self._source.name
        told = [f"{self._delimiter!r} between cells"] * (self._delimiter not in ",\t")
        told += [f"{point!r} before fractions"] * (point != ".") + [f"{groups!r} between thousands"] * bool(
            groups
        )
        if told:
            warnings.warn(f"{source} is read with {', '.join(told)}.", DialectWarning, stacklevel=2)
        even = self.names if groups in (".", ",") and len(self._start) % width == 0 else ()
        cells = {name: found.doubtful(self._start[place::width]) for place, name in enumerate(even)}
        if doubted := {name: cell for name, cell in cells.items() if cell is not None}:
            cell, columns = next(iter(doubted.values())), ", ".join(map(repr, doubted))
            warnings.warn(
                f"{source}: column {columns}: {cell!r} is read as {found.value(cell):.0f}, and all numbers "
                f"there look so. If {groups!r} is before fractions, write {point!r} instead.",
                SpellingWarning,
                stacklevel=2,
            )
        return found

    @cached_property
    def _parquet(self) -> Any:
        from pyarrow.parquet import ParquetFile

        with sound_parquet(self.path):
            return ParquetFile(open(self.path, "rb"))

    def faults(self) -> Faults:
        """Takes this csv file's faults, named by line. Lines of another length are among them already."""
        width, lines, uneven = len(self.names), [], []
        with self._source.lines(self.dialect.encoding) as text:
            reader = csv.reader(text, delimiter=self._delimiter)
            for row in itertools.islice(reader, int(self.dialect.header), None):
                if len(row) == width:
                    lines.append(reader.line_num)
                elif row:
                    uneven.append(f"line {reader.line_num} has {len(row)} cells, the first line {width}")
        found = Faults(lambda row: f"line {lines[row]}", self.dialect.remedy)
        found.add("", range(len(uneven)), uneven.__getitem__, _UNEVEN)
        return found

    def cells(
        self,
        wanted: Mapping[str, Any],
        places: Mapping[str, int],
        kept: Iterable[str] = (),
        *,
        typed: bool = True,
        rows: int | None = None,
    ) -> Any:
        """A pyarrow Table of these columns: numbers of a csv as such, all else of it as text.

        wanted: by name, the `Column` of those of which it is known. places: where they stand. kept: those
        that are wanted as the file spells them. rows: how many at most. typed: else numbers are text too, and
        lines of a csv with more or fewer cells than the first are left out instead of refused.
        """
        import pyarrow as arrow

        if not self.is_csv:
            with sound_parquet(self.path):
                table = self._parquet.read(columns=list(wanted)).select(list(wanted)).slice(0, rows)
            for at, column in enumerate(table.schema):  # text that the writer did not mark as such
                if arrow.types.is_binary(column.type):
                    with suppress(arrow.ArrowInvalid):
                        table = table.set_column(at, column.name, table.column(at).cast(arrow.string()))
            return table
        from pyarrow import csv as arrow_csv

        source, dialect, kept = self._source, self.dialect, set(kept)
        coded = arrow.dictionary(arrow.int32(), arrow.string())
        numbers = [name for name, column in wanted.items() if getattr(column, "kind", "") == "number"]
        # Numbers with signs around them, or with words for missing ones, are read as text first.
        spelled = [
            name
            for name in numbers
            if not typed or dialect.thousands or name in kept or wanted[name].absent or wanted[name].signs
        ]
        kinds = {str(places[name]): arrow.string() if name in kept else coded for name in wanted}
        kinds |= {str(places[name]): arrow.float64() for name in numbers if name not in spelled}
        place = str(source.path) if source.path is not None else arrow.BufferReader(source.content)
        # A cell may span several lines only if the file has quotes.
        with io.BytesIO(source.content) if source.path is None else source.path.open("rb") as raw:
            quoted = source.packed or any(b'"' in block for block in iter(partial(raw.read, 1 << 20), b""))
        options = (
            arrow_csv.ReadOptions(
                column_names=[str(place) for place in range(len(self.names))],
                skip_rows=int(dialect.header),
                encoding=dialect.encoding,
                block_size=_BLOCK,
            ),
            arrow_csv.ParseOptions(
                delimiter=self._delimiter,
                newlines_in_values=quoted,
                invalid_row_handler=None if typed else lambda row: "skip",
            ),
            arrow_csv.ConvertOptions(
                column_types=kinds,
                include_columns=list(kinds),
                null_values=sorted(MISSING),
                strings_can_be_null=False,
                decimal_point=dialect.decimal,
            ),
        )
        try:
            with arrow.input_stream(place, compression="gzip" if source.packed else None) as stream:
                if rows is None:
                    table = arrow_csv.read_csv(stream, *options)
                else:
                    batches = arrow_csv.open_csv(stream, *options)
                    found: list[Any] = []
                    while sum(map(len, found)) < rows and (batch := next(batches, None)) is not None:
                        found.append(batch)
                    table = arrow.Table.from_batches(found, batches.schema).slice(0, rows)
        except (arrow.ArrowException, OSError, UnicodeDecodeError, LookupError) as problem:
            raise Unreadable(str(problem)) from problem
        table = table.rename_columns(list(wanted))
        if (dialect.decimal, dialect.thousands) == PLAIN:
            return table
        for name in [name for name in spelled if name not in kept]:
            cells, absent = table.column(name).unify_dictionaries().combine_chunks(), wanted[name].absent
            plain = [
                cell if cell.strip() in absent else dialect.plain(cell)
                for cell in cells.dictionary.to_pylist()
            ]
            changed = arrow.DictionaryArray.from_arrays(cells.indices, arrow.array(plain, arrow.string()))
            table = table.set_column(table.column_names.index(name), name, changed)
        return table


def sound_parquet(path: str | Path) -> AbstractContextManager[None]:
    """A block that reads a parquet file; errors name the file."""
    from pyarrow import ArrowException

    return reading(path, "a parquet file", ArrowException)


class Unreadable(Exception):
    """pyarrow could not read a csv file."""


def _npz_table(
    path: Path, layout: ColumnLayout, part: TrainOrTest | None, labelled: bool, owned: bool
) -> Table:
    keys = (layout.features_key, layout.labels_key)
    features, labels, owners = read_npz(path, part, labelled, *keys, layout.client if owned else None)
    if labels is not None and layout.label_names:
        labels = label_matrix(np.asarray(labels), layout.label_names)
    elif labels is not None:
        labels = plain_labels(labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels)
        if labels.ndim != 1:
            raise DataError(f"labels must be one per row, not one-hot rows; got shape {labels.shape}.")
        if labels.dtype.kind not in "iufbU":
            raise DataError(f"labels must be numbers or text; got dtype {labels.dtype}.")
    if owners is not None:
        if owners.shape != (len(features),):
            raise DataError(
                f"{len(features)} rows but owners of shape {owners.shape}; give one owner per row."
            )
        if owners.dtype.kind == "f" and not np.all(np.isfinite(owners)):
            raise DataError("owners contain NaN or infinite values; give one owner per row.")
        owners = owners.astype(str)
    return Table(features, labels, owners, str(path))


def _file_table(
    file: TableFile,
    schema: Schema | None,
    layout: ColumnLayout,
    roles: Mapping[str, bool],
    keep: tuple[str, ...],
    width: int | None,
    extra: Literal["refuse", "ignore"],
) -> Table:
    """The rows of a csv or parquet file, by a schema or as numbers.

    roles: whether labels, owners (client) and weights are wanted.
    """
    described, labelled = schema is not None, roles["label"]
    if schema is None:
        schema, places = _plain_schema(file.names, layout, labelled, roles["client"], width)
    else:
        for what in ("label", "client"):
            if roles[what] and not (getattr(schema, what) or (what == "label" and schema.labels)):
                raise DataError(f'the schema names no {what} column. Add {what} = "NAME" to it.')
        schema.check_columns(file.names, labelled, extra, roles["weight"] and schema.weight is not None)
        places = {name: place for place, name in enumerate(file.names)}
    filled = {what: name for what, asked in roles.items() if asked and (name := getattr(schema, what))}
    several = schema.labels if labelled else ()
    absent = [name for name in (filled.get("client"), *keep) if name and name not in file.names]
    if absent:
        raise DataError(f"no column is called {', '.join(map(repr, absent))}.")
    # Weights and the numbers of a regression are read as columns of numbers are.
    numbers = ("weight", "label") if schema.task == "regression" else ("weight",)
    amounts = {what: Column(filled.pop(what), missing="refuse") for what in numbers if what in filled}
    wanted: dict[str, Column | None] = {
        **dict.fromkeys([*filled.values(), *several]),
        **{name: Column(name, "text") for name in keep},
        **{column.name: column for column in (*schema.used, *amounts.values())},
    }
    known = schema if described or (layout.header and labelled and width is None) else None

    def rows(cells: Any, faults: Faults) -> Table:
        features = encode(schema, cells, faults=faults)
        found = {what: _filled(cells, name, described, faults) for what, name in filled.items()}
        flags = {name: _filled(cells, name, described, faults) for name in several}
        for what, column in amounts.items():
            found[what] = encode(Schema((column,)), cells, faults=faults)[:, 0]
        kept = {name: _as_it_is(cells.column(name).to_pylist()) for name in keep}
        labels, owners, weights = (found.get(what) for what in ("label", "client", "weight"))
        if weights is not None and np.any(weights < 0):
            too_small = "{}: {:g} is too small; a weight is at least 0"
            faults.add(
                str(schema.weight),
                np.flatnonzero(weights < 0).tolist(),
                lambda row: too_small.format(faults.where(row), weights[row]),
            )
        if faults.found:
            raise faults.error()
        if several:
            labels = np.column_stack([_flags(flags[name], name) for name in several])
        elif labels is not None and labels.dtype.kind not in "iufb":
            if schema.class_array is not None:
                labels = labels_like(labels, schema.class_array)
            elif described or file.is_csv:
                labels = spelled_labels(labels)
        owners = None if owners is None else owners.astype(str)
        return Table(features, labels, owners, str(file.path), known, weights, kept)

    try:
        return rows(file.cells(wanted, places, keep), Faults())
    except (Unreadable, DataError) as problem:
        if not file.is_csv:
            raise
        faults = file.faults()
        try:
            return rows(file.cells(wanted, places, keep, typed=False), faults)
        except Unreadable:
            raise damaged(file.path, "a csv file", problem) from problem


def _filled(cells: Any, name: str, described: bool, faults: Faults) -> Array:
    """A column without missing cells; spelled like categories if a schema describes it, else as it is."""
    values = np.asarray(cells.column(name).to_numpy())
    if not described and values.dtype.kind in "iufb":
        if values.dtype.kind == "f" and np.isnan(values).any():
            faults.empty(name, np.flatnonzero(np.isnan(values)), remedy=_FILL)
        return values
    spell = category_text if described else lambda value: str(value).strip()
    known = {value: "" if value is None else spell(value) for value in dict.fromkeys(values.tolist())}
    texts = np.array([known[value] for value in values.tolist()], dtype=str)
    empty = [text for text in known.values() if is_empty(text)]
    if empty:
        faults.empty(name, np.flatnonzero(np.isin(texts, empty)), remedy=_FILL)
    return texts


def _flags(values: Array, name: str) -> Array:
    """The cells of one of several labels as 0.0 and 1.0; true and false are such, too."""
    words = {"True": 1.0, "False": 0.0}
    texts = values.astype(str).tolist()
    found = [words.get(text.capitalize(), number(text)) for text in texts]
    for row, flag in enumerate(found):
        if flag not in (0, 1):
            raise DataError(f"label '{name}' is {texts[row]!r} in row {row}; each label is 0 or 1.")
    return np.array(found)


def _as_it_is(values: Iterable[Any]) -> Array:
    """A column as text, as in the file; null and NaN become empty text."""
    texts = [
        value if isinstance(value, str) else "" if is_null(value) else category_text(value)
        for value in values
    ]
    return np.array(texts, dtype=object)


def _plain_schema(
    names: Sequence[str], layout: ColumnLayout, labelled: bool, owned: bool, width: int | None
) -> tuple[Schema, dict[str, int]]:
    """A schema in which all columns but label and owner are required numbers, and their positions."""
    left = list(range(len(names)))
    client = None
    if layout.client is not None and (owned or layout.client in names):
        client = column_position(names, layout.client, "client column")
        left.remove(client)
    for wanted in layout.drop:
        dropped = column_position(names, wanted, "column to drop")
        if dropped in left:
            left.remove(dropped)
    several = [column_position(names, name, "label column") for name in layout.label_names]
    label = None if several else label_place(names, left, layout.label, labelled)
    if layout.label is None and not labelled and len(left) == width:
        label = None
    left = [place for place in left if place != label and place not in several]
    unnamed = [place for place in left if not names[place].strip()]
    if unnamed:
        raise DataError(
            f"column {unnamed[0]} has no name; it may be a row number. Name it, or leave it out "
            f"with --drop {unnamed[0]} (?drop={unnamed[0]} in an address)."
        )
    if width is not None and len(left) != width:
        raise DataError(
            f"the model takes {width} features, but {len(left)} columns are left for them. "
            "Name the label column (--label, in an address ?label=), or leave columns out (--drop, ?drop=)."
        )
    if not left:
        raise DataError("0 columns are left for features; name the label column, or leave out fewer.")
    label, several = (label, several) if labelled else (None, [])
    used = [*left, *several, *(place for place in (label, client) if place is not None)]
    named = [names[place] for place in used]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise DataError(
            f"more than one column is called {', '.join(map(repr, twice))}. Rename them, or leave the others "
            "out by position (--drop, ?drop= in an address)."
        )
    columns = [Column(names[place], missing="refuse") for place in left]
    columns += [Column(name, "unused") for name in dict.fromkeys(names) if name not in named]
    owner, outcome = (None if place is None else names[place] for place in (client, label))
    labels = tuple(names[place] for place in several)
    return Schema(tuple(columns), outcome, (), owner, labels=labels), dict(zip(named, used, strict=True))


def label_place(
    names: Sequence[str], left: list[int], wanted: str | None, labelled: bool = True
) -> int | None:
    """The position of the label among the columns `left`: as wanted, by a usual name, or the last."""
    if wanted is not None:
        label = column_position(names, wanted, "label column")
        if label not in left:
            raise DataError(f"the label column '{names[label]}' is also the client column or dropped.")
        return label
    lowered = {names[place].strip().lower(): place for place in reversed(left)}
    usual = next((lowered[name] for name in LABEL_NAMES if name in lowered), None)
    return left[-1] if left and labelled and usual is None else usual


# -- npz: arrays by name -----------------------------------------------------------------------------

FEATURE_KEYS = ("x", "X", "features", "data")
LABEL_KEYS = ("y", "Y", "labels", "label", "target")
_KEY = "Name it with --{0}-key (?{0}_key= in an address)."


def open_npz(path: str | Path) -> Any:
    """The arrays of an npz file by name, each read on access."""
    arrays = _loaded(path, "an npz file")
    if isinstance(arrays, np.ndarray):
        raise DataError(f"{path} holds a single array; write one with np.savez(path, x=features, y=labels).")
    return arrays


def read_npy(path: str | Path, *, mapped: bool = False) -> Array:
    """The array of an npy file, read or mapped."""
    array = _loaded(path, "an npy file", "r" if mapped else None)
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path} holds several arrays; write one with np.save, or name the file .npz.")
    return array


def _loaded(path: str | Path, what: str, mapped: Literal["r"] | None = None) -> Any:
    with _sound(path, what, str(path)):
        return np.load(path, mmap_mode=mapped, allow_pickle=False)


@contextmanager
def _sound(path: str | Path, what: str, array: str) -> Iterator[None]:
    """A block that reads an array: damage, and arrays of Python objects, are named."""
    with reading(path, what, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        try:
            yield
        except ValueError as problem:
            if "Object arrays" not in str(problem):
                raise
            raise DataError(
                f"{array} holds Python objects, which are not read from files. Save numbers or text, e.g. "
                "np.asarray(values, dtype=str)."
            ) from problem


def read_npz(
    path: Path,
    part: TrainOrTest | None,
    labelled: bool = True,
    features_key: str | None = None,
    labels_key: str | None = None,
    owners_key: str | None = None,
    remedy: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Features, decoded by `scale` and `offset` where the file has them, labels and owners.

    remedy: what to do where an array is not there; options of the command line when None.
    """
    with open_npz(path) as arrays:
        keys: list[str] = arrays.files
        x_names, y_names = _names(keys, part, features_key)
        x_key = _present(keys, x_names, "features", remedy or _KEY.format("features"))
        features = _array(arrays, x_key, path)
        for name, combine in (("scale", np.multiply), ("offset", np.add)):
            if name in keys:
                features = combine(features, _per_column(_array(arrays, name, path), name, features))
        labels = owners = None
        if labelled:
            y_names = y_names if labels_key is None else [labels_key]
            y_key = _present(keys, y_names, "labels", remedy or _KEY.format("labels"))
            labels = _array(arrays, y_key, path)
        if owners_key is not None:
            owners = _array(arrays, _present(keys, [owners_key], "owners"), path)
    return features, labels, owners


def _names(
    keys: Sequence[str], part: TrainOrTest | None, features_key: str | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Possible names of features and labels: as given, x_part and y_part, or the usual ones."""
    if features_key is not None:
        return [features_key], LABEL_KEYS
    named = part or next((p for p in PARTS if {f"x_{p}", f"X_{p}"} & set(keys)), None)
    pairs: list[tuple[Sequence[str], Sequence[str]]] = []
    if named is not None:
        pairs.append(((f"x_{named}", f"X_{named}"), (f"y_{named}", f"Y_{named}")))
    if part != "test":
        pairs.append((FEATURE_KEYS, LABEL_KEYS))
    return next((pair for pair in pairs if set(pair[0]) & set(keys)), pairs[0])


def _present(keys: Sequence[str], names: Sequence[str], what: str, remedy: str = "") -> str:
    key = next((name for name in names if name in keys), None)
    if key is None:
        guess = did_you_mean(names[0], keys)
        listed = ", ".join(keys) or "none"
        raise DataError(f"no array '{names[0]}' with {what}.{guess} The file has {listed}. {remedy}".rstrip())
    return key


def _array(arrays: Mapping[str, Array], key: str, path: Path) -> Array:
    with _sound(path, "an npz file", f"'{key}'"):
        return np.asarray(arrays[key])


def _per_column(values: Array, name: str, features: Array) -> Array:
    """The checked numbers of `scale` or `offset`, with which columns are decoded as offset + scale * x."""
    if features.ndim != 2 or features.dtype.kind not in "fiub":
        raise DataError(
            f"features must be real numbers in rows and columns; got shape {features.shape}, "
            f"dtype {features.dtype}."
        )
    if values.shape not in ((), (1,), (features.shape[1],)) or values.dtype.kind not in "fiu":
        raise DataError(
            f"'{name}' must hold one number per column ({features.shape[1]}); "
            f"got shape {values.shape}, dtype {values.dtype}."
        )
    return values
