"""Gradient methods on the command line: what is listed, trained, continued, refused and read back."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import fedsolve as fs
from fedsolve import registry
from fedsolve.cli.method_options import is_gradient, method_keys
from fedsolve.cli.output import Output
from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets import load_dataset
from fedsolve.errors import DataError
from fedsolve.gradient import FedAvg, FedProx
from fedsolve.gradient.pixel_form import for_model, pixel_address
from fedsolve.parameters import described
from tests.command import document, fedsolve, refused

GRADIENT = [key for key in method_keys() if is_gradient(key)]
STATEFUL = [key for key in GRADIENT if registry.method_class(key).keeps_state]
NORMALISED = "fedsolve.gradient.fedbn:small_network"
"""FedBN needs BatchNorm, which no network on features has by name."""
QUICK = ("--clients", "4", "--workers", "1", "--rounds", "3", "--rate", "0.5")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """150 digits to train with and 50 to test with."""
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    pixels, labels = load_digits(return_X_y=True)
    x, y = pixels[:200] / 16, labels[:200]
    np.savez(path, x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Red, green and blue noise of 14 x 10 pixels, 20 images of each, in class folders."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for place, colour in enumerate(("red", "green", "blue")):
        (folder / colour).mkdir()
        for number in range(20):
            pixels = rng.integers(0, 90, (14, 10, 3), dtype=np.uint8)
            pixels[:, :, place] += 150
            Image.fromarray(pixels).save(folder / colour / f"{number}.png")
    return f"folder:{folder}"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSOLVE_STORE", str(tmp_path / "store"))


def python(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)


# -- help and the list of methods ------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--method", "fedprox", "-h"), ("--help", "--method=fedprox")])
def test_the_help_page_of_one_method(words):
    page = " ".join(fedsolve("train", *words).stdout.split())
    assert "Li et al., MLSys 2020" in page
    for description in described(FedProx).values():
        assert f"{description.option.partition('/')[0]} " in page
    options = page.split(" Training: ")[1]
    for absent in ("--ridge", "--layers", "--contrast"):
        assert absent not in options


def test_methods_are_listed_closed_form_first(digits):
    listed = document("methods")["methods"]
    assert [told["key"] for told in listed] == method_keys()
    families = [told["family"] for told in listed]
    assert families == sorted(families)
    only = document("methods", "--family", "gradient")["methods"]
    assert [told["key"] for told in only] == GRADIENT
    by_key = {told["key"]: told for told in listed}
    assert by_key["fedavg"]["feedback_alignment"] is True
    assert by_key["fedavg"]["needs"] == ["fedsolve[torch]"]
    assert (
        by_key["afl"] | {"family": "closed-form", "needs": [], "feedback_alignment": False} == by_key["afl"]
    )
    assert [key for key in by_key if by_key[key]["keeps_state"]] == STATEFUL
    page = fedsolve("methods", "--family", "gradient").stdout
    assert "feedback alignment" in page
    assert "afl " not in page


@pytest.mark.slow
def test_without_torch_methods_are_listed_and_training_says_what_to_install(digits, tmp_path):
    blocked = (
        "import scipy.stats, sys; sys.modules['torch'] = None; from fedsolve.cli.main import main; main()"
    )
    listed = python(blocked, "methods", "--json")
    assert listed.returncode == 0, listed.stderr
    available = {told["key"]: told["available"] for told in json.loads(listed.stdout)["methods"]}
    assert available == {key: not is_gradient(key) for key in method_keys()}
    page = " ".join(python(blocked, "methods").stdout.split())
    assert "not installed: pip install 'fedsolve[torch]'" in page
    assert python(blocked, "train", "--help").returncode == 0
    out = tmp_path / "m.safetensors"
    failed = python(blocked, "train", str(digits), "--method", "fedavg", "--out", str(out))
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: method 'fedavg' needs torch")
    assert "pip install 'fedsolve[torch]'" in failed.stderr
    assert not out.exists()


@pytest.mark.slow
def test_listing_methods_and_help_load_nothing_slow():
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom fedsolve.cli.main import main\n"
        "for words in (['methods'], ['train', '--help'], ['train', '--method', 'fedavg', '--help'],\n"
        "              ['client', '--help'], ['server', '--help']):\n"
        "    assert CliRunner().invoke(main, words).exit_code == 0\n"
        "slow = {'torch', 'sklearn', 'pandas', 'matplotlib', 'scipy.stats', 'scipy.optimize'}\n"
        "sys.exit(' '.join(slow & set(sys.modules)) or None)"
    )
    done = python(script)
    assert done.returncode == 0, done.stderr


# -- train -----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_train_gives_the_model_of_the_library(digits, tmp_path):
    out = tmp_path / "m.safetensors"
    words = ("--method", "fedprox", "--network", "mlp:8", "--feedback", "lowest")
    more = ("--proximal", "0.1", "--track", "drift", "--out", out)
    told = document("train", digits, *QUICK, *words, *more)
    data = np.load(digits)
    owners = fs.partition.iid(data["y_train"], 4)
    federation = fs.LocalFederation.from_arrays(data["x_train"], data["y_train"], owners, workers=1)
    method = FedProx(network="mlp:8", feedback="lowest", proximal=0.1, track="drift", rounds=3, rate=0.5)
    model = method.fit(federation)
    model.card = fs.load_model(out).card
    assert out.read_bytes() == model.to_bytes()
    assert told["parameters"] == method.parameters()
    assert told["accuracy"]["train"] == federation.evaluate(model)
    assert told["accuracy"]["test"] == model.score(data["x_test"], data["y_test"])
    assert (told["rounds"], told["exchanges"], told["weights"]) == (3, 6, 64 * 8 + 8 + 8 * 10 + 10)
    assert told["loss"] == told["history"][4]["metrics"]["loss"]
    assert told["drift"] == told["history"][5]["metrics"]["drift"] > 0
    assert told["feedback_layers"] == model.history[-2].metrics["feedback"]
    assert told["bytes_up"] == sum(record.bytes_up for record in model.history)


@pytest.mark.torch
def test_both_names_of_the_feedback_option_mean_the_same(digits):
    words = ("train", digits, *QUICK, "--method", "fedavg", "--network", "mlp:8")
    told = [document(*words, name, "classifier") for name in ("--feedback", "--feedback")]
    assert told[0]["parameters"] == told[1]["parameters"]
    assert told[0]["loss"] == told[1]["loss"]
    assert told[0]["feedback_layers"] == ["classifier"]
    assert document(*words, "--feedback", "none")["parameters"]["feedback"] is None


@pytest.mark.torch
@pytest.mark.parametrize("key", GRADIENT)
def test_every_gradient_method_trains_and_is_read_back(digits, tmp_path, key):
    out = tmp_path / "m.safetensors"
    once = {field.name: field.default for field in dataclasses.fields(registry.method_class(key))}["rounds"]
    words = ("--clients", "3", "--workers", "1", "--rounds", min(2, once), "--rate", "0.2", "--out", out)
    told = document(
        "train", digits, "--method", key, "--network", NORMALISED if key == "fedbn" else "mlp:8", *words
    )
    assert told["method"] == key
    assert np.isfinite(told["loss"])
    allowed = ("--allow-network", NORMALISED) if key == "fedbn" else ()
    evaluated = document("evaluate", out, digits, *allowed)
    assert evaluated["accuracy"] == told["accuracy"]["test"]
    predicted = document("predict", out, digits, "--scores", *allowed)
    assert np.array_equal(
        predicted["scores"], fs.load_model(out).decision_function(np.load(digits)["x_test"])
    )


@pytest.mark.torch
def test_the_summary_names_network_rounds_and_loss(digits):
    words = ("--method", "fedavg", "--network", "mlp:8", "--feedback", "highest", "--evaluate-every", "1")
    page = fedsolve("train", digits, *QUICK, *words)
    assert page.exit_code == 0, page.stderr
    assert page.stderr == "the model is not kept; name a file with --out to keep it.\n"
    for fragment in ("mlp:8 (610 weights)", "3, local loss", "highest, last in ", "50 test rows", "MB up"):
        assert fragment in page.stdout
    assert "over the last tenth of the rounds" in page.stdout


@pytest.mark.torch
def test_watched_rounds_carry_test_accuracy_and_change_nothing(digits):
    words = ("train", digits, *QUICK, "--method", "fedavg")
    watched, plain = document(*words, "--evaluate-every", "2"), document(*words)
    seen = [record["metrics"].get("test_accuracy") for record in watched["history"]]
    assert seen[1] is None
    assert seen[2] == watched["accuracy"]["test"] == watched["final_accuracy"]
    assert plain["final_accuracy"] is None
    assert watched["accuracy"] == plain["accuracy"]


@pytest.mark.torch
@pytest.mark.parametrize("track", ["none", "drift"])
def test_progress_tells_round_loss_and_total(digits, monkeypatch, track):
    told = []

    def bar(self, title, unit):
        assert (title, unit) == ("fedavg", "round")
        return _Recording(told)

    monkeypatch.setattr(Output, "bar", bar)
    assert fedsolve("train", digits, *QUICK, "--method", "fedavg", "--track", track).exit_code == 0
    each = 2 if track == "drift" else 1
    assert [(done, total) for done, total, _ in told] == [(r, 3) for r in (1, 2, 3) for _ in range(each)]
    assert all(remark.startswith("loss ") for _, _, remark in told)


class _Recording:
    """A bar that keeps what it is told, and stops the run where it is asked to."""

    def __init__(self, told, stop_after=None):
        self.told = told
        self.stop_after = stop_after

    def __enter__(self):
        return self._advance

    def __exit__(self, *_):
        return None

    def _advance(self, done, expected, remark):
        self.told.append((done, expected, remark))
        if done == self.stop_after:
            raise KeyboardInterrupt


@pytest.mark.torch
@pytest.mark.parametrize("key", ["fedavg", *STATEFUL])
def test_an_interrupted_run_resumes_to_the_same_bytes(digits, tmp_path, monkeypatch, key):
    whole, resumed, checkpoint = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "run.ckpt"))
    words = ("train", digits, "--clients", "3", "--rounds", "4", "--method", key, "--participation", "0.7")
    words += ("--network", NORMALISED) if key == "fedbn" else ()
    document(*words, "--out", whole)
    with monkeypatch.context() as patched:
        patched.setattr(Output, "bar", lambda self, title, unit: _Recording([], stop_after=2))
        stopped = fedsolve(*words, "--checkpoint", checkpoint, "--out", resumed)
    refused(stopped, 130, f"{checkpoint} holds the last exchange")
    assert not resumed.exists()
    told = document(*words, "--checkpoint", checkpoint, "--resume", "--out", resumed)
    assert told["exchanges"] >= 4
    assert resumed.read_bytes() == whole.read_bytes()


# -- failures --------------------------------------------------------------------------------------


BAD_WORDS = {
    "closed-form parameter": (
        ("--layers", "3"),
        2,
        "--layers belongs to apfl, cascade and deepafl, not to fedavg",
    ),
    "other method's parameter": (("--contrast", "1"), 2, "--contrast belongs to moon, not to fedavg"),
    "other family's value": (
        ("--track", "accuracy"),
        2,
        "track must be None or 'drift'; got 'accuracy'",
    ),
    "unknown network": (("--network", "resnet19"), 2, "Did you mean 'resnet18'?"),
    "no images": (("--network", "cnn"), 2, "64 features do not say of which shape"),
    "wrong shape": (("--network", "cnn", "--shape", "1,9,9"), 2, "holds 81 numbers, but rows have 64"),
    "no shape": (("--network", "cnn", "--shape", "8x8"), 2, "shape must be 'channels,height,width'"),
    "unknown layer": (("--network", "mlp:8", "--feedback", "clasifier"), 2, "classifier"),
    "too shallow": (("--feedback", "lowest"), 2, "or let the first layer be chosen too"),
    "no device": (("--device", "abacus"), 2, "device 'abacus' is not one that torch knows"),
    "no rounds": (("--rounds", "0"), 2, "rounds must be a whole number, at least 1; got 0"),
    "nobody": (("--participation", "0"), 2, "participation must be a number in (0, 1]"),
    "divergence": (("--network", "mlp:8", "--rate", "1e30"), 5, "Lower rate"),
    "unknown module": (("--network", "nowhere.at:all"), 2, "there is no module 'nowhere.at'"),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", BAD_WORDS)
def test_train_refuses_bad_words_and_writes_nothing(digits, tmp_path, case):
    words, code, fragment = BAD_WORDS[case]
    out = ("--out", tmp_path / "m.safetensors")
    refused(fedsolve("train", digits, "--method", "fedavg", "--rounds", "3", *words, *out), code, fragment)
    assert list(tmp_path.iterdir()) == []


def test_gradient_words_do_not_go_with_closed_forms(digits, tmp_path):
    refused(
        fedsolve("train", digits, "--method", "afl", "--rounds", "3"),
        2,
        "--rounds belongs to gradient methods, not to afl",
    )
    refused(
        fedsolve("train", digits, "--track", "drift"),
        2,
        "track must be None or 'accuracy'; got 'drift'",
    )
    refused(
        fedsolve("train", digits, "--evaluate-every", "2"),
        2,
        "--evaluate-every counts rounds of gradient methods",
    )
    model = tmp_path / "m.safetensors"
    assert fedsolve("train", digits, "--method", "afl", "--ridge", "1", "--out", model).exit_code == 0


@pytest.mark.torch
def test_watching_needs_test_rows(digits, tmp_path):
    data = np.load(digits)
    np.savez(tmp_path / "d.npz", x=data["x_train"], y=data["y_train"])
    words = ("train", tmp_path / "d.npz", *QUICK, "--method", "fedavg", "--evaluate-every", "1")
    refused(fedsolve(*words), 2, "--evaluate-every needs test rows")


@pytest.mark.torch
def test_gradient_models_have_no_blocks_and_a_device(digits, tmp_path):
    model = tmp_path / "m.safetensors"
    assert fedsolve("train", digits, *QUICK, "--method", "fedavg", "--out", model).exit_code == 0
    refused(fedsolve("evaluate", model, digits, "--staged"), 2, "--staged needs a model with layers")
    refused(fedsolve("predict", model, digits, "--layers", "1"), 2, "--layers needs a model with layers")
    refused(fedsolve("predict", model, digits, "--device", "abacus"), 2, "device 'abacus'")
    assert document("evaluate", model, digits, "--device", "auto")["rows"] == 50


@pytest.mark.torch
@pytest.mark.slow
def test_a_network_of_the_users_own_is_found_in_the_folder_of_the_shell(digits, tmp_path):
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n\n\n"
        "def tiny(features, outputs):\n"
        "    return nn.Sequential(nn.Linear(features, 5), nn.Tanh(), nn.Linear(5, outputs))\n"
    )
    # As the installed script starts: without the folder of the shell on the path.
    start = "import sys; sys.path.remove(''); from fedsolve.cli.main import main; main()"
    words = (*QUICK, "--method", "fedavg", "--network", "mynets:tiny", "--out", "m.safetensors")
    evaluate = ("evaluate", "m.safetensors", str(digits), "--allow-network", "mynets:tiny")
    for given in (("train", str(digits), *words), evaluate):
        done = subprocess.run(
            [sys.executable, "-c", start, *given], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


# -- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["", ":7"])
def test_pixels_in_the_order_of_channels_are_the_same_pixels(size):
    images = np.random.default_rng(0).integers(0, 256, (3, 7, 7, 3), dtype=np.uint8)
    rows, channels = (load_backbone(f"pixels{size}{order}") for order in ("", "?order=channels"))
    expected = images.transpose(0, 3, 1, 2) / 255
    assert np.allclose(channels.extract(images).reshape(3, 3, 7, 7), expected, atol=1e-7)
    assert np.allclose(rows.extract(images).reshape(3, 7, 7, 3), images / 255, atol=1e-7)
    assert channels.shape == (3, 7, 7)
    assert "order" not in rows.identity
    assert channels.identity == rows.identity | {"order": "channels"}
    with pytest.raises(DataError, match="order is one of rows, channels; got 'planes'"):
        load_backbone("pixels?order=planes")


@pytest.mark.parametrize(
    ("named", "shape", "address"),
    [
        (None, None, "pixels?order=channels&normalise=half"),
        (None, (1, 28, 20), "pixels:28x20?channels=gray&order=channels&normalise=half"),
        ("pixels:32", None, "pixels:32?order=channels&normalise=half"),
        ("pixels:32?order=rows", None, "pixels:32?order=rows&normalise=half"),
        ("pixels?mean=0&std=1&order=channels", None, "pixels?mean=0&std=1&order=channels"),
    ],
)
def test_the_address_of_pixels_says_what_a_network_needs(named, shape, address):
    assert pixel_address(named, "cnn", shape) == address


@pytest.mark.torch
def test_a_whole_network_on_images_of_a_folder(pictures, tmp_path, store):
    out = tmp_path / "m.safetensors"
    words = ("--method", "fedavg", "--network", "cnn", "--clients", "2", "--rounds", "4", "--batch", "8")
    page = fedsolve("train", pictures, *words, "--out", out)
    assert page.exit_code == 0, page.stderr
    assert page.stderr == ""
    model = fs.load_model(out)
    assert model.parameters["shape"] == "3,14,10"
    # The rows are what the network makes of the images given as bytes, channels first.
    test = load_dataset(pictures).test
    given = np.stack(test.inputs.read(slice(0, None))).transpose(0, 3, 1, 2).reshape(len(test), -1)
    told = document("predict", out, pictures, "--scores", "--part", "test")
    assert np.allclose(told["scores"], model.decision_function(given), atol=1e-5)
    assert f"{100 * document('evaluate', out, pictures)['accuracy']:.2f} % on 12 test rows" in page.stdout


@pytest.mark.torch
def test_images_get_the_shape_that_is_asked_for(pictures, tmp_path, store):
    out = tmp_path / "m.safetensors"
    words = ("--method", "fedavg", "--network", "cnn", "--clients", "2", "--rounds", "1", "--out", out)
    told = document("train", pictures, *words, "--shape", "1,8,8")
    assert (told["features"], told["parameters"]["shape"]) == (64, "1,8,8")
    assert document("evaluate", out, pictures)["accuracy"] == told["accuracy"]["test"]
    told = document("train", pictures, *words, "--backbone", "pixels:12")
    assert (told["features"], told["parameters"]["shape"]) == (432, "3,12,12")
    named = document("evaluate", out, pictures, "--backbone", "pixels:12")
    assert named["accuracy"] == document("evaluate", out, pictures)["accuracy"] == told["accuracy"]["test"]


@pytest.mark.torch
def test_features_are_no_images(pictures, digits, tmp_path, store):
    words = ("--method", "fedavg", "--network", "cnn", "--rounds", "1")
    result = fedsolve("train", pictures, *words, "--backbone", "efficientnet-lite0")
    refused(result, 2, "network 'cnn' takes images, and backbone 'efficientnet-lite0' gives features")
    address = f"npz:{digits}"
    told = document("train", address, *words, "--shape", "1,8,8", "--clients", "2")
    assert told["features"] == 64
    # A head takes features, here the ones that the digits have of their own.
    assert document("train", "digits", *QUICK, "--method", "fedavg")["parameters"]["shape"] is None


@pytest.mark.torch
def test_a_model_of_the_library_reads_images_in_its_own_shape(tmp_path, store):
    pixels, labels = load_digits(return_X_y=True)
    bright = np.rint(pixels[:60] * (255 / 16)).astype(np.uint8)
    federation = fs.LocalFederation.from_arrays(bright, labels[:60].astype(str), np.arange(60) % 2)
    model = FedAvg(network="cnn", shape="1,8,8", rounds=1).fit(federation)
    assert for_model(model, "digits", None, None) == "pixels:8x8?channels=gray&order=channels&normalise=half"
    model.save(tmp_path / "m.safetensors")
    test = np.stack(load_dataset("digits").test.inputs.read(slice(0, None))).reshape(-1, 64)
    told = document("predict", tmp_path / "m.safetensors", "digits", "--scores")
    assert np.allclose(told["scores"], model.decision_function(test), atol=1e-5)


@pytest.mark.torch
def test_a_model_trained_on_augmented_images_reads_them_as_they_are(tmp_path, store):
    words = ("--method", "fedavg", "--network", "cnn", "--clients", "3", "--rounds", "3", "--rate", "0.1")
    images = ("--crop", "1", "--flip", "0.5", "--pixel-mean", "0.3", "--pixel-deviation", "0.4")
    told = document("train", "digits", *words, *images, "--out", tmp_path / "m.safetensors")
    model = fs.load_model(tmp_path / "m.safetensors")
    named = [model.parameters[name] for name in ("crop", "flip", "pixel_mean", "pixel_deviation")]
    assert named == [1, 0.5, "0.3", "0.4"]
    found = document("evaluate", tmp_path / "m.safetensors", "digits")
    assert found["accuracy"] == told["accuracy"]["test"]
    test = load_dataset("digits").test
    rows = np.stack(test.inputs.read(slice(0, None))).reshape(-1, 64)
    right = model.predict(rows).astype(str) == np.asarray(test.labels).astype(str)
    assert np.mean(right) == pytest.approx(found["accuracy"])
    refused(fedsolve("train", "digits", "--method", "fedavg", "--flip", "0.5"), 2, "are for images")


HEAD = ("--method", "fedavg", "--network", "mlp:8", "--clients", "2", "--rounds", "3", "--rate", "0.1")
FORM = "order=channels&normalise=half"
TREATED = {
    "crop": ("--crop", "1"),
    "flip": ("--flip", "0.5"),
    "scale": ("--pixel-mean", "0.3", "--pixel-deviation", "0.38"),
}


@pytest.mark.torch
@pytest.mark.parametrize("way", TREATED)
def test_a_head_on_treated_pixels_gets_the_form_that_a_network_on_images_gets(pictures, tmp_path, store, way):
    words = ("train", pictures, *HEAD, "--shape", "3,14,10", *TREATED[way])
    out, same = tmp_path / "m.safetensors", tmp_path / "n.safetensors"
    told = document(*words, "--backbone", "pixels", "--out", out)
    assert document(*words, "--backbone", f"pixels?{FORM}", "--out", same)["loss"] == told["loss"]
    assert out.read_bytes() == same.read_bytes()
    assert document(*words)["loss"] == told["loss"]
    # As the library trains on the same images given as bytes, channels first.
    model = fs.load_model(out)
    test = load_dataset(pictures).test
    given = np.stack(test.inputs.read(slice(0, None))).transpose(0, 3, 1, 2).reshape(len(test), -1)
    for more in ((), ("--backbone", "pixels")):
        scores = document("predict", out, pictures, "--scores", "--part", "test", *more)["scores"]
        assert np.allclose(scores, model.decision_function(given), atol=1e-5)
        assert document("evaluate", out, pictures, *more)["accuracy"] == told["accuracy"]["test"]
    loose = document("predict", out, pictures.removeprefix("folder:"), "--scores")
    assert len(loose["scores"]) == 60


@pytest.mark.torch
@pytest.mark.parametrize("way", TREATED)
def test_treated_digits_are_pixels_and_no_features_of_their_own(tmp_path, store, way):
    out = tmp_path / "m.safetensors"
    told = document("train", "digits", *HEAD, "--shape", "1,8,8", *TREATED[way], "--out", out)
    model = fs.load_model(out)
    assert model.parameters["backbone"] == f"pixels:8x8?channels=gray&{FORM}"
    test = load_dataset("digits").test
    rows = np.stack(test.inputs.read(slice(0, None))).reshape(-1, 64)
    right = model.predict(rows).astype(str) == np.asarray(test.labels).astype(str)
    assert document("evaluate", out, "digits")["accuracy"] == told["accuracy"]["test"] == np.mean(right)
    # Without treatment a head keeps the features that the digits have.
    document("train", "digits", *HEAD, "--shape", "1,8,8", "--out", out)
    assert "backbone" not in fs.load_model(out).parameters


@pytest.mark.torch
@pytest.mark.parametrize("network", ["cnn", "mlp:8"])
@pytest.mark.parametrize(
    ("backbone", "told"),
    [
        ("pixels?normalise=none", "'pixels?normalise=none' gives pixels on another scale than [-1, 1]"),
        ("pixels?mean=0.5&std=0.25", "gives pixels on another scale"),
        ("pixels?order=rows", "'pixels?order=rows' gives pixels in the order of rows, and crop, flip"),
        ("efficientnet-lite0", "gives features"),
    ],
)
def test_treated_pixels_in_another_form_are_refused_with_the_remedy(pictures, store, network, backbone, told):
    words = ("train", pictures, *HEAD, "--network", network, "--shape", "3,14,10", "--backbone", backbone)
    done = fedsolve(*words, *TREATED["scale"])
    refused(done, 2, told)
    assert FORM in done.stderr or "pixels:SIZE" in done.stderr
    same = ("--backbone", "pixels?mean=0.5,0.5,0.5&std=0.5&channels=rgb&order=channels")
    assert fedsolve(*words, *TREATED["scale"], *same).exit_code == 0


@pytest.mark.torch
def test_stored_features_are_treated_as_images_only_in_that_form(pictures, tmp_path, store):
    keys = {
        form: document("features", "build", pictures, "--backbone", f"pixels{form}")["key"]
        for form in ("", f"?{FORM}")
    }
    words = (*HEAD, "--shape", "3,14,10", *TREATED["crop"])
    refused(fedsolve("train", f"features:{keys['']}", *words), 2, "in the order of rows and on another scale")
    told = document("train", f"features:{keys[f'?{FORM}']}", *words)
    assert told["loss"] == document("train", pictures, *words)["loss"]
    refused(fedsolve("train", pictures, *HEAD, *TREATED["crop"]), 2, "Give shape (channels,height,width)")


@pytest.mark.torch
def test_a_head_of_the_library_on_treated_pixels_reads_images_in_its_form(store):
    pixels, labels = load_digits(return_X_y=True)
    bright = np.rint(pixels[:60] * (255 / 16)).astype(np.uint8)
    federation = fs.LocalFederation.from_arrays(bright, labels[:60].astype(str), np.arange(60) % 2)
    model = FedAvg(network="mlp:4", shape="1,8,8", rounds=1, crop=1).fit(federation)
    assert for_model(model, "digits", None, None) == f"pixels:8x8?channels=gray&{FORM}"
    plain = FedAvg(network="mlp:4", shape="1,8,8", rounds=1).fit(federation)
    assert for_model(plain, "digits", None, None) is None


@pytest.mark.slow
@pytest.mark.torch
def test_mobilenet_with_feedback_alignment(pictures, store):
    words = ("--method", "fedavg", "--network", "mobilenet_v2", "--clients", "2", "--rounds", "2")
    more = ("--batch", "16", "--feedback", "lowest", "--feedback-sketch", "512")
    told = document("train", pictures, *words, *more)
    (layer,) = told["feedback_layers"]
    assert layer in told["history"][0]["metrics"]["alignment"]
    assert np.isfinite(told["loss"])


# -- models that are not to predict with -----------------------------------------------------------


@pytest.mark.torch
def test_a_shared_part_says_that_it_is_not_meant_to_predict(digits, tmp_path):
    shared, own = tmp_path / "m.safetensors", tmp_path / "own"
    document("train", digits, "--method", "fedas", *QUICK, "--out", shared, "--personal", own)
    told = document("evaluate", shared, digits)
    assert len(told["warnings"]) == 1  # not also that it has not learnt what it should
    assert "not meant to predict by itself" in told["warnings"][0]
    assert document("predict", shared, digits)["warnings"] == told["warnings"]
    for words in (
        ("evaluate", shared, digits),
        ("predict", shared, digits),
        ("predict", shared, digits, "-q"),
    ):
        said = fedsolve(*words)
        assert said.exit_code == 0
        assert said.stderr.count("not meant to predict by itself") == 1
    assert document("predict", own / "client-0.safetensors", digits)["warnings"] == []
    assert "not meant" not in fedsolve("evaluate", own / "client-0.safetensors", digits).stderr


@pytest.fixture
def tiny(tmp_path):
    """Images of 8 x 8 bytes, two classes."""
    rng = np.random.default_rng(0)
    y = np.arange(48) % 2
    x = (rng.integers(0, 100, (48, 64)) + 120 * y[:, None]).astype(np.uint8)
    np.savez(tmp_path / "tiny.npz", x=x, y=y)
    return tmp_path / "tiny.npz"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_statistics_that_stayed_with_the_clients_are_missed(tiny, tmp_path, method):
    shared, never = (
        tmp_path / "m.safetensors",
        "statistics of BatchNorm in this shared model were never trained",
    )
    words = ("train", tiny, "--method", method, "--shape", "1,8,8", "--clients", "2", "--rounds", "1")
    words += ("--batch", "8", "--out", shared)
    told = document(*words, "--network", "resnet18", "--buffers", "local")
    assert len(told["warnings"]) == 1
    assert never in told["warnings"][0]
    assert ("fedsolve personalise" in told["warnings"][0]) == (method == "fedavg-ft")
    assert document("evaluate", shared, tiny)["warnings"] == told["warnings"]
    assert document("predict", shared, tiny)["warnings"] == told["warnings"]
    assert fedsolve("predict", shared, tiny).stderr.count(never) == 1
    model = fs.load_model(shared)
    data = np.load(tiny)
    if method == "fedavg-ft":
        assert model.personalised(fs.ClientData(data["x"], data["y"])).caveat is None
    else:
        exported = document("export", shared, "--onnx", tmp_path / "m.onnx")
        assert exported["warnings"] == told["warnings"]
    for more in (("resnet18", "--buffers", "average"), ("resnet18:gn", "--buffers", "local")):
        document(*words, "--network", *more)
        assert fs.load_model(shared).caveat is None
        assert never not in fedsolve("evaluate", shared, tiny).stderr


# -- the how-to ------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.slow
def test_the_blocks_of_the_how_to_run(tmp_path, store, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "how-to-gradient.md").read_text()
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if language == "sh" for line in block.splitlines()]
    assert len(lines) == 17
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "fedsolve"
        done = fedsolve(*words)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert len(list((tmp_path / "own").glob("*.safetensors"))) == 20
    scripts = [block for language, block in blocks if language == "python"]
    assert len(scripts) == 2
    exec(compile("\n".join(scripts), "how-to-gradient.md", "exec"), {})
