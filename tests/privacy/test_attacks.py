"""What a dishonest server tries: each attack shows rows where its rule is off, and is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedsolve as fs
from fedsolve.closedform.auto import CANDIDATES
from fedsolve.closedform.projections import projection
from fedsolve.federation.folds import Part, fold_numbers, row_hashes
from fedsolve.federation.messages import Request
from fedsolve.federation.noisy_sums import NoisyAnswer
from fedsolve.federation.participant import Participant
from fedsolve.network.proposing import Proposing
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.census import OFF, Limits, column_counts
from fedsolve.privacy.disclosure import Disclosure
from fedsolve.privacy.joint_seed import about_opening, draw_seed, drawing_of
from fedsolve.privacy.sizes import KnownTotals
from fedsolve.tables.encoder import encode
from fedsolve.tables.schema import Column, Schema

from .setups import take_census

SITES = pytest.mark.parametrize("sites", [3, 4, pytest.param(6, marks=pytest.mark.slow)])
ROWS = 600


def digits(rows: int = ROWS) -> tuple[Any, Any]:
    features, labels = load_digits(return_X_y=True)
    return features[:rows], labels[:rows]


def secure(features: Any, labels: Any, sites: int, limits: Limits | None = None) -> SecureFederation:
    owners = np.arange(len(labels)) % sites
    return SecureFederation(fs.LocalFederation.from_arrays(features, labels, owners), limits=limits)


def shown(columns: Any, features: Any) -> set[int]:
    """Which rows stand, to the last digit, in the columns of a matrix."""
    found = set()
    for column in np.asarray(columns).T:
        error = np.abs(features - column).max(axis=1)
        if error.min() < 1e-6 and np.abs(column).max() > 0:
            found.add(int(error.argmin()))
    return found


def first(federation: SecureFederation, method: Any, **more: Any) -> tuple[Request, Any]:
    run = method.start(federation.describe())
    request = run.request(federation.clients)
    assert request is not None
    return dataclasses.replace(request, note={**request.note, **more}), run.chain


# -- cells -----------------------------------------------------------------------------------------


def crosses(federation: SecureFederation, parts: list[Part]) -> list[Any]:
    """AFL's own question about some parts of the rows."""
    found = []
    for part in parts:
        request, chain = first(federation, fs.AFL(ridge=1.0), **part.note())
        found.append(federation.exchange(request, chain)["cross"])
    return found


@SITES
def test_hundreds_of_folds(sites: int) -> None:
    features, labels = digits()
    parts = [Part((fold,), 768) for fold in range(12)]
    found = crosses(secure(features, labels, sites, OFF), parts)
    assert len(set().union(*(shown(cross, features) for cross in found))) > 3
    with pytest.raises(fs.CohortError, match=r"some of 768 folds; rows lie in 2.*keeps 10 rows"):
        crosses(secure(features, labels, sites), parts)


@SITES
@pytest.mark.parametrize("count", [48, 384])
def test_windows_that_slide(sites: int, count: int) -> None:
    features, labels = digits(1000)
    parts = [Part(tuple(range(step, step + count // 2)), count) for step in range(8)]
    found = crosses(secure(features, labels, sites, OFF), parts)
    between = [b - a for a, b in itertools.pairwise(found)]
    if count > 48:
        assert set().union(*(shown(d, features) | shown(-d, features) for d in between))
        with pytest.raises(fs.CohortError, match="asked about some of 384 folds"):
            crosses(secure(features, labels, sites), parts)
        return
    found = crosses(secure(features, labels, sites), parts)
    assert len({cross.tobytes() for cross in found}) <= 3  # whole cells come and go


@SITES
def test_a_class_of_one_row(sites: int) -> None:
    features, labels = digits()
    labels = np.where(np.arange(ROWS) == 77, 99, labels)

    def cross(limits: Limits) -> Any:
        federation = secure(features, labels, sites, limits)
        return federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["cross"]

    assert shown(cross(OFF), features) == {77}
    found = cross(Limits())
    assert shown(found, features) == set()
    assert np.all(found[:, -1] == 0)  # it waits


@SITES
def test_one_row_more_than_last_week(sites: int) -> None:
    features, labels = digits(ROWS + 1)
    owners = np.arange(ROWS + 1) % sites

    def difference(limits: Limits) -> Any:
        inner = fs.LocalFederation.from_arrays(features, labels, owners)
        inner.participants[0].data, whole = (
            inner.participants[0].data.taking(np.arange(len(inner.participants[0].data)) > 0),
            inner.participants[0].data,
        )
        federation = SecureFederation(inner, limits=limits)
        before = federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["cross"]
        inner.participants[0].data = whole
        inner.participants[0].forget()
        federation.plan(1)
        return federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["cross"] - before

    assert shown(difference(OFF), features) == {0}
    assert np.all(difference(Limits()) == 0)


@SITES
def test_a_few_rows_less_than_last_week(sites: int) -> None:
    features, labels = digits()
    inner = fs.LocalFederation.from_arrays(features, labels, np.arange(ROWS) % sites)
    federation = SecureFederation(inner)
    federation.exchange(*first(federation, fs.AFL(ridge=1.0)))
    data = inner.participants[0].data
    inner.participants[0].data = data.taking(np.arange(len(data)) > 2)
    request, chain = first(federation, fs.AFL(ridge=1.0))
    with pytest.raises(fs.DataError, match=r"middle of this run"):
        federation.exchange(dataclasses.replace(request, exchange=1), chain)
    with pytest.raises(fs.DataError, match=r"3 rows of earlier totals are missing.*Put them back"):
        federation.exchange(*first(federation, fs.AFL(ridge=2.0)))


def test_rows_that_another_schema_reads() -> None:
    """They look like other rows; it is said why."""
    rng = np.random.default_rng(0)
    table = {"age": rng.integers(20, 80, 300).astype(float), "sex": np.where(rng.random(300) < 0.5, "f", "m")}

    def sites(*sexes: str) -> Any:
        schema = Schema((Column("age"), Column("sex", "category", categories=sexes)), label="y")
        return fs.LocalFederation.from_arrays(
            encode(schema, table), np.arange(300) // 3 % 2, np.arange(300) % 3, schema=schema
        )

    inner = sites("f", "m")
    federation = SecureFederation(inner)
    federation.exchange(*first(federation, fs.AFL(ridge=1.0)))
    for old, new in zip(inner.participants, sites("m", "f").participants, strict=True):
        old.data = new.data
    told = r"rows of earlier totals are read by another schema now;.*The first schema.*agreed-schema"
    with pytest.raises(fs.DataError, match=told):
        federation.exchange(*first(federation, fs.AFL(ridge=2.0)))


# -- products --------------------------------------------------------------------------------------


@SITES
def test_an_indicator_of_one_row(sites: int) -> None:
    """An honest run on a table with a category of one row."""
    rng = np.random.default_rng(0)
    features = np.column_stack(
        [rng.standard_normal((ROWS, 5)), np.arange(ROWS) == 77, rng.random(ROWS) < 0.5]
    )
    labels = rng.integers(0, 2, ROWS)

    def gram(limits: Limits) -> Any:
        federation = secure(features, labels, sites, limits)
        return federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["gram"]

    assert shown(gram(OFF), features) == {77}
    found = gram(Limits())
    assert shown(found, features) == set()
    assert np.all(found[5] == 0)
    assert np.allclose(found[6, 6], features[:, 6].sum())


@SITES
def test_two_indicators_that_differ_in_one_row(sites: int) -> None:
    rng = np.random.default_rng(0)
    half = rng.random(ROWS) < 0.5
    half[77] = False
    features = np.column_stack([rng.standard_normal((ROWS, 4)), half, half | (np.arange(ROWS) == 77)])
    labels = rng.integers(0, 2, ROWS)

    def difference(limits: Limits) -> Any:
        federation = secure(features, labels, sites, limits)
        gram = federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["gram"]
        return (gram[:, 5] - gram[:, 4])[:, None]

    assert shown(difference(OFF), features) == {77}
    assert shown(difference(Limits()), features) == set()


@SITES
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_an_indicator_that_differs_from_the_class_in_one_row(sites: int, task: Any) -> None:
    """Rows of a class are a column of every product with the labels; so is a target of 0 and 1."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, ROWS)
    flag = np.where(np.arange(ROWS) == 77, 1 - labels, labels)
    features = np.column_stack([rng.standard_normal((ROWS, 5)), flag])

    def difference(limits: Limits) -> Any:
        given, owners = labels.astype(float if task == "regression" else int), np.arange(ROWS) % sites
        inner = fs.LocalFederation.from_arrays(features, given, owners, task=task)
        federation = SecureFederation(inner, limits=limits)
        total = federation.exchange(*first(federation, fs.AFL(ridge=1.0)))
        return (total["gram"][:5, 5] - total["cross"][:5, -1])[:, None] * (1 - 2 * labels[77])

    assert shown(difference(OFF), features[:, :5]) == {77}
    assert shown(difference(Limits()), features[:, :5]) == set()


@SITES
def test_an_indicator_of_one_row_of_a_class_with_other_weights(sites: int) -> None:
    """Products with two weights of the classes are products of each class."""
    rng = np.random.default_rng(0)
    labels = (np.arange(ROWS) % 5 == 2).astype(int)
    flag = ((labels == 0) & (rng.random(ROWS) < 0.3)) | (np.arange(ROWS) == 77)
    features = np.column_stack([rng.standard_normal((ROWS, 5)), flag])

    def of_a_class(limits: Limits) -> Any:
        federation = secure(features, labels, sites, limits)
        plain, weighted = (
            heard(federation, fs.Recipe(fs.AFL(ridge=1.0), class_weight=weight))
            for weight in (None, "balanced")
        )
        few, many = ROWS / (2 * weighted[0]["class_rows"])
        return (weighted[1]["gram"] - few * plain[0]["gram"])[:, 5:] / (many - few)

    assert shown(of_a_class(OFF), features) == {77}
    with pytest.raises(fs.CohortError, match=r"other weights of their classes \(class_weight\)"):
        of_a_class(Limits())


@SITES
def test_an_indicator_of_one_row_of_a_fold(sites: int) -> None:
    """Set in enough rows of all, and in one of a fold: it is left out where the question is about folds."""
    rng = np.random.default_rng(0)
    features, labels = np.column_stack([rng.standard_normal((ROWS, 4)), np.ones(ROWS)]), np.arange(ROWS) % 2
    of_set = fold_numbers(row_hashes(features, labels))  # the flag is part of what decides the fold
    alone = int(np.flatnonzero(of_set == 0)[0])
    features[:, 4] = ((of_set > 0) & (np.arange(ROWS) % 5 == 0)) | (np.arange(ROWS) == alone)
    part = Part((0,)).note()

    def grams(limits: Limits) -> tuple[Any, Any]:
        federation = secure(features, labels, sites, limits)
        of_part = federation.exchange(*first(federation, fs.AFL(ridge=1.0), **part))["gram"]
        return of_part, federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["gram"]

    assert shown(grams(OFF)[0][:, 4:], features) == {alone}
    of_part, whole = grams(Limits())
    assert np.all(of_part[4] == 0)
    assert whole[4, 4] == features[:, 4].sum()


@SITES
def test_a_label_of_one_row_of_a_fold(sites: int) -> None:
    """A choice of settings trains on two folds of three, by members of its run."""
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((ROWS, 5)), np.zeros((ROWS, 2))
    labels[:, 0] = rng.random(ROWS) < 0.5
    without = fold_numbers(row_hashes(features, labels))
    labels[:, 1] = 1  # the label is part of what decides the fold
    alone = int(np.flatnonzero(fold_numbers(row_hashes(features, labels)) == 0)[0])
    labels[:, 1] = (fold_numbers(row_hashes(features, labels)) > 0) & (without > 0) & (rng.random(ROWS) < 0.5)
    labels[alone, 1] = 1

    def of_the_fold(limits: Limits) -> Any:
        owners = np.arange(ROWS) % sites
        inner = fs.LocalFederation.from_arrays(features, labels, owners, label_names=("a", "b"))
        totals = heard(SecureFederation(inner, limits=limits), fs.Auto(methods="afl,kernelafl"))
        of_two = next(t.term.arrays for t in totals if "1-0.cross" in t.term.arrays)
        return (of_two["1-1.cross"] + of_two["1-2.cross"] - of_two["1-0.cross"])[:, 1:] / 2

    assert shown(of_the_fold(OFF), features) == {alone}
    with pytest.raises(fs.CohortError, match=r"few rows have or lack the label 1 .* in a part of the rows"):
        of_the_fold(Limits(told=100))


@SITES
def test_an_outlier_in_two_moments(sites: int) -> None:
    """A number that is far larger than all others stands in the sums of a table's preparation; with bounds in
    the schema it does not."""
    rng = np.random.default_rng(0)
    age = np.where(np.arange(ROWS) == 77, 4000.0, rng.normal(60, 12, ROWS))
    labels = np.arange(ROWS) % 2

    def read_off(bounds: tuple[float, ...]) -> float:
        schema = fs.Schema((fs.Column("age", reference=60, scale=10, bounds=bounds), fs.Column("b")))
        features = encode(schema, {"age": age, "b": rng.standard_normal(ROWS)})
        inner = fs.LocalFederation.from_arrays(features, labels, np.arange(ROWS) % sites, schema=schema)
        recipe = fs.Recipe(fs.AFL(ridge=1.0), schema)
        federation = SecureFederation(inner)
        run = recipe.start(federation.describe())
        request = run.request(federation.clients)
        assert request is not None
        _, first, second = federation.exchange(request, run.chain)["moments"]
        return float(60 + 10 * np.sign(first[0]) * np.sqrt(second[0]))

    assert abs(read_off(()) - 4000) < 15
    assert abs(read_off((0.0, 120.0)) - 4000) > 3000


@SITES
def test_a_row_that_has_most_of_the_weight(sites: int) -> None:
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((ROWS, 5)), np.arange(ROWS) % 2
    weights = np.where(np.arange(ROWS) == 77, 1e9, 1.0)

    def cross(limits: Limits) -> Any:
        held = (
            fs.ClientData(features, labels, np.arange(ROWS)[site::sites], weights) for site in range(sites)
        )
        inner = fs.LocalFederation([Participant(f"site {n}", rows) for n, rows in enumerate(held)])
        federation = SecureFederation(inner, limits=limits)
        return federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["cross"] / 1e9

    assert shown(cross(OFF), features) == {77}
    with pytest.raises(fs.CohortError, match=r"one row has 1\.00 of the weight of its class"):
        cross(Limits())


@SITES
def test_a_batch_that_is_small_for_its_width(sites: int) -> None:
    """New rows wait until they are enough for the products that were told before: their own would show."""
    features, labels = digits(ROWS + 40)
    last = np.arange(len(labels)) >= ROWS
    labels = np.where(last, 3, labels)  # forty rows of one class

    def difference(limits: Limits, arrived: Any = last) -> Any:
        inner = fs.LocalFederation.from_arrays(features, labels, np.arange(len(labels)) % sites)
        wholes = [participant.data for participant in inner.participants]
        for participant, whole in zip(inner.participants, wholes, strict=True):
            assert whole.rows is not None
            participant.data = whole.taking(~arrived[whole.rows])
        federation = SecureFederation(inner, limits=limits)
        before = federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["gram"]
        for participant, whole in zip(inner.participants, wholes, strict=True):
            participant.data = whole
            participant.forget()
        federation.plan(1)
        return federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["gram"] - before

    alone = difference(OFF)
    assert np.linalg.matrix_rank(alone) <= 40  # fewer rows than columns: it is about them alone
    assert np.allclose(alone, features[last].T @ features[last])
    assert np.all(difference(Limits()) == 0)
    some = np.arange(len(labels)) % 2 == 0  # 320 rows of all classes: enough for 64 columns
    assert np.any(difference(Limits(), some) != 0)


@SITES
def test_a_row_that_arrives_alone_is_not_counted_by_column(sites: int) -> None:
    """Two censuses differ by what came between them; nothing but the size of its cell is told of it."""
    rng = np.random.default_rng(0)
    features = np.column_stack([rng.standard_normal((ROWS, 3)), rng.random((ROWS, 4)) < 0.5])
    labels, owners = np.arange(ROWS) % 2, np.arange(ROWS) % sites
    there = np.arange(ROWS) != 77
    accounts = [Disclosure(Limits(), bytes([site])) for site in range(sites)]
    names = [f"site {site}" for site in range(sites)]

    def counted(rows: Any, run: str) -> list[str]:
        held = [fs.ClientData(features, labels, np.flatnonzero(rows & (owners == s))) for s in range(sites)]
        heard: list[str] = []
        take_census(accounts, held, np.arange(2), names, run, heard)
        return heard

    assert counted(there, "first")[:2] == ["cells", "columns"]
    assert counted(np.ones(ROWS, dtype=bool), "second") == ["cells"]


def test_pairs_are_counted_where_the_rows_of_a_site_do_not_hide_each_other() -> None:
    """A flag of one row in all, of one and gaps, of many rows elsewhere, and of none: two sums, or four."""
    rng = np.random.default_rng(0)
    rare, labels = np.arange(ROWS) == 77, np.arange(ROWS) % 2
    gaps = np.where(np.arange(ROWS) % 9 == 1, np.nan, rare)
    for third, stages in ((rare, 4), (gaps, 4), (rare | (np.arange(ROWS) % 3 == 1), 4), (labels, 2)):
        features = np.column_stack([rng.standard_normal(ROWS), rng.random((ROWS, 2)) < 0.5, third])
        schema = Schema(tuple(map(Column, "abcd")))
        held = [fs.ClientData(features, labels, np.arange(ROWS)[site::3], schema=schema) for site in range(3)]
        heard: list[str] = []
        accounts = [Disclosure(Limits(), bytes([site])) for site in range(3)]
        take_census(accounts, held, np.arange(2), ["a", "b", "c"], "run", heard)
        assert heard == ["cells", "columns", "pairs", "crowded"][:stages]


@SITES
def test_two_indicators_that_differ_by_a_gap(sites: int) -> None:
    """Gaps are filled by the mean of the column, which the other one does not have there."""
    rng = np.random.default_rng(0)
    half = (rng.random(ROWS) < 0.5).astype(float)
    half[77] = 0.0
    gap = np.where(np.arange(ROWS) == 77, np.nan, half)
    features = np.column_stack([rng.standard_normal((ROWS, 2)), half, gap])
    labels, schema = rng.integers(0, 2, ROWS), Schema(tuple(map(Column, "abcd")))
    held = [
        fs.ClientData(features, labels, np.arange(ROWS)[site::sites], schema=schema) for site in range(sites)
    ]
    accounts = [Disclosure(Limits(), bytes([site])) for site in range(sites)]
    take_census(accounts, held, np.arange(2), [f"site{site}" for site in range(sites)], "run", [])
    for each in accounts:
        assert each.account.left_out[-1][0, 2:].any()


def unit_rows(sites: int, limits: Limits, **settings: Any) -> tuple[Any, Any]:
    """One honest question of DeepAFL: sums of hidden units times features, and the features of all rows."""
    features, labels = digits()
    method = fs.DeepAFL(layers=1, width=64, exchange="single", ridge=1.0, **settings)
    federation = secure(features, labels, sites, limits)
    total = federation.exchange(*first(federation, method))["hidden_feature"]
    drawn = projection(method.seed, "zero", 0, 64, 64, 1.0, "float64")
    return total, np.tanh(features @ drawn.weight + drawn.bias)


@SITES
def test_units_that_fire_for_one_row(sites: int) -> None:
    total, own = unit_rows(sites, OFF, activation="relu", hidden_width=1024)
    fired = total[np.linalg.norm(total, axis=1) > 0]
    alike = (fired / np.linalg.norm(fired, axis=1)[:, None]) @ (own / np.linalg.norm(own, axis=1)[:, None]).T
    assert (alike > 1 - 1e-12).any()  # a row of the answer is a row of the table but for its length
    open_told = Limits(told=100)
    for settings, why in (
        ({"activation": "relu"}, "activation='relu' with a gain of 1 on .* can make features that are"),
        ({"gain": 1000.0}, "activation='gelu' with a gain of 1000 on .* can make features"),
        (
            {"scale": "standard", "gain": 4.0, "precision": "float32"},
            "with a gain of 4 on .* can make features",
        ),
        ({"hidden_width": 1024}, r"1,024 columns over 600 rows.*rows_per_width"),
    ):
        with pytest.raises(fs.CohortError, match=why):
            unit_rows(sites, open_told, **settings)


@SITES
def test_units_of_large_numbers_that_fire_for_one_row(sites: int) -> None:
    """Far from 0 every smooth activation is flat; standardised, the same rows are near."""
    features, labels = digits(900)
    method = fs.DeepAFL(layers=1, width=240, zero_activation="gelu", ridge=1.0)
    drawn = projection(method.seed, "zero", 0, 64, 240, 1.0, "float64")

    def gram(limits: Limits) -> Any:
        federation = secure(1000 * features, labels, sites, limits)
        return federation.exchange(*first(federation, method))["gram"]

    units = [row / np.sqrt(row[place]) for place, row in enumerate(gram(OFF)) if row[place] > 0]
    on = [(unit > 1e-3, unit) for unit in units]
    solved = [
        np.linalg.lstsq(drawn.weight[:, some].T, (unit - drawn.bias)[some], rcond=None)[0]
        for some, unit in on
        if some.sum() > 64
    ]
    assert shown(np.transpose(solved) / 1000, features)
    with pytest.raises(fs.CohortError, match=r"on numbers of about 7\.\d+e\+03 can make features"):
        gram(Limits(told=100))


@SITES
def test_units_of_a_member_that_fire_for_one_row(sites: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a run have openings of their own."""
    crafted = [fs.DeepAFL(layers=1, width=64, activation="relu", ridge=ridge) for ridge in (1.0, 2.0)]
    monkeypatch.setitem(CANDIDATES, "deepafl", lambda *given: crafted)
    features, labels = digits(1200)
    sums: list[str] = []

    def asked(limits: Limits) -> None:
        sums.clear()
        federation = secure(features, labels, sites, limits)
        exchange = federation.exchange

        def listening(request: Any, chain: Any) -> Any:
            total = exchange(request, chain)
            sums.extend(total.term.arrays)
            return total

        federation.exchange = listening  # type: ignore[method-assign]
        fs.Auto(methods="deepafl").fit(federation)

    asked(OFF)
    assert "0-0.hidden_gram" in sums
    with pytest.raises(fs.CohortError, match=r"activation='relu' with a gain of 1 on .* can make"):
        asked(Limits(told=100))
    assert "0-0.hidden_gram" not in sums


# -- told ------------------------------------------------------------------------------------------


@SITES
def test_layers_upon_layers(sites: int) -> None:
    features, labels = digits()
    deep = fs.DeepAFL(layers=20, width=64)
    with pytest.raises(fs.CohortError, match=r"% of the numbers that these rows hold would have been told"):
        deep.fit(secure(features, labels, sites))
    federation = secure(features, labels, sites)
    for _ in range(5):  # a repeat tells nothing new
        fs.AFL(ridge=1.0).fit(federation)
    deep.fit(secure(features, labels, sites, Limits(told=100)))


# -- layouts, seeds --------------------------------------------------------------------------------


def possible(sites: int, heard: list[int]) -> int:
    """How many counts of the sites, in one class, fit totals with the exponents 0, -1, -2 and so on."""
    states: Counter[tuple[int, ...]] = Counter({(0,) * len(heard): 1})
    for _ in range(sites):
        new: Counter[tuple[int, ...]] = Counter()
        for state, ways in states.items():
            for count in range(heard[0] - state[0] + 1):
                more = tuple(int(np.rint(count / 2**k)) * 2**k for k in range(len(heard)))
                there = tuple(np.add(state, more).tolist())
                if all(a <= b for a, b in zip(there, heard, strict=True)):
                    new[there] += ways
        states = new
    return states[tuple(heard)]


@SITES
def test_the_same_question_in_many_layouts(sites: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each site rounds its own counts: totals in steps of 1, 2, 4, 8 narrow down what each of them has."""
    features, labels = digits(120)

    def asked(limits: Limits | None, exponents: list[int]) -> list[Any]:
        federation = secure(features, labels, sites, limits)
        steps = itertools.chain(exponents, itertools.repeat(exponents[-1]))
        square = ("label_square", (len(np.unique(labels)),))
        monkeypatch.setattr(KnownTotals, "exponents", lambda *given: {square: next(steps)})
        question = first(federation, fs.AFL(ridge=1.0))
        return [federation.exchange(*question)["label_square"] for _ in exponents]

    once, again = asked(Limits(fewest_rows=2, rows_per_width=0.5), [50, 51])
    assert np.array_equal(once, again)  # in other steps it is answered in two limbs, to the last digit
    with pytest.raises(fs.CohortError, match="an exponent of -1"):
        asked(Limits(fewest_rows=2, rows_per_width=0.5), [-1])
    # With the rules off: any layout, as often as one likes.
    monkeypatch.setattr(Disclosure, "rounded_otherwise", lambda *given: None)
    monkeypatch.setattr("fedsolve.privacy.ring.LEAST_EXPONENT", -20)
    monkeypatch.setattr(KnownTotals, "check_accuracy", lambda *given: {})
    monkeypatch.setattr(KnownTotals, "too_coarse", lambda *given: set())
    found = asked(OFF, [0, -1, -2, -3])
    heard = np.rint(found).astype(int).T.tolist()
    left = math.prod(possible(sites, totals) for totals in heard)
    assert 0 < 10**6 * left < math.prod(possible(sites, totals[:1]) for totals in heard)


@SITES
def test_the_best_of_forty_seeds(sites: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = digits()
    federation = secure(features, labels, sites)
    method = fs.DeepAFL(layers=1, width=16)
    federation.seeded(fs.Recipe(method), federation.describe())
    about = about_opening(method.start(federation.describe()).chain.opening)
    seeds = {draw_seed(federation.engine, federation.clients, about) for _ in range(40)}
    assert len(seeds) == 1
    real, named = drawing_of(about, federation.clients), "fedsolve.privacy.joint_seed.drawing_of"
    names = itertools.chain(["another drawing"], itertools.repeat(real))
    monkeypatch.setattr(named, lambda *given: next(names))  # the server's name, then what the sites expect
    with pytest.raises(fs.CohortError, match="a second seed is drawn for the"):
        draw_seed(federation.engine, federation.clients, about)
    drawn = set()
    for number in range(5):  # with the rule off, any name is taken
        monkeypatch.setattr(named, lambda *given, name=f"drawing {number}": name)
        drawn.add(draw_seed(federation.engine, federation.clients, about))
    assert len(drawn) == 5  # and one of them may be chosen


@SITES
def test_a_seed_for_every_ridge(sites: int) -> None:
    """Another parameter, in whatever digit, is no reason for another seed."""
    features, labels = digits()
    federation = secure(features, labels, sites)
    methods = [fs.DeepAFL(layers=1, width=16, ridge=1 + 1e-9 * step) for step in range(5)]
    recipes = [federation.seeded(fs.Recipe(method), federation.describe()) for method in methods]
    assert len({recipe.method.seed for recipe in recipes}) == 1


# -- noise -----------------------------------------------------------------------------------------


def heard(federation: SecureFederation, method: Any) -> list[Any]:
    """All totals of a run, and what stops it."""
    found, exchange = [], federation.exchange

    def listening(request: Any, chain: Any) -> Any:
        total = exchange(request, chain)
        found.append(total)
        return total

    federation.exchange = listening  # type: ignore[method-assign]
    method.fit(federation)
    return found


@SITES
def test_noise_that_hides_nothing(sites: int) -> None:
    """The server chooses epsilon: with 10^7 a class of one row is its column of the cross matrix."""
    rng = np.random.default_rng(0)
    features, labels = rng.standard_normal((300, 6)), np.arange(300) % 2
    labels[7] = 2

    def error(limits: Limits, epsilon: float, delta: float = 1e-5) -> float:
        federation = secure(features, labels, sites, limits)
        method = fs.Private("afl", epsilon=epsilon, delta=delta)
        totals = heard(federation, method)
        alone = totals[1].term.arrays["cross"][:6, 2]
        row, centre = features[7] / np.linalg.norm(features[7]), method.fit(federation).centre
        true = (row - centre) / np.linalg.norm(row - centre)
        return float(np.abs(alone / np.linalg.norm(alone) - true).max())

    assert error(OFF, 1e7) < 0.01
    for epsilon, delta in ((1e7, 1e-5), (8.0, 0.9)):
        with pytest.raises(fs.CohortError, match=r"noise hides no row \(epsilon_most\)"):
            error(Limits(), epsilon, delta)
    assert error(OFF, 4.0) > 0.1


@SITES
def test_noise_that_is_averaged_away(sites: int) -> None:
    """Many runs of little epsilon are one of much: all noisy answers about a row stay within epsilon_most."""
    features, labels = digits(300)
    federation = secure(features[:, 20:26], labels % 2, sites)
    for _ in range(3):
        fs.Private("afl", epsilon=4.0).fit(federation)
    with pytest.raises(fs.CohortError, match=r"of 8 is spent \(epsilon_most\)"):
        fs.Private("afl", epsilon=4.0).fit(federation)
    free = secure(features[:, 20:26], labels % 2, sites, OFF)
    for _ in range(6):
        fs.Private("afl", epsilon=4.0).fit(free)


@SITES
def test_a_site_that_takes_its_own_noise_off(sites: int) -> None:
    """What is left without one site's share is as much as the account says, with three sites too."""
    release = NoisyAnswer({"gram": 1.0}, 1.0, honest=1.0)
    share = release.deviation("gram", 1, release.shares(sites)) / np.sqrt(release.shares(sites))
    assert share * np.sqrt(sites - 1) >= release.deviation("gram", 1) * (1 - 1e-6)


# -- columns of one value --------------------------------------------------------------------------


@SITES
@pytest.mark.parametrize("values", [(1.0, 2.0), (5.0, 7.0), (-3.5, 0.0)])
def test_a_column_of_one_value_but_for_a_row(sites: int, values: tuple[float, float]) -> None:
    """Of ones and a two, say: its products less the sums of all other columns are the row."""
    rng = np.random.default_rng(0)
    usual, odd = values
    features = np.column_stack([np.full(ROWS, usual), rng.standard_normal((ROWS, 5))])
    features[77, 0] = odd
    labels = np.arange(ROWS) % 2

    def difference(limits: Limits) -> Any:
        federation = secure(features, labels, sites, limits)
        total = federation.exchange(*first(federation, fs.AFL(ridge=1.0)))
        return (total["gram"][0] - usual * total["cross"].sum(axis=1))[1:, None] / (odd - usual)

    assert shown(difference(OFF), features[:, 1:]) == {77}
    assert shown(difference(Limits()), features[:, 1:]) == set()


@SITES
def test_a_target_of_one_value_but_for_a_row(sites: int) -> None:
    rng = np.random.default_rng(0)
    features, target = rng.standard_normal((ROWS, 5)), np.where(np.arange(ROWS) == 77, 1.0, 0.0) + 0.0
    target[0] = 1e-9  # not a class

    def cross(limits: Limits) -> Any:
        owners = np.arange(ROWS) % sites
        inner = fs.LocalFederation.from_arrays(features, target, owners, task="regression")
        federation = SecureFederation(inner, limits=limits)
        return federation.exchange(*first(federation, fs.AFL(ridge=1.0)))["cross"]

    assert shown(cross(OFF), features) == {77}
    with pytest.raises(fs.CohortError, match="the target is the same in all but few rows"):
        cross(Limits())


@SITES
def test_a_row_alone_at_its_site_shows_in_no_count(sites: int) -> None:
    """Sites of many rows tell the most that is counted; what is left over must not be one row's flags."""
    rng = np.random.default_rng(0)
    features = np.column_stack([rng.standard_normal((ROWS, 2)), rng.random((ROWS, 6)) < 0.5])
    owners = np.arange(ROWS) % (sites - 1)
    owners[77] = sites - 1

    def counted(flags: Any) -> Any:
        values = features.copy()
        values[77, 2:] = flags
        folds_of = np.arange(ROWS) % 3
        return sum(
            column_counts(values[owners == site], folds_of[owners == site], 10)[:3] for site in range(sites)
        )

    assert np.array_equal(counted(np.ones(6)), counted(np.zeros(6)))


@SITES
def test_counts_of_rows_are_those_that_a_question_declares(sites: int) -> None:
    """Products of small whole numbers are no counts: they are told in full."""
    rng = np.random.default_rng(0)
    features, labels = rng.integers(0, 3, (ROWS, 8)).astype(float), np.arange(ROWS) % 2
    federation = secure(features, labels, sites)
    total = federation.exchange(*first(federation, fs.AFL(ridge=1.0)))
    told = {client.disclosure.told for client in federation._attending.values()}
    size = 36 + total["cross"].size
    assert min(told) >= size / (ROWS * 9)


# -- schemas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"bounds": (61.0, 61.0 + 1e-9)}, r"with bounds \[61.0"),
        ({"reference": 1e18, "scale": 1e2}, r"about 1e\+18 with a scale of 100"),
        ({"scale": 1e9}, "about 60 with a scale of 1e"),
        (
            {"kind": "category", "categories": ("61.5",), "missing": "other"},
            "as a category, here it is a number",
        ),
        ({}, ""),
        ({"reference": 48.0, "scale": 9.0}, ""),
    ],
)
def test_a_schema_that_nobody_proposed(tmp_path: Any, more: dict[str, Any], why: str) -> None:
    """Bounds about one value make a column of it that differs in the rows above; so does a place far away."""
    own = Schema((Column("age", reference=60.0, scale=10.0), Column("b")), "outcome")
    read: list[Any] = []
    site = Proposing("a", own, tmp_path, lambda agreed: read.append(agreed), lambda event: None)
    agreed = Schema((dataclasses.replace(own.columns[0], **more), Column("b")), "outcome")
    if why:
        with pytest.raises(fs.DataError, match=why):
            site._take(agreed)
        assert not read
    else:
        site._take(agreed)
        assert read == [agreed]
