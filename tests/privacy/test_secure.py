"""Training over secure sums gives what plain sums give, for whoever is in the sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.messages import Term
from fedsolve.federation.method import Method
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.census import CensusStage, Limits
from fedsolve.privacy.disclosure import NO_ACCOUNT, Disclosure
from fedsolve.privacy.notes import CHANNEL, read_letter

ROWS, WIDTH, CLASSES = 600, 12, 3

CONSENT = Limits(told=1e9)
"""Of sites that let everything be told that the other rules allow."""


def rows(scale: float = 1.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, ROWS)
    features = rng.standard_normal((ROWS, WIDTH))
    features[np.arange(ROWS), labels] += 2.0
    return features * scale, labels


def federation(clients: int, scale: float = 1.0, reverse: bool = False) -> fs.LocalFederation:
    """`reverse`: the same clients, summed in the opposite order."""
    features, labels = rows(scale)
    owners = np.arange(ROWS) % clients
    return fs.LocalFederation.from_arrays(features, labels, clients - 1 - owners if reverse else owners)


def scores(method: Method[Any], over: Any, scale: float = 1.0) -> Any:
    return method.fit(over).decision_function(rows(scale)[0])


METHODS: dict[str, Callable[[], Method[Any]]] = {
    "afl": lambda: fs.AFL(ridge=1.0),
    "afl-intercept": lambda: fs.AFL(ridge=1.0, intercept=True),
    "apfl": lambda: fs.APFL(activation="tanh", width=64),
    **{
        f"deepafl-{plan}": lambda plan=plan: fs.DeepAFL(  # type: ignore[misc]
            layers=2, width=64, ridge=1.0, residual_ridge=0.01, exchange=plan
        )
        for plan in ("lean", "single", "textbook")
    },
}


QUICK = ("afl", "deepafl-single")
CASES = [
    *((name, 3, scale) for name in METHODS for scale in (1e-3, 1.0, 1e3)),
    *((name, 20, 1.0) for name in QUICK),
    *(pytest.param(name, 20, scale, marks=pytest.mark.slow) for name in QUICK for scale in (1e-3, 1e3)),
    *(pytest.param(name, 20, 1.0, marks=pytest.mark.slow) for name in METHODS if name not in QUICK),
    # A hundred masks each take minutes in all: other scales where one plan stands for the three.
    *(pytest.param(name, 100, 1.0, marks=pytest.mark.slow) for name in METHODS),
    *(
        pytest.param(name, 100, scale, marks=pytest.mark.slow)
        for name in ("afl", "afl-intercept", "deepafl-single")
        for scale in (1e-3, 1e3)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "clients", "scale"), CASES)
def test_scores_are_those_of_plain_sums(name: str, clients: int, scale: float) -> None:
    method = METHODS[name]()
    plain = scores(method, federation(clients, scale), scale)
    yardstick = np.abs(scores(method, federation(clients, scale, reverse=True), scale) - plain).max()
    secure = scores(method, SecureFederation(federation(clients, scale), limits=CONSENT), scale)
    assert np.abs(secure - plain).max() <= max(1e-12, 10 * yardstick)


@pytest.mark.parametrize("clients", [3, 20])
def test_gradient_methods_too(clients: int) -> None:
    pytest.importorskip("torch")
    method = fs.gradient.FedAvg(network="mlp:8", rounds=3)
    # No yardstick here: clients under other names draw other batches.
    secure = scores(method, SecureFederation(federation(clients)))
    assert np.abs(secure - scores(method, federation(clients))).max() <= 1e-12


def test_a_client_without_rows_is_not_told_from_others() -> None:
    features, labels = rows()
    inner = fs.LocalFederation.from_arrays(features, labels, np.arange(ROWS) % 4, clients=5)
    letters: dict[str, int] = {}
    model = fs.AFL().fit(SecureFederation(Listening(inner, letters)))
    assert model.history[0].empty == ()
    assert fs.AFL().fit(inner).history[0].empty == ("client-4",)
    assert len(letters) == 5
    assert len(set(letters.values())) == 1


def test_a_gradient_client_without_a_batch_sends_zeros() -> None:
    pytest.importorskip("torch")
    features, labels = rows()
    inner = fs.LocalFederation.from_arrays(features, labels, np.arange(ROWS) % 4, clients=5)
    method = fs.gradient.FedAvg(network="mlp:8", rounds=2)
    assert np.array_equal(scores(method, SecureFederation(inner)), scores(method, inner))


def test_evaluation_goes_through_the_ring() -> None:
    inner = federation(5)
    secure = SecureFederation(inner)
    model = fs.AFL().fit(secure)
    assert secure.evaluate(model) == inner.evaluate(model)


def test_trips_and_limbs_of_a_run() -> None:
    trips: list[str] = []
    secure = SecureFederation(Listening(federation(5), {}, trips))
    model = fs.DeepAFL(layers=2, width=16, exchange="single").fit(secure)
    census = ["ask", "open"] * 2  # of cells and columns; these have no indicators
    assert trips == ["begin", "members", *census, *["ask", "open"] * len(model.history)]
    first, *later = [record.error_bounds["gram"] for record in model.history if "gram" in record.error_bounds]
    assert first == 5 * 2.0**-65
    names = {name for record in model.history for name in record.error_bounds}
    assert {"gram", "hidden_gram", "hidden_cross"} <= names
    assert model.history[-1].error_bounds["hidden_gram"] > first or later
    plain = fs.DeepAFL(layers=2, width=16, exchange="single").fit(federation(5))
    assert model.history[0].bytes_up > 1.9 * plain.history[0].bytes_up
    assert model.history[-1].bytes_up < 1.2 * plain.history[-1].bytes_up


def test_new_keys_are_made_when_the_slots_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsolve.privacy.secure._MOST_SLOTS", 2)
    trips: list[str] = []
    method = fs.DeepAFL(layers=3, width=16)
    secure = scores(method, SecureFederation(Listening(federation(4), {}, trips)))
    assert trips.count("begin") > 1
    assert np.allclose(secure, scores(method, federation(4)), rtol=0, atol=1e-11)


def test_an_array_that_outgrows_one_limb_travels_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsolve.privacy.sizes.SPARE_BITS", -30)  # no term fits into so narrow a limb
    monkeypatch.setattr("fedsolve.privacy.sizes.exponent_for", lambda largest, clients, spare=None: 62)
    trips: list[str] = []
    method = fs.DeepAFL(layers=2, width=16, exchange="textbook")
    secure = scores(method, SecureFederation(Listening(federation(4), {}, trips)))
    assert trips.count("ask") > trips.count("open")
    assert np.allclose(secure, scores(method, federation(4)), rtol=0, atol=1e-12)


def test_numbers_below_what_the_ring_resolves_stop_the_run() -> None:
    with pytest.raises(fs.TermError, match=r"the total of '\w+' .* is known to"):
        fs.AFL().fit(SecureFederation(federation(3, scale=1e-6)))


# -- clients that are gone -------------------------------------------------------------------------


class Listening(fs.LocalFederation):
    """The clients of a federation, with their letters counted."""

    def __init__(
        self, inner: fs.LocalFederation, sizes: dict[str, int], trips: list[str] | None = None
    ) -> None:
        super().__init__(inner.participants, classes=range(CLASSES))
        self.sizes, self.trips = sizes, [] if trips is None else trips

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        self.trips.append(read_letter(next(iter(letters.values())))[1]["message"])
        for name, reply in super().carry(channel, letters, largest):
            if isinstance(reply, bytes) and read_letter(reply)[1]["message"] == "masked":
                self.sizes[name] = len(reply)
            yield name, reply


class Failing(Listening):
    """Clients of which some are gone from a trip on, counted from the first letter of the run."""

    def __init__(self, inner: fs.LocalFederation, gone: list[str], trip: int) -> None:
        super().__init__(inner, {})
        self.gone, self.trip = gone, trip

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        for name, reply in super().carry(channel, letters, largest):
            lost = len(self.trips) > self.trip and name in self.gone
            yield name, TimeoutError("no answer") if lost else reply


ASK, OPEN, LATER, OPEN_SUM = 2, 3, 4, 7
"""Trips of a run: a census is asked for and opened, what follows, and the opening of the first sum."""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 6])
@pytest.mark.parametrize("trip", [0, 1, ASK, OPEN_SUM])
def test_dropouts_in_the_first_exchange_are_exact_for_the_cohort(lost: int, trip: int) -> None:
    inner = federation(20)
    gone = list(inner.clients[20 - lost :])
    secure = SecureFederation(Failing(inner, gone, trip), missing="continue", changing=True)
    model = fs.AFL(ridge=1.0).fit(secure)
    there = inner.clients if trip == OPEN_SUM else inner.clients[: 20 - lost]
    assert model.history[0].cohort == there
    assert sorted(model.history[0].missing) == (gone if trip != OPEN_SUM else [])
    rest = fs.LocalFederation([p for p in inner.participants if p.name in there], classes=range(CLASSES))
    plain = fs.AFL(ridge=1.0).fit(rest)
    features = rows()[0]
    assert np.allclose(
        model.decision_function(features), plain.decision_function(features), rtol=0, atol=1e-12
    )


def test_below_the_threshold_nothing_opens() -> None:
    inner = federation(9)
    few = SecureFederation(Failing(inner, list(inner.clients[4:]), OPEN), missing="continue", changing=True)
    with pytest.raises(fs.CohortError, match="4 of 9 clients helped to open the sum, 5 must"):
        fs.AFL().fit(few)
    silent = SecureFederation(Failing(inner, list(inner.clients[4:]), ASK), missing="continue", changing=True)
    with pytest.raises(fs.CohortError, match="4 of 9 clients answered; 5 must"):
        fs.AFL().fit(silent)


def test_a_dropout_in_a_later_exchange_is_refused() -> None:
    inner, method = federation(9), fs.DeepAFL(layers=2, width=16)
    gone = list(inner.clients[8:])
    with pytest.raises(fs.CohortError, match=r"would set \['client-8'\] apart"):
        method.fit(SecureFederation(Failing(inner, gone, LATER), missing="continue", changing=True))
    with pytest.raises(fs.CohortError, match="did not answer, and this client only opens sums over all"):
        method.fit(SecureFederation(Failing(inner, gone, LATER), missing="continue"))
    with pytest.raises(fs.CohortError, match="participant 'client-8' failed"):
        method.fit(SecureFederation(Failing(inner, gone, LATER)))


def test_who_joins_in_mid_run_stops_it() -> None:
    inner = federation(5)
    secure = SecureFederation(inner)
    run = fs.DeepAFL(layers=1, width=16).start(secure.describe())
    request = run.request(secure.clients)
    assert request is not None
    run.absorb(secure.exchange(request, run.chain))
    inner.add(fs.Participant("new", fs.ClientData(*rows())))
    request = run.request(secure.clients)
    assert request is not None
    with pytest.raises(fs.CohortError, match=r"\['new'\] joined in mid-run"):
        secure.exchange(request, run.chain)


# -- what is refused -------------------------------------------------------------------------------


def test_methods_that_gather_are_refused_by_name() -> None:
    pytest.importorskip("torch")
    method = fs.gradient.FedAWA(network="mlp:8", rounds=1)
    with pytest.raises(fs.DataError, match="method 'fedawa' gathers"):
        method.fit(SecureFederation(federation(3)))


def test_of_a_described_method_the_inner_one_decides() -> None:
    pytest.importorskip("torch")
    features, labels = rows()
    schema = fs.Schema(tuple(fs.Column(f"c{n}") for n in range(WIDTH)))
    inner = fs.LocalFederation.from_arrays(features, labels, np.arange(ROWS) % 4, schema=schema)
    method = fs.Recipe(fs.AFL(ridge=1.0), schema)
    secure = method.fit(SecureFederation(inner))
    assert secure.history[0].kind == "table-moments"
    plain = method.fit(inner).decision_function(features)
    assert np.allclose(secure.decision_function(features), plain, rtol=0, atol=1e-12)
    with pytest.raises(fs.DataError, match="method 'fedawa' gathers"):
        fs.Recipe(fs.gradient.FedAWA(network="mlp:8", rounds=1), schema).fit(SecureFederation(inner))


def test_ledgers_in_a_folder_outlive_the_federation(tmp_path: Any) -> None:
    inner = federation(9)
    fs.AFL().fit(SecureFederation(inner, ledgers=tmp_path))
    inner.remove("client-8")
    told = "client-8 took part in earlier sums.*Nothing was sent.*all 8 who stay accept.*--epsilon"
    with pytest.raises(fs.CohortError, match=told):
        fs.AFL(ridge=1.0).fit(SecureFederation(inner, ledgers=tmp_path))
    fs.AFL(ridge=1.0).fit(SecureFederation(inner))  # whoever forgets what was opened opens it


def test_two_clients_make_no_secure_sum() -> None:
    with pytest.raises(fs.CohortError, match="2 clients cannot make a secure sum"):
        fs.AFL().fit(SecureFederation(federation(2)))


def test_a_personal_model_knows_its_clients() -> None:
    inner = federation(3)
    method = fs.APFL(activation="tanh", width=64)
    model = method.fit(SecureFederation(inner, limits=CONSENT))
    own = model.personal("client-0").decision_function(rows()[0])
    assert np.allclose(own, method.fit(inner).personal("client-0").decision_function(rows()[0]), atol=1e-9)


def test_a_run_resumes_with_new_keys(tmp_path: Any) -> None:
    inner, method = federation(4), fs.DeepAFL(layers=3, width=16)
    whole = scores(method, inner)
    path = tmp_path / "run.ckpt"

    def stop(record: Any, expected: int) -> None:
        if record.exchange == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        method.fit(SecureFederation(inner), path, follow=stop)
    with pytest.raises(fs.ModelFileError, match="other rows of 'client-0'"):
        method.fit(SecureFederation(federation(4, reverse=True)), path, resume=True)
    model = method.fit(SecureFederation(inner), path, resume=True)
    assert [bool(record.error_bounds) for record in model.history] == [True] * len(model.history)
    assert np.allclose(model.decision_function(rows()[0]), whole, rtol=0, atol=1e-11)


def test_columns_that_the_sites_leave_out_are_known_by_place_and_named_at_a_site() -> None:
    random = np.random.default_rng(0)
    rows = np.column_stack([random.normal(size=300), np.arange(300) % 2, np.arange(300) < 3])
    schema = fs.Schema((fs.Column("age"), fs.Column("sex"), fs.Column("rare")), "y", (0, 1))
    labels, owners = random.integers(0, 2, 300), np.arange(300) % 3
    federation = fs.LocalFederation.from_arrays(rows, labels, owners)
    secure = SecureFederation(federation, limits=CONSENT)
    model = fs.AFL(ridge=1.0).fit(secure)
    assert secure.left_out is not None
    assert secure.left_out.tolist() == [False, False, True]
    assert not model.weight[2].any()
    site = Disclosure(Limits(), b"k")
    site._now = site.account = dataclasses.replace(
        NO_ACCOUNT, left_out=np.array([[[0, 0, 1]] * 2], dtype=bool)
    )
    data = fs.ClientData(rows, labels, schema=schema)
    stage = CensusStage("crowded", "r", "", Limits())
    site.account = dataclasses.replace(site.account, history=stage.shown(Term({}))[0])
    assert "; 1 columns (rare) are left out" in site.admit(data, stage, Term({}), ())


def test_letters_are_for_clients_that_know_them() -> None:
    inner = federation(3)
    replies = dict(inner.carry(CHANNEL, dict.fromkeys(["client-0", "nobody"], b""), 100))
    assert "takes no letters" in str(replies["client-0"])
    assert "not part of the federation" in str(replies["nobody"])
