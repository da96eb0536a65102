"""A column of text through a backbone: in a schema, a command, a run over a network, a file of ONNX."""

from __future__ import annotations

import dataclasses
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.data import text_rows
from fedsolve.data.backbones import load_backbone
from fedsolve.data.backbones.transformers import TextBackbone
from fedsolve.data.feature_store import FeatureStore
from fedsolve.data.row_reader import read_site
from fedsolve.data.text_rows import described, text_features
from fedsolve.errors import CohortError, DataError, ModelFileError, TruncationWarning
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.tables.encoder import encode
from fedsolve.tables.schema import Column, Schema, from_toml, to_toml
from fedsolve.tables.table_file import ColumnLayout
from tests.command import document, fedsolve, refused
from tests.network.pretended import PretendedLink
from tests.network.sites import same_bits

from .tiny_text import tiny_bert, write_notes


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network, in which the commands run; nothing is kept elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSOLVE_STORE", str(tmp_path / "store"))
    tiny_bert(tmp_path / "bert")
    text_rows._loaded.cache_clear()
    return tmp_path


def schema(missing: str = "empty", address: str = "hf:./bert") -> Schema:
    columns = (
        Column("note", "text", missing=missing, backbone=described(address)),
        Column("age", reference=60, scale=20),
        Column("sex", "category", categories=("f", "m")),
    )
    return Schema(columns, "ward", ("lung", "skin"), "site")


def table(notes: list[Any]) -> dict[str, list[Any]]:
    return {"note": notes, "age": [50] * len(notes), "sex": ["f"] * len(notes)}


def test_a_column_is_what_the_backbone_gives() -> None:
    found = encode(schema(), table(["fever", None, "rash and itch", "fever", " "]))
    expected = load_backbone("hf:./bert").extract(["fever", "rash and itch"])
    assert found.shape == (5, 32 + 1 + 3)
    np.testing.assert_allclose(found[[0, 2], :32], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[3], found[0])
    np.testing.assert_array_equal(found[[1, 4], :32], np.zeros((2, 32)))
    with pytest.raises(DataError, match=r"1 cell in column 'note' \(row 1: it is empty\)"):
        encode(schema("refuse"), table(["fever", ""]))


def test_features_keep_their_bits_and_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = [f"fever since {day} days" for day in range(100)]
    wanted = described("hf:./bert")
    asked: list[int] = []
    extract = TextBackbone.extract

    def counted(self: TextBackbone, rows: Any) -> Any:
        asked.append(len(rows))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return extract(self, rows)

    text_features(["rash"], wanted)  # the network is loaded and tried out
    monkeypatch.setattr(TextBackbone, "extract", counted)
    with pytest.raises(KeyboardInterrupt):
        text_features(notes, wanted)
    first = text_features(notes, wanted)
    assert asked == [64, 36, 36]
    again = text_features(["severe rash", *notes[::-1]], wanted)
    np.testing.assert_array_equal(again[1:], first[::-1])
    assert asked == [64, 36, 36, 1]


def test_texts_that_are_cut_are_told() -> None:
    with pytest.warns(TruncationWarning, match=r"2 of 3 different texts are longer than the 24 tokens"):
        encode(schema(), table(["fever " * 30, "cough", "rash " * 30, "cough"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode(schema(), table(["fever", "cough"]))


def test_only_the_backbone_of_the_schema_is_taken(work: Path) -> None:
    wanted = schema()
    (work / "bert").rename(work / "moved")
    with pytest.raises(ModelFileError, match=r"the model's backbone cannot be loaded.*--backbone"):
        encode(wanted, table(["mild pain"]))
    assert encode(wanted.moved("hf:./moved"), table(["mild pain"])).shape == (1, 36)
    tiny_bert(work / "bert", seed=1)
    with pytest.raises(DataError, match=r"column 'note': hf:./bert does not give .*have the digest"):
        encode(dataclasses.replace(wanted), table(["mild pain"]))


def test_no_other_code_is_run_for_a_schema(work: Path) -> None:
    (work / "evil.py").write_text("raise SystemExit('it ran')")
    backbone = dataclasses.replace(described("hf:./bert"), address="torch:./evil.py:make")
    columns = (Column("note", "text", backbone=backbone),)
    with pytest.raises(DataError, match=r"make' does not read text; use hf:NAME or st:NAME"):
        encode(Schema(columns), {"note": ["fever"]})


def test_the_schema_in_a_file_and_what_must_agree(work: Path) -> None:
    ours = schema()
    assert from_toml(to_toml(ours)) == ours
    assert Schema.from_note(ours.to_note()) == ours
    elsewhere = ours.moved("st:/somewhere/else")
    assert elsewhere.digest == ours.digest
    assert not ours.differences(elsewhere)
    tiny_bert(work / "other", seed=1)
    (told,) = ours.differences(schema(address="hf:./other"))
    assert told.startswith("column 'note': the weights of hf:./bert have the digest")
    hashed = dataclasses.replace(ours, columns=(Column("note", "text"), *ours.columns[1:]))
    assert hashed.digest != ours.digest
    assert "backbone" not in hashed.to_note()["columns"][0]
    with pytest.raises(DataError, match=r"which weights st:x has. Write it with 'fedsolve schema DATA"):
        from_toml('[columns.note]\nkind = "text"\nbackbone = "st:x"')
    with pytest.raises(DataError, match="a backbone is for text"):
        Column("age", backbone=ours.backbones["note"])


@pytest.mark.onnx
def test_the_commands_with_a_number_and_a_category(work: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    write_notes(work / "notes.csv", 300)
    rows = write_notes(work / "test.csv", 200, 1)
    asked = ("schema", "notes.csv", "--label", "ward", "--client-column", "site", "--out", "schema.toml")
    made = fedsolve(*asked, "--text-column", "note", "--backbone", "hf:./bert")
    assert made.exit_code == 0, made.output
    known = fs.read_schema("schema.toml")
    assert [column.kind for column in known.used] == ["text", "number", "category"]
    train = ("train", "notes.csv", "--schema", "schema.toml", "--method", "afl", "--out", "m.safetensors")
    assert document(*train)["clients"] == 3
    score = document("evaluate", "m.safetensors", "test.csv")["accuracy"]
    unused = to_toml(known).replace('kind = "text"', 'kind = "unused"')
    (work / "without.toml").write_text(unused)
    document(*train[:3], "without.toml", *train[4:-1], "without.safetensors")
    assert score > document("evaluate", "without.safetensors", "test.csv")["accuracy"] + 0.1
    labels = document("predict", "m.safetensors", "test.csv")["labels"]
    model = fs.load_model("m.safetensors")
    cells = {name: [row[name] for row in rows] for name in ("note", "age", "sex")}
    np.testing.assert_array_equal(model.predict(cells), labels)
    (work / "bert").rename(work / "moved")
    assert document("predict", "m.safetensors", "test.csv", "--backbone", "hf:./moved")["labels"] == labels

    assert fedsolve("export", "m.safetensors", "--onnx", "m.onnx").exit_code == 0
    session = runtime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    inputs = {
        "note": load_backbone("hf:./moved").extract(cells["note"]),
        "age": np.array(cells["age"], dtype=np.float64)[:, None],
        "sex": np.array(cells["sex"], dtype=object)[:, None],
    }
    answer, scores = session.run(["label", "scores"], inputs)
    expected = model.decision_function({**cells})
    np.testing.assert_allclose(np.reshape(scores, expected.shape), expected, atol=1e-5)
    assert (answer == np.array(labels)).mean() > 0.99


def test_sites_over_a_network(work: Path) -> None:
    ours = dataclasses.replace(schema(), client=None)
    members, sites = [], []
    for number in range(3):
        rows = write_notes(work / f"site{number}.csv", 60, number)
        assert len(rows) == 60
        lines = (work / f"site{number}.csv").read_text().splitlines()
        kept = [",".join(line.split(",")[:3] + line.split(",")[4:]) for line in lines]
        (work / f"site{number}.csv").write_text("\n".join(kept) + "\n")
        tiny_bert(work / f"place{number}")  # each site has its own copy
        own = ours.moved(f"hf:./place{number}")
        read = read_site(f"site{number}.csv", own, ColumnLayout())
        data = fs.ClientData(read.features, read.labels, schema=own)
        sites.append(Answerer(f"site{number}", data))
        members.append(
            fs.Participant(f"site{number}", fs.ClientData(read.features, read.labels, schema=ours))
        )
    settings: dict[str, Any] = {
        "classes": ["lung", "skin"],
        "interval": 0.001,
        "grace": 0.0,
        "patience": 0.05,
    }
    federation = NetworkFederation(PretendedLink(sites), clients=3, schema=ours, **settings)
    recipe = fs.Recipe(fs.AFL(ridge=0.1), ours)
    model = recipe.fit(federation)
    local = fs.LocalFederation(members, classes=["lung", "skin"])
    assert same_bits(model, recipe.fit(local))
    assert federation.evaluate(model) == local.evaluate(model) > 0.6

    tiny_bert(work / "place2", seed=5)
    other = dataclasses.replace(ours, columns=schema(address="hf:./place2").columns)
    shown: list[Any] = []
    data = fs.ClientData(members[2].data.features(slice(None)), read.labels, schema=other)
    link = PretendedLink([*sites[:2], Answerer("site2", data, show=shown.append)])
    with pytest.raises(CohortError, match="schema of 'site2' is not the server's"):
        recipe.fit(NetworkFederation(link, clients=3, schema=ours, **settings))
    assert "column 'note': the weights of" in shown[-1].text


def test_a_store_of_the_texts_of_a_column(work: Path) -> None:
    (work / "bert" / "README.md").write_text("---\nlicense: cc0-1.0\n---\n")
    rows = write_notes(work / "notes.csv", 150)
    address = "csv:notes.csv?label=ward&test=0"
    build = ("features", "build", address, "--text-column", "note", "--batch", 32, "--device", "cpu")
    found = document(*build, "--backbone", "hf:./bert?length=7")
    assert (found["rows"], found["width"], found["extracted"]) == ({"train": 150}, 32, 150)
    assert (found["licence"], found["classes"]) == ("cc0-1.0", ["lung", "skin"])
    texts = [row["note"] for row in rows]
    backbone: Any = load_backbone("hf:./bert?length=7")
    assert found["cut"] == backbone.cut(texts).sum() > 0
    features = FeatureStore().get(found["key"])
    np.testing.assert_allclose(features.x_train, backbone.extract(texts), rtol=1e-4, atol=1e-5)
    assert features.names(features.y_train).tolist() == [row["ward"] for row in rows]
    assert document(*build, "--backbone", "hf:./bert?length=7")["extracted"] == 0
    trained = document("train", f"features:{found['key']}", "--clients", 3, "--out", "m.safetensors")
    assert trained["features"] == 32
    refused(fedsolve(*build[:5]), 2, "holds text, which efficientnet-lite0 does not read. Use")
    (work / "notes.csv").write_text("note,ward\nfever,lung\n,skin\n")
    refused(fedsolve(*build, "--backbone", "hf:./bert"), 2, "1 cell in column 'note'")


def test_the_page_of_examples(work: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to-medical-features.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    fedsolve (.*)$", page.partition("## Clinical notes")[2], re.MULTILINE)
    assert len(commands) == 5
    write_notes(work / "notes.csv", 120)
    write_notes(work / "test.csv", 60, 1)
    write_notes(work / "new.csv", 10, 2, labelled=False)
    (work / "bert").rename(work / "network")
    for command in commands:
        result = fedsolve(*shlex.split(command))
        assert result.exit_code == 0, (command, result.output)
