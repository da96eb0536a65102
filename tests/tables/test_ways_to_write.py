"""Numbers and dates as people and programs write them: what is proposed, and which values are read."""

from __future__ import annotations

import math
import warnings
from datetime import datetime

import numpy as np
import pytest

from fedsolve.cli.output import warnings_told
from fedsolve.errors import DataError, DialectWarning, SpellingWarning
from fedsolve.tables.csv_text import Dialect
from fedsolve.tables.proposal import propose
from fedsolve.tables.table_file import read_table

ROWS = 60
VALUES = [round(20 + 1.37 * row + 0.1 * (row % 3), 2) for row in range(ROWS)]
LARGE = [1234.5 + 1001.25 * row for row in range(ROWS)]
DAYS = [datetime(2021 + row % 3, 1 + row % 12, 1 + (7 * row) % 28, row % 24, 30) for row in range(ROWS)]
NAN = math.nan


def comma(value):
    return str(value).replace(".", ",")


def grouped(value, sign, point="."):
    return f"{value:,.2f}".replace(",", "_").replace(".", point).replace("_", sign)


def every(number, word, cells):
    """The cells with every so many replaced."""
    return [word if place % number == 3 else cell for place, cell in enumerate(cells)]


def plain(values):
    return [f"{value}" for value in values]


NUMBERS = {
    # spreadsheets in three locales
    "English spreadsheet": (",", plain(VALUES), VALUES),
    "English spreadsheet, thousands": (",", [f'"{grouped(v, ",")}"' for v in LARGE], LARGE),
    "German spreadsheet": (";", [comma(v) for v in VALUES], VALUES),
    "German spreadsheet, thousands": (";", [grouped(v, ".", ",") for v in LARGE], LARGE),
    "French spreadsheet, thousands": (";", [grouped(v, "\u202f", ",") for v in LARGE], LARGE),
    "Swiss spreadsheet, thousands": (";", [grouped(v, "’") for v in LARGE], LARGE),
    # exports of programs
    "R, write.csv": (",", every(7, "NA", plain(VALUES)), every(7, NAN, VALUES)),
    "R, write.csv2": (";", every(7, "NA", [comma(v) for v in VALUES]), every(7, NAN, VALUES)),
    "SAS, a point for missing": (",", every(7, ".", plain(VALUES)), every(7, NAN, VALUES)),
    "SPSS, a space for missing": ("\t", every(7, " ", plain(VALUES)), every(7, NAN, VALUES)),
    "SQL, NULL": (",", every(7, "NULL", plain(VALUES)), every(7, NAN, VALUES)),
    "MySQL, \\N": (",", every(7, "\\N", plain(VALUES)), every(7, NAN, VALUES)),
    "scientific notation": (",", [f"{v:.6e}" for v in VALUES], VALUES),
    "pandas, NaN": (",", every(7, "NaN", plain(VALUES)), every(7, NAN, VALUES)),
    # what people type
    "question marks": (",", every(5, "?", plain(VALUES)), every(5, NAN, VALUES)),
    "dashes": (",", every(5, "-", plain(VALUES)), every(5, NAN, VALUES)),
    "dashes and decimal commas": (";", every(5, "-", [comma(v) for v in VALUES]), every(5, NAN, VALUES)),
    "abbreviations and decimal commas": (
        ";",
        every(5, "k.A.", [comma(v) for v in VALUES]),
        every(5, NAN, VALUES),
    ),
    "two points and decimal commas": (";", every(5, "..", [comma(v) for v in VALUES]), every(5, NAN, VALUES)),
    "-999 for missing": (",", every(5, "-999", plain(VALUES)), every(5, NAN, VALUES)),
    "-99 among whole numbers": (",", every(5, "-99", plain([int(v) for v in VALUES])), None),
    "below a limit": (",", every(5, "<39.1", plain(VALUES)), every(5, 39.1, VALUES)),
    "below a limit, decimal comma": (
        ";",
        every(5, "< 39,1", [comma(v) for v in VALUES]),
        every(5, 39.1, VALUES),
    ),
    "above a limit": (",", every(5, ">200", plain(VALUES)), every(5, 200.0, VALUES)),
    "per cent": (",", [f"{v}%" for v in VALUES], VALUES),
    "per cent with a space and a comma": (";", [f"{comma(v)} %" for v in VALUES], VALUES),
    "a word now and then": (",", every(30, "haemolysed", plain(VALUES)), every(30, NAN, VALUES)),
    "another word now and then": (",", every(9, "refused", plain(VALUES)), every(9, NAN, VALUES)),
    "dollars": (",", [f'"${grouped(v, ",")}"' for v in LARGE], LARGE),
    "euros behind": (";", [f"{grouped(v, '.', ',')} €" for v in LARGE], LARGE),
    "SAS, special missing values": (",", every(5, ".A", plain(VALUES)), every(5, NAN, VALUES)),
    "spreadsheet errors": (",", every(5, "#DIV/0!", plain(VALUES)), every(5, NAN, VALUES)),
    "spaces around": (",", [f"  {v} " for v in VALUES], VALUES),
}

DATES = {
    "ISO 8601": (",", "%Y-%m-%d", None),
    "ISO 8601 with a time": (",", "%Y-%m-%d %H:%M:%S", None),
    "mm/dd/yy": (",", "%m/%d/%y", "%m/%d/%y"),
    "mm/dd/yyyy hh:mm AM": (",", "%m/%d/%Y %I:%M %p", "%m/%d/%Y %I:%M %p"),
    "dd.mm.yyyy": (";", "%d.%m.%Y", "%d.%m.%Y"),
    "dd.mm.yyyy HH:MM": (";", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M"),
    "dd-Mon-yyyy": (",", "%d-%b-%Y", "%d-%b-%Y"),
    "SAS DATE9.": (",", "%d%b%Y", "%d%b%Y"),
    "SAS DATETIME": (",", "%d%b%Y:%H:%M:%S", "%d%b%Y:%H:%M:%S"),
    "SQL yyyymmdd": (",", "%Y%m%d", "%Y%m%d"),
    "dd/mm/yyyy": (",", "%d/%m/%Y", "%d/%m/%Y"),
    "SPSS DATETIME": (",", "%d-%b-%Y %H:%M:%S", "%d-%b-%Y %H:%M:%S"),
    "a month's whole name": (",", "%d %B %Y", "%d %B %Y"),
    "yyyymmddHHMMSS": (",", "%Y%m%d%H%M%S", "%Y%m%d%H%M%S"),
    "a time of day": (",", "%H:%M", "%H:%M"),
}


def written(path, sign, cells):
    lines = [f"x{sign}label"] + [f"{cell}{sign}{'ab'[(row * 7) % 5 % 2]}" for row, cell in enumerate(cells)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("way", NUMBERS)
def test_numbers(way, tmp_path):
    sign, cells, values = NUMBERS[way]
    path = written(tmp_path / "d.csv", sign, cells)
    schema = propose(path)
    (column,) = schema.columns
    assert column.kind == "number", column.remark
    if values is None:
        values = [NAN if cell == "-99" else float(cell) for cell in cells]
    for word in {cell.strip() for cell in cells} & {"?", "-", "-999", "-99", "haemolysed"}:
        assert repr(word) in column.remark  # what is taken as missing is told
    found = read_table(path, schema).features[:, 0]
    np.testing.assert_array_equal(found, np.array(values))


@pytest.mark.parametrize("way", DATES)
def test_dates(way, tmp_path):
    sign, pattern, format_ = DATES[way]
    cells = [day.strftime(pattern) for day in DAYS]
    cells = cells if pattern.startswith("%Y%m") else every(7, "-", cells)
    path = written(tmp_path / "d.csv", sign, cells)
    schema = propose(path)
    (column,) = schema.columns
    assert (column.kind, column.format) == ("date", format_)
    found = read_table(path, schema).features[:, 0] * column.scale + column.reference
    parse = datetime.fromisoformat if format_ is None else lambda text: datetime.strptime(text, format_)
    days = [
        NAN if cell == "-" else (parse(cell) - datetime(1970, 1, 1)).total_seconds() / 86400 for cell in cells
    ]
    np.testing.assert_allclose(found, days, rtol=0, atol=1e-9)


@pytest.mark.parametrize("word", ["0000-00-00", "9999-12-31", "soon"])
def test_what_is_no_day_among_dates_is_missing(word, tmp_path):
    cells = every(29 if word == "soon" else 7, word, [day.strftime("%Y-%m-%d") for day in DAYS])
    (column,) = propose(written(tmp_path / "d.csv", ",", cells)).columns
    assert (column.kind, column.absent) == ("date", (word,))


def test_dates_of_several_forms_are_named(tmp_path):
    cells = [day.strftime("%Y-%m-%d" if row % 2 else "%d.%m.%Y") for row, day in enumerate(DAYS)]
    (column,) = propose(written(tmp_path / "d.csv", ",", cells)).columns
    assert "dates, but not all of one known form" in column.remark


@pytest.mark.parametrize("word", ["None", "NA"])
def test_a_word_for_nothing_is_a_category_among_others(word, tmp_path):
    cells = ["mild", "severe", word, ""] * 15
    schema = propose(written(tmp_path / "d.csv", ",", cells))
    (column,) = schema.columns
    assert column.categories == tuple(sorted(("mild", "severe", word)))
    assert (column.missing, repr(word) in column.remark) == ("flag", True)
    found = read_table(tmp_path / "d.csv", schema).features
    assert found.sum(axis=0).tolist() == [15, 15, 15, 0, 15]


def test_identifiers_may_repeat(tmp_path):
    path = tmp_path / "d.csv"
    rows = [f"{10_000 + 37 * (row // 2)},{VALUES[row]},{'ab'[row % 2]}" for row in range(ROWS)]
    path.write_text("patient_id,age,label\n" + "\n".join(rows))
    assert propose(path).identifiers == ("patient_id",)


def test_identifiers_may_have_zeros_in_front(tmp_path):
    path = tmp_path / "d.csv"
    rows = [f"{37 * row:07},{VALUES[row]},{'ab'[row % 2]}" for row in range(ROWS)]
    path.write_text("patient_id,age,label\n" + "\n".join(rows))
    assert propose(path).identifiers == ("patient_id",)


def test_digits_that_float64_takes_for_one_number_are_codes(tmp_path):
    codes = ["900000000000207008", "900000000000207009"]
    assert float(codes[0]) == float(codes[1])
    (column,) = propose(written(tmp_path / "d.csv", ",", codes * (ROWS // 2))).columns
    assert (column.kind, column.categories) == ("category", tuple(codes))


def test_a_column_of_lists_is_left_out(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"seen": [[value] for value in VALUES], "age": VALUES, "label": ["a", "b"] * (ROWS // 2)}
    parquet.write_table(pa.table(table), tmp_path / "d.parquet")
    seen, age = propose(tmp_path / "d.parquet").columns
    assert (seen.kind, age.kind) == ("unused", "number")
    assert "a list or a structure" in seen.remark


def test_what_can_be_read_in_two_ways_is_refused(tmp_path):
    path = written(tmp_path / "d.csv", ",", [f'"{1 + row % 5},{234 + row % 7}"' for row in range(ROWS)])
    with pytest.raises(DataError, match=r"'1,234' may be 1.234 or 1234.0.*--thousands"):
        propose(path)
    written(tmp_path / "e.csv", ";", [f"{1 + row % 5}.{234 + row % 7}" for row in range(ROWS)])
    with pytest.raises(DataError, match=r"'1\.234' may be 1.234 or 1234.0"):
        propose(tmp_path / "e.csv")
    for dialect, value in ((Dialect(decimal=","), 1.234), (Dialect(thousands=","), 1234.0)):
        assert read_table(path, propose(path, dialect=dialect), dialect).features[0, 0] == value


@pytest.mark.parametrize(
    ("cells", "part"),
    [
        (every(4, "97%", plain(VALUES)), "nearly numbers"),
        (every(4, "12.5-", plain(VALUES)), "nearly numbers, but 1 different cells"),
        ([f"{value} kg" for value in VALUES], "leave nothing but numbers in the cells"),
        ([f"{'$€'[row % 2]}{value}" for row, value in enumerate(VALUES)], "leave nothing but numbers"),
        (
            plain(VALUES[:45]) + [f"see note {row}" for row in range(15)],
            "nearly numbers, but 15 different cells",
        ),
    ],
    ids=["some with per cent", "a minus behind", "a unit", "two currencies", "many words"],
)
def test_nearly_numbers_are_named_with_a_remedy(cells, part, tmp_path):
    path = tmp_path / "d.csv"
    rows = [f"{cell},{VALUES[row]},{'ab'[row % 2]}" for row, cell in enumerate(cells)]
    path.write_text("x,age,label\n" + "\n".join(rows))
    column = propose(path).columns[0]
    assert column.kind == "unused"
    assert part in column.remark
    assert "under absent" in column.remark or "leave nothing but numbers" in column.remark


def test_numbers_far_above_and_leaks_are_flagged(tmp_path):
    path = tmp_path / "d.csv"
    rows = [f"{VALUES[row] if row % 9 else 999},{row % 6},{'ab'[row % 2]}" for row in range(ROWS)]
    path.write_text("age,ward,label\n" + "\n".join(rows))
    age, ward = propose(path).columns
    assert "999 occurs 7 times, far above the others" in age.remark
    assert "a leak? Each of its 6 values goes with one label only" in ward.remark


def test_signs_are_part_of_what_sites_agree_on(tmp_path):
    schema = propose(written(tmp_path / "d.csv", ",", every(5, "<39.1", plain(VALUES))))
    path = written(tmp_path / "e.csv", ",", every(5, "~39.1", plain(VALUES)))
    with pytest.raises(DataError, match=r"line 5: '~39\.1' is not a number"):
        read_table(path, schema)
    assert schema.to_note()["columns"][0]["signs"] == "<"


def test_how_a_file_is_read_is_told(tmp_path, capsys):
    """A column of 30.000 in a file of commas before fractions may mean 30; one with 950 too may not."""
    cells = "\n".join(f"{30 + n}.000;{n},25;{'950' if n % 2 else '1.200'};{n % 2}" for n in range(40))
    (tmp_path / "d.csv").write_text(f"bmi;crp;pay;y\n{cells}\n")
    with pytest.warns(DialectWarning, match="read with ';' between cells, ',' before fractions, '.' between"):
        table = read_table(tmp_path / "d.csv", layout=Dialect())
    with pytest.warns(
        SpellingWarning, match=r"'bmi': '30.000' is read as 30000, .*fractions, write ','"
    ) as told:
        read_table(tmp_path / "d.csv", layout=Dialect())
    assert not any("'pay'" in str(one.message) for one in told)
    assert table.features[0].tolist() == [30000, 0.25, 1200]
    with warnings_told():
        for _ in range(2):
            read_table(tmp_path / "d.csv", layout=Dialect())
    assert len(capsys.readouterr().err.splitlines()) == 2  # once each
    (tmp_path / "plain.csv").write_text("a,y\n1.234,0\n2.345,1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_table(tmp_path / "plain.csv", layout=Dialect())
