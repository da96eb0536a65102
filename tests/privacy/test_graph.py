"""A sparse graph of neighbours: the same sums, the stated risk, and nobody chooses who is whose neighbour."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import CohortError, TermError
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.graph import RISK, around, check_graph, degree_for, risk
from fedsolve.privacy.joint_seed import SeedBook, SeedSite, about_circle, draw_seed
from fedsolve.privacy.masking import Client
from fedsolve.privacy.notes import COMMITTEE, Setup
from fedsolve.privacy.ring import RingVector
from fedsolve.privacy.unmasking import Server
from tests.privacy.setups import Cohort, names_of, plus, repeatable, sign_as, verify, zeros

SETUP = Setup("run", 0, 2, 3, degree=4, circle=7)
SITES = 12


def cohort_of(setup: Setup = SETUP, drawn=lambda setup, members: True, colluders: int = 0) -> Cohort:
    server, names = Server(setup), names_of(SITES)
    clients = {
        name: Client(
            setup, name, sign_as(name), verify, colluders=colluders, drawn=drawn, random=repeatable(name)
        )
        for name in names
    }
    for name, client in clients.items():
        server.add_keys(name, client.advertise())
    for name, client in clients.items():
        server.add_shares(name, client.share(server.keys_for(name)))
    for name, client in clients.items():
        client.receive(server.shares_for(name))
    return Cohort(clients, server)


def vectors() -> dict[str, RingVector]:
    rng = np.random.default_rng(0)
    return {n: RingVector(rng.integers(0, 2**64, 17, dtype=np.uint64), 5) for n in names_of(SITES)}


def test_a_sum_over_neighbours_is_the_sum_and_helpers_may_be_missing() -> None:
    terms, cohort = vectors(), cohort_of()
    total = zeros(5, 7)
    for term in terms.values():
        plus(total, term)
    for slot, silent in ((0, ()), (1, ("site-003", "site-007"))):
        assert np.array_equal(cohort.open(cohort.ask(slot, terms), silent).limbs, total.limbs)
    kept = Client.load(cohort.clients["site-000"].save(), sign_as("site-000"), verify)
    assert kept.members == tuple(names_of(SITES))
    assert len(kept.partners) == SETUP.degree + 1


def test_a_sum_is_over_everybody_or_not_opened() -> None:
    cohort, names = cohort_of(), names_of(SITES)
    with pytest.raises(TermError, match="over all members"):
        cohort.clients[names[0]].mask(0, vectors()[names[0]], names[:-1])
    pending = cohort.ask(0, vectors(), silent=[names[5]])
    with pytest.raises(TermError, match="over all members"):
        cohort.open(pending)
    whole = cohort.ask(1, vectors())
    near = set(around(names, SETUP.degree, SETUP.circle)[names[4]]) - {names[4]}
    with pytest.raises(CohortError, match="holders of every member's shares"):
        cohort.open(whole, silent=near)


def test_a_circle_that_the_sites_did_not_draw_is_refused() -> None:
    with pytest.raises(TermError, match="was not drawn by these sites"):
        cohort_of(drawn=lambda setup, members: False)
    server, client = Server(SETUP), Client(SETUP, "site-000", sign_as("site-000"), verify)
    others = {n: Client(SETUP, n, sign_as(n), verify) for n in names_of(SITES)[1:]} | {"site-000": client}
    for name, other in others.items():
        server.add_keys(name, other.advertise())
    far = next(n for n in names_of(SITES) if "site-000" not in around(names_of(SITES), 4, 7)[n])
    with pytest.raises(TermError, match="own keys"):
        client.share(server.keys_for(far))


def test_graphs_below_the_stated_risk_are_refused() -> None:
    with pytest.raises(CohortError, match="5 colluders that is not safe"):
        cohort_of(colluders=5)
    for degree, threshold in ((5, 4), (4, 2), (4, 6), (14, 8)):
        with pytest.raises(CohortError, match="refused"):
            check_graph(SITES, degree, threshold, 0)


@pytest.mark.parametrize("sites", [100, 200, 1000])
@pytest.mark.parametrize("colluders", [0, 1, 0.2])
def test_the_degree_follows_from_colluders_and_dropouts(sites: int, colluders: float) -> None:
    """Against the hypergeometric distribution in whole numbers."""
    bad, gone = (round(part * sites) if part < 1 else int(part) for part in (colluders, 0.1))
    degree, threshold = degree_for(sites, bad, gone)

    def chance(marked: int, least: int) -> float:
        ways = [
            math.comb(marked, k) * math.comb(sites - 1 - marked, degree - k) for k in range(least, degree + 1)
        ]
        return sites * sum(ways) / math.comb(sites - 1, degree)

    half = degree // 2
    row = sites * math.comb(sites - half, bad - half) / math.comb(sites, bad) if bad >= half else 0.0
    assert chance(bad, threshold) + row == pytest.approx(risk(sites, degree, threshold, bad), rel=1e-6)
    assert chance(bad, threshold) + row <= RISK
    assert chance(gone, degree + 2 - threshold) <= RISK
    assert (degree, threshold) == {0: (20, 11), 1: (20, 11), 0.2: (32, 21)}.get(colluders) or sites > 100


def test_colluders_in_a_row_are_what_cuts_the_circle() -> None:
    names = names_of(30)
    near = around(names, 6, 1)
    assert all(len(found) == 7 for found in near.values())
    assert all((other in near[name]) == (name in near[other]) for name in names for other in names)
    assert around(names, 6, 2) != near


def test_a_committee_draws_for_many_sites() -> None:
    names = names_of(COMMITTEE + 20)
    sites = {name: SeedSite(name, sign_as(name), verify, SeedBook(), repeatable(name)) for name in names}
    asked = []

    class Post:
        def carry(self, channel, letters, largest):
            asked.append(len(letters))
            for name, letter in letters.items():
                yield name, sites[name].answer(letter)

    about = about_circle(SETUP)
    seed = draw_seed(Post(), names, about)
    assert asked == [COMMITTEE, COMMITTEE, len(names)]
    assert all(site.book.drew(seed, about, names) for site in sites.values())
    assert not sites[names[0]].book.drew(seed, about, names[1:])
    assert not sites[names[0]].book.drew(seed, about_circle(dataclasses.replace(SETUP, epoch=1)), names)


@pytest.mark.slow
def test_a_federation_of_many_clients_has_the_model_of_plain_sums() -> None:
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((2400, 4)), np.arange(2400) % 2
    plain = fs.LocalFederation.from_arrays(rows, labels, np.arange(2400) % 101)
    secure = SecureFederation(fs.LocalFederation.from_arrays(rows, labels, np.arange(2400) % 101))
    expected, found = (fs.AFL(ridge=1.0).fit(each) for each in (plain, secure))
    assert secure._server.setup.degree == 22
    for name, array in expected.arrays().items():
        np.testing.assert_allclose(found.arrays()[name], array, rtol=1e-9, atol=1e-12)
