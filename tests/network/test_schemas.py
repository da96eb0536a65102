"""A schema over a network: part of the agreement and of the model; whoever has another one sends nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.data.row_reader import read_site
from fedsolve.errors import CohortError, DataError, ModelFileError
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.running import State, finished, run_method
from fedsolve.tables.schema import Column, Schema, write_schema
from fedsolve.tables.table_file import ColumnLayout, read_table
from tests.command import fedsolve as run
from tests.network.security.processes import free_port, running

from .pretended import PretendedLink
from .sites import same_bits
from .test_server import PATIENCE, fedsolve, wait_until

SCHEMA = Schema(
    (
        Column("age", reference=50, scale=20),
        Column("since", "date"),
        Column("group", "category", categories=("a", "b")),
        Column("patient", "unused"),
    ),
    label="ill",
    classes=("no", "yes"),
)
METHOD = fs.AFL(ridge=0.1)


def write(
    path: Path, seed: int = 0, order: tuple[str, ...] = ("patient", "age", "since", "group", "ill")
) -> Path:
    """80 rows with categories, dates and missing values."""
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 20, 80)
    cells = {
        "patient": [str(number) for number in range(80)],
        "age": ["" if number % 7 == 0 else f"{years:.2f}" for number, years in enumerate(age)],
        "since": [f"20{year:02d}-03-01" for year in rng.integers(0, 25, 80)],
        "group": list(rng.choice(["a", "b", "c"], 80)),
        "ill": ["yes" if years > 50 else "no" for years in age],
    }
    rows = zip(*(cells[name] for name in order), strict=True)
    path.write_text("\n".join([",".join(order), *map(",".join, rows)]) + "\n")
    return path


def site(path: Path, schema: Schema | None = SCHEMA, show=None) -> Answerer:
    rows = read_table(path, SCHEMA)
    features = rows.features if schema is not None else np.nan_to_num(rows.features)
    return Answerer(path.stem, fs.ClientData(features, rows.labels, schema=schema), show=show)


def federate(link: PretendedLink, **options) -> NetworkFederation:
    settings = {"clients": 2, "schema": SCHEMA, "interval": 0.001, "grace": 0.0, "patience": 0.05}
    return NetworkFederation(link, **{**settings, "classes": ["no", "yes"], **options})


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    shuffled = ("ill", "group", "since", "age", "patient")
    return [write(tmp_path / "north.csv"), write(tmp_path / "south.csv", 1, shuffled)]


def test_a_described_run_is_that_of_one_process(paths):
    told = []
    federation = federate(PretendedLink([site(path) for path in paths]), tell=told.append)
    model = fs.Recipe(METHOD, SCHEMA).fit(federation)
    members = [
        fs.Participant(p.stem, fs.ClientData(r.features, r.labels, schema=SCHEMA)) for p, r in rows(paths)
    ]
    local = fs.LocalFederation(members, classes=["no", "yes"])
    assert same_bits(model, fs.Recipe(METHOD, SCHEMA).fit(local))
    assert model.schema == SCHEMA
    assert federation.evaluate(model) == local.evaluate(model) > 0.8
    assert not any("known from the first one only" in text for text in told)


def rows(paths):
    return [(path, read_table(path, SCHEMA)) for path in paths]


OTHER = dataclasses.replace(SCHEMA, columns=(Column("age", reference=40, scale=20), *SCHEMA.columns[1:]))


@pytest.mark.parametrize(
    ("server", "south", "words", "at_site"),
    [
        (
            SCHEMA,
            OTHER,
            "schema of 'south' is not the server's",
            "column 'age' has reference 40.0, there 50.0",
        ),
        (SCHEMA, None, "'south' reads its rows without one", "--schema schema.toml"),
        (None, SCHEMA, "'south' reads its rows by a schema, and the server has none", "--schema"),
    ],
)
def test_another_schema_is_refused_before_anything_is_sent(paths, server, south, words, at_site):
    shown = []
    link = PretendedLink([site(paths[0], server), site(paths[1], south, shown.append)])
    with pytest.raises(CohortError, match=words) as refusal:
        METHOD.fit(federate(link, schema=server))
    assert "40" not in str(refusal.value)
    assert at_site in shown[-1].text
    assert {note["ask"] for _, note in link.sent} == {"describe"}


def test_a_site_that_only_says_that_it_has_the_schema_is_not_taken_in(paths):
    class Silent(PretendedLink):
        def receive(self, message):
            reply = super().receive(message)
            return dataclasses.replace(reply, note={**reply.note, "schema": None})

    link = Silent([site(path) for path in paths])
    with pytest.raises(CohortError, match="'south' does not use the server's schema"):
        federate(link).describe()


def test_an_unused_column_of_one_site_is_no_difference(paths):
    own = dataclasses.replace(SCHEMA, columns=(*SCHEMA.columns, Column("ward", "unused")))
    link = PretendedLink([site(paths[0]), site(paths[1], own)])
    assert federate(link).describe().features == SCHEMA.width


def test_a_run_goes_on_only_with_its_schema(paths, tmp_path):
    state = State(tmp_path / "state")

    def federated(schema):
        link = PretendedLink([site(path, schema) for path in paths])
        return federate(link, schema=schema, begun=state.begun(), report=state.enter)

    model = run_method(fs.Recipe(METHOD, SCHEMA), federated(SCHEMA), state)
    again = finished(fs.Recipe(METHOD, SCHEMA), state, ["no", "yes"], schema=SCHEMA)
    assert same_bits(again, model)
    assert json.loads(state.report.read_text())["method"] == "afl"
    others = ((OTHER, fs.Recipe(METHOD, OTHER)), (None, fs.Recipe(METHOD)))
    for schema, method in others:
        with pytest.raises(ModelFileError, match="a run whose schema is"):
            finished(method, state, ["no", "yes"], schema=schema)
    for schema, method in others:
        with pytest.raises(ModelFileError, match="a run whose schema is"):
            run_method(method, federated(schema), state)


# -- commands --------------------------------------------------------------------------------------

SPOILED = """patient,ages,since,group,ill
1,50,2001-13-01,a,yes
2,60,2001-01-01,b,maybe
"""


def test_all_that_does_not_fit_is_told_at_once(tmp_path):
    path = tmp_path / "site.csv"
    path.write_text(SPOILED)
    with pytest.raises(DataError) as refusal:
        read_site(str(path), SCHEMA, ColumnLayout())
    for word in ("'age' is missing (did you mean 'ages'?)", "'ages' is not in", "'since' (line 2", "maybe"):
        assert word in str(refusal.value)


def test_the_doctor_checks_a_site_against_the_schema(paths, tmp_path):
    write_schema(SCHEMA, tmp_path / "schema.toml")
    words = ["doctor", "--insecure", "--schema", str(tmp_path / "schema.toml"), "--json"]
    done = run(*words, "--data", str(paths[0]))
    finding = {each["check"]: each for each in json.loads(done.stdout)["findings"]}["data"]
    assert (done.exit_code, finding["state"]) == (0, "ok")
    assert "80 rows" in finding["seen"]
    paths[0].write_text(SPOILED)
    done = run(*words, "--data", str(paths[0]))
    finding = {each["check"]: each for each in json.loads(done.stdout)["findings"]}["data"]
    assert (done.exit_code, finding["state"]) == (2, "failed")
    assert "'age' is missing" in finding["seen"]
    assert "line 2" in finding["seen"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--label", "ill"), "do not go with --schema"),
        (("--backbone", "pixels"), "leave out --backbone"),
    ],
)
def test_a_client_says_what_a_schema_says_already(paths, tmp_path, words, message):
    write_schema(SCHEMA, tmp_path / "schema.toml")
    line = [
        "client",
        "--insecure",
        "--plain",
        "--server",
        "127.0.0.1:9",
        "--name",
        "north",
        "--data",
        str(paths[0]),
    ]
    line += ["--schema", str(tmp_path / "schema.toml"), "--state", str(tmp_path / "state"), *words]
    done = run(*line)
    assert done.exit_code == 2
    assert message in done.stderr


def test_classes_beside_a_schema_must_be_its_own(tmp_path):
    write_schema(SCHEMA, tmp_path / "schema.toml")
    line = ["server", "--insecure", "--plain", "--clients", "2", "--schema", str(tmp_path / "schema.toml")]
    done = run(*line, "--classes", "yes,maybe", "--state", str(tmp_path / "state"))
    assert (done.exit_code, "leave --classes out" in done.stderr) == (2, True)
    assert not (tmp_path / "state").exists()


@pytest.mark.network
@pytest.mark.slow
def test_processes_train_by_a_schema_and_one_without_it_is_refused(paths, tmp_path):
    address, log, out = f"127.0.0.1:{free_port()}", tmp_path / "server.log", tmp_path / "model.safetensors"
    schema = tmp_path / "schema.toml"
    write_schema(SCHEMA, schema)
    line = fedsolve(
        "server",
        "--insecure",
        "--plain",
        "--listen",
        address,
        "--clients",
        2,
        "--schema",
        schema,
        "--evaluate",
    )
    line += ["--method", "afl", "--ridge", "0.1", "--state", str(tmp_path / "state"), "--out", str(out)]
    line += ["--patience", "60", "--gather", "60"]

    def client(name: str, *words: object) -> list[str]:
        where = [
            "--insecure",
            "--plain",
            "--server",
            address,
            "--name",
            name,
            "--once",
            "--state",
            tmp_path / name,
        ]
        return fedsolve("client", *where, *words)

    numbers = tmp_path / "numbers.csv"
    numbers.write_text("a,b,c,d,ill\n1,2,3,4,yes\n5,6,7,9,no\n")
    refused = client("west", "--data", numbers, "--label", "ill")
    with running(line, log) as server, running(refused, tmp_path / "west.log") as west:
        wait_until(lambda: "'west' reads its rows without one" in log.read_text(), server, log)
        assert west.wait(PATIENCE) == 2  # it does not wait for what waiting cannot mend
        north, south = (client(path.stem, "--data", path, "--schema", schema) for path in paths)
        with (
            running(north, tmp_path / "north.log") as first,
            running(south, tmp_path / "south.log") as second,
        ):
            assert server.wait(PATIENCE) == 0, log.read_text()
            assert first.wait(PATIENCE) == second.wait(PATIENCE) == 0
    assert "--schema schema.toml" in (tmp_path / "west.log").read_text()
    model = fs.load_model(out)
    assert model.schema == SCHEMA
    table = {"age": ["70", ""], "since": ["2001-01-01"] * 2, "group": ["a", "z"]}
    assert model.predict(table)[0] == "yes"
