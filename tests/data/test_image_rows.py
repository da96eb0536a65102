"""A model of images knows its backbone: nothing is repeated, and another one is refused by name."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from fedsolve import load_model
from fedsolve.tables.schema import Extractor, read_schema
from tests.command import document, fedsolve, refused

KINDS = ("blue", "green", "red")


def picture(kind: str, rng: np.random.Generator) -> Image.Image:
    pixels = rng.normal(90, 25, (20, 24, 3))
    pixels[:, :, KINDS[::-1].index(kind)] += 60
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """300 images in class folders, 12 new ones in a flat folder, features in a store, a model of them."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(5)
    for number in range(312):
        kind = KINDS[number % 3]
        where = folder / "images" / kind if number < 300 else folder / "new"
        where.mkdir(parents=True, exist_ok=True)
        picture(kind, rng).save(where / f"{kind}-{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSOLVE_STORE", str(folder / "store"))
        words = ("features", "build", f"folder:{folder / 'images'}", "--backbone", "pixels:8")
        key = document(*words)["key"]
        document("train", f"features:{key[:12]}", "--method", "afl", "--ridge", 1, "--out", folder / "m")
        yield folder


def lines(*words):
    result = fedsolve("predict", *words)
    assert (result.exit_code, result.stderr) == (0, "")
    return [line.split(",") for line in result.stdout.splitlines()]


def test_features_train_and_a_flat_folder_with_no_option_repeated(folder):
    heads, *rows = lines(folder / "m", folder / "new")
    assert heads == ["row", "file", "label"]
    assert [row[1] for row in rows] == sorted(path.name for path in (folder / "new").iterdir())
    right = [row[1].startswith(row[2]) for row in rows]
    assert len(right) == 12
    assert np.mean(right) > 0.8


def test_single_images_many_files_and_a_class_folder(folder):
    files = sorted((folder / "new").iterdir())
    by_folder = {row[1]: row[2] for row in lines(folder / "m", folder / "new")[1:]}
    for chosen in (files[:1], files[3:6]):
        rows = lines(folder / "m", *chosen)[1:]
        assert [row[1] for row in rows] == [str(path) for path in chosen]
        assert [row[2] for row in rows] == [by_folder[path.name] for path in chosen]
    assert len(lines(folder / "m", f"folder:{folder / 'images'}")) == 301
    told = document("predict", folder / "m", folder / "new", "--json")
    assert told["beside"]["file"] == list(by_folder)
    assert told["labels"] == list(by_folder.values())


def test_the_model_file_holds_address_preprocessing_and_digest(folder):
    extractor = load_model(folder / "m").schema.extractor
    assert (extractor.address, extractor.width) == ("pixels:8", 192)
    assert extractor.preprocessing["size"] == [8, 8]
    assert load_model(folder / "m").schema.classes == KINDS


@pytest.mark.parametrize("command", ["predict", "evaluate", "personalise"])
@pytest.mark.parametrize(
    ("backbone", "fragment"),
    [
        ("pixels:8?normalise=half", "the preprocessing's mean is [0.5], there [0.0]"),
        ("pixels:8?order=channels", "the backbone's order is 'channels', there None"),
        ("pixels:12x16?channels=gray", "size is [12, 16]"),
    ],
)
def test_other_preprocessing_at_equal_width_is_refused(folder, tmp_path, command, backbone, fragment):
    words = [command, folder / "m", f"folder:{folder / 'images'}", "--backbone", backbone]
    words += ["--out", tmp_path / "out"] if command != "evaluate" else []
    refused(fedsolve(*words), 2, fragment, "Leave out --backbone")
    assert not (tmp_path / "out").exists()


def test_the_same_backbone_may_be_named_and_other_data_are_refused(folder, tmp_path):
    named = document("evaluate", folder / "m", f"folder:{folder / 'images'}", "--backbone", "pixels:8")
    assert named == document("evaluate", folder / "m", f"folder:{folder / 'images'}")
    (tmp_path / "empty").mkdir()
    refused(fedsolve("predict", folder / "m", tmp_path / "empty"), 2, "no images in this folder")
    refused(fedsolve("predict", folder / "m", tmp_path / "none.png"), 4, "No such file or folder")
    table = tmp_path / "t.csv"
    table.write_text("a,b,y\n1,2,x\n2,1,y\n3,1,x\n")
    document("train", table, "--method", "afl", "--clients", 1, "--out", tmp_path / "t")
    refused(fedsolve("predict", tmp_path / "t", folder / "new"), 2, "model takes columns of a table")
    refused(fedsolve("evaluate", tmp_path / "t", f"folder:{folder / 'images'}"), 2, "columns of a table")


def test_features_of_a_dataset_itself_are_not_those_of_a_backbone(tmp_path):
    document("train", "digits", "--method", "afl", "--clients", 2, "--out", tmp_path / "own")
    document("evaluate", tmp_path / "own", "digits")
    words = ("--backbone", "pixels", "--store", tmp_path / "store")
    refused(fedsolve("evaluate", tmp_path / "own", "digits", *words), 2, "those of digits")
    document("train", "digits", *words, "--method", "afl", "--clients", 2, "--out", tmp_path / "pixels")
    told = document("evaluate", tmp_path / "pixels", "digits", "--store", tmp_path / "store")
    assert told["accuracy"] > 0.8  # by the model's backbone, though none was named


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """Two ONNX files of one shape and other weights: the mean colours of an image, times numbers."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    folder = tmp_path_factory.mktemp("onnx")
    for name, seed in (("net.onnx", 0), ("changed.onnx", 1)):
        weight = np.random.default_rng(seed).normal(size=(3, 6)).astype(np.float32)
        nodes = [
            helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["out"]),
        ]
        image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", 6])
        graph = helper.make_graph(nodes, "g", [image], [out], [numpy_helper.from_array(weight, "w")])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.save(model, folder / name)
    return folder


def test_changed_weights_are_refused_and_moved_ones_are_not(folder, network, tmp_path):
    place = tmp_path / "net.onnx"
    shutil.copy(network / "net.onnx", place)
    words = ("--method", "afl", "--ridge", 1, "--clients", 3, "--backbone", f"onnx:{place}")
    document("train", f"folder:{folder / 'images'}", *words, "--out", tmp_path / "m")
    expected = lines(tmp_path / "m", folder / "new")
    place.rename(tmp_path / "moved.onnx")
    gone = fedsolve("predict", tmp_path / "m", folder / "new")
    refused(gone, 4, "no ONNX file", "name it with --backbone")
    moved = ("--backbone", f"onnx:{tmp_path / 'moved.onnx'}")
    assert lines(tmp_path / "m", folder / "new", *moved) == expected
    shutil.copy(network / "changed.onnx", place)
    for source in (folder / "new", f"folder:{folder / 'images'}", next((folder / "new").iterdir())):
        refused(fedsolve("predict", tmp_path / "m", source), 2, "the weights of onnx:", "have the digest")


def test_a_schema_of_images_for_all_sites(folder, tmp_path):
    schema = tmp_path / "images.toml"
    address = f"folder:{folder / 'images'}"
    document("schema", address, "--backbone", "pixels:8", "--out", schema)
    assert read_schema(schema).extractor == load_model(folder / "m").schema.extractor
    told = document(
        "train", address, "--schema", schema, "--method", "afl", "--ridge", 1, "--out", tmp_path / "m"
    )
    assert told["features"] == 192
    assert lines(tmp_path / "m", folder / "new") == lines(folder / "m", folder / "new")
    wrong = fedsolve("train", address, "--schema", schema, "--backbone", "pixels:8?normalise=half")
    refused(wrong, 2, "mean is [0.5]")


def test_what_differs_between_backbones_is_named():
    identity = {"name": "onnx", "version": 1, "weights": "a" * 64, "preprocessing": {"size": [8, 8]}}
    mine = Extractor.of("onnx:/here/net.onnx", identity, 4)
    assert mine == Extractor.of("onnx:there.onnx", identity | {"device": "cuda"}, 4)
    assert mine.differences(Extractor.of("pixels", {"name": "pixels"}, 4)) == [
        "the backbone is onnx:/here/net.onnx, there pixels"
    ]
    assert (
        "digest aaaaaaaaaaaa..., there bbbb"
        in mine.differences(Extractor.of("x", identity | {"weights": "b" * 64}, 4))[0]
    )


def test_a_site_makes_its_own_model_without_naming_the_backbone(folder, tmp_path):
    address = f"folder:{folder / 'images'}"
    words = ("--method", "apfl", "--width", 16, "--clients", 3, "--backbone", "pixels:8")
    document("train", address, *words, "--out", tmp_path / "shared")
    document("personalise", tmp_path / "shared", address, "--out", tmp_path / "own")
    assert load_model(tmp_path / "own").schema == load_model(tmp_path / "shared").schema
    assert len(lines(tmp_path / "own", folder / "new")) == 13


@pytest.mark.slow
def test_a_network_on_images_knows_how_they_reach_it(folder, tmp_path):
    pytest.importorskip("torch")
    words = (
        "--method",
        "fedavg",
        "--network",
        "cnn",
        "--rounds",
        1,
        "--clients",
        3,
        "--backbone",
        "pixels:12",
    )
    document("train", f"folder:{folder / 'images'}", *words, "--out", tmp_path / "m")
    found = lines(tmp_path / "m", folder / "new")
    assert len(found) == 13
    assert load_model(tmp_path / "m").schema.extractor.preprocessing["mean"] == [0.5]
    wrong = fedsolve("predict", tmp_path / "m", folder / "new", "--backbone", "pixels:12?normalise=none")
    refused(wrong, 2, "the preprocessing's mean is [0.0], there [0.5]")
