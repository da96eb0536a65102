"""Networks and data that users bring: numbers without axes, drawing functions, rows that overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import FedAvg, FedGen
from tests.gradient.plain import CLASSES, WIDTH, federation, rows, uneven
from tests.gradient.trials import HOSTS, ONE_SHOT

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch


class Scaled(nn.Module):
    """A layer, a learnt temperature without axes, and a buffer without axes."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        shape = (1,) * axes
        self.classifier = nn.Linear(WIDTH, CLASSES)
        nn.init.constant_(self.classifier.weight, 0.1)
        nn.init.zeros_(self.classifier.bias)
        self.scale = nn.Parameter(torch.full(shape, 1.5))
        self.register_buffer("offset", torch.full(shape, 0.25))

    def forward(self, inputs: Any) -> Any:
        return self.classifier(inputs * self.scale + self.offset)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTS, ids=lambda kind: kind.key)
def test_a_weight_without_axes_trains_like_one_with_an_axis(kind: Any, tmp_path: Any) -> None:
    features, labels = rows()
    found = []
    for axes in (0, 1):
        one_shot = kind in ONE_SHOT
        method = kind(network=Scaled(axes), rounds=1 if one_shot else 2, rate=0.1, precision="float64")
        fed = federation(features, labels, uneven())
        path = tmp_path / f"{axes}.ckpt"
        model = method.fit(fed, checkpoint=path)
        assert model.weights["scale"].shape == (1,) * axes
        again = method.fit(federation(features, labels, uneven()), checkpoint=path, resume=True)
        assert all(np.array_equal(model.weights[name], again.weights[name]) for name in model.weights)
        model.save(tmp_path / "model.safetensors")
        loaded = fs.load_model(tmp_path / "model.safetensors")
        assert np.array_equal(loaded.predict(features), model.predict(features))
        found.append({name: np.ravel(value) for name, value in model.weights.items()})
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert found[0]["scale"] != 1.5


def test_a_weight_without_axes_travels() -> None:
    features, labels = rows()
    run = FedAvg(network=Scaled(0), rounds=2).start(federation(features, labels, uneven()).describe())
    request = run.request(("client-0", "client-1"))
    back = decode_request(encode_request(request))
    assert back.arrays["w.scale"].shape == ()
    assert back.arrays["w.scale"] == request.arrays["w.scale"]


class Drawing(nn.Module):
    """Draws in its forward function, where no layer tells."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.hidden, self.classifier = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, inputs: Any) -> Any:
        seen = self.norm(self.hidden(inputs))
        if self.how == "dropout":
            seen = nn.functional.dropout(seen, 0.5, self.training)
        elif self.how == "rrelu":
            seen = nn.functional.rrelu(seen, training=self.training)
        return self.classifier(seen)


@pytest.mark.parametrize("how", ["dropout", "rrelu"])
def test_a_function_that_draws_has_a_stream_of_its_own(how: str) -> None:
    features, labels = rows()
    found = []
    for seed in (1, 2):
        method = FedAvg(network=Drawing(how), rounds=2, epochs=2, rate=0.1)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(method.fit(federation(features, labels, uneven(), workers=2)).weights)
        assert torch.equal(before, torch.get_rng_state())
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    still = FedAvg(network=Drawing("none"), rounds=2, epochs=2, rate=0.1)
    other = still.fit(federation(features, labels, uneven())).weights
    assert any(not np.array_equal(found[0][name], other[name]) for name in other)


@pytest.mark.parametrize("network", ["linear", "mlp:5"])
@pytest.mark.parametrize("client", [0, 2])
def test_a_row_that_overflows_is_its_owners_trouble(network: str, client: int) -> None:
    features, labels = rows()
    owners = uneven()
    features[np.flatnonzero(owners == client)[0]] *= 1e40
    parts = federation(features, labels, owners).participants
    fed = fs.LocalFederation(parts, workers=1, classes=range(CLASSES), missing="continue")
    run = FedAvg(network=network, rounds=1, batch=7, rate=0.1).start(fed.describe())
    (record,) = exchanges(run, fed)
    assert set(record.missing) == {f"client-{client}"}


def test_a_generator_that_nobody_taught_yet_is_not_sent() -> None:
    features, labels = rows()
    owners = np.arange(len(labels)) % 3
    for seed in range(4):
        sparse = federation(features, labels, owners, clients=20)
        model = FedGen(rounds=12, participation=0.1, seed=seed).fit(sparse)
        idle = ["loss" not in record.metrics for record in model.history]
        assert not all(idle)
        if idle[0]:
            break
    assert idle[0]


def test_a_run_in_which_nobody_could_ever_train_says_so() -> None:
    features, labels = rows()
    alone = federation(features, labels, np.arange(len(labels)))
    method = FedAvg(network=Drawing("none"), rounds=3, participation=0.5)
    with pytest.raises(fs.DataError, match=r"round 2: no client had a batch .* nor in any round before"):
        method.fit(alone)
