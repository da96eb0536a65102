"""A client's own stream: leave-one-out without refitting, the balance chosen, tiny and growing clients."""

from __future__ import annotations

import dataclasses
import itertools
import stat
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.closedform import balance
from fedsolve.closedform.dual_stream import PersonalModel, Refinement
from fedsolve.closedform.refinement import RidgeSums
from fedsolve.errors import DataError
from tests.conftest import Dataset
from tests.oracle import one_hot, relative_difference, ridge
from tests.refined import client, stream_with_errors

REFINEMENT = Refinement(width=48, ridge=2.0, activation="relu", balance="auto", seed=1)


@pytest.fixture(scope="module")
def shared(digits: Dataset) -> Any:
    return stream_with_errors(digits)


def weight_of(data: Dataset, shared: Any, rows: np.ndarray) -> np.ndarray:
    """P by the textbook."""
    psi = REFINEMENT.features(shared, data.features[rows])
    return ridge(psi, one_hot(data.labels)[rows] - shared.decision_function(data.features[rows]), 2.0)


# -- leave one out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [20, 48, 49, 130], ids=lambda rows: f"{rows} rows of width 48")
def test_leaving_a_row_out_needs_no_second_fit(digits: Dataset, shared: Any, rows: int) -> None:
    chosen = np.arange(900, 900 + rows)
    psi = REFINEMENT.features(shared, digits.features[chosen])
    residuals = one_hot(digits.labels)[chosen] - shared.decision_function(digits.features[chosen])
    sums = RidgeSums(48, 10)
    sums.add(psi, residuals)
    assert sums.short == (rows <= 48)
    found = sums.solve(2.0).left_out(psi, residuals, np.ones(rows))
    for row in range(0, rows, 7):
        others = np.arange(rows) != row
        expected = psi[row] @ ridge(psi[others], residuals[others], 2.0)
        np.testing.assert_allclose(found[row], expected, rtol=1e-9, atol=1e-11)


def exact_ridge(
    psi: list[Any], errors: list[Any], weights: list[Any], penalty: Any, row: list[Any]
) -> list[Any]:
    """The ridge's answer to `row`, exactly: Gaussian elimination of the kernel system in fractions."""
    count = len(psi)

    def dot(a: list[Any], b: list[Any]) -> Any:
        return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))

    # (K + penalty W^-1) a = E, and the answer is sum_j a_j <psi_j, row>.
    system = [[dot(psi[i], psi[j]) for j in range(count)] + list(errors[i]) for i in range(count)]
    for i in range(count):
        system[i][i] += penalty / weights[i]
    for i in range(count):
        system[i] = [value / system[i][i] for value in system[i]]
        for j in range(count):
            if j != i:
                system[j] = [a - system[j][i] * b for a, b in zip(system[j], system[i], strict=True)]
    closeness = [dot(other, row) for other in psi]
    return [dot(closeness, [line[count + c] for line in system]) for c in range(len(errors[0]))]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("penalty", [1.0, 1e-6, 1e-8, 1e-14])
@pytest.mark.parametrize(("rows", "width", "scale"), [(6, 9, 1.0), (6, 9, 4096.0), (6, 6, 1.0), (7, 3, 1.0)])
def test_leaving_out_is_exact_however_small_the_ridge(
    rows: int, width: int, scale: float, penalty: float, weighted: bool
) -> None:
    rng = np.random.default_rng(rows + width)
    psi, errors = scale * rng.standard_normal((rows, width)), rng.standard_normal((rows, 2))
    weights = rng.integers(1, 5, rows) / 4.0 if weighted else np.ones(rows)
    roots = np.sqrt(weights)
    sums = RidgeSums(width, 2)
    sums.add(psi * roots[:, None], errors * roots[:, None])
    found = sums.solve(penalty).left_out(psi, errors, roots)
    exact = [[[Fraction(value) for value in line] for line in array.tolist()] for array in (psi, errors)]
    counted = [Fraction(weight) for weight in weights.tolist()]
    for row in range(rows):
        others = [[array[j] for j in range(rows) if j != row] for array in (*exact, counted)]
        expected = exact_ridge(*others, Fraction(penalty), exact[0][row])  # type: ignore[call-arg, arg-type]
        np.testing.assert_allclose(found[row], [float(value) for value in expected], rtol=1e-9, atol=1e-11)


def test_the_balance_of_few_rows_does_not_hang_on_a_ridge_lost_beside_them(
    digits: Dataset, shared: Any
) -> None:
    # Below a millionth of |ψ|² the refinement interpolates, and a still smaller ridge changes nothing.
    fitted = [
        dataclasses.replace(REFINEMENT, ridge=ridge, width=200).fit(shared, client(digits, range(1000, 1040)))
        for ridge in (1e-7, 1e-10, 1e-13)
    ]
    assert 0.1 < fitted[0].balance < 1.9
    for other in fitted[1:]:
        assert other.balance == pytest.approx(fitted[0].balance, abs=1e-4)


@pytest.mark.parametrize("count", [30, 100], ids=["short", "tall"])
def test_rows_may_come_in_any_order_to_be_rebalanced(digits: Dataset, shared: Any, count: int) -> None:
    weights = np.random.default_rng(0).uniform(0.5, 2.0, len(digits.labels))
    small = dataclasses.replace(REFINEMENT, ridge=1e-6)
    rows = np.arange(1000, 1000 + count)
    model = small.fit(shared, client(digits, rows, weights))
    turned = model.rebalanced(client(digits, rows[::-1], weights))
    assert turned.balance == pytest.approx(model.balance, abs=1e-9)


def test_repeated_rows_under_a_lost_ridge_answer_for_each_other(digits: Dataset, shared: Any) -> None:
    rows = np.r_[np.arange(1000, 1015), np.arange(1000, 1015)]
    firm = dataclasses.replace(REFINEMENT, ridge=1e-6).fit(shared, client(digits, rows))
    with pytest.warns(fs.ConditionWarning, match="larger ridge"):
        lost = dataclasses.replace(REFINEMENT, ridge=1e-16).fit(shared, client(digits, rows))
    assert relative_difference(lost.weight, firm.weight) <= 1e-4
    assert lost.balance == pytest.approx(firm.balance, abs=1e-4)


@pytest.mark.parametrize("penalty", [1e-3, 1.0, 100.0])
def test_short_and_tall_forms_are_one_ridge(digits: Dataset, shared: Any, penalty: float) -> None:
    psi = REFINEMENT.features(shared, digits.features[:40])
    targets = one_hot(digits.labels)[:40]
    short, tall = RidgeSums(48, 10), RidgeSums(48, 10)
    short.add(psi, targets)
    tall.add(np.vstack([psi, np.zeros((20, 48))]), np.vstack([targets, np.zeros((20, 10))]))
    assert short.short
    assert not tall.short
    one, other = short.solve(penalty), tall.solve(penalty)
    assert relative_difference(one.weight, other.weight) <= 1e-9
    assert relative_difference(one.weight, ridge(psi, targets, penalty)) <= 1e-9
    assert (one.short, other.short) == (True, False)
    np.testing.assert_allclose(
        *(each.left_out(psi, targets, np.ones(40)) for each in (one, other)), rtol=1e-9, atol=1e-12
    )


# -- choosing --------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_a_row_is_right_on_one_interval(seed: int, rows: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    scores, answers = rng.standard_normal((2, rows, classes))
    codes = rng.integers(0, classes, rows)
    first, last = balance.right_between(scores.copy(), answers, codes)
    for value in np.concatenate([[0.0], rng.uniform(0, 2, 30)]):
        right = np.argmax(scores + value * answers, axis=1) == codes
        inside = (first < value) & (value < last) | ((value == 0) & (first == 0) & (last > 0))
        # Exactly at an end two classes are level; random numbers do not meet there.
        assert np.array_equal(right, inside)


def test_a_level_rival_that_stays_level_is_no_victory() -> None:
    first, last = balance.right_between(np.zeros((1, 2)), np.zeros((1, 2)), np.array([0]))
    assert first[0] >= last[0]


@pytest.mark.slow
def test_the_balance_is_the_one_that_a_fine_grid_finds() -> None:
    rng = np.random.default_rng(2)
    grid = np.linspace(0, balance.LARGEST, 20001)
    kept = 0
    for _ in range(12):
        codes = rng.integers(0, 3, 30)
        targets = np.eye(3)[codes]
        scores = 0.3 * targets + 0.3 * rng.standard_normal((30, 3))
        residuals = targets - scores
        answers = residuals * rng.uniform(0.2, 1.5) + 0.4 * rng.standard_normal((30, 3))
        chosen = balance.choose_balance(scores, residuals, answers, codes)
        smooth = np.clip(np.sum(residuals * answers) / np.sum(answers**2), 0, balance.LARGEST)

        def mistakes(value: float) -> int:
            return int(np.sum(np.argmax(scores + value * answers, axis=1) != codes))  # noqa: B023

        counts = np.array([mistakes(value) for value in grid])
        allowed = counts.min() + 0.5 * np.sqrt(counts.min() + 1.0)
        assert mistakes(chosen) <= allowed
        if mistakes(smooth) <= allowed:
            assert chosen == pytest.approx(smooth)
            kept += 1
        else:
            # No good balance lies nearer to the smooth one than the gap that holds the chosen one.
            low, high = sorted((chosen, smooth))
            between = counts[(grid > low) & (grid < high)]
            runs = np.diff((between <= allowed).astype(int))
            assert np.count_nonzero(runs) <= 1
    assert 0 < kept < 12


def test_balances_for_regression_are_least_squares() -> None:
    rng = np.random.default_rng(3)
    residuals = rng.standard_normal((50, 2))
    assert balance.choose_balance(residuals, residuals, 2.0 * residuals) == pytest.approx(0.5)
    assert balance.choose_balance(residuals, residuals, -residuals) == 0.0
    assert balance.choose_balance(residuals, residuals, 0.1 * residuals) == balance.LARGEST
    weights = np.r_[np.ones(25), np.zeros(25)]
    answers = np.r_[2.0 * residuals[:25], rng.standard_normal((25, 2))]
    assert balance.choose_balance(residuals, residuals, answers, None, weights) == pytest.approx(0.5)


def test_a_useless_refinement_is_not_used(digits: Dataset) -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 4, 400)
    scores = np.eye(4)[codes] + 0.1 * rng.standard_normal((400, 4))
    answers = 0.5 * rng.standard_normal((400, 4))
    assert balance.choose_balance(scores, np.eye(4)[codes] - scores, answers, codes) <= 0.05


# -- tiny and lopsided clients ---------------------------------------------------------------------


def test_no_rows_and_one_row_leave_the_shared_stream(digits: Dataset, shared: Any) -> None:
    empty = REFINEMENT.fit(shared, client(digits, np.zeros(0, dtype=int)))
    assert np.array_equal(empty.decision_function(digits.features), shared.decision_function(digits.features))
    assert empty.balance == 0.0
    single = REFINEMENT.fit(shared, client(digits, [1000]))
    assert single.balance == 0.0
    assert np.any(single.weight)
    assert np.array_equal(single.predict(digits.features), shared.predict(digits.features))
    given_balance = dataclasses.replace(REFINEMENT, balance=0.5).fit(shared, client(digits, [1000]))
    assert np.any(
        given_balance.decision_function(digits.features) != shared.decision_function(digits.features)
    )


def test_one_class_only(digits: Dataset, shared: Any) -> None:
    rows = np.flatnonzero(digits.labels == 8)
    train, test = rows[:30], rows[-60:]
    personal = REFINEMENT.fit(shared, client(digits, train))
    before = shared.score(digits.features[test], digits.labels[test])
    after = personal.score(digits.features[test], digits.labels[test])
    assert after >= before + 0.05
    assert personal.balance > 0.3


def test_fewer_rows_than_width(digits: Dataset, shared: Any) -> None:
    rows = np.arange(1000, 1015)
    personal = REFINEMENT.fit(shared, client(digits, rows))
    assert personal.sums is not None
    assert personal.sums.short
    assert relative_difference(personal.weight, weight_of(digits, shared, rows)) <= 1e-9


def test_a_class_unseen_at_the_client_is_still_predicted(digits: Dataset, shared: Any) -> None:
    rows = np.flatnonzero(np.isin(digits.labels, [0, 1, 2]))
    personal = REFINEMENT.fit(shared, client(digits, rows[:120]))
    strange = np.flatnonzero(digits.labels == 6)
    assert personal.score(digits.features[strange], digits.labels[strange]) > 0.5
    # A class that nobody in the federation had counts as wrong and stops nothing.
    tests = [fs.ClientData(digits.features[:10], np.full(10, 99))]
    assert fs.client_scores(personal, tests).mean == 0.0


def test_equal_rows_are_no_trouble(digits: Dataset, shared: Any) -> None:
    for count in (5, 100):
        personal = REFINEMENT.fit(shared, client(digits, [1000] * count))
        assert np.all(np.isfinite(personal.weight))
        assert personal.balance > 0
        tiny = dataclasses.replace(REFINEMENT, ridge=1e-18)
        with pytest.warns(fs.ConditionWarning):
            personal = tiny.fit(shared, client(digits, [1000] * count))
        assert np.all(np.isfinite(personal.decision_function(digits.features)))


def test_without_a_ridge_the_shortest_refinement_is_taken(digits: Dataset, shared: Any) -> None:
    none = Refinement(width=48, ridge=0.0, activation="relu", balance=1.0, seed=1)
    rows = np.arange(1000, 1020)
    with pytest.warns(fs.ConditionWarning):
        personal = none.fit(shared, client(digits, rows))
    np.testing.assert_allclose(
        personal.decision_function(digits.features[rows]), one_hot(digits.labels)[rows], atol=1e-6
    )


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [20, 120])
def test_a_weight_of_two_is_the_row_twice_and_zero_is_no_row(digits: Dataset, shared: Any, rows: int) -> None:
    plain = dataclasses.replace(REFINEMENT, balance=0.7)
    weights = np.zeros(len(digits.labels))
    chosen = np.arange(1000, 1000 + rows)
    weights[chosen] = np.arange(rows) % 3
    weighted = plain.fit(shared, client(digits, chosen, weights))
    repeated = plain.fit(shared, client(digits, np.repeat(chosen, np.arange(rows) % 3)))
    assert relative_difference(weighted.weight, repeated.weight) <= 1e-9


def test_rows_of_no_weight_do_not_move_the_balance(digits: Dataset, shared: Any) -> None:
    weights = np.ones(len(digits.labels))
    weights[1050:] = 0.0
    counted = REFINEMENT.fit(shared, client(digits, np.arange(1000, 1100), weights))
    fewer = REFINEMENT.fit(shared, client(digits, np.arange(1000, 1050)))
    assert relative_difference(counted.weight, fewer.weight) <= 1e-9
    assert counted.balance == pytest.approx(fewer.balance, abs=1e-9)


@pytest.mark.parametrize("rows", [30, 60])
def test_rows_of_no_weight_do_not_decide_the_form(digits: Dataset, shared: Any, rows: int) -> None:
    weights = np.zeros(len(digits.labels))
    weights[1000 : 1000 + rows] = 1.0
    weighted = REFINEMENT.fit(shared, client(digits, np.arange(900, 1200), weights))
    assert weighted.sums is not None
    assert weighted.sums.short == (rows <= 48)
    plain = REFINEMENT.fit(shared, client(digits, np.arange(1000, 1000 + rows)))
    assert np.array_equal(weighted.weight, plain.weight)
    assert weighted.balance == plain.balance


# -- data that grow --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(0, 10, 20, 30), (0, 40, 45, 60), (0, 100, 101, 300)])
def test_updates_are_a_refit(digits: Dataset, shared: Any, steps: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    personal: Any = REFINEMENT.fit(shared, client(digits, 1000 + np.arange(steps[0], steps[1])))
    for start, stop in itertools.pairwise(steps[1:]):
        personal.save(path, growing=True)
        personal = fs.load_model(path)
        personal = personal.updated(client(digits, 1000 + np.arange(start, stop)))
    everything = client(digits, 1000 + np.arange(steps[-1]))
    refit = REFINEMENT.fit(shared, everything)
    assert relative_difference(personal.weight, refit.weight) <= 1e-9
    rebalanced = personal.rebalanced(everything)
    assert rebalanced.balance == pytest.approx(refit.balance, abs=1e-9)
    found, expected = (m.decision_function(digits.features) for m in (rebalanced, refit))
    assert relative_difference(found, expected) <= 1e-9


def test_an_update_leaves_the_model_before_it_alone(digits: Dataset, shared: Any) -> None:
    personal = REFINEMENT.fit(shared, client(digits, np.arange(1000, 1100)))
    before = personal.decision_function(digits.features)
    personal.updated(client(digits, np.arange(1100, 1200)))
    again = personal.updated(client(digits, np.arange(1100, 1100)))
    assert np.array_equal(personal.decision_function(digits.features), before)
    assert np.array_equal(again.decision_function(digits.features), before)


def test_what_cannot_grow_says_so(digits: Dataset, shared: Any) -> None:
    personal = REFINEMENT.fit(shared, client(digits, np.arange(1000, 1030)))
    bare = PersonalModel(personal.shared, personal.refinement, personal.weight, personal.balance)
    with pytest.raises(DataError, match="growing=True"):
        bare.updated(client(digits, [0]))
    with pytest.raises(DataError, match="sums"):
        bare.rebalanced(client(digits, [0]))
    nobody = np.zeros(0, dtype=int)
    assert REFINEMENT.fit(shared, client(digits, nobody)).rebalanced(client(digits, nobody)).balance == 0.0


# -- regression ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regression(digits: Dataset) -> Any:
    """A linear model of two targets."""
    targets = digits.features[:300, 20:22] + 1.0
    federation = fs.LocalFederation.from_arrays(
        digits.features[:300], targets, np.arange(300) % 3, clients=4, task="regression", workers=1
    )
    return fs.AFL(ridge=1.0).fit(federation)


def test_an_empty_client_is_no_trouble_in_regression(digits: Dataset, regression: Any) -> None:
    nobody = fs.ClientData(digits.features[:0], np.zeros((0, 2)))
    for balance_ in ("auto", 0.5):
        personal = dataclasses.replace(REFINEMENT, balance=balance_).fit(regression, nobody)
        expected = regression.predict(digits.features)
        assert np.array_equal(personal.predict(digits.features), expected)
    model = fs.APFL(width=32, refinement_width=16, scale="standard", intercept=True, layers=1).fit(
        fs.LocalFederation.from_arrays(
            digits.features[:90], digits.features[:90, 20], np.arange(90) % 2, 3, task="regression", workers=1
        )
    )
    assert np.array_equal(model.personal("client-2").predict(digits.features), model.predict(digits.features))


def test_targets_of_another_kind_are_refused(digits: Dataset, regression: Any) -> None:
    for targets, told in (
        (digits.features[:9, :3], r"shape \(9, 3\) have 3 values per row; the model has 2"),
        (digits.features[:9, 0], "1 values per row"),
        (np.array([["a", "b"]] * 9), "such as 'a'"),
    ):
        with pytest.raises(DataError, match=told):
            REFINEMENT.fit(regression, fs.ClientData(digits.features[:9], targets))


# -- files -----------------------------------------------------------------------------------------


def test_a_personal_file_is_for_its_owner_alone(digits: Dataset, shared: Any, tmp_path: Path) -> None:
    personal = REFINEMENT.fit(shared, client(digits, np.arange(1000, 1030)))
    mine, everybodys = tmp_path / "mine", tmp_path / "everybodys"
    mine.write_bytes(b"an older file, open to all")
    mine.chmod(0o644)
    for growing in (False, True):
        personal.save(mine, growing=growing)
        assert stat.S_IMODE(mine.stat().st_mode) == 0o600
    shared.save(everybodys)
    (tmp_path / "plain").write_bytes(b"")
    assert everybodys.stat().st_mode == (tmp_path / "plain").stat().st_mode


# -- parts of any size -----------------------------------------------------------------------------


def test_rows_are_read_in_parts(digits: Dataset, shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = REFINEMENT.fit(shared, client(digits, np.arange(900, 1500)))
    longest = 0

    def short_parts(rows: int, width: int) -> Any:
        return (slice(start, min(start + 50, rows)) for start in range(0, rows, 50))

    class Watched(fs.ClientData):
        def features(self, span: slice, dtype: Any = np.float64) -> np.ndarray:
            nonlocal longest
            found = super().features(span, dtype)
            longest = max(longest, len(found))
            return found

    monkeypatch.setattr("fedsolve.closedform.dual_stream.chunks", short_parts)
    parts = REFINEMENT.fit(shared, Watched(digits.features, digits.labels, np.arange(900, 1500)))
    assert longest == 50
    assert relative_difference(parts.weight, whole.weight) <= 1e-9
    assert parts.balance == pytest.approx(whole.balance, abs=1e-9)
    found, expected = (m.decision_function(digits.features) for m in (parts, whole))
    assert relative_difference(found, expected) <= 1e-9


# -- the page --------------------------------------------------------------------------------------


def test_the_code_of_the_how_to_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to-personal-models.md").read_text()
    blocks = [text.split("```")[0] for text in page.split("```python\n")[1:]]
    assert len(blocks) == 7
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)
    assert scope["own"].mean > scope["everybody"].mean
    assert scope["own"].mean > scope["alone"].mean
    assert abs(scope["mine"].weight - scope["again"].weight).max() <= 1e-9
    assert abs(scope["mine"].balance - scope["again"].balance) <= 1e-9
