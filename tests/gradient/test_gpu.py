"""On a GPU: replayed steps are the recorded ones, and results are those of the processor."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.gradient import MOON, FedACG, FedAvg, FedDyn, FedLC, FedNTD, FedProx, FedRS, FedSOL, Scaffold

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

METHODS = [
    FedAvg,
    FedProx,
    FedLC,
    FedRS,
    FedNTD,
    MOON,
    FedSOL,
    FedDyn,
    Scaffold,
    FedACG,
]

AUGMENTED = {"crop": 2, "flip": 0.5, "pixel_mean": "0.3", "pixel_deviation": "0.35"}


def federation(rows: int, device: str, clients: int = 3) -> fs.LocalFederation:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, rows)
    images = np.clip(rng.normal(60 * labels[:, None], 40, (rows, 784)), 0, 255).astype(np.uint8)
    return fs.LocalFederation.from_arrays(
        images, labels, np.arange(rows) % clients, clients, workers=1, device=device
    )


def weights(method, rows: int = 600, device: str = "cuda"):
    return method.fit(federation(rows, device)).weights


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


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("images", [{}, AUGMENTED], ids=["plain", "augmented"])
def test_results_are_those_of_the_processor(kind, images):
    setting = {"network": "cnn", "rounds": 2, "epochs": 2, "batch": 32, "rate": 0.01, "precision": "float64"}
    setting |= images
    here, there = (weights(kind(**setting), 200, device) for device in ("cuda", "cpu"))
    for name in there:
        np.testing.assert_allclose(here[name], there[name], rtol=1e-9, atol=1e-11)


def test_heads_train_on_the_device_too():
    setting = {"network": "mlp:16", "rounds": 3, "batch": 32, "precision": "float64"}
    here, there = (weights(FedAvg(**setting), device=device) for device in ("cuda", "cpu"))
    for name in there:
        np.testing.assert_allclose(here[name], there[name], rtol=1e-9, atol=1e-11)
