"""Whatever the partition, the order, the workers, the plan or the memory: the pooled solution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, Ridge

import fedsolve as fs
from tests import oracle
from tests.conftest import Dataset
from tests.oracle import DeepOracle, relative_difference

TOLERANCE = 1e-9
PLANS = ("textbook", "lean", "single")
LAYERS, WIDTH = 10, 256


def owners_of(kind: str, labels: np.ndarray, clients: int) -> np.ndarray:
    if kind == "iid":
        return fs.partition.iid(labels, clients, seed=3)
    if kind == "dirichlet":
        return fs.partition.dirichlet(labels, clients, alpha=0.01, seed=3)
    return fs.partition.shards(labels, clients, per_client=2, seed=3)


def federate(data: Dataset, owners: np.ndarray, clients: int | None = None, **options) -> fs.LocalFederation:
    return fs.LocalFederation.from_arrays(data.features, data.labels, owners, clients, **options)


def same_bits(first: fs.Model, second: fs.Model) -> bool:
    mine, theirs = first.contents()[0], second.contents()[0]
    assert mine.keys() == theirs.keys()
    return all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)


@dataclass(frozen=True)
class Solved:
    """A dataset with its centralised DeepAFL and what that predicts."""

    data: Dataset
    deep: DeepOracle
    predictions: np.ndarray

    @classmethod
    def centrally(cls, data: Dataset, **options) -> Solved:
        deep = DeepOracle(**options).fit(data.features, data.targets)
        return cls(data, deep, np.argmax(deep.decision_function(data.features), axis=1))

    def check(self, model) -> None:
        """Every W_t and Omega_t to the tolerance; the same predictions."""
        assert self.deep.largest_difference(model.classifiers, omegas_of(model)) <= TOLERANCE
        assert np.array_equal(model.predict(self.data.features), self.predictions)


def omegas_of(model) -> list[np.ndarray]:
    return [block.omega for block in model.blocks]


@pytest.fixture(scope="module", params=["digits", pytest.param("synthetic", marks=pytest.mark.slow)])
def solved(request) -> Solved:
    data = request.getfixturevalue(request.param).head(2000)
    return Solved.centrally(data, layers=LAYERS, width=WIDTH)


@pytest.fixture(scope="module")
def small(digits) -> Dataset:
    return digits.head(400)


# -- the grid of the papers' settings --------------------------------------------------------------

KINDS = ("iid", "dirichlet", "shards")
CELLS = [
    pytest.param(kind, clients, marks=[pytest.mark.slow] if clients == 1000 else [])
    for clients in (1, 7, 100, 1000)
    for kind in KINDS
    if clients > 1 or kind == "iid"  # one client owns all rows under every partition
]


@pytest.mark.parametrize(("kind", "clients"), CELLS)
def test_partition_does_not_matter(solved, kind, clients):
    federation = federate(solved.data, owners_of(kind, solved.data.labels, clients), clients)
    assert len(federation.clients) == clients
    solved.check(fs.DeepAFL(layers=LAYERS, width=WIDTH).fit(federation))


@pytest.mark.parametrize("name", ["digits", "synthetic"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore::fedsolve.ConditionWarning")  # blank pixels: minimum norm is wanted
def test_partition_does_not_matter_for_afl(request, name, penalty):
    data = request.getfixturevalue(name)
    weight = oracle.ridge(data.features, data.targets, penalty)
    predictions = np.argmax(data.features @ weight, axis=1)
    for clients in (1, 7, 100, 1000):
        for kind in KINDS:
            federation = federate(data, owners_of(kind, data.labels, clients), clients)
            model = fs.AFL(ridge=penalty).fit(federation)
            assert relative_difference(model.weight, weight) <= TOLERANCE, (clients, kind)
            assert np.array_equal(model.predict(data.features), predictions), (clients, kind)


@pytest.mark.parametrize("clients", [100, 1000])
def test_partitions_of_the_grid_contain_empty_clients(digits, clients):
    owners = owners_of("dirichlet", digits.labels, clients)
    record = fs.AFL(ridge=1.0).fit(federate(digits, owners, clients)).history[0]
    assert len(record.cohort) == clients
    assert len(record.empty) == clients - len(np.unique(owners)) > 0


@pytest.mark.parametrize("kind", ["iid", pytest.param("shards", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exchange", ["textbook", "single"])  # the grid above runs the lean plan
def test_every_plan_gives_the_pooled_solution(solved, kind, exchange):
    federation = federate(solved.data, owners_of(kind, solved.data.labels, 7), 7)
    solved.check(fs.DeepAFL(layers=LAYERS, width=WIDTH, exchange=exchange).fit(federation))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["textbook", "single"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_with_many_clients(solved, kind, exchange):
    federation = federate(solved.data, owners_of(kind, solved.data.labels, 200), 200)
    solved.check(fs.DeepAFL(layers=LAYERS, width=WIDTH, exchange=exchange).fit(federation))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_client_order_does_not_matter(solved, seed):
    relabelled = np.random.default_rng(seed).permutation(30)[owners_of("dirichlet", solved.data.labels, 30)]
    solved.check(fs.DeepAFL(layers=LAYERS, width=WIDTH).fit(federate(solved.data, relabelled, 30)))


# -- same cohort order, same bits ------------------------------------------------------------------


@pytest.mark.parametrize("exchange", PLANS)
def test_workers_do_not_change_a_bit(digits, exchange):
    owners = owners_of("dirichlet", digits.labels, 40)
    method = fs.DeepAFL(layers=4, width=128, exchange=exchange)
    models = [method.fit(federate(digits, owners, 40, workers=workers)) for workers in (1, 2, 3)]
    assert same_bits(models[0], models[1])
    assert same_bits(models[0], models[2])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_pooled_solution_with_any_number_of_workers(solved, workers):
    owners = owners_of("shards", solved.data.labels, 100)
    federation = federate(solved.data, owners, 100, workers=workers)
    solved.check(fs.DeepAFL(layers=LAYERS, width=WIDTH).fit(federation))


def test_workers_do_not_change_a_bit_of_afl(synthetic):
    owners = owners_of("shards", synthetic.labels, 50)
    models = [fs.AFL(ridge=1.0).fit(federate(synthetic, owners, 50, workers=w)) for w in (1, 2, 3)]
    assert same_bits(models[0], models[1])
    assert same_bits(models[0], models[2])


def mapped(participant: fs.Participant) -> bool:
    return isinstance(participant.memory.cache["deepafl"].phi, np.memmap)


@pytest.mark.parametrize("exchange", PLANS)
@pytest.mark.parametrize("block_input", ["previous", "initial"])
def test_memory_budget_does_not_change_a_bit(small, tmp_path, exchange, block_input):
    owners = owners_of("dirichlet", small.labels, 9)
    method = fs.DeepAFL(layers=3, width=64, exchange=exchange, block_input=block_input)
    everything = federate(small, owners, 9)
    nothing = federate(small, owners, 9, memory_budget=0, scratch=tmp_path)
    assert same_bits(method.fit(everything), method.fit(nothing))
    assert not any(mapped(participant) for participant in everything.participants)
    assert all(mapped(participant) for participant in nothing.participants if len(participant))
    assert not list(tmp_path.iterdir())


def test_a_budget_for_phi_but_not_for_hidden_features_does_not_change_a_bit(small):
    owners = owners_of("iid", small.labels, 3)
    method = fs.DeepAFL(layers=3, width=64)
    phi_only = 8 * 64 * len(small.labels) * 3 // 2
    assert same_bits(
        method.fit(federate(small, owners)), method.fit(federate(small, owners, memory_budget=phi_only))
    )


# -- options, each against the oracle --------------------------------------------------------------


@pytest.mark.parametrize("exchange", PLANS)
@pytest.mark.parametrize(
    "options",
    [
        {"block_input": "initial"},
        {"gain": 4.0},
        {"hidden_width": 96},
        {"hidden_width": 40, "block_input": "initial", "gain": 2.0},
        {"activation": "tanh", "zero_activation": "relu"},
        {"ridge": 10.0, "residual_ridge": 0.1, "seed": 11},
        {"width": 6},  # fewer features than classes: the thin form has rank 6
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_options(small, options, exchange):
    options = {"layers": 5, "width": 64, **options}
    expected = Solved.centrally(small, **options)
    federation = federate(small, owners_of("dirichlet", small.labels, 8), 8)
    expected.check(fs.DeepAFL(exchange=exchange, **options).fit(federation))


@pytest.mark.parametrize("exchange", PLANS)
def test_no_layers_is_ridge_on_random_features(small, exchange):
    expected = Solved.centrally(small, layers=0, width=64)
    federation = federate(small, owners_of("shards", small.labels, 8), 8)
    expected.check(fs.DeepAFL(layers=0, width=64, exchange=exchange).fit(federation))


def test_more_rows_than_one_chunk():
    rng = np.random.default_rng(4)
    features = rng.standard_normal((20_000, 8))
    data = Dataset(features, (features[:, 0] * features[:, 1] > 0).astype(np.int64))
    expected = Solved.centrally(data, layers=3, width=16)
    for exchange in PLANS:
        federation = federate(data, np.arange(20_000) // 18_000)
        expected.check(fs.DeepAFL(layers=3, width=16, exchange=exchange).fit(federation))


@pytest.mark.parametrize("exchange", PLANS)
def test_integer_sample_weights_are_repeated_rows(small, exchange):
    times = np.random.default_rng(0).integers(0, 4, size=len(small.labels))
    repeated = Dataset(np.repeat(small.features, times, axis=0), np.repeat(small.labels, times))
    expected = DeepOracle(4, 64).fit(repeated.features, repeated.targets)
    federation = federate(small, owners_of("dirichlet", small.labels, 8), 8, sample_weight=times)
    model = fs.DeepAFL(layers=4, width=64, exchange=exchange).fit(federation)
    assert expected.largest_difference(model.classifiers, omegas_of(model)) <= TOLERANCE


@pytest.mark.parametrize("intercept", [False, True])
def test_integer_sample_weights_are_repeated_rows_for_afl(small, intercept):
    times = np.random.default_rng(0).integers(0, 4, size=len(small.labels))
    repeated = Dataset(np.repeat(small.features, times, axis=0), np.repeat(small.labels, times))
    method = fs.AFL(ridge=0.5, intercept=intercept)
    weighted = method.fit(federate(small, owners_of("dirichlet", small.labels, 8), 8, sample_weight=times))
    plain = method.fit(federate(repeated, np.zeros(len(repeated.labels), dtype=int)))
    assert relative_difference(weighted.weight, plain.weight) <= TOLERANCE
    assert np.allclose(weighted.intercept, plain.intercept, rtol=0, atol=TOLERANCE)
    reference = Ridge(0.5, fit_intercept=intercept).fit(small.features, small.targets, sample_weight=times)
    assert relative_difference(weighted.weight, reference.coef_.T) <= TOLERANCE


def standardised(features: np.ndarray) -> np.ndarray:
    spread = features.std(axis=0)
    return (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)


@pytest.mark.parametrize("exchange", PLANS)
def test_standard_scale_is_standardising_the_pooled_rows(small, exchange):
    prepared = standardised(small.features)
    expected = DeepOracle(4, 64).fit(prepared, small.targets)
    federation = federate(small, owners_of("dirichlet", small.labels, 8), 8)
    model = fs.DeepAFL(layers=4, width=64, exchange=exchange, scale="standard").fit(federation)
    assert expected.largest_difference(model.classifiers, omegas_of(model)) <= TOLERANCE
    wanted = expected.decision_function(prepared)
    assert relative_difference(model.decision_function(small.features), wanted) <= TOLERANCE


def test_standard_scale_of_afl(small):
    prepared = standardised(small.features)
    weight = oracle.ridge(prepared, small.targets, 1.0)
    federation = federate(small, owners_of("dirichlet", small.labels, 8), 8)
    model = fs.AFL(ridge=1.0, scale="standard").fit(federation)
    assert relative_difference(model.weight, weight) <= TOLERANCE
    assert relative_difference(model.decision_function(small.features), prepared @ weight) <= TOLERANCE


@pytest.mark.parametrize("exchange", PLANS)
def test_intercept_of_deepafl_is_centring(small, exchange):
    centred = small.features - small.features.mean(axis=0)
    mean = small.targets.mean(axis=0)
    expected = DeepOracle(4, 64).fit(centred, small.targets - mean)
    federation = federate(small, owners_of("dirichlet", small.labels, 8), 8)
    model = fs.DeepAFL(layers=4, width=64, exchange=exchange, intercept=True).fit(federation)
    assert expected.largest_difference(model.classifiers, omegas_of(model)) <= TOLERANCE
    wanted = expected.decision_function(centred) + mean
    assert relative_difference(model.decision_function(small.features), wanted) <= TOLERANCE


@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_intercept_of_afl_is_that_of_scikit_learn(synthetic, penalty):
    features = synthetic.features + 3.0
    data = Dataset(features, synthetic.labels)
    reference = LinearRegression() if penalty == 0 else Ridge(penalty, solver="cholesky")
    reference.fit(features, data.targets)
    federation = federate(data, owners_of("dirichlet", data.labels, 20), 20)
    model = fs.AFL(ridge=penalty, intercept=True).fit(federation)
    assert relative_difference(model.weight, reference.coef_.T) <= TOLERANCE
    assert relative_difference(model.intercept, reference.intercept_) <= TOLERANCE


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("exchange", PLANS)
def test_regression_targets(small, outputs, exchange):
    rng = np.random.default_rng(8)
    values = np.tanh(small.features @ rng.standard_normal((64, outputs)))
    labels = values[:, 0] if outputs == 1 else values
    federation = fs.LocalFederation.from_arrays(
        small.features, labels, fs.partition.iid(small.labels, 6), task="regression"
    )
    expected = DeepOracle(4, 64).fit(small.features, values)
    model = fs.DeepAFL(layers=4, width=64, exchange=exchange).fit(federation)
    assert expected.largest_difference(model.classifiers, omegas_of(model)) <= TOLERANCE
    linear = fs.AFL(ridge=1.0).fit(federation)
    assert relative_difference(linear.weight, oracle.ridge(small.features, values, 1.0)) <= TOLERANCE


# -- laws for all partitions -----------------------------------------------------------------------

CLIENTS, ROWS, COLUMNS, CLASSES = 6, 40, 5, 3

partitions = st.lists(st.integers(0, CLIENTS - 1), min_size=ROWS, max_size=ROWS).map(np.array)
data_seeds = st.integers(0, 2**32 - 1)
penalties = st.sampled_from([0.0, 1e-3, 1.0, 100.0])


def random_data(seed: int) -> Dataset:
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, ROWS - CLASSES)])
    return Dataset(rng.standard_normal((ROWS, COLUMNS)) + 0.3 * labels[:, None], labels)


@settings(deadline=None, max_examples=60)
@given(owners=partitions, seed=data_seeds, penalty=penalties)
def test_any_partition_gives_the_pooled_afl(owners, seed, penalty):
    data = random_data(seed)
    model = fs.AFL(ridge=penalty).fit(federate(data, owners, CLIENTS, workers=1))
    expected = oracle.ridge(data.features, data.targets, penalty)
    assert relative_difference(model.weight, expected) <= TOLERANCE


@settings(deadline=None, max_examples=25)
@given(owners=partitions, seed=data_seeds, exchange=st.sampled_from(PLANS))
def test_any_partition_gives_the_pooled_deepafl(owners, seed, exchange):
    data = random_data(seed)
    federation = federate(data, owners, CLIENTS, workers=1)
    model = fs.DeepAFL(layers=2, width=8, exchange=exchange, seed=seed).fit(federation)
    expected = DeepOracle(2, 8, seed=seed).fit(data.features, data.targets)
    assert expected.largest_difference(model.classifiers, omegas_of(model)) <= TOLERANCE


@settings(deadline=None, max_examples=60)
@given(owners=partitions, seed=data_seeds, client=st.integers(0, CLIENTS - 1), intercept=st.booleans())
def test_late_arrival_and_withdrawal_are_exact_for_afl(owners, seed, client, intercept):
    data = random_data(seed)
    method = fs.AFL(ridge=0.5, intercept=intercept)
    classes = list(range(CLASSES))
    everyone = federate(data, owners, CLIENTS, workers=1, classes=classes)
    name = everyone.clients[client]
    spec = everyone.describe()
    request = method.start(spec).request((name,))
    term = everyone.participants[client].answer(request)
    whole = method.collect(everyone)
    present = owners != client

    everyone.remove(name)
    reference = Ridge(0.5, fit_intercept=intercept, solver="cholesky")
    late = method.solve(method.collect(everyone).including(name, term), spec)
    reference.fit(data.features, data.targets)
    assert relative_difference(late.weight, reference.coef_.T) <= TOLERANCE

    remaining = whole.without(name, term)
    assert remaining.cohort == everyone.clients
    assert remaining.count("rows") == present.sum()
    if len(np.unique(data.labels[present])) > 1:
        reference.fit(data.features[present], data.targets[present])
        assert relative_difference(method.solve(remaining, spec).weight, reference.coef_.T) <= TOLERANCE
