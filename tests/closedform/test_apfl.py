"""APFL: the paper's three theorems, its recursion, and that a refinement stays with its client."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.linalg import inv

import fedsolve as fs
from fedsolve.closedform import laws
from fedsolve.closedform.apfl import APFLModel
from fedsolve.closedform.dual_stream import PersonalModel
from fedsolve.errors import DataError, ModelFileError
from fedsolve.federation.encoding import encode_term
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.model import Model
from fedsolve.scoring.client_scores import client_rows
from tests.conftest import Dataset
from tests.oracle import DeepOracle, one_hot, random_map, relative_difference, ridge

WIDTH, OWN = 96, 80
METHOD = fs.APFL(width=WIDTH, refinement_width=OWN, ridge=0.01, refinement_ridge=1.0, balance=0.3, seed=3)


def streams(features: np.ndarray, role: str, width: int) -> np.ndarray:
    """relu(X R + r), from the documented projection scheme alone."""
    weight, bias = random_map(3, role, 0, features.shape[1], width)
    return np.maximum(features @ weight + bias, 0.0)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Both streams on pooled data, from the paper's equations."""

    primary: np.ndarray
    features: np.ndarray
    labels: np.ndarray

    @classmethod
    def fit(cls, data: Dataset) -> Oracle:
        phi = streams(data.features, "zero", WIDTH)
        return cls(ridge(phi, one_hot(data.labels), 0.01), data.features, data.labels)

    def refinement(self, rows: np.ndarray, penalty: float = 1.0) -> np.ndarray:
        x = self.features[rows]
        residual = one_hot(self.labels)[rows] - streams(x, "zero", WIDTH) @ self.primary
        return ridge(streams(x, "refinement", OWN), residual, penalty)

    def scores(self, features: np.ndarray, refinement: np.ndarray, balance: float) -> np.ndarray:
        own = streams(features, "refinement", OWN) @ refinement
        return streams(features, "zero", WIDTH) @ self.primary + balance * own


@pytest.fixture(scope="module")
def oracle(digits: Dataset) -> Oracle:
    return Oracle.fit(digits)


def federate(data: Dataset, owners: np.ndarray, **more: Any) -> fs.LocalFederation:
    return fs.LocalFederation.from_arrays(data.features, data.labels, owners, workers=1, **more)


@pytest.fixture(scope="module")
def owners(digits: Dataset) -> np.ndarray:
    return fs.partition.dirichlet(digits.labels, 12, 0.3, seed=1)


@pytest.fixture(scope="module")
def model(digits: Dataset, owners: np.ndarray) -> Any:
    return METHOD.fit(federate(digits, owners))


# -- the theorems ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "alpha"), [(1, 1.0), (7, 0.05), (12, 0.3), (200, 0.5), (500, 10.0)])
def test_theorem_1_the_primary_stream_is_the_ridge_of_pooled_rows(
    digits: Dataset, oracle: Oracle, clients: int, alpha: float
) -> None:
    owners = fs.partition.dirichlet(digits.labels, clients, alpha, seed=clients)
    model = METHOD.fit(federate(digits, owners, clients=clients))
    assert relative_difference(model.primary.classifiers[0], oracle.primary) <= 1e-9
    assert len(model.history) == 1


def test_theorem_2_what_a_refinement_leaves_is_orthogonal_to_its_features(
    digits: Dataset, oracle: Oracle, owners: np.ndarray, model: Any
) -> None:
    for number, client in enumerate(model.federation.clients):
        rows = owners == number
        personal = model.personal(client)
        psi = streams(digits.features[rows], "refinement", OWN)
        left = one_hot(digits.labels)[rows] - oracle.scores(digits.features[rows], personal.weight, 1.0)
        # Stationarity of Eq. 12: Ψᵀ(Y - ΦG - ΨP) = β P, to the size of the terms that cancel in it.
        assert np.max(np.abs(psi.T @ left - 1.0 * personal.weight)) <= 1e-9 * np.max(np.abs(psi.T @ psi))
        assert relative_difference(personal.weight, oracle.refinement(rows)) <= 1e-9


@pytest.mark.parametrize("reshuffle", ["one other client", "everybody else", "merged into few"])
def test_theorem_3_other_clients_may_be_reshuffled_at_will(
    digits: Dataset, owners: np.ndarray, model: Any, reshuffle: str
) -> None:
    rng = np.random.default_rng(5)
    other = owners.copy()
    moved = owners != 4
    if reshuffle == "one other client":
        moved = owners == 7
    other[moved] = rng.choice([0, 1, 2, 3, 5, 6] if reshuffle != "merged into few" else [9], moved.sum())
    assert not np.array_equal(other, owners)
    again = METHOD.fit(federate(digits, other, clients=12))
    first, second = model.personal("client-04"), again.personal("client-04")
    assert relative_difference(second.shared.classifiers[0], first.shared.classifiers[0]) <= 1e-9
    assert relative_difference(second.weight, first.weight) <= 1e-9
    automatic = dataclasses.replace(METHOD, balance="auto")
    balances = [
        automatic.over(m.primary).personalised(m.federation.participants[4].data) for m in (model, again)
    ]
    assert abs(balances[0].balance - balances[1].balance) <= 1e-9


def test_scores_are_those_of_the_paper(
    digits: Dataset, oracle: Oracle, owners: np.ndarray, model: Any
) -> None:
    rows = owners == 2
    expected = oracle.scores(digits.features, oracle.refinement(rows), 0.3)
    found = model.personal("client-02").decision_function(digits.features)
    assert relative_difference(found, expected) <= 1e-9


def test_equations_without_biases(digits: Dataset, owners: np.ndarray) -> None:
    """Both streams as Eq. 3 and 11 print them: relu(X R)."""

    def stream(role: str, width: int) -> np.ndarray:
        return np.maximum(digits.features @ random_map(3, role, 0, digits.features.shape[1], width)[0], 0.0)

    phi, psi, targets = stream("zero", WIDTH), stream("refinement", OWN), one_hot(digits.labels)
    found = dataclasses.replace(METHOD, bias=False).fit(federate(digits, owners))
    primary = ridge(phi, targets, 0.01)
    assert relative_difference(found.primary.classifiers[0], primary) <= 1e-9
    rows = owners == 2
    own = ridge(psi[rows], (targets - phi @ primary)[rows], 1.0)
    personal = found.personal("client-02")
    assert relative_difference(personal.weight, own) <= 1e-9
    scores = phi @ primary + 0.3 * psi @ own
    assert relative_difference(personal.decision_function(digits.features), scores) <= 1e-9


def test_without_balance_it_is_the_primary_stream_to_the_bit(digits: Dataset, model: Any) -> None:
    personal = model.personal("client-01").with_balance(0.0)
    primary = model.primary.decision_function(digits.features)
    assert np.array_equal(personal.decision_function(digits.features), primary)
    assert np.array_equal(model.decision_function(digits.features), primary)
    assert not np.array_equal(model.personal("client-01").decision_function(digits.features), primary)


# -- the recursion ---------------------------------------------------------------------------------


def recursion(grams: list[np.ndarray], locals_: list[np.ndarray], first: np.ndarray, g: float) -> np.ndarray:
    """Eq. 7-10 letter by letter, with inverses, from F_1 = first."""
    unit = np.eye(len(grams[0]))
    total, fused = grams[0], first
    for gram, local in zip(grams[1:], locals_[1:], strict=True):
        before, total = total, total + gram
        keep = unit - inv(before) @ gram @ (unit - inv(total) @ gram)
        take = unit - inv(gram) @ before @ (unit - inv(total) @ before)
        fused = keep @ fused + take @ local
    return inv(total - (len(grams) - 1) * g * unit) @ total @ fused


def test_the_recursion_is_one_solve_and_starts_from_the_first_local_stream(synthetic: Dataset) -> None:
    data = synthetic.head(900)
    phi, targets = streams(data.features, "zero", 40), one_hot(data.labels)
    owners = fs.partition.dirichlet(data.labels, 6, 0.5, seed=0)
    parts = [(phi[owners == k], targets[owners == k]) for k in range(6)]
    expected = ridge(phi, targets, 0.5)
    solutions = [laws.local_solution(*part, 0.5) for part in parts]
    assert relative_difference(laws.primary_stream(solutions, 0.5), expected) <= 1e-9
    assert relative_difference(laws.primary_stream(solutions[::-1], 0.5), expected) <= 1e-9
    grams, weights = [s.gram for s in solutions], [s.weight for s in solutions]
    assert relative_difference(recursion(grams, weights, weights[0], 0.5), expected) <= 1e-9
    # The paper prints F_1 = P_1. P_1 is a refinement and needs G, which is yet to be computed; the nearest
    # thing that exists, client 1's refinement of its own local stream (same features, ridge 1), is nearly
    # zero and loses client 1: largest relative difference 0.57 here, against 7e-14 for F_1 = G_1.
    x, y = parts[0]
    refinement = ridge(x, y - x @ weights[0], 1.0)
    assert relative_difference(recursion(grams, weights, refinement, 0.5), expected) > 0.1


def test_the_system_agrees_with_the_recursion(digits: Dataset, owners: np.ndarray) -> None:
    phi, targets = streams(digits.features, "zero", WIDTH), one_hot(digits.labels)
    firm = dataclasses.replace(METHOD, ridge=1.0).fit(federate(digits, owners))
    solutions = [laws.local_solution(phi[owners == k], targets[owners == k], 1.0) for k in range(12)]
    assert relative_difference(laws.primary_stream(solutions, 1.0), firm.primary.classifiers[0]) <= 1e-9


# -- what leaves a client --------------------------------------------------------------------------


class Wiretap(fs.LocalFederation):
    """Keeps the bytes of every request and of every term, as a network would see them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.requests: list[Request] = []
        self.terms: list[Term] = []

    def exchange(self, request: Request, chain: Chain) -> Total:
        self.requests.append(request)
        for participant in self.participants:
            answer = participant.answer(request)
            assert isinstance(answer, Term)
            self.terms.append(answer)
        return super().exchange(request, chain)


def test_a_refinement_never_leaves_its_participant(digits: Dataset, owners: np.ndarray) -> None:
    participants = federate(digits, owners).participants
    federation = Wiretap(participants, workers=1)
    model = dataclasses.replace(METHOD, balance="auto").fit(federation)
    personal = [model.personal(client) for client in federation.clients]
    scored = [p.predict(digits.features[:50]) for p in personal]
    assert len(scored) == 12
    federation.evaluate(model)
    assert [request.kind for request in federation.requests] == ["deepafl", "evaluate"]
    allowed = {"gram": (WIDTH, WIDTH), "cross": (WIDTH, 10), "label_square": (10,)}
    for term in federation.terms[:12]:
        assert {name: array.shape for name, array in term.arrays.items()} == allowed
        assert set(term.counts) == {"rows"}
    for term in federation.terms[12:]:
        assert not term.arrays
        assert set(term.counts) == {"correct", "rows"}
    with pytest.raises(DataError, match="belongs to one client"):
        federation.evaluate(personal[0])
    with pytest.raises(DataError, match="belongs to one client"):
        METHOD.over(personal[0])
    with pytest.raises(DataError, match="belongs to one client"):
        APFLModel(personal[0], METHOD)
    assert len(federation.requests) == 2
    # No message, whatever its names, holds a single row of any refinement.
    asked = [array.tobytes() for request in federation.requests for array in request.arrays.values()]
    assert len(asked) > 0
    sent = b"".join([*map(encode_term, federation.terms), *asked])
    for mine in personal:
        assert all(row.tobytes() not in sent for row in mine.weight if np.any(row))


def test_a_client_that_joins_after_training_personalises_without_an_exchange(
    digits: Dataset, owners: np.ndarray, tmp_path: Path
) -> None:
    old = owners < 9
    federation = Wiretap(
        federate(Dataset(digits.features[old], digits.labels[old]), owners[old]).participants, workers=1
    )
    METHOD.fit(federation).save(tmp_path / "shared.safetensors")
    loaded = fs.load_model(tmp_path / "shared.safetensors")
    rows = np.flatnonzero(owners == 10)
    late = fs.Participant("late", fs.ClientData(digits.features, digits.labels, rows))
    personal = late.personalise(loaded)
    assert len(federation.requests) == 1
    train, test = rows[::2], rows[1::2]
    half = fs.Participant("half", fs.ClientData(digits.features, digits.labels, train)).personalise(loaded)
    shared = loaded.score(digits.features[test], digits.labels[test])
    assert half.score(digits.features[test], digits.labels[test]) >= shared
    with pytest.raises(DataError, match="does not know 'late'"):
        loaded.personal("late")  # type: ignore[attr-defined]
    assert isinstance(personal, PersonalModel)


# -- the shared stream may be anything -------------------------------------------------------------


def test_a_whole_deepafl_may_be_the_primary_stream(digits: Dataset, owners: np.ndarray) -> None:
    federation = federate(digits, owners)
    deep = dataclasses.replace(METHOD, layers=3, ridge=1.0, activation="tanh").fit(federation)
    expected = DeepOracle(3, WIDTH, ridge=1.0, residual_ridge=0.01, seed=3).fit(
        digits.features, one_hot(digits.labels)
    )
    assert relative_difference(deep.primary.classifiers[3], expected.classifiers[3]) <= 1e-9
    assert len(deep.history) == 7
    psi = streams(digits.features[owners == 5], "refinement", OWN)
    residual = one_hot(digits.labels) - expected.decision_function(digits.features)
    found = deep.personal("client-05").weight
    assert relative_difference(found, ridge(psi, residual[owners == 5], 1.0)) <= 1e-8
    single = dataclasses.replace(METHOD, layers=3, exchange="single").fit(federation)
    assert len(single.history) == 3


def test_refinements_go_over_any_shared_model(digits: Dataset, owners: np.ndarray) -> None:
    federation = federate(digits, owners)
    afl = fs.AFL(ridge=0.1).fit(federation)
    rows = owners == 3
    personal = federation.participants[3].personalise(METHOD.over(afl))
    residual = one_hot(digits.labels)[rows] - digits.features[rows] @ afl.weight
    assert (
        relative_difference(
            personal.weight, ridge(streams(digits.features[rows], "refinement", OWN), residual, 1.0)
        )
        <= 1e-9
    )
    with pytest.raises(DataError, match="same for everybody"):
        federation.participants[3].personalise(afl)


@pytest.mark.torch
def test_refinements_of_a_network_correct_its_probabilities(digits: Dataset, tmp_path: Path) -> None:
    from fedsolve.gradient import FedAvg

    owners = fs.partition.dirichlet(digits.labels, 15, 0.1, seed=0)
    tested = fs.partition.held_out(digits.labels, owners, seed=0)
    rows = Dataset(digits.features[~tested], digits.labels[~tested])
    federation = federate(rows, owners[~tested], clients=15)
    network = FedAvg(network="linear", rounds=10, epochs=3, rate=0.5).fit(federation)
    logits = network.decision_function(rows.features)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(network.estimates(rows.features), shares, rtol=1e-12)
    over = fs.APFL(refinement_width=OWN, refinement_ridge=1.0, balance="auto", seed=3).over(network)
    assert np.array_equal(over.predict(rows.features), network.predict(rows.features))
    mine = owners[~tested] == 4
    personal = over.personalised(federation.participants[4].data)
    psi = streams(rows.features, "refinement", OWN)
    expected = ridge(psi[mine], (one_hot(rows.labels) - shares)[mine], 1.0)
    assert relative_difference(personal.weight, expected) <= 1e-9
    scores = shares + personal.balance * psi @ expected
    assert relative_difference(personal.decision_function(rows.features), scores) <= 1e-9
    personal.save(tmp_path / "mine")
    loaded = fs.load_model(tmp_path / "mine")
    assert np.array_equal(loaded.predict(rows.features), personal.predict(rows.features))
    # Over logits, whose scale has nothing to do with one-hot targets, clients would lose.
    tests = client_rows(digits.features, digits.labels, owners, 15, tested)
    own = fs.client_scores((p.personalise(over) for p in federation.participants), tests)
    assert own.mean > fs.client_scores(network, tests).mean + 0.02


def test_over_an_apfl_model_is_over_its_shared_stream(digits: Dataset, owners: np.ndarray) -> None:
    method = dataclasses.replace(METHOD, scale="standard", intercept=True)
    model = method.fit(federate(digits, owners))
    over = method.over(model)
    assert over.primary is model.primary
    data = model.federation.participants[3].data
    assert np.array_equal(over.personalised(data).weight, model.personal("client-03").weight)


def test_rows_are_read_as_they_are_stored(digits: Dataset, owners: np.ndarray) -> None:
    seen: list[Any] = []
    shared = fs.AFL(ridge=0.1).fit(federate(digits, owners))

    def watched(features: np.ndarray) -> np.ndarray:
        seen.append(features.dtype)
        return shared.decision_function(features)

    shared.estimates = watched  # type: ignore[method-assign]
    pixels = (digits.features[:60] * 16).astype(np.uint8)
    personal = dataclasses.replace(METHOD, balance="auto").over(shared)
    mine = personal.personalised(fs.ClientData(pixels, digits.labels[:60]))
    assert set(seen) == {np.dtype(np.uint8)}
    psi = streams(pixels.astype(np.float64), "refinement", OWN)
    expected = ridge(psi, one_hot(digits.labels)[:60] - pixels @ shared.weight, 1.0)
    assert relative_difference(mine.weight, expected) <= 1e-9


def test_alone_is_each_client_by_itself(digits: Dataset, owners: np.ndarray, model: Any) -> None:
    rows = owners == 3
    alone = model.alone().personal("client-03")
    psi = streams(digits.features, "refinement", OWN)
    expected = psi @ ridge(psi[rows], one_hot(digits.labels)[rows], 1.0)
    assert relative_difference(alone.decision_function(digits.features), expected) <= 1e-9


def test_the_refinement_sees_features_prepared_like_the_shared_ones(
    digits: Dataset, owners: np.ndarray
) -> None:
    method = dataclasses.replace(METHOD, scale="standard", intercept=True)
    model = method.fit(federate(digits, owners))
    assert len(model.history) == 2
    rows = owners == 6
    personal = model.personal("client-06")
    spread = np.where(digits.features.std(axis=0) > 0, digits.features.std(axis=0), 1.0)
    scaled = (digits.features - digits.features.mean(axis=0)) / spread
    residual = one_hot(digits.labels)[rows] - model.primary.decision_function(digits.features[rows])
    assert (
        relative_difference(personal.weight, ridge(streams(scaled[rows], "refinement", OWN), residual, 1.0))
        <= 1e-8
    )


def test_regression_is_personalised_too(synthetic: Dataset) -> None:
    data = synthetic.head(600)
    rng = np.random.default_rng(0)
    owners = rng.integers(0, 4, 600)
    # Every client has an offset of its own that the shared stream cannot know.
    targets = data.features[:, 0] + np.array([-3.0, -1.0, 1.0, 3.0])[owners]
    train = np.arange(600) < 400
    federation = fs.LocalFederation.from_arrays(
        data.features[train], targets[train], owners[train], task="regression", workers=1
    )
    model = fs.APFL(width=64, refinement_width=64, balance="auto", ridge=1.0).fit(federation)
    for client in range(4):
        test = ~train & (owners == client)
        personal = model.personal(f"client-{client}")
        errors = [np.mean((m.predict(data.features[test]) - targets[test]) ** 2) for m in (model, personal)]
        assert errors[1] < errors[0]
        assert client in (1, 2) or errors[1] < 0.5 * errors[0]
        assert 0.2 < personal.balance <= 2.0


# -- files and parameters --------------------------------------------------------------------------


def test_shared_and_personal_models_survive_a_file(digits: Dataset, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "shared.safetensors"
    model.save(path)
    loaded = fs.load_model(path)
    assert np.array_equal(loaded.decision_function(digits.features), model.decision_function(digits.features))
    participant = model.federation.participants[2]
    first, second = participant.personalise(model), participant.personalise(loaded)
    assert np.array_equal(first.weight, second.weight)  # type: ignore[attr-defined]
    first.save(tmp_path / "first.safetensors")
    second.save(tmp_path / "second.safetensors")
    assert (tmp_path / "first.safetensors").read_bytes() == (tmp_path / "second.safetensors").read_bytes()
    mine = fs.load_model(tmp_path / "first.safetensors")
    assert np.array_equal(mine.decision_function(digits.features), first.decision_function(digits.features))
    with pytest.raises(DataError, match="growing=True"):
        mine.updated(participant.data)  # type: ignore[attr-defined]


def test_a_file_of_other_projections_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, saved in {"shared": model, "personal": model.personal("client-02")}.items():
        saved.save(tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr("fedsolve.closedform.projections.fingerprint", lambda seed: "other")
            with pytest.raises(ModelFileError, match="random projections"):
                fs.load_model(tmp_path / name)


def test_a_run_resumes_from_its_checkpoint(digits: Dataset, owners: np.ndarray, tmp_path: Path) -> None:
    method = dataclasses.replace(METHOD, layers=2)
    whole = method.fit(federate(digits, owners))

    def stop(record: Any, expected: int) -> None:
        if record.exchange == 2:
            raise KeyboardInterrupt

    path = tmp_path / "run.ckpt"
    with pytest.raises(KeyboardInterrupt):
        method.fit(federate(digits, owners), path, follow=stop)
    resumed = method.fit(federate(digits, owners), path, resume=True)
    whole.save(tmp_path / "whole")
    resumed.save(tmp_path / "resumed")
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "resumed").read_bytes()
    assert len(resumed.history) == len(whole.history) == 5
    # A checkpoint is the shared stream's: a refinement of another kind may follow.
    other = dataclasses.replace(method, balance="auto", refinement_width=7)
    assert other.fit(federate(digits, owners), path, resume=True).personal("client-02").weight.shape == (
        7,
        10,
    )
    with pytest.raises(ModelFileError, match="other parameters"):
        dataclasses.replace(method, ridge=5.0).fit(federate(digits, owners), path, resume=True)


def test_classes_are_declared_as_for_the_others(digits: Dataset, owners: np.ndarray) -> None:
    declared = fs.LocalFederation.from_arrays(
        digits.features, digits.labels, owners, workers=1, classes=list(range(12))
    )
    model = METHOD.fit(declared)
    assert model.outputs == 12
    assert model.personal("client-03").decision_function(digits.features[:3]).shape == (3, 12)
    stranger = fs.Participant("stranger", fs.ClientData(digits.features[:5], np.full(5, 77)))
    with pytest.raises(DataError, match="label 77"):
        stranger.personalise(model)
    narrow = fs.Participant("narrow", fs.ClientData(digits.features[:5, :9], digits.labels[:5]))
    with pytest.raises(DataError, match="9 features per row"):
        narrow.personalise(model)
    with pytest.raises(DataError, match="no participant is called 'nobody'"):
        model.personal("nobody")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"balance": -0.1}, "balance"),
        ({"balance": "automatic"}, "'auto'"),
        ({"balance": float("nan")}, "balance"),
        ({"balance": "auto", "refinement_ridge": 0.0}, "refinement_ridge > 0"),
        ({"refinement_ridge": -1.0}, "refinement_ridge"),
        ({"refinement_width": 0}, "refinement_width"),
        ({"refinement_activation": "step"}, "refinement_activation must be 'none', .*got 'step'"),
        ({"activation": "step"}, "^activation must be 'none', .*got 'step'"),
        ({"block_activation": "step"}, "block_activation must be 'none', .*got 'step'"),
        ({"layers": -1}, "layers"),
        ({"ridge": -1.0}, "ridge"),
        ({"seed": -1}, "seed"),
    ],
)
def test_parameters_are_refused_by_name(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        fs.APFL(**wrong)


def test_every_model_is_somebodys_or_everybodys(model: Any) -> None:
    assert PersonalModel.private
    assert not Model.private
    assert not type(model).private
