"""Crops, flips and normalisation: against numpy and plain torch, off when off, in stacks and files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.arrays import stream
from fedsolve.errors import DataError
from fedsolve.gradient import MOON, Ditto, FedAvg, FedProx
from fedsolve.gradient.augmentation import draw_moves
from tests.gradient import plain
from tests.gradient.plain import CLASSES, far, federation, same_bits
from tests.gradient.trials import resumed

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch

SHAPE = (2, 5, 4)
WIDTH = 40
SETTING: dict[str, Any] = {
    "precision": "float64",
    "rate": 0.1,
    "rounds": 2,
    "batch": 4,
    "epochs": 2,
    "seed": 3,
}
FULL: dict[str, Any] = {"crop": 2, "flip": 0.5, "pixel_mean": "0.4,0.6", "pixel_deviation": "0.2,0.3"}
WAYS: list[dict[str, Any]] = [
    {"crop": 1},
    {"flip": 0.5},
    {"pixel_mean": "0.4", "pixel_deviation": "0.25"},
    {"crop": 2, "flip": 0.5},
    FULL,
]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way))


def convolution() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(60, CLASSES)
        ).double()


def pixels(kind: str = "bytes") -> tuple[Any, Any]:
    """Rows of pixels, brighter in one corner for each class, and labels."""
    rng = np.random.default_rng(0)
    labels = np.arange(26) % CLASSES
    images = rng.integers(0, 120, (26, *SHAPE))
    images[np.arange(26), 0, labels, labels] += 120
    rows = images.reshape(26, WIDTH).astype(np.uint8)
    return (rows if kind == "bytes" else rows / 127.5 - 1.0), labels


def clients(kind: str = "bytes") -> Any:
    return federation(*pixels(kind), plain.uneven(26, 3))


def augmented(method: Any, images: Any, moves: Any) -> Any:
    """Images (rows, C, H, W) in [0, 1] as a network should see them, one by one with numpy."""
    found = []
    for image, (top, left, turned) in zip(images, moves, strict=True):
        margin = [(0, 0), (method.crop, method.crop), (method.crop, method.crop)]
        window = np.pad(image, margin)[:, top : top + SHAPE[1], left : left + SHAPE[2]]
        window = window[:, :, ::-1] if turned else window
        mean, deviation = (0.5, 0.5)
        if method.pixel_mean is not None:
            mean, deviation = (
                np.array([float(part) for part in text.split(",")])[:, None, None]
                for text in (method.pixel_mean, method.pixel_deviation)
            )
        found.append((window - mean) / deviation)
    return np.array(found)


def drawn(method: Any, count: int, client: str, round_: int) -> list[tuple[int, int, bool]]:
    """The moves of a client's rows in a round, from the streams by their names."""
    places = stream(method.seed, "crop", client, round_).integers(0, 2 * method.crop + 1, (count, 2))
    turned = stream(method.seed, "flip", client, round_).random(count) < method.flip
    return [(int(top), int(left), bool(turn)) for (top, left), turn in zip(places, turned, strict=True)]


def recomputed(method: Any, fed: Any, net: Any, flat: bool) -> dict[str, Any]:
    """All rounds of FedAvg with plain torch on images augmented by numpy."""
    weights = plain.weights(net)
    for round_ in range(method.rounds):
        ends, sizes = [], []
        for client, (rows, labels) in plain.clients_of(fed).items():
            plain.put(net, weights)
            images = rows.numpy().astype(np.float64)
            images = images / 255 if rows.dtype == torch.uint8 else (images + 1) / 2
            plan = plain.batches(method, len(labels), round_, client)
            moves = drawn(method, sum(map(len, plan)), client, round_)
            optimiser = torch.optim.SGD(net.parameters(), lr=method.rate)
            for batch in plan:
                own, moves = moves[: len(batch)], moves[len(batch) :]
                seen = torch.as_tensor(augmented(method, images[batch].reshape(-1, *SHAPE), own))
                optimiser.zero_grad()
                plain.cross_entropy(net, seen.flatten(1) if flat else seen, labels[batch]).backward()
                optimiser.step()
            ends.append(plain.weights(net))
            sizes.append(float(len(labels)))
        weights = plain.mean(ends, sizes)
    return weights


@each_way
@pytest.mark.parametrize("kind", ["bytes", "numbers"])
def test_a_run_sees_the_images_that_the_streams_say(way: dict[str, Any], kind: str) -> None:
    method = FedAvg(network=convolution(), shape="2,5,4", **SETTING | way)
    found = method.fit(clients(kind)).weights
    assert far(found, recomputed(method, clients(kind), convolution(), flat=False)) < 1e-12
    bare = FedAvg(network=convolution(), shape="2,5,4", **SETTING).fit(clients(kind)).weights
    assert far(found, bare) > 1e-4


@each_way
def test_heads_side_by_side_see_them_too(way: dict[str, Any]) -> None:
    """Clients of 4, 9 and 13 rows: batches in a stack are padded."""
    method = FedAvg(network="mlp:5", shape="2,5,4", **SETTING | way)
    assert method.trains_together(WIDTH, CLASSES)
    net = plain.build_network("mlp:5", WIDTH, CLASSES, seed=3, dtype="float64")
    assert far(method.fit(clients()).weights, recomputed(method, clients(), net, flat=True)) < 1e-12


@pytest.mark.parametrize("network", ["mlp:5", "convolution"])
def test_chances_of_zero_are_no_augmentation_to_the_bit(network: str) -> None:
    setting = SETTING | {"network": convolution() if network == "convolution" else network, "shape": "2,5,4"}
    bare = FedAvg(**setting).fit(clients()).weights
    assert same_bits(FedAvg(crop=0, flip=0.0, **setting).fit(clients()).weights, bare)
    # Mirrored twice is as it was: the moves themselves change no bit of a pixel.
    rows, labels = pixels()
    turned = rows.reshape(-1, *SHAPE)[..., ::-1].reshape(rows.shape).copy()
    there = federation(turned, labels, plain.uneven(26, 3))
    assert same_bits(FedAvg(flip=1.0, **setting).fit(there).weights, bare)


def test_one_kind_of_augmentation_leaves_the_other_alone() -> None:
    method = FedAvg(network="cnn", shape="1,28,28", crop=3, flip=0.5, seed=5)
    both = draw_moves(method, 50, 1, "a")
    crops = draw_moves(dataclasses.replace(method, flip=0.0), 50, 1, "a")
    flips = draw_moves(dataclasses.replace(method, crop=0), 50, 1, "a")
    assert np.array_equal(both, crops + flips)
    assert both[:, :2].min() == 0
    assert both[:, :2].max() == 6
    assert 0.2 < both[:, 2].mean() < 0.8
    for other in (draw_moves(method, 50, 2, "a"), draw_moves(method, 50, 1, "b")):
        assert not np.array_equal(both, other)


@pytest.mark.parametrize("kind", [FedAvg, FedProx, MOON, Ditto], ids=lambda kind: kind.key)
@pytest.mark.parametrize("network", ["mlp:5", "convolution"])
def test_a_run_that_is_taken_up_again_gives_the_same_bits(kind: Any, network: str) -> None:
    net = convolution() if network == "convolution" else network
    method = kind(network=net, shape="2,5,4", **SETTING | FULL | {"rounds": 3})
    if kind in (MOON, Ditto):  # what clients keep is not in the checkpoint, so they go on as they are
        assert same_bits(method.fit(clients()).weights, method.fit(clients()).weights)
        return
    whole = plain.finished(method, clients())
    for stop in (1, 2):
        assert same_bits(resumed(method, clients, stop).server.weights, whole.server.weights)


@pytest.mark.parametrize("network", ["mlp:5", "convolution"])
def test_a_saved_model_reads_raw_pixels(network: str, tmp_path: Path) -> None:
    flat = network != "convolution"
    net = network if flat else convolution()
    model = FedAvg(network=net, shape="2,5,4", **SETTING | FULL).fit(clients())
    rows, labels = pixels()
    seen = augmented(
        FedAvg(**FULL | {"crop": 0}), rows.reshape(-1, *SHAPE) / 255, [(0, 0, False)] * len(rows)
    )
    inputs = torch.as_tensor(seen.reshape(len(rows), -1) if flat else seen)
    with torch.no_grad():
        wanted = model.network()(inputs).numpy()
    np.testing.assert_allclose(model.decision_function(rows), wanted, rtol=0, atol=1e-12)
    if not flat:  # a module of one's own does not travel in a file
        return
    model.save(tmp_path / "model.safetensors")
    again = fs.load_model(tmp_path / "model.safetensors")
    assert np.array_equal(again.decision_function(rows), model.decision_function(rows))
    assert again.score(rows, labels) == model.score(rows, labels)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"flip": 1.5}, r"flip must be.*1\.5"),
        ({"crop": -1}, "crop must be a whole number"),
        ({"pixel_mean": "0.5"}, "go together"),
        ({"pixel_mean": "0.5", "pixel_deviation": "0"}, "must be positive"),
        ({"pixel_mean": "half", "pixel_deviation": "1"}, "pixel_mean is a number.*'half'"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        FedAvg(network="cnn", **wrong)


def test_augmentation_of_what_are_no_images_is_refused() -> None:
    with pytest.raises(DataError, match=r"are for images.*Give shape .*40 of them"):
        FedAvg(network="linear", flip=0.5).fit(clients())
    method = FedAvg(network="linear", shape="2,5,4", pixel_mean="1,2,3", pixel_deviation="1")
    with pytest.raises(DataError, match=r"pixel_mean has 3 numbers .1,2,3., and the images 2 channels"):
        method.fit(clients())


def test_a_margin_as_wide_as_the_image_is_refused() -> None:
    for network, crop in ((convolution(), 4), ("mlp:5", 4), ("linear", 9)):
        method = FedAvg(network=network, shape="2,5,4", crop=crop)
        with pytest.raises(DataError, match=rf"crop must be smaller.*got {crop} for images of 5 x 4"):
            method.fit(clients())
    FedAvg(network="linear", shape="2,5,4", crop=3, rounds=1).fit(clients())


@pytest.mark.parametrize("network", ["linear", "mlp:5"])
@pytest.mark.parametrize(
    ("shape", "told"),
    [("2,5,5", r"shape \(2, 5, 5\) holds 50 numbers, but rows have 40"), ("40", "must be three positive")],
)
def test_a_shape_that_rows_do_not_have_is_refused_for_heads_too(network: str, shape: str, told: str) -> None:
    for way in ({}, {"flip": 0.5}):
        with pytest.raises(DataError, match=told):
            FedAvg(network=network, shape=shape, **way).fit(clients())
