"""Exported models run by onnxruntime on raw rows: the same labels and probabilities as `predict_proba`."""

from __future__ import annotations

import csv
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.backends.activations import ACTIVATIONS, activate
from fedsolve.model import Model
from fedsolve.tables.encoder import category_text, encode
from fedsolve.tables.schema import Column, Extractor, Schema
from tests.command import document, fedsolve, refused
from tests.data.test_backbones import network
from tests.toy import toy_data

pytestmark = pytest.mark.onnx
onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from fedsolve.export import CARD, OPSET, OnnxGraph, writes  # noqa: E402
from fedsolve.export.families import activation  # noqa: E402

NEAR = {"float64": 1e-9, "float32": 1e-5}
X, Y = toy_data(400, 3, noise=0.3)
X[:, 4] = 1000 + 0.1 * X[:, 4]
NEW = toy_data(200, 4)[0]
NEW[:, 4] = 1000 + 0.1 * NEW[:, 4]
NAMES = np.array(["eins", "zwei", "drei é"])


def divided(features: Any = X, labels: Any = Y, **more: Any) -> Any:
    return fs.LocalFederation.from_arrays(
        features, labels, np.arange(len(labels)) % 4, clients=4, workers=1, **more
    )


def session(path: Any) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def ran(path: Any, **inputs: Any) -> dict[str, Any]:
    run = session(path)
    return dict(zip([edge.name for edge in run.get_outputs()], run.run(None, inputs), strict=True))


def agrees(model: Model, folder: Path, near: dict[str, float] = NEAR, rows: Any = NEW) -> None:
    """Labels, probabilities and scores of both precisions are the model's."""
    for precision in NEAR:
        model.to_onnx(folder / "model.onnx", precision)
        # Both sides see the same numbers: what float32 cannot hold is no matter of the export.
        rows = rows.astype(precision)
        found = ran(folder / "model.onnx", features=rows)
        whole = rows.astype("float64")
        expected = model.predict_proba(whole)
        assert found["probabilities"].dtype == precision
        np.testing.assert_allclose(found["probabilities"], expected, rtol=0, atol=near[precision])
        scores = model.decision_function(whole)
        size = max(1.0, np.abs(scores[scores > -1e8]).max())
        np.testing.assert_allclose(found["scores"], scores, rtol=near[precision], atol=size * near[precision])
        first, second = np.sort(scores, axis=1)[:, :-3:-1].T
        clear = first - second > 10 * near[precision]
        assert clear.mean() > 0.95
        assert np.array_equal(found["label"][clear], model.predict(whole)[clear])


FAMILIES = {
    "afl": lambda: fs.AFL(ridge=0.1).fit(divided()),
    "afl text labels": lambda: fs.AFL(ridge=0.1, scale="standard", intercept=True).fit(divided(X, NAMES[Y])),
    "afl lda": lambda: fs.AFL(ridge=0.1, head="lda").fit(divided()),
    "afl absent class": lambda: fs.AFL(ridge=0.1, head="mean").fit(divided(X, Y, classes=[0, 1, 2, 7])),
    "afl two classes": lambda: fs.AFL(ridge=0.1).fit(divided(X, Y > 0)),
    "calibrated": lambda: fs.Recipe(fs.AFL(ridge=0.1, intercept=True), calibrate=True).fit(divided(X, Y / 2)),
    "softmax": lambda: fs.Softmax(ridge=0.1).fit(divided()),
    "deep": lambda: fs.DeepAFL(layers=3, width=32, ridge=0.1, seed=4, scale="standard").fit(divided()),
    "deep in twenty layers": lambda: fs.DeepAFL(layers=20, width=256, ridge=1e-3, scale="standard").fit(
        divided()
    ),
    "deep erf": lambda: fs.DeepAFL(
        layers=2, width=24, hidden_width=40, activation="gelu_erf", ridge=0.1, scale="standard", skip=False
    ).fit(divided()),
    "deep initial": lambda: fs.DeepAFL(
        layers=2, width=24, block_input="initial", ridge=0.1, scale="standard", intercept=True
    ).fit(divided()),
    "deep without biases": lambda: fs.DeepAFL(layers=2, width=24, bias=False, ridge=0.1).fit(
        divided(X[:, :4])
    ),
    "personal without biases": lambda: (
        fs.APFL(width=24, refinement_width=20, bias=False, ridge=0.1)
        .fit(divided(X[:, :4]))
        .personal("client-2")
    ),
    "deep identity": lambda: fs.DeepAFL(
        layers=2, width=24, transformation="identity", projection="identity", ridge=0.1, scale="standard"
    ).fit(divided()),
    "calibrated deep": lambda: fs.Recipe(
        fs.DeepAFL(layers=2, width=32, ridge=0.1, scale="standard"), calibrate=True
    ).fit(divided()),
    "softmax over deep": lambda: (
        fs.Softmax(ridge=0.1)
        .over(fs.DeepAFL(layers=2, width=24, ridge=0.1, scale="standard").fit(divided()))
        .fit(divided())
    ),
    "softmax over kernels": lambda: fs.KernelSoftmax(landmarks=60).fit(divided()),
    "kernel": lambda: fs.KernelAFL(landmarks=60, scale="standard").fit(divided()),
    "apfl": lambda: fs.APFL(layers=1, width=24, ridge=0.1, scale="standard").fit(divided()),
    "personal": lambda: (
        fs.APFL(layers=1, width=24, refinement_width=20, ridge=0.1, scale="standard", balance=0.7)
        .fit(divided())
        .personal("client-2")
    ),
    "personal over softmax": lambda: (
        fs.APFL(refinement_width=20, balance=0.5)
        .over(fs.Softmax(ridge=0.1).fit(divided()))
        .personalised(fs.ClientData(X[:80], Y[:80]))
    ),
} | {
    f"cascade {strategy}": lambda strategy=strategy: fs.Cascade(
        strategy=strategy, layers=2, width=24, ridge=0.1
    ).fit(divided(X[:, :4]))
    for strategy in (1, 2, 3, 4)
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same_in_onnxruntime(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    agrees(model, tmp_path, rows=NEW[:, : model.features])
    assert (stat.S_IMODE((tmp_path / "model.onnx").stat().st_mode) == 0o600) == model.private


@pytest.mark.slow
@pytest.mark.parametrize("ridge", [0.01, 1e-4])
def test_depth_keeps_the_promise_of_float32(ridge: float, tmp_path: Path, digits: Any) -> None:
    """Sums of 512 products in each of 20 layers: layers whose errors reach the scores are float64."""
    model = fs.DeepAFL(layers=20, width=512, ridge=ridge).fit(divided(digits.features, digits.labels))
    agrees(model, tmp_path, rows=digits.features)
    double, single = (model.to_onnx(tmp_path / "m", precision).size for precision in NEAR)
    assert single < 0.8 * double


@pytest.mark.parametrize("kind", ["i", "f", "b", "U"])
def test_labels_keep_their_type(kind: str, tmp_path: Path) -> None:
    labels = {"i": Y, "f": Y / 2, "b": Y > 0, "U": NAMES[Y]}[kind]
    model = fs.AFL(ridge=0.1).fit(divided(X, labels))
    model.to_onnx(tmp_path / "m.onnx")
    label = ran(tmp_path / "m.onnx", features=NEW)["label"]
    assert label.dtype.kind == ("O" if kind == "U" else kind)
    assert label.tolist() == model.predict(NEW).tolist()


def test_regression_gives_its_targets(tmp_path: Path) -> None:
    targets = np.c_[X[:, 0] + X[:, 1], X[:, 2] ** 2]
    fed = divided(X, targets, task="regression")
    model = fs.AFL(ridge=0.1, intercept=True).fit(fed)
    written = model.to_onnx(tmp_path / "m.onnx")
    assert (written.inputs, written.outputs) == (("features",), ("prediction",))
    found = ran(tmp_path / "m.onnx", features=NEW)["prediction"]
    np.testing.assert_allclose(found, model.predict(NEW), atol=1e-9)
    methods = (fs.AFL(intercept=True), fs.KernelAFL(16, ridge=0.1), fs.DeepAFL(layers=2, width=16))
    for method in methods:
        model = method.fit(fed, calibrate=True)
        assert model.to_onnx(tmp_path / "m.onnx").outputs == ("prediction", "low", "high")
        found = ran(tmp_path / "m.onnx", features=NEW)
        for name, values in zip(("low", "high"), model.predict_interval(NEW), strict=True):
            np.testing.assert_allclose(found[name], values, atol=1e-9)
        np.testing.assert_allclose(found["prediction"], model.predict(NEW), atol=1e-9)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("precision", NEAR)
def test_activations(name: str, precision: str, tmp_path: Path) -> None:
    values = np.r_[np.linspace(-9, 9, 2001), -60.0, 0.0, 60.0][:, None].astype(precision)
    graph = OnnxGraph(precision)
    result = activation(name, graph.input("x", precision, 1))
    graph.output("y", result, precision, ("rows", 1))
    onnx.save(graph.model({}, "", "0"), tmp_path / "m.onnx")
    expected = activate(name, values.astype("float64").copy())
    near = {"float64": 5e-14, "float32": 2e-6}[precision]
    np.testing.assert_allclose(ran(tmp_path / "m.onnx", x=values)["y"], expected, rtol=near, atol=near)


def test_the_file_is_checked_pinned_equal_and_has_the_card(tmp_path: Path) -> None:
    model = fs.DeepAFL(layers=1, width=8, ridge=0.1).fit(divided())
    for name in "ab":
        model.to_onnx(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    proto = onnx.load(tmp_path / "a")
    onnx.checker.check_model(proto, full_check=True)
    assert [(each.domain, each.version) for each in proto.opset_import] == [("", OPSET)]
    told = json.loads({each.key: each.value for each in proto.metadata_props}[CARD])
    assert told["family"] == "deep"
    assert told["parameters"]["width"] == 8


def test_what_predict_refuses_fails_in_onnxruntime_too(tmp_path: Path) -> None:
    fs.AFL(ridge=0.1).fit(divided()).to_onnx(tmp_path / "m.onnx")
    for wrong in (np.nan, np.inf, -np.inf):
        rows = NEW.copy()
        rows[7, 2] = wrong
        with pytest.raises(Exception, match="refused: a feature is NaN or infinite"):
            ran(tmp_path / "m.onnx", features=rows)
    assert len(ran(tmp_path / "m.onnx", features=NEW[:0])["label"]) == 0


# -- tables ----------------------------------------------------------------------------------------

CELLS = [
    "a",
    " a ",
    "b\u2003",
    "3",
    "3.0",
    "3.",
    " 3.00\t",
    "+3",
    "03",
    "7",
    "x.y*",
    "xzy*",
    "",
    "NA",
    " nan ",
]
CELLS += ["None", "é", "True", "two words", "two  words", "A", "3.01", "(other)"]
CATEGORIES = ("a", "b", "3", "x.y*", "None", "é", "True", "two words", "4.0")


@pytest.mark.parametrize("missing", ["other", "flag", "True", "b"])
def test_every_spelling_of_a_category_is_the_same(missing: str, tmp_path: Path) -> None:
    schema = Schema(
        (
            Column("kind", "category", categories=CATEGORIES, missing=missing),
            Column("scores", missing="flag", absent=("-999",), bounds=(-1.0, 1.5)),
            Column("day", "date", missing="flag", reference=18000.0),
        ),
        label="y",
    )
    rng = np.random.default_rng(0)
    table = {
        "kind": np.array(CELLS * 20, dtype=object),
        "scores": np.where(rng.random(20 * len(CELLS)) < 0.2, np.nan, rng.normal(size=20 * len(CELLS))),
        "day": np.datetime64("2020-01-01", "us") + rng.integers(0, 10**14, 20 * len(CELLS)),
    }
    table["day"][::9] = np.datetime64("NaT")
    table["scores"][::7] = -999.0
    labels = np.array([len(category_text(cell)) % 2 for cell in table["kind"]])
    features = encode(schema, table)
    model = fs.Recipe(fs.AFL(ridge=0.1), schema).fit(divided(features, labels, schema=schema))
    written = model.to_onnx(tmp_path / "m.onnx")
    assert written.inputs == ("kind", "scores", "day")
    assert written.outputs == ("label", "probabilities", "predicted_scores")
    days = table["day"].astype(np.int64) / 86_400_000_000
    days[np.isnat(table["day"])] = np.nan
    inputs = {
        "kind": table["kind"][:, None],
        "scores": table["scores"][:, None],
        "day": days[:, None],
    }
    found = ran(tmp_path / "m.onnx", **inputs)
    np.testing.assert_allclose(found["probabilities"], model.predict_proba(table), rtol=0, atol=1e-9)


def test_a_shared_stream_of_columns(tmp_path: Path) -> None:
    """Its probabilities are those of prepared rows, in the file and from `predict_proba`."""
    schema = Schema((Column("a"), Column("b")), label="y")
    rows = np.c_[100 + X[:, 0], X[:, 1]]
    model = fs.Recipe(fs.APFL(layers=1, width=16, ridge=0.1), schema).fit(divided(rows, Y, schema=schema))
    model.to_onnx(tmp_path / "m.onnx")
    found = ran(tmp_path / "m.onnx", a=rows[:, :1], b=rows[:, 1:])
    for given in (rows, {"a": rows[:, 0], "b": rows[:, 1]}):
        np.testing.assert_allclose(found["scores"], model.decision_function(given), atol=1e-9)
        np.testing.assert_allclose(found["probabilities"], model.predict_proba(given), rtol=0, atol=1e-9)


def test_a_missing_value_that_the_schema_refuses_fails_by_name(tmp_path: Path) -> None:
    schema = Schema(
        (
            Column("age", missing="refuse"),
            Column("sex", "category", categories=("F", "M"), missing="refuse"),
            Column("visit", "date", missing="refuse"),
        ),
        label="y",
    )
    rng = np.random.default_rng(1)
    features = np.c_[rng.normal(size=60), np.eye(3)[rng.integers(0, 3, 60)], rng.normal(size=60)]
    fed = divided(features, (features[:, 0] > 0).astype(int), schema=schema)
    fs.Recipe(fs.AFL(ridge=0.1), schema).fit(fed).to_onnx(tmp_path / "m.onnx")
    good = {"age": [[50.0]], "sex": [["X"]], "visit": [[18000.0]]}
    arrays = {name: np.array(cell) for name, cell in good.items()}
    assert ran(tmp_path / "m.onnx", **arrays)["label"].shape == (1,)
    for name, cell in (("age", np.nan), ("sex", " NA"), ("visit", np.nan)):
        with pytest.raises(Exception, match=f"refused: '{name}' is missing"):
            ran(tmp_path / "m.onnx", **(arrays | {name: np.array([[cell]])}))


@pytest.mark.parametrize("method", ["afl", "deepafl"])
@pytest.mark.parametrize("precision", NEAR)
def test_a_raw_table_from_the_command_line(method: str, precision: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    ill = rng.random(300) < 0.4
    age = np.round(50 + 10 * rng.normal(size=300) + 12 * ill, 1).astype(str)
    age[rng.random(300) < 0.1] = ""
    sex = np.where(rng.random(300) < 0.3 + 0.3 * ill, "F", "M").astype(object)
    sex[rng.random(300) < 0.1] = "NA"
    days = (np.datetime64("2020-01-01") + (400 * rng.random(300) + 200 * ill).astype(int)).astype(str)
    days[rng.random(300) < 0.1] = ""
    table = {"age": age, "sex": sex, "visit": days, "count": 1e7 + rng.normal(size=300).round(3) + ill}
    path, model, out = tmp_path / "raw.csv", tmp_path / "m.safetensors", tmp_path / "m.onnx"
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*table, "hospital", "diagnosis"])
        writer.writerows(
            zip(*table.values(), rng.choice(["n", "s"], 300), np.where(ill, "ill", "well"), strict=True)
        )
    named = ("--label", "diagnosis", "--client-column", "hospital")
    document("schema", path, *named, "--out", tmp_path / "schema.toml")
    sizes = ("--layers", 2, "--width", 24, "--ridge", 0.1) if method == "deepafl" else ("--ridge", 0.1)
    document(
        *("train", path, "--schema", tmp_path / "schema.toml", "--method", method, *sizes),
        *("--calibrate", "--out", model),
    )
    told = document("export", model, "--onnx", out, "--precision", precision)
    assert told["inputs"] == ["age", "sex", "visit", "count"]
    assert told["outputs"] == ["label", "probabilities", "scores"]
    assert told["bytes"] == out.stat().st_size
    trained = fs.load_model(model)
    assert trained.calibration is not None
    since = [np.nan if not day else float(np.datetime64(day).astype(int)) for day in days]
    inputs = {
        "age": np.array([float(cell or "nan") for cell in age])[:, None],
        "sex": sex[:, None],
        "visit": np.array(since)[:, None],
        "count": table["count"][:, None],
    }
    found = ran(out, **inputs)
    np.testing.assert_allclose(
        found["probabilities"], trained.predict_proba(table), rtol=0, atol=NEAR[precision]
    )
    assert found["label"].tolist() == trained.predict(table).tolist()


# -- networks --------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize(
    ("name", "network"),
    [("fedavg", "mlp:16"), ("fedavg", "cnn"), ("feddbe", "mlp:16"), ("fedpcl", "mlp:16")],
)
def test_networks_are_the_same(name: str, network: str, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from fedsolve.registry import method_class

    x, y = X[:80] - X[:80].mean(axis=0), Y[:80]
    images = {"shape": "1,12,12", "pixel_mean": "0.3", "pixel_deviation": "0.2"} if network == "cnn" else {}
    if images:
        x = np.random.default_rng(2).standard_normal((80, 144))
    kind: Any = method_class(name)
    model = kind(network=network, rounds=2, batch=10, precision=precision, **images).fit(divided(x, y))
    if not model.predicts:
        with pytest.raises(fs.DataError, match="does not predict by itself"):
            model.to_onnx(tmp_path / "m.onnx")
    if model.personalises:
        model = model.personal("client-1")
    if images and precision == "float64":
        with pytest.raises(fs.DataError, match=r"no .*Conv.* Export it with precision float32"):
            model.to_onnx(tmp_path / "m.onnx")
        precision = "float32"
    model.to_onnx(tmp_path / "m.onnx", precision)
    for rows in (x[:1].astype(precision), x[:37].astype(precision)):
        found = ran(tmp_path / "m.onnx", features=rows)
        expected = model.predict_proba(rows)
        np.testing.assert_allclose(found["probabilities"], expected, rtol=0, atol=NEAR[precision])
        assert np.array_equal(found["label"], model.predict(rows))


@pytest.mark.torch
def test_a_network_under_a_refinement(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from fedsolve.gradient import FedAvg

    x = X[:80] - X[:80].mean(axis=0)
    shared = FedAvg(network="mlp:16", rounds=1, batch=10, precision="float64").fit(divided(x, Y[:80]))
    own = fs.APFL(refinement_width=20, balance=0.5).over(shared).personalised(fs.ClientData(x, Y[:80]))
    agrees(own, tmp_path, rows=x)


# -- refusals --------------------------------------------------------------------------------------


class Own(Model):
    """The sum of the features against its negative."""

    def scores(self, features: Any) -> Any:
        total = features.sum(axis=1, keepdims=True)
        return np.hstack([total, -total])


class Tripled(Own):
    def scores(self, features: Any) -> Any:
        return 3 * super().scores(features)


def test_a_model_of_ones_own_is_refused_until_somebody_writes_it(tmp_path: Path) -> None:
    own, tripled = Own(2, np.array(["up", "down"]), 2), Tripled(2, np.array(["up", "down"]), 2)
    with pytest.raises(fs.DataError, match=r"family '.*:Own' \(Own\) cannot be exported; .*export.writes"):
        own.to_onnx(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()

    @writes(Own)
    def written(graph: OnnxGraph, model: Own, rows: Any) -> Any:
        return graph.head(rows, np.array([[1.0, -1.0]] * 2))

    agrees(own, tmp_path, rows=NEW[:, :2])
    with pytest.raises(fs.DataError, match=r"\(Tripled\) cannot be exported"):
        tripled.to_onnx(tmp_path / "m.onnx")


def test_what_cannot_be_exported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column("age"), Column("note", "text", buckets=4), Column("history", "text", buckets=4))
    model = fs.AFL(ridge=0.1).fit(divided(X[:, [0, 1, 2, 3, 5, 5, 0, 1, 2]]))
    model.schema = Schema(columns, label="y")
    model.save(tmp_path / "m.safetensors")
    words = ("export", tmp_path / "m.safetensors", "--onnx", tmp_path / "m.onnx")
    refused(fedsolve(*words), 2, "columns 'note', 'history'", 'kind = "unused"')
    model.schema = None
    with pytest.raises(fs.DataError, match="precision must be one of float64, float32; got 'half'"):
        model.to_onnx(tmp_path / "m.onnx", "half")
    refused(
        fedsolve("export", tmp_path / "m.safetensors", "--onnx", tmp_path / "m.safetensors"), 4, "is an input"
    )
    model.save(tmp_path / "m.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    refused(fedsolve(*words), 2, "pip install 'fedsolve[export]'")
    assert not (tmp_path / "m.onnx").exists()


def test_features_of_images_are_a_matrix(tmp_path: Path) -> None:
    model = fs.AFL(ridge=0.1).fit(divided())
    model.schema = Schema(extractor=Extractor("onnx:net.onnx", {}, "", 6, {"name": "net"}))
    assert model.to_onnx(tmp_path / "m.onnx").inputs == ("features",)
    assert "onnx:net.onnx" in onnx.load(tmp_path / "m.onnx").graph.input[0].doc_string


BACKBONES = {
    "nchw": "onnx:{nchw}?normalise=imagenet",
    "nhwc": "onnx:{nhwc}?mean=0.1,0.2,0.3&std=2,3,4",
    "bgr": "onnx:{nchw}?channels=bgr",
    "pixels": "pixels:8x6?channels=rgb",
    "channels": "pixels:8x6?channels=rgb&order=channels&normalise=half",
}


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("kind", BACKBONES)
def test_a_folder_of_images_through_the_joined_graph(kind: str, precision: str, tmp_path: Path) -> None:
    """Pixels in, label out: the backbone's own preprocessing, network and the model in one file."""
    weights = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
    files = {
        layout: network(tmp_path / f"{layout}.onnx", shape=("n", *sides), layout=layout, weights=weights)
        for layout, sides in (("nchw", (3, 8, 6)), ("nhwc", (8, 6, 3)))
    }
    words = ("--backbone", BACKBONES[kind].format(**files), "--method", "afl", "--ridge", 0.1)
    joined_agrees(tmp_path, (8, 6), words, precision)


@pytest.mark.torch
def test_images_through_a_network(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ("--method", "fedavg", "--network", "cnn", "--shape", "3,12,12", "--rounds", 2)
    joined_agrees(tmp_path, (12, 12), words, "float64")


def joined_agrees(folder: Path, size: tuple[int, int], words: tuple[Any, ...], precision: str) -> None:
    """What the graph says of bytes is what `fedsolve predict` says of their files.

    Images are of the size that the network takes: resizing is left to whoever runs the graph.
    """
    from PIL import Image

    pixels = np.random.default_rng(3).integers(0, 256, (40, *size, 3), dtype=np.uint8)
    pixels[::2, :, :, 0] //= 2
    for number, image in enumerate(pixels):
        place = folder / "images" / ("half" if number % 2 == 0 else "whole")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:02}.png")
    model, out, printed = (folder / name for name in ("m.safetensors", "m.onnx", "p.csv"))
    document("train", f"folder:{folder / 'images'}", *words, "--clients", 2, "--out", model)
    told = document("export", model, "--onnx", out, "--images", "--precision", precision)
    assert told["inputs"] == ["pixels"]
    found = ran(out, pixels=pixels)
    assert fedsolve("predict", model, folder / "images", "--probabilities", "--out", printed).exit_code == 0
    with open(printed, newline="") as stream:
        lines = {Path(line["file"]).stem: line for line in csv.DictReader(stream)}
    shares = [[float(lines[f"{n:02}"][f"probability_{c}"]) for c in ("half", "whole")] for n in range(40)]
    # The backbone computes in float32, in whichever batches.
    np.testing.assert_allclose(found["probabilities"], shares, rtol=0, atol=1e-5)
    assert found["label"].tolist() == [lines[f"{n:02}"]["label"] for n in range(40)]


def test_backbones_that_cannot_be_joined_say_so(tmp_path: Path) -> None:
    model = fs.AFL(ridge=0.1).fit(divided(X[:, :3]))
    with pytest.raises(fs.DataError, match="does not take features of images"):
        model.to_onnx(tmp_path / "m.onnx", images=True)
    from fedsolve.data.backbones import load_backbone

    for address, message in (
        ("pixels:1", "takes images of any size or number of channels"),
        (f"onnx:{network(tmp_path / 'four.onnx', shape=(4, 3, 8, 8))}", "takes 4 images at a time"),
    ):
        backbone = load_backbone(address)
        width = backbone.width or 3
        model = fs.AFL(ridge=0.1).fit(divided(np.random.default_rng(0).standard_normal((400, width))))
        model.schema = Schema(extractor=Extractor.of(address, backbone.identity, width))
        with pytest.raises(fs.DataError, match=message):
            model.to_onnx(tmp_path / "m.onnx", images=True)
    assert not (tmp_path / "m.onnx").exists()
