"""The papers' variants against direct, centralised computation on pooled data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform.cascade import Cascade
from fedsolve.closedform.separability import class_sums, separability
from fedsolve.experiments.cells import flip_labels

RNG = np.random.default_rng(11)
X = RNG.standard_normal((600, 9))
LABELS = np.argmax(np.c_[X[:, 0] * X[:, 1], X[:, 2], np.sin(2 * X[:, 3]), 0.3 * X[:, 4] ** 2], axis=1)
Y = np.eye(4)[LABELS]
WIDTH, LAYERS, RIDGE, GAMMA = 24, 4, 0.7, 0.05


def federation(clients: int, **options: Any) -> fs.LocalFederation:
    owners = fs.partition.dirichlet(LABELS, clients, 0.05)
    return fs.LocalFederation.from_arrays(X, LABELS, owners, clients=clients, **options)


def uniforms(role: str, layer: int, inputs: int, outputs: int, seed: int = 0) -> np.ndarray:
    text = f"fedsolve projection 1|{seed}|{role}|{layer}|{inputs}|{outputs}"
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw((inputs + 1) * outputs) >> np.uint64(11)
    return ((2 * (raw * 2.0**-53) - 1) / np.sqrt(inputs)).reshape(inputs + 1, outputs)


def affine(rows: np.ndarray, matrix: np.ndarray, bias: bool = True) -> np.ndarray:
    return rows @ matrix[:-1] + (matrix[-1] if bias else 0.0)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def ridge(phi: np.ndarray, target: np.ndarray) -> np.ndarray:
    return np.linalg.solve(phi.T @ phi + RIDGE * np.eye(phi.shape[1]), phi.T @ target)


def kronecker(hidden: np.ndarray, target: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Omega of min |target - F Omega W|² + gamma |Omega|² by its normal equations written out."""
    system = np.kron(weight @ weight.T, hidden.T @ hidden)
    system += GAMMA * np.eye(len(system))
    right = (hidden.T @ target @ weight.T).reshape(-1, order="F")
    return np.linalg.solve(system, right).reshape(hidden.shape[1], weight.shape[0], order="F")


def centralised(variant: dict[str, Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Classifiers and transformations of a variant on pooled data, by direct formulas."""
    bias = variant.get("bias", True)
    phi = initial = np.tanh(affine(X, uniforms("zero", 0, 9, WIDTH), bias))
    classifiers, omegas = [ridge(phi, Y)], []
    rho = 1.0 - variant.get("reconstruction", 0.0)
    for layer in range(LAYERS):
        weight = classifiers[-1]
        inner = phi
        if variant.get("projection") != "identity":
            inner = affine(phi, uniforms("hidden", layer, WIDTH, WIDTH), bias)
        hidden = inner if variant.get("activation") == "none" else gelu(inner)
        skipped = phi if variant.get("skip", True) else 0.0 * phi
        if variant.get("transformation") == "identity":
            omega = np.eye(WIDTH)
        elif rho < 1.0:
            decoder = ridge(phi, initial)
            targets = np.hstack(
                [np.sqrt(rho) * (Y - phi @ weight), np.sqrt(1 - rho) * (initial - phi @ decoder)]
            )
            both = np.hstack([np.sqrt(rho) * weight, np.sqrt(1 - rho) * decoder])
            omega = kronecker(hidden, targets, both)
        else:
            omega = kronecker(hidden, Y - skipped @ weight, weight)
        phi = skipped + hidden @ omega
        omegas.append(omega)
        classifiers.append(ridge(phi, Y))
    return classifiers, omegas


VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "no bias": {"bias": False},
    "no skip": {"skip": False},
    "identity projection": {"projection": "identity"},
    "no activation": {"activation": "none"},
    "identity transformation": {"transformation": "identity"},
    "reconstruction": {"reconstruction": 0.4},
}


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


@pytest.mark.parametrize("clients", [1, 13])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_direct_computation(name: str, clients: int) -> None:
    method = fs.DeepAFL(layers=LAYERS, width=WIDTH, ridge=RIDGE, residual_ridge=GAMMA, **VARIANTS[name])
    model = method.fit(federation(clients))
    classifiers, omegas = centralised(VARIANTS[name])
    for mine, theirs in zip(model.classifiers, classifiers, strict=True):
        assert relative(mine, theirs) < 1e-9
    for block, omega in zip(model.blocks, omegas, strict=True):
        assert relative(np.eye(WIDTH) if block is None else block.omega, omega) < 1e-9
    expected = LAYERS + 1 if name == "identity transformation" else 2 * LAYERS + 1
    assert len(model.history) == expected == method.start(federation(1).describe()).exchanges


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_prediction_file_and_resume(name: str, tmp_path: Path) -> None:
    method = fs.DeepAFL(layers=2, width=WIDTH, **VARIANTS[name])

    class Stop(Exception):
        pass

    def stop(record: Any, expected: int) -> None:
        if record.exchange == 1:
            raise Stop

    with pytest.raises(Stop):
        method.fit(federation(5), checkpoint=tmp_path / "c", follow=stop)
    resumed = method.fit(federation(5), checkpoint=tmp_path / "c", resume=True)
    resumed.save(tmp_path / "resumed")
    method.fit(federation(5, memory_budget=0)).save(tmp_path / "whole")
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    loaded = fs.load_model(tmp_path / "whole")
    np.testing.assert_array_equal(loaded.decision_function(X), resumed.decision_function(X))
    assert federation(5).evaluate(loaded) == loaded.score(X, LABELS)


@pytest.mark.parametrize("bias", [True, False])
def test_a_cascade_with_and_without_a_bias(bias: bool) -> None:
    """Strategy 3: its first classifier rests on the first projection alone, the only one with a bias."""
    model = Cascade(layers=0, width=WIDTH, ridge=RIDGE, bias=bias).fit(federation(6))
    phi = np.tanh(affine(X, uniforms("zero", 0, 9, WIDTH), bias))
    assert relative(model.classifiers[0], ridge(phi, Y)) < 1e-9


def test_reconstruction_with_partial_participation() -> None:
    model = fs.DeepAFL(layers=3, width=WIDTH, reconstruction=0.3, participation=0.5).fit(federation(8))
    assert np.all(np.isfinite(model.classifiers[-1]))
    assert len(model.history) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip": False, "exchange": "lean"}, "runs on the textbook plan; got exchange='lean'"),
        ({"projection": "none"}, "'random' or 'identity'; got 'none'"),
        ({"transformation": "x"}, "'solved' or 'identity'; got 'x'"),
        ({"reconstruction": 1.0}, r"\[0, 1\); got 1.0"),
        ({"transformation": "identity", "hidden_width": 7}, r"hidden_width = width \(24\); got 7"),
        ({"reconstruction": 0.5, "skip": False}, "needs skip=True"),
    ],
)
def test_bad_variants(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.DataError, match=message):
        fs.DeepAFL(layers=1, width=WIDTH, **arguments)


@pytest.mark.parametrize("strategy", [1, 2, 3, 4])
def test_cascade_equals_the_direct_computation(strategy: int, tmp_path: Path) -> None:
    phi = np.tanh(affine(X, uniforms("zero", 0, 9, WIDTH)))
    expected = [ridge(phi, Y)]
    for layer in range(3):
        passed = phi @ expected[-1]
        if strategy in (2, 4):
            passed = passed @ uniforms("encoding", layer, 4, 4)[:-1]
        phi = passed @ uniforms("cascade", layer, 4, WIDTH)[:-1]
        phi = gelu(phi) if strategy in (3, 4) else phi
        expected.append(ridge(phi, Y))
    model = Cascade(strategy=strategy, layers=3, width=WIDTH, ridge=RIDGE).fit(federation(13))
    assert len(model.history) == 4
    for mine, theirs in zip(model.classifiers, expected, strict=True):
        assert relative(mine, theirs) < 1e-9
    np.testing.assert_allclose(model.decision_function(X), phi @ expected[-1], rtol=1e-9, atol=1e-12)
    model.save(tmp_path / "m")
    np.testing.assert_array_equal(fs.load_model(tmp_path / "m").predict(X), model.predict(X))
    assert model.staged_score(X, LABELS).shape == (4,)


def test_cascade_resumes(tmp_path: Path) -> None:
    method = Cascade(layers=2, width=WIDTH)
    whole = method.fit(federation(3), checkpoint=tmp_path / "c")
    again = method.fit(federation(3), checkpoint=tmp_path / "c", resume=True)
    np.testing.assert_array_equal(whole.classifiers[-1], again.classifiers[-1])
    with pytest.raises(fs.DataError, match=r"strategy must be a whole number in \[1, 4\]; got 5"):
        Cascade(strategy=5)


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 1.0])
def test_label_noise_changes_exactly_its_share(rate: float) -> None:
    noisy = flip_labels(LABELS, rate, seed=3)
    assert int(np.sum(noisy != LABELS)) == round(rate * len(LABELS))
    assert set(noisy) <= set(LABELS)
    np.testing.assert_array_equal(noisy, flip_labels(LABELS, rate, seed=3))


def test_label_noise_is_uniform_over_the_other_classes() -> None:
    noisy = flip_labels([*[0] * 9000, 1, 2, 3], 1.0)[:9000]
    counts = np.bincount(noisy, minlength=4)
    assert counts[0] == 0
    assert np.all(np.abs(counts[1:] - 3000) < 5 * np.sqrt(3000))


def test_label_noise_refuses_nonsense() -> None:
    with pytest.raises(fs.DataError, match=r"\[0, 1\]; got 1.5"):
        flip_labels(LABELS, 1.5)
    with pytest.raises(fs.DataError, match="single class"):
        flip_labels([1, 1], 0.5)


def test_separability_equals_direct_formulas_and_adds_up() -> None:
    classes = np.arange(5)  # class 4 has no rows
    parts = [class_sums(X[rows], LABELS[rows], classes) for rows in np.array_split(np.arange(600), 7)]
    measured = separability(np.sum(parts, axis=0))
    groups = [X[c == LABELS] for c in range(4)]
    means = np.array([g.mean(axis=0) for g in groups])
    within = np.array([np.mean(np.sum((g - g.mean(axis=0)) ** 2, axis=1)) for g in groups])
    pairs = [np.sum((means[i] - means[j]) ** 2) for i in range(4) for j in range(i)]
    spread = np.mean(np.sum((means - means.mean(axis=0)) ** 2, axis=1))
    scatter = sum(np.sum((g - g.mean(axis=0)) ** 2) for g in groups)
    between = sum(len(g) * np.sum((g.mean(axis=0) - X.mean(axis=0)) ** 2) for g in groups)
    assert measured["csr"] == pytest.approx(within.mean() / np.mean(pairs), rel=1e-12)
    assert measured["ifs"] == pytest.approx(within.mean() / spread, rel=1e-12)
    assert measured["dm"] == pytest.approx(scatter / between, rel=1e-12)
    with pytest.raises(fs.DataError, match="two classes"):
        separability(class_sums(X[:3], np.zeros(3, dtype=int), classes))
