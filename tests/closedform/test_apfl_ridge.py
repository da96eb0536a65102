"""The ridge of a client's own stream, chosen by the client: against refits without each row in turn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import cho_factor, cho_solve

import fedsolve as fs
from fedsolve.backends.blas import add_gram
from fedsolve.closedform.balance import LARGEST, RIDGES, choose_ridge
from fedsolve.closedform.dual_stream import PersonalModel, Refinement
from fedsolve.closedform.predictors import LinearModel
from fedsolve.closedform.refinement import RidgeSums
from fedsolve.errors import DataError
from fedsolve.threads import blas_threads
from tests.command import document, fedsolve, refused
from tests.conftest import Dataset
from tests.oracle import relative_difference, ridge
from tests.refined import client, stream_with_errors

CHOOSING = Refinement(width=48, ridge="auto", activation="relu", balance="auto", seed=1)
SIZES = pytest.mark.parametrize("count", [20, 48, 49, 130], ids=lambda count: f"{count} rows of width 48")


@pytest.fixture(scope="module")
def shared(digits: Dataset) -> Any:
    return stream_with_errors(digits)


@dataclasses.dataclass
class Textbook:
    """One client's rows, and every answer by refitting."""

    psi: np.ndarray
    scores: np.ndarray
    codes: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, data: Dataset, shared: Any, rows: Any, weights: Any = None) -> Textbook:
        rows = np.asarray(rows)
        psi = CHOOSING.features(shared, data.features[rows])
        counted = np.ones(len(rows)) if weights is None else weights[rows]
        return cls(psi, shared.decision_function(data.features[rows]), data.labels[rows], counted)

    @property
    def errors(self) -> np.ndarray:
        return np.eye(10)[self.codes] - self.scores

    @property
    def ridges(self) -> np.ndarray:
        """The grid: half decades from 1e-4 to 1e3 times the mean squared length."""
        mean = np.average(np.sum(self.psi**2, axis=1), weights=self.weights)
        return mean * 10.0 ** np.arange(-4, 3.1, 0.5)

    def weight(self, penalty: float, rows: Any = slice(None)) -> np.ndarray:
        root = np.sqrt(self.weights[rows])[:, None]
        return ridge(root * self.psi[rows], root * self.errors[rows], penalty)

    def left_out(self, penalty: float) -> np.ndarray:
        """What the ridge of all other rows says of each, by fitting it."""
        everyone = np.arange(len(self.psi))
        return np.array([self.psi[row] @ self.weight(penalty, everyone != row) for row in everyone])

    def squared(self, answers: np.ndarray, balance: float) -> float:
        return float(np.sum(self.weights[:, None] * (self.errors - balance * answers) ** 2))

    def best(self, answers: np.ndarray) -> float:
        """The balance of least squared error, by a grid that is refined around its best point."""
        low, high = 0.0, LARGEST
        for _ in range(12):
            points = np.linspace(low, high, 41)
            at = int(np.argmin([self.squared(answers, point) for point in points]))
            low, high = points[max(at - 1, 0)], points[min(at + 1, 40)]
        return float((low + high) / 2)

    def fewest_mistakes(self, answers: np.ndarray) -> float:
        """The balance by trying one between any two at which some row's class and a rival are level."""
        rows = np.arange(len(self.codes))
        ahead = self.scores[rows, self.codes][:, None] - self.scores
        slope = answers[rows, self.codes][:, None] - answers
        with np.errstate(divide="ignore", invalid="ignore"):
            level = (-ahead / slope).ravel()
        ends = np.unique(np.r_[0.0, level[(level > 0) & (level < LARGEST)], LARGEST])
        right = [
            np.argmax(self.scores + middle * answers, axis=1) == self.codes
            for middle in (ends[1:] + ends[:-1]) / 2
        ]
        # Crossings behind a third class change nothing: the gaps on both sides are one.
        changes = [i for i in range(1, len(right)) if not np.array_equal(right[i], right[i - 1])]
        starts = [0, *changes]
        gaps = [(ends[a], ends[b]) for a, b in zip(starts, [*changes, len(right)], strict=True)]
        mistakes = np.array([np.sum(~right[start]) for start in starts])
        good = mistakes <= mistakes.min() + 0.5 * np.sqrt(mistakes.min() + 1)
        near = self.best(answers)
        distance = [max(low - near, near - high, 0.0) for low, high in gaps]
        gap = int(np.argmin(np.where(good, distance, np.inf)))
        return near if distance[gap] == 0 else float(np.mean(gaps[gap]))


# -- leave one out ---------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_one_eigendecomposition_leaves_rows_out_under_every_ridge(
    digits: Dataset, shared: Any, count: int, weighted: bool
) -> None:
    weights = np.random.default_rng(0).uniform(0.2, 3.0, len(digits.labels)) if weighted else None
    book = Textbook.of(digits, shared, np.arange(900, 900 + count), weights)
    roots = np.sqrt(book.weights)
    sums = RidgeSums(48, 10)
    sums.add(book.psi * roots[:, None], book.errors * roots[:, None])
    path = sums.path()
    assert path.short == (count <= 48)
    found = path.left_out(book.ridges, book.psi, book.errors, roots)
    assert len(book.ridges) == len(RIDGES) == 15
    for penalty, answers in zip(book.ridges, found, strict=True):
        np.testing.assert_allclose(
            answers, book.left_out(penalty), rtol=1e-9, atol=1e-9 * np.abs(book.errors).max()
        )


def test_rows_of_the_tall_form_may_come_in_parts(digits: Dataset, shared: Any) -> None:
    book = Textbook.of(digits, shared, np.arange(900, 1030))
    sums = RidgeSums(48, 10)
    sums.add(book.psi, book.errors)
    path = sums.path()
    rows = book.psi, book.errors, book.weights
    (whole,) = path.left_out([3.0], *rows)
    parts = [next(path.left_out([3.0], *(each[at] for each in rows))) for at in (slice(50), slice(50, 130))]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-12, atol=1e-13)


# -- the choice ------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_ridge_and_balance_are_those_of_refits(
    digits: Dataset, shared: Any, count: int, weighted: bool
) -> None:
    weights = np.random.default_rng(1).uniform(0.2, 3.0, len(digits.labels)) if weighted else None
    rows = np.arange(1100, 1100 + count)
    book = Textbook.of(digits, shared, rows, weights)
    answers = [book.left_out(penalty) for penalty in book.ridges]
    squared = [book.squared(found, book.best(found)) for found in answers]
    chosen = int(np.argmin(squared))
    assert 0 < chosen < 14
    personal = CHOOSING.fit(shared, client(digits, rows, weights))
    assert personal.refinement_ridge == pytest.approx(book.ridges[chosen], rel=1e-12)
    assert relative_difference(personal.weight, book.weight(book.ridges[chosen])) <= 1e-9
    if weights is None:
        assert personal.balance == pytest.approx(book.fewest_mistakes(answers[chosen]), abs=1e-7)


@SIZES
@pytest.mark.parametrize("balance", [0.1, 0.3, 1.0])
def test_a_given_balance_has_a_ridge_of_its_own(
    digits: Dataset, shared: Any, count: int, balance: float
) -> None:
    rows = np.arange(1100, 1100 + count)
    book = Textbook.of(digits, shared, rows)
    squared = [book.squared(book.left_out(penalty), balance) for penalty in book.ridges]
    personal = dataclasses.replace(CHOOSING, balance=balance).fit(shared, client(digits, rows))
    assert personal.balance == balance
    assert personal.refinement_ridge == pytest.approx(book.ridges[int(np.argmin(squared))], rel=1e-12)


@pytest.mark.parametrize("count", [30, 130], ids=["short", "tall"])
@pytest.mark.parametrize("balance", ["auto", 0.3])
def test_a_chosen_ridge_is_that_ridge_given_to_the_bit(
    digits: Dataset, shared: Any, count: int, balance: Any
) -> None:
    data = client(digits, np.arange(1000, 1000 + count))
    choosing = dataclasses.replace(CHOOSING, balance=balance)
    chosen = choosing.fit(shared, data)
    given = dataclasses.replace(choosing, ridge=chosen.refinement_ridge).fit(shared, data)
    assert given.refinement_ridge == chosen.refinement_ridge
    assert given.balance == chosen.balance
    assert np.array_equal(given.weight, chosen.weight)


@pytest.mark.parametrize("count", [30, 130], ids=["short", "tall"])
def test_features_in_other_units_get_the_same_predictor(
    digits: Dataset, shared: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = client(digits, np.arange(1000, 1000 + count))
    plain = CHOOSING.fit(shared, data)
    expected = plain.decision_function(digits.features)
    features = Refinement.features
    monkeypatch.setattr(Refinement, "features", lambda *given: 4096.0 * features(*given))
    scaled = CHOOSING.fit(shared, data)
    assert scaled.refinement_ridge == pytest.approx(4096.0**2 * plain.refinement_ridge, rel=1e-12)
    assert relative_difference(scaled.decision_function(digits.features), expected) <= 1e-9


def test_noise_asks_for_more_ridge_than_a_rule() -> None:
    rng = np.random.default_rng(0)
    features, noise = rng.standard_normal((300, 8)), rng.standard_normal(300)
    nothing = LinearModel(np.zeros((8, 1)), np.zeros(1), None)
    ridges = [
        CHOOSING.fit(nothing, fs.ClientData(features, features[:, 0] + size * noise)).refinement_ridge
        for size in (0.0, 1.0, 10.0)
    ]
    assert ridges[0] < ridges[1] < ridges[2]


def test_of_equal_ridges_the_larger_is_taken_and_none_without_evidence() -> None:
    level = np.ones(4)
    assert choose_ridge(level, level, 2.0) == 3
    assert choose_ridge(-level, level, 2.0) == 3
    assert choose_ridge(np.array([0.1, 0.4, 0.4, 0.2]), level, 2.0) == 2
    assert choose_ridge(np.array([0.1, 0.4, 0.4 - 1e-6, 0.2]), level, 2.0) == 1
    assert choose_ridge(level, level, 2.0, 0.0) is None
    assert choose_ridge(0 * level, 0 * level, 2.0) is None
    assert choose_ridge(0 * level, 0 * level, 0.0) is None
    # |E - f|² at balance 1, where no balance may make up for the third's size.
    assert choose_ridge(np.array([1.0, 1.0, 4.0]), np.array([2.0, 1.0, 16.0]), 2.0, 1.0) == 1
    assert choose_ridge(np.array([1.0, 1.0, 4.0]), np.array([2.0, 1.1, 16.0]), 2.0) == 2


# -- tiny clients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", ["auto", 0.3])
def test_one_row_is_believed_by_half(digits: Dataset, shared: Any, balance: Any) -> None:
    book = Textbook.of(digits, shared, [1000])
    length = float(np.sum(book.psi**2))
    personal = dataclasses.replace(CHOOSING, balance=balance).fit(shared, client(digits, [1000]))
    assert personal.refinement_ridge == pytest.approx(length, rel=1e-12)
    assert personal.balance == (0.0 if balance == "auto" else balance)
    half = book.psi[0] @ personal.weight
    np.testing.assert_allclose(half, book.errors[0] / 2, rtol=1e-9)


def test_no_rows_leave_the_default(digits: Dataset, shared: Any) -> None:
    nobody = CHOOSING.fit(shared, client(digits, np.zeros(0, dtype=int)))
    assert (nobody.refinement_ridge, nobody.balance) == (1.0, 0.0)
    assert not np.any(nobody.weight)


def test_features_of_zero_leave_the_default(
    digits: Dataset, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Refinement, "features", lambda self, shared, inputs: np.zeros((len(inputs), self.width))
    )
    for count in (10, 100):
        dead = CHOOSING.fit(shared, client(digits, np.arange(count)))
        assert (dead.refinement_ridge, dead.balance) == (1.0, 0.0)
        assert not np.any(dead.weight)


def test_without_balance_there_is_nothing_to_choose_by(digits: Dataset, shared: Any) -> None:
    book = Textbook.of(digits, shared, np.arange(1000, 1030))
    personal = dataclasses.replace(CHOOSING, balance=0.0).fit(shared, client(digits, np.arange(1000, 1030)))
    assert personal.refinement_ridge == pytest.approx(np.mean(np.sum(book.psi**2, axis=1)), rel=1e-12)


@pytest.mark.parametrize("count", [2, 7, 60])
def test_one_class_only(digits: Dataset, shared: Any, count: int) -> None:
    rows = np.flatnonzero(digits.labels == 3)[-count:]
    book = Textbook.of(digits, shared, rows)
    answers = [book.left_out(penalty) for penalty in book.ridges]
    squared = np.array([book.squared(found, book.best(found)) for found in answers])
    personal = CHOOSING.fit(shared, client(digits, rows))
    assert personal.refinement_ridge == pytest.approx(book.ridges[int(np.argmin(squared))], rel=1e-12)
    assert np.all(personal.predict(digits.features[rows]) == 3)


@pytest.mark.parametrize(("unique", "times"), [(1, 2), (12, 2), (12, 4), (12, 6)])
def test_rows_that_repeat(digits: Dataset, shared: Any, unique: int, times: int) -> None:
    rows = np.tile(np.arange(1000, 1000 + unique), times)
    book = Textbook.of(digits, shared, rows)
    answers = [book.left_out(penalty) for penalty in book.ridges]
    squared = np.array([book.squared(found, book.best(found)) for found in answers])
    # Of two equal rows each foretells the other, under any ridge that a balance makes up for.
    level = squared <= squared.min() + 1e-9 * np.sum(book.errors**2)
    personal = CHOOSING.fit(shared, client(digits, rows))
    assert personal.refinement_ridge == pytest.approx(book.ridges[np.flatnonzero(level)[-1]], rel=1e-12)
    assert relative_difference(personal.weight, book.weight(personal.refinement_ridge)) <= 1e-9


def test_rows_of_no_weight_are_no_rows(digits: Dataset, shared: Any) -> None:
    weights = np.ones(len(digits.labels))
    weights[1020:1100] = 0.0
    found = CHOOSING.fit(shared, client(digits, np.arange(1000, 1100), weights))
    expected = CHOOSING.fit(shared, client(digits, np.arange(1000, 1020)))
    assert found.refinement_ridge == pytest.approx(expected.refinement_ridge, rel=1e-12)
    assert found.balance == pytest.approx(expected.balance, abs=1e-9)


@pytest.mark.parametrize("count", [40, 600], ids=["short", "tall"])
def test_rows_read_in_parts_choose_the_same(
    digits: Dataset, shared: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = client(digits, np.arange(1000, 1000 + count))
    whole = CHOOSING.fit(shared, data)

    def short_parts(rows: int, width: int) -> Any:
        return (slice(start, min(start + 13, rows)) for start in range(0, rows, 13))

    monkeypatch.setattr("fedsolve.closedform.dual_stream.chunks", short_parts)
    parts = CHOOSING.fit(shared, data)
    assert parts.refinement_ridge == pytest.approx(whole.refinement_ridge, rel=1e-12)
    assert parts.balance == pytest.approx(whole.balance, abs=1e-9)


# -- files, growth -----------------------------------------------------------------------------------


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("count", [30, 130], ids=["short", "tall"])
def test_the_chosen_ridge_is_kept_in_the_file(
    digits: Dataset, shared: Any, count: int, growing: bool, tmp_path: Path
) -> None:
    personal = CHOOSING.fit(shared, client(digits, np.arange(1000, 1000 + count)))
    personal.save(tmp_path / "mine.safetensors", growing=growing)
    loaded: Any = fs.load_model(tmp_path / "mine.safetensors")
    assert loaded.refinement_ridge == personal.refinement_ridge
    assert loaded.balance == personal.balance
    assert loaded.refinement == CHOOSING
    assert np.array_equal(
        loaded.decision_function(digits.features), personal.decision_function(digits.features)
    )
    assert loaded.with_balance(0.5).refinement_ridge == personal.refinement_ridge


def test_a_ridge_that_was_given_is_told_as_well(digits: Dataset, shared: Any, tmp_path: Path) -> None:
    personal = dataclasses.replace(CHOOSING, ridge=2).fit(shared, client(digits, np.arange(1000, 1030)))
    assert personal.refinement_ridge == 2.0
    # Its file is what it was before ridges could be chosen.
    assert "refinement_ridge" not in personal.contents()[1]
    personal.save(tmp_path / "mine.safetensors")
    loaded: Any = fs.load_model(tmp_path / "mine.safetensors")
    assert loaded.refinement_ridge == 2.0


@pytest.mark.parametrize("steps", [(20, 40), (40, 90), (100, 300)])
def test_updates_keep_the_ridge_and_rebalancing_chooses_again(
    digits: Dataset, shared: Any, steps: tuple[int, int], tmp_path: Path
) -> None:
    first, last = steps
    personal = CHOOSING.fit(shared, client(digits, np.arange(1000, 1000 + first)))
    personal.save(tmp_path / "mine.safetensors", growing=True)
    loaded: Any = fs.load_model(tmp_path / "mine.safetensors")
    grown = loaded.updated(client(digits, np.arange(1000 + first, 1000 + last)))
    assert grown.refinement_ridge == personal.refinement_ridge
    everything = np.arange(1000, 1000 + last)
    book = Textbook.of(digits, shared, everything)
    assert relative_difference(grown.weight, book.weight(personal.refinement_ridge)) <= 1e-9
    refit = CHOOSING.fit(shared, client(digits, everything))
    again = grown.rebalanced(client(digits, everything[::-1]))
    assert again.refinement_ridge == pytest.approx(refit.refinement_ridge, rel=1e-12)
    assert again.refinement_ridge != grown.refinement_ridge
    assert again.balance == pytest.approx(refit.balance, abs=1e-9)
    assert relative_difference(again.weight, refit.weight) <= 1e-9


def test_a_choice_without_its_number_is_refused(digits: Dataset, shared: Any) -> None:
    with pytest.raises(DataError, match="chosen by a fit"):
        PersonalModel(shared, CHOOSING, np.zeros((48, 10)), 0.3)


# -- a number is what it was -------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("count", [30, 130], ids=["short", "tall"])
def test_a_given_ridge_is_solved_plainly_to_the_bit(
    digits: Dataset, shared: Any, count: int, penalty: float
) -> None:
    given = Refinement(width=48, ridge=penalty, activation="relu", balance=0.3, seed=1)
    personal = given.fit(shared, client(digits, np.arange(1000, 1000 + count)))
    book = Textbook.of(digits, shared, np.arange(1000, 1000 + count))
    psi, errors = book.psi, np.eye(10)[book.codes] - shared.estimates(digits.features[1000 : 1000 + count])
    with blas_threads(1):
        if count <= 48:
            system = psi @ psi.T
            system.flat[:: len(system) + 1] += penalty
            expected = psi.T @ cho_solve(cho_factor(system, lower=True), errors)
        else:
            system = np.zeros((48, 48))
            add_gram(psi, system)
            system += np.triu(system, 1).T
            system.flat[:: len(system) + 1] += penalty
            expected = cho_solve(cho_factor(system, lower=False), psi.T @ errors)
    assert np.array_equal(personal.weight, expected)


# -- the method and the command ------------------------------------------------------------------------


def test_every_client_of_a_federation_chooses(digits: Dataset, tmp_path: Path) -> None:
    owners = fs.partition.dirichlet(digits.labels, 6, 0.3, seed=0)
    federation = fs.LocalFederation.from_arrays(digits.features, digits.labels, owners, workers=1)
    method = fs.APFL(width=64, refinement_width=48, ridge=1.0, balance="auto", refinement_ridge="auto")
    model = method.fit(federation)
    ridges = {model.personal(name).refinement_ridge for name in federation.clients}
    assert len(ridges) == len(federation.clients)
    model.save(tmp_path / "shared.safetensors")
    loaded: Any = fs.load_model(tmp_path / "shared.safetensors")
    assert loaded.method == method
    mine = federation.participants[2].personalise(loaded)
    assert mine.refinement_ridge == model.personal(federation.clients[2]).refinement_ridge
    alone = model.alone().personal(federation.clients[2])
    assert alone.balance == 1.0
    assert alone.refinement_ridge > 0


@pytest.mark.parametrize("wrong", ["automatic", "", "1"])
def test_other_words_are_refused(wrong: str) -> None:
    with pytest.raises(DataError, match="refinement_ridge must be 'auto' or a finite number >= 0; got"):
        fs.APFL(refinement_ridge=wrong)  # type: ignore[arg-type]


def test_the_command_takes_the_word(digits: Dataset, tmp_path: Path) -> None:
    np.savez(tmp_path / "digits.npz", x_train=digits.features[:300], y_train=digits.labels[:300])
    words = ("train", tmp_path / "digits.npz", "--method", "apfl", "--width", 32, "--refinement-width", 32)
    shared = tmp_path / "shared.safetensors"
    document(*words, "--clients", 4, "--workers", 1, "--refinement-ridge", "auto", "--out", shared)
    model: Any = fs.load_model(shared)
    assert model.method.refinement_ridge == "auto"
    refused(
        fedsolve(*words, "--refinement-ridge", "automatic"),
        2,
        "a finite number >= 0; got 'automatic'",
    )
    refused(fedsolve(*words, "--refinement-ridge", "-1"), 2, "refinement_ridge")
