"""Requests, terms and totals: the sum law, exact encoding, refusal of what is damaged."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedsolve import container
from fedsolve.errors import TermError
from fedsolve.federation.encoding import decode_request, decode_term, encode_request, encode_term
from fedsolve.federation.messages import (
    Block,
    Chain,
    Needs,
    Request,
    Term,
    Total,
    pack_triangle,
    unpack_triangle,
)

finite = st.floats(-1e100, 1e100, allow_nan=False)


def symmetric(width: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((width + 3, width))
    return rows.T @ rows


def some_term(seed: int = 0) -> Term:
    rng = np.random.default_rng(seed)
    arrays = {"gram": symmetric(5, seed), "cross": rng.standard_normal((5, 3))}
    return Term(arrays, {"rows": 7 + seed}, frozenset({"gram"}))


def some_request(chain: Chain, **changes: object) -> Request:
    fields: dict[str, object] = {
        "kind": "deepafl",
        "exchange": 3,
        "step": 1,
        "cohort": ("a", "b"),
        "note": {"ask": ["gram"], "phase": "classifier"},
        "arrays": {"weight": np.arange(6.0).reshape(2, 3)},
        "position": len(chain),
        "digest": chain.digest,
        "blocks": tuple(chain.blocks[1:]),
    }
    return Request(**{**fields, **changes})  # type: ignore[arg-type]


def some_chain() -> Chain:
    return Chain([Block({"opening": {"x": 1}}), Block({"layer": 1}, {"left": np.ones((2, 2))})])


@given(width=st.integers(0, 300))
def test_triangle_round_trip(width: int) -> None:
    matrix = symmetric(width)
    packed = pack_triangle(matrix)
    assert packed.size == width * (width + 1) // 2
    np.testing.assert_array_equal(unpack_triangle(packed), np.triu(matrix) + np.triu(matrix, 1).T)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
def test_a_matrix_that_is_not_square_has_no_triangle(shape: tuple[int, int]) -> None:
    with pytest.raises(TermError, match=f"{shape[0]} x {shape[1]} numbers"):
        pack_triangle(np.zeros(shape))


def test_unpack_refuses_a_length_that_is_no_triangle() -> None:
    with pytest.raises(TermError, match="4 numbers"):
        unpack_triangle(np.zeros(4))


@given(
    arrays=st.dictionaries(
        st.text("abcxyz.", min_size=1, max_size=6),
        hnp.arrays(np.float64, hnp.array_shapes(max_dims=3, max_side=4), elements=finite),
        max_size=4,
    ),
    counts=st.dictionaries(st.text("rows", min_size=1, max_size=4), st.integers(-(2**60), 2**60), max_size=3),
)
def test_term_encoding_is_exact(arrays: dict[str, np.ndarray], counts: dict[str, int]) -> None:
    decoded = decode_term(encode_term(Term(arrays, counts)))
    assert isinstance(decoded, Term)
    assert decoded.counts == counts
    assert decoded.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert decoded.arrays[name].tobytes() == array.tobytes()


def test_symmetric_arrays_travel_as_a_triangle() -> None:
    term = some_term()
    data = encode_term(term)
    assert term.nbytes == 8 * (15 + 15)
    assert container.from_bytes(data, what="", error=TermError)[0]["gram"].shape == (15,)
    decoded = decode_term(data)
    assert isinstance(decoded, Term)
    np.testing.assert_array_equal(decoded.arrays["gram"], term.arrays["gram"])


def test_needs_survives_encoding() -> None:
    assert decode_term(encode_term(Needs(4))) == Needs(4)


def test_request_encoding_is_exact_and_keeps_the_cohort_at_home() -> None:
    request = some_request(some_chain())
    decoded = decode_request(encode_request(request))
    assert decoded.cohort == ()
    assert (decoded.kind, decoded.exchange, decoded.step, decoded.note, decoded.digest) == (
        request.kind,
        request.exchange,
        request.step,
        request.note,
        request.digest,
    )
    np.testing.assert_array_equal(decoded.arrays["weight"], request.arrays["weight"])
    np.testing.assert_array_equal(decoded.blocks[0].arrays["left"], np.ones((2, 2)))
    assert decoded.nbytes == request.nbytes == 8 * (6 + 4)
    assert encode_request(request) == encode_request(decoded)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_truncated_messages_are_refused(keep: int) -> None:
    data = encode_term(some_term())
    with pytest.raises(TermError, match=r"damaged|truncated"):
        decode_term(data[:keep])


def test_another_wire_version_is_refused() -> None:
    data = container.to_bytes({}, {"wire": 99, "message": "term", "counts": {}, "symmetric": []})
    with pytest.raises(TermError, match="wire version 99"):
        decode_term(data)


def test_a_request_is_not_a_term() -> None:
    with pytest.raises(TermError, match="expected a term"):
        decode_term(encode_request(some_request(some_chain())))


def test_sum_of_terms() -> None:
    first, second = some_term(0), some_term(1)
    total = first + second
    np.testing.assert_array_equal(total.arrays["cross"], first.arrays["cross"] + second.arrays["cross"])
    assert total.counts == {"rows": 15}
    total.mirror()
    np.testing.assert_array_equal(total.arrays["gram"], first.arrays["gram"] + second.arrays["gram"])


def test_only_the_upper_triangle_of_a_symmetric_array_counts() -> None:
    term = some_term()
    spoiled = Term(
        {"gram": np.triu(term.arrays["gram"]) + np.tril(np.full((5, 5), 9e9), -1)}, {}, term.symmetric
    )
    total = Term() + spoiled
    total.mirror()
    np.testing.assert_array_equal(total.arrays["gram"], term.arrays["gram"])


@pytest.mark.parametrize("width", [1, 127, 128, 129, 300])
def test_mirror_makes_symmetric(width: int) -> None:
    matrix = symmetric(width)
    term = Term({"gram": np.triu(matrix)}, {}, frozenset({"gram"}))
    term.mirror()
    np.testing.assert_array_equal(term.arrays["gram"], np.triu(matrix) + np.triu(matrix, 1).T)


def test_differing_names_are_united() -> None:
    total = Term({"a": np.ones(2)}) + Term({"b": np.ones(3)})
    assert total.arrays.keys() == {"a", "b"}


def test_adding_leaves_the_addends_alone() -> None:
    first, second = some_term(0), some_term(1)
    before = first.arrays["cross"].copy()
    _ = first + second
    np.testing.assert_array_equal(first.arrays["cross"], before)


def test_float32_terms_are_summed_in_float64() -> None:
    term = Term({"a": np.full(1, 1e8, dtype=np.float32)})
    total = term + Term({"a": np.ones(1, dtype=np.float32)})
    assert total.arrays["a"].dtype == np.float64
    assert total.arrays["a"][0] == 1e8 + 1


LAID_OUT = {
    "in line": lambda values: values,
    "transposed": lambda values: values.T,
    "every other, backwards": lambda values: values[::-2, ::3],
    "a number": lambda values: values[0, 0],
    "nothing": lambda values: values[:0],
}


@pytest.mark.parametrize("factor", [0.3, 1.0, -7.0, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("layout", LAID_OUT.values(), ids=LAID_OUT)
def test_a_sum_has_the_bits_of_whole_products_added_in_turn(layout, dtype: str, factor: float) -> None:
    rng = np.random.default_rng(4)
    arrays = [layout((100 * rng.standard_normal((230, 310))).astype(dtype)) for _ in range(4)]
    total, expected = Term(), None
    for number, array in enumerate(arrays):
        sign = -1 if number == 2 else 1
        product = np.multiply(array, factor + number, dtype=np.float64)
        total.add(Term({"a": array}, factors={"a": factor + number}), sign)
        expected = sign * product if expected is None else expected + sign * product
    assert total.arrays["a"].dtype == np.float64
    assert total.arrays["a"].tobytes() == np.asarray(expected).tobytes()


def test_symmetric_terms_have_factors_too() -> None:
    terms = [Term({"g": symmetric(300, seed)}, {}, frozenset("g"), {"g": seed + 0.1}) for seed in range(3)]
    total = terms[0] + terms[1]
    total.add(terms[2], -1)
    total.mirror()
    first, second, third = (term.factors["g"] * term.arrays["g"] for term in terms)
    np.testing.assert_array_equal(total.arrays["g"], first + second - third)


def test_terms_of_different_shapes_do_not_add() -> None:
    with pytest.raises(TermError, match=r"'a' has shape \(3,\) \(plain\), expected \(2,\)"):
        Term({"a": np.ones(2)}) + Term({"a": np.ones(3)})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_terms_are_refused_by_name(bad: float) -> None:
    with pytest.raises(TermError, match="'north': 'cross' contains NaN or infinite"):
        Term({"cross": np.array([[1.0, bad]])}).check_finite("north")


def test_total_including_and_without() -> None:
    total = Total(some_term(0), ("a",))
    larger = total.including("b", some_term(1))
    assert larger.cohort == ("a", "b")
    back = larger.without("b", some_term(1))
    assert back.cohort == ("a",)
    np.testing.assert_allclose(back["gram"], total["gram"], rtol=1e-12)
    with pytest.raises(TermError, match="already part"):
        larger.including("a", some_term(0))
    with pytest.raises(TermError, match="not part"):
        total.without("z", some_term(0))
    with pytest.raises(TermError, match="lacks 'hidden_gram'"):
        total["hidden_gram"]


class TestChain:
    def test_accepts_new_blocks_and_repeats(self) -> None:
        server = some_chain()
        mine = Chain(server.blocks[:1])
        request = some_request(server)
        assert mine.accept(request)
        assert mine.digest == server.digest
        assert mine.accept(request)

    def test_asks_for_what_is_missing(self) -> None:
        server = some_chain()
        mine = Chain()
        assert not mine.accept(some_request(server))
        assert mine.accept(some_request(server).starting_at(len(mine), server))
        assert mine.digest == server.digest

    def test_an_earlier_request_takes_it_back(self) -> None:
        server = some_chain()
        mine = Chain(server.blocks)
        early = some_request(Chain(server.blocks[:1]), blocks=())
        assert mine.accept(early)
        assert len(mine) == 1

    def test_another_history_is_dropped(self) -> None:
        server = some_chain()
        mine = Chain([Block({"opening": {"x": 2}})])
        assert not mine.accept(some_request(server))
        assert len(mine) == 0

    def test_damaged_blocks_are_refused(self) -> None:
        server = some_chain()
        blocks = (server.blocks[0], Block({"layer": 1}, {"left": np.zeros((2, 2))}))
        with pytest.raises(TermError, match="digest"):
            Chain().accept(some_request(server, blocks=blocks))


@pytest.mark.parametrize("field", ["symmetric", "counts"])
def test_a_term_without_a_field_is_refused(field: str) -> None:
    arrays, note = container.from_bytes(encode_term(some_term()), what="", error=TermError)
    del note[field]
    with pytest.raises(TermError, match=f"incomplete.*{field}"):
        decode_term(container.to_bytes(arrays, note))


def test_a_request_without_a_field_is_refused() -> None:
    arrays, note = container.from_bytes(encode_request(some_request(some_chain())), what="", error=TermError)
    del note["blocks"]
    with pytest.raises(TermError, match=r"incomplete.*blocks"):
        decode_request(container.to_bytes(arrays, note))


def test_more_blocks_than_a_position_has_are_refused() -> None:
    server = some_chain()
    mine = Chain(server.blocks)
    blocks = (Block({"opening": {"x": 2}}), Block({"layer": 1}), Block({"layer": 2}))
    before = list(mine.digests)
    with pytest.raises(TermError, match="3 blocks of a model of 1"):
        mine.accept(
            some_request(
                server, position=1, digest=Chain([*server.blocks[:1], *blocks]).digest, blocks=blocks
            )
        )
    assert mine.digests == before


def test_a_letter_of_entries_that_overlap_takes_no_memory() -> None:
    body, count = 1 << 20, 400
    head: dict[str, object] = {"__metadata__": {"fedsolve": "{}"}}
    head |= {
        f"{place:x}": {"dtype": "U8", "shape": [body], "data_offsets": [0, body]} for place in range(count)
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    letter = len(text).to_bytes(8, "little") + text + bytes(body)
    tracemalloc.start()
    with pytest.raises(TermError):
        container.from_bytes(letter, what="this letter", error=TermError)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * body
