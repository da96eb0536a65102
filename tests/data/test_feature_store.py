"""The feature store: nothing is extracted twice, nothing is lost, nothing damaged goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedsolve as fs
from fedsolve import container
from fedsolve.container import locked
from fedsolve.data import feature_store
from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets import Dataset, Split, load_dataset
from fedsolve.data.feature_store import ExtractionRecord, Features, FeatureStore
from fedsolve.data.images import ArrayImages
from fedsolve.errors import DataError, ModelFileError


class Sums:
    """A backbone of three features, which counts its calls and can be made to fail at one of them.

    The last feature is the number of images in the batch: it tells whether batches are the same.
    """

    name, width, runtime = "sums", None, "test"

    def __init__(self, version=1, fail_at=None, failure=KeyboardInterrupt):
        self.identity = {"name": self.name, "version": version}
        self.calls = 0
        self.fail_at, self.failure = fail_at, failure

    def extract(self, images):
        if self.calls == self.fail_at:
            raise self.failure
        self.calls += 1
        rows = [[image.sum(), image[0].mean() / 3, len(images)] for image in images]
        return np.array(rows, dtype=np.float32)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def some(train=23, test=9, seed=0):
    """A dataset of images, in five and two batches of five."""

    def split(rows, seed):
        return Split(ArrayImages(noise(rows, 6, 5, 3, seed=seed)), np.arange(rows) % 3)

    return Dataset("some", split(train, seed), split(test, seed + 1) if test else None, ("a", "b", "c"))


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.npy"))}


@pytest.fixture
def store(tmp_path):
    return FeatureStore(tmp_path / "store")


# -- building --------------------------------------------------------------------------------------


def test_features_are_those_of_the_backbone(store):
    dataset, told = some(), []
    found = store.build(dataset, Sums(), batch=5, progress=told.append)
    for split, x, y in (
        (dataset.train, found.x_train, found.y_train),
        (dataset.test, found.x_test, found.y_test),
    ):
        expected = [[image.sum(), image[0].mean() / 3] for image in split.inputs.read(slice(None))]
        np.testing.assert_array_equal(x[:, :2], np.array(expected, dtype=np.float32))
        np.testing.assert_array_equal(y, split.labels)
    assert isinstance(found.x_train, np.memmap)
    assert (found.x_train.dtype, found.x_train.flags.writeable) == (np.float32, False)
    assert found.class_names == ("a", "b", "c")
    assert found.names(found.y_test[:4]).tolist() == ["a", "b", "c", "a"]
    assert (found.manifest["rows"], found.manifest["width"]) == ({"train": 23, "test": 9}, 3)
    assert [progress.done for progress in told] == [0, 5, 10, 15, 20, 23, 23, 28, 32]
    assert {progress.total for progress in told} == {32}
    assert told[-1].rate > 0
    assert told[-1].remaining == 0
    assert told[0].remaining is None


def test_the_second_build_extracts_nothing(store):
    first, second = Sums(), Sums()
    built = store.build(some(), first, batch=5)
    assert first.calls == 7
    told = []
    again = FeatureStore(store.folder).build(some(), second, batch=3, progress=told.append)
    assert second.calls == 0
    assert told == []
    assert again.key == built.key
    assert again.manifest == built.manifest
    np.testing.assert_array_equal(again.x_train, built.x_train)


def test_the_key_names_data_and_backbone(store):
    key = store.build(some(), Sums()).key
    canonical = {"format": 1, "data": some().identity, "backbone": {"name": "sums", "version": 1}}
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    assert key == hashlib.sha256(text.encode()).hexdigest()
    renamed = Dataset("other", some().train, some().test, some().class_names)
    assert store.build(renamed, Sums()).key == key
    others = {
        store.build(some(), Sums(version=2)).key,
        store.build(some(seed=5), Sums()).key,
        store.build(some(test=0), Sums()).key,
        store.build(some(), Sums(), limit=(12, 6)).key,
        store.build(Dataset("some", some().train, some().test, ("a", "b", "d")), Sums()).key,
    }
    assert len(others | {key}) == 6
    assert len(store.entries()) == 6


def test_limits_apply_to_each_part(store):
    for limit, expected in ((6, (6, 6)), ((7, None), (7, 9)), ((None, 3), (23, 3))):
        found = store.build(some(), Sums(), limit=limit)
        assert (len(found.x_train), len(found.x_test)) == expected


def test_a_dataset_without_test_part_has_no_test_features(store):
    found = store.build(some(test=0), Sums())
    assert found.x_test is None
    assert found.y_test is None
    assert not (store.folder / found.key / "x_test.npy").exists()


def test_datasets_that_are_features_need_no_backbone(store):
    digits = load_dataset("digits")
    found = Features.from_dataset(digits)
    np.testing.assert_array_equal(found.x_train, digits.train.features)
    assert found.manifest["rows"] == {"train": 1198, "test": 599}
    assert store.build(digits, None).key == found.key
    assert store.entries() == []
    with pytest.raises(DataError, match="some holds images, which need a backbone"):
        Features.from_dataset(some())
    table = Dataset("table", Split(np.eye(3), np.arange(3)), None, ("a", "b", "c"))
    assert Features.from_dataset(table).x_train is table.train.inputs
    with pytest.raises(DataError, match="table holds features already"):
        store.build(table, Sums())


def test_pixels_of_digits_are_nearly_its_own_features(store):
    digits = load_dataset("digits")
    found = store.build(digits, load_backbone("pixels"))
    assert np.abs(found.x_train - digits.train.features).max() < 0.002
    federation = fs.LocalFederation.from_arrays(found.x_train, found.y_train, np.arange(1198) % 7)
    assert fs.AFL(ridge=0.1).fit(federation).score(found.x_test, found.y_test) > 0.9


def test_features_that_make_no_sense_are_refused(store):
    class Wrong(Sums):
        def extract(self, images):
            return self.wrong

    for wrong, message in [
        (
            np.zeros((4, 3)),
            r"rows 0 to 4, beginning with array, image 0: .* shape \(4, 3\); expected \(5, 3\)",
        ),
        (np.zeros(5), r"shape \(5,\); expected \(5, width\)"),
        (np.zeros((5, 0)), r"shape \(5, 0\)"),
        (np.array([[1, 2]] * 3 + [[1, 1e39]] * 2), "image 3: backbone sums gave NaN or infinite"),
    ]:
        backbone = Wrong()
        backbone.wrong = wrong
        with pytest.raises(DataError, match=message):
            store.build(some(), backbone, batch=5)
    with pytest.raises(DataError, match="batch must be a whole number, at least 1; got 0"):
        store.build(some(), Sums(), batch=0)


def test_errors_of_the_backbone_name_the_images(store):
    with pytest.raises(DataError, match="rows 10 to 14, beginning with array, image 10: too dark"):
        store.build(some(), Sums(fail_at=2, failure=DataError("too dark")), batch=5)


def test_widths_that_change_are_refused(store):
    class Growing(Sums):
        def extract(self, images):
            self.calls += 1
            return np.zeros((len(images), self.calls), np.float32)

    with pytest.raises(DataError, match=r"shape \(5, 2\); expected \(5, 1\)"):
        store.build(some(), Growing(), batch=5)


# -- stopping and going on -------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", ["at the end", "after every batch"])
@pytest.mark.parametrize("stop", range(7))
def test_stopped_anywhere_and_continued_gives_the_same_bytes(tmp_path, monkeypatch, stop, recorded):
    if recorded == "after every batch":
        monkeypatch.setattr(feature_store, "_RECORD_SECONDS", -1)
    whole = FeatureStore(tmp_path / "whole")
    key = whole.build(some(), Sums(), batch=5).key
    store = FeatureStore(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        store.build(some(), Sums(fail_at=stop), batch=5)
    (entry,) = store.entries()
    done = min(5 * stop, 23) + max(0, 5 * (stop - 5))
    assert (entry.key, entry.state) == (key, "partial")
    assert (entry.done, entry.total) == ((done, 32) if stop else (0, 0))
    with pytest.raises(ModelFileError, match="has not finished"):
        store.get(key)
    rest, told = Sums(), []
    found = store.build(some(), rest, batch=2 if stop else 5, progress=told.append)
    assert rest.calls == 7 - stop
    assert found.manifest["batch"] == 5
    assert contents(store.folder / key) == contents(whole.folder / key)
    assert not (store.folder / key / "progress.json").exists()
    assert told[-1].done == 32
    assert store.entries()[0].state == "complete"


def test_a_stop_loses_nothing_that_was_recorded(store, monkeypatch):
    """Killed without a chance to clean up: rows after the last record are extracted again."""
    monkeypatch.setattr(feature_store, "_RECORD_SECONDS", -1)
    with pytest.raises(KeyboardInterrupt):
        store.build(some(), Sums(fail_at=4), batch=5)
    folder = next(path for path in store.folder.iterdir() if path.is_dir())
    record = ExtractionRecord.load(folder)
    record.done["train"] = 10  # as if the record of the last two batches had not reached the disk
    record.save(folder)
    with open(folder / "x_train.npy", "r+b") as stream:
        stream.seek(-100, os.SEEK_END)
        stream.write(bytes(range(100)))  # what lies after the record does not count
    rest = Sums()
    found = store.build(some(), rest, batch=5)
    assert rest.calls == 5
    np.testing.assert_array_equal(found.x_train[:, 2], [5] * 20 + [3] * 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "progress.json").write_text("{"),
        lambda folder: (folder / "progress.json").write_text(
            '{"batch": 0, "width": 3, "done": {}, "about": {}}'
        ),
        lambda folder: (folder / "progress.json").unlink(),
        lambda folder: (folder / "x_train.npy").unlink(),
        lambda folder: (folder / "x_train.npy").write_bytes(b"short"),
    ],
    ids=["half a record", "senseless record", "no record", "no rows", "too few rows"],
)
def test_damaged_leftovers_are_started_again(store, damage):
    expected = FeatureStore(store.folder / "other").build(some(), Sums(), batch=5)
    with pytest.raises(KeyboardInterrupt):
        store.build(some(), Sums(fail_at=3), batch=5)
    damage(store.folder / expected.key)
    # The file is whole again, but for its rows, when the power fails once more.
    with pytest.raises(KeyboardInterrupt):
        store.build(some(), Sums(fail_at=0), batch=5)
    rest = Sums()
    found = store.build(some(), rest, batch=5)
    assert rest.calls == 7
    np.testing.assert_array_equal(found.x_train, expected.x_train)


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_kept(store, tmp_path):
    for number in range(12):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(9, 9, seed=number)).save(
            tmp_path / "images" / "ab"[number % 2] / f"{number:02}.png"
        )
    broken = tmp_path / "images" / "b" / "07.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(DataError, match=r"b/07\.png: the image is truncated"):
        store.build(load_dataset(f"folder:{tmp_path / 'images'}?test=0"), Sums(), batch=2)
    (entry,) = store.entries()
    assert (entry.state, entry.done) == ("partial", 8)


SCRIPT = """
import sys, time
import numpy as np
from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets import load_dataset
from fedsolve.data.feature_store import FeatureStore

class Slow:
    def __init__(self):
        self.pixels = load_backbone("pixels:8")
        self.name, self.width, self.identity, self.runtime = "slow", None, self.pixels.identity, ""
        self.calls = 0

    def extract(self, images):
        time.sleep(0.004)
        if self.calls == int(sys.argv[3]):
            sys.stdin.readline()
        self.calls += 1
        return self.pixels.extract(images)

def tell(progress):
    print(progress.done, flush=True)

FeatureStore(sys.argv[2]).build(load_dataset(sys.argv[1]), Slow(), batch=4, progress=tell)
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """400 links to six PNG files of different sizes, in two class folders."""
    root = tmp_path_factory.mktemp("many")
    for number in range(6):
        Image.fromarray(noise(20 + number, 30, 3, seed=number)).save(root / f"{number}.png")
    for number in range(400):
        folder = root / "images" / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").symlink_to(root / f"{number % 6}.png")
    return root / "images"


def started(many, store, wait=-1):
    """A process that builds features; it waits for a line before its batch number `wait`."""
    words = [sys.executable, "-c", SCRIPT, f"folder:{many}", str(store), str(wait)]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_stopped_at_random_can_go_on(many, tmp_path, how):
    whole = started(many, tmp_path / "whole")
    _, errors = whole.communicate(timeout=120)
    assert whole.returncode == 0, errors
    (key,) = (entry.key for entry in FeatureStore(tmp_path / "whole").entries())
    chance = random.Random()
    store = tmp_path / "stopped"
    for _ in range(3):
        process = started(many, store, wait=30)  # so that three runs do not finish the 100 batches
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.2))
        process.send_signal(how)
        _, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in errors or how == signal.SIGKILL
    assert FeatureStore(store).entries()[0].state == "partial"
    last = started(many, store)
    _, errors = last.communicate(timeout=120)
    assert last.returncode == 0, errors
    assert contents(store / key) == contents(tmp_path / "whole" / key)
    assert FeatureStore(store).get(key).key == key


@pytest.mark.slow
def test_two_processes_cannot_build_the_same_features(many, tmp_path):
    first = started(many, tmp_path, wait=3)
    try:
        first.stdout.readline()
        second = started(many, tmp_path)
        _, errors = second.communicate(timeout=120)
        assert second.returncode == 1
        assert "are being built by another process" in errors
        _, errors = first.communicate("go on\n", timeout=120)
        assert first.returncode == 0, errors
    finally:
        first.kill()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_a_lock_left_behind_stops_nobody(tmp_path):
    path = tmp_path / "some.lock"
    path.write_text("process 1\n")
    with locked(path, "this is done"):
        held = pytest.raises(ModelFileError, match="this is done by another process")
        with held, locked(path, "this is done"):
            pass
    with locked(path, "this is done"):
        pass


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(store, tmp_path):
    """600 links to images of 120 kB each: 72 MB decoded, of which a few batches of 8 are held."""
    picture = tmp_path / "picture.png"
    Image.fromarray(np.zeros((200, 200, 3), np.uint8)).save(picture)
    for number in range(600):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / "ab"[number % 2] / f"{number}.png").symlink_to(picture)
    dataset = load_dataset(f"folder:{tmp_path / 'images'}")
    backbone = load_backbone("pixels:64")
    store.build(dataset, backbone, batch=8, limit=(16, 8))  # whatever is imported on the way
    tracemalloc.start()
    try:
        store.build(dataset, backbone, batch=8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8e6


def test_a_federation_over_stored_features_never_holds_them_whole(store):
    rows, width = 40000, 64

    class Wide(Sums):
        def extract(self, images):
            return np.tile(np.stack(images).reshape(len(images), 4), 16).astype(np.float32)

    images = ArrayImages(noise(rows, 2, 2))
    dataset = Dataset("wide", Split(images, np.arange(rows) % 3), None, ("a", "b", "c"))
    store.build(dataset, Wide(), batch=4096)
    owners = fs.partition.dirichlet(dataset.train.labels, clients=20, alpha=0.5, seed=0)
    del dataset, images
    tracemalloc.start()
    try:
        found = store.get(store.entries()[0].key)
        federation = fs.LocalFederation.from_arrays(found.x_train, found.y_train, owners, workers=1)
        assert all(participant.data.source is found.x_train for participant in federation.participants)
        fs.AFL(ridge=1.0).fit(federation)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.x_train.nbytes == 4 * rows * width
    assert peak < found.x_train.nbytes * 0.6


# -- the list, checks, removal ---------------------------------------------------------------------


def test_entries_tell_what_there_is(store):
    assert store.entries() == []
    key = store.build(some(), Sums(), batch=5).key
    (entry,) = store.entries()
    assert (entry.key, entry.state, entry.dataset, entry.backbone) == (key, "complete", "some", "sums")
    assert (entry.rows, entry.width, entry.done) == ({"train": 23, "test": 9}, 3, 32)
    assert entry.nbytes == sum(path.stat().st_size for path in (store.folder / key).iterdir())
    (store.folder / "notes").mkdir()
    (store.folder / key / "manifest.json").write_text("{}")
    assert [entry.state for entry in store.entries()] == ["damaged"]


def test_keys_may_be_abbreviated(store):
    key = store.build(some(), Sums()).key
    assert store.get(key[:8]).key == key
    twin = key[:12] + ("0" if key[12] != "0" else "1") * 52
    (store.folder / twin).mkdir()
    with pytest.raises(DataError, match=f"2 keys begin with '{key[:12]}'"):
        store.get(key[:12])
    assert store.get(key[:13]).key == key
    with pytest.raises(DataError, match=f"no features have a key that begins with '{key[:11]}"):
        store.get(key[:11] + ("0" if key[11] != "0" else "1"))
    with pytest.raises(DataError, match="not a key"):
        store.get("../elsewhere")


def test_verify_finds_every_kind_of_damage(store):
    key = store.build(some(), Sums(), batch=5).key
    folder = store.folder / key
    assert store.get(key[:10]).key == key

    def flip(path):
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        path.write_bytes(changed)

    damages = {
        "x_train.npy": [
            (flip, "contents changed"),
            (lambda path: path.write_bytes(path.read_bytes()[:-8]), "contents changed"),
            (lambda path: path.write_bytes(b""), "contents changed"),
            (lambda path: path.unlink(), "cannot be read"),
            (lambda path: np.save(path, np.zeros((22, 3), np.float32)), "contents changed"),
            (lambda path: np.save(path, np.zeros((23, 3))), "contents changed"),
        ],
        "y_test.npy": [(flip, "contents changed")],
        "manifest.json": [
            (lambda path: path.write_text("{"), "is damaged, truncated"),
            (lambda path: path.write_text("[]"), "is damaged, truncated"),
            (lambda path: path.write_bytes(container.sealed_json({"format": 9})), "written in format 9"),
        ],
    }
    for name, kinds in damages.items():
        whole = (folder / name).read_bytes()
        for damage, message in kinds:
            damage(folder / name)
            with pytest.raises(ModelFileError, match=rf"{name}.*: .*{message}.*|.*{message}") as caught:
                store.get(key)
            assert str(folder / name) in str(caught.value)
            assert f"remove {key[:12]}" in str(caught.value)
            (folder / name).write_bytes(whole)
    assert store.get(key).key == key


def test_what_is_removed_is_gone_and_can_be_built_again(store):
    key = store.build(some(), Sums(), batch=5).key
    with pytest.raises(KeyboardInterrupt):
        store.build(some(seed=7), Sums(fail_at=2), batch=5)
    partial = next(entry.key for entry in store.entries() if entry.state == "partial")
    assert store.remove(partial).done == 10
    assert store.remove(key[:9]).key == key
    assert {path.suffix for path in store.folder.iterdir()} <= {".lock"}
    again = Sums()
    assert store.build(some(), again, batch=5).key == key
    assert again.calls == 7


def test_removal_does_not_touch_files_of_others(store):
    key = store.build(some(), Sums()).key
    (store.folder / key / "thesis.txt").write_text("mine")
    with pytest.raises(ModelFileError, match="cannot remove"):
        store.remove(key)
    assert (store.folder / key / "thesis.txt").read_text() == "mine"


def test_a_store_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match=r"cannot write .*file"):
        FeatureStore(tmp_path / "file").build(some(), Sums())


def test_a_full_disk_is_noticed_before_the_work(store, monkeypatch):
    usage = type("usage", (), {"free": 100})
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda path: usage)
    backbone = Sums()
    with pytest.raises(ModelFileError, match=r"x_train.npy: .* MB are needed, 0 MB are free.*--store"):
        store.build(some(), backbone, batch=5)
    assert backbone.calls == 1


def test_the_store_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSOLVE_STORE", str(tmp_path / "there"))
    assert FeatureStore().folder == tmp_path / "there"
    monkeypatch.delenv("FEDSOLVE_STORE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FeatureStore().folder == tmp_path / ".cache" / "fedsolve" / "features"
