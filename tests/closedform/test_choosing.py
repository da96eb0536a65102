"""Settings chosen on rows held out: exact, the same for every partition, within a budget, and told."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform.deepafl import CHOSEN
from fedsolve.federation.recipe import exchanges
from fedsolve.scoring.candidates import FEW, CandidateMarks, folds_for
from tests.command import document, fedsolve, refused
from tests.oracle import one_hot, relative_difference

AUTO = dict.fromkeys(CHOSEN, "auto")


def table(rows=300, seed=0):
    """Four columns in different units, labels by two of them, bent."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((rows, 4)) * [1.0, 20.0, 0.1, 5.0] + [0.0, 100.0, 3.0, -2.0]
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    score = scaled[:, 0] * scaled[:, 1] + 0.5 * scaled[:, 2]
    return features, np.array(["no", "yes"])[(score + 0.3 * rng.standard_normal(rows) > 0).astype(int)]


X, Y = table()


def federation(clients=1, seed=0, features=X, labels=Y, **more):
    owners = np.random.default_rng(seed).integers(0, clients, len(labels))
    return fs.LocalFederation.from_arrays(features, labels, owners, clients=clients, **more)


# -- AFL: generalised cross-validation --------------------------------------------------------------


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_errors_of_every_ridge_are_those_of_the_hat_matrix(intercept, weighted):
    targets = one_hot(np.unique(Y, return_inverse=True)[1])
    weights = np.random.default_rng(1).integers(0, 4, len(X)).astype(float) if weighted else np.ones(len(X))
    model = fs.AFL(ridge="auto", intercept=intercept).fit(federation(3, sample_weight=weights))
    told = model.history[-1].metrics
    again = np.repeat(np.arange(len(X)), weights.astype(int))  # whole weights are rows that come so often
    rows, wanted = X[again], targets[again]
    if intercept:
        rows, wanted = rows - rows.mean(axis=0), wanted - wanted.mean(axis=0)
    count = len(rows)
    for ridge, found in zip(told["ridges"], told["errors"], strict=True):
        hat = rows @ np.linalg.solve(rows.T @ rows + ridge * np.eye(4), rows.T) + intercept / count
        left = np.sum((wanted - hat @ wanted) ** 2)
        assert found == pytest.approx(count * left / (count - np.trace(hat)) ** 2, rel=1e-9)
    best = told["ridges"][int(np.argmin(told["errors"]))]
    assert model.parameters["ridge"] == best
    explicit = fs.AFL(ridge=best, intercept=intercept).fit(federation(3, sample_weight=weights))
    assert relative_difference(model.weight, explicit.weight) <= 1e-9


def test_weights_that_are_shares_choose_the_ridge_of_their_rows():
    weights = np.full(len(X), 1 / len(X))
    plain, shares = (fs.AFL(ridge="auto").fit(federation(2, sample_weight=w)) for w in (None, weights))
    assert shares.parameters["ridge"] * len(X) == pytest.approx(plain.parameters["ridge"], rel=1e-9)
    assert relative_difference(plain.weight, shares.weight) <= 1e-9


@pytest.mark.parametrize("unit", [1e120, 1e-120])
def test_the_choice_of_a_ridge_does_not_depend_on_the_unit(unit):
    """Fourth powers of these units, of which errors were made, are zero or infinite."""
    plain, scaled = (fs.AFL(ridge="auto").fit(federation(features=X * scale)) for scale in (1.0, unit))
    assert scaled.parameters["ridge"] / unit / unit == pytest.approx(plain.parameters["ridge"], rel=1e-9)


def test_the_ridge_is_chosen_in_one_exchange_and_by_any_partition():
    one, many = (fs.AFL(ridge="auto", intercept=True).fit(federation(k)) for k in (1, 7))
    assert len(one.history) == 1
    assert relative_difference(one.weight, many.weight) <= 1e-9


# -- candidates ------------------------------------------------------------------------------------


def test_deepafl_chooses_the_same_by_any_partition_and_trains_it_on_all_rows():
    method = fs.DeepAFL(**AUTO | {"width": 24, "layers": 3}, intercept=True)
    one, many = (method.fit(federation(k)) for k in (1, 6))
    assert relative_difference(one.decision_function(X), many.decision_function(X)) <= 1e-9
    assert one.parameters["layers"] == 3, "what is given is not chosen"
    explicit = fs.DeepAFL(**one.parameters).fit(federation(6))
    assert relative_difference(explicit.decision_function(X), many.decision_function(X)) <= 1e-9
    (chosen,) = [tried for tried in one.tried if tried.chosen]
    assert chosen.rows == len(X)
    assert chosen.errors == min(tried.errors for tried in one.tried) or chosen.loss is not None


def test_marks_of_candidates_are_those_of_models_trained_without_the_fold():
    method = dataclasses.replace(fs.DeepAFL.trial(), layers="auto", width=16, scale="standard")
    (tried,) = method.fit(federation(4)).tried
    wrong, loss = 0, 0.0
    for fold in folds_for(len(X), 4):
        model = fs.Recipe(
            dataclasses.replace(method, layers=method.candidates(None, len(X))[0].layers), part=fold.training
        ).fit(federation(2))
        held = fs.ClientData(X, Y)
        rows = fold.held_out.of(held)
        scores = model.decision_function(rows.features(slice(None)), layers=tried.layers)
        truth = rows.own_labels
        wrong += int(np.sum(model.classes[np.argmax(scores, axis=1)] != truth))
        loss += float(np.sum((scores - (truth[:, None] == model.classes)) ** 2))
    assert tried.errors == wrong / len(X)
    assert tried.loss == pytest.approx(loss / len(X), rel=1e-9)


def test_candidates_that_share_sums_are_marked_as_if_they_asked_alone():
    auto = fs.Auto(methods="afl,kernelafl")
    tried = auto.fit(federation(4)).tried
    for one, method in zip(tried, auto.candidates(federation(1).describe(), len(X)), strict=True):
        wrong = 0
        for fold in folds_for(len(X), 4):
            model = method.scaled(fold.taken).fit(federation(2), part=fold.training)
            rows = fold.held_out.of(fs.ClientData(X, Y))
            wrong += int(np.sum(model.predict(rows.features(slice(None))) != rows.own_labels))
        assert one.errors == wrong / len(X), one
    # Per fold: its two scalings and its sums, which all share; eight Gram matrices of kernels.
    alone = fs.Auto(methods="afl").fit(federation(1)).history[1].bytes_up
    assert auto.fit(federation(1)).history[2].bytes_up < 1.2 * (alone + 8 * 3 * 4 * 128 * 129)


def test_a_kernels_ridge_is_that_of_the_hat_matrix():
    method = fs.KernelAFL(landmarks=24, ridge="auto", scale="standard")
    model = method.fit(federation(3))
    assert model.parameters["ridge"] != "auto"
    ridges = model.parameters["ridge"] * 10.0 ** np.array([-0.5, 0.0, 0.5])
    targets = one_hot(np.unique(Y, return_inverse=True)[1])
    centred, errors = targets - targets.mean(axis=0), []
    for ridge in ridges:
        kernel = model.transform(X)
        hat = kernel @ np.linalg.solve(kernel.T @ kernel + ridge * np.eye(24), kernel.T)
        left = np.sum((centred - hat @ centred) ** 2)
        errors.append(len(X) * left / (len(X) - 1 - np.trace(hat)) ** 2)
    assert int(np.argmin(errors)) == 1


def test_folds_share_no_row_and_cover_all():
    parts = [fold.held_out.of(fs.ClientData(X, Y)).rows for fold in folds_for(len(X), 4)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(X)))
    (large,) = folds_for(200_000, 2)
    many = fs.ClientData(np.random.default_rng(0).standard_normal((5000, 2)), np.zeros(5000))
    assert not set(large.training.of(many).rows) & set(large.held_out.of(many).rows)


def marked(*mistakes):
    return np.array([[100.0] * len(mistakes), mistakes, np.array(mistakes, dtype=float)])


def test_the_best_has_the_fewest_mistakes_then_the_cheapest_kind_then_the_least_loss():
    marks = CandidateMarks(counts=True, rows=100, kinds={0: "deep", 1: "deep", 2: "linear", 3: "linear"})
    marks.of = {0: marked(10), 1: marked(10), 2: marked(11), 3: marked(30)}
    marks.costs = {0: (9, 100), 1: (9, 100), 2: (1, 500), 3: (1, 400)}
    assert marks.best() == (2, 0), "within half a standard error of the fewest, the fewest exchanges"
    marks.of[1][2] = 5.0
    marks.of[2] = marked(12)
    assert marks.best() == (1, 0), "of one kind, the least loss"
    marks.counts = False
    assert marks.best() == (1, 0)


def test_a_race_keeps_what_is_ahead_and_still_improves():
    marks, mistakes = CandidateMarks(counts=True, rows=100), marked
    marks.of = {0: mistakes(20), 1: mistakes(30, 28, 26), 2: mistakes(40, 30, 22), 3: mistakes(20, 24, 25)}
    marks.of |= {4: mistakes(60, 60, 59), 5: mistakes(50, 45, 40)}
    # 3 did best without layers; 4 and 5 come after three others.
    assert marks.going_on([1, 2, 3, 4, 5], rung=0) == [1, 2]
    # Even if it gained 2 x 5 more, 5 would have 30 mistakes, and 20 + 2 standard errors are fewer.
    assert marks.going_on([4, 5], rung=0) == [5]
    marks.of[0] = mistakes(4)
    assert marks.going_on([5], rung=0) == []
    assert marks.best() == (0, 0)
    assert marks.best([1, 2]) == (2, 2)


def test_a_race_ends_with_what_training_all_layers_would_have_chosen(monkeypatch):
    method = fs.DeepAFL(**AUTO, intercept=True)
    raced = method.fit(federation(2))
    assert min(tried.trained for tried in raced.tried) == 2 < max(tried.trained for tried in raced.tried)
    assert [record.kind for record in raced.history].count("rung") >= 1
    for module in ("candidates", "choice"):
        monkeypatch.setattr(f"fedsolve.scoring.{module}.RUNGS", ())
    whole = method.fit(federation(2))
    assert {tried.trained for tried in whole.tried} == {8}
    (one,), (other,) = ([t for t in model.tried if t.chosen] for model in (raced, whole))
    assert (one.settings, one.layers, one.errors) == (other.settings, other.layers, other.errors)


# -- Auto ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_auto_takes_the_best_and_says_what_it_tried():
    model = fs.Auto().fit(federation(3))
    assert {tried.method for tried in model.tried} == set(fs.Auto().names) - {"deepafl"}, "of few rows"
    (chosen,) = [tried for tried in model.tried if tried.chosen]
    assert chosen.method in ("kernelafl", "kernelsoftmax"), "the labels are not linear"
    assert model.score(X, Y) > 0.8
    linear = np.where(X[:, 0] + 0.2 * (X[:, 1] - 100) / 20 > 0, "yes", "no")
    assert fs.Auto(methods="afl").fit(federation(3, labels=linear)).score(X, linear) > 0.9


@pytest.mark.slow
def test_many_answers_at_once_are_those_of_clients_one_by_one(monkeypatch):
    method, asked = fs.Auto(methods="afl,softmax,kernelafl"), []
    answer = fs.Participant.answer
    monkeypatch.setattr(
        fs.Participant, "answer", lambda self, *given: (asked.append(self.name), answer(self, *given))[1]
    )
    pooled = method.fit(federation(48))
    assert "client-00 to client-47" in asked
    monkeypatch.setattr("fedsolve.federation.members.MANY", 10**9)
    asked.clear()
    apart = method.fit(federation(48))
    assert "client-00 to client-47" not in asked
    # A kernel machine is chosen, which promises 1e-8.
    assert relative_difference(pooled.decision_function(X), apart.decision_function(X)) <= 1e-8
    assert [tried.errors for tried in pooled.tried] == [tried.errors for tried in apart.tried]
    for one, other in zip(pooled.history, apart.history, strict=True):
        assert (one.bytes_up, one.bytes_down, one.catch_up_bytes) == (
            other.bytes_up,
            other.bytes_down,
            other.catch_up_bytes,
        )


def test_the_one_candidate_that_the_limits_leave_is_trained():
    model = fs.Auto(methods="softmax,afl", max_exchanges=6).fit(federation(3))
    found, *left = model.tried
    assert (found.method, found.chosen) == ("afl", True)
    assert len(model.history) <= 6
    assert all("exchanges" in one.left_out for one in left)
    assert found.left_out == "the limits leave no other candidate"


@pytest.mark.slow
def test_a_budget_counts_all_candidates_together():
    model = fs.Auto(max_exchanges=6).fit(federation(3))
    assert len(model.history) <= 6
    left = [tried for tried in model.tried if tried.left_out]
    assert {tried.method for tried in left} == {"softmax", "kernelsoftmax"}
    assert "exchanges in all" in left[0].left_out
    few = fs.Auto(budget=0.1).fit(federation(3))
    spent = sum(record.bytes_up + record.bytes_down for record in few.history)
    assert spent <= 100_000
    deep = fs.Auto(methods="deepafl", max_exchanges=2 + 2 * 18 + 2).fit(federation(3))
    assert len(deep.history) <= 40, "the comparisons on the way count"
    with pytest.raises(fs.DataError, match="takes 40 exchanges in all"):
        fs.Auto(methods="deepafl", max_exchanges=39).fit(federation(3))
    with pytest.raises(fs.DataError, match="budget is too small"):
        fs.Auto(budget=1e-5).fit(federation(3))


def test_a_candidate_that_cannot_be_trained_is_left_out_with_why():
    labels = np.arange(300) % 20
    features = np.eye(20)[labels]  # rows of a class are alike, and so all on one side of a fold
    model = fs.Auto(methods="afl,kernelafl").fit(federation(3, features=features, labels=labels))
    assert model.score(features, labels) == 1.0
    failed = [tried for tried in model.tried if tried.method == "kernelafl"]
    assert failed
    assert all("no spread to draw landmarks from" in tried.left_out for tried in failed)
    with pytest.raises(fs.DataError, match="no spread to draw landmarks from"):
        fs.Auto(methods="kernelafl").fit(federation(3, features=features, labels=labels))


def test_few_rows_are_not_divided():
    rows = slice(0, FEW - 1)
    model = fs.DeepAFL(**AUTO).fit(federation(2, features=X[rows], labels=Y[rows]))
    (tried,) = model.tried[:1]
    assert tried.chosen
    assert "too few" in tried.left_out


@pytest.mark.slow
def test_a_choice_goes_on_where_it_was_stopped(tmp_path):
    method = fs.DeepAFL(**AUTO | {"width": 16})
    whole = method.fit(federation(3))
    rung = [record.kind for record in whole.history].index("rung")
    for stop in (0, 3, rung - 1, rung, rung + 1, len(whole.history) - 2):
        run = fs.Recipe(method).start(federation(3).describe())
        for record in exchanges(run, federation(3)):
            if record.exchange == stop:
                break
        path = tmp_path / f"{stop}.ckpt"
        path.write_bytes(run.to_bytes())
        went_on = method.fit(federation(3), checkpoint=path, resume=True)
        assert relative_difference(went_on.decision_function(X), whole.decision_function(X)) <= 1e-9
        assert [tried.as_dict() for tried in went_on.tried] == [tried.as_dict() for tried in whole.tried]


def test_regression_is_chosen_by_squared_error():
    targets = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(5).standard_normal(len(X))
    model = fs.DeepAFL(**AUTO, intercept=True).fit(federation(2, labels=targets, task="regression"))
    assert all(tried.errors is None for tried in model.tried)
    assert model.score(X, targets) > 0.5


# -- commands and estimators -----------------------------------------------------------------------


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "t.csv"
    lines = ["a,b,c,d,y", *(",".join([*map(repr, row), y]) for row, y in zip(X.tolist(), Y, strict=True))]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_train_without_a_setting_chooses_and_prints_why(csv):
    told = document("train", csv, "--clients", 3)
    assert any(one["chosen"] for one in told["tried"])
    assert told["accuracy"]["held_out"] > 0.7
    page = fedsolve("train", csv, "--clients", 3, "--max-exchanges", 12).stdout
    assert "held out" in page
    assert "takes" in page, "what was left out for the budget is told"


def test_given_settings_and_the_papers_are_left_alone(csv):
    assert document("train", csv, "--clients", 2, "--layers", 1, "--width", 16)["parameters"]["ridge"] == 1.0
    told = document("train", csv, "--clients", 2, "--method", "afl", "--preset", "paper")
    assert told["parameters"] == fs.AFL().parameters()
    assert document("train", csv, "--clients", 2, "--method", "afl")["parameters"]["ridge"] > 0
    refused(fedsolve("train", csv, "--methods", "affl"), 2, "Auto does not try 'affl'. Did you mean 'afl'?")


@pytest.mark.slow
def test_learning_by_heart_is_told_by_rows_held_out(csv, tmp_path):
    noise = tmp_path / "noise.csv"
    rng = np.random.default_rng(0)
    rows = [
        ",".join([*map(repr, row.tolist()), str(rng.integers(0, 2))]) for row in rng.normal(size=(90, 30))
    ]
    noise.write_text("\n".join([",".join([f"x{k}" for k in range(30)] + ["y"]), *rows]))
    told = document("train", noise, "--clients", 2)
    assert any("rows held out" in doubt for doubt in told["warnings"])


def test_the_estimator_chooses_and_has_the_papers_by_name():
    model = fs.DeepAFLClassifier().fit(X, Y)
    assert model.score(X, Y) > 0.8
    assert model.model_.tried
    papers = fs.DeepAFLClassifier(preset="paper")._method(X, Y)
    assert {name: getattr(papers, name) for name in CHOSEN} == {
        name: getattr(fs.DeepAFL(), name) for name in CHOSEN
    }
