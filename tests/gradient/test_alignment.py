"""Alignment and drift from sums equal the direct computation; sketches are seeded, unbiased, converging."""

from __future__ import annotations

import hashlib
import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy.stats import skew

from fedsolve.errors import DataError
from fedsolve.gradient.alignment import (
    alignment_scores,
    alignment_sums,
    choice_by_skewness,
    choose_layers,
    mean_squared_drift,
    representation,
    skewness,
)

torch = pytest.importorskip("torch")

LAYERS = ["stem", "middle", "head"]
GOLDEN = [441.0, -878.0, -1764.0]
SHAPES = {"stem": (8, 1, 3, 3), "middle": (40, 50), "head": (7,)}
SIZES = {layer: int(np.prod(shape)) for layer, shape in SHAPES.items()}


def clients(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Updates that agree in part, with lengths that differ a lot."""
    rng = np.random.default_rng(seed)
    common = {layer: rng.standard_normal(shape) for layer, shape in SHAPES.items()}
    return [
        {
            layer: 10.0 ** rng.uniform(-3, 2) * (0.4 * common[layer] + rng.standard_normal(shape))
            for layer, shape in SHAPES.items()
        }
        for _ in range(count)
    ]


def summed(updates: list[dict[str, np.ndarray]], sketch: int = 0, seed: int = 0) -> dict[str, np.ndarray]:
    total: dict[str, np.ndarray] = {}
    for update in updates:
        for name, array in alignment_sums(update, sketch, seed).items():
            total[name] = total.get(name, 0) + array
    return total


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    left, right = left.ravel(), right.ravel()
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))


def direct(updates: list[dict[str, np.ndarray]], layer: str) -> float:
    """Eq. 14 as printed."""
    moving = [update[layer] for update in updates if np.any(update[layer])]
    mean = sum(moving) / len(moving)
    return float(np.mean([cosine(update, mean) for update in moving]))


# Alignment


@pytest.mark.parametrize("count", [1, 2, 10, 37])
def test_scores_from_two_sums_equal_the_direct_mean_of_cosines(count):
    updates = clients(count)
    scores = alignment_scores(summed(updates), SIZES)
    assert list(scores) == LAYERS
    for layer in LAYERS:
        assert scores[layer] == pytest.approx(direct(updates, layer), abs=1e-12)


def test_direction_of_the_difference_does_not_matter():
    updates = clients(5)
    turned = [{layer: -values for layer, values in update.items()} for update in updates]
    assert alignment_scores(summed(turned), SIZES) == alignment_scores(summed(updates), SIZES)


@pytest.mark.parametrize("sketch", [0, 16])
def test_identical_updates_and_a_single_client_score_one(sketch):
    for updates in (clients(1), clients(1) * 6):
        scores = alignment_scores(summed(updates, sketch), SIZES, sketch)
        assert list(scores.values()) == pytest.approx([1.0] * 3, abs=1e-12)
        assert choose_layers(scores, "lowest") == choose_layers(scores, "highest") == ("stem",)


@pytest.mark.parametrize("count", [2, 7])
def test_orthogonal_updates_of_equal_length(count):
    updates = [{"head": 3.0 * row} for row in np.eye(7)[:count]]
    assert alignment_scores(summed(updates), {"head": 7})["head"] == pytest.approx(count**-0.5, abs=1e-12)


def test_clients_that_did_not_move_are_not_counted():
    updates = clients(4)
    still = {layer: np.zeros(shape) for layer, shape in SHAPES.items()}
    mixed = [updates[0], still, *updates[1:], {**updates[0], "head": np.zeros(7)}]
    arrays = summed(mixed)
    assert dict(zip(LAYERS, arrays["moved"], strict=True)) == {"stem": 5.0, "middle": 5.0, "head": 4.0}
    scores = alignment_scores(arrays, SIZES)
    for layer in LAYERS:
        assert scores[layer] == pytest.approx(direct(mixed, layer), abs=1e-12)


def test_layers_nobody_moved_are_left_out_and_cancelled_ones_score_zero():
    still = {"a": np.zeros(3), "b": np.ones(3), "c": np.ones(3)}
    scores = alignment_scores(summed([still, {**still, "b": -np.ones(3)}]), dict.fromkeys("abc", 3))
    assert scores == {"b": 0.0, "c": pytest.approx(1.0)}


# Choice


def test_most_extreme_first_and_ties_to_the_earlier_layer():
    scores = {"a": 0.5, "b": 0.1, "c": 0.9, "d": 0.1 + 1e-15, "e": 0.9 - 1e-15}
    assert choose_layers(scores, "lowest") == ("b",)
    assert choose_layers(scores, "lowest", 3) == ("b", "d", "a")
    assert choose_layers(scores, "highest", 2) == ("c", "e")
    turned = dict(reversed(scores.items()))
    assert choose_layers(turned, "lowest") == ("d",)
    assert choose_layers(turned, "highest", 9) == ("e", "c", "a", "d", "b")


def test_scores_that_are_not_numbers_are_passed_over():
    scores = {"a": math.nan, "b": 0.5, "c": 0.2}
    assert choose_layers(scores, "highest", 3) == ("b", "c")
    assert choose_layers({"a": math.nan}, "lowest") == ()


@pytest.mark.parametrize(("choice", "count"), [("middle", 1), ("lowest", 0), ("highest", 1.5)])
def test_bad_choices_are_refused(choice, count):
    with pytest.raises(DataError, match="must be"):
        choose_layers({"a": 1.0}, choice, count)


def test_skewness_is_the_usual_one_and_chooses():
    rng = np.random.default_rng(0)
    for values in (rng.exponential(size=20), -rng.exponential(size=20), rng.standard_normal(5)):
        assert skewness(values) == pytest.approx(skew(values), rel=1e-12)
        assert skewness(dict(enumerate(values))) == skewness(values)
    assert choice_by_skewness([0.1, 0.1, 0.12, 0.13, 0.9]) == "lowest"
    assert choice_by_skewness([0.9, 0.9, 0.88, 0.87, 0.1]) == "highest"


def test_equal_scores_have_no_skewness():
    assert skewness([]) == 0.0
    assert skewness([1.0, 1.0 + 1e-15, 1.0 - 2e-15]) == 0.0
    assert choice_by_skewness([1.0, 1.0]) == "highest"


# Sketch


def sketched(values: np.ndarray, layer: str, sketch: int, seed: int) -> np.ndarray:
    """The sketch of one layer by itself."""
    return alignment_sums({layer: values}, sketch, seed)["update"]


@pytest.mark.parametrize(("sketch", "length"), [(6, 5), (7, 7), (48, 47), (49, 49)])
def test_sketch_is_the_documented_one(sketch, length):
    values = np.random.default_rng(0).standard_normal(50)
    key = int.from_bytes(hashlib.sha256(b"fedsolve sketch 2|9|conv.0|50").digest()[:16], "little")
    expected = np.zeros(length)
    for index, (value, raw) in enumerate(zip(values, np.random.Philox(key=key).random_raw(50), strict=True)):
        expected[index % length] += value if int(raw) % 2 == 0 else -value
    np.testing.assert_allclose(sketched(values, "conv.0", sketch, 9), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("sketch", [50, 51, 60])
def test_a_layer_that_is_no_larger_than_the_sketch_is_sent_as_it_is(sketch):
    values = np.random.default_rng(0).standard_normal(50)
    assert np.array_equal(sketched(values, "conv.0", sketch, 9), values)


def test_sums_travel_in_the_precision_asked_for():
    update = clients(1)[0]
    exact = alignment_sums(update, 16, 3)
    short = alignment_sums(update, 16, 3, "float32")
    for name, array in short.items():
        assert array.dtype == np.float32
        assert np.array_equal(array, exact[name].astype(np.float32))


def test_layers_are_sketched_each_by_itself():
    update = {layer: np.rint(1000 * values) for layer, values in clients(1)[0].items()}  # sums are exact
    together = alignment_sums(update, 16, 3)["update"]
    alone = np.concatenate([sketched(values.ravel(), layer, 16, 3) for layer, values in update.items()])
    assert np.array_equal(together, alone)


def test_sketch_of_a_tensor_is_that_of_the_array():
    updates = clients(1)[0]
    tensors = {layer: torch.from_numpy(update) for layer, update in updates.items()}
    for sketch in (0, 16):
        ours, theirs = alignment_sums(updates, sketch, 3), alignment_sums(tensors, sketch, 3)
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-13, atol=1e-15)


def test_sketch_golden_bits():
    """Signs are the same on every platform and with every numpy; the values 1, 2, 4, ... tell them apart."""
    assert sketched(2.0 ** np.arange(12), "head", 4, 0).tolist() == GOLDEN


def test_layers_that_fit_into_the_sketch_keep_their_scores():
    updates = clients(6)
    exact = alignment_scores(summed(updates), SIZES)
    short = alignment_scores(summed(updates, 74, 1), SIZES, 74)
    assert short["stem"] == pytest.approx(exact["stem"], abs=1e-13)
    assert short["head"] == pytest.approx(exact["head"], abs=1e-13)
    assert short["middle"] != exact["middle"]
    with pytest.raises(DataError, match="sketch must be a whole number"):
        alignment_sums(updates[0], -1)


def test_sketch_is_linear_and_differs_by_seed_and_layer():
    left, right = np.random.default_rng(0).standard_normal((2, 500))
    both = sketched(left - 3 * right, "a", 32, 0)
    np.testing.assert_allclose(both, sketched(left, "a", 32, 0) - 3 * sketched(right, "a", 32, 0), atol=1e-12)
    assert not np.allclose(sketched(left, "a", 32, 0), sketched(left, "a", 32, 1))
    assert not np.allclose(sketched(left, "a", 32, 0), sketched(left, "b", 32, 0))


def test_inner_products_of_sketches_are_unbiased():
    rng = np.random.default_rng(1)
    left = rng.standard_normal(300)
    right = 0.5 * left + rng.standard_normal(300)
    found = np.array([sketched(left, "l", 20, s) @ sketched(right, "l", 20, s) for s in range(2000)])
    spread = math.sqrt(((left @ left) * (right @ right) + (left @ right) ** 2) / 20)
    assert np.std(found) == pytest.approx(spread, rel=0.15)
    assert abs(np.mean(found) - left @ right) < 4 * spread / math.sqrt(2000)


def test_sketched_scores_come_closer_with_size():
    updates = clients(10, seed=3)
    exact = alignment_scores(summed(updates), SIZES)["middle"]
    errors, sizes = [], (16, 64, 256, 1024)
    for sketch in sizes:
        found = [alignment_scores(summed(updates, sketch, s), SIZES, sketch)["middle"] for s in range(40)]
        errors.append(float(np.sqrt(np.mean((np.array(found) - exact) ** 2))))
    assert all(left > 1.5 * right for left, right in pairwise(errors))
    # The mean direction is no longer than 1, so z errs by less than an inner product of unit vectors does.
    assert all(error < sketch**-0.5 for error, sketch in zip(errors, sizes, strict=True))


# Drift


def test_mean_squared_drift_from_sums_equals_the_direct_one():
    updates = clients(11, seed=5)
    flat = [np.concatenate([values.ravel() for values in update.values()]) for update in updates]
    centre = np.mean(flat, axis=0)
    expected = float(np.mean([np.sum((one - centre) ** 2) for one in flat]))
    squares = sum(float(one @ one) for one in flat)
    total = {layer: sum(update[layer] for update in updates) for layer in LAYERS}
    assert mean_squared_drift(total, squares, 11) == pytest.approx(expected, rel=1e-12)
    assert mean_squared_drift(sum(flat), squares, 11) == pytest.approx(expected, rel=1e-12)


def test_equal_updates_do_not_drift():
    one = np.random.default_rng(0).standard_normal(100)
    drift = mean_squared_drift(3 * one, 3 * float(one @ one), 3)
    assert 0.0 <= drift < 1e-12


def test_drift_of_nobody_is_refused():
    with pytest.raises(DataError, match="at least one client"):
        mean_squared_drift(np.zeros(2), 0.0, 0)


# Representation


def test_representation_equals_the_formulas():
    rng = np.random.default_rng(2)
    codes = np.array([0, 0, 0, 1, 1, 3, 3, 3, 3, 7])  # classes 2, 4, 5, 6 are absent
    features = rng.standard_normal((10, 6)) + codes[:, None]
    present = [0, 1, 3, 7]
    centroids = {c: np.mean(features[codes == c], axis=0) for c in present}
    within = [
        np.mean(
            [math.dist(row, centroids[c]) for row, code in zip(features, codes, strict=True) if code == c]
        )
        for c in present
    ]
    between = [math.dist(centroids[a], centroids[b]) for a, b in combinations(present, 2)]
    found = representation(features, codes)
    assert found.intra == pytest.approx(np.mean(within), rel=1e-12)
    assert found.inter == pytest.approx(np.mean(between), rel=1e-12)
    assert found.ratio == pytest.approx(np.mean(between) / np.mean(within), rel=1e-12)
    order = rng.permutation(10)
    assert representation(features[order], codes[order]) == pytest.approx(found, rel=1e-12)
    assert representation(features + 5.0, codes) == pytest.approx(found, rel=1e-12)


def test_representation_at_the_edges():
    single = representation(np.eye(3), np.zeros(3, dtype=int))
    assert single.intra > 0
    assert math.isnan(single.inter)
    assert math.isnan(single.ratio)
    assert representation(np.array([[0.0], [2.0]]), np.array([0, 1])) == (0.0, 2.0, math.inf)
    for features, codes in ((np.zeros((0, 3)), np.zeros(0)), (np.zeros((2, 3)), np.zeros(3))):
        with pytest.raises(DataError, match="representation needs features"):
            representation(features, codes)
