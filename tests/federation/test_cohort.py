"""The one sum of every engine: the same bits in memory and packed, and what may not enter it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.cohort import UNKNOWN, CohortReport, Contradiction, Missing, RunningSum, TermLayout
from fedsolve.federation.encoding import encode_term, read_term
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, step


@st.composite
def terms(draw: st.DrawFn, count: int = 4) -> list[Term]:
    """Terms of the same shapes, as clients answer: lower triangles hold anything."""
    width, outputs = draw(st.integers(1, 7)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from([np.float64, np.float32]))
    weighted = draw(st.booleans())
    members = []
    for _ in range(draw(st.integers(1, count))):
        arrays = {
            "gram": rng.standard_normal((width, width)).astype(kind),
            "cross": rng.standard_normal((width, outputs)),
        }
        factors = {"cross": float(rng.integers(1, 100))} if weighted else {}
        members.append(Term(arrays, {"rows": int(rng.integers(0, 100))}, frozenset({"gram"}), factors))
    return members


def packed(term: Term) -> Term:
    """The term as a server reads it from the bytes that travel."""
    arrived = read_term(np.frombuffer(encode_term(term), dtype=np.uint8))
    assert isinstance(arrived, Term)
    assert all(arrived.arrays[name].ndim == 1 for name in arrived.symmetric)
    return arrived


def added(members: list[Term], sums: RunningSum | None = None) -> Term:
    sums = sums or RunningSum()
    for number, term in enumerate(members):
        sums.add(sums.check(term, f"client-{number}"))
    return sums.term.mirror()


@settings(max_examples=60, deadline=None)
@given(terms())
def test_terms_in_memory_and_packed_ones_have_sums_of_the_same_bits(members: list[Term]) -> None:
    whole, arrived = added(members), added([packed(term) for term in members])
    assert [packed(term).nbytes for term in members] == [term.nbytes for term in members]
    assert (arrived.counts, arrived.symmetric) == (whole.counts, whole.symmetric)
    assert whole.counts["rows"] == sum(term.counts["rows"] for term in members)
    for name, array in whole.arrays.items():
        assert array.dtype == np.float64
        assert arrived.arrays[name].tobytes() == array.tobytes()
    upper = np.triu(sum(term.arrays["gram"].astype(np.float64) for term in members))
    np.testing.assert_array_equal(whole.arrays["gram"], upper + np.triu(upper, 1).T)


@given(terms())
def test_the_addends_are_left_alone(members: list[Term]) -> None:
    before = [{name: array.tobytes() for name, array in term.arrays.items()} for term in members]
    added(members)
    assert [{name: array.tobytes() for name, array in term.arrays.items()} for term in members] == before


def test_factors_multiply_in_double_precision() -> None:
    weights = np.array([0.1, 0.2], dtype=np.float32)
    total = added([Term({"w": weights}, factors={"w": float(rows)}) for rows in (3, 5)])
    expected = np.multiply(weights, 3.0, dtype=np.float64) + np.multiply(weights, 5.0, dtype=np.float64)
    assert total.arrays["w"].tobytes() == expected.tobytes()


# -- names of a client's own -----------------------------------------------------------------------


def test_names_of_a_client_s_own_do_not_have_to_be_everyone_s() -> None:
    sums = RunningSum()
    for client in ("a", "b"):
        sums.add(sums.check(Term({"shared": np.ones(2), f"own@{client}": np.ones(3)}), client))
    assert sorted(sums.term.mirror().arrays) == ["own@a", "own@b", "shared"]


def test_a_client_called_like_an_array_owns_nothing_by_that() -> None:
    sums = RunningSum()
    for client in ("cross", "square"):
        sums.add(sums.check(Term({"gram.cross": np.ones(2), "label_square": np.ones(3)}), client))
    assert sums.term.mirror().arrays["gram.cross"].tolist() == [2.0, 2.0]


def test_nobody_answers_in_another_client_s_name() -> None:
    with pytest.raises(TermError, match=r"'b' sent 'own@a'"):
        RunningSum().check(Term({"own@a": np.ones(2)}), "b")


# -- what does not fit -----------------------------------------------------------------------------

LAYOUT = TermLayout.of(Term({"gram": np.eye(4), "own@x": np.ones(2)}, symmetric=frozenset({"gram"})), "x")

MISFITS = {
    "another shape": (np.eye(3), frozenset({"gram"}), {}, r"'gram' of 'b' has shape \(3, 3\) \(symmetric\)"),
    "not symmetric": (
        np.eye(4),
        frozenset(),
        {},
        r"'gram' of 'b' has shape \(4, 4\), expected \(4, 4\) \(",
    ),
    "a name more": (np.eye(4), frozenset({"gram"}), {"more": np.ones(1)}, r"'b' sent \['gram', 'more'"),
    "a name less": (None, frozenset(), {}, r"'b' sent \["),
}


@pytest.mark.parametrize("form", ["memory", "packed"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("case", MISFITS)
def test_a_term_that_does_not_fit_is_refused_and_not_added(case: str, known: bool, form: str) -> None:
    """Beside the layout known beforehand, or beside the terms before."""
    as_sent = packed if form == "packed" else lambda term: term

    def good(client: str) -> Term:
        return as_sent(Term({"gram": np.eye(4), f"own@{client}": np.ones(2)}, symmetric=frozenset({"gram"})))

    gram, symmetric, more, words = MISFITS[case]
    arrays = {**({} if gram is None else {"gram": gram}), "own@b": np.ones(2), **more}
    sums = RunningSum(LAYOUT if known else None)
    for client in ("a", "aa"):
        sums.add(sums.check(good(client), client))
    with pytest.raises(TermError, match=words) as problem:
        sums.add(sums.check(as_sent(Term(arrays, {}, symmetric)), "b"))
    assert not isinstance(problem.value, Contradiction)
    sums.add(sums.check(good("c"), "c"))
    total = sums.term.mirror()
    assert sorted(total.arrays) == ["gram", "own@a", "own@aa", "own@c"]
    np.testing.assert_array_equal(total.arrays["gram"], 3 * np.eye(4))


def test_of_two_that_contradict_each_other_neither_is_blamed() -> None:
    sums = RunningSum()
    sums.add(sums.check(Term(counts={"rows": 0}), "empty", empty=("empty",)))
    sums.add(sums.check(Term({"value": np.ones(2)}), "a"))
    with pytest.raises(Contradiction, match=r"'value' of 'b' has shape \(3,\)") as problem:
        sums.add(sums.check(Term({"value": np.ones(3)}), "b"))
    assert problem.value.first == "'a'"


@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_counts_alone_are_an_answer_and_nothing_at_all_is_none(layout: TermLayout | None) -> None:
    """A client without a batch to train on, or without rows, has nothing to add to arrays."""
    sums = RunningSum(layout)
    sums.add(sums.check(Term(counts={"rows": 5}), "a"))
    for client in ("b", "c"):
        arrays = {"gram": np.eye(4), f"own@{client}": np.ones(2)}
        sums.add(sums.check(Term(arrays, {"rows": 1}, frozenset({"gram"})), client))
    with pytest.raises(TermError, match=r"'d' sent \[\]"):
        sums.add(sums.check(Term(), "d"))
    sums.add(sums.check(Term(counts={"rows": 2}), "e"))
    assert sums.term.mirror().counts == {"rows": 9}


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (Term({"gram": np.array([1.0, np.nan])}), "'a': 'gram' contains NaN or infinite"),
        (Term({"gram": np.array([np.inf])}), "'a': 'gram' contains NaN or infinite"),
        (Term({}, {"rows": 2**53 + 1}), "the count 'rows' has 16 digits"),
        (Term({"w": np.ones(1)}, factors={"w": float("inf")}), "the factor of 'w' is inf"),
    ],
)
def test_numbers_that_would_spoil_the_sum_are_refused_by_name(term: Term, words: str) -> None:
    with pytest.raises(TermError, match=words):
        RunningSum().check(term, "a")


# -- another arithmetic ----------------------------------------------------------------------------


# -- the report ------------------------------------------------------------------------------------


def report_of(*answered: str, kind: str = "afl") -> tuple[CohortReport, RunningSum, Request]:
    request = Request(kind, 3, 0, ("d", "a", "c", "b", "e"), arrays={"weight": np.ones(4)})
    report, sums = CohortReport(request.exchange, request.kind, tuple("abcde")), RunningSum()
    report.absent = {"e": UNKNOWN}
    for name in answered:
        answer = sums.check(
            Term({"value": np.ones(2)}, {"rows": 1}), name, empty=("b",) if name == "b" else ()
        )
        assert not report.take(sums, [answer], {})
    return report, sums, request


def test_a_total_is_filled_from_the_report() -> None:
    report, sums, request = report_of("a", "b")
    report.lose("c", Missing("late", "no answer\x1b[2J\nwithin 3 s"))
    report.lose("d", OSError("disk"))
    report.catch_up_bytes, report.seconds = 7, 1.5
    total = report.total(sums, request, 2)
    assert (total.cohort, total.empty) == (("a", "b"), ("b",))
    assert total.missing == {
        "c": "no answer?[2J within 3 s",
        "d": "OSError: disk",
        "e": "not part of the federation",
    }
    assert (total.bytes_up, total.bytes_down, total.catch_up_bytes, total.seconds) == (32, 64, 7, 1.5)
    assert total["value"].tolist() == [2.0, 2.0]
    assert report.coverage == 0.4


def test_too_few_and_stopped_say_who_why_and_what_to_do() -> None:
    report, sums, request = report_of("a")
    report.lose("b", DataError("label 'x' is unknown."))
    report.lose("c", Missing("late", "too late: no answer within 3 s"))
    with pytest.raises(CohortError, match=r"exchange 3 \(afl\): 1 of 5 .*at least 2.*'b': DataError.*resume"):
        report.total(sums, request, 2)
    stopped = report.stopped("b", DataError("label 'x' is unknown."))
    assert isinstance(stopped, DataError)
    assert str(stopped) == "participant 'b': label 'x' is unknown."
    late = report.stopped("c", Missing("late", ""))
    assert isinstance(late, CohortError)
    assert "participant 'c' failed in exchange 3 (afl): too late" in str(late)


# -- the same law in one process -------------------------------------------------------------------


@step("test.contrary")
def _contrary(data: ClientData, request: Request, memory: Memory) -> Term:
    return Term({"value": np.ones(len(data))})


@pytest.mark.parametrize("missing", ["error", "continue"])
def test_a_local_federation_stops_at_a_contradiction(missing: str) -> None:
    federation = fs.LocalFederation.from_arrays(
        np.eye(5), np.arange(5) % 2, np.array([0, 0, 1, 1, 1]), missing=missing
    )
    with pytest.raises(CohortError, match="'client-0' and 'client-1' contradict each other"):
        federation.exchange(Request("test.contrary", 0, 0, federation.clients), Chain())
