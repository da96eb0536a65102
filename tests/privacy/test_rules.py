"""What sites refuse, and what a server would learn if they did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.privacy import ledger as rules
from fedsolve.privacy.ledger import Ledger, Opening
from fedsolve.privacy.notes import read_letter
from fedsolve.privacy.ring import Layout, RingVector, encode

from .setups import plus
from .sites import Sites

Without = Callable[..., None]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Without:
    """Let the sites forget rules."""

    def forget(*names: str) -> None:
        for name in names:
            monkeypatch.setattr(rules, name, lambda *given: None)

    return forget


def straggler(sites: Sites) -> np.ndarray:
    """Three sites are late; the request is retried without them; then their terms arrive after all."""
    late = sites.names[6:]
    first = sites.ask(0, sites.names, silent=late)
    retried = sites.open(sites.ask(1, sites.names[:6]))
    for name in late:
        first.add(name, sites.masked(name, 0, sites.names))
    return sites.open(first) - retried


def test_a_straggler_after_a_retry_is_not_opened(without: Without) -> None:
    with pytest.raises(fs.CohortError, match="this request has been opened for 6 clients"):
        straggler(Sites())
    without("one_cohort_per_request")
    sites = Sites()
    assert np.allclose(straggler(sites), sites.gram(sites.names[6:]), rtol=0, atol=1e-12)


def second_cohort(sites: Sites) -> np.ndarray:
    whole = sites.open(sites.ask(0, sites.names))
    return whole - sites.open(sites.ask(1, sites.names, silent=sites.names[6:]))


def test_a_request_is_opened_for_one_cohort(without: Without) -> None:
    with pytest.raises(fs.CohortError, match="would show the difference"):
        second_cohort(Sites())
    without("one_cohort_per_request")
    sites = Sites()
    assert np.allclose(second_cohort(sites), sites.gram(sites.names[6:]), rtol=0, atol=1e-12)


def leaving(sites: Sites) -> np.ndarray:
    return sites.open(sites.ask(0, sites.names)) - sites.open(sites.ask(1, sites.names[:8], step=1))


def test_a_client_that_leaves_in_mid_run_stays_hidden(without: Without) -> None:
    with pytest.raises(fs.TermError, match="a sum over 8 sites is asked for, and the rows of 9 were counted"):
        leaving(Sites(changing=False))
    with pytest.raises(fs.CohortError, match=r"would set .*client-8.* apart"):
        leaving(Sites(changing=True))
    without("groups_of_three")
    sites = Sites(changing=True)
    assert np.allclose(leaving(sites), sites.gram(sites.names[8:]), rtol=0, atol=1e-12)


def three_cohorts(sites: Sites) -> np.ndarray:
    """Any two of them differ by at least five sites; together they are about one."""
    some, others, alone = sites.names[:4], sites.names[4:8], sites.names[8:]
    first = sites.open(sites.ask(0, some + alone, step=0))
    second = sites.open(sites.ask(1, others + alone, step=1))
    return (first + second - sites.open(sites.ask(2, some + others, step=2))) / 2


def test_three_cohorts_with_large_differences_single_nobody_out(without: Without) -> None:
    with pytest.raises(fs.CohortError, match="apart from all others"):
        three_cohorts(Sites())
    without("groups_of_three")
    sites = Sites()
    assert np.allclose(three_cohorts(sites), sites.gram(sites.names[8:]), rtol=0, atol=1e-12)


def kept_apart(sites: Sites) -> list[Opening]:
    """Three cohorts, any two harmless. Who is in all is not asked; the others are told of no other."""
    names = iter(sites.names)
    everywhere = [next(names)]
    pairs = {pair: [next(names) for _ in range(4)] for pair in ((0, 1), (0, 2), (1, 2))}
    opened = []
    for slot in range(3):
        cohort = [*everywhere, next(names), *(name for pair in pairs if slot in pair for name in pairs[pair])]
        sites.opened = []
        sites.open(sites.ask(slot, cohort, step=slot), silent=everywhere)
        opened += sites.opened
    return opened


def test_a_server_cannot_keep_totals_from_those_who_open(without: Without) -> None:
    with pytest.raises(fs.CohortError, match="not the one that this client was shown before"):
        kept_apart(Sites(16))
    without("one_chain")
    opened = kept_apart(Sites(16))
    with pytest.raises(fs.CohortError, match="apart from all others"):
        rules.groups_of_three(opened[:2], opened[2])


def test_three_may_leave_together() -> None:
    before = Opening("run", "a", tuple("abcdefgh"))
    rules.groups_of_three([before], Opening("run", "b", tuple("abcde")))
    with pytest.raises(fs.CohortError):
        rules.groups_of_three([before], Opening("run", "b", tuple("abcdef")))


def test_dropouts_are_opened_only_where_a_site_allows_it() -> None:
    strict = Sites(changing=False)
    pending = strict.ask(0, strict.names, silent=strict.names[8:])
    with pytest.raises(fs.CohortError, match=r"client-8.*did not answer"):
        strict.open(pending)
    sites = Sites(changing=True)
    total = sites.open(sites.ask(0, sites.names, silent=sites.names[8:]))
    assert np.allclose(total, sites.gram(sites.names[:8]), rtol=0, atol=1e-12)


def test_a_slot_serves_one_question_and_a_repeat_sends_the_stored_bytes() -> None:
    sites = Sites()
    first = sites.masked("client-0", 0, sites.names)
    sites.clients["client-0"].participant.data.source[:] = 7.0  # the rows may have changed since
    assert sites.masked("client-0", 0, sites.names) == first
    for changed in ({"step": 1}, {"cohort": sites.names[:8]}):
        with pytest.raises(fs.TermError, match="another question"):
            sites.masked("client-0", 0, **{"cohort": sites.names, **changed})  # type: ignore[arg-type]


def test_nothing_but_the_payload_depends_on_data() -> None:
    one, other = Sites(), Sites(scale=3.0)
    for client in other.clients.values():  # which all sites know; it names the question
        account = client.disclosure
        account.account = dataclasses.replace(account.account, history=one.census)
    first, second = (read_letter(s.masked("client-0", 0, s.names)) for s in (one, other))
    assert first[1] == second[1]
    difference = RingVector(second[0]["limbs"].copy(), first[1]["wide"])
    plus(difference, RingVector(first[0]["limbs"], first[1]["wide"]), -1)
    expected = encode(other.term("client-0"), other.layout, 9)
    plus(expected, encode(one.term("client-0"), one.layout, 9), -1)
    assert np.array_equal(difference.limbs, expected.limbs)


@pytest.mark.parametrize(("threshold", "colluders"), [(4, 0), (5, 2)])
def test_a_low_threshold_is_refused(threshold: int, colluders: int) -> None:
    with pytest.raises(fs.CohortError, match=f"threshold of {threshold} among 9 members is refused"):
        Sites(threshold=threshold, colluders=colluders)


def test_a_sum_over_few_is_refused() -> None:
    sites = Sites()
    with pytest.raises(fs.CohortError, match="it takes 5"):
        sites.masked("client-0", 0, sites.names[:4])


def test_the_size_of_an_answer_is_asked_once() -> None:
    sites = Sites()
    term = sites.term("client-0")
    narrow = [Layout.of(term, {("gram", (4, 4)): exponent}) for exponent in (62, 61)]
    assert b'"refused"' in sites.masked("client-0", 0, sites.names, layout=narrow[0]).replace(b"\\", b"")
    small = Layout.of(term, {("gram", (4, 4)): 10})  # in which it would fit
    for asked in (narrow[1], small):
        assert b'"refused"' in sites.masked("client-0", 1, sites.names, layout=asked).replace(b"\\", b"")
    assert b"masked" in sites.masked("client-0", 2, sites.names)[:400]


def test_a_site_that_starts_again_knows_what_it_did(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(9)]
    sites = Sites(ledgers=[Ledger(folder) for folder in folders])
    first = sites.open(sites.ask(0, sites.names))
    pending = sites.ask(1, sites.names, step=1)
    sent = sites.masked("client-0", 1, sites.names, step=1)
    for name, folder in zip(sites.names, folders, strict=True):
        before = sites.clients[name]
        sites.clients[name] = type(before)(
            before.participant, before._sign, before._verify, changing=True, ledger=Ledger(folder)
        )
    assert sites.masked("client-0", 1, sites.names, step=1) == sent
    assert np.array_equal(sites.open(pending), first)
    with pytest.raises(fs.CohortError, match="would show the difference"):
        sites.open(sites.ask(2, sites.names, silent=sites.names[6:]))


class AnySize(int):
    """A size that every file has."""

    def __ne__(self, other: object) -> bool:
        return False

    def __add__(self, more: int) -> AnySize:
        return self


@pytest.mark.parametrize("ruled", [True, False])
def test_two_servers_of_sites_with_one_state_folder(tmp_path: Path, ruled: bool) -> None:
    """Of two processes with one ledger neither knows what the other has opened."""
    ledgers = [[Ledger(tmp_path / str(n)) for n in range(9)] for _ in range(2)]
    one, other = (Sites(ledgers=own, run=f"of server {place}") for place, own in enumerate(ledgers))
    if not ruled:
        for ledger in (each for own in ledgers for each in own):
            ledger._size = AnySize()
    whole = one.open(one.ask(0, one.names))
    if ruled:
        with pytest.raises(fs.ModelFileError, match="another client uses this folder"):
            other.ask(0, other.names[:8])
    else:
        alone = whole - other.open(other.ask(0, other.names[:8]))
        assert np.allclose(alone, one.gram(one.names[8:]), rtol=0, atol=1e-12)


def test_a_torn_line_of_a_ledger_is_dropped_and_a_damaged_one_refused(tmp_path: Path) -> None:
    Ledger(tmp_path).open(Opening("run", "a", ("a", "b", "c")), bytes)
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes() + b'{"opened": ["run"')
    assert Ledger(tmp_path).openings == [Opening("run", "a", ("a", "b", "c"))]
    assert path.read_bytes().endswith(b"\n")
    path.write_bytes(b"nonsense\n")
    with pytest.raises(fs.ModelFileError, match="must sit out"):
        Ledger(tmp_path)


def test_a_ledger_with_one_bit_changed_or_a_line_less_is_refused(tmp_path: Path) -> None:
    ledger, path = Ledger(tmp_path), tmp_path / "ledger.jsonl"
    names = ("a", "b", "c")
    for request in "xyz":
        ledger.open(Opening("run", request, names), bytes)
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(fs.ModelFileError, match=r"ledger .* is damaged"):
            Ledger(tmp_path)
    first, second, third = whole.splitlines(keepends=True)
    for some in (first + third, second + third, first + first + second + third, second + first + third):
        path.write_bytes(some)
        with pytest.raises(fs.ModelFileError, match=r"line \d was changed, or lines before it are missing"):
            Ledger(tmp_path)
