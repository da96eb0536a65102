"""Schemas and their encoding: aligned by name, the same for every kind of table, every misfit named."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from fedsolve.errors import CategoryWarning, DataError
from fedsolve.tables.encoder import category_text, encode
from fedsolve.tables.schema import Column, Extractor, Schema, from_toml, read_schema, to_toml, write_schema

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")

SCHEMA = Schema(
    (
        Column("id", "unused"),
        Column("age", missing="flag", unit="years", reference=60, scale=10),
        Column("sex", "category", categories=("F", "M"), missing="flag"),
        Column("stage", "category", categories=("1", "2", "007")),
        Column("visit", "date", reference=18262),
        Column("note", "text", buckets=4),
    ),
    label="y",
    classes=("sick", "well"),
    client="site",
)


def frame():
    return pd.DataFrame(
        {
            "age": [50.5, np.nan, 70.0, 81.0],
            "sex": ["F", "X", None, "M"],
            "stage": ["1", "7", "007", "2.0"],
            "visit": ["2020-01-01", "2021-01-01T12:00", None, "2019-12-31"],
            "note": ["Pain, pain.", "", None, "no fever"],
        }
    )


def words(text: str, buckets: int) -> np.ndarray:
    """The documented hashing vectoriser, word by word."""
    row = np.zeros(buckets)
    for word in text.split():
        number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        row[(number % 2**63) % buckets] += -1 if number >= 2**63 else 1
    length = np.linalg.norm(row)
    return row / length if length else row


def test_encoding_is_what_the_module_says():
    features = encode(SCHEMA, frame())
    nan = np.nan
    expected = np.column_stack(
        [
            [50.5, nan, 70, 81],
            [0, 1, 0, 0],
            [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]],
            [[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0]],
            np.array([0, 366.5, nan, -1]) / 365.25,
            [words(text, 4) for text in ("pain pain", "", "", "no fever")],
        ]
    )
    np.testing.assert_array_equal(features, expected)
    assert SCHEMA.width == features.shape[1] == len(SCHEMA.names)
    assert SCHEMA.names[:6] == ("age", "age=(missing)", "sex=F", "sex=M", "sex=(other)", "sex=(missing)")


@pytest.mark.parametrize("kind", ["dict", "lists", "arrow", "coded", "typed", "shuffled"])
def test_every_kind_of_table_gives_the_same_bits(kind):
    table = frame()
    expected = encode(SCHEMA, table)
    if kind == "dict":
        table = {name: table[name].to_numpy() for name in table}
    elif kind == "lists":
        table = {name: table[name].tolist() for name in table}
    elif kind == "arrow":
        table = pa.Table.from_pandas(table)
    elif kind == "coded":
        table = pa.Table.from_pandas(table.astype({"sex": "category", "stage": "category"}))
    elif kind == "typed":
        table["visit"] = pd.to_datetime(table["visit"], format="ISO8601")
        table["age"] = table["age"].astype("Float64")
        np.testing.assert_array_equal(encode(SCHEMA, pa.Table.from_pandas(table)), expected)
    else:
        table = table[["note", "sex", "visit", "age", "stage"]]
    np.testing.assert_array_equal(encode(SCHEMA, table), expected)


def test_rows_are_encoded_one_by_one():
    """No number of the encoding depends on the other rows."""
    table = pd.concat([frame()] * 6000, ignore_index=True)  # several blocks
    whole = encode(SCHEMA, table)
    np.testing.assert_array_equal(whole, np.tile(encode(SCHEMA, frame()), (6000, 1)))


def test_a_time_zone_counts_in_utc():
    column = Schema((Column("t", "date", scale=1.0),))
    moment = pd.to_datetime(["2020-01-01T02:00+02:00"])
    for table in ({"t": ["2020-01-01T02:00+02:00"]}, pd.DataFrame({"t": moment})):
        assert encode(column, table)[0, 0] == 18262.0


def test_a_format_of_dates():
    column = Schema((Column("t", "date", scale=1.0, format="%d.%m.%Y"),))
    assert encode(column, {"t": ["02.01.1970"]})[0, 0] == 1.0
    with pytest.raises(DataError, match=r"row 0: '1970-01-02' is not a date"):
        encode(column, {"t": ["1970-01-02"]})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (3.0, "3"),
        ("3.0", "3"),
        (" 3 ", "3"),
        ("007", "007"),
        (2.5, "2.5"),
        (True, "True"),
        ("a", "a"),
    ],
)
def test_categories_are_spelled_one_way(value, text):
    assert category_text(value) == text


def test_a_category_may_be_called_like_a_missing_value():
    column = Schema((Column("country", "category", categories=("NA", "DE"), missing="flag"),))
    features = encode(column, {"country": ["NA", "", "DE", "null"]})
    np.testing.assert_array_equal(features, [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]])


def test_all_misfits_of_columns_are_named_at_once():
    table = frame().rename(columns={"age": "Age", "sex": "weight"}).drop(columns="note")
    with pytest.raises(DataError) as caught:
        encode(SCHEMA, table)
    for part in (
        "'age' is missing (did you mean 'Age'?)",
        "'sex' is missing",
        "'note' is missing",
        "'weight' is not in the schema",
    ):
        assert part in str(caught.value)
    with pytest.raises(DataError, match="'y' is missing"):
        SCHEMA.check_columns(frame().columns, labelled=True)
    with pytest.raises(DataError, match="more than one column is called 'age'"):
        SCHEMA.check_columns([*frame().columns, "age"])
    SCHEMA.check_columns([*frame().columns, "zzz"], extra="ignore")


def test_all_bad_cells_are_named_at_once():
    table = frame()
    table["age"] = ["old", "1_000", "inf", "3"]
    table["visit"] = ["2020-13-01", "?", "", "2020-01-01"]
    with pytest.raises(DataError) as caught:
        encode(SCHEMA, table)
    message = str(caught.value)
    assert "3 cells in column 'age' (row 0: 'old' is not a number, row 1: '1_000'" in message
    assert "2 cells in column 'visit' (row 0: '2020-13-01' is not a date" in message


@pytest.mark.parametrize("kind", ["number", "date", "category", "text"])
def test_a_missing_value_may_be_refused(kind):
    column = Column("a", kind, missing="refuse", categories=("1",) if kind == "category" else ())
    good = "2020-01-01" if kind == "date" else "1"
    encode(Schema((column,)), {"a": [good]})
    with pytest.raises(DataError, match="row 1: it is empty"):
        encode(Schema((column,)), {"a": [good, None]})


def test_another_type_is_refused():
    with pytest.raises(DataError, match="1 cell in column 'age'"):
        encode(Schema((Column("age"),)), {"age": np.array(["2020-01-01"], dtype="datetime64[D]")})
    with pytest.raises(DataError, match="is not a date"):
        encode(Schema((Column("t", "date"),)), {"t": np.array([1.0])})
    with pytest.raises(DataError, match="as many rows as each other"):
        encode(Schema((Column("a"), Column("b"))), {"a": [1.0], "b": [1.0, 2.0]})


# -- the schema itself -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        Schema(
            (
                Column('od"d näme.\n', remark="a # remark\nof two lines"),
                Column("k", "category", categories=tuple(f"c{i}\t\\" for i in range(40))),
                Column("t", "date", format="%d.%m.%y", reference=0.5, missing="refuse"),
                Column("big", reference=1.7e9, scale=1e-7),
            ),
            label="l",
            classes=(0.5, 1.5),
        ),
        Schema((Column("a"),), label="l", classes=(False, True)),
        Schema((Column("a"),), label="l", classes=(1, 2, 3)),
        Schema(
            extractor=Extractor("onnx:net.onnx", {"size": 224, "mean": [0.5]}, "ab" * 32, 512), label="class"
        ),
    ],
)
def test_notes_and_files_give_the_schema_back(schema, tmp_path):
    note = json.loads(json.dumps(schema.to_note()))
    assert Schema.from_note(note) == schema
    assert Schema.from_note(note).digest == schema.digest
    write_schema(schema, tmp_path / "schema.toml")
    again = read_schema(tmp_path / "schema.toml")
    assert again == schema
    assert again.classes == schema.classes
    assert [type(label) for label in again.classes] == [type(label) for label in schema.classes]
    (tmp_path / "schema.toml").write_text("edited by hand")
    write_schema(schema, tmp_path / "schema.toml")
    assert (tmp_path / "schema.toml.previous").read_text() == "edited by hand"


def test_remarks_are_comments():
    assert "[columns.a]  # looks odd" in to_toml(Schema((Column("a", remark="looks\nodd"),)))


def test_the_digest_is_of_what_sites_must_agree_on():
    def changed(**parts):
        columns = parts.pop("columns", SCHEMA.columns)
        return Schema(columns, **({"label": "y", "classes": ("sick", "well"), "client": "site"} | parts))

    assert changed(client="other").digest == SCHEMA.digest
    assert changed(columns=SCHEMA.columns[1:]).digest == SCHEMA.digest  # an unused column
    assert changed(columns=(*SCHEMA.columns[:1], *SCHEMA.columns[:0:-1])).digest != SCHEMA.digest
    others = [changed(label="z"), changed(classes=("a", "b")), changed(columns=SCHEMA.columns[2:])]
    assert len({SCHEMA.digest, *(other.digest for other in others)}) == 4
    assert SCHEMA.differences(SCHEMA) == []
    assert SCHEMA.differences(others[2]) == ["column 'age' is not known there"]
    assert changed(columns=SCHEMA.columns[::-1]).differences(SCHEMA) == ["the columns are in another order"]
    unit = changed(
        columns=(Column("age", missing="flag", unit="months", reference=60, scale=10), *SCHEMA.columns[2:])
    )
    assert unit.differences(SCHEMA) == ["column 'age' has unit 'months', there 'years'"]


def test_a_file_that_a_site_keeps(tmp_path):
    (tmp_path / "agreed-schema.json").write_text(json.dumps(SCHEMA.to_note()))
    assert read_schema(tmp_path / "agreed-schema.json") == SCHEMA
    (tmp_path / "other.json").write_text('{"columns": 3}')
    with pytest.raises(DataError, match=r"other\.json: the schema cannot be used"):
        read_schema(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("label = ", ["not valid TOML"]),
        (
            'labl = "y"\n[columns.a]\nkind = "numbr"\n[columns.b]\nmising = "mean"',
            [
                "unknown key 'labl' in the schema. Did you mean 'label'?",
                "unknown kind 'numbr'. Did you mean 'number'?",
                "unknown key 'mising' in column 'b'",
            ],
        ),
        (
            '[columns.a]\nmissing = "other"',
            ["'other' is no rule for a number; choose among mean, flag, refuse"],
        ),
        ('[columns.a]\nkind = "category"', ["needs a list of categories"]),
        (
            '[columns.a]\nkind = "category"\ncategories = ["x"]\nmissing = "y"',
            ["no rule for a category; choose among other, flag, refuse or one of its categories"],
        ),
        ('[columns.a]\nkind = "category"\ncategories = ["x", "x"]', ["categories must differ"]),
        (
            '[columns.a]\nkind = "category"\ncategories = [1]',
            ["must be a list, each text; got [1]"],
        ),
        ("[columns.a]\nscale = -1", ["scale > 0"]),
        (
            "[columns.a]\nbounds = [5, 2]",
            ["bounds must be two numbers, the smaller one first; got [5.0, 2.0]"],
        ),
        ('[columns.a]\nreference = "now"', ["'reference' in column 'a' must be a finite number; got 'now'"]),
        ('[columns.a]\nkind = "unused"', ["uses no column"]),
        ('label = "a"\n[columns.a]', ["names 'a' more than once"]),
        ("", ["the columns of a table, or the features of images"]),
    ],
)
def test_mistakes_in_a_file_are_named(text, parts):
    with pytest.raises(DataError) as caught:
        from_toml(text)
    for part in parts:
        assert part in str(caught.value)


def test_an_unused_column_may_keep_its_settings():
    text = '[columns.a]\n[columns.b]\nkind = "unused"\nreference = 3\ncategories = ["x"]'
    assert from_toml(text) == Schema((Column("a"), Column("b", "unused")))


def test_numbers_beyond_the_bounds_count_as_the_bound():
    schema = from_toml('[columns.age]\nmissing = "flag"\nbounds = [0, 120]\n[columns.b]')
    assert from_toml(to_toml(schema)) == schema == Schema.from_note(schema.to_note())
    for cells in ([4000.0, -3.0, 61.5, np.nan], ["4000", "-3", "61.5", ""]):
        features = encode(schema, {"age": cells, "b": [4000.0] * 4})
        assert np.array_equal(features[:, 0], [120, 0, 61.5, np.nan], equal_nan=True)
        assert np.array_equal(features[:, 1:], [[0, 4000], [0, 4000], [0, 4000], [1, 4000]])
    with pytest.raises(DataError, match="age"):
        encode(schema, {"age": [np.inf], "b": [1.0]})


def test_many_values_of_no_category_are_told():
    schema = Schema((Column("colour", "category", categories=("red", "green")),), label="y")
    few = encode(schema, {"colour": ["red"] * 10 + ["violet"]})  # rare values are "other" on purpose
    assert few[-1].tolist() == [0.0, 0.0, 1.0]
    with pytest.warns(
        CategoryWarning, match=r"'colour': 2 of 4 values .*row 1: 'violet', row 3: 'blue'\) and"
    ):
        found = encode(schema, {"colour": ["red", "violet", "", "blue"]})
    assert found.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]


def test_classes_of_any_type_of_numbers_are_one_schema() -> None:
    columns = (Column("a", "number"),)
    one, other = (Schema(columns, "y", tuple(np.array([0, 1], dtype=kind))) for kind in (np.uint8, np.int64))
    assert one.digest == other.digest == Schema(columns, "y", (0, 1)).digest
