"""Sites go together only where their columns do; others are refused by name before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import CohortError, DataError
from fedsolve.federation.engine import hears
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.running import State, run_method
from fedsolve.tables.table_file import ColumnLayout, read_table
from tests.command import fedsolve as run
from tests.network.security.processes import free_port, running

from .pretended import PretendedLink
from .sites import same_bits
from .test_server import PATIENCE, fedsolve, wait_until

NAMES = ("age", "pressure", "weight")


def write(path: Path, order: tuple[str, ...] = NAMES, seed: int = 0, header: tuple[str, ...] = ()) -> Path:
    """A table of 60 rows whose label depends on all columns, in any order and under any names."""
    rng = np.random.default_rng(seed)
    values = dict(zip(NAMES, rng.normal(size=(3, 60)) * [[1.0], [10.0], [100.0]], strict=True))
    label = values["age"] + values["pressure"] / 10 - values["weight"] / 100 > 0
    extra = {name: rng.normal(size=60) for name in order if name not in NAMES}
    columns = [(values | extra)[name] for name in order] + [label.astype(int)]
    lines = [",".join(f"{cell:.17g}" for cell in row) for row in zip(*columns, strict=True)]
    path.write_text("\n".join([",".join([*(header or order), "ill"]), *lines]) + "\n")
    return path


def site(path: Path, show=None, header: bool = True) -> Answerer:
    table = read_table(path, layout=ColumnLayout(label="3" if not header else "ill", header=header))
    data = fs.ClientData(table.features, table.labels)
    return Answerer(path.stem, data, columns=table.schema, show=show)


def federate(link: PretendedLink, **options) -> NetworkFederation:
    settings = {"clients": 2, "classes": [0, 1], "interval": 0.001, "grace": 0.0, "patience": 0.05} | options
    return NetworkFederation(link, **settings)


@pytest.mark.parametrize(
    ("order", "header", "words"),
    [
        (
            ("pressure", "age", "weight"),
            (),
            ["in another order", "feature 0 is 'pressure', there 'age'", "Put them into the same order"],
        ),
        (
            NAMES,
            ("age", "presure", "weight"),
            [
                "'pressure' is missing (did you mean 'presure'?)",
                "'presure' is not known there",
                "Rename them",
            ],
        ),
        (("age", "pressure"), (), ["column 'weight' is missing", "(--drop)"]),
        ((*NAMES, "height"), (), ["column 'height' is not known there", "(--drop)"]),
    ],
    ids=["shuffled", "renamed", "missing", "added"],
)
def test_other_columns_are_refused_by_name_before_anything_is_sent(tmp_path, order, header, words):
    shown = []
    north = site(write(tmp_path / "north.csv"))
    south = site(write(tmp_path / "south.csv", order, 1, header), shown.append)
    link = PretendedLink([north, south])
    with pytest.raises(CohortError) as refusal:
        fs.AFL(ridge=0.1).fit(federate(link))
    for word in ["'south'", "'north'", *words]:
        assert word in str(refusal.value)
    assert {note["ask"] for _, note in link.sent} == {"describe", "tell"}
    south.reply(next(note for _, note in link.sent if note["ask"] == "tell"), np.empty(0, np.uint8))
    assert words[0] in shown[-1].text


def test_the_same_columns_train_the_model_of_one_process(tmp_path):
    paths = [write(tmp_path / "north.csv"), write(tmp_path / "south.csv", seed=1)]
    model = fs.AFL(ridge=0.1).fit(federate(PretendedLink([site(path) for path in paths])))
    tables = [read_table(path) for path in paths]
    members = [
        fs.Participant(path.stem, fs.ClientData(table.features, table.labels))
        for path, table in zip(paths, tables, strict=True)
    ]
    assert same_bits(model, fs.AFL(ridge=0.1).fit(fs.LocalFederation(members, classes=[0, 1])))


def test_a_client_sends_the_names_of_a_table_by_its_address(tmp_path, monkeypatch):
    path, sent = write(tmp_path / "north.csv"), []

    class Stopped(Exception):
        pass

    def answerer(name, data, columns, **options):
        sent.extend(column.name for column in columns.used)
        raise Stopped

    monkeypatch.setattr("fedsolve.network.answering.Answerer", answerer)
    line = ["client", "--insecure", "--plain", "--server", "127.0.0.1:9", "--name", "north"]
    run(*line, "--data", f"csv:{path}?label=ill", "--state", str(tmp_path / "state"))
    assert sent == list(NAMES)


@pytest.mark.parametrize("first", ["north", "south"])
def test_the_model_of_a_server_knows_the_columns(tmp_path, first):
    paths = [write(tmp_path / "north.csv"), write(tmp_path / "south.csv", seed=1)]
    link = PretendedLink(sorted(map(site, paths), key=lambda each: each.name != first))
    state = State(tmp_path / "state")
    run_method(fs.Recipe(fs.AFL(ridge=0.1)), federate(link, patience=5.0), state)
    model = fs.load_model(state.model)
    assert (model.schema.label, model.schema.classes) == ("ill", (0, 1))
    table = read_table(paths[0], layout=ColumnLayout(label="ill"))
    shuffled = {name: table.features[:, NAMES.index(name)] for name in NAMES[::-1]}
    np.testing.assert_array_equal(model.predict(shuffled), model.predict(table.features))
    shuffled["presure"] = shuffled.pop("pressure")
    with pytest.raises(DataError, match="'pressure' is missing"):
        model.predict(shuffled)


def test_names_too_long_to_be_sent_are_compared_by_digest(tmp_path, monkeypatch):
    monkeypatch.setattr("fedsolve.network.site_columns._LONGEST", 10)
    north, south = write(tmp_path / "north.csv"), write(tmp_path / "south.csv", NAMES[::-1], 1)
    with pytest.raises(CohortError, match=r"columns of 'south' are not those of 'north'.*same order"):
        federate(PretendedLink([site(north), site(south)])).describe()
    assert federate(PretendedLink([site(north), site(write(south, seed=1))])).describe().features == 3


def test_where_one_site_has_no_names_people_are_told(tmp_path):
    told = []
    north, south = site(write(tmp_path / "north.csv")), write(tmp_path / "south.csv", seed=1)
    south.write_text(south.read_text().split("\n", 1)[1])
    link = PretendedLink([north, site(south, header=False)])
    assert federate(link, tell=told.append).describe().features == 3
    assert any("no names of columns from 'south'" in text for text in told)


def test_a_site_that_comes_back_with_shuffled_columns_before_it_has_answered_refuses_itself(tmp_path):
    north, south = site(write(tmp_path / "north.csv")), site(write(tmp_path / "south.csv", seed=1))
    link = PretendedLink([north, south])
    federation = federate(link)
    federation.describe()
    link.sites[2] = site(write(tmp_path / "south.csv", NAMES[::-1], 1))
    with pytest.raises(DataError, match="columns of 'south' are not those of the run"):
        fs.AFL(ridge=0.1).fit(federation)


def test_a_site_that_was_mended_is_not_compared_with_what_it_said_before(tmp_path):
    first = site(write(tmp_path / "north.csv", NAMES[::-1]))
    link = PretendedLink([first])
    federation = federate(link)
    with pytest.raises(CohortError, match="1 of 2"):
        federation.describe()
    link.present.clear()
    federation._roster.look()
    link.sites[2] = site(write(tmp_path / "north.csv"))
    link.sites[3] = site(write(tmp_path / "south.csv", seed=1))
    link.activations |= {2: "first", 3: "first"}
    link.present = {2, 3}
    assert federation.describe(patience=5.0).features == 3


def test_a_resumed_run_knows_its_columns_before_the_first_site_is_back(tmp_path):
    paths = [write(tmp_path / "north.csv"), write(tmp_path / "south.csv", seed=1)]

    def federated(*sites: Answerer):
        link = PretendedLink(sites)
        return federate(link, clients=len(sites), begun=state.begun(), report=state.enter)

    class Killed(BaseException):
        pass

    def kill(record, expected):
        raise Killed

    state, method = State(tmp_path / "state"), fs.DeepAFL(layers=2, width=8)
    with pytest.raises(Killed):
        run_method(fs.Recipe(method), federated(*map(site, paths)), state, [hears("advanced", kill)])
    shuffled = site(write(tmp_path / "east.csv", NAMES[::-1], 2))
    with pytest.raises(CohortError, match="'east' are those of the run's other sites in another order"):
        run_method(fs.Recipe(method), federated(shuffled), state)


def test_a_column_of_another_type_is_refused_at_the_site(tmp_path):
    path = write(tmp_path / "north.csv")
    path.write_text(path.read_text().replace("\n", "\nold", 1))
    line = ["client", "--insecure", "--plain", "--server", "127.0.0.1:9", "--name", "north", "--label", "ill"]
    done = run(*line, "--data", str(path), "--state", str(tmp_path / "state"))
    assert done.exit_code == 2
    assert "in column 'age' (line 2: 'old" in done.stderr
    assert not (tmp_path / "state" / "sent.jsonl").exists()


@pytest.mark.network
@pytest.mark.slow
def test_two_processes_with_shuffled_columns_train_no_model(tmp_path):
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "server.log"
    line = fedsolve(
        "server", "--insecure", "--plain", "--listen", address, "--clients", 2, "--classes", "0,1"
    )
    line += ["--method", "afl", "--state", str(tmp_path / "state"), "--gather", "300"]
    write(tmp_path / "north.csv")
    write(tmp_path / "south.csv", NAMES[::-1], 1)

    def client(name: str) -> list[str]:
        words = ["client", "--insecure", "--plain", "--server", address, "--name", name, "--label", "ill"]
        words += ["--data", tmp_path / f"{name}.csv", "--state", tmp_path / name]
        return fedsolve(*words)

    with running(line, log) as server, running(client("north"), tmp_path / "north.log") as north:
        wait_until(lambda: "'north' is there" in log.read_text(), server, log)
        with running(client("south"), tmp_path / "south.log") as south:
            assert south.wait(PATIENCE) == 2  # at once, with the reason, whatever the server's patience
            assert server.poll() is None  # which would take it in, mended
            assert north.poll() is None
    assert "columns of 'south' are those of 'north' in another order" in log.read_text()
    assert "in another order" in (tmp_path / "south.log").read_text()
    for name in ("north", "south"):
        sent = [json.loads(text) for text in (tmp_path / name / "sent.jsonl").read_text().splitlines()]
        assert "answered" not in {event["what"] for event in sent}
        assert "sent are the names of its columns" in sent[0]["text"]
    assert not (tmp_path / "state" / "model.safetensors").exists()
