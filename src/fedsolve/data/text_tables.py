"""Tables of text by Python alone: the reader where pyarrow is not, and the second look at a bad file.

Every fault is found, not only the first, and named by its line and column.
"""

from __future__ import annotations

import csv
import gzip
import io
import mmap
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

from fedsolve.container import Array
from fedsolve.data.layout import damaged
from fedsolve.encoder import reads_as
from fedsolve.errors import DataError, ModelFileError
from fedsolve.schema import Column

NOTHING = ("", "nan", "NaN", "null", "NULL")
"""Texts that cannot be a label or an owner. "None" and "NA" can."""

_CHUNK = 4096
_EXAMPLES = 3
_DELIMITERS = (",", ";", "\t", "|")
_COMMA = re.compile(r"[+-]?\d+(\.\d{3})*,\d+")
_POINTS = re.compile(r"[+-]?\d{1,3}([. '’\u00a0\u202f]\d{3})+(,\d*)?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?|[+-]?\d{1,3}([ '’\u00a0\u202f]\d{3})+([.,]\d*)?")


@dataclass(frozen=True)
class Dialect:
    """How one site's csv file spells its cells; no other site need do the same.

    delimiter: "auto" takes the most frequent of , ; tab | in the first line.
    decimal:   the sign before the fraction of a number. thousands: the sign between groups of three digits.
    encoding:  "utf-8" (with a byte order mark or without), or another by its Python name, such as "cp1252".
    header:    whether the first line has the names; else they are 0, 1, 2, ...
    """

    delimiter: str = "auto"
    decimal: str = "."
    thousands: str = ""
    encoding: str = "utf-8"
    header: bool = True

    def __post_init__(self) -> None:
        if len(self.decimal) != 1 or len(self.thousands) > 1 or self.decimal == self.thousands:
            raise DataError(
                "decimal must be one sign and thousands another one, or nothing; got "
                f"{self.decimal!r} and {self.thousands!r}."
            )

    @property
    def differs(self) -> bool:
        """Whether numbers are spelled otherwise than in most files."""
        return self.decimal != "." or self.thousands != ""

    def plain(self, cell: str) -> str:
        """The cell of a number as everybody spells it; one that cannot be read stays no number.

        A point in a file whose fractions follow a comma, or groups that are not of three digits, would give
        another number than was meant.
        """
        text = cell.strip()
        if self.thousands and self.thousands in text:
            if not self._grouped.fullmatch(text):
                return f"{cell} ?"
            text = text.replace(self.thousands, "")
        if self.decimal == ".":
            return text
        return f"{cell} ?" if "." in text else text.replace(self.decimal, ".")

    @cached_property
    def _grouped(self) -> re.Pattern[str]:
        sign, point = re.escape(self.thousands), re.escape(self.decimal)
        return re.compile(rf"[+-]?[1-9]\d{{0,2}}({sign}\d{{3}})+({point}\d*)?")


class TextSource:
    """A file of text, packed by gzip or not; "-" is standard input, read once."""

    def __init__(self, path: str | Path) -> None:
        self.name = "standard input" if str(path) == "-" else str(path)
        self.path = None if str(path) == "-" else Path(path)
        self.content = sys.stdin.buffer.read() if self.path is None else b""

    @property
    def packed(self) -> bool:
        if self.path is not None:
            return self.path.suffix.lower() == ".gz"
        return self.content[:2] == b"\x1f\x8b"

    def open(self) -> IO[bytes]:
        """Its bytes, unpacked."""
        raw: IO[bytes] = io.BytesIO(self.content) if self.path is None else self.path.open("rb")
        return gzip.GzipFile(fileobj=raw) if self.packed else raw  # type: ignore[return-value]

    @property
    def quoted(self) -> bool:
        """Whether a cell may go over several lines: only where there are quotes, which a glance tells."""
        if self.packed:
            return True
        if self.path is None:
            return b'"' in self.content
        with self.path.open("rb") as raw:
            if not raw.seek(0, io.SEEK_END):
                return False
            with mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                return whole.find(b'"') >= 0

    @contextmanager
    def lines(self, encoding: str) -> Iterator[IO[str]]:
        """Its text; bytes that are not of this encoding are refused by name."""
        try:
            with self.open() as raw:
                mark = raw.read(4)
                if mark[:2] in (b"\xff\xfe", b"\xfe\xff") and not encoding.startswith("utf-16"):
                    raise DataError("the file is in UTF-16. Pass --encoding utf-16, or save it as UTF-8.")
                raw.seek(0)
                named = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
                with io.TextIOWrapper(raw, encoding=named, newline="") as text:
                    yield text
        except LookupError as problem:
            raise DataError(f"no encoding is called '{encoding}'; try utf-8, cp1252 or latin-1.") from problem
        except UnicodeDecodeError as problem:
            raise DataError(
                f"the file is not in {encoding}: byte 0x{problem.object[problem.start]:02x} does not belong "
                "there. Files of spreadsheets are often in cp1252: pass --encoding cp1252, or save as UTF-8."
            ) from problem
        except (csv.Error, EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise damaged(self.name, "a csv file", problem) from problem
        except OSError as problem:
            raise ModelFileError(f"cannot read {self.name}: {problem.strerror or problem}.") from problem


def read_names(source: TextSource, dialect: Dialect) -> tuple[list[str], str]:
    """The names of the columns and the delimiter."""
    with source.lines(dialect.encoding) as text:
        first = text.readline()
        delimiter = {"tab": "\t", "\\t": "\t"}.get(dialect.delimiter, dialect.delimiter)
        if delimiter == "auto":
            delimiter = max(_DELIMITERS, key=first.count)
        if len(delimiter) != 1:
            raise DataError(f"the delimiter must be one character, 'tab' or 'auto'; got {delimiter!r}.")
        text.seek(0)
        cells = next(csv.reader(text, delimiter=delimiter), [])
    if not cells:
        raise DataError("no rows at all: the file is empty.")
    if not dialect.header:
        return [str(number) for number in range(len(cells))], delimiter
    if any("\n" in cell or "\r" in cell for cell in cells):
        raise DataError("a name in the first line goes over several lines; give it one.")
    return [cell.strip() for cell in cells], delimiter


@dataclass
class _BadCells:
    """What is wrong, by column, with the first lines of each; ragged lines under an empty name."""

    found: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    hints: set[str] = field(default_factory=set)

    def add(self, name: str, what: str) -> None:
        count, examples = self.found.get(name, (0, []))
        self.found[name] = (count + 1, [*examples, what] if len(examples) < _EXAMPLES else examples)

    def check(self) -> None:
        if not self.found:
            return
        told = []
        for name, (count, examples) in self.found.items():
            shown = ", ".join(examples) + ", ..." * (count > len(examples))
            cells = "lines of another length" if not name else f"cell{'s' * (count > 1)} in column '{name}'"
            told.append(f"{count} {cells} ({shown})")
        raise DataError(f"{'; '.join(told)}. {' '.join(sorted(self.hints)) or 'Mend or remove them.'}")


def read_texts(
    source: TextSource,
    dialect: Dialect,
    columns: Mapping[str, Column | None],
    limit: int | None = None,
) -> dict[str, Array]:
    """The cells of these columns: of numbers as float64, NaN where missing; of others as text.

    columns: what is known of each; None for one whose cells must only be there, such as labels. Every line is
             looked at before faults are told. limit: how many rows at most.
    """
    names, delimiter = read_names(source, dialect)
    places = {name: names.index(name) for name in columns}
    cells: dict[str, list[Array]] = {name: [] for name in columns}
    faults = _BadCells()
    with source.lines(dialect.encoding) as text:
        reader = csv.reader(text, delimiter=delimiter)
        if dialect.header:
            next(reader)
        for lines, rows in _chunks(reader, len(names), faults, limit):
            for name, place in places.items():
                part = [row[place] for row in rows]
                cells[name].append(_looked_at(part, lines, name, columns[name], dialect, faults))
    faults.check()
    return {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in cells.items()}


def _looked_at(
    cells: list[str], lines: list[int], name: str, column: Column | None, dialect: Dialect, faults: _BadCells
) -> Array:
    """Some cells of a column, with what is wrong entered among the faults."""
    if column is None:
        for line, cell in zip(lines, cells, strict=True):
            if cell.strip() in NOTHING:
                faults.add(name, f"line {line}: it is empty")
        return np.array(cells, dtype=object)
    number = column.kind == "number"
    spelled = [dialect.plain(cell) for cell in cells] if number and dialect.differs else cells
    if number and (values := _numbers(spelled)) is not None:
        return values
    read = reads_as(column)
    values = np.array([read(cell) for cell in spelled])
    for row in np.flatnonzero(~np.isfinite(values)):
        what = _fault(column, bool(np.isnan(values[row])), cells[row], faults, dialect)
        if what:
            faults.add(name, f"line {lines[row]}: {what}")
    return values if number else np.array(cells, dtype=object)


def _chunks(
    reader: Iterator[list[str]], width: int, faults: _BadCells, limit: int | None
) -> Iterator[tuple[list[int], list[list[str]]]]:
    lines: list[int] = []
    rows: list[list[str]] = []
    count = 0
    for row in reader:
        if not row:
            continue
        line: int = reader.line_num  # type: ignore[attr-defined]
        if len(row) != width:
            faults.add("", f"line {line} has {len(row)} cells, the first line {width}")
            continue
        lines.append(line)
        rows.append(row)
        count += 1
        if len(rows) == _CHUNK or count == limit:
            yield lines, rows
            lines, rows = [], []
            if count == limit:
                return
    if rows:
        yield lines, rows


def _numbers(cells: Sequence[str]) -> Array | None:
    """These cells as numbers, if all of them are finite ones at a glance."""
    try:
        values = np.array(cells, dtype=np.float64)
    except ValueError:
        return None
    return values if np.isfinite(values).all() and "_" not in "".join(cells) else None


def _fault(column: Column, missing: bool, cell: str, faults: _BadCells, dialect: Dialect) -> str:
    """What is wrong with a cell that is missing or cannot be read; nothing where the schema allows it."""
    if missing:
        return "it is empty, which the schema refuses" * (column.missing == "refuse")
    if column.kind == "date":
        how = "in ISO 8601 (2024-01-31)" if column.format is None else f"of the format {column.format}"
        return f"{cell!r} is not a date {how}"
    if hint := spelling_hint(cell, dialect):
        faults.hints.add(hint)
    return f"{cell!r} is not a number"


def spelling_hint(cell: str, dialect: Dialect) -> str:
    """What to do about a cell that looks like a number spelled in another way; nothing where it does not."""
    hints = []
    if dialect.decimal != "," and _COMMA.fullmatch(cell.strip()):
        hints.append("If the comma is before the fraction, pass --decimal ','.")
    groups = _POINTS if dialect.decimal == "," else _THOUSANDS
    if groups.fullmatch(cell.strip()):
        hints.append("If there is a sign between groups of three digits, name it with --thousands.")
    return " ".join(hints)
