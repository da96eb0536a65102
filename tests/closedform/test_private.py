"""AFL and Softmax with noise: what leaves is bounded, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform import private
from fedsolve.closedform.sums import OneExchange
from fedsolve.federation.messages import Block, Chain, Request, Term
from fedsolve.federation.method import opening
from fedsolve.federation.noisy_sums import composed, epsilon_of
from fedsolve.federation.participant import ClientData, Participant, kind_of, step
from tests.command import fedsolve


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 9000)
    means = 2.0 * rng.standard_normal((3, 12))
    return means[labels] + rng.standard_normal((9000, 12)) + 5.0, np.array(["a", "b", "c"])[labels]


@pytest.fixture(scope="module")
def federation(rows):
    x, y = rows
    return fs.LocalFederation.from_arrays(x[:6000], y[:6000], np.arange(6000) % 5)


@pytest.mark.parametrize("method", [fs.AFL(), fs.Softmax(), "softmax"], ids=str)
def test_a_private_model_predicts_and_says_what_it_spent(method, federation, rows, tmp_path):
    model = fs.Private(method, epsilon=4.0).fit(federation)
    assert model.score(rows[0][6000:], rows[1][6000:]) > 0.9
    assert model.history[-1].metrics["epsilon"] == pytest.approx(4.0)
    model.save(tmp_path / "m")
    again = fs.load_model(tmp_path / "m")
    assert np.array_equal(again.decision_function(rows[0]), model.decision_function(rows[0]))
    assert again.parameters["epsilon"] == 4.0
    assert again.parameters["noise"] == "server"


def test_nothing_exact_is_in_the_model(federation):
    """Two runs differ in all that they release, also with as much budget as there is."""
    one, two = (fs.Private("afl", epsilon=50.0).fit(federation) for _ in range(2))
    assert not np.any(one.weight == two.weight)
    assert not np.any(one.centre == two.centre)


def test_the_costs_of_all_exchanges_are_the_budget():
    for method in (fs.Private("afl", 0.7), fs.Private("softmax", 3.0, 1e-7), fs.Private("softmax", steps=3)):
        assert epsilon_of(composed(method.costs()), method.delta) == pytest.approx(method.epsilon)
        assert method.costs()[0] ** 2 == pytest.approx(0.01 * method.mu**2)


def test_a_resumed_run_goes_on(federation, rows, tmp_path):
    method, path = fs.Private("softmax", epsilon=4.0), tmp_path / "c"

    class Stop(Exception):
        pass

    def stop(record, expected):
        if record.exchange == 3:
            raise Stop

    with pytest.raises(Stop):
        method.fit(federation, checkpoint=path, follow=stop)
    model = method.fit(federation, checkpoint=path, resume=True)
    assert [record.kind for record in model.history].count(private.MEAN) == 1
    assert len(model.history) == 2 + private.STEPS
    assert model.history[-1].metrics["epsilon"] == pytest.approx(4.0)


@pytest.mark.parametrize("kind", [private.MEAN, private.GRAM, private.GRADIENT])
def test_one_row_changes_no_more_than_is_declared(kind, rows):
    """Neighbours with one row more, as far from the others as rows can be."""
    x, y = rows[0][:40].copy(), rows[1][:40]
    x[39] *= -1e6
    method = fs.Private("softmax", epsilon=1.0)
    spec = fs.LocalFederation.from_arrays(x, y, np.zeros(40, int)).describe()
    chain = Chain([Block({"opening": opening(method, spec)})])
    if kind != private.MEAN:
        chain.append(Block({"private": True}, {"centre": np.full(12, 0.2)}))
    weight = 1e3 * np.random.default_rng(1).standard_normal((13, 3))
    note = {"mu": 0.01, "intercept": True}
    request = Request(
        kind, 0, 0, ("a",), note, {"weight": weight}, len(chain), chain.digest, (*chain.blocks,)
    )
    terms = [Participant("a", ClientData(x[:n], y[:n])).answer(request) for n in (39, 40)]
    for name, bound in kind_of(kind).releases.items():
        change = np.linalg.norm(terms[1].arrays[name] - terms[0].arrays[name])
        assert 0.3 * bound < change <= bound + 1e-9, name


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [fs.DeepAFL(), fs.KernelAFL(), "deepafl"])
def test_methods_that_cannot_be_private_are_refused_by_name(method):
    key = method if isinstance(method, str) else method.key
    with pytest.raises(fs.DataError, match=f"'{key}' cannot be made private"):
        fs.Private(method, epsilon=1.0)


def test_settings_within_that_noise_decides_are_refused():
    with pytest.raises(fs.DataError, match="chooses ridge by its noise"):
        fs.Private(fs.AFL(ridge=2.0), epsilon=1.0)


def test_weights_calibration_and_regression_are_refused(federation, rows):
    x, y = rows
    with pytest.raises(fs.DataError, match="for classes"):
        fs.Private().fit(fs.LocalFederation.from_arrays(x, x[:, 0], np.arange(9000) % 5, task="regression"))
    weighted = fs.LocalFederation.from_arrays(x, y, np.arange(9000) % 5, sample_weight=np.ones(9000))
    with pytest.raises(fs.FedsolveError, match="weights are not private"):
        fs.Private().fit(weighted)
    for more in ({"class_weight": "balanced"}, {"calibrate": True}):
        with pytest.raises(fs.FedsolveError, match="need exact counts"):
            fs.Private("afl").fit(federation, **more)


@dataclass(frozen=True)
class Leaky(OneExchange):
    """A toy that says it is private, with steps that declare less than they send."""

    kind: str = "toy-private"

    def answer(self, rows):
        raise NotImplementedError

    def solve(self, total, spec):
        raise NotImplementedError

    def agreement(self):
        return {"privacy": {"epsilon": 1.0, "delta": 1e-5, "unit": "row", "honest": 1.0, "rows": 1}}


@step("toy-private", releases={"sum": 1.0})
def _answer(data, request, memory):
    return Term({"sum": np.ones(2), **({"more": np.ones(2)} if request.note["leaks"] else {})})


@step("toy-undeclared")
def _undeclared(data, request, memory):
    return Term({"sum": np.ones(2)})


@pytest.mark.parametrize(
    ("kind", "note", "said"),
    [
        ("toy-private", {"mu": 0.1, "leaks": True}, r"\['more'\]"),
        ("toy-undeclared", {"mu": 0.1}, "nothing says how much one row"),
        ("toy-private", {"leaks": False}, "nothing says how much one row"),
        ("toy-private", {"mu": 30.0, "leaks": False}, "more than the run's epsilon"),
        ("afl", {"mu": 0.1, "intercept": False}, "nothing says how much one row"),
        ("one-exchange", {"mu": 0.1}, "nothing says how much one row"),
    ],
)
def test_undeclared_arrays_do_not_leave(kind, note, said, rows, federation):
    chain = Chain([Block({"opening": opening(Leaky(), federation.describe())})])
    request = Request(kind, 0, 0, ("a",), note, {}, 1, chain.digest, (*chain.blocks,))
    with pytest.raises(fs.TermError, match=said):
        Participant("a", ClientData(rows[0][:9], rows[1][:9])).answer(request)


def test_what_is_declared_leaves(rows, federation):
    chain = Chain([Block({"opening": opening(Leaky(), federation.describe())})])
    note = {"mu": 0.1, "leaks": False}
    request = Request("toy-private", 0, 0, ("a",), note, {}, 1, chain.digest, (*chain.blocks,))
    assert Participant("a", ClientData(rows[0][:9], rows[1][:9])).answer(request).arrays.keys() == {"sum"}


def test_whole_sites_can_be_hidden(rows):
    many = fs.LocalFederation.from_arrays(rows[0][:6000], rows[1][:6000], np.arange(6000) % 600)
    model = fs.Private("afl", epsilon=8.0, unit="site", site_rows=10).fit(many)
    assert model.score(rows[0][6000:], rows[1][6000:]) > 0.8
    assert model.parameters["unit"] == "site"
    assert model.history[-1].metrics["epsilon"] == pytest.approx(8.0)


def test_tables_are_prepared_by_the_schema_alone():
    schema = fs.Schema(
        [fs.Column("age", reference=50.0, scale=20.0), fs.Column("dose", missing="mean", reference=1.0)],
        label="y",
        classes=("no", "yes"),
    )
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(50, 20, 4000), rng.normal(1, 1, 4000)])
    y = np.where(x[:, 0] > 55, "yes", "no")
    x[::7, 1] = np.nan
    federation = fs.LocalFederation.from_arrays(x, y, np.arange(4000) % 4, schema=schema)
    model = fs.Private("softmax", epsilon=4.0).fit(federation, schema=schema)
    assert [record.stage for record in model.history] == ["training"] * (2 + private.STEPS)
    assert model.preparing is not None
    assert np.array_equal(model.preparing.origin, [50.0, 1.0])
    assert model.score({"age": x[:, 0], "dose": x[:, 1]}, y) > 0.9


def test_the_command_trains_with_noise_and_the_card_holds_no_count(rows, tmp_path):
    data, out = tmp_path / "d.npz", tmp_path / "m.safetensors"
    x, y = rows
    np.savez(data, x_train=x[:6000], y_train=y[:6000], x_test=x[6000:], y_test=y[6000:])
    words = (data, "--epsilon", "2", "--method", "afl", "--clients", "5", "--secure", "--out", out)
    fedsolve("train", *words)
    page = fedsolve("info", out).stdout
    assert "epsilon 2, delta 1e-05 for every row; noise added by the sites" in page
    assert "6,000" not in page
    card = fs.load_model(out).card
    assert "rows" not in card
    assert set(card["accuracy"]) == {"test"}
    refused = fedsolve("train", data, "--epsilon", "2", "--method", "deepafl")
    assert refused.exit_code == 2
    assert "'deepafl' cannot be made private" in refused.stderr
