"""Secure sums over the network's engine: the same client code, stopped and started at every step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.engine import hears
from fedsolve.federation.participant import Participant
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.running import State, run_method
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.joint_seed import SeedBook, SeedSite
from fedsolve.privacy.ledger import Ledger
from fedsolve.privacy.notes import CHANNEL, read_letter
from fedsolve.privacy.policy import SitePolicy
from fedsolve.privacy.secure_client import SecureClient
from tests.conftest import Dataset
from tests.network.pretended import PretendedLink
from tests.network.sites import CLASSES, Sites, relative_difference, same_bits

from .setups import sign_as, verify

pytestmark = pytest.mark.network

NAMES = ("east", "north", "south", "west")
METHOD = fs.DeepAFL(layers=2, width=24, exchange="single")


@pytest.fixture(scope="module")
def sites(digits: Dataset) -> Sites:
    return Sites.of(digits, NAMES)


class Killed(BaseException):
    """The process is gone: nobody catches it."""


class Houses:
    """Sites with folders of their own, each of which may be stopped and started again."""

    def __init__(self, sites: Sites, folder: Path, **options: Any) -> None:
        self.sites, self.folder = sites, folder
        self.options = {"policy": SitePolicy(), **options}
        self.masked: dict[tuple[str, str], set[bytes]] = {}
        self.clients: dict[str, SecureClient] = {}

    def start(self, name: str, data: fs.ClientData | None = None, **options: Any) -> Answerer:
        state = self.folder / name

        def attend(participant: Participant) -> None:
            ledger = Ledger(state / "ledger")
            client = SecureClient(participant, sign_as(name), verify, ledger=ledger, **self.options)
            client.seeds = SeedSite(
                name, sign_as(name), verify, SeedBook(ledger.folder), lambda size: name.encode().ljust(size)
            )
            self.clients[name] = client
            participant.channels[CHANNEL] = lambda letter: self._remember(name, client.answer(letter))

        return Answerer(
            name, self.sites.client_data(name) if data is None else data, attend=attend, **options
        )

    def _remember(self, name: str, reply: bytes) -> bytes:
        note = read_letter(reply)[1]
        if note["message"] == "masked":
            self.masked.setdefault((name, f"{note['setup']}/{note['slot']}"), set()).add(reply)
        return reply

    def plain(self, names: tuple[str, ...] = NAMES) -> fs.LocalFederation:
        """The rows and columns that take part, in the open."""
        shown = {n: c.disclosure.rows(c.participant.data) for n, c in self.clients.items() if n in names}
        parts = {n: fs.ClientData(d.features(slice(None)), d.own_labels) for n, d in sorted(shown.items())}
        return fs.LocalFederation([Participant(n, part) for n, part in parts.items()], classes=CLASSES)

    def link(self) -> PretendedLink:
        return PretendedLink([self.start(name) for name in self.sites.names])


def train(link: PretendedLink, state: Path, method: Any = METHOD, follow: Any = (), **options: Any) -> Any:
    """As `fedsolve server` does it."""
    settings = {"clients": 4, "classes": CLASSES, "interval": 0.0, "grace": 0.0, "missing": "wait", **options}

    held, goes_on = State(state), settings["missing"] == "continue"
    federation = NetworkFederation(link, begun=held.begun(), report=held.enter, secure=True, **settings)
    engine = SecureFederation(
        federation,
        missing="continue" if goes_on else "error",
        changing=goes_on,
        store=held.secure,
        report=held.enter,
    )
    return run_method(fs.Recipe(method), engine, held, follow), engine


def drawn(state: Path) -> int:
    """The seed that the sites drew."""
    return int(json.loads((state / "report.json").read_text())["seed"])


def kill_at(monkeypatch: pytest.MonkeyPatch, place: str, number: int, after: bool) -> Callable[[], int]:
    """Let the process die at the n-th write of a file, before it or after it; gives how many there were."""
    from fedsolve import container

    real, count = container.write_atomically, 0

    def write(path: Any, data: bytes, **more: Any) -> None:
        nonlocal count
        if place in str(path):
            count += 1
            if count == number and not after:
                raise Killed
        real(path, data, **more)
        if place in str(path) and count == number and after:
            raise Killed

    monkeypatch.setattr("fedsolve.container.write_atomically", write)
    return lambda: count


def test_a_network_gives_what_one_process_gives(sites: Sites, tmp_path: Path) -> None:
    houses = Houses(sites, tmp_path / "sites")
    model, engine = train(houses.link(), tmp_path / "state")
    method = dataclasses.replace(METHOD, seed=drawn(tmp_path / "state"))
    local = method.fit(SecureFederation(sites.local()))
    assert same_bits(model, local)
    assert relative_difference(model, method.fit(houses.plain())) < 1e-10
    assert len(houses.plain().clients) == 4
    assert sum(map(len, houses.plain().participants)) > 0.98 * len(sites.owners)
    assert local.history[-1].error_bounds == model.history[-1].error_bounds
    assert [record.cohort for record in model.history] == [NAMES] * len(model.history)
    assert engine.evaluate(model) == houses.plain().evaluate(model)


def test_a_departure_is_told_before_anything_masked_is_sent(sites: Sites, tmp_path: Path) -> None:
    """In the middle of a run a site is taken off the list: nobody is asked for anything more."""
    houses = Houses(sites, tmp_path / "sites")
    link = houses.link()
    sent: list[int] = []

    def leave(record: Any, expected: int) -> None:
        if record.exchange == 0:
            link.listed = frozenset(NAMES[:-1])
            link.present.discard(link.number(NAMES[-1]))
            sent.append(sum(map(len, houses.masked.values())))

    told = f"{NAMES[-1]} took part in earlier sums.*Nothing was sent.*all 3 who stay accept.*--epsilon"
    with pytest.raises(fs.CohortError, match=told):
        train(link, tmp_path / "state", follow=[hears("advanced", leave)])
    assert sent == [sum(map(len, houses.masked.values()))]
    # Started again, the server says so at once instead of waiting for it.
    with pytest.raises(fs.CohortError, match=told):
        train(link, tmp_path / "state")


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_server_killed_at_every_step_gives_the_same_total(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Every file that the server writes is a step; it is killed before and after each of them, once."""
    whole, _ = train(Houses(sites, tmp_path / "calm").link(), tmp_path / "calm-state")
    number = 0
    while True:
        number += 1
        houses, state = Houses(sites, tmp_path / f"sites-{number}"), tmp_path / f"state-{number}"
        link = houses.link()
        with monkeypatch.context() as patch:
            steps = kill_at(patch, f"state-{number}", number, after)
            try:
                model, _ = train(link, state)
            except Killed:
                model = None
        if model is not None:
            break
        model, _ = train(link, state)
        assert same_bits(model, whole), number
        assert all(len(sent) == 1 for sent in houses.masked.values())
    assert number == steps() + 1 > 12


@pytest.mark.slow
def test_sites_killed_at_every_step_give_the_same_total(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each site dies before and after each file that it writes, and answers again when it is back."""
    whole, _ = train(Houses(sites, tmp_path / "calm").link(), tmp_path / "calm-state")
    deaths = 0
    for after in (False, True):
        # A site writes ten files, and more where it is one of those who check, which follows from the run.
        for number in count(1):
            label = f"{after}-{number}"
            houses = Houses(sites, tmp_path / f"sites-{label}")
            link = houses.link()
            place = f"sites-{label}/north"
            with monkeypatch.context() as patch:
                steps = kill_at(patch, place, number, after)
                reply = Answerer.reply

                def mortal(
                    self: Answerer,
                    *given: Any,
                    reply: Any = reply,
                    link: PretendedLink = link,
                    houses: Houses = houses,
                ) -> Any:
                    nonlocal deaths
                    try:
                        return reply(self, *given)
                    except Killed:
                        deaths += 1
                        link.sites[link.number("north")] = houses.start("north")
                        return reply(link.sites[link.number("north")], *given)

                patch.setattr(Answerer, "reply", mortal)
                model, _ = train(link, tmp_path / f"state-{label}")
            assert same_bits(model, whole)
            assert all(len(sent) == 1 for sent in houses.masked.values())
            if steps() < number:
                break
        assert number > 10
    assert deaths >= 20


def test_a_site_answers_in_the_open_only_where_it_allows_it(sites: Sites, tmp_path: Path) -> None:
    houses = Houses(sites, tmp_path)
    federation = NetworkFederation(
        houses.link(), clients=4, classes=CLASSES, interval=0.0, grace=0.0, patience=0.05
    )
    with pytest.raises(fs.CohortError, match="wants the sums of 'east' in the open"):
        federation.describe()
    plain = PretendedLink([Answerer(name, sites.client_data(name)) for name in NAMES])
    with pytest.raises(fs.CohortError, match="was started with --plain"):
        train(plain, tmp_path / "state", patience=0.05)
    # A server that pretends otherwise gets nothing either.
    link = houses.link()
    sly = NetworkFederation(link, clients=4, classes=CLASSES, interval=0.0, grace=0.0, secure=True)
    with pytest.raises(fs.DataError, match="secure sums only"):
        fs.AFL().fit(sly)


def test_who_comes_late_is_not_taken_in_and_the_run_goes_on(sites: Sites, tmp_path: Path) -> None:
    houses = Houses(sites, tmp_path / "sites")
    told: list[str] = []
    link = houses.link()
    late = Answerer("late", sites.client_data("east"), attend=lambda participant: None)

    def come(name: str, note: Any, payload: bytes) -> Any:
        if 5 not in link.sites:
            link.sites[5], link.activations[5] = late, "first"
            link.present.add(5)
        return note, payload

    for site in list(link.sites.values()):
        original = site.reply
        site.reply = lambda note, payload, original=original: (  # type: ignore[method-assign]
            come("", {}, b"") if note["ask"] == "letter" else None,
            original(note, payload),
        )[1]
    model, _ = train(link, tmp_path / "state", tell=told.append)
    assert model.history[-1].cohort == NAMES
    assert any("'late' is not taken in" in text and "its cohort stays as it is" in text for text in told)


class Leaving(PretendedLink):
    """A link on which 'west' is gone when it is asked for its term."""

    def receive(self, message: str) -> Any:
        number, _, note, payload = self.open[message]
        asked = note.get("channel") == CHANNEL and read_letter(payload)[1]["message"] == "ask"
        if asked and self.sites[number].name == "west":
            self.present.discard(number)
        return super().receive(message)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_run_goes_on_without_a_site_only_where_both_sides_allow_it(
    sites: Sites, tmp_path: Path, allowed: bool
) -> None:
    houses = Houses(sites, tmp_path / "sites", policy=SitePolicy(changing=allowed))
    link = Leaving([houses.start(name) for name in NAMES])
    if not allowed:
        with pytest.raises(
            fs.CohortError, match=r"\['west'\] did not answer, and this client only opens sums"
        ):
            train(link, tmp_path / "state", fs.AFL(ridge=1.0), missing="continue")
        return
    model, _ = train(link, tmp_path / "state", fs.AFL(ridge=1.0), missing="continue")
    assert model.history[0].cohort == NAMES[:3]
    assert relative_difference(model, fs.AFL(ridge=1.0).fit(houses.plain(NAMES[:3]))) < 1e-10


def test_participation_below_one_stops_and_says_why(sites: Sites, tmp_path: Path) -> None:
    houses = Houses(sites, tmp_path / "sites")
    method = dataclasses.replace(METHOD, exchange="textbook", participation=0.75)
    with pytest.raises(fs.CohortError, match=r"leaves out .* \(participation below 1\?\)"):
        train(houses.link(), tmp_path / "state", method)


def test_new_rows_wait(sites: Sites, tmp_path: Path) -> None:
    houses = Houses(sites, tmp_path / "sites")
    train(houses.link(), tmp_path / "one", fs.AFL(ridge=1.0))
    data = sites.client_data("north")
    more = fs.ClientData(
        np.vstack([data.features(slice(None)), data.features(slice(0, 1)) + 1]),
        np.append(data.own_labels, data.own_labels[:1]),
    )
    link = houses.link()
    shown: list[Any] = []
    houses.options["tell"] = shown.append
    link.sites[link.number("north")] = houses.start("north", more, show=shown.append)
    model, _ = train(link, tmp_path / "two", fs.AFL(ridge=2.0))
    assert relative_difference(model, fs.AFL(ridge=2.0).fit(houses.plain())) < 1e-10
    waiting = len(data) + 1 - len(houses.plain(("north",)).participants[0])
    assert any(f" of {len(data) + 1} rows take part; {waiting} wait (class " in event.text for event in shown)
    fewer = data.taking(np.arange(len(data)) > 3)
    link.sites[link.number("north")] = houses.start("north", fewer, show=shown.append)
    with pytest.raises(fs.DataError, match=r"north.*DataError"):
        train(link, tmp_path / "three", fs.AFL(ridge=2.0))
    assert any("rows of earlier totals are missing" in event.text for event in shown)


def test_a_ledger_that_was_lost_sits_the_run_out(sites: Sites, tmp_path: Path) -> None:
    houses = Houses(sites, tmp_path / "sites")
    link = houses.link()

    def lose(record: Any, expected: int) -> None:
        import shutil

        shutil.rmtree(tmp_path / "sites" / "north")
        link.sites[link.number("north")] = houses.start("north")

    settings = {"clients": 4, "classes": CLASSES, "interval": 0.0, "grace": 0.0, "secure": True}
    federation = SecureFederation(NetworkFederation(link, **settings))
    method = federation.seeded(fs.Recipe(METHOD), federation.describe())
    with pytest.raises(fs.CohortError, match=r"'north' is not part of the setup .* sits the run out"):
        method.fit(federation, follow=lose)


def test_a_seed_of_the_servers_own_is_refused(sites: Sites, tmp_path: Path) -> None:
    link = Houses(sites, tmp_path / "sites").link()
    settings = {"clients": 4, "classes": CLASSES, "interval": 0.0, "grace": 0.0, "secure": True}
    with pytest.raises(fs.CohortError, match="the seed 0 of this run was not drawn by all sites together"):
        METHOD.fit(SecureFederation(NetworkFederation(link, **settings)))
