"""The text of csv files: how their cells are spelled, and what is found at their beginning."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from fedsolve.errors import DataError, reading
from fedsolve.labels import number
from fedsolve.tables.schema import signed_number

_DELIMITERS = (",", ";", "\t", "|")
_GROUPS = ".,'’ \u00a0\u202f"
_SPELLINGS = ((".", ""), (",", ""), *((point, sign) for sign in _GROUPS for point in ".," if sign != point))
"""Pairs of decimal and thousands signs to try, the usual ones first."""

_OTHER = (
    "Correct the cells, describe categories, dates and text with a schema ('fedsolve schema'), or leave the "
    "column out (--drop, or ?drop= in an address)."
)
_AROUND = re.compile(r"([<>≤≥~$€£¥]*\s*)(.*?)(\s*[%$€£¥]?)", re.DOTALL)


PLAIN = (".", "")
"""The signs of numbers written as 1234.5."""


@dataclass(frozen=True)
class Dialect:
    """The format of a csv file. Every site may have its own.

    delimiter: "auto" takes the most frequent of , ; tab | in the first line.
    decimal:   the sign before the fraction of a number. thousands: the sign between groups of three digits,
               or nothing. "auto" takes those by which most cells are numbers.
    encoding:  "utf-8" (with a byte order mark or without), or another by its Python name, such as "cp1252".
    header:    whether the first line has the names; else they are 0, 1, 2, ...

    Cells are read by the dialect that was `found`, in which nothing is "auto".
    """

    delimiter: str = "auto"
    decimal: str = "auto"
    thousands: str = "auto"
    encoding: str = "utf-8"
    header: bool = True

    def __post_init__(self) -> None:
        given = [sign for sign in (self.decimal, self.thousands) if sign != "auto"]
        if self.decimal == "" or any(len(sign) > 1 for sign in given) or len(set(given)) < len(given):
            raise DataError(
                "decimal must be one sign and thousands another one, or nothing; got "
                f"{self.decimal!r} and {self.thousands!r}."
            )

    def plain(self, cell: str) -> str:
        """The number as 1234.5; a cell that cannot be read stays unreadable.

        A point in a file whose fractions follow a comma, or groups that are not of three digits, would give
        another number than was meant. Signs around a number, as in <39,1 or 97 %, stay.
        """
        before, text, after = _AROUND.fullmatch(cell.strip()).groups()  # type: ignore[union-attr]
        point, groups = self.decimal, self.thousands
        if groups and groups in text:
            if not re.fullmatch(
                rf"[+-]?[1-9]\d{{0,2}}({re.escape(groups)}\d{{3}})+({re.escape(point)}\d*)?", text
            ):
                return f"{cell} ?"
            text = text.replace(groups, "")
        if point != ".":
            if "." in text:
                return f"{cell} ?"
            text = text.replace(point, ".")
        return f"{before}{text}{after}"

    def found(self, cells: Iterable[str], delimiter: str) -> Dialect:
        """The dialect that makes most of these cells numbers; refused if two fit equally well."""
        known = (self.decimal, self.thousands)
        if "auto" not in known:
            return self
        odd = Counter(cell for cell in cells if re.search(r"\d[.,'’ \u00a0\u202f]\d|^\W*[.,]\d", cell))
        tried = [
            replace(self, decimal=point, thousands=sign)
            for point, sign in _SPELLINGS
            if known[0] in ("auto", point) and known[1] in ("auto", sign)
        ] or [replace(self, decimal=known[0].replace("auto", "."), thousands=known[1].replace("auto", ""))]
        # Where commas are before fractions, lists have semicolons: 1,234 is clear there, and 1.234 is not.
        pairs = [(one.decimal, one.thousands) for one in tried]
        clear = [delimiter == ";" if pair != PLAIN else delimiter not in ";\t" for pair in pairs]
        values = [{cell: tried[0].value(cell) for cell in odd}]
        if clear[0] and None not in values[0].values():
            return tried[0]  # no other reading is better
        values += [{cell: one.value(cell) for cell in odd} for one in tried[1:]]
        counts = [sum(odd[cell] for cell, value in read.items() if value is not None) for read in values]
        best = [place for place, count in enumerate(counts) if count == max(counts)]
        first = values[best[0]]
        if clear[best[0]]:
            return tried[best[0]]
        for place in best[1:]:
            for cell, value in values[place].items():
                if value != first[cell]:
                    raise DataError(
                        f"'{cell}' may be {first[cell]} or {value}. Say which sign is before fractions "
                        f"(--decimal) or between groups of three digits (--thousands)."
                    )
        return tried[best[0]]

    def value(self, cell: str) -> float | None:
        """The number in a cell, or None."""
        found = signed_number(cell if (self.decimal, self.thousands) == PLAIN else self.plain(cell))
        return None if found is None else found[0]

    def doubtful(self, cells: Iterable[str]) -> str | None:
        """A cell of a column whose groups may be fractions: all its numbers have one group; else None."""
        found = [cell for cell in cells if self.value(cell) is not None]
        one = re.compile(rf"[+-]?\d{{1,3}}{re.escape(self.thousands)}\d{{3}}")
        return found[0] if found and all(map(one.fullmatch, found)) else None

    def remedy(self, cell: str) -> str:
        """What to do about a cell that is no number; the options that would read it as one, if any do."""
        for point, sign in _SPELLINGS:
            if replace(self, decimal=point, thousands=sign).value(cell) is not None:
                wanted = [f"--decimal {point!r}"] * (point != self.decimal)
                wanted += [f"--thousands {sign!r}"] * (sign != self.thousands)
                return f"If these are numbers, pass {' '.join(wanted)}." if wanted else _OTHER
        return _OTHER


def is_empty(text: str) -> bool:
    """Whether a text cannot be a label or an owner. "None" and "NA" can be."""
    return text.strip().lower() in ("", "nan", "null")


class TextSource:
    """A file of text, packed by gzip or not; "-" is standard input, read once."""

    def __init__(self, path: str | Path) -> None:
        self.name = "standard input" if str(path) == "-" else str(path)
        self.path = None if str(path) == "-" else Path(path)
        self.content = sys.stdin.buffer.read() if self.path is None else b""
        named = self.path is not None and self.path.suffix.lower() == ".gz"
        self.packed = named or self.content[:2] == b"\x1f\x8b"

    @contextmanager
    def lines(self, encoding: str) -> Iterator[IO[str]]:
        """The decoded text. Bytes outside the encoding are refused."""
        try:
            with reading(self.name, "a csv file", csv.Error, EOFError, zlib.error):
                whole: IO[bytes] = io.BytesIO(self.content) if self.path is None else self.path.open("rb")
                with gzip.GzipFile(fileobj=whole) if self.packed else whole as raw:
                    mark = raw.read(4)
                    if mark[:2] in (b"\xff\xfe", b"\xfe\xff") and not encoding.startswith("utf-16"):
                        raise DataError("the file is in UTF-16. Pass --encoding utf-16, or save it as UTF-8.")
                    raw.seek(0)
                    utf8 = encoding.lower().replace("_", "-") in ("utf-8", "utf8")
                    named = "utf-8-sig" if utf8 else encoding
                    with io.TextIOWrapper(raw, encoding=named, newline="") as text:
                        yield text
        except LookupError as problem:
            raise DataError(f"no encoding is called '{encoding}'; try utf-8, cp1252 or latin-1.") from problem
        except UnicodeDecodeError as problem:
            raise DataError(
                f"the file is not in {encoding}: byte 0x{problem.object[problem.start]:02x} does not belong "
                "there. Files of spreadsheets are often in cp1252: pass --encoding cp1252, or save as UTF-8."
            ) from problem


def read_start(source: TextSource, dialect: Dialect, rows: int = 1000) -> tuple[list[str], str, list[str]]:
    """The names of the columns, the delimiter, and the cells of the first rows one after the other."""
    with source.lines(dialect.encoding) as text:
        line = re.sub('"[^"]*"', "", text.readline())
        frequent = max(_DELIMITERS, key=line.count)
        delimiter = {"tab": "\t", "\\t": "\t", "auto": frequent}.get(dialect.delimiter, dialect.delimiter)
        if len(delimiter) != 1:
            raise DataError(f"the delimiter must be one character, 'tab' or 'auto'; got {delimiter!r}.")
        if delimiter not in line and frequent in line:
            sign = "tab" if frequent == "\t" else frequent
            raise DataError(
                f"the first line has no {delimiter!r} in it; try --delimiter {sign!r} "
                f"(?delimiter={sign} in an address)."
            )
        text.seek(0)
        head = list(itertools.islice(csv.reader(text, delimiter=delimiter), rows + 1))
    cells = head[0] if head else []
    if not cells:
        raise DataError("no rows at all: the file is empty.")
    start = [cell.strip() for row in head[int(dialect.header) :] for cell in row]
    numbered = [str(place) for place in range(len(cells))]
    if not dialect.header:
        return numbered, delimiter, start
    if any("\n" in cell or "\r" in cell for cell in cells):
        raise DataError("a name in the first line goes over several lines; give it one.")
    if all(number(cell) is not None for cell in cells) and cells != numbered:
        raise DataError(
            f"the first line holds numbers ({', '.join(cells[:3])}, ...), not column names. "
            "Add a header, or pass --no-header (?header=no in an address)."
        )
    return [cell.strip() for cell in cells], delimiter, start
