"""KernelAFL: the dense solution of the pooled rows, landmarks that everybody draws alike, memory refused."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.linalg import qr, solve_triangular
from sklearn.datasets import make_friedman1
from sklearn.linear_model import LogisticRegression

import fedsolve as fs
from fedsolve.backends import blas, kernels_on
from fedsolve.closedform import kernel_afl
from fedsolve.closedform.landmarks import Landmarks, landmark_agreement
from fedsolve.closedform.rbf import LandmarkFactors, LandmarkKernel, check_memory
from fedsolve.errors import TermError
from fedsolve.federation.engine import Spec
from fedsolve.privacy.census import OFF
from fedsolve.threads import blas_threads
from tests.conftest import Dataset
from tests.oracle import relative_difference


def federate(data: Dataset, clients=9, **options) -> fs.LocalFederation:
    owners = fs.partition.dirichlet(data.labels, clients, alpha=0.2, seed=2)
    return fs.LocalFederation.from_arrays(data.features, data.labels, owners, clients, **options)


def normals_by_hand(seed: int, width: int, count: int) -> np.ndarray:
    """Scheme 1, number by number, as its description says."""
    key = hashlib.sha256(f"fedsolve landmarks 1|{seed}|{width}".encode()).digest()[:16]
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(3 * count * width)
    halves = words.view(np.uint16).reshape(-1, 12).astype(np.int64)
    return ((halves.sum(axis=1) - 6 * 65535) / 65536).reshape(count, width)


def dense_features(data: Dataset, count: int, seed: int = 0) -> np.ndarray:
    """Class Gaussians and kernels from all rows at once, in coordinates of the kernel's own norm."""
    x, targets = data.features - data.features.mean(axis=0), data.targets
    present = targets.sum(axis=0) > 0
    means = (targets.T @ x)[present] / targets.sum(axis=0)[present, None]
    residual = x - (targets[:, present] @ means)
    within = residual.T @ residual / len(x)
    within += 1e-8 * np.trace(within) / len(within) * np.eye(len(within))
    normals = normals_by_hand(seed, x.shape[1], count)
    points = means[np.arange(count) % len(means)] + normals @ np.linalg.cholesky(within).T
    bandwidth = 2 * np.sum(x**2) / len(x)

    def kernel(a, b):
        squares = sum((a[:, None, k] - b[None, :, k]) ** 2 for k in range(a.shape[1]))
        return np.exp(-squares / bandwidth)

    root = np.linalg.cholesky(kernel(points, points) + 1e-8 * count * np.eye(count)).T
    return solve_triangular(root, kernel(x, points).T, trans="T").T


def dense_scores(data: Dataset, count: int, ridge: float, seed: int = 0) -> np.ndarray:
    """The machine from all rows at once: least squares by QR."""
    features, targets = dense_features(data, count, seed), data.targets
    stacked = np.vstack([features, np.sqrt(ridge) * np.eye(count)])
    wanted = np.vstack([targets - targets.mean(axis=0), np.zeros((count, targets.shape[1]))])
    q, r = qr(stacked, mode="economic")
    return features @ solve_triangular(r, q.T @ wanted) + targets.mean(axis=0)


@pytest.fixture(scope="module")
def few(digits) -> Dataset:
    return digits.head(700)


@pytest.mark.parametrize("solver", ["direct", "steps"])
def test_it_is_the_dense_solution_of_the_pooled_rows(few, solver):
    method = fs.KernelAFL(landmarks=150, ridge=0.05, solver=solver, steps=100)
    model = method.fit(federate(few))
    expected = dense_scores(few, 150, 0.05)
    tolerance = {"direct": 1e-8, "steps": 1e-7}[solver]
    assert relative_difference(model.decision_function(few.features), expected) <= tolerance
    assert len(model.history) == {"direct": 2, "steps": 102}[solver]


@pytest.mark.parametrize("classes", [2, 10])
def test_the_likelihood_of_kernels_is_that_of_logistic_regression_on_them(few, classes, tmp_path):
    kept = few.labels < classes
    data = Dataset(few.features[kept], few.labels[kept])
    method = fs.KernelSoftmax(landmarks=60, ridge=0.5, scale=None, tolerance=1e-9, steps=2000)
    model = method.fit(federate(data))
    features = dense_features(data, 60)
    oracle = LogisticRegression(C=2.0, tol=1e-12, max_iter=20_000).fit(features, data.labels)
    expected = oracle.predict_proba(features)
    found = model.estimates(data.features)
    # Two classes are penalised through their difference, as in scikit-learn.
    assert np.max(np.abs(found - expected)) <= 1e-6
    model.save(tmp_path / "m.safetensors")
    assert np.array_equal(fs.load_model(tmp_path / "m.safetensors").estimates(data.features), found)
    other = method.fit(federate(data, clients=2))
    assert (
        relative_difference(other.decision_function(data.features), model.decision_function(data.features))
        <= 1e-8
    )


@pytest.mark.slow
def test_two_thousand_landmarks_against_the_dense_solution(synthetic):
    data = Dataset(synthetic.features[:3000, :16], synthetic.labels[:3000])
    expected = dense_scores(data, 2048, 0.05)
    for solver, steps, tolerance in (("direct", 1, 1e-8), ("steps", 100, 1e-7)):
        model = fs.KernelAFL(landmarks=2048, ridge=0.05, solver=solver, steps=steps).fit(federate(data))
        assert relative_difference(model.decision_function(data.features), expected) <= tolerance


def test_the_partition_and_the_memory_do_not_matter(few):
    method = fs.KernelAFL(landmarks=300, solver="steps", steps=20)
    federations = [federate(few, 9), federate(few, 40), federate(few, 9, memory_budget=600_000)]
    scores = [method.fit(federation).decision_function(few.features) for federation in federations]
    assert relative_difference(scores[1], scores[0]) <= 1e-8
    assert np.array_equal(scores[2], scores[0])


def test_kernels_kept_in_float32_are_harmless(few):
    exact, rounded = (
        fs.KernelAFL(landmarks=300, solver="steps", precision=precision).fit(federate(few))
        for precision in ("float64", "float32")
    )
    apart = relative_difference(
        rounded.decision_function(few.features), exact.decision_function(few.features)
    )
    assert 0 < apart <= 1e-5


def test_a_weight_counts_as_so_many_rows(few):
    weights = np.arange(len(few.labels)) % 3
    repeated = np.repeat(np.arange(len(few.labels)), weights)
    method = fs.KernelAFL(landmarks=64, scale="standard")
    weighted = method.fit(federate(few, sample_weight=weights))
    several = method.fit(federate(Dataset(few.features[repeated], few.labels[repeated])))
    scores = [model.decision_function(few.features) for model in (weighted, several)]
    assert relative_difference(*scores) <= 1e-9


def test_a_class_of_few_rows_has_no_landmarks(few):
    rare = np.flatnonzero(few.labels == 7)[4:]
    data = Dataset(np.delete(few.features, rare, axis=0), np.delete(few.labels, rare))
    model = fs.KernelAFL(landmarks=64).fit(federate(data))
    assert len(model.landmarks.means) == 9
    assert len(fs.KernelAFL(landmarks=64, least_rows=4).fit(federate(data)).landmarks.means) == 10
    mean = data.features[data.labels == 7].mean(axis=0) - data.features.mean(axis=0)
    assert np.min(np.linalg.norm(model.landmarks.means - mean, axis=1)) > 0.1


def test_targets_of_a_regression_have_one_gaussian(few):
    values = np.sin(few.features @ np.linspace(-1, 1, 64)) + 5.0
    owners = np.arange(len(values)) % 4
    federation = fs.LocalFederation.from_arrays(few.features, values, owners, task="regression")
    model = fs.KernelAFL(landmarks=200).fit(federation)
    assert len(model.landmarks.means) == 1
    assert model.score(few.features, values) > 0.8


def test_landmarks_have_the_moments_that_they_are_drawn_from():
    within = np.array([[2.0, 1.0], [1.0, 3.0]])
    points = Landmarks.drawn(np.array([[5.0, 0.0], [-5.0, 0.0]]), within, 40_000, 3).points()
    assert np.allclose(points[::2].mean(axis=0), [5, 0], atol=0.05)
    assert np.allclose(np.cov(points[1::2].T), within, atol=0.06)
    again = Landmarks.drawn(np.array([[5.0, 0.0], [-5.0, 0.0]]), within, 100, 3).points()
    assert np.array_equal(again, points[:100])


def test_a_server_that_draws_others_is_refused(few, monkeypatch):
    lie = {**landmark_agreement(0), "landmark_fingerprint": "0" * 32}
    monkeypatch.setattr(fs.KernelAFL, "agreement", lambda self: lie)
    with pytest.raises(fs.CohortError, match="landmarks differ") as caught:
        fs.KernelAFL(landmarks=16).fit(federate(few))
    assert isinstance(caught.value.__cause__, TermError)


def test_landmarks_follow_from_the_rows_alone():
    count = fs.KernelAFL().count
    assert [count(rows) for rows in (1, 150, 1024, 1025, 5000, 50_000, 10**7)] == [
        256, 256, 256, 512, 2048, 16_384, 32_768,
    ]  # fmt: skip
    assert fs.KernelAFL(landmarks=77).count(10**6) == 77


def test_too_little_memory_is_refused_with_what_fits(few, monkeypatch):
    with pytest.raises(fs.DataError, match=r"9\.\d GB.*landmarks=(\d+)") as caught:
        check_memory(32_768, 512, 10, 4 << 30)
    fits = int(str(caught.value).partition("landmarks=")[2].partition(",")[0])
    check_memory(fits, 512, 10, 4 << 30)
    assert 20_000 < fits < 32_768
    federation = federate(few)
    monkeypatch.setattr(kernel_afl, "available_memory", lambda: 10_000_000)
    with pytest.raises(fs.DataError, match="landmarks="):
        fs.KernelAFL(landmarks=4096).start(federation.describe())


def test_both_factors_live_in_one_square():
    rng = np.random.default_rng(0)
    points = rng.standard_normal((1100, 12))  # more than one block
    factors = LandmarkFactors(LandmarkKernel(points, 24.0), 0.5, 9000.0)
    kernel = np.exp(-((points[:, None] - points[None]) ** 2).sum(axis=2) / 24.0)
    root = np.linalg.cholesky(kernel + 1e-8 * 1100 * np.eye(1100)).T
    outer = np.linalg.cholesky(9000 / 1100 * root @ root.T + 0.5 * np.eye(1100)).T
    some = rng.standard_normal((1100, 3))
    assert relative_difference(outer @ (root @ factors.weights(some)), some) <= 1e-8
    assert relative_difference(root.T @ factors.to_features(some), some) <= 1e-8
    assert relative_difference(outer.T @ factors.outer(some), some) <= 1e-8


def test_factors_do_not_depend_on_the_number_of_threads():
    rng = np.random.default_rng(0)
    points, some = rng.standard_normal((1100, 12)), rng.standard_normal((1100, 3))
    found = []
    for threads in (1, 2):
        with blas_threads(threads):
            factors = LandmarkFactors(LandmarkKernel(points, 24.0), 0.5, 9000.0)
            found.append([factors.weights(some), factors.outer(factors.to_features(some))])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("solver", ["direct", "steps"])
def test_secure_sums_give_the_same_scores(few, solver):
    pytest.importorskip("cryptography")
    method = fs.KernelAFL(landmarks=48, solver=solver, steps=5)
    plain = method.fit(federate(few, 4))
    secure = method.fit(fs.privacy.SecureFederation(federate(few, 4), limits=OFF))
    scores = [model.decision_function(few.features) for model in (secure, plain)]
    assert relative_difference(*scores) <= 1e-6


def test_the_estimator_beats_a_line_where_classes_lie_around_each_other():
    rng = np.random.default_rng(5)
    features = rng.standard_normal((600, 2)) * [1.0, 100.0]
    labels = np.where((features**2 / [1.0, 1e4]).sum(axis=1) < 1.2, "inside", "outside")
    assert (
        fs.KernelAFLClassifier().fit(features[:400], labels[:400]).score(features[400:], labels[400:]) > 0.95
    )


@pytest.mark.torch
def test_a_server_on_a_torch_device_solves_the_same_machine(tmp_path: Path) -> None:
    """Factors, conjugate gradients and predictions on a device, and a finished checkpoint."""
    pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    features, labels = rng.normal(size=(400, 6)), rng.integers(0, 3, 400)
    method = fs.KernelAFL(landmarks=60, solver="steps", steps=5, ridge=0.1)

    def federation(device: str) -> fs.LocalFederation:
        return fs.LocalFederation.from_arrays(features, labels, np.arange(400) % 4, device=device)

    expected = method.fit(federation("cpu"))
    found = method.fit(federation("torch:cpu"), checkpoint=tmp_path / "checkpoint")
    scores = expected.decision_function(features)
    np.testing.assert_allclose(found.decision_function(features), scores, atol=1e-9)
    found.device = "torch:cpu"
    np.testing.assert_allclose(found.decision_function(features), scores, atol=1e-9)
    resumed = method.fit(federation("torch:cpu"), checkpoint=tmp_path / "checkpoint", resume=True)
    np.testing.assert_array_equal(resumed.weights, found.weights)


@pytest.mark.torch
def test_landmarks_of_a_device_have_the_same_normals() -> None:
    pytest.importorskip("torch")
    here, device = kernels_on("cpu"), kernels_on("torch:cpu")
    key = 12345678901234567890
    np.testing.assert_array_equal(device.host(device.normals(key, 999)), here.normals(key, 999))


@pytest.mark.torch
def test_blocks_on_a_device_are_those_of_the_host(monkeypatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(blas, "BLOCK", 16)
    rng = np.random.default_rng(0)
    points, some = rng.standard_normal((70, 5)), rng.standard_normal((70, 3))
    device = kernels_on("torch:cpu")
    found, expected = (
        LandmarkFactors(LandmarkKernel(each, 9.0), 0.5, 400.0) for each in (device.array(points), points)
    )
    for name in ("weights", "inner", "outer", "from_features", "to_features"):
        there = device.host(getattr(found, name)(device.array(some)))
        assert relative_difference(there, getattr(expected, name)(some)) <= 1e-10
    # Beside the square only blocks of its diagonal are kept.
    kept = [found._square, *found._lower, *found._upper]
    assert sum(array.numel() for array in kept) <= 70 * 70 + 2 * 70 * 16
    with pytest.raises(fs.DataError, match="not distinct"):
        LandmarkFactors(LandmarkKernel(device.array(np.full((40, 5), np.nan)), 9.0), 0.5, 400.0)


@pytest.mark.torch
@pytest.mark.parametrize(
    "method",
    [
        fs.KernelAFL(landmarks=50, solver="direct", ridge="auto"),
        fs.KernelSoftmax(landmarks=40, ridge=0.1, tolerance=1e-9),
        fs.KernelSoftmax(landmarks=40, ridge=0.1, curvature="bound", tolerance=1e-9),
        fs.Softmax(ridge=0.5, tolerance=1e-9),
    ],
    ids=["direct", "exact", "bound", "softmax"],
)
def test_direct_solves_and_likelihoods_on_a_device(method) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    features, labels = rng.normal(size=(400, 6)), rng.integers(0, 3, 400)
    models = []
    for device in ("cpu", "torch:cpu"):
        federation = fs.LocalFederation.from_arrays(features, labels, np.arange(400) % 4, device=device)
        models.append(method.fit(federation, calibrate=True))
        assert federation.evaluate(models[-1]) == models[0].score(features, labels)
    on_device = models[1].placed("torch:cpu")
    np.testing.assert_allclose(
        on_device.predict_proba(features), models[0].predict_proba(features), atol=1e-8
    )
    if isinstance(method, fs.KernelAFL):
        np.testing.assert_allclose(on_device.transform(features), models[0].transform(features), atol=1e-6)
        np.testing.assert_allclose(on_device.whitening(), models[0].whitening(), rtol=1e-6, atol=1e-6)


def test_autos_kernel_machine_is_no_smaller_than_the_default():
    spec = federate_spec(512, 100)
    for rows in (5_000, 50_000, 70_000, 10**6):
        found = [one for one in fs.Auto().candidates(spec, rows) if one.key == "kernelafl"]
        assert {one.landmarks for one in found} == {fs.KernelAFL().count(rows)}


def test_seconds_and_memory_are_turned_into_landmarks():
    spec = dataclasses.replace(federate_spec(512, 100), device="cuda:0")
    counts = [fs.Auto(seconds=seconds).afforded(spec).landmarks for seconds in (0.1, 1, 10, 20)]
    assert counts == sorted(counts)
    assert counts[-1] == 65_536, "twenty seconds of a device, as measured"
    assert fs.Auto(seconds=20, memory=20.0).afforded(spec).landmarks == 32_768
    few = fs.Auto(memory=0.01).afforded(spec)
    assert 8 * few.landmarks**2 < 0.01e9
    assert few.seconds is few.memory is None, "what travels is the number of landmarks"
    machines = [one for one in few.candidates(spec, 50_000) if one.key == "kernelafl"]
    assert {one.landmarks for one in machines} == {few.landmarks}


def test_on_a_device_nothing_set_means_eight_seconds_and_the_memory_there_is(monkeypatch):
    spec, free = dataclasses.replace(federate_spec(512, 100), device="cuda:0"), [80e9]
    device = SimpleNamespace(budget=lambda granted: int(free[0]))
    monkeypatch.setattr("fedsolve.closedform.auto.kernels_on", lambda name: device)
    assert fs.Auto().afforded(spec).landmarks == 32_768
    free[0] = 4e9
    assert fs.Auto().afforded(spec).landmarks == 16_384
    assert fs.Auto(landmarks=100).afforded(spec).landmarks == 100
    assert fs.Auto(memory=20.0).afforded(spec) == fs.Auto(landmarks=32_768)
    host = federate_spec(512, 100)
    assert fs.Auto().afforded(host) == fs.Auto(), "the host tries as many as KernelAFL has"


def federate_spec(features: int, classes: int) -> Spec:
    return Spec(features, np.arange(classes), classes, "bytes")


def test_a_small_ridge_of_a_direct_solve_does_not_show_who_owns_what():
    """K_MM is nearly singular at this bandwidth; sums of kernels themselves differ by 1e-6 here."""
    features, targets = make_friedman1(600, noise=1.0, random_state=0)
    method = fs.KernelAFL(landmarks=225, bandwidth=5.0, ridge="auto", scale="standard")
    found = []
    for clients, seed in ((1, 0), (3, 1), (50, 2)):
        owners = np.random.default_rng(seed).integers(0, clients, 450)
        federation = fs.LocalFederation.from_arrays(features[:450], targets[:450], owners, clients)
        found.append(method.fit(federation).predict(features[450:]))
    for other in found[1:]:
        assert np.abs(other - found[0]).max() <= 1e-10 * np.abs(found[0]).max()
