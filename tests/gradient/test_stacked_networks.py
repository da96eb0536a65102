"""Small networks whose clients train side by side learn what they learn one after the other."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.gradient import (
    FedACG,
    FedAvg,
    FedAvgM,
    FedGen,
    FedLC,
    FedProx,
    FedRS,
    Scaffold,
    group,
    learners,
)
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.learners import StackedNetworks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SIDE_BY_SIDE = [FedACG, FedAvg, FedAvgM, FedGen, FedLC, FedProx, FedRS]


def trained(
    kind,
    device: str = "cpu",
    precision: str = "float64",
    # One client has a row, one has less than a batch, and the others end with short ones.
    sizes: tuple[int, ...] = (1, 7, 22, 31),
    workers: int = 1,
    **parameters,
):
    rng = np.random.default_rng(0)
    rows = sum(sizes)
    images, labels = rng.integers(0, 256, (rows, 64), dtype=np.uint8), rng.integers(0, 3, rows)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    labels[:3] = [0, 1, 2]
    federation = fs.LocalFederation.from_arrays(images, labels, owners, device=device, workers=workers)
    method = kind(
        network="cnn",
        shape="1,8,8",
        rounds=2,
        epochs=2,
        batch=8,
        rate=0.05,
        precision=precision,
        **parameters,
    )
    return method.fit(federation)


@pytest.fixture
def stacks(monkeypatch):
    """Stacks on the processor too, and how many clients each had."""
    ways = GradientMethod.trains_together
    seen = []
    plain = StackedNetworks.__init__

    def together(self, features, outputs, device=None):
        # Without a device heads alone are meant.
        return ways(self, features, outputs, "cpu" if device is None else "cuda")

    def begun(self, names, weights, network):
        seen.append(len(weights[0]))
        plain(self, names, weights, network)

    def switch() -> list[int]:
        monkeypatch.setattr(GradientMethod, "trains_together", together)
        monkeypatch.setattr(StackedNetworks, "__init__", begun)
        return seen

    return switch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        *((kind, {}) for kind in SIDE_BY_SIDE),
        (FedAvg, {"momentum": 0.9, "weight_decay": 1e-3, "clip": 0.5}),
        (FedAvg, {"crop": 1, "flip": 0.5}),
    ],
    ids=[*(kind.__name__ for kind in SIDE_BY_SIDE), "optimiser", "augmented"],
)
def test_side_by_side_as_one_after_the_other(kind, parameters, stacks):
    alone = trained(kind, **parameters)
    seen = stacks()
    together = trained(kind, **parameters)
    assert seen == [4, 4]
    for name, weight in alone.weights.items():
        np.testing.assert_allclose(together.weights[name], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 7, 22, 31), (9, *(7,) * 27)], ids=["one stack", "a stack and a rest"])
def test_a_sum_where_the_networks_are_has_the_bits_of_one_on_the_host(sizes, stacks, monkeypatch):
    seen = stacks()
    there = trained(FedAvg, precision="float32", sizes=sizes)
    assert seen
    monkeypatch.setattr(group, "handed_over", learners.on_host)
    here = trained(FedAvg, precision="float32", sizes=sizes)
    for name, weight in here.weights.items():
        np.testing.assert_array_equal(there.weights[name], weight)


def test_what_a_method_does_to_a_term_leaves_the_weights_alone(stacks):
    class Halved(FedAvg):
        tensors_only = True

        def contribute(self, group, client, term):
            for name in group.names:
                term.arrays[f"w.{name}"] *= 0.5

    def drift(model):
        return [record.metrics.get("drift", record.metrics.get("loss")) for record in model.history]

    alone = drift(trained(Halved, track="drift"))
    assert stacks() == []
    np.testing.assert_allclose(drift(trained(Halved, track="drift")), alone, rtol=0, atol=1e-12)


def test_methods_that_keep_something_train_one_after_the_other(stacks):
    seen = stacks()
    trained(Scaffold)
    trained(FedAvg, feedback="lowest")
    assert seen == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("kind", SIDE_BY_SIDE, ids=lambda kind: kind.__name__)
def test_on_a_gpu_as_on_the_processor(kind):
    host, device = trained(kind), trained(kind, "cuda")
    for name, weight in host.weights.items():
        np.testing.assert_allclose(device.weights[name], weight, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_stack_after_stack_on_a_gpu_as_on_the_processor():
    sizes = (9, *(7,) * 77)
    host, device = trained(FedAvg, sizes=sizes), trained(FedAvg, "cuda", sizes=sizes, workers=2)
    for name, weight in host.weights.items():
        np.testing.assert_allclose(device.weights[name], weight, rtol=0, atol=1e-10)
