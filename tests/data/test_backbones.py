"""Backbones without torch: addresses, preprocessing, pixels and ONNX files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsolve.data.backbones import Backbone, Preprocessing, load_backbone
from fedsolve.data.backbones.preprocessing import prepare
from fedsolve.errors import DataError, ModelFileError

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)
COLOUR = [RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8) for _ in range(7)]
GRAY = [RNG.integers(0, 256, (20, 30, 1), dtype=np.uint8) for _ in range(7)]
WEIGHTS = RNG.standard_normal((3, 5)).astype(np.float32)
SIDES = {"nchw": (3, "h", "w"), "nhwc": ("h", "w", 3)}


def network(
    file: Path,
    *,
    shape: tuple[Any, ...] = ("n", 3, "h", "w"),
    layout: str = "nchw",
    weights: np.ndarray = WEIGHTS,
    kind: int = TensorProto.FLOAT,
    outputs: tuple[str, ...] = ("features",),
    inputs: int = 1,
) -> Path:
    """Mean over the pixels of each channel times a matrix; "map" is the image before that."""
    dtype = np.float16 if kind == TensorProto.FLOAT16 else np.float32
    axes = [2, 3] if layout == "nchw" else [1, 2]
    nodes = [
        helper.make_node("Identity", ["images"], ["map"]),
        helper.make_node("ReduceMean", ["map"], ["pooled"], axes=axes, keepdims=0),
        helper.make_node("MatMul", ["pooled", "weights"], ["features"]),
    ]
    graph = helper.make_graph(
        nodes[:1] if outputs == ("map",) else nodes,
        "network",
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name in ["images", *(f"other{number}" for number in range(1, inputs))]
        ],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [numpy_helper.from_array(weights.astype(dtype), "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, file)
    return file


def expected(images: list[np.ndarray]) -> np.ndarray:
    """What `network` gives for colour images scaled to [0, 1], in float64."""
    return np.array([image.reshape(-1, 3).mean(0) / 255 for image in images]) @ WEIGHTS


# --- addresses


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("pixls", "unknown backbone 'pixls'. Did you mean 'pixels'"),
        ("net/model.onnx", "Did you mean 'onnx:net/model.onnx'"),
        ("", "unknown backbone ''. Known are efficientnet-lite0, pixels"),
        ("pixels?interpolatoin=box", "unknown option 'interpolatoin'. Did you mean 'interpolation'"),
        ("pixels?interpolation=cubic", "interpolation is one of nearest, .*; got 'cubic'"),
        ("pixels?interpolation", "'interpolation' is not of the form option=value"),
        ("pixels?channels=gray&channels=rgb", "'channels' is given twice"),
        ("pixels:big", "a number of pixels, such as 224; got 'big'"),
        ("pixels:0", "a number of pixels, such as 224; got '0'"),
        ("pixels:8x8x3", "HEIGHTxWIDTH; got '8x8x3'"),
        ("pixels:32?shorter_side=16", r"got 16 pixels and size \(32, 32\)"),
        ("pixels?normalise=imagenet", "mean takes one number where images keep .*: channels=rgb takes"),
        ("pixels:32?std=0.2,0.2,0.2", "std takes one number where images keep .*: channels=rgb takes"),
        ("onnx:", "name the file"),
        ("efficientnet-lite0:224", "takes no target; got '224'"),
        ("efficientnet-lite0?size=112", "unknown option 'size'"),
        ("torch:make", "name a module and a callable"),
        ("hf:", "name a model or a folder"),
        ("torchvision:", "name a model"),
        ("timm:", "name a model"),
    ],
)
def test_bad_addresses(address: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_backbone(address)


def test_heavy_packages_are_imported_late() -> None:
    code = (
        "import sys; from fedsolve.data.backbones import load_backbone; "
        "load_backbone('pixels:8'); "
        "print([name for name in ('torch', 'onnxruntime', 'onnx', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("address", "package", "remedy"),
    [
        ("onnx:x.onnx", "onnxruntime", r"pip install 'fedsolve\[onnx\]'"),
        ("torch:a:b", "torch", r"pip install 'fedsolve\[torch\]'"),
        ("hf:x", "transformers", r"pip install 'fedsolve\[hf\]'"),
        ("efficientnet-lite0", "onnxruntime", r"pip install 'fedsolve\[efficientnet\]'"),
        ("torchvision:resnet18", "torchvision", "use efficientnet-lite0, onnx:FILE or hf:NAME"),
        ("timm:resnet18", "timm", "use efficientnet-lite0, onnx:FILE or hf:NAME"),
    ],
)
def test_missing_package(
    address: str, package: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"needs {package}, which cannot be imported.*{remedy}"):
        load_backbone(address, cache=tmp_path)


# --- preprocessing


def resized(image: np.ndarray, height: int, width: int, how: Image.Resampling) -> np.ndarray:
    planes = [
        np.asarray(Image.fromarray(image[:, :, channel]).resize((width, height), how))
        for channel in range(image.shape[2])
    ]
    return np.stack(planes, axis=2).astype(float)


def test_resize_and_normalise() -> None:
    how = Preprocessing(
        size=(12, 9), interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), channels="rgb"
    )
    found = prepare(COLOUR, how)
    assert found.dtype == np.float32
    assert found.shape == (7, 3, 12, 9)
    for image, result in zip(COLOUR, found, strict=True):
        pixels = resized(image, 12, 9, Image.Resampling.BICUBIC) / 255
        by_hand = (pixels - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
        np.testing.assert_allclose(result.transpose(1, 2, 0), by_hand, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(prepare(COLOUR, how, "nhwc"), found.transpose(0, 2, 3, 1))


def test_crop_from_the_middle() -> None:
    # 20 x 30 to a shorter side of 16 is 16 x 24; the middle 10 x 14 starts at row 3, column 5.
    how = Preprocessing(size=(10, 14), shorter_side=16, scale=1.0)
    whole = resized(COLOUR[0], 16, 24, Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(prepare(COLOUR[:1], how, "nhwc")[0], whole[3:13, 5:19])
    upright = COLOUR[0].transpose(1, 0, 2)
    whole = resized(upright, 24, 16, Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(prepare([upright], how, "nhwc")[0], whole[7:17, 1:15])


def test_channels() -> None:
    plain = {"size": None, "scale": 1.0}
    gray = prepare(GRAY, Preprocessing(channels="rgb", **plain))
    for channel in range(3):
        np.testing.assert_array_equal(gray[:, channel], np.stack(GRAY)[:, :, :, 0])
    bgr = prepare(COLOUR, Preprocessing(channels="bgr", **plain), "nhwc")
    np.testing.assert_array_equal(bgr, np.stack(COLOUR)[:, :, :, ::-1])
    luma = prepare(COLOUR, Preprocessing(channels="gray", **plain))
    by_hand = np.stack(COLOUR) @ np.array([0.299, 0.587, 0.114])
    assert luma.shape == (7, 1, 20, 30)
    assert np.abs(luma[:, 0] - by_hand).max() <= 1.0  # Pillow rounds to a byte
    assert prepare([GRAY[0][:, :, 0]], Preprocessing(channels="any", **plain)).shape == (1, 1, 20, 30)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3])), min_size=1, max_size=5
    ),
    crop=st.booleans(),
    how=st.sampled_from(["nearest", "bilinear", "lanczos"]),
)
def test_an_image_does_not_depend_on_its_neighbours(
    sizes: list[tuple[int, int, int]], crop: bool, how: str
) -> None:
    rng = np.random.default_rng(len(sizes))
    images = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    preprocessing = Preprocessing(size=(6, 5), shorter_side=8 if crop else None, interpolation=how)
    together = prepare(images, preprocessing)
    assert together.shape == (len(images), 3, 6, 5)
    assert together.min() >= 0.0
    assert together.max() <= 1.0
    for image, result in zip(images, together, strict=True):
        np.testing.assert_array_equal(prepare([image], preprocessing)[0], result)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3)), r"image 1 of the batch must be bytes.*got float64 of shape \(4, 4, 3\)"),
        (np.zeros((4, 4, 4), dtype=np.uint8), r"\(4, 4, 4\)"),
        (np.zeros((0, 4, 3), dtype=np.uint8), r"\(0, 4, 3\)"),
        (np.zeros(4, dtype=np.uint8), r"\(4,\)"),
    ],
)
def test_bad_images(image: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_backbone("pixels:4").extract([COLOUR[0], image])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interpolation": "cubic"}, "got 'cubic'"),
        ({"channels": "cmyk"}, "got 'cmyk'"),
        ({"mean": (0.1, 0.2)}, r"each of 3 channels; got \(0.1, 0.2\)"),
        ({"std": (0.0,)}, "must be positive"),
        ({"scale": 0.0}, "must be positive; got scale 0.0"),
        ({"size": (224, 224), "shorter_side": 200}, "got 200 pixels"),
    ],
)
def test_bad_preprocessing(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Preprocessing(**settings)


# --- pixels


def test_pixels_are_the_image() -> None:
    backbone = load_backbone("pixels")
    assert isinstance(backbone, Backbone)
    assert backbone.width is None
    features = backbone.extract(GRAY)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features, (np.stack(GRAY).reshape(7, -1) / 255).astype(np.float32))
    assert backbone.width == 600
    assert backbone.extract([]).shape == (0, 600)
    assert load_backbone("pixels").extract(COLOUR).shape == (7, 1800)


def test_pixels_of_a_size() -> None:
    backbone = load_backbone("pixels:8x10?interpolation=nearest&channels=gray")
    assert backbone.width == 80
    picture = Image.fromarray(GRAY[2][:, :, 0]).resize((10, 8), Image.Resampling.NEAREST)
    by_hand = (np.asarray(picture).reshape(-1) / 255).astype(np.float32)
    np.testing.assert_array_equal(backbone.extract(GRAY)[2], by_hand)
    assert backbone.extract([*GRAY, *COLOUR]).shape == (14, 80)


def test_pixels_of_different_shapes() -> None:
    turned = COLOUR[0].transpose(1, 0, 2)
    with pytest.raises(DataError, match=r"\(20, 30, 3\) first, but \(30, 20, 3\) in place 1.*pixels:32"):
        load_backbone("pixels").extract([COLOUR[0], turned])
    with pytest.raises(DataError, match="channels=gray or channels=rgb"):
        load_backbone("pixels:8").extract([COLOUR[0], GRAY[0]])
    backbone = load_backbone("pixels")
    backbone.extract(COLOUR)
    with pytest.raises(DataError, match=r"\(20, 30, 3\) first, but \(30, 20, 3\) in place 0"):
        backbone.extract([turned])


def test_preprocessing_is_part_of_the_identity() -> None:
    addresses = [
        "pixels",
        "pixels:8",
        "pixels:9",
        "pixels:8x9",
        "pixels:8?interpolation=box",
        "pixels:8?channels=gray",
        "pixels:8?shorter_side=9",
    ]
    identities = {json.dumps(load_backbone(address).identity, sort_keys=True) for address in addresses}
    assert len(identities) == len(addresses)
    assert load_backbone("pixels:8").identity == load_backbone("pixels:8?interpolation=bilinear").identity


# --- ONNX files


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_onnx_features(layout: str, tmp_path: Path) -> None:
    file = network(tmp_path / "net.onnx", shape=("n", *SIDES[layout]), layout=layout)
    backbone = load_backbone(f"onnx:{file}?size=20x30")
    assert isinstance(backbone, Backbone)
    assert backbone.name == "onnx:net.onnx"
    assert backbone.width == 5
    assert backbone.preprocessing.size == (20, 30)
    features = backbone.extract(COLOUR)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected(COLOUR), rtol=1e-5, atol=1e-6)
    assert backbone.extract([]).shape == (0, 5)


def test_onnx_normalisation(tmp_path: Path) -> None:
    file = network(tmp_path / "net.onnx")
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    pooled = np.array([image.reshape(-1, 3).mean(0) / 255 for image in COLOUR])
    by_hand = ((pooled - mean) / std) @ WEIGHTS
    named = load_backbone(f"onnx:{file}?size=20x30&normalise=imagenet")
    spelled = load_backbone(f"onnx:{file}?size=20x30&mean=0.485,0.456,0.406&std=0.229,0.224,0.225&scale=255")
    np.testing.assert_allclose(named.extract(COLOUR), by_hand, rtol=1e-4, atol=1e-5)
    assert named.identity == spelled.identity
    with pytest.raises(DataError, match="normalise, or mean and std, but not both"):
        load_backbone(f"onnx:{file}?normalise=half&std=0.5")
    with pytest.raises(DataError, match=r"mean takes numbers separated by commas.*got 'a,b'"):
        load_backbone(f"onnx:{file}?mean=a,b")
    with pytest.raises(DataError, match="'scale' must be a number; got '1,2'"):
        load_backbone(f"onnx:{file}?scale=1,2")


def test_onnx_reads_size_and_channels_from_the_file(tmp_path: Path) -> None:
    gray = network(tmp_path / "gray.onnx", shape=("n", 1, 6, 8), weights=WEIGHTS[:1])
    backbone = load_backbone(f"onnx:{gray}")
    assert (backbone.preprocessing.size, backbone.preprocessing.channels) == ((6, 8), "gray")
    assert backbone.extract(COLOUR).shape == (7, 5)
    with pytest.raises(DataError, match=r"6 x 8 pixels .*size \(9, 9\) does not fit"):
        load_backbone(f"onnx:{gray}?size=9")
    with pytest.raises(DataError, match=r"reads 1 channel\(s\); channels=rgb does not fit"):
        load_backbone(f"onnx:{gray}?channels=rgb")
    assert load_backbone(f"onnx:{network(tmp_path / 'any.onnx')}").preprocessing.size == (224, 224)


@pytest.mark.parametrize("images", [1, 3])
def test_onnx_with_a_fixed_number_of_images(images: int, tmp_path: Path) -> None:
    backbone = load_backbone(f"onnx:{network(tmp_path / 'net.onnx', shape=(images, 3, 20, 30))}")
    np.testing.assert_allclose(backbone.extract(COLOUR), expected(COLOUR), rtol=1e-5, atol=1e-6)


def test_onnx_in_half_precision(tmp_path: Path) -> None:
    file = network(tmp_path / "net.onnx", kind=TensorProto.FLOAT16)
    features = load_backbone(f"onnx:{file}?size=20x30").extract(COLOUR)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected(COLOUR), atol=0.02)


def test_onnx_is_repeatable_and_independent_of_batches(tmp_path: Path) -> None:
    file = network(tmp_path / "net.onnx")
    images = COLOUR * 15
    first = load_backbone(f"onnx:{file}?size=16").extract(images)
    np.testing.assert_array_equal(load_backbone(f"onnx:{file}?size=16").extract(images), first)
    backbone = load_backbone(f"onnx:{file}?size=16")
    singly = np.concatenate([backbone.extract([image]) for image in images])
    np.testing.assert_allclose(singly, first, rtol=1e-5, atol=1e-6)


def test_onnx_identity_is_what_is_in_the_file(tmp_path: Path) -> None:
    first = load_backbone(f"onnx:{network(tmp_path / 'a.onnx')}")
    (tmp_path / "elsewhere").mkdir()
    moved = load_backbone(f"onnx:{network(tmp_path / 'elsewhere' / 'b.onnx')}")
    assert moved.identity == first.identity
    other = load_backbone(f"onnx:{network(tmp_path / 'c.onnx', weights=WEIGHTS + 1e-6)}")
    assert other.identity["weights"] != first.identity["weights"]
    json.dumps(first.identity)


def test_onnx_weights_beside_the_file_count(tmp_path: Path) -> None:
    digests = []
    for number in range(2):
        weights = WEIGHTS + number
        model = onnx.load(network(tmp_path / "inside.onnx", weights=weights))
        onnx.save(
            model,
            tmp_path / "net.onnx",
            save_as_external_data=True,
            location="net.onnx.data",
            size_threshold=0,
            convert_attribute=False,
        )
        backbone = load_backbone(f"onnx:{tmp_path / 'net.onnx'}?size=20x30")
        inside = load_backbone(f"onnx:{tmp_path / 'inside.onnx'}?size=20x30")
        np.testing.assert_array_equal(backbone.extract(COLOUR), inside.extract(COLOUR))
        digests.append((backbone.identity["weights"], (tmp_path / "net.onnx").read_bytes()))
        (tmp_path / "net.onnx.data").unlink()
    assert digests[0][1] == digests[1][1]
    assert digests[0][0] != digests[1][0]


def test_onnx_output_by_name(tmp_path: Path) -> None:
    file = network(tmp_path / "net.onnx", outputs=("pooled", "features"))
    with pytest.raises(DataError, match=r"has 2 outputs \(pooled .*, features .*\). Choose one with output="):
        load_backbone(f"onnx:{file}")
    with pytest.raises(DataError, match="no output 'x'; it has pooled"):
        load_backbone(f"onnx:{file}?output=x")
    assert load_backbone(f"onnx:{file}?output=pooled").width == 3
    wide = load_backbone(f"onnx:{file}?output=features")
    assert wide.width == 5
    assert wide.identity != load_backbone(f"onnx:{file}?output=pooled").identity


BAD_NETWORKS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "rank": (lambda f: network(f, outputs=("map",)), "", r"shape \(1, 3, 224, 224\) .*output=NAME, or add"),
    "nan": (lambda f: network(f, weights=WEIGHTS * np.nan), "", "nan in feature 0 of image 0 .*Check scale"),
    "two inputs": (lambda f: network(f, inputs=2), "", "one input of four dimensions.*other1"),
    "three dimensions": (
        lambda f: network(f, shape=("n", 3, "h"), outputs=("map",)),
        "",
        "one input of four dimensions",
    ),
    "whole numbers": (
        lambda f: network(f, kind=TensorProto.INT64, outputs=("map",)),
        "",
        r"floating-point numbers; it has images: tensor\(int64\)",
    ),
    "layout unknown": (
        lambda f: network(f, shape=("n", "a", "b", "c")),
        "",
        "Say layout=nchw or layout=nhwc",
    ),
    "layout wrong": (lambda f: network(f, shape=("n", 3, 8, 8)), "?layout=nhwc", "which is not nhwc"),
    "five channels": (
        lambda f: network(f, shape=("n", 5, 8, 8), outputs=("map",)),
        "?layout=nchw",
        "which is not nchw",
    ),
}


@pytest.mark.parametrize("case", BAD_NETWORKS)
def test_onnx_network_that_does_not_fit(case: str, tmp_path: Path) -> None:
    make, query, message = BAD_NETWORKS[case]
    file = tmp_path / "net.onnx"
    make(file)
    with pytest.raises(DataError, match=message):
        load_backbone(f"onnx:{file}{query}")


def test_onnx_file_that_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"there is no ONNX file .*absent\.onnx"):
        load_backbone(f"onnx:{tmp_path / 'absent.onnx'}")
    with pytest.raises(ModelFileError, match="there is no ONNX file"):
        load_backbone(f"onnx:{tmp_path}")
    file = tmp_path / "net.onnx"
    file.write_text("not a network")
    with pytest.raises(ModelFileError, match=r"net\.onnx is not an ONNX file that onnxruntime .* can open"):
        load_backbone(f"onnx:{file}")
    whole = network(file).read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="is not an ONNX file"):
        load_backbone(f"onnx:{file}")
