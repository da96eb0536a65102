"""Sums in the ring: exact against `math.fsum`, the same bits in any order, refused by name out of range."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsolve.container import canonical_json
from fedsolve.errors import TermError
from fedsolve.federation.messages import Term
from fedsolve.privacy.ring import CHUNK, Field, Layout, OutOfRange, RingVector, decode, encode
from fedsolve.privacy.sizes import FINEST, KnownTotals, exponent_for
from fedsolve.privacy.unmasking import WordSum

from .setups import plus, zeros

NUMBERS = st.floats(-(2.0**55), 2.0**55, allow_subnormal=True)


def summed(terms: list[Term], layout: Layout) -> RingVector:
    total = zeros(layout.wide, layout.narrow)
    for term in terms:
        plus(total, encode(term, layout, len(terms)))
    return total


def term_of(numbers: Any) -> Term:
    return Term({"x": np.asarray(numbers, dtype=np.float64)})


@settings(max_examples=300, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=12))
def test_two_limbs_equal_fsum_to_an_ulp_and_the_rounding_of_terms(numbers: list[float]) -> None:
    terms = [term_of([x]) for x in numbers]
    layout = Layout.of(terms[0])
    (found,) = decode(summed(terms, layout), layout).arrays["x"]
    assert abs(Fraction(found) - sum(map(Fraction, numbers))) <= Fraction(math.ulp(found)) / 2 + Fraction(
        layout.error_bounds(len(terms))["x"]
    )
    expected = math.fsum(numbers)
    assert abs(found - expected) <= math.ulp(expected) + len(numbers) * 2.0**-65


@settings(max_examples=200, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=12), st.integers(-40, 5))
def test_one_limb_keeps_its_bound(numbers: list[float], exponent: int) -> None:
    scale = 2.0 ** (55 - 62 + exponent + 4)
    terms = [term_of([x / scale if scale > 1 else x]) for x in numbers]
    layout = Layout.of(terms[0], {("x", (1,)): exponent})
    (found,) = decode(summed(terms, layout), layout).arrays["x"]
    exact = sum(Fraction(float(term.arrays["x"][0])) for term in terms)
    rounding = Fraction(math.ulp(found)) / 2
    assert abs(Fraction(found) - exact) <= Fraction(layout.error_bounds(len(terms))["x"]) + rounding


@settings(max_examples=300, deadline=None)
@given(st.integers(-(2**126) + 1, 2**126 - 1))
def test_decoding_rounds_once(steps: int) -> None:
    limbs = np.array([steps % 2**64, (steps >> 64) % 2**64], dtype=np.uint64)
    (found,) = decode(RingVector(limbs, 1), Layout((Field("x", (1,)),))).arrays["x"]
    assert found == steps / 2**64  # Python divides integers with one rounding


@pytest.mark.parametrize("bits", range(126))
def test_decoding_rounds_once_around_every_power_of_two(bits: int) -> None:
    half = 2 ** max(bits - 53, 0)  # half of float64's last place: what lies beyond it decides
    offsets = (-1, 0, 1, half - 1, half, half + 1)
    for steps in (sign * (2**bits + offset) for sign in (1, -1) for offset in offsets):
        limbs = np.array([steps % 2**64, (steps >> 64) % 2**64], dtype=np.uint64)
        (found,) = decode(RingVector(limbs, 1), Layout((Field("x", (1,)),))).arrays["x"]
        assert found == steps / 2**64


@pytest.mark.parametrize(
    "value", [-(2.0**-60), 2.0**-64, -(2.0**-64), -1.0, -1.5, 1e-30, -1e-30, 0.0, 2.0**60]
)
def test_single_numbers_survive(value: float) -> None:
    layout = Layout.of(term_of([value]))
    (found,) = decode(encode(term_of([value]), layout, 3), layout).arrays["x"]
    assert found == (value if abs(value) >= 2.0**-64 else 0.0)


def many_terms(clients: int, size: int) -> list[Term]:
    rng = np.random.default_rng(3)
    return [
        Term(
            {
                "gram": rng.standard_normal((9, 9)),
                "x": rng.standard_normal(size) * 10.0 ** rng.integers(-9, 9),
            },
            {"rows": int(rng.integers(0, 10**9)), "correct": -int(rng.integers(0, 9))},
            frozenset({"gram"}),
            {"x": float(rng.integers(1, 1000))},
        )
        for _ in range(clients)
    ]


def test_the_same_bits_in_any_order_and_grouping() -> None:
    terms = many_terms(5, 3)
    layout = Layout.of(terms[0], {("gram", (9, 9)): 40})
    first = summed(terms, layout).limbs.tobytes()
    for order in itertools.permutations(terms):
        assert summed(list(order), layout).limbs.tobytes() == first
    left, right = (zeros(layout.wide, layout.narrow) for _ in range(2))
    for term in terms[:2]:
        plus(left, encode(term, layout, 5))
    for term in terms[2:]:
        plus(right, encode(term, layout, 5))
    plus(left, right)
    assert left.limbs.tobytes() == first


def test_withdrawal_is_exact_to_the_bit() -> None:
    terms = many_terms(6, 2 * CHUNK + 77)
    layout = Layout.of(terms[0])
    total = zeros(layout.wide, layout.narrow)
    for term in terms:
        plus(total, encode(term, layout, 6))
    plus(total, encode(terms[2], layout, 6), -1)
    rest = zeros(layout.wide, layout.narrow)
    for place in (0, 1, 3, 4, 5):
        plus(rest, encode(terms[place], layout, 6))
    assert np.array_equal(total.limbs, rest.limbs)


def test_a_term_comes_back_whole_factors_triangles_and_counts_included() -> None:
    terms = many_terms(7, CHUNK + 5)
    layout = Layout.of(terms[0])
    assert layout.wide == 45 + CHUNK + 5 + 2
    total = decode(summed(terms, layout), layout)
    products = np.stack([term.arrays["x"] * term.factors["x"] for term in terms])
    for place in (0, 1, CHUNK - 1, CHUNK, CHUNK + 4):
        expected = math.fsum(products[:, place])
        assert abs(total.arrays["x"][place] - expected) <= math.ulp(expected) + 7 * 2.0**-65
    upper = sum(np.triu(term.arrays["gram"]) for term in terms)
    assert np.allclose(np.triu(total.arrays["gram"]), upper, rtol=1e-14, atol=1e-14)
    assert np.array_equal(total.arrays["gram"], total.arrays["gram"].T)
    assert total.counts == {name: sum(t.counts[name] for t in terms) for name in ("rows", "correct")}
    assert total.symmetric == {"gram"}
    assert total.factors == {}


def test_float32_and_arrays_without_axes() -> None:
    term = Term({"w": np.float32([0.1, -3.0]), "loss": np.array(2.5), "none": np.empty((0, 4))})
    layout = Layout.of(term)
    found = decode(encode(term, layout, 3), layout).arrays
    assert found["w"].tolist() == [float(np.float32(0.1)), -3.0]
    assert found["loss"].shape == ()
    assert found["loss"] == 2.5
    assert found["none"].shape == (0, 4)


@pytest.mark.parametrize("clients", [1, 3, 20, 1000])
@pytest.mark.parametrize("exponent", [None, -30, 0, 40])
def test_terms_out_of_range_are_refused_by_name(clients: int, exponent: int | None) -> None:
    limit = 2.0 ** (62 - (exponent or 0)) / clients
    exponents = {} if exponent is None else {("gram", (2,)): exponent}
    inside = Term({"gram": np.array([limit, -limit]), "other": np.zeros(2)})
    layout = Layout.of(inside, exponents)
    total = encode(inside, layout, clients)
    if clients <= 20:
        for _ in range(clients - 1):
            plus(total, encode(inside, layout, clients))
        assert decode(total, layout).arrays["gram"] == pytest.approx([limit * clients, -limit * clients])
    for bad in (limit * (1 + 1e-15), -limit * 1.01, math.nan, math.inf):
        outside = Term({"gram": np.array([0.0, bad]), "other": np.zeros(2)})
        with pytest.raises(OutOfRange, match="'gram'") as refusal:
            encode(outside, layout, clients)
        assert refusal.value.array == "gram"
        assert str(outside.arrays["gram"][1]) not in str(refusal.value)


def test_counts_out_of_range_are_refused_by_name() -> None:
    layout = Layout.of(Term(counts={"rows": 1}))
    assert decode(encode(Term(counts={"rows": 2**60}), layout, 4), layout).counts == {"rows": 2**60}
    with pytest.raises(OutOfRange, match="'rows'"):
        encode(Term(counts={"rows": 2**60 + 1}), layout, 4)


def test_an_answer_of_another_layout_is_refused() -> None:
    layout = Layout.of(Term({"x": np.zeros(3)}, {"rows": 0}))
    for other in (Term({"x": np.zeros(4)}, {"rows": 0}), Term({"x": np.zeros(3)}), Term({"y": np.zeros(3)})):
        with pytest.raises(TermError, match="laid out"):
            encode(other, layout, 3)
    with pytest.raises(TermError, match="do not fit"):
        WordSum(zeros(3, 0).limbs, 3).add(zeros(2, 2))
    with pytest.raises(TermError, match="layout"):
        decode(zeros(3, 0), layout)


def test_a_layout_travels_as_json() -> None:
    terms = many_terms(1, 3)
    layout = Layout.of(terms[0], {("gram", (9, 9)): 7})
    note = json.loads(canonical_json(layout.note()))
    assert Layout.from_note(note) == layout
    first, second = note["fields"]
    for wrong in (
        None,
        {},
        {"fields": note["fields"]},
        {"fields": [second, first], "counts": []},
        {"fields": [first, first], "counts": []},
        {"fields": note["fields"], "counts": ["rows", "correct"]},
        {"fields": [["x", [2, -1], False, None]], "counts": []},
        {"fields": [["x", [2, 3], True, None]], "counts": []},
        {"fields": [["x", [2.0], False, None]], "counts": []},
        {"fields": [["x", [2], False, 10**9]], "counts": []},
        {"fields": [["x", [2], 1, None]], "counts": []},
        {"fields": [["x", [2], False]], "counts": []},
    ):
        with pytest.raises(TermError, match="layout"):
            Layout.from_note(wrong)


def test_a_copy_has_views_of_its_own() -> None:
    total = WordSum(zeros(2, 3).limbs, 2)
    for found in (copy.deepcopy(total), pickle.loads(pickle.dumps(total))):
        found.high[:] = found.single[:] = 7
        assert found.limbs.tolist() == [0, 0, 7, 7, 7, 7, 7]
    assert not total.limbs.any()


def test_masks_that_did_not_cancel_are_noticed() -> None:
    rng = np.random.default_rng(0)
    layout = Layout.of(Term({"gram": np.zeros(40), "x": np.zeros(40)}), {("gram", (40,)): 20})
    noise = RingVector(rng.integers(0, 2**64, 120, dtype=np.uint64), 40)
    with pytest.raises(TermError, match="'x' is out of range"):
        decode(noise, layout)


# -- exponents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2, 3, 20, 33, 64])
@pytest.mark.parametrize("largest", [1e-9, 0.3, 1.0, 1.5, 7e5, 1e12])
def test_an_exponent_leaves_two_bits_for_every_client(clients: int, largest: float) -> None:
    exponent = exponent_for(largest, clients)
    assert exponent is not None
    layout = Layout((Field("gram", (1,), exponent=exponent),))
    encode(Term({"gram": np.array([2**2 * largest])}), layout, clients)
    with pytest.raises(OutOfRange):
        encode(Term({"gram": np.array([1.001 * 2**5 * largest])}), layout, clients)
    assert layout.error_bounds(clients)["gram"] <= FINEST / 4 * largest


def test_no_exponent_where_one_limb_cannot_do() -> None:
    assert exponent_for(1.0, 65) is None
    assert exponent_for(0.0, 3) is None
    assert exponent_for(math.nan, 3) is None
    assert exponent_for(1e-300, 3) is None


def test_only_declared_arrays_of_a_known_name_and_shape_travel_in_one_limb() -> None:
    known = KnownTotals({"gram", "cross"})
    assert known.exponents(20) == {}
    total = Term({"gram": np.diag([1.0, -900.0]), "cross": np.zeros((2, 3)), "gradient": np.ones(4)})
    known.check_accuracy(total, Layout.of(total), 20)
    exponents = known.exponents(20)
    assert exponents == {("gram", (2, 2)): exponent_for(900.0, 20)}
    next_term = Term({"gram": np.eye(2), "gradient": np.ones(4)}, {"rows": 3}, frozenset({"gram"}))
    layout = Layout.of(next_term, exponents)
    assert (layout.wide, layout.narrow) == (4 + 1, 3)
    assert Layout.of(Term({"gram": np.eye(3)}), exponents).narrow == 0
    smaller = Term({"gram": np.diag([1.0, 3.0])})
    known.check_accuracy(smaller, Layout.of(smaller), 20)
    assert known.exponents(20) == {("gram", (2, 2)): exponent_for(3.0, 20)}


def test_a_total_known_too_coarsely_stops_by_name() -> None:
    known = KnownTotals({"gram"})
    fine = Term({"gram": np.array([1.0, 1e-12]), "zero": np.zeros(3)})
    layout = Layout.of(fine, {("gram", (2,)): 42})
    assert known.check_accuracy(fine, layout, 3) == {"gram": 3 * 2.0**-43, "zero": 3 * 2.0**-65}
    with pytest.raises(TermError, match=r"'gram' has numbers up to 0\.1"):
        known.check_accuracy(Term({"gram": np.array([0.1, 0.0]), "zero": np.zeros(3)}), layout, 3)


def test_a_gradient_may_vanish_a_gram_matrix_may_not() -> None:
    known = KnownTotals({"gram"})
    large = Term({"gram": np.ones(2), "gradient": np.ones(2)})
    known.check_accuracy(large, Layout.of(large), 20)
    small = Term({"gram": np.ones(2), "gradient": np.full(2, 1e-12)})
    known.check_accuracy(small, Layout.of(small), 20)
    tiny = Term({"gram": np.full(2, 1e-12), "gradient": np.ones(2)})
    with pytest.raises(TermError, match="'gram'"):
        known.check_accuracy(tiny, Layout.of(tiny), 20)


def test_a_gradient_that_vanishes_at_once_is_measured_beside_the_curvature() -> None:
    """A curvature that is as small is refused itself, and so is any other sum beside it."""
    known, size = KnownTotals({"curvature"}), np.full((2, 2), 4e4)
    for member in ("", "fold 1."):
        small = Term({f"{member}gradient": np.full(2, 1e-14), f"{member}curvature": size})
        known.check_accuracy(small, Layout.of(small), 20)
    flat = Term({"gradient": np.full(2, 1e-14), "curvature": np.full((2, 2), 1e-14)})
    for alone in (Term({"gradient": np.full(2, 1e-14)}), flat, Term({"other": np.full(2, 1e-14)})):
        with pytest.raises(TermError, match=r"'(gradient|curvature|other)' has numbers up to 1e-"):
            KnownTotals().check_accuracy(alone, Layout.of(alone), 20)
