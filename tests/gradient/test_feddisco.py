"""FedDisco: its oracles, its weights against the formula, and the question before training."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fedsolve import registry
from fedsolve.errors import DataError
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.feddisco import FedDisco, label_discrepancy
from tests.gradient import plain
from tests.gradient.plain import CLASSES, far, federation, finished, rows, same_bits, uneven
from tests.gradient.trials import SHORT, each_host, resumed, short

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def small(**options: Any) -> Any:
    features, labels = rows(40)
    return federation(features, np.sort(labels), uneven(), **options)


def shares(method: FedDisco, sizes: list[float], counts: list[Any]) -> Any:
    """a_i by the formula, with the fall back to p_i."""
    p = np.array(sizes) / sum(sizes)
    q = [c / c.sum() for c in counts]
    d = np.array([sum(x * np.log(x * len(c)) for x in c if x > 0) for c in q])
    raw = p - method.discrepancy * d / d.sum() + method.offset
    kept = np.maximum(raw, 0)
    return kept / kept.sum() if (raw > 0).any() else p


def by_formula(method: FedDisco, parts: Any) -> dict[str, Any]:
    """All rounds in plain torch."""
    start = plain.weights(plain.built(method))
    labels = {name: own for name, (_, own) in plain.clients_of(parts).items()}
    for round_ in range(method.rounds):
        found = plain.trained(method, parts, start, round_)
        counts = [np.bincount(labels[client].numpy(), minlength=CLASSES) for client in found]
        sizes = [float(t.rows) if method.weighting == "size" else 1.0 for t in found.values()]
        start = plain.mean([t.weights for t in found.values()], list(shares(method, sizes, counts)))
    return start


@each_host
def test_without_discrepancy_and_offset_it_is_fedavg(name: str) -> None:
    disco = finished(short(FedDisco, name, discrepancy=0.0, offset=0.0), small())
    assert same_bits(disco.server.weights, finished(short(FedAvg, name), small()).server.weights)
    assert len(disco.history) == disco.exchanges == 3


def test_offset_alone_is_not_fedavg() -> None:
    offset = finished(short(FedDisco, discrepancy=0.0, offset=0.1), small())
    assert far(offset.server.weights, finished(short(FedAvg), small()).server.weights) > 1e-3


@each_host
def test_equal_sizes_and_histograms_are_fedavg(name: str) -> None:
    features, _ = rows(36)
    labels = np.tile([0, 0, 1, 2, 0, 1], 6)
    parts = [federation(features, labels, np.repeat(range(6), 6)) for _ in range(2)]
    disco, average = finished(short(FedDisco, name), parts[0]), finished(short(FedAvg, name), parts[1])
    assert disco.server.memory["sums"][1] > 0.1
    assert far(disco.server.weights, average.server.weights) < 1e-12


def test_balanced_labels_cost_nothing() -> None:
    features, _ = rows(36)
    parts = [federation(features, np.tile([0, 1, 2], 12), np.repeat(range(6), 6)) for _ in range(2)]
    disco = finished(short(FedDisco, discrepancy=5.0, offset=0.0), parts[0])
    assert disco.server.memory["sums"][1] == 0
    assert far(disco.server.weights, finished(short(FedAvg), parts[1]).server.weights) < 1e-12


@each_host
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"weighting": "uniform", "discrepancy": 0.2},
        {"participation": 0.5, "rounds": 5, "momentum": 0.6, "rate_decay": 0.9},
        {"discrepancy": 0.9, "offset": 0.0},
    ],
)
def test_weights_follow_the_formula(name: str, parameters: dict[str, Any]) -> None:
    method = short(FedDisco, name, **parameters)
    assert far(finished(method, small()).server.weights, by_formula(method, small())) < 1e-10


def test_raw_weights_sum_to_what_the_header_says_and_some_are_clipped() -> None:
    method = short(FedDisco, discrepancy=0.9, offset=0.05)
    run = finished(method, small())
    sums = run.server.memory["sums"]
    labels = [own.numpy() for _, own in plain.clients_of(small()).values()]
    found = [len(own) / sums[0] - 0.9 * _away(own) / sums[1] + 0.05 for own in labels]
    assert sum(found) == pytest.approx(1 - 0.9 + 4 * 0.05, abs=1e-12)
    used = [method.share(len(own), _away(own), sums) for own in labels]
    assert used == pytest.approx(np.maximum(found, 0), abs=1e-12)
    assert min(found) < 0 < max(found)


def _away(labels: Any) -> float:
    return label_discrepancy(np.bincount(labels, minlength=CLASSES))


@each_host
def test_where_every_weight_would_be_zero_the_mean_is_fedavgs(name: str) -> None:
    method = short(FedDisco, name, discrepancy=20.0, offset=0.0)
    features, labels = rows(40)
    owners = np.arange(40) % 4
    labels[owners == 0] = 0  # one client of a single class is not enough to leave the others at zero
    parts = [federation(features, labels, owners) for _ in range(3)]
    run = finished(method, parts[0])
    assert run.server.memory["shares"] == 0
    assert [record.kind for record in run.history] == ["prelude", "prelude", "train", "train", "train"]
    assert same_bits(run.server.weights, finished(short(FedAvg, name), parts[1]).server.weights)
    assert far(run.server.weights, by_formula(method, parts[2])) < 1e-10


def test_a_negative_sum_with_one_positive_weight_still_uses_it() -> None:
    method = short(FedDisco, discrepancy=1.2, offset=0.0)
    run = finished(method, small())
    assert run.server.memory["shares"] == 1
    assert [record.kind for record in run.history][:2] == ["prelude", "prelude"]
    assert far(run.server.weights, by_formula(method, small())) < 1e-10


def test_the_question_is_asked_once_while_the_cohort_stays() -> None:
    run = None
    for run in plain.run(short(FedDisco), small()):
        assert run.exchanges == 4
    assert run is not None
    assert [record.kind for record in run.history] == ["prelude", "train", "train", "train"]
    prelude, training = run.history[:2]
    assert (prelude.bytes_up, prelude.bytes_down) == (4 * 2 * 8, 0)
    assert training.bytes_down == 4 * 8 * (len(_flat(run)) + 4)


def _flat(run: Any) -> Any:
    return np.concatenate([array.ravel() for array in run.server.weights.values()])


def test_a_changed_cohort_is_asked_again() -> None:
    method = short(FedDisco, participation=0.5, rounds=5)
    run = finished(method, small())
    cohorts = [record.cohort for record in run.history if record.kind == "train"]
    changes = 1 + sum(left != right for left, right in pairwise(cohorts))
    assert changes > 1
    assert sum(record.kind == "prelude" for record in run.history) == changes


def test_a_client_that_leaves_changes_the_sums() -> None:
    method, parts = short(FedDisco, rounds=2), small()
    run = method.start(parts.describe())
    under_way = exchanges(run, parts)
    next(under_way)
    next(under_way)
    before = run.server.memory["sums"].copy()
    parts.remove("client-3")
    assert [record.kind for record in under_way] == ["prelude", "train"]
    assert run.server.memory["sums"][0] == before[0] - 16
    assert run.server.memory["sums"][2] == 3


def test_who_does_not_answer_the_question_is_not_asked_to_train() -> None:
    features, labels = rows(40)
    parts = federation(features, labels, uneven(), missing="continue")
    broken = parts.participants[1]
    method = short(FedDisco, rounds=1)
    run = method.start(parts.describe())
    answer = broken.answer
    broken.answer = _fail
    under_way = exchanges(run, parts)
    next(under_way)
    broken.answer = answer
    assert next(under_way).cohort == ("client-0", "client-2", "client-3")


def _fail(*_: Any) -> Any:
    raise DataError("out of order")


@pytest.mark.parametrize("name", ["linear", "module"])
def test_clients_without_a_batch_are_not_in_the_sums(name: str) -> None:
    features, labels = rows(40)
    owners = uneven()
    parameters: dict[str, Any] = {"last_batch": "drop", "batch": 6}
    idle = finished(short(FedDisco, name, **parameters), federation(features, labels, owners))
    assert idle.server.memory["sums"][2] == 3
    present = owners > 0
    without = federation(features[present], labels[present], owners[present])
    without.remove("client-0")
    rest = finished(short(FedDisco, name, **parameters), without)
    assert same_bits(idle.server.weights, rest.server.weights)


def test_batch_normalisation_leaves_a_client_of_one_row_out_of_the_sums() -> None:
    features, labels = rows(40)
    owners = np.where(np.arange(40) == 0, 0, 1 + np.arange(40) % 2)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, CLASSES)
    )
    run = finished(FedDisco(network=net, **SHORT), federation(features, labels, owners))
    assert run.server.memory["sums"][2] == 2


def test_an_empty_client_changes_nothing() -> None:
    features, labels = rows(40)
    with_empty = finished(short(FedDisco), federation(features, labels, uneven(), clients=6))
    without = finished(short(FedDisco), federation(features, labels, uneven()))
    assert same_bits(with_empty.server.weights, without.server.weights)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resume_is_exact(tmp_path: Any, stop: int) -> None:
    method = short(FedDisco, "mlp:5", participation=0.5, rounds=4)
    again, whole = resumed(method, small, stop), finished(method, small())
    assert same_bits(again.server.weights, whole.server.weights)
    assert len(again.history) == len(whole.history)


def test_label_discrepancy() -> None:
    assert label_discrepancy(np.array([7, 7, 7])) == 0
    assert label_discrepancy(np.array([0, 0, 0])) == 0
    assert label_discrepancy(np.array([0, 5, 0])) == pytest.approx(np.log(3), abs=1e-15)
    assert label_discrepancy(np.array([1, 3])) == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5))


def test_it_is_a_sum_and_refuses_negative_parameters() -> None:
    assert registry.method_class("feddisco") is FedDisco
    assert not FedDisco.gathers
    run = finished(short(FedDisco), small())
    assert not any("@" in name for name in run.server.memory)
    for parameter in ("discrepancy", "offset"):
        with pytest.raises(DataError, match=parameter):
            replace(FedDisco(), **{parameter: -0.1})
