"""Options that would change nothing are refused by name, and those that count do so for every row."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.gradient import FedALA, FedAvg, FedDBE, FedDisco, FedPCL, FedProx, FedProxFT, FedSOL, Scaffold

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("kind", "parameters", "named"),
    [
        (FedAvg, {"optimiser": "adam", "momentum": 0.9}, "momentum"),
        (FedAvg, {"optimiser": "adamw", "momentum": 0.9, "nesterov": True}, "momentum"),
        (FedAvg, {"feedback_layers": 2}, "feedback_layers"),
        (FedAvg, {"feedback_route": "direct"}, "feedback_route"),
        (FedAvg, {"feedback": "hidden", "feedback_layers": 2}, "feedback_layers"),
        (FedAvg, {"feedback": "hidden", "feedback_sketch": 0}, "feedback_sketch"),
        (FedAvg, {"feedback": "hidden", "feedback_first": True}, "feedback_first"),
        (FedAvg, {"feedback": "lowest", "feedback_route": "direct", "feedback_matrix": "random"}, "matrix"),
        (FedAvg, {"feedback": "lowest", "feedback_route": "direct", "feedback_scaling": "none"}, "scaling"),
        (FedAvg, {"feedback": "lowest", "feedback_route": "direct", "feedback_sync": 2}, "feedback_sync"),
        (FedAvg, {"feedback": "lowest", "feedback_matrix": "random", "feedback_sync": 2}, "feedback_sync"),
        (FedAvg, {"schedule_factor": 0.5}, "schedule_factor"),
        (FedAvg, {"schedule": "cosine", "schedule_factor": 0.5}, "schedule_factor"),
        (FedProx, {"stragglers": 0.5}, "stragglers"),
        (FedProx, {"stragglers": 0.5, "epochs": 3, "local_steps": 2}, "stragglers"),
        (FedDBE, {"discard_first": True, "rounds": 1}, "discard_first"),
        (FedPCL, {"weighting": "uniform"}, "weighting"),
        (FedSOL, {"perturbed": "body", "network": "linear"}, "body"),
    ],
)
def test_what_would_change_nothing_is_refused(kind, parameters, named):
    with pytest.raises(DataError, match=named):
        kind(**parameters)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"shape": (1, 8, 8)}, "1,8,8"),
        ({"shape": [1, 8, 8]}, "1,8,8"),
        ({"schedule": "step", "schedule_rounds": 1}, "1"),
        ({"schedule": "step", "schedule_rounds": [1, 2]}, "1,2"),
        ({"network": "cnn", "pixel_mean": 0.3, "pixel_deviation": 0.2}, "0.3"),
        ({"feedback": ["hidden", "classifier"]}, "hidden,classifier"),
    ],
)
def test_lists_and_numbers_are_taken_as_the_text_that_stands_for_them(given, text):
    method = FedAvg(**given)
    assert text in (method.shape, method.schedule_rounds, method.pixel_mean, method.feedback)


def test_a_list_that_is_no_shape_is_refused_as_its_text_is():
    with pytest.raises(DataError, match="channels,height,width"):
        FedAvg(network="cnn", shape=("a", 8, 8)).image_shape  # noqa: B018


def weighted(weights) -> fs.LocalFederation:
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(30, 4)), np.arange(30) % 3
    owners = np.repeat([0, 1, 2], [4, 10, 16])
    return fs.LocalFederation.from_arrays(features, labels, owners, sample_weight=weights)


def test_equal_weights_of_any_size_change_nothing_in_feddisco():
    method = FedDisco(rounds=3, rate=0.5, discrepancy=0.1, offset=0.2, precision="float64")
    plain, small = (method.fit(weighted(given)).weights for given in (None, np.full(30, 0.01)))
    for name, weight in plain.items():
        np.testing.assert_allclose(small[name], weight, rtol=0, atol=1e-12)


def test_scaffolds_whole_gradient_counts_rows_by_their_weights():
    """With one step over all rows both options keep the same control."""
    weights = np.random.default_rng(1).uniform(0.2, 3, 30)
    setting = {"rounds": 3, "rate": 0.3, "batch": 30, "precision": "float64"}
    one, two = (
        Scaffold(control=control, **setting).fit(weighted(weights)).weights
        for control in ("gradient", "steps")
    )
    for name, weight in two.items():
        np.testing.assert_allclose(one[name], weight, rtol=0, atol=1e-12)


def test_fine_tuning_takes_all_its_passes_whoever_straggles_in_the_run():
    federation = weighted(None)
    setting = {"rounds": 1, "rate": 0.3, "batch": 4, "epochs": 2, "precision": "float64"}
    steady = FedProxFT(fine_epochs=9, **setting)
    late = FedProxFT(fine_epochs=9, stragglers=1.0, **setting)
    data = federation.participants[1].data
    model = steady.fit(federation)
    found = [method.personal(model, data, None).weights for method in (steady, late)]
    for name, weight in found[0].items():
        np.testing.assert_array_equal(found[1][name], weight)


class Dropping(torch.nn.Module):
    """A head with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(4, 8)
        self.drop = torch.nn.Dropout(0.5)
        self.classifier = torch.nn.Linear(8, 3)

    def forward(self, rows):
        return self.classifier(self.drop(torch.relu(self.hidden(rows))))


def test_fedala_with_dropout_gives_the_same_model_each_time():
    torch.manual_seed(0)
    method = FedALA(network=Dropping(), rounds=3, rate=0.3, batch=4, merge_share=1.0)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(method.fit(weighted(None)).weights)
    for name, weight in found[0].items():
        np.testing.assert_array_equal(found[1][name], weight)
