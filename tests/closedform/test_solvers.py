"""The solvers against textbook formulas, and on matrices that are hard in a known way."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.linalg
from scipy.linalg import cho_solve

import fedsolve as fs
from fedsolve.backends import blas
from fedsolve.closedform.solvers import Sandwich, ridge_solve, sandwich_solve
from tests import oracle
from tests.conftest import Dataset, conditioned
from tests.oracle import DeepOracle, relative_difference

EPS = np.finfo(np.float64).eps


# -- ridge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1e-6, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize(("rows", "width", "outputs"), [(50, 8, 3), (20, 20, 1), (5, 30, 4), (1, 1, 1)])
def test_ridge_minimises_its_objective(rows, width, outputs, penalty):
    rng = np.random.default_rng(rows)
    features, targets = rng.standard_normal((rows, width)), rng.standard_normal((rows, outputs))
    found = ridge_solve(features.T @ features, features.T @ targets, penalty)
    stacked = np.vstack([features, np.sqrt(penalty) * np.eye(width)])
    expected = np.linalg.lstsq(stacked, np.vstack([targets, np.zeros((width, outputs))]), rcond=None)[0]
    # Normal equations square the condition number; lstsq does not.
    condition = np.linalg.cond(stacked) ** 2
    assert relative_difference(found, expected) <= 10 * EPS * condition
    assert found.flags.c_contiguous


def test_ridge_without_penalty_is_least_squares():
    features, targets = conditioned(200, 30, 100.0), np.random.default_rng(1).standard_normal((200, 4))
    found = ridge_solve(features.T @ features, features.T @ targets)
    assert relative_difference(found, scipy.linalg.lstsq(features, targets)[0]) <= 1e-10


def test_ridge_does_not_change_its_arguments():
    gram, cross = np.diag([1.0, 2.0, 0.0]), np.ones((3, 2))
    before = gram.copy(), cross.copy()
    ridge_solve(gram, cross, 0.5)
    with pytest.warns(fs.ConditionWarning):
        ridge_solve(gram, cross)
    assert np.array_equal(gram, before[0])
    assert np.array_equal(cross, before[1])


def singular_features(kind: str) -> tuple[np.ndarray, int]:
    """Features (60, 12) of the named kind of singularity, and their rank."""
    features = np.random.default_rng(2).standard_normal((60, 12))
    if kind == "blank columns":
        features[:, [0, 5, 11]] = 0.0
        return features, 9
    if kind == "duplicated columns":
        features[:, 6:] = features[:, :6]
        return features, 6
    if kind == "fewer rows than columns":
        return features[:7], 7
    features[:, -1] = features[:, 0] + 3.0 * features[:, 1] - features[:, 2]
    return features, 11


@pytest.mark.parametrize(
    "kind", ["blank columns", "duplicated columns", "fewer rows than columns", "dependent column"]
)
def test_a_singular_system_gives_the_minimum_norm_solution(kind):
    features, rank = singular_features(kind)
    targets = np.random.default_rng(3).standard_normal((len(features), 4))
    with pytest.warns(fs.ConditionWarning, match=rf"condition number \S+, rank {rank}\)") as caught:
        found = ridge_solve(features.T @ features, features.T @ targets)
    assert "A larger ridge (now 0) avoids this" in str(caught[0].message)
    assert relative_difference(found, np.linalg.pinv(features) @ targets) <= 1e-10


def test_the_warning_names_the_condition_number():
    gram = np.diag([4.0, 1.0, 2.0**-60])
    with pytest.warns(fs.ConditionWarning, match=f"condition number {2.0**62:.1e}".replace("+", r"\+")):
        ridge_solve(gram, np.eye(3))
    with pytest.warns(fs.ConditionWarning, match="condition number inf, rank 0"):
        assert not ridge_solve(np.zeros((3, 3)), np.ones((3, 2))).any()


def test_a_penalty_that_makes_the_system_regular_does_not_warn():
    features, _ = singular_features("duplicated columns")
    targets = np.random.default_rng(3).standard_normal((len(features), 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ridge_solve(features.T @ features, features.T @ targets, 1e-3)
    assert relative_difference(found, oracle.ridge(features, targets, 1e-3)) <= 1e-9


def test_an_ill_conditioned_but_regular_system_is_solved_as_it_is():
    features = conditioned(100, 20, 1e5)
    weight = np.random.default_rng(4).standard_normal((20, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ridge_solve(features.T @ features, features.T @ (features @ weight))
    assert relative_difference(found, weight) <= 10 * EPS * 1e10


# -- sandwich --------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1e-6, 1e-2, 1.0])
@pytest.mark.parametrize(("hidden_width", "width", "outputs"), [(7, 6, 3), (5, 8, 8), (4, 3, 6), (1, 1, 2)])
def test_sandwich_is_the_kronecker_solve(hidden_width, width, outputs, penalty):
    """(W Wᵀ ⊗ FᵀF + penalty I) vec(Omega) = vec(FᵀR Wᵀ), columns stacked."""
    rng = np.random.default_rng(width)
    hidden = rng.standard_normal((40, hidden_width))
    residual, weight = rng.standard_normal((40, outputs)), rng.standard_normal((width, outputs))
    system = np.kron(weight @ weight.T, hidden.T @ hidden) + penalty * np.eye(hidden_width * width)
    right = (hidden.T @ residual @ weight.T).reshape(-1, order="F")
    expected = np.linalg.solve(system, right).reshape(hidden_width, width, order="F")
    found = sandwich_solve(hidden.T @ hidden, hidden.T @ residual, weight, penalty)
    assert relative_difference(found.omega, expected) <= 10 * EPS * np.linalg.cond(system)
    rank = min(width, outputs)
    assert found.left.shape == (hidden_width, rank)
    assert np.allclose(found.right.T @ found.right, np.eye(rank), rtol=0, atol=1e-14)
    assert np.isclose(found.square, np.sum(expected**2), rtol=1e-9)


def hard_case(kind: str, data: Dataset, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """F, R and W of the first layer of a network on real data, made hard as `kind` says."""
    rows = width // 3 if kind == "fewer rows than columns" else len(data.labels)
    features, targets = data.features[:rows], data.targets[:rows]
    if kind == "one class missing":
        targets = targets * (np.arange(10) != 3)
    network = DeepOracle(0, width)
    phi = network.zero(features)
    hidden, weight = network.hidden(0, phi, phi), oracle.ridge(phi, targets, 1.0)
    if kind == "rank-deficient classifier":
        weight[:, 5:] = weight[:, :5]
    if kind == "duplicated columns":
        hidden[:, width // 2 :] = hidden[:, : width // 2]
    if kind == "condition 1e6":
        hidden = conditioned(rows, width, 1e6) * np.linalg.norm(hidden, 2)
    return hidden, targets - phi @ weight, weight


def stationarity(hidden, residual, weight, penalty, block: Sandwich) -> np.ndarray:
    """Fᵀ(R - F Omega W)Wᵀ - penalty Omega, from the rows and not from their sums."""
    omega = block.omega
    return hidden.T @ ((residual - (hidden @ omega) @ weight) @ weight.T) - penalty * omega


HARD = (
    "plain",
    "rank-deficient classifier",
    "one class missing",
    "fewer rows than columns",
    "duplicated columns",
    "condition 1e6",
)


@pytest.mark.parametrize("kind", HARD)
def test_sandwich_is_stationary(digits, kind):
    """To 1e-6 of |penalty Omega|, at the scale of real features (|F|² near 700, |W|² near 4)."""
    hidden, residual, weight = hard_case(kind, digits.head(1000), 128)
    for penalty in np.geomspace(1e-6, 1.0, 7):
        block = sandwich_solve(hidden.T @ hidden, hidden.T @ residual, weight, penalty)
        left_over = np.linalg.norm(stationarity(hidden, residual, weight, penalty, block))
        assert left_over <= 1e-6 * penalty * np.linalg.norm(block.omega), (kind, penalty)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("penalty", [1e-12, 1e-6, 1.0])
def test_sandwich_is_stationary_to_rounding_at_any_scale(digits, kind, penalty):
    """Backward stable: what is left is rounding of |F|² |Omega| |W|², whatever the penalty.

    Sums of 256 products round like sqrt(256) steps of a random walk.
    """
    hidden, residual, weight = hard_case(kind, digits, 256)
    block = sandwich_solve(hidden.T @ hidden, hidden.T @ residual, weight, penalty)
    left_over = np.linalg.norm(stationarity(hidden, residual, weight, penalty, block))
    scale = np.linalg.norm(hidden, 2) ** 2 * np.linalg.norm(weight, 2) ** 2 * np.linalg.norm(block.omega)
    assert left_over <= 16 * EPS * scale


@pytest.mark.parametrize("kind", HARD)
def test_sandwich_is_eq_8(digits, kind):
    hidden, residual, weight = hard_case(kind, digits.head(1000), 128)
    block = sandwich_solve(hidden.T @ hidden, hidden.T @ residual, weight, 0.01)
    assert relative_difference(block.omega, oracle.sandwich(hidden, residual, weight, 0.01)) <= 1e-9


@pytest.mark.parametrize("kind", [kind for kind in HARD if kind != "condition 1e6"])
def test_sandwich_without_penalty_drops_what_the_data_do_not_determine(digits, kind):
    """At penalty 0 the minimum-norm minimiser of |R - F Omega W|² is F⁺ R W⁺."""
    hidden, residual, weight = hard_case(kind, digits.head(300), 24)
    block = sandwich_solve(hidden.T @ hidden, hidden.T @ residual, weight, 0.0)
    expected = np.linalg.pinv(hidden, rcond=1e-7) @ residual @ np.linalg.pinv(weight, rcond=1e-7)
    assert relative_difference(block.omega, expected) <= 1e-7


@pytest.mark.parametrize("penalty", [0.0, 1e-6])
def test_sandwich_with_nothing_to_correct_is_zero(penalty):
    gram = np.diag([2.0, 1.0, 0.0])
    for weight, residual in ((np.zeros((4, 2)), np.ones((3, 2))), (np.ones((4, 2)), np.zeros((3, 2)))):
        block = sandwich_solve(gram, residual, weight, penalty)
        assert np.isfinite(block.right).all()
        assert not block.omega.any()
    assert not sandwich_solve(np.zeros((3, 3)), np.zeros((3, 2)), np.ones((4, 2)), penalty).omega.any()


@pytest.mark.parametrize("penalty", [1e-9, 1e-7, 1e-5, 1e-3])
def test_denominators_never_fall_below_the_penalty(penalty):
    """A Gram matrix summed in float32 has eigenvalues below zero; they count as zero.

    Then |A| <= |target| / penalty, and A points the way of its target.
    """
    rng = np.random.default_rng(6)
    hidden = rng.standard_normal((20, 64)).astype(np.float32)
    gram = (hidden.T @ hidden).astype(np.float64)
    weight, residual = rng.standard_normal((32, 5)), rng.standard_normal((64, 5))
    lowest = np.linalg.eigvalsh(gram)[0] * np.linalg.norm(weight, 2) ** 2
    assert lowest < -1e-5
    block = sandwich_solve(gram, residual, weight, penalty)
    target = residual @ weight.T @ block.right
    assert np.linalg.norm(block.left) <= np.linalg.norm(target) / penalty
    assert np.sum(block.left * target) > 0


# -- whole runs at the edge ------------------------------------------------------------------------


@pytest.mark.slow
def test_width_4096_with_a_tiny_penalty(digits):
    data, width, penalty = digits.head(240), 4096, 1e-6
    federation = fs.LocalFederation.from_arrays(
        data.features, data.labels, fs.partition.dirichlet(data.labels, 3, alpha=0.1)
    )
    model = fs.DeepAFL(layers=1, width=width, residual_ridge=penalty).fit(federation)
    arrays, _ = model.contents()
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert model.risk[1] <= model.risk[0]

    # The same from the rows' side, where everything is 240 x 240.
    network = DeepOracle(1, width)
    phi = network.zero(data.features)
    weight = phi.T @ np.linalg.solve(phi @ phi.T + np.eye(240), data.targets)
    assert relative_difference(model.classifiers[0], weight) <= 1e-9
    hidden = network.hidden(0, phi, phi)
    p, s, vt = np.linalg.svd(hidden, full_matrices=False)
    u, w, zt = np.linalg.svd(weight, full_matrices=False)
    inner = (s[:, None] * (p.T @ (data.targets - phi @ weight) @ zt.T) * w) / (penalty + np.outer(s**2, w**2))
    assert relative_difference(hidden @ model.blocks[0].omega, (p * s) @ inner @ u.T) <= 1e-9
    assert relative_difference(model.blocks[0].omega, vt.T @ inner @ u.T) <= 1e-6


@pytest.mark.parametrize("exchange", ["textbook", "lean", "single"])
@pytest.mark.parametrize(
    "options", [{"ridge": 0.0}, {"residual_ridge": 0.0}, {"residual_ridge": 1e-12}], ids=str
)
@pytest.mark.filterwarnings("ignore::fedsolve.ConditionWarning")
def test_penalties_at_the_limit_stay_finite(digits, exchange, options):
    data = digits.head(150)  # fewer rows than features: G is singular
    federation = fs.LocalFederation.from_arrays(data.features, data.labels, np.arange(150) % 4)
    model = fs.DeepAFL(layers=3, width=200, exchange=exchange, **options).fit(federation)
    arrays, _ = model.contents()
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert model.score(data.features, data.labels) > 0.99


@pytest.mark.parametrize("exchange", ["textbook", "lean", "single"])
def test_float32_is_close_to_float64(digits, exchange):
    """Within float32's rounding times the condition number of G + ridge I."""
    owners = fs.partition.dirichlet(digits.labels, 20, alpha=0.1)
    models = {
        precision: fs.DeepAFL(layers=5, width=128, exchange=exchange, precision=precision).fit(
            fs.LocalFederation.from_arrays(digits.features, digits.labels, owners)
        )
        for precision in ("float64", "float32")
    }
    exact, fast = models["float64"], models["float32"]
    phi = DeepOracle(0, 128).zero(digits.features)
    bound = np.finfo(np.float32).eps * np.linalg.cond(phi.T @ phi + np.eye(128))
    wanted = exact.decision_function(digits.features)
    assert relative_difference(fast.decision_function(digits.features), wanted) <= bound
    assert np.mean(fast.predict(digits.features) == exact.predict(digits.features)) > 0.999
    assert np.allclose(fast.risk, exact.risk, rtol=bound)
    assert fast.transform(digits.features).dtype == np.float32
    for sent in ("bytes_up", "bytes_down"):
        total = {name: sum(getattr(record, sent) for record in m.history) for name, m in models.items()}
        assert 2 * total["float32"] == total["float64"]


def test_large_systems_are_factorised_by_blocks(monkeypatch) -> None:
    monkeypatch.setattr(blas, "LARGE", 100)
    monkeypatch.setattr(blas, "BLOCK", 64)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((400, 250))
    gram, cross = rows.T @ rows, rows.T @ rng.standard_normal((400, 3))
    for lower in (False, True):
        given = gram.copy()
        factor = blas.cholesky_factor(given, lower=lower)
        assert np.array_equal(given, gram)
        solution = cho_solve(factor, cross)
        assert relative_difference(solution, np.linalg.solve(gram, cross)) <= 1e-11
    in_place = np.asfortranarray(gram)
    factor = blas.cholesky_factor(in_place, lower=True, overwrite=True)
    assert np.shares_memory(factor[0], in_place)
    assert relative_difference(np.tril(factor[0]) @ np.tril(factor[0]).T, gram) <= 1e-12
    assert (
        relative_difference(ridge_solve(gram, cross, 1.0), np.linalg.solve(gram + np.eye(250), cross))
        <= 1e-11
    )
    with pytest.raises(np.linalg.LinAlgError):
        blas.cholesky_factor(gram - 1e6 * np.eye(250))
    with pytest.warns(fs.ConditionWarning):
        ridge_solve(np.ones((250, 250)), np.ones((250, 1)))
