"""Sites go together only where their backbones do; a run that diverges says so by its exit code."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import numpy as np
import pytest
from PIL import Image

import fedsolve as fs
from fedsolve.cli.main import _verdict
from fedsolve.closedform.afl import AFLRun
from fedsolve.data.backbones import portable
from fedsolve.errors import CohortError, DivergenceError
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.running import State, run_method
from fedsolve.tables.schema import Extractor, Schema
from tests.command import document
from tests.data.tiny_text import tiny_bert, write_notes
from tests.network.security.keyring import keys_for
from tests.network.security.processes import free_port, running

from .pretended import PretendedLink
from .test_server import PATIENCE, fedsolve, wait_until

IDENTITY = {
    "name": "onnx",
    "version": 1,
    "weights": "a" * 64,
    "preprocessing": {"size": [8, 8], "mean": [0.0]},
}
OURS = Extractor.of("onnx:net.onnx", IDENTITY, 3)


def site(name: str, extractor: Extractor | None, show=None, scale: float = 1.0) -> Answerer:
    rng = np.random.default_rng(len(name))
    data = fs.ClientData(scale * rng.normal(size=(40, 3)), np.arange(40) % 2)
    columns = None if extractor is None else Schema(extractor=extractor)
    return Answerer(name, data, columns=columns, show=show)


def federate(link: PretendedLink, **options) -> NetworkFederation:
    settings = {"clients": 2, "classes": [0, 1], "interval": 0.001, "grace": 0.0, "patience": 0.05} | options
    return NetworkFederation(link, **settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": {"name": "pixels"}, "address": "pixels"}, "the backbone is pixels, there onnx:net.onnx"),
        (
            {"preprocessing": {"size": [8, 8], "mean": [0.5]}},
            "the preprocessing's mean is [0.5], there [0.0]",
        ),
        ({"weights": "b" * 64}, "have the digest bbbbbbbbbbbb..., there aaaaaaaaaaaa..."),
    ],
    ids=["backbone", "preprocessing", "weights"],
)
def test_another_backbone_is_refused_before_anything_is_sent(change, words):
    shown = []
    other = dataclasses.replace(OURS, **change)
    link = PretendedLink([site("north", OURS), site("south", other, shown.append)])
    with pytest.raises(CohortError) as refusal:
        fs.AFL(ridge=0.1).fit(federate(link))
    assert words in str(refusal.value)
    assert "'south' does not use the backbone of 'north'" in str(refusal.value)
    assert {note["ask"] for _, note in link.sent} == {"describe", "tell"}
    told = next(note for _, note in link.sent if note["ask"] == "tell")
    link.sites[2].reply(told, np.empty(0, np.uint8))
    assert shown[-1].barred
    assert words in shown[-1].text


def test_the_model_of_a_server_knows_the_backbone(tmp_path):
    elsewhere = dataclasses.replace(
        OURS, address="onnx:other.onnx"
    )  # where it lies is each site's own affair
    link = PretendedLink([site("north", OURS), site("south", elsewhere)])
    model = run_method(fs.Recipe(fs.AFL(ridge=0.1)), federate(link), State(tmp_path))
    assert model.schema == Schema(classes=(0, 1), extractor=OURS)
    assert fs.load_model(tmp_path / "model.safetensors").schema == model.schema


@pytest.mark.parametrize(
    "note",
    ["pixels", {"address": "x"}, {**OURS.to_note(), "width": 4}, {**OURS.to_note(), "weights": "c" * 64}],
)
def test_a_description_that_cannot_be_is_refused(note):
    liar = site("south", OURS)
    liar._columns = {**liar._columns, "extractor": note}
    with pytest.raises(CohortError, match=r"'south'.*(describes its backbone|gives 4 features|digest)"):
        fs.AFL(ridge=0.1).fit(federate(PretendedLink([site("north", OURS), liar])))


def test_where_a_site_keeps_its_files_is_not_sent(tmp_path):
    file = tmp_path / "net.onnx"
    file.write_bytes(b"")
    assert portable(f"onnx:{file}?size=8") == "onnx:net.onnx?size=8"
    assert portable("torchvision:resnet18?weights=/home/me/w.pt&size=8") == (
        "torchvision:resnet18?weights=w.pt&size=8"
    )
    assert portable("hf:google/vit") == "hf:google/vit"
    assert portable("pixels:8x8?channels=gray") == "pixels:8x8?channels=gray"


@pytest.mark.parametrize("missing", ["wait", "continue"])
def test_a_diverged_run_over_the_network_has_exit_code_5(tmp_path, missing):
    pytest.importorskip("torch")
    from fedsolve.gradient import FedAvg

    link = PretendedLink([site("north", None, scale=1e20), site("south", None, scale=1e20)])
    method = FedAvg(rounds=4, rate=10.0)
    with pytest.raises(DivergenceError, match=r"loss of 'north' became.*Lower rate") as stopped:
        run_method(fs.Recipe(method), federate(link, missing=missing), State(tmp_path))
    assert _verdict(stopped.value)[1] == 5
    assert not (tmp_path / "model.safetensors").exists()


def test_a_model_with_nan_is_not_saved_by_a_server(tmp_path, monkeypatch):
    link = PretendedLink([site("north", None), site("south", None)])
    method = fs.AFL(ridge=0.1)

    given = AFLRun.model

    def spoilt(self):
        model = given(self)
        model.weight = np.full_like(model.weight, np.nan)
        return model

    monkeypatch.setattr(AFLRun, "model", spoilt)
    with pytest.raises(DivergenceError, match="not saved"):
        run_method(fs.Recipe(method), federate(link), State(tmp_path))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.network
@pytest.mark.slow
def test_processes_with_images_and_one_with_another_preprocessing(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSOLVE_STORE", str(tmp_path / "store"))
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        for number in range(40):
            folder = tmp_path / name / "images" / ("dark", "light")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = np.clip(rng.normal((60, 190)[number % 2], 20, (8, 8)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    address, log, out = f"127.0.0.1:{free_port()}", tmp_path / "server.log", tmp_path / "m.safetensors"
    schema = tmp_path / "images.toml"
    document("schema", f"folder:{tmp_path / 'north/images'}", "--backbone", "pixels:8", "--out", schema)
    line = fedsolve(
        "server", "--insecure", "--plain", "--listen", address, "--clients", 2, "--schema", schema
    )
    line += ["--method", "afl", "--state", str(tmp_path / "state"), "--out", str(out)]

    def client(name: str, *words: object) -> list[str]:
        where = ("--insecure", "--plain", "--server", address, "--name", name, "--once")
        where += ("--state", tmp_path / f"{name}.d")
        return fedsolve("client", *where, "--data", f"folder:{tmp_path / name / 'images'}?test=0", *words)

    with (
        running(line, log) as server,
        running(client("north", "--schema", schema), tmp_path / "n.log") as north,
    ):
        wait_until(lambda: "'north' is there" in log.read_text(), server, log)
        wrong = tmp_path / "wrong.toml"
        words = ("--backbone", "pixels:8?normalise=half", "--out", wrong)
        document("schema", f"folder:{tmp_path / 'south/images'}", *words)
        with running(client("south", "--schema", wrong), tmp_path / "wrong.log") as south:
            assert south.wait(PATIENCE) == 2
        assert "the preprocessing's mean is [0.5], there [0.0]" in (tmp_path / "wrong.log").read_text()
        with running(client("south", "--schema", schema), tmp_path / "s.log") as south:
            assert server.wait(PATIENCE) == 0, log.read_text()
            assert north.wait(PATIENCE) == south.wait(PATIENCE) == 0
    told = document("predict", out, tmp_path / "north/images/light")
    assert told["labels"] == ["light"] * 20
    assert fs.load_model(out).schema.extractor.address == "pixels:8"


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.torch
def test_processes_with_a_text_column_make_the_model_of_one_process(tmp_path, monkeypatch):
    """Three sites in secure sums; every site finds the network of the text where it has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSOLVE_STORE", str(tmp_path / "store"))
    tiny_bert(tmp_path / "bert")
    names = ("north", "south", "west")
    for seed, name in enumerate(names):
        write_notes(tmp_path / f"{name}.csv", 120, seed)
    schema, out = tmp_path / "schema.toml", tmp_path / "m.safetensors"
    words = ("--label", "ward", "--client-column", "site", "--text-column", "note", "--backbone", "hf:./bert")
    document("schema", "north.csv", *words, "--out", schema)
    keys = keys_for(tmp_path / "keys", names)
    for name in names:
        keys.roster.add(keys.client_public_key(name))
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "server.log"
    common = ("--keys", tmp_path / "keys", "--schema", schema)
    line = fedsolve("server", "--listen", address, "--clients", 3, *common)
    line += ["--method", "afl", "--ridge", "1", "--state", str(tmp_path / "state"), "--out", str(out)]
    (tmp_path / "north").mkdir()
    (tmp_path / "bert").rename(tmp_path / "north" / "bert")
    with ExitStack() as stack:
        server = stack.enter_context(running(line, log))
        for name in names:
            where = ("--server", address, "--name", name, "--once", "--data", f"{name}.csv")
            where += ("--state", tmp_path / f"{name}.d", "--backbone", "hf:./north/bert", *common)
            stack.enter_context(running(fedsolve("client", *where), tmp_path / f"{name}.log"))
        assert server.wait(PATIENCE) == 0, log.read_text()
    together = ("--schema", schema, "--backbone", "hf:./north/bert", "--method", "afl", "--ridge", 1)
    document("train", *(f"{name}.csv" for name in names), *together, "--out", "one.safetensors")
    model, one = fs.load_model(out), fs.load_model("one.safetensors")
    np.testing.assert_allclose(model.weight, one.weight, rtol=1e-8, atol=1e-9)
