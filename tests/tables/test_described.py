"""Methods on described tables: one preparation for all of them, the same for every partition."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import Recipe
from fedsolve.errors import CategoryWarning, ConditionWarning, DataError
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.messages import Term, Total
from fedsolve.federation.preparing import solve_preparation
from fedsolve.network.expected import expected_layout
from fedsolve.tables.encoder import encode
from fedsolve.tables.schema import Column, Schema
from tests.oracle import relative_difference

pd = pytest.importorskip("pandas")

ROWS, CLASSES = 400, 3
SCHEMA = Schema(
    (
        Column("id", "unused"),
        Column("age", missing="flag", reference=60, scale=10),
        Column("stamp", reference=1.7e9, scale=1e3),
        Column("constant"),
        Column("nowhere", missing="flag", reference=5, scale=2),
        Column("sex", "category", categories=("F", "M"), missing="flag"),
        Column("visit", "date", reference=18262),
        Column("note", "text", buckets=4),
    ),
    label="y",
    classes=tuple(range(CLASSES)),
)

METHODS = {
    "afl": fs.AFL(ridge=1.0, intercept=True),
    "afl scaled again": fs.AFL(ridge=1.0, scale="standard"),
    "deepafl": fs.DeepAFL(layers=2, width=24),
    "apfl": fs.APFL(width=24, refinement_width=12),
    "cascade": fs.Cascade(layers=1, width=16),
}


@pytest.fixture(scope="module")
def rows():
    """A frame, its labels; nobody knows `nowhere`, a tenth of the others is missing."""
    rng = np.random.default_rng(4)
    labels = np.arange(ROWS) % CLASSES
    frame = pd.DataFrame(
        {
            "age": 60 + 10 * rng.normal(size=ROWS) + 6 * labels,
            "stamp": 1.7e9 + 1e3 * rng.normal(size=ROWS) + 700 * labels,
            "constant": 3.7,
            "nowhere": np.nan,
            "sex": rng.choice(["F", "M", "X"], ROWS),
            "visit": np.datetime64("2020-03-01") + rng.integers(0, 900, ROWS).astype("timedelta64[D]"),
            "note": rng.choice(["some pain", "no pain at all", ""], ROWS),
        }
    )
    for name in ("age", "stamp", "sex", "visit"):
        frame.loc[rng.random(ROWS) < 0.1, name] = None
    return frame, labels


def federation(rows, owners, schema=SCHEMA, **options):
    frame, labels = rows
    return fs.LocalFederation.from_arrays(encode(schema, frame), labels, owners, schema=schema, **options)


def partitions(rows):
    """One client; four; seven by Dirichlet; and one client that lacks a column altogether."""
    frame, labels = rows
    return {
        "one": np.zeros(ROWS, dtype=int),
        "four": np.arange(ROWS) % 4,
        "dirichlet": fs.partition.dirichlet(labels, clients=7, alpha=0.2, seed=1),
        "age missing at one": frame["age"].isna().to_numpy().astype(int),
    }


def prepared(frame):
    """The preparation by pandas, of all rows together: the second opinion."""
    features = encode(SCHEMA, frame)
    for name in ("age", "stamp", "constant", "nowhere", "visit"):
        place = SCHEMA.names.index(name)
        values = features[:, place]
        there = values[~np.isnan(values)]
        if len(there) == 0:
            features[:, place] = 0.0
            continue
        deviation = there.std() if there.std() > 1e-12 * abs(there.mean()) else 1.0
        features[:, place] = (np.where(np.isnan(values), there.mean(), values) - there.mean()) / deviation
    return features


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_that_of_rows_prepared_together(rows, name):
    frame, labels = rows
    method = METHODS[name]
    expected = method.fit(
        fs.LocalFederation.from_arrays(prepared(frame), labels, np.arange(ROWS) % 4)
    ).decision_function(prepared(frame))
    for owners in partitions(rows).values():
        model = Recipe(method, SCHEMA).fit(federation(rows, owners))
        assert relative_difference(model.decision_function(frame), expected) < 1e-9


@pytest.mark.torch
def test_a_gradient_method_sees_prepared_rows(rows):
    pytest.importorskip("torch")
    frame, labels = rows
    owners = np.arange(ROWS) % 4
    method = fs.gradient.FedAvg(rounds=2, network="mlp:6", precision="float64")
    plain = method.fit(fs.LocalFederation.from_arrays(prepared(frame), labels, owners))
    described = Recipe(method, SCHEMA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # clients that cannot answer together would, one by one, with one
        warnings.simplefilter("ignore", CategoryWarning)
        model = described.fit(federation(rows, owners))
    expected = plain.decision_function(prepared(frame))
    assert relative_difference(model.decision_function(frame), expected) < 1e-9


def test_tables_and_arrays_are_the_same_rows(rows, tmp_path):
    frame, labels = rows
    fed = federation(rows, np.arange(ROWS) % 4)
    model = Recipe(METHODS["deepafl"], SCHEMA).fit(fed)
    scores = model.decision_function(frame)
    shuffled = frame[frame.columns[::-1]]
    np.testing.assert_array_equal(model.decision_function(shuffled), scores)
    np.testing.assert_array_equal(model.decision_function(encode(SCHEMA, frame)), scores)
    np.testing.assert_array_equal(model.staged_decision_function(frame)[-1], scores)
    assert model.score(frame, labels) == fed.evaluate(model)
    model.save(tmp_path / "m.safetensors")
    loaded = fs.load_model(tmp_path / "m.safetensors")
    assert loaded.schema == SCHEMA
    np.testing.assert_array_equal(loaded.decision_function(frame), scores)
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()
    with pytest.raises(DataError, match="'sex' is missing"):
        model.predict(frame.drop(columns="sex"))
    with pytest.raises(DataError, match="takes rows of"):
        model.predict(encode(SCHEMA, frame)[:, 1:])


def test_a_plain_model_refuses_tables_and_missing_values(rows):
    frame, labels = rows
    model = fs.AFL().fit(fs.LocalFederation.from_arrays(prepared(frame), labels, np.arange(ROWS) % 4))
    assert model.schema is None
    with pytest.raises(DataError, match="knows no names of columns"):
        model.predict(frame)
    with pytest.raises(DataError, match="NaN"):
        model.predict(encode(SCHEMA, frame))


def test_missing_values_need_a_preparation(rows):
    frame, labels = rows
    owners = np.arange(ROWS) % 4
    with pytest.raises(DataError, match="has missing values, and the run does not fill them"):
        fs.AFL().fit(federation(rows, owners))
    with pytest.raises(DataError, match="NaN"):
        fs.LocalFederation.from_arrays(encode(SCHEMA, frame), labels, owners)
    whole = frame.assign(nowhere=1.0).ffill().bfill()
    assert (
        fs.AFL(ridge=1.0).fit(federation((whole, labels), owners)).score(encode(SCHEMA, whole), labels) > 0.3
    )


def test_clients_of_another_schema_are_refused_by_column(rows):
    frame, labels = rows
    kept = (column for column in SCHEMA.columns if column.name != "age")
    other = Schema((*kept, Column("weight", missing="flag")))
    features = encode(other, frame.rename(columns={"age": "weight"}))
    mixed = [
        fs.Participant("a", fs.ClientData(encode(SCHEMA, frame), labels, schema=SCHEMA)),
        fs.Participant("b", fs.ClientData(features, labels, schema=other)),
    ]
    with pytest.raises(DataError, match=r"'b'.*'age' is missing; column 'weight' is not known there"):
        Recipe(fs.AFL(), SCHEMA).fit(fs.LocalFederation(mixed, classes=range(CLASSES)))
    without = fs.Participant("b", fs.ClientData(prepared(frame), labels))
    with pytest.raises(DataError, match=r"'b'.*came without one"):
        Recipe(fs.AFL(), SCHEMA).fit(fs.LocalFederation([mixed[0], without], classes=range(CLASSES)))
    with pytest.raises(DataError, match="the schema makes"):
        Recipe(fs.AFL(), SCHEMA).fit(fs.LocalFederation.from_arrays(np.ones((9, 2)), labels[:9], labels[:9]))


def test_a_new_run_with_other_clients_forgets_the_old_preparation(rows):
    """The opening is the same and the preparation is not: nothing derived from rows may be kept."""
    frame, labels = rows
    owners = np.arange(ROWS) % 2
    fed = federation(rows, owners)
    method = Recipe(METHODS["deepafl"], SCHEMA)
    method.fit(fed)
    gone = fed.remove("client-1")
    alone = method.fit(fed).decision_function(frame)
    fresh = method.fit(federation((frame[owners == 0], labels[owners == 0]), np.zeros(ROWS // 2, dtype=int)))
    np.testing.assert_array_equal(alone, fresh.decision_function(frame))
    gone.forget()


def test_a_described_run_resumes_after_every_exchange(rows, tmp_path):
    frame, _ = rows
    fed = federation(rows, np.arange(ROWS) % 4)
    for number, method in enumerate((METHODS["deepafl"], METHODS["apfl"])):
        described = Recipe(method, SCHEMA)
        whole = described.fit(fed)
        run = described.start(fed.describe())
        while (request := run.request(fed.clients)) is not None:
            run.absorb(fed.exchange(request, run.chain))
            state = run.to_bytes()
            run = described.start(fed.describe())
            run.restore(state, f"checkpoint {number}")
        assert len(run.history) == run.exchanges == len(whole.history)
        assert run.history[0].kind == "table-moments"
        np.testing.assert_array_equal(run.model().decision_function(frame), whole.decision_function(frame))


def test_requests_of_a_described_run_travel(rows):
    """Every answer is the same to the request as it comes off the wire."""
    fed = federation(rows, np.arange(ROWS) % 4)
    run = Recipe(fs.AFL(), SCHEMA).start(fed.describe())
    frame, labels = rows
    far = fs.Participant("far", fs.ClientData(encode(SCHEMA, frame), labels, schema=SCHEMA))
    near = fs.Participant("near", fs.ClientData(encode(SCHEMA, frame), labels, schema=SCHEMA))
    kinds = []
    while (request := run.request(fed.clients)) is not None:
        kinds.append(request.kind)
        terms = [far.answer(decode_request(encode_request(request))), near.answer(request)]
        for name, array in terms[0].arrays.items():
            np.testing.assert_array_equal(array, terms[1].arrays[name])
        layout = expected_layout(request, run.chain, run.spec)
        assert layout is not None
        assert set(layout.forms) == set(terms[0].arrays)
        run.absorb(fed.exchange(request, run.chain))
    assert kinds == ["table-moments", "afl"]


def test_personal_models_are_described(rows, tmp_path):
    frame, labels = rows
    owners = np.arange(ROWS) % 4
    model = Recipe(METHODS["apfl"], SCHEMA).fit(federation(rows, owners))
    plain = METHODS["apfl"].fit(fs.LocalFederation.from_arrays(prepared(frame), labels, owners))
    own, expected = model.personal("client-2"), plain.personal("client-2")
    assert own.schema == SCHEMA
    assert (
        relative_difference(own.decision_function(frame), expected.decision_function(prepared(frame))) < 1e-9
    )
    own.save(tmp_path / "own.safetensors", growing=True)
    loaded = fs.load_model(tmp_path / "own.safetensors")
    np.testing.assert_array_equal(loaded.decision_function(frame), own.decision_function(frame))
    more = fs.ClientData(encode(SCHEMA, frame), labels, np.arange(40), schema=SCHEMA)
    grown = loaded.updated(more)
    again = expected.updated(fs.ClientData(prepared(frame), labels, np.arange(40)))
    assert grown.schema == SCHEMA
    assert (
        relative_difference(grown.decision_function(frame), again.decision_function(prepared(frame))) < 1e-9
    )
    over = METHODS["apfl"].over(Recipe(METHODS["afl"], SCHEMA).fit(federation(rows, owners)))
    assert over.personalised(more).decision_function(frame).shape == (ROWS, CLASSES)


def test_balanced_classes_are_weighted_by_summed_counts(rows):
    frame, labels = rows
    keep = np.flatnonzero((labels > 0) | (np.arange(ROWS) % 10 == 0))
    few = frame.iloc[keep], labels[keep]
    counts = np.bincount(labels[keep])
    weights = (len(keep) / (CLASSES * counts))[labels[keep]]
    expected = Recipe(fs.AFL(ridge=1.0, intercept=True), SCHEMA, class_weight="balanced")
    scores = [
        expected.fit(federation(few, owners[keep])).decision_function(frame)
        for owners in partitions(rows).values()
    ]
    for other in scores[1:]:
        assert relative_difference(other, scores[0]) < 1e-9
    features = Recipe(fs.AFL(), SCHEMA).fit(federation(few, np.zeros(len(keep), dtype=int))).preparing
    weighted = fs.LocalFederation.from_arrays(
        features.apply(encode(SCHEMA, few[0])), few[1], np.zeros(len(keep), dtype=int), sample_weight=weights
    )
    plain = fs.AFL(ridge=1.0, intercept=True).fit(weighted)
    assert (
        relative_difference(scores[0], plain.decision_function(features.apply(encode(SCHEMA, frame)))) < 1e-9
    )


def test_a_missing_value_is_filled_and_numbers_stay_without_standardising(rows):
    frame, _ = rows
    model = Recipe(fs.AFL(ridge=1.0), SCHEMA, standardise=False).fit(federation(rows, np.arange(ROWS) % 4))
    seen = model.preparing.apply(encode(SCHEMA, frame))
    np.testing.assert_allclose(seen[:, 0], frame["age"].fillna(frame["age"].mean()), rtol=1e-12)


def test_a_reference_that_is_far_away_is_told(rows):
    frame, labels = rows
    far = Schema((Column("stamp"),), classes=range(CLASSES))
    near = Schema((Column("stamp", reference=1.7e9, scale=1e3),), classes=range(CLASSES))
    with pytest.warns(ConditionWarning, match="reference is far from the values of 'stamp'"):
        Recipe(fs.AFL(), far).fit(federation((frame[["stamp"]], labels), np.arange(ROWS) % 4, far))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Recipe(fs.AFL(), near).fit(federation((frame[["stamp"]], labels), np.arange(ROWS) % 4, near))


def test_a_constant_is_told_from_rounding_among_many_clients():
    """A thousand terms leave some hundred roundings of a variance that is zero."""
    rng = np.random.default_rng(0)
    values = rng.uniform(0.1, 10, 200)
    schema = Schema(tuple(Column(f"c{number}") for number in range(len(values))))
    total = Total(Term({"moments": np.zeros((3, len(values)))}), ())
    for rows in rng.integers(1, 500, 1000):
        column = np.tile(values, (rows, 1))
        moments = np.array([np.full(len(values), rows), column.sum(axis=0), (column**2).sum(axis=0)])
        total.term.add(Term({"moments": moments}, {"rows": int(rows)}))
    assert np.all(solve_preparation(schema, total, standardise=True).scale == 1.0)


def test_nothing_is_asked_where_nothing_follows(rows):
    frame, labels = rows
    schema = Schema((Column("sex", "category", categories=("F", "M")),), classes=range(CLASSES))
    model = Recipe(fs.AFL(ridge=1.0), schema).fit(federation((frame[["sex"]], labels), labels, schema))
    assert len(model.history) == 1
    assert model.preparing is None
    assert model.predict({"sex": ["F", "other"]}).shape == (2,)
