"""Every kernel in torch gives what it gives in numpy, and so does every method, whatever the device."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import container
from fedsolve.arrays import philox_uniforms
from fedsolve.backends import NUMPY, host, kernels_of, kernels_on
from fedsolve.backends.activations import ACTIVATIONS
from fedsolve.backends.blas import add_product, factor_in_place
from fedsolve.backends.devices import resolve, triton_works
from fedsolve.backends.torch_kernels import TorchKernels
from fedsolve.closedform.predictors import DeepModel
from fedsolve.closedform.projections import projection
from fedsolve.closedform.solvers import Sandwich, ridge_solve, sandwich_solve
from fedsolve.closedform.sums import Rows
from fedsolve.errors import DataError, TermError
from fedsolve.federation.messages import Term
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import FedAvg
from fedsolve.tables.schema import Column, Schema
from tests.command import fedsolve
from tests.oracle import relative_difference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

DEVICES = [
    "torch:cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
        ],
    ),
]

METHODS: dict[str, Any] = {
    "afl": fs.AFL(ridge=0.1),
    "afl without a ridge": fs.AFL(),
    "afl, scaled, with an intercept": fs.AFL(scale="standard", intercept=True),
    "deepafl": fs.DeepAFL(layers=3, width=64),
    "deepafl, wide hidden features": fs.DeepAFL(layers=2, width=48, hidden_width=80),
    "deepafl, textbook": fs.DeepAFL(layers=2, width=64, exchange="textbook"),
    "deepafl, single": fs.DeepAFL(
        layers=3, width=64, exchange="single", scale="standard", intercept=True, track="accuracy"
    ),
    "deepafl without a ridge": fs.DeepAFL(layers=2, width=32, residual_ridge=0.0),
    "deepafl, no skip": fs.DeepAFL(layers=2, width=64, skip=False),
    "deepafl, identities": fs.DeepAFL(layers=2, width=64, transformation="identity", projection="identity"),
    "deepafl, reconstruction": fs.DeepAFL(layers=2, width=64, reconstruction=0.3),
    "deepafl, initial": fs.DeepAFL(layers=2, width=64, block_input="initial"),
    "deepafl, half of the clients": fs.DeepAFL(layers=3, width=64, participation=0.5),
    "cascade": fs.Cascade(layers=2, width=64, strategy=4),
    "apfl": fs.APFL(width=64, refinement_width=32),
}


def federation(device: str | None, **settings: Any) -> fs.LocalFederation:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((900, 40)).astype(settings.pop("dtype", "float64"))
    labels = (features[:, :5] + 0.5 * rng.standard_normal((900, 5))).argmax(axis=1)
    return fs.LocalFederation.from_arrays(
        features, labels, rng.integers(0, 7, 900), 8, device=device, **settings
    )


def numbers(model: Any) -> dict[str, Any]:
    """A model's arrays; blocks as products, for the signs of their factors are free."""
    arrays = dict(model.arrays())
    primary = getattr(model, "primary", model)
    if isinstance(primary, DeepModel):
        arrays = {name: array for name, array in arrays.items() if not name.startswith(("left.", "right."))}
        arrays |= {f"omega.{t}": block.omega for t, block in enumerate(primary.blocks) if block is not None}
    return arrays


def farthest(one: Any, other: Any) -> float:
    assert {n: (a.shape, a.dtype) for n, a in one.arrays().items()} == {
        n: (a.shape, a.dtype) for n, a in other.arrays().items()
    }
    mine, yours = numbers(one), numbers(other)
    assert all(np.array_equal(mine[name], yours[name]) for name in mine if not np.any(yours[name]))
    return max(relative_difference(mine[name], yours[name]) for name in mine if np.any(yours[name]))


def costs(model: Any) -> list[Any]:
    """What each exchange was, except how long it took."""
    records = [dataclasses.replace(record, seconds=0.0, risk=None) for record in model.history]
    return [record.as_dict() for record in records]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_gives_the_same_model_and_report_on_every_device(method, device, tmp_path):
    there, here = (method.fit(federation(place)) for place in ("cpu", device))
    assert farthest(here, there) <= 1e-8
    assert costs(here) == costs(there)
    rows = np.random.default_rng(1).standard_normal((50, 40))
    assert relative_difference(here.decision_function(rows), there.decision_function(rows)) <= 1e-8
    here.save(tmp_path / "model.safetensors")
    assert np.array_equal(fs.load_model(tmp_path / "model.safetensors").predict(rows), here.predict(rows))


LIKELY: dict[str, Any] = {
    "softmax": fs.Softmax(ridge=1.0, tolerance=1e-6),
    "softmax, exact": fs.Softmax(ridge=1.0, scale="standard", curvature="exact"),
    "kernels, direct": fs.KernelAFL(landmarks=80, ridge=0.1),
    "kernels, steps": fs.KernelAFL(landmarks=80, solver="steps", steps=8, scale="standard"),
    "kernels, float32": fs.KernelAFL(landmarks=80, solver="steps", steps=3, precision="float32"),
    "likelihood of kernels": fs.KernelSoftmax(landmarks=40, ridge=0.1),
    "auto": fs.Auto(methods="afl,softmax,kernelafl"),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", LIKELY.values(), ids=LIKELY)
@pytest.mark.parametrize("classes", [2, 5])
def test_heads_score_alike_on_every_device(method, device, classes):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((300, 12))
    y = (x[:, :classes] + 0.5 * rng.standard_normal((300, classes))).argmax(axis=1)
    owners, weights = rng.integers(0, 5, 300), rng.random(300)
    here, there = (
        method.fit(fs.LocalFederation.from_arrays(x, y, owners, 5, sample_weight=weights, device=place))
        for place in (device, "cpu")
    )
    tolerance = 1e-6 if getattr(method, "precision", "") == "float32" else 1e-8
    assert relative_difference(here.decision_function(x), there.decision_function(x)) <= tolerance
    assert [record.kind for record in here.history] == [record.kind for record in there.history]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {"sample_weight": np.random.default_rng(2).random(900)},
        {"memory_budget": 1000},
        {"dtype": "float32"},
        {"task": "regression"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_weights_mapped_features_and_targets_are_the_same_on_every_device(settings, device):
    method = fs.DeepAFL(layers=2, width=64)
    there, here = (method.fit(federation(place, **settings)) for place in ("cpu", device))
    assert farthest(here, there) <= 1e-8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8", ">i2", "longdouble"])
def test_features_of_any_byte_order_and_length_are_the_same_on_every_device(dtype, device):
    rng = np.random.default_rng(0)
    features, labels = (10 * rng.standard_normal((200, 6))).astype(dtype), np.arange(200) % 3
    trained = FedAvg(rounds=1, network="linear").fit(fs.LocalFederation.from_arrays(features, labels, labels))
    assert np.all(np.isfinite(trained.decision_function(features.astype(np.float64))))
    for method in (fs.AFL(ridge=0.1), fs.DeepAFL(layers=1, width=16)):
        for budget in ({}, {"memory_budget": 1000}):
            given = (labels, labels)
            here = method.fit(fs.LocalFederation.from_arrays(features, *given, device=device, **budget))
            there = method.fit(fs.LocalFederation.from_arrays(features.astype(np.float64), *given))
            assert farthest(here, there) <= 1e-8


@pytest.mark.parametrize("device", DEVICES)
def test_features_of_any_type_are_placed_in_one_that_a_device_has(device):
    for given, expected in ((">f4", "float32"), ("longdouble", "float64"), (">i2", "float64")):
        data = ClientData(np.ones((4, 2), dtype=given), np.arange(4))
        placed = data.placed(kernels_on(device))
        assert placed is None or str(placed.dtype) == f"torch.{expected}"


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_goes_on_where_it_was_left_on_another_device(device, tmp_path):
    method, checkpoint = fs.DeepAFL(layers=3, width=48), tmp_path / "run.checkpoint"
    whole = method.fit(federation("cpu"))

    def stop(record: Any, expected: int) -> None:
        if record.exchange == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.fit(federation(device), checkpoint, follow=stop)
    resumed = method.fit(federation("cpu"), checkpoint, resume=True)
    assert farthest(resumed, whole) <= 1e-8


@pytest.mark.parametrize("device", DEVICES)
def test_clients_may_compute_in_different_places(device):
    mixed = federation("cpu")
    for participant in mixed.participants[::2]:
        participant.move(device)
    method = fs.DeepAFL(layers=2, width=48)
    assert farthest(method.fit(mixed), method.fit(federation("cpu"))) <= 1e-8


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_kernel_gives_what_it_gives_in_numpy(device, dtype):
    kernels, rng = kernels_on(device), np.random.default_rng(3)
    rows, other = (rng.standard_normal((70, 12)).astype(dtype) for _ in range(2))
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-4}

    def same(compute: Any) -> None:
        here = compute(kernels, *(kernels.array(array.copy()) for array in (rows, other)))
        there = compute(NUMPY, rows.copy(), other.copy())
        np.testing.assert_allclose(kernels.host(here), there, **close)

    for name in ACTIVATIONS:
        same(lambda k, a, b, name=name: k.activate(name, a))
    same(lambda k, a, b: k.matmul(a, b.T))
    same(lambda k, a, b: k.affine(a, b.T, k.array(np.arange(70, dtype=dtype))))
    same(lambda k, a, b: k.beside(a, b))
    same(lambda k, a, b: k.where(a > 0, b, 7.0))
    same(lambda k, a, b: k.one_hot(k.array(np.arange(6) % 4), 4, dtype))

    def summed(k: Any, a: Any, b: Any) -> Any:
        gram, cross, product = (k.empty(shape, dtype) for shape in ((12, 12), (12, 12), (70, 70)))
        k.gram(a, gram)
        k.gram(b, gram, accumulate=True)
        k.cross(a, b, cross)
        k.cross(b, a, cross, accumulate=True)
        k.matmul(a, b.T, product)
        k.add_matmul(b, a.T, product)
        k.add_diagonal(cross, 2.0)
        return k.mirror(gram) + cross + product[:12, :12]

    same(summed)


@pytest.mark.parametrize("device", DEVICES)
def test_factorisations_solve_what_they_factor(device):
    kernels, rng = kernels_on(device), np.random.default_rng(4)
    factors = rng.standard_normal((60, 20))
    system, right = factors.T @ factors, rng.standard_normal((20, 3))
    for least in (0.0, 1e-3):
        factor = kernels.cholesky(kernels.array(system.copy()), least)
        found = kernels.host(kernels.cholesky_solve(factor, kernels.array(right)))
        np.testing.assert_allclose(system @ found, right, atol=1e-10)
    assert kernels.cholesky(kernels.array(np.ones((4, 4)))) is None
    assert kernels.cholesky(kernels.array(np.diag([1.0, 1e-17]))) is None
    values, vectors = map(kernels.host, kernels.eigh(kernels.array(system)))
    np.testing.assert_allclose((vectors * values) @ vectors.T, system, atol=1e-10)
    for shape in ((40, 6), (6, 40), (7, 6), (5, 5), (3, 1)):
        matrix = rng.standard_normal(shape)
        left, singular, z = kernels.thin_svd(kernels.array(matrix))
        for found, expected in zip(
            map(kernels.host, (left, singular, z)), NUMPY.thin_svd(matrix), strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_singular_systems_are_seen_on_every_device(device):
    kernels = kernels_on(device)
    factors = np.random.default_rng(5).standard_normal((5, 12))
    gram, cross = factors.T @ factors, factors.T @ np.ones((5, 2))
    with pytest.warns(fs.ConditionWarning, match="rank 5"):
        found = ridge_solve(kernels.array(gram), kernels.array(cross))
    np.testing.assert_allclose(kernels.host(found), np.linalg.pinv(factors) @ np.ones((5, 2)), atol=1e-10)
    weight = np.random.default_rng(6).standard_normal((9, 3))
    here = sandwich_solve(*map(kernels.array, (gram, cross @ np.ones((2, 3)), weight)), 0.0)
    there = sandwich_solve(gram, cross @ np.ones((2, 3)), weight, 0.0)
    assert relative_difference(host(here.omega), there.omega) <= 1e-9


def test_arrays_say_where_they_lie():
    assert kernels_of(np.zeros(2)) is NUMPY
    assert kernels_on("cpu") is NUMPY
    assert kernels_of(torch.zeros(2)) is kernels_on("torch:cpu")
    with pytest.raises(DataError, match="cannot compute these"):
        kernels_on("meta")


@pytest.mark.parametrize("wrong", [3, None, ["cpu"], b"cpu"])
def test_a_device_that_is_no_text_is_refused_by_name(wrong):
    with pytest.raises(DataError, match=r"device must be a name; got .*'torch:cpu', 'cuda', 'cuda:1'"):
        resolve(wrong)
    if wrong is not None:
        with pytest.raises(DataError, match="device must be a name"):
            fs.LocalFederation.from_arrays(np.ones((2, 2)), [0, 1], [0, 1], device=wrong)


# -- a device is no parameter ----------------------------------------------------------------------


def test_the_command_trains_on_a_device(tmp_path):
    rows = np.random.default_rng(7).standard_normal((120, 8))
    np.savez(tmp_path / "rows.npz", x=rows, y=rows[:, :3].argmax(axis=1))
    common = ("train", tmp_path / "rows.npz", "--layers", "1", "--width", "16", "--json")
    made = [tmp_path / "numpy.safetensors", tmp_path / "torch.safetensors"]
    told = [
        json.loads(fedsolve(*common, "--out", path, "--device", device).stdout)
        for path, device in zip(made, ("cpu", "torch:cpu"), strict=True)
    ]
    assert told[0]["bytes_up"] == told[1]["bytes_up"]
    assert told[0]["parameters"] == told[1]["parameters"]
    assert farthest(*map(fs.load_model, made)) <= 1e-8
    notes = [container.from_bytes(path.read_bytes(), what="model", error=DataError)[1] for path in made]
    assert notes[0].keys() == notes[1].keys()


# -- clients that share a device -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_projections_have_the_same_bits_everywhere(device, dtype):
    for inputs, outputs in ((1, 1), (7, 9), (40, 33)):
        place = (5, "hidden", 2, inputs, outputs, 1.5, dtype)
        there, here = projection(*place), projection(*place, kernels_on(device))
        assert np.array_equal(kernels_on(device).host(here.weight), there.weight)
        assert np.array_equal(kernels_on(device).host(here.bias), there.bias)
    for key in (0, 1, (1 << 64) + 5, (1 << 128) - 1):
        for count in (1, 4, 1003):
            drawn = kernels_on(device).host(kernels_on(device).uniforms(key, count))
            assert np.array_equal(drawn, philox_uniforms(key, count))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_draws_its_projections_itself():
    assert triton_works()


def test_without_triton_projections_come_from_the_host(monkeypatch):
    kernels = TorchKernels("torch:cpu")
    monkeypatch.setattr(kernels, "_cuda", True)
    triton_works.cache_clear()
    with pytest.warns(RuntimeWarning, match="C compiler"):
        drawn = kernels.uniforms(5, 9)
    assert np.array_equal(drawn.numpy(), philox_uniforms(5, 9))
    triton_works.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
def test_clients_of_a_device_answer_with_one_set_of_products(device, monkeypatch):
    asked: list[int] = []
    spans = Rows.spans
    monkeypatch.setattr(Rows, "spans", lambda self, *more: asked.append(len(self)) or spans(self, *more))
    monkeypatch.setattr(TorchKernels, "budget", lambda self, granted: 1 << 30)  # torch:cpu places none else
    whole = federation(device)
    whole.place_rows()
    placed: list[int] = []
    features = ClientData.features
    monkeypatch.setattr(
        ClientData, "features", lambda self, *more: placed.append(len(self)) or features(self, *more)
    )
    fs.DeepAFL(layers=2, width=32).fit(whole)
    assert not placed  # the copy that was made before is used
    assert asked == [900] * 5
    asked.clear()
    gone = whole.remove("client-3")  # the others' rows are neighbours no more
    fs.DeepAFL(layers=2, width=32).fit(whole)
    assert asked == [900 - len(gone)] * 5
    asked.clear()
    fs.DeepAFL(layers=2, width=32).fit(federation("cpu"))
    assert len(asked) == 5 * 8


@pytest.mark.parametrize("device", DEVICES)
def test_a_client_that_cannot_answer_is_named_and_the_others_go_on(device):
    def one_bad(missing: str) -> fs.LocalFederation:
        whole = federation(device, missing=missing, classes=[0, 1, 2, 3, 4])
        bad = whole.participants[3]
        bad.data.labels = np.where(np.isin(np.arange(900), bad.data.rows), 9, bad.data.labels)
        return whole

    method = fs.DeepAFL(layers=1, width=16)
    with pytest.raises(DataError, match="'client-3'"):
        method.fit(one_bad("error"))
    model = method.fit(one_bad("continue"))
    assert [list(record.missing) for record in model.history] == [["client-3"]] * 3
    left = federation("cpu")
    left.remove("client-3")
    assert farthest(model, method.fit(left)) <= 1e-8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exchange", [0, 1, 2])
def test_who_joins_leaves_moves_or_has_other_rows_counts_from_the_next_exchange_on(device, exchange):
    def other_rows(client: Any) -> ClientData:
        return ClientData(2.0 * client.data.features(slice(None)), client.data.own_labels)

    def leave(whole: fs.LocalFederation) -> None:
        whole.remove("client-3")

    def join(whole: fs.LocalFederation) -> None:
        whole.add(Participant("newcomer", other_rows(whole.participants[2])))

    def change(whole: fs.LocalFederation) -> None:
        whole.add(Participant("client-3", other_rows(whole.remove("client-3"))))

    def empty(whole: fs.LocalFederation) -> None:
        left = whole.remove("client-3")
        whole.add(Participant("client-3", left.data.taking(np.zeros(len(left), dtype=bool))))

    def move(whole: fs.LocalFederation) -> None:
        for client in whole.participants[::2]:
            client.move("cpu")

    method = fs.DeepAFL(layers=2, width=24)
    for happens in (leave, join, change, empty, move):
        models, took_part = [], []
        for place in (device, "cpu"):
            whole = federation(place)
            method.fit(whole)  # what a pool keeps is there
            run = method.start(whole.describe())
            for number, _ in enumerate(exchanges(run, whole)):
                if number == exchange:
                    happens(whole)
            models.append(run.model())
            took_part.append([(record.cohort, record.empty) for record in run.history])
        assert farthest(*models) <= 1e-8
        assert took_part[0] == took_part[1]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_replace_others_are_those_of_the_next_run(device):
    models = []
    for place in (device, "cpu"):
        whole = federation(place)
        fs.DeepAFL(layers=1, width=24, seed=1).fit(whole)
        for client in whole.participants[:3]:
            client.data = client.data.taking(np.arange(len(client)) % 2 == 0)
        whole.participants[3].data = whole.participants[3].data.taking(
            np.zeros(len(whole.participants[3]), dtype=bool)
        )
        models.append(fs.DeepAFL(layers=2, width=24).fit(whole))
    assert farthest(*models) <= 1e-8
    assert costs(models[0]) == costs(models[1])
    assert "client-3" in models[0].history[0].empty


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("plan", ["lean", "single", "textbook"])
def test_a_run_on_a_device_goes_on_after_any_exchange(device, plan, precision):
    method = fs.DeepAFL(layers=3, width=24, exchange=plan, precision=precision)
    whole = federation(device)
    expected = method.fit(whole)
    run = method.start(whole.describe())
    for record in exchanges(run, whole):
        resumed = method.start(whole.describe())
        resumed.restore(run.to_bytes(), "a checkpoint")
        for _ in exchanges(resumed, federation(device)):
            pass
        assert farthest(resumed.model(), expected) <= (1e-8 if precision == "float64" else 1e-3), record


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_not_finite_are_refused_by_name_wherever_they_lie(device):
    here = kernels_on(device).array
    good, bad = np.ones((3, 3)), np.array([1.0, np.inf, -np.inf], dtype=np.float32)
    term = Term({"first": here(good), "second": here(bad), "third": good, "whole": here(np.arange(3))})
    with pytest.raises(TermError, match="'north': 'second' contains NaN"):
        term.check_finite("north")
    term.arrays["second"] = here(good)
    term.check_finite("north")


@pytest.mark.parametrize("device", DEVICES)
def test_prepared_tables_are_pooled_too(device):
    schema = Schema(tuple(Column(f"c{number}") for number in range(40)), label="y")
    method = fs.Recipe(fs.DeepAFL(layers=1, width=24), schema)
    there, here = (method.fit(federation(place, schema=schema)) for place in ("cpu", device))
    assert farthest(here, there) <= 1e-8
    assert costs(here) == costs(there)


@pytest.mark.parametrize("device", DEVICES)
def test_secure_sums_take_each_client_by_itself(device):
    pytest.importorskip("cryptography")
    from fedsolve.privacy.secure import SecureFederation

    method = fs.AFL(ridge=0.1)
    there, here = (method.fit(SecureFederation(federation(place))) for place in ("cpu", device))
    assert farthest(here, there) <= 1e-8
    assert here.history[0].error_bounds == there.history[0].error_bounds


@pytest.mark.parametrize("columns", [1, 7])
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_a_block_is_solved_by_factors_as_by_eigenvalues(device, columns, monkeypatch):
    kernels, rng = kernels_on(device), np.random.default_rng(8)
    hidden, weight = rng.standard_normal((300, 60)), 0.1 * rng.standard_normal((40, columns))
    if columns > 1:
        weight[:, -1] = weight[:, -2]  # a direction in which W vanishes
    gram, residual = hidden.T @ hidden, hidden.T @ rng.standard_normal((300, columns))

    def solved(by_factors: bool, matrix: np.ndarray, ridge: float = 0.01) -> Any:
        monkeypatch.setattr(type(kernels), "prefers_shifts", lambda *sizes: by_factors)
        found = sandwich_solve(*map(kernels.array, (matrix, residual, weight)), ridge)
        return Sandwich(host(found.left), host(found.right))

    assert relative_difference(solved(True, gram).omega, solved(False, gram).omega) <= 1e-12
    # What factors cannot be trusted with is left to eigenvalues, to the bit.
    calls: list[bool] = []
    factored = type(kernels).shifted_solve

    def counted(self: Any, *arguments: Any) -> Any:
        found = factored(self, *arguments)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(type(kernels), "shifted_solve", counted)
    bent = gram - 1.001 * np.linalg.eigvalsh(gram)[0] * np.eye(60)
    for matrix, ridge in ((-gram, 0.01), (bent, 1e-9)):
        assert np.array_equal(solved(True, matrix, ridge).left, solved(False, matrix, ridge).left)
    assert not any(calls)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("inner", [1, 10, 130])
def test_a_product_that_is_added_has_the_numbers_of_both_in_turn(inner, dtype):
    rng = np.random.default_rng(3)
    left, right = (
        rng.standard_normal((37, inner)).astype(dtype),
        rng.standard_normal((50, inner)).astype(dtype),
    )
    start = rng.standard_normal((37, 50)).astype(dtype)
    found = start.copy()
    add_product(left, right.T, found)
    np.testing.assert_allclose(found, start + left @ right.T, rtol=0, atol=40 * np.finfo(dtype).eps * inner)


def test_a_product_is_added_only_where_its_factors_lie_as_they_should():
    left, right, out = np.ones((3, 2)), np.ones((2, 4)), np.zeros((3, 4))
    with pytest.raises(ValueError, match="contiguous"):
        add_product(left, right, out)
    with pytest.raises(ValueError, match="shapes"):
        add_product(left, np.ones((4, 3)).T, out)


def test_factors_made_in_place_are_those_of_the_library():
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((90, 33))
    system = rows.T @ rows
    found = system.copy()
    assert factor_in_place(found)
    np.testing.assert_allclose(np.triu(found), np.linalg.cholesky(system).T, rtol=0, atol=1e-12)
    assert not factor_in_place(-system)


def test_thin_sums_are_the_same_however_they_are_computed():
    rng = np.random.default_rng(5)
    wide, thin = rng.standard_normal((300, 200)), rng.standard_normal((300, 7))
    out = np.ones((200, 7))
    NUMPY.cross(wide, thin, out)
    np.testing.assert_allclose(out, wide.T @ thin, rtol=0, atol=1e-12)
    NUMPY.cross(wide, thin, out, accumulate=True)
    np.testing.assert_allclose(out, 2 * (wide.T @ thin), rtol=0, atol=1e-12)
