"""On a GPU: replayed steps are the recorded ones, and results are those of the processor."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.gradient import (
    MOON,
    Ditto,
    FedACG,
    FedALA,
    FedAS,
    FedAvg,
    FedAvgFT,
    FedDBE,
    FedDyn,
    FedGen,
    FedLC,
    FedNTD,
    FedPCL,
    FedProx,
    FedProxFT,
    FedRS,
    FedSelect,
    FedSOL,
    Scaffold,
    slots,
)

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

METHODS = [
    FedAvg,
    FedProx,
    FedGen,
    FedLC,
    FedRS,
    FedNTD,
    MOON,
    FedSOL,
    FedDyn,
    Scaffold,
    FedACG,
]

PERSONAL = [Ditto, FedALA, FedAS, FedAvgFT, FedDBE, FedGen, FedPCL, FedProxFT, FedSelect]

AUGMENTED = {"crop": 2, "flip": 0.5, "pixel_mean": "0.3", "pixel_deviation": "0.35"}


def federation(
    rows: int = 600, device: str = "cuda", clients: int = 3, workers: int = 1
) -> fs.LocalFederation:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, rows)
    images = np.clip(rng.normal(60 * labels[:, None], 40, (rows, 784)), 0, 255).astype(np.uint8)
    owners = rng.integers(0, clients, rows)
    return fs.LocalFederation.from_arrays(images, labels, owners, clients, workers=workers, device=device)


def weights(method, rows: int = 600, device: str = "cuda", clients: int = 3, workers: int = 1):
    return method.fit(federation(rows, device, clients, workers)).weights


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("feedback", [None, "lowest"])
@pytest.mark.parametrize("images", [{}, AUGMENTED], ids=["plain", "augmented"])
def test_replayed_steps_give_the_bits_of_plain_ones(kind, feedback, images, monkeypatch):
    method = kind(
        network="mobilenet_v2",
        rounds=3,
        epochs=3,
        batch=32,
        rate=0.01,
        momentum=0.9,
        feedback=feedback,
        **images,
    )
    replayed = weights(method)
    monkeypatch.setattr(kind, "recordable", False)
    plain = weights(method)
    assert all(np.array_equal(replayed[name], plain[name]) for name in plain)


def test_replayed_dropout_draws_what_plain_steps_draw(monkeypatch):
    method = FedAvg(
        network="mobilenet_v2:stock", rounds=3, epochs=4, batch=32, rate=0.01, feedback="lowest", **AUGMENTED
    )
    replayed = weights(method)
    monkeypatch.setattr(FedAvg, "recordable", False)
    plain = weights(method)
    assert all(np.array_equal(replayed[name], plain[name]) for name in plain)


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("images", [{}, AUGMENTED], ids=["plain", "augmented"])
def test_results_are_those_of_the_processor(kind, images):
    setting = {"network": "cnn", "rounds": 2, "epochs": 2, "batch": 32, "rate": 0.01, "precision": "float64"}
    setting |= images
    here, there = (weights(kind(**setting), 200, device) for device in ("cuda", "cpu"))
    for name in there:
        np.testing.assert_allclose(here[name], there[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", PERSONAL, ids=lambda kind: kind.__name__)
def test_personal_models_are_those_of_the_processor(kind):
    setting = {"network": "cnn", "rounds": 2, "batch": 32, "rate": 0.01, "precision": "float64"}
    found = []
    for device in ("cuda", "cpu"):
        here = federation(200, device)
        model = kind(**setting).fit(here)
        own = here.participants[0].personalise(model) if model.personalises else model
        found.append(own.decision_function(here.participants[0].data.source[:40]))
    np.testing.assert_allclose(*found, rtol=1e-8, atol=1e-9)


def test_heads_train_on_the_device_too():
    setting = {"network": "mlp:16", "rounds": 3, "batch": 32, "precision": "float64"}
    here, there = (weights(FedAvg(**setting), device=device) for device in ("cuda", "cpu"))
    for name in there:
        np.testing.assert_allclose(here[name], there[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [FedAvg, FedLC, Scaffold], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("feedback", [None, "lowest"])
def test_clients_side_by_side_give_the_bits_of_one_after_the_other(kind, feedback):
    method = kind(
        network="mobilenet_v2",
        rounds=3,
        epochs=5,
        batch=32,
        rate=0.01,
        rate_decay=0.9,
        momentum=0.9,
        feedback=feedback,
        **AUGMENTED,
    )
    together = weights(method, rows=900, clients=8, workers=4)
    slots._POOL.clear()
    alone = weights(method, rows=900, clients=8)
    assert all(np.array_equal(together[name], alone[name]) for name in alone)
