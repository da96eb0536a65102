"""Sites with raw tables and no schema propose one; the server fixes it, through files and in one process."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.network.answering import Event
from fedsolve.network.proposing import Proposing
from fedsolve.tables.proposal import merged, propose_for, summary
from fedsolve.tables.schema import Column, Schema, read_schema
from fedsolve.tables.table_file import ColumnLayout
from fedsolve.version import PROTOCOL, __version__
from tests.command import document, fedsolve
from tests.network.test_file_federation import SITES, Run, rows, world  # noqa: F401  (fixtures)


def raw_tables(top: Path, folder: Path) -> Path:
    """A raw table for every site: an identifier, days, a category, gaps; all of them together in one file."""
    rng = np.random.default_rng(3)
    whole = [["site", "patient_id", "admitted", "ward", "age", "outcome"]]
    for number, site in enumerate(SITES):
        own = []
        for row in range(80):
            age = rng.normal(60, 10)
            ward = str(rng.choice(["icu", "surgery"])) if row else f"room of {site}"
            day = f"{rng.integers(1, 29):02d}.{rng.integers(1, 13):02d}.2023"
            outcome = "yes" if age + 10 * (ward == "icu") + rng.normal(0, 5) > 65 else "no"
            gap = rng.random() < 0.1 and number == 1
            own.append([f"p{number}{row:04d}", day, ward, "" if gap else f"{age:.1f}", outcome])
        with open(top / site / "raw.csv", "w", newline="") as stream:
            csv.writer(stream).writerows([whole[0][1:], *own])
        whole += [[site, *row] for row in own]
    with open(folder / "whole.csv", "w", newline="") as stream:
        csv.writer(stream).writerows(whole)
    return folder / "whole.csv"


class Proposed(Run):
    def site(self, name, request, out, data=None):
        words = super().site(name, request, out, self.world / name / "raw.csv")
        return (*(word for word in words if word not in ("--label", "kind", "--share-classes")), "--propose")


def test_raw_tables_need_no_schema_through_files(world, tmp_path):  # noqa: F811
    whole = raw_tables(world, tmp_path)
    out = tmp_path / "schema.toml"
    run = Proposed(world, tmp_path, "--method", "afl", "--schema-out", str(out))
    reply = run.to_the_end()
    schema = read_schema(out)
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == {"patient_id": "identifier", "admitted": "date", "ward": "category", "age": "number"}
    # One row has a ward of its own; nobody is told of it.
    assert next(c.categories for c in schema.columns if c.name == "ward") == ("icu", "surgery")
    assert schema.classes == ("no", "yes")
    local = document(
        "train", whole, "--method", "afl", "--schema", _owned(out, tmp_path), "--no-calibrate",
        "--out", tmp_path / "local.safetensors", "--json",
    )  # fmt: skip
    assert local["rows"] == 240
    table = {"patient_id": ["p"], "admitted": ["03.05.2023"], "ward": ["icu"], "age": [61.0]}
    found, expected = (fs.load_model(p).decision_function(table) for p in (reply["model"], local["model"]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_schema_of_a_question_is_that_of_the_run(world, tmp_path):  # noqa: F811
    raw_tables(world, tmp_path)
    out = tmp_path / "schema.toml"
    asked = (
        "--method",
        "glm",
        "--formula",
        "outcome ~ age",
        "--family",
        "binomial",
        "--schema-out",
        str(out),
    )
    reply = Proposed(world, tmp_path, *asked).to_the_end()
    assert [column.name for column in read_schema(out).used] == ["admitted", "ward", "age"]
    assert (read_schema(out).label, read_schema(out).classes) == ("outcome", ("no", "yes"))
    assert fs.load_model(reply["model"]).facts["event"] == "outcome = yes"


def _owned(schema: Path, folder: Path) -> Path:
    """The schema, with the column that says whose row it is."""
    text = schema.read_text().replace('label = "outcome"', 'label = "outcome"\nclient = "site"')
    (folder / "owned.toml").write_text(text)
    return folder / "owned.toml"


@pytest.mark.slow
def test_a_table_can_be_looked_at_before_it_is_proposed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [
        "ward,age,outcome",
        *(f"{'abz'[2 if row == 7 else row % 2]},{row * 1.37},{row % 3 % 2}" for row in range(60)),
    ]
    Path("a.csv").write_text("\n".join(lines))
    data = ("--data", "a.csv", "--label", "outcome")
    ways = ("Give --propose at every site, or the same --schema at every site and the server",)
    found = fedsolve("doctor", "--insecure", *data)
    assert found.exit_code == 2
    assert ways[0] in " ".join(found.output.split())
    client = ("client", "--server", "h:1", "--name", "n", "--insecure", "--plain", *data)
    for words in (client, (*client, "--dry-run")):
        found = fedsolve(*words)
        assert found.exit_code == 2
        assert ways[0] in found.stderr
    told = "categories: ward (a, b; others as one); note: 'ward': not told, each in fewer than 10 rows: z"
    for words in (("doctor", "--insecure", *data, "--propose"), (*client, "--propose", "--dry-run")):
        found = fedsolve(*words, "--json")
        assert found.exit_code == 0, found.output
        assert told in found.stdout


def test_what_few_rows_have_is_not_told(tmp_path):
    path = tmp_path / "a.csv"
    lines = ["ward,dose,rare,outcome"]
    for row in range(40):
        ward = "only here" if row == 7 else ("a", "b")[row % 2]
        dose = "pending: Mrs Doe" if row == 5 else "?" if row == 6 else str(row * 1.37)
        lines.append(f"{ward},{dose},{row % 8},{('no', 'yes', 'odd')[2 if row == 9 else row % 2]}")
    path.write_text("\n".join(lines))
    told = propose_for([path], ColumnLayout(label="outcome"), fewest=10)
    columns = {column.name: column for column in told.columns}
    assert columns["ward"].categories == ("a", "b")
    assert columns["ward"].remark == "not told, each in fewer than 10 rows: only here"
    assert columns["dose"].absent == ("?",)
    assert (columns["dose"].reference, columns["dose"].scale) == (0.0, 1.0)  # of 40 values only
    assert told.classes == ("no", "yes")
    assert "Doe" not in str(told.to_note())
    assert "only here" not in str(told.to_note())


def test_columns_of_several_sites_become_one_schema():
    def site(*columns, label="y", task=None):
        return Schema((Column("x", reference=10.0, scale=2.0), *columns), label, task=task)

    a = site(Column("w", "category", categories=("a", "b")), Column("d", "date"), Column("k"))
    b = site(
        Column("w", "category", categories=("b", "c"), missing="flag"), Column("d", "date", format="%d.%m.%Y")
    )
    c = site(Column("w", "unused"), Column("d", "unused"), Column("k", "identifier"))
    made = {column.name: column for column in merged({"a": a, "b": b, "c": c}).columns}
    assert (made["w"].categories, made["w"].missing) == (("a", "b", "c"), "flag")
    assert made["d"].kind == "unused"
    assert "ISO 8601" in made["d"].remark
    assert made["k"].kind == "identifier"
    here = site(Column("crp"), Column("w"))
    few = {one.name: one.remark for one in merged({"a": here, "b": a, "d": here}).columns}
    assert few["crp"] == "unused: b does not have it"
    assert few["w"] == "unused: it is a number at a, d and a category at b; give all sites one schema"
    assert summary(merged({"a": a, "b": b}), levels=True)[1] == "categories: w (a, b, c; others as one)"
    assert (made["x"].reference, made["x"].scale) == (10.0, 2.0)
    assert merged({"a": a, "b": site(task="regression")}).task == "regression"
    with pytest.raises(DataError, match="label columns have different names: 'y'"):
        merged({"a": a, "b": site(label="z")})


def test_a_site_hears_why_its_columns_are_left_out_and_what_it_did_not_tell(tmp_path):
    ward = Column("ward", "category", categories=("a",), remark="not told, each in fewer than 10 rows: z")
    own = Schema((Column("x"), Column("crp"), Column("far"), ward), "y", (0, 1))
    shown: list[Event] = []
    site = Proposing("north", own, tmp_path, lambda schema: None, shown.append)
    about = {"fedsolve": PROTOCOL, "version": __version__, "ask": "describe", "run": "r", "schema": None}
    reply, _ = site.reply(about, np.zeros(0))
    assert "not told" not in str(reply)
    assert shown[-1].text.endswith("; 'ward': not told, each in fewer than 10 rows: z")
    left = tuple(Column(name, "unused") for name in ("crp", "far"))
    agreed = Schema((Column("x"), *left, Column("ward", "category", categories=("a",))), "y", (0, 1))
    site._take(agreed, {"crp": "unused: west does not have it"})
    assert (
        "left out: 'crp': west does not have it; left out: 'far': the sites' schema leaves" in shown[-1].text
    )


def test_a_server_cannot_ask_for_another_label_or_an_identifier(tmp_path):
    own = Schema((Column("x"), Column("name", "identifier")), "y", (0, 1))
    shown: list[Event] = []
    site = Proposing("north", own, tmp_path, lambda schema: pytest.fail("rows were read"), shown.append)
    about = {"fedsolve": PROTOCOL, "version": __version__, "ask": "describe", "run": "r"}
    reply, _ = site.reply({**about, "schema": None}, np.zeros(0))
    assert reply["ok"]
    assert reply["proposal"]["label"] == "y"
    for asked in (Schema((Column("x"),), "x2", (0, 1)), Schema((Column("x"), Column("name")), "y", (0, 1))):
        reply, _ = site.reply({**about, "schema": asked.to_note()}, np.zeros(0))
        assert not reply["ok"]
        assert "does not propose to use" in shown[-1].text
