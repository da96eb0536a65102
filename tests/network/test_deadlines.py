"""A site that announces an answer and sends a trickle of it is waited for as long as any other."""

from __future__ import annotations

import pytest

import fedsolve as fs
from fedsolve.errors import CohortError
from fedsolve.network import roster
from fedsolve.network.network_federation import NetworkFederation

from .pretended import PretendedLink
from .sites import NAMES
from .test_engine import answerers

pytestmark = pytest.mark.network


class Trickling(PretendedLink):
    """A link whose site "north" keeps its heartbeat and never delivers the rest of what it announced."""

    what = "answer"

    def _trickles(self, message):
        number, _, note, _ = self.open[message]
        return self.sites[number].name == "north" and note["ask"] == self.what

    def receive(self, message):
        return None if self._trickles(message) else super().receive(message)

    def coming(self, message):
        return (1_000_000, 5_000_000) if self._trickles(message) else None


def federate(link, **options):
    settings = {"clients": 4, "interval": 0.001, "grace": 0.0, "patience": 0.05, "classes": list(range(10))}
    return NetworkFederation(link, **{**settings, **options})


def test_patience_counts_while_an_answer_is_fetched(sites):
    told = []
    link = Trickling(answerers(sites))
    federation = federate(link, tell=told.append)
    with pytest.raises(
        CohortError, match=r"north.*too late: 1\.0 of 5\.0 MB of its answer came within 0\.05 s"
    ):
        fs.AFL(ridge=0.1).fit(federation)
    assert any("waiting for 'north': 1.0 of 5.0 MB" in line for line in told)


def test_the_others_go_on_without_it(sites):
    federation = federate(Trickling(answerers(sites)), missing="continue")
    model = fs.AFL(ridge=0.1).fit(federation)
    assert model.history[0].cohort == tuple(sorted(set(NAMES) - {"north"}))
    assert "1.0 of 5.0 MB" in model.history[0].missing["north"]


def test_a_description_that_does_not_come_keeps_nobody_waiting(sites, monkeypatch):
    monkeypatch.setattr(roster, "_DESCRIPTION", 0.01)
    link = Trickling(answerers(sites))
    link.what = "describe"
    with pytest.raises(CohortError, match="'north': it announced what it has and did not send it"):
        federate(link).describe()
    assert federate(link, clients=3).describe().features == sites.data.features.shape[1]


def test_gathering_has_a_deadline_of_its_own(sites):
    link = PretendedLink(answerers(sites))
    link.present.remove(link.number("west"))
    with pytest.raises(CohortError, match=r"3 of 4 clients came within 0\.01 s"):
        federate(link, patience=1e6, gather=0.01).describe()


def test_who_is_waited_for_can_be_seen_while_it_is(sites):
    link = Trickling(answerers(sites))
    seen = []

    def tell(text):
        if "1.0 of 5.0 MB" in text:
            seen.append({one.name: one for one in federation.standings()})

    federation = federate(link, tell=tell, missing="continue")
    assert federation.standings() == []
    fs.AFL(ridge=0.1).fit(federation)
    first = seen[0]
    assert list(first) == sorted(NAMES)
    assert (first["north"].state, first["north"].done, first["north"].size) == ("asked", 1_000_000, 5_000_000)
    assert [first[name].state for name in sorted(NAMES) if name < "north"] == ["answered"]
    assert all(one.connected for one in first.values())
    after = {one.name: one for one in federation.standings()}
    assert "1.0 of 5.0 MB" in after["north"].why
    assert {one.state for name, one in after.items() if name != "north"} == {"answered"}
    link.coming = lambda message: (1, 1)  # what lies at the gate has come
    report = federation._under_way.report
    report.failed.clear(), report.late.clear()
    assert {one.state for one in federation.standings()} == {"answered"}
