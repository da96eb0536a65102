"""Masked sums: equal to the ring's sum whoever drops out, closed below the threshold, uniform to look at."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedsolve.container import from_bytes, to_bytes
from fedsolve.errors import CohortError, DataError, FedsolveError, ModelFileError, TermError
from fedsolve.federation.messages import Term
from fedsolve.privacy.masking import Client
from fedsolve.privacy.notes import Setup, least_threshold, relay, relayed
from fedsolve.privacy.primitives import add_masks, signer, verifier
from fedsolve.privacy.ring import CHUNK, Layout, RingVector, decode, encode
from fedsolve.privacy.unmasking import MaskedSum, Server
from tests.privacy.setups import Cohort, names_of, plus, ready, repeatable, sign_as, verify, zeros

WIDE, NARROW = 2 * CHUNK + 123, 3 * CHUNK + 45
SMALL = (5, 7)


def vectors_of(
    names: list[str], wide: int = WIDE, narrow: int = NARROW, seed: int = 0
) -> dict[str, RingVector]:
    rng = np.random.default_rng(seed)
    return {
        name: RingVector(rng.integers(0, 2**64, 2 * wide + narrow, dtype=np.uint64), wide) for name in names
    }


def plain_sum(vectors: dict[str, RingVector], names: Any) -> RingVector:
    chosen = [vectors[name] for name in names]
    total = zeros(chosen[0].wide, len(chosen[0].single))
    for vector in chosen:
        plus(total, vector)
    return total


def python_sum(vectors: dict[str, RingVector], names: Any) -> list[int]:
    """The sum in Python's integers, number by number."""
    wide = [
        sum(int(vectors[n].low[i]) + (int(vectors[n].high[i]) << 64) for n in names) % 2**128
        for i in range(next(iter(vectors.values())).wide)
    ]
    narrow = [sum(int(vectors[n].single[i]) for n in names) % 2**64 for i in range(SMALL[1])]
    return wide + narrow


@pytest.mark.parametrize("clients", [3, 4, 20])
def test_masked_terms_sum_to_the_sum_of_the_terms(clients: int) -> None:
    cohort = ready(clients)
    vectors = vectors_of(cohort.names)
    total = cohort.open(cohort.ask(0, vectors))
    assert np.array_equal(total.limbs, plain_sum(vectors, cohort.names).limbs)


def test_the_ring_adds_as_integers_do() -> None:
    names = names_of(5)
    vectors = vectors_of(names, *SMALL)
    total = plain_sum(vectors, names)
    found = [int(low) + (int(high) << 64) for low, high in zip(total.low, total.high, strict=True)]
    assert found + [int(number) for number in total.single] == python_sum(vectors, names)
    for name in names[1:]:
        plus(total, vectors[name], -1)
    assert np.array_equal(total.limbs, vectors[names[0]].limbs)


@pytest.mark.parametrize("before", [0, 1, 6])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_the_sum_is_exact_for_those_present(before: int, after: int) -> None:
    """20 clients: none, one and 30 % drop out before their masked terms, and others after."""
    cohort = ready(20)
    vectors = vectors_of(cohort.names, CHUNK + 3, CHUNK)
    rng = np.random.default_rng(before * 7 + after)
    leaving = [str(name) for name in rng.permutation(cohort.names)]
    pending = cohort.ask(0, vectors, silent=leaving[:before])
    total = cohort.open(pending, silent=leaving[before : before + after])
    assert pending.dropped == tuple(sorted(leaving[:before]))
    assert np.array_equal(total.limbs, plain_sum(vectors, pending.survivors).limbs)


def test_thirty_percent_may_drop_out_after_masking() -> None:
    cohort = ready(20)
    vectors = vectors_of(cohort.names, *SMALL)
    total = cohort.open(cohort.ask(0, vectors), silent=cohort.names[4:10])
    assert np.array_equal(total.limbs, plain_sum(vectors, cohort.names).limbs)


def test_members_that_shared_nothing_take_no_part() -> None:
    cohort = ready(7, silent=["site-002"])
    vectors = vectors_of(cohort.names, *SMALL)
    total = cohort.open(cohort.ask(0, vectors))
    assert np.array_equal(total.limbs, plain_sum(vectors, cohort.names).limbs)
    with pytest.raises(TermError, match="site-002"):
        cohort.server.sum(1, names_of(7), *SMALL)
    with pytest.raises(TermError, match="site-002"):
        cohort.clients["site-000"].mask(1, vectors["site-000"], names_of(7))


def test_a_smaller_cohort_may_be_asked() -> None:
    cohort = ready(7)
    vectors = vectors_of(cohort.names, *SMALL)
    asked = cohort.names[:5]
    pending = cohort.server.sum(1, asked, *SMALL)
    for name in asked[:4]:
        pending.add(name, cohort.clients[name].mask(1, vectors[name], asked))
    assert np.array_equal(cohort.open(pending).limbs, plain_sum(vectors, asked[:4]).limbs)


def test_slots_are_independent() -> None:
    cohort = ready(5, slots=3)
    for slot in (2, 0, 1):
        vectors = vectors_of(cohort.names, *SMALL, seed=slot)
        total = cohort.open(cohort.ask(slot, vectors, silent=cohort.names[slot : slot + 1]))
        rest = [name for name in cohort.names if name != cohort.names[slot]]
        assert np.array_equal(total.limbs, plain_sum(vectors, rest).limbs)


def test_real_terms_through_ring_and_masks() -> None:
    rng = np.random.default_rng(1)
    cohort = ready(6)
    terms = {
        name: Term(
            {"gram": rng.standard_normal((8, 8)), "cross": rng.standard_normal((8, 3))},
            {"rows": int(rng.integers(1, 500))},
            frozenset({"gram"}),
            {"cross": 3.0},
        )
        for name in cohort.names
    }
    layout = Layout.of(terms[cohort.names[0]], {("gram", (8, 8)): 44})
    pending = cohort.ask(0, {name: encode(term, layout, 6) for name, term in terms.items()}, ["site-003"])
    total = decode(cohort.open(pending), layout)
    there = [terms[name] for name in pending.survivors]
    assert total.counts["rows"] == sum(term.counts["rows"] for term in there)
    for place in np.ndindex(8, 3):
        expected = math.fsum(3.0 * term.arrays["cross"][place] for term in there)
        assert abs(total.arrays["cross"][place] - expected) <= math.ulp(expected) + 6 * 2.0**-65
    for row, column in zip(*np.triu_indices(8), strict=True):
        expected = math.fsum(term.arrays["gram"][row, column] for term in there)
        bound = layout.error_bounds(6)["gram"] + math.ulp(expected)
        assert abs(total.arrays["gram"][row, column] - expected) <= bound


# -- below the threshold nothing opens ----------------------------------------------------------------


def test_below_the_threshold_the_server_cannot_close_and_clients_do_not_open() -> None:
    cohort = ready(7, threshold=5)
    vectors = vectors_of(cohort.names, *SMALL)
    pending = cohort.ask(0, vectors, silent=cohort.names[4:])
    with pytest.raises(CohortError, match="4 of 7"):
        pending.close()
    for name in pending.survivors:
        with pytest.raises(CohortError, match="not opened"):
            cohort.clients[name].open(0, pending.survivors, pending.dropped)


def test_below_the_threshold_shares_give_nothing() -> None:
    cohort = ready(7, threshold=5)
    pending = cohort.ask(0, vectors_of(cohort.names, *SMALL))
    survivors, dropped = pending.close()
    for name in survivors[:4]:
        pending.add_opening(name, cohort.clients[name].open(0, survivors, dropped))
    with pytest.raises(CohortError, match="4 members helped"):
        pending.total()
    pending.add_opening(survivors[4], cohort.clients[survivors[4]].open(0, survivors, dropped))
    pending.total()


@pytest.mark.parametrize(("clients", "threshold"), [(4, 2), (6, 3), (3, 4), (5, 1)])
def test_thresholds_that_allow_two_openings_are_refused(clients: int, threshold: int) -> None:
    with pytest.raises(CohortError, match=r"threshold|secure sums take"):
        ready(clients, threshold=threshold)


def test_the_threshold_allows_for_colluders() -> None:
    assert [least_threshold(n) for n in (3, 4, 9, 20)] == [2, 3, 5, 11]
    assert least_threshold(9, 2) == 6
    setup = Setup("run", 0, 1, 5)
    clients = [Client(setup, name, sign_as(name), verify, colluders=2) for name in names_of(9)]
    server = Server(setup)
    for client in clients:
        server.add_keys(client.name, client.advertise())
    with pytest.raises(CohortError, match="2 colluders"):
        clients[0].share(server.keys_for(server.members[0]))


def test_two_clients_are_no_sum() -> None:
    with pytest.raises(CohortError, match="secure sums take 3"):
        ready(2)
    cohort = ready(3, threshold=3)
    with pytest.raises(CohortError, match="a sum over 2"):
        cohort.clients["site-000"].mask(0, zeros(*SMALL), ["site-000", "site-001"])


# -- what a masked message shows ----------------------------------------------------------------------


def masked_bytes(cohort: Cohort, vectors: dict[str, RingVector], name: str) -> np.ndarray[Any, Any]:
    note = cohort.clients[name].mask(0, vectors[name], cohort.names)
    arrays, _ = from_bytes(note, what="note", error=TermError)
    return arrays["limbs"]


@pytest.mark.parametrize("shape", [(1 << 17, 0), (0, 1 << 18)])
def test_bytes_of_a_masked_message_are_uniform_and_uncorrelated(shape: tuple[int, int]) -> None:
    cohort = ready(3, seed="uniform")
    vectors = {name: zeros(*shape) for name in cohort.names}  # the plainest of plaintexts
    limbs = masked_bytes(cohort, vectors, "site-001")
    octets = np.frombuffer(limbs.tobytes(), dtype=np.uint8).astype(np.float64)
    counts = np.bincount(octets.astype(np.int64), minlength=256)
    chi_squared = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)
    for place in range(8):  # each byte of a limb by itself: a carry would show in the lowest ones
        each = np.bincount(octets[place::8].astype(np.int64), minlength=256)
        assert abs(float(((each - each.mean()) ** 2 / each.mean()).sum()) - 255) < 5 * math.sqrt(2 * 255)
    deviations = octets - octets.mean()
    for lag in (1, 2, 7, 8, 16, 4096, 8 * CHUNK, 16 * CHUNK):
        correlation = float(deviations[lag:] @ deviations[:-lag]) / float(deviations @ deviations)
        assert abs(correlation) < 5 / math.sqrt(len(octets))


def test_two_data_sets_differ_by_exactly_the_encoded_difference() -> None:
    rng = np.random.default_rng(5)
    layout = Layout.of(
        Term({"gram": np.eye(40), "x": np.zeros(9)}, {"rows": 0}, frozenset({"gram"})),
        {("gram", (40, 40)): 30},
    )
    seen = []
    for rows in (17, 400):
        cohort = ready(4, seed="same secrets")
        vectors = {}
        for name in cohort.names:
            x = rng.standard_normal((rows, 40))
            term = Term({"gram": x.T @ x, "x": x[0, :9]}, {"rows": rows}, frozenset({"gram"}))
            vectors[name] = encode(term, layout, 4)
        notes = {name: cohort.clients[name].mask(0, vectors[name], cohort.names) for name in cohort.names}
        seen.append((vectors, notes))
    (first, first_notes), (second, second_notes) = seen
    for name in first_notes:
        assert len(first_notes[name]) == len(second_notes[name])
        one, note = from_bytes(first_notes[name], what="note", error=TermError)
        two, other = from_bytes(second_notes[name], what="note", error=TermError)
        assert note == other
        difference = RingVector(one["limbs"].copy(), layout.wide)
        plus(difference, RingVector(two["limbs"], layout.wide), -1)
        expected = copy.deepcopy(first[name])
        plus(expected, second[name], -1)
        assert np.array_equal(difference.limbs, expected.limbs)


def watch_keys(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int]]:
    """Collects the key and sign of every mask that a client adds from now on."""
    drawn: list[tuple[bytes, int]] = []

    def watched(vector: RingVector, masks: Any) -> None:
        listed = list(masks)
        drawn.extend(listed)
        add_masks(vector, listed)

    monkeypatch.setattr("fedsolve.privacy.masking.add_masks", watched)
    return drawn


def test_no_key_is_common_to_two_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same secrets, so that nothing but the question tells them apart, sizes included."""
    drawn = watch_keys(monkeypatch)
    questions = [
        (slot, context, names, vector)
        for slot in (0, 1)
        for context in (b"", b"other")
        for names in (names_of(4), names_of(3))
        for vector in (zeros(4, 4), zeros(5, 2))
    ]
    for slot, context, names, vector in questions:
        ready(4, seed="same secrets").clients["site-001"].mask(slot, vector, names, context)
    assert len(drawn) == 8 * (4 + 3)
    assert len({key for key, _ in drawn}) == len(drawn)


def test_a_slot_meets_one_term_only() -> None:
    cohort = ready(4)
    client = cohort.clients["site-001"]
    vector = vectors_of(["site-001"], *SMALL)["site-001"]
    before = vector.limbs.copy()
    client.mask(0, vector, cohort.names)
    assert np.array_equal(vector.limbs, before)
    for context in (b"", b"another question"):
        with pytest.raises(TermError, match="slot 0 has been used"):
            client.mask(0, vector, cohort.names, context)
    loaded = Client.load(client.save(), sign_as(client.name), verify)
    with pytest.raises(TermError, match="slot 0 has been used"):
        loaded.mask(0, vector, cohort.names)
    client.mask(1, vector, cohort.names)
    with pytest.raises(TermError, match="slot 2 does not exist"):
        client.mask(2, vector, cohort.names)


def test_no_key_stream_serves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every AES key of a run of three sums with dropouts is used by the two ends of one mask only."""
    drawn = watch_keys(monkeypatch)
    cohort = ready(5, slots=3)
    for slot in range(3):
        cohort.open(cohort.ask(slot, vectors_of(cohort.names, *SMALL, seed=slot)))
    uses: dict[bytes, list[int]] = {}
    for key, sign in drawn:
        uses.setdefault(key, []).append(sign)
    assert len(uses) == 3 * (5 + 10)
    assert sorted(sorted(signs) for signs in uses.values()) == [[-1, 1]] * 30 + [[1]] * 15


# -- one opening --------------------------------------------------------------------------------------


def test_a_slot_is_opened_for_one_set_of_clients() -> None:
    cohort = ready(6)
    pending = cohort.ask(0, vectors_of(cohort.names, *SMALL))
    survivors, dropped = pending.close()
    client = cohort.clients["site-000"]
    first = client.open(0, survivors, dropped)
    assert client.open(0, survivors, dropped) == first
    with pytest.raises(TermError, match="another set of clients"):
        client.open(0, survivors[:-1], survivors[-1:])
    loaded = Client.load(client.save(), sign_as(client.name), verify)
    assert loaded.open(0, survivors, dropped) == first
    with pytest.raises(TermError, match="another set of clients"):
        loaded.open(0, survivors[:-1], survivors[-1:])


def test_a_client_opens_only_the_cohort_it_masked_for() -> None:
    cohort = ready(6)
    client, names = cohort.clients["site-000"], cohort.names
    with pytest.raises(TermError, match="has not been used"):
        client.open(0, names, [])
    client.mask(0, vectors_of(names, *SMALL)["site-000"], names[:5])
    for survivors, dropped in ((names, []), (names[:4], []), (names[:5], names[4:5]), (names[:4], names[5:])):
        with pytest.raises(TermError, match="another one"):
            client.open(0, survivors, dropped)
    with pytest.raises(TermError, match="is in it"):
        client.open(0, names[1:5], names[:1])


def test_late_repeated_and_foreign_terms_are_refused() -> None:
    cohort = ready(5)
    vectors = vectors_of(cohort.names, *SMALL)
    notes = {name: cohort.clients[name].mask(0, vectors[name], cohort.names) for name in cohort.names}
    pending = cohort.server.sum(0, cohort.names, *SMALL)
    for name in cohort.names[:4]:
        pending.add(name, notes[name])
    with pytest.raises(CohortError, match="repeat"):
        pending.add("site-000", notes["site-000"])
    with pytest.raises(TermError, match="under the name"):
        pending.add("site-004", notes["site-000"])
    with pytest.raises(TermError, match="another question"):
        cohort.server.sum(1, cohort.names, *SMALL).add("site-004", notes["site-004"])
    pending.close()
    with pytest.raises(CohortError, match="late"):
        pending.add("site-004", notes["site-004"])
    with pytest.raises(TermError, match="slot 0 has been used"):
        cohort.server.sum(0, cohort.names, *SMALL)
    assert np.array_equal(cohort.open(pending).limbs, plain_sum(vectors, cohort.names[:4]).limbs)


def test_clients_asked_different_things_are_noticed() -> None:
    cohort = ready(4)
    pending = cohort.server.sum(0, cohort.names, *SMALL, b"a question")
    with pytest.raises(TermError, match="another question"):
        pending.add("site-000", cohort.clients["site-000"].mask(0, zeros(*SMALL), cohort.names, b"other"))


# -- restarts -----------------------------------------------------------------------------------------


def test_a_server_that_starts_again_opens_the_stored_sum() -> None:
    cohort = ready(5)
    vectors = vectors_of(cohort.names, *SMALL)
    pending = cohort.ask(0, vectors, silent=["site-002"])
    survivors, dropped = pending.close()
    stored, who = copy.deepcopy(pending.masked), pending.survivors
    fresh = ready(5)  # the same notes again
    resumed = fresh.server.sum(0, cohort.names, *SMALL, stored=(stored, who))
    assert resumed.close() == (survivors, dropped)
    for name in survivors:
        resumed.add_opening(name, cohort.clients[name].open(0, survivors, dropped))
    assert np.array_equal(resumed.total().limbs, plain_sum(vectors, survivors).limbs)


@pytest.mark.parametrize("stage", ["advertised", "shared", "received", "masked"])
def test_a_client_that_starts_again_goes_on(stage: str) -> None:
    setup = Setup("run", 3, 2, 3)
    server = Server(setup)
    clients = {name: Client(setup, name, sign_as(name), verify) for name in names_of(4)}

    def restart(now: str) -> None:
        if stage == now:
            clients["site-001"] = Client.load(clients["site-001"].save(), sign_as("site-001"), verify)

    for name, client in clients.items():
        server.add_keys(name, client.advertise())
    restart("advertised")
    keys = server.keys_for(server.members[0])
    for name, client in clients.items():
        server.add_shares(name, client.share(keys))
    restart("shared")
    for name, client in clients.items():
        client.receive(server.shares_for(name))
    restart("received")
    cohort = Cohort(clients, server)
    vectors = vectors_of(cohort.names, *SMALL)
    pending = cohort.ask(1, vectors)
    restart("masked")
    assert np.array_equal(cohort.open(pending).limbs, plain_sum(vectors, cohort.names).limbs)


def test_secrets_that_served_are_erased() -> None:
    cohort = ready(4)
    client = cohort.clients["site-001"]

    def kept() -> tuple[list[bool], list[bool]]:
        """Slot by slot: whether the client still has its own secrets, and shares of the others'."""
        arrays, _ = from_bytes(client.save(), what="secrets", error=TermError)
        shares = np.stack([array for name, array in arrays.items() if name.startswith("shares.")], axis=1)
        return [bool(own.any()) for own in arrays["secrets"]], [bool(held.any()) for held in shares]

    assert kept() == ([True, True], [True, True])
    pending = cohort.ask(0, vectors_of(cohort.names, *SMALL))
    assert kept() == ([False, True], [True, True])
    cohort.open(pending)
    assert kept() == ([False, True], [False, True])


def test_damaged_secrets_are_refused() -> None:
    cohort = ready(3)
    data = cohort.clients["site-000"].save()
    with pytest.raises(ModelFileError):
        Client.load(data[:-5], sign_as("site-000"), verify)
    arrays, note = from_bytes(data, what="secrets", error=TermError)
    for name in ("secrets", "shares.site-001", "members.0"):
        rest = {key: array for key, array in arrays.items() if key != name}
        with pytest.raises(ModelFileError, match="sit this run out"):
            Client.load(to_bytes(rest, note), sign_as("site-000"), verify)


# -- who is who ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roster() -> dict[str, ec.EllipticCurvePrivateKey]:
    return {name: ec.generate_private_key(ec.SECP256R1()) for name in [*names_of(4), "stranger"]}


def signed_clients(roster: dict[str, Any], setup: Setup) -> dict[str, Client]:
    known = verifier({name: roster[name].public_key() for name in names_of(4)})
    return {name: Client(setup, name, signer(roster[name]), known) for name in names_of(4)}


def test_keys_signed_with_p256_are_believed(roster: dict[str, Any]) -> None:
    setup = Setup("run", 0, 1, 3)
    server, clients = Server(setup), signed_clients(roster, setup)
    for name, client in clients.items():
        server.add_keys(name, client.advertise())
    for name, client in clients.items():
        server.add_shares(name, client.share(server.keys_for(name)))
    for name, client in clients.items():
        client.receive(server.shares_for(name))
    cohort = Cohort(clients, server)
    vectors = vectors_of(cohort.names, *SMALL)
    total = cohort.open(cohort.ask(0, vectors))
    assert np.array_equal(total.limbs, plain_sum(vectors, cohort.names).limbs)


def test_swapped_keys_and_invented_sites_are_refused(roster: dict[str, Any]) -> None:
    setup = Setup("run", 0, 1, 3)
    clients = signed_clients(roster, setup)
    honest = {name: client.advertise() for name, client in clients.items()}
    mine = clients["site-000"]

    def shown(changed: dict[str, bytes]) -> None:
        with pytest.raises(TermError, match=r"not signed by|own keys"):
            mine.share(relay("members", setup, honest | changed))

    swapped = Client(setup, "site-002", signer(roster["stranger"]), verify)
    shown({"site-002": swapped.advertise()})
    invented = Client(setup, "stranger", signer(roster["stranger"]), verify)
    shown({"stranger": invented.advertise()})
    shown({"site-002": honest["site-001"]})
    again = Client(setup, "site-000", signer(roster["site-000"]), verify)
    shown({"site-000": again.advertise()})
    mine.share(relay("members", setup, honest))


@pytest.mark.parametrize(
    "names", [names_of(3), ["site-000", "ghost-1", "ghost-2"]], ids=["swapped", "invented"]
)
def test_a_server_that_plays_all_others_learns_a_term_only_from_who_has_no_roster(
    roster: dict[str, Any], names: list[str]
) -> None:
    """Keys that the server swapped for its own, and sites that it invented: all of them are the server."""
    own = verifier({name: roster[name].public_key() for name in names_of(4)})

    def attack(believed: Any) -> RingVector:
        setup = Setup("run", 0, 1, 2)
        clients = {name: Client(setup, name, signer(roster["stranger"]), lambda *_: True) for name in names}
        clients["site-000"] = Client(setup, "site-000", signer(roster["site-000"]), believed)
        server = Server(setup)
        for name, client in clients.items():
            server.add_keys(name, client.advertise())
        keys = server.keys_for(server.members[0])
        for name, client in clients.items():
            server.add_shares(name, client.share(keys))
        for name, client in clients.items():
            client.receive(server.shares_for(name))
        terms = {name: zeros(*SMALL) for name in names} | victim
        cohort = Cohort(clients, server)
        return cohort.open(cohort.ask(0, terms))

    victim = vectors_of(["site-000"], *SMALL)
    with pytest.raises(TermError, match="not signed by"):
        attack(own)
    assert np.array_equal(attack(lambda *_: True).limbs, victim["site-000"].limbs)


@pytest.mark.parametrize(
    "other", [Setup("another", 0, 1, 3), Setup("run", 1, 1, 3), Setup("run", 0, 2, 3), Setup("run", 0, 1, 4)]
)
def test_keys_of_another_run_epoch_or_threshold_are_refused(roster: dict[str, Any], other: Setup) -> None:
    setup = Setup("run", 0, 1, 3)
    clients = signed_clients(roster, setup)
    honest = {name: client.advertise() for name, client in clients.items()}
    old = signed_clients(roster, other)["site-002"]
    with pytest.raises(TermError, match="another setup"):
        clients["site-000"].share(relay("members", setup, honest | {"site-002": old.advertise()}))
    # A server that rewrites what the note says of its setup is betrayed by the signature.
    arrays, note = from_bytes(old.advertise(), what="keys", error=TermError)
    arrays = {key: a[:1] if key in ("masks", "commitments") else a for key, a in arrays.items()}
    forged = to_bytes(arrays, note | {"setup": vars(setup)})
    with pytest.raises(TermError, match="not signed by"):
        clients["site-000"].share(relay("members", setup, honest | {"site-002": forged}))


def test_other_curves_are_refused() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(DataError, match="P-256"):
        signer(key)
    with pytest.raises(DataError, match="'site'"):
        verifier({"site": key.public_key()})


def test_clients_shown_different_keys_cannot_read_each_other() -> None:
    setup = Setup("run", 0, 1, 3)
    names = names_of(4)
    clients = {name: Client(setup, name, sign_as(name), verify) for name in names}
    twin = Client(setup, "site-003", sign_as("site-003"), verify)  # signed twice by a careless site
    honest = {name: client.advertise() for name, client in clients.items()}
    server = Server(setup)
    for name, note in honest.items():
        server.add_keys(name, note)
    server.keys_for(server.members[0])
    for name in names[:3]:
        shown = honest | ({"site-003": twin.advertise()} if name == "site-001" else {})
        server.add_shares(name, clients[name].share(relay("members", setup, shown)))
    with pytest.raises(TermError, match="sealed for somebody else"):
        clients["site-000"].receive(server.shares_for("site-000"))


# -- damage -------------------------------------------------------------------------------------------


def test_wrong_shares_are_noticed_by_whose_secret_they_spoil() -> None:
    for part, match in (("seeds", "seed of 'site-00[0-9]'"), ("keys", "key of 'site-005'")):
        cohort = ready(6)
        pending = cohort.ask(0, vectors_of(cohort.names, *SMALL), silent=["site-005"])
        survivors, dropped = pending.close()
        for name in survivors:
            note = cohort.clients[name].open(0, survivors, dropped)
            if name == "site-001":
                arrays, fields = from_bytes(note, what="note", error=TermError)
                arrays[part] = arrays[part].copy()
                arrays[part][0, -1] ^= 1
                note = to_bytes(arrays, fields)
            pending.add_opening(name, note)
        with pytest.raises(TermError, match=match):
            pending.total()


def refused_everywhere(damage: Callable[[bytes], bytes]) -> None:
    setup = Setup("run", 0, 1, 3)
    names = names_of(3)
    server = Server(setup)
    clients = {name: Client(setup, name, sign_as(name), verify, random=repeatable(name)) for name in names}

    def refused(call: Callable[..., Any], *arguments: Any) -> None:
        with pytest.raises(FedsolveError):
            call(*arguments)

    for name in names:
        note = clients[name].advertise()
        refused(server.add_keys, name, damage(note))
        server.add_keys(name, note)
    refused(clients[names[0]].share, damage(server.keys_for(server.members[0])))
    for name in names:
        note = clients[name].share(server.keys_for(server.members[0]))
        refused(server.add_shares, name, damage(note))
        server.add_shares(name, note)
    for name in names:
        note = server.shares_for(name)
        refused(clients[name].receive, damage(note))
        clients[name].receive(note)
    pending: MaskedSum = server.sum(0, names, *SMALL)
    for name in names:
        note = clients[name].mask(0, zeros(*SMALL), names)
        refused(pending.add, name, damage(note))
        pending.add(name, note)
    survivors, dropped = pending.close()
    for name in names:
        note = clients[name].open(0, survivors, dropped)
        refused(pending.add_opening, name, damage(note))
        pending.add_opening(name, note)
    assert not pending.total().limbs.any()


def without(name: str) -> Callable[[bytes], bytes]:
    def damage(note: bytes) -> bytes:
        arrays, fields = from_bytes(note, what="note", error=TermError)
        return to_bytes(arrays, {key: value for key, value in fields.items() if key != name})

    return damage


def shorter(note: bytes) -> bytes:
    arrays, fields = from_bytes(note, what="note", error=TermError)
    # Shares for nobody are no damage, so the longest array is cut.
    longest = max(sorted(arrays), key=lambda name: arrays[name].nbytes)
    return to_bytes(arrays | {longest: arrays[longest][:-1]}, fields)


@pytest.mark.parametrize(
    "damage",
    [
        lambda note: note[:-3],
        lambda note: b"",
        without("message"),
        without("setup"),
        without("protocol"),
        shorter,
    ],
    ids=["cut", "empty", "no message", "no setup", "no protocol", "shorter"],
)
def test_damaged_notes_are_refused_and_the_protocol_goes_on(damage: Callable[[bytes], bytes]) -> None:
    refused_everywhere(damage)


def test_calls_out_of_turn_are_refused() -> None:
    setup = Setup("run", 0, 1, 2)
    client = Client(setup, "site-000", sign_as("site-000"), verify)
    with pytest.raises(TermError, match="own keys"):
        client.share(relay("members", setup, {}))
    with pytest.raises(TermError, match="out of turn"):
        client.receive(relay("sealed", setup, {}))
    with pytest.raises(TermError, match="out of turn"):
        client.mask(0, zeros(*SMALL), names_of(3))
    cohort = ready(3)
    with pytest.raises(TermError, match="shared once"):
        cohort.clients["site-000"].share(cohort.server.keys_for(cohort.server.members[0]))
    with pytest.raises(TermError, match="out of turn"):
        cohort.clients["site-000"].receive(cohort.server.shares_for("site-000"))
    with pytest.raises(CohortError, match="too late"):
        cohort.server.add_keys("site-000", cohort.clients["site-000"].advertise())
    assert relayed(cohort.server.keys_for(cohort.server.members[0]), "members", cohort.server.setup)[
        0
    ].keys() == set(names_of(3))


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"slots": 0}, {"threshold": 0}, {"threshold": True}])
def test_impossible_setups_are_refused(wrong: dict[str, Any]) -> None:
    note = {"run": "run", "epoch": 0, "slots": 1, "threshold": 3} | wrong
    with pytest.raises(DataError, match=next(iter(wrong))):
        Setup(**note)
    with pytest.raises(TermError, match=next(iter(wrong))):
        Setup.from_note(note)  # in a letter, of which the sender may hear more
