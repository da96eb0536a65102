"""`fedsolve features` and `fedsolve datasets`: what they write, what they say, and how they fail."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsolve.cli import output
from fedsolve.cli.features import _pace, features
from fedsolve.data.backbones import preprocessing
from fedsolve.data.datasets import datasets as known_datasets
from fedsolve.data.feature_store import ExtractionProgress, FeatureStore
from tests.command import document, fedsolve, refused


@pytest.fixture
def images(tmp_path):
    """Thirty PNG files in three class folders."""
    chance = np.random.default_rng(0)
    for number in range(30):
        folder = tmp_path / "images" / ("ant", "bee", "cat")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def test_help_teaches():
    for words in (["features"], ["datasets"], *(["features", name] for name in features.commands)):
        page = fedsolve(*words, "--help").stdout
        assert "Examples:" in page
        assert f"fedsolve {' '.join(words)}" in page.split("Examples:")[1]
    assert list(features.commands) == ["build", "list", "verify", "remove"]
    assert "[default: efficientnet-lite0]" in " ".join(fedsolve("features", "build", "--help").stdout.split())


def test_datasets_are_listed_with_their_sources():
    listed = document("datasets")["datasets"]
    assert [entry["name"] for entry in listed] == [known.name for known in known_datasets()]
    page = " ".join(fedsolve("datasets").stdout.split())
    for known in known_datasets():
        assert known.name in page
        assert known.source in page
        assert known.files in page


def test_build_then_list_verify_and_remove(images, store):
    words = ("features", "build", f"folder:{images}", "--backbone", "pixels:8", "--store", store)
    told = document(*words)
    assert (told["rows"], told["width"], told["extracted"]) == ({"train": 24, "test": 6}, 192, 30)
    assert told["classes"] == ["ant", "bee", "cat"]
    assert told["images_per_second"] > 0
    again = document(*words)
    assert (again["key"], again["extracted"], again["images_per_second"]) == (told["key"], 0, None)
    assert "nothing to do" in fedsolve(*words).stdout
    assert len(FeatureStore(store).get(told["key"]).x_train) == 24

    limited = document(*words, "--limit-train", 9, "--limit-test", 3)
    assert limited["rows"] == {"train": 9, "test": 3}
    listed = document("features", "list", "--store", store)["features"]
    assert {(entry["key"], entry["state"]) for entry in listed} == {
        (told["key"], "complete"),
        (limited["key"], "complete"),
    }
    page = fedsolve("features", "list", "--store", store).stdout
    assert told["key"][:8] in page
    assert str(store) in page.replace("\n", "")
    assert len(document("features", "verify", "--store", store)["sound"]) == 2
    assert fedsolve("features", "verify", told["key"][:9], "--store", store).stdout == (
        "1 set of features sound.\n"
    )

    gone = document("features", "remove", told["key"][:9], "--store", store)
    assert gone["removed"] == [told["key"]]
    assert fedsolve("features", "remove", "--all", "--store", store).stdout.startswith("1 set of features")
    assert "No features in" in fedsolve("features", "list", "--store", store).stdout
    assert document("features", "list", "--store", store)["features"] == []
    assert fedsolve(*words, "--quiet").output == ""


def test_damage_is_found_and_named(images, store):
    key = document("features", "build", f"folder:{images}", "--backbone", "pixels:8", "--store", store)["key"]
    path = store / key / "x_test.npy"
    contents = bytearray(path.read_bytes())
    contents[-3] ^= 4
    path.write_bytes(contents)
    refused(fedsolve("features", "verify", "--store", store), 4, path, "contents changed", "features remove")
    (store / key / "manifest.json").write_text("{")
    refused(fedsolve("features", "verify", key, "--store", store), 4, "manifest.json", "damaged")
    assert "damaged" in fedsolve("features", "list", "--store", store).stdout


def test_what_cannot_be_built_is_explained(images, store, tmp_path):
    def build(*words):
        return fedsolve("features", "build", *words, "--store", store)

    refused(build("folder:nowhere", "--backbone", "pixels"), 2, "nowhere", "no such folder")
    refused(build("cifar10", "--data-root", tmp_path, "--backbone", "pixels"), 2, "toronto.edu", tmp_path)
    refused(build("cifra10"), 2, "Did you mean 'cifar10'?")
    refused(build(f"folder:{images}", "--backbone", "pixel"), 2, "pixel", "Did you mean 'pixels'?")
    refused(build(f"folder:{images}", "--backbone", "pixels", "--limit-train", 2), 2, "all 3 classes")
    refused(build(f"folder:{images}", "--batch", 0), 2, "--batch")
    np.savez(tmp_path / "own.npz", x=np.eye(6), y=[0, 1] * 3)
    refused(build(f"npz:{tmp_path / 'own.npz'}"), 2, "holds features already", "fedsolve train")
    broken = images / "bee" / "13.png"
    broken.write_bytes(broken.read_bytes()[:100])
    refused(build(f"folder:{images}?test=0", "--backbone", "pixels"), 2, broken, "truncated")
    refused(fedsolve("features", "remove", "--store", store), 2, "name the keys")
    refused(fedsolve("features", "remove", "123456789abc", "--store", store), 2, "no features have a key")
    result = fedsolve("features", "build", "folder:nowhere", "--json")
    assert json.loads(result.stdout)["error"]["exit_code"] == 2


def test_partial_features_can_be_removed_together(images, store):
    broken = images / "cat" / "8.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    words = ("features", "build", f"folder:{images}?test=0", "--backbone", "pixels", "--batch", 4)
    assert fedsolve(*words, "--store", store).exit_code == 2
    page = fedsolve("features", "list", "--store", store).stdout
    assert "93 % done" in page
    assert "?test=0 " in page
    refused(fedsolve("features", "verify", "--store", store), 4, "has not finished")
    assert len(document("features", "remove", "--partial", "--store", store)["removed"]) == 1
    assert {path.suffix for path in store.iterdir()} <= {".lock"}


def test_progress_tells_pace_and_time_left(images, store, monkeypatch):
    assert _pace(ExtractionProgress("train", 100, 4000, 100, 2.0)) == "50 rows/s, 78 s left"
    assert _pace(ExtractionProgress("train", 0, 4000, 0, 0.0)) == "0 rows/s"

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(output.sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    words = ["build", f"folder:{images}", "--backbone", "pixels", "--store", str(store), "--batch", "4"]
    features.main(words, standalone_mode=False)
    assert "rows/s" in terminal.getvalue()
    assert "30 of 30" in terminal.getvalue()


PROGRAM = """
import sys
from pathlib import Path
from fedsolve.cli.features import features
from fedsolve.cli.main import CommandGroup
from fedsolve.data.backbones import preprocessing

class Waiting(preprocessing.Pixels):
    def extract(self, images):
        if len(calls) == 3 and "--wait" in sys.argv:
            print("waiting", flush=True)
            sys.stdin.readline()
        calls.append(len(images))
        return super().extract(images)

calls = []
preprocessing.Pixels = Waiting
words = [word for word in sys.argv[1:] if word != "--wait"]
CommandGroup("fedsolve", commands={"features": features}).main(words)
"""


def test_images_of_an_earlier_run_do_not_count_as_extracted(images, store, monkeypatch):
    """Stopped in the test part: the training part was finished before."""
    words = (
        "features",
        "build",
        f"folder:{images}",
        "--backbone",
        "pixels:8",
        "--batch",
        4,
        "--store",
        store,
    )
    seen = []

    class Stopping(preprocessing.Pixels):
        def extract(self, batch):
            if len(seen) == 7:  # six batches of 24 training images, then one of 6 test images
                raise KeyboardInterrupt
            seen.append(len(batch))
            return super().extract(batch)

    with monkeypatch.context() as patch:
        patch.setattr(preprocessing, "Pixels", Stopping)
        stopped = fedsolve(*words)
    assert sum(seen) == 28
    assert "28 of 30 rows are done" in stopped.stderr
    assert document(*words)["extracted"] == 2


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_nothing_is_lost(images, store):
    words = ["features", "build", f"folder:{images}", "--backbone", "pixels:8", "--batch", "4", "--json"]
    pipe = subprocess.PIPE
    program = [sys.executable, "-c", PROGRAM, *words, "--store", str(store)]
    process = subprocess.Popen([*program, "--wait"], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    message = "interrupted; 12 of 30 rows are done. Run the same command to go on."
    assert errors == f"error: {message}\n"
    assert json.loads(told)["error"]["message"] == message
    again = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["extracted"] == 18
    fresh = document(*words[:-1], "--store", store / "fresh")
    key = fresh["key"]
    for name in ("x_train.npy", "x_test.npy", "y_train.npy", "y_test.npy"):
        assert (store / key / name).read_bytes() == (store / "fresh" / key / name).read_bytes()


def test_the_how_to_page_works_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to-own-dataset.md").read_text()
    names = {}
    extracted = []
    for kind, block in re.findall(r"^```(python|sh)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if kind == "python":
            exec(block, names)
            continue
        for line in block.splitlines():
            program, *words = shlex.split(line)
            assert program == "fedsolve"
            told = document(*words)
            extracted.append(told.get("extracted"))
    assert extracted == [300, None, 300, 300, None, None, None, None, None]
    score, predicted = capsys.readouterr().out.splitlines()
    assert float(score) > 0.9
    assert predicted.count("digit") == 3


# -- rows by address -------------------------------------------------------------------------------


@pytest.fixture
def flowers(tmp_path):
    """A csv file with numbered classes in its first column."""
    chance = np.random.default_rng(3)
    classes = np.arange(60) % 3
    rows = np.c_[classes, chance.standard_normal((60, 4)) + classes[:, None]]
    path = tmp_path / "flowers.csv"
    np.savetxt(
        path,
        rows,
        delimiter=",",
        fmt=["%d", "%.6f", "%.6f", "%.6f", "%.6f"],
        header="kind,a,b,c,d",
        comments="",
    )
    return path


def test_a_model_of_a_file_is_evaluated_on_its_address(flowers, tmp_path):
    """Names of classes in an address are text; the file's labels are numbers."""
    model = tmp_path / "m.safetensors"
    document("train", flowers, "--label", "kind", "--method", "afl", "--clients", 3, "--out", model)
    whole = document("evaluate", model, flowers, "--label", "kind")
    told = document("evaluate", model, f"csv:{flowers}?label=kind&test=0")
    assert told["accuracy"] == whole["accuracy"]
    assert (told["rows"], whole["rows"]) == (60, 60)


@pytest.mark.parametrize(
    "words",
    [["--label", "kind"], ["--drop", "a"], ["--delimiter", "tab"], ["--no-header"], ["--labels-key", "y"]],
)
def test_options_for_files_are_refused_for_addresses(flowers, tmp_path, words):
    model = tmp_path / "m.safetensors"
    document("train", flowers, "--label", "kind", "--method", "afl", "--clients", 3, "--out", model)
    address = f"csv:{flowers}?label=kind"
    refused(fedsolve("evaluate", model, address, *words), 2, address, "?label=NAME&header=no")
    out = ("--method", "afl", "--clients", 3, "--out", tmp_path / "other.safetensors")
    refused(fedsolve("train", address, *out, *words), 2, address, "write them after a question mark")
    assert not (tmp_path / "other.safetensors").exists()
