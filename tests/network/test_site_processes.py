"""A real gate, four sites as real processes, TLS and authentication."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedsolve as fs
from fedsolve import registry
from fedsolve.network.answering import Answerer
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.node import Connection, SiteNode

from .conftest import Nodes, Service
from .sites import CLASSES, NAMES, TOLERANCE, Sites, relative_difference, same_bits, small

pytestmark = [pytest.mark.network, pytest.mark.slow]

WIDTH = 64
METHOD = fs.DeepAFL(layers=3, width=WIDTH)
SINGLE = fs.DeepAFL(layers=3, width=WIDTH, exchange="single")
PATIENCE = 120.0
"""Seconds before a test gives up; nothing is measured by it."""


def federate(service: Service, **options) -> NetworkFederation:
    settings = {"clients": 4, "classes": CLASSES, "patience": PATIENCE, **options}
    return NetworkFederation(service.link, **settings)


def when(there: Path, then: Callable[[], None]) -> threading.Thread:
    """Do something as soon as a file is there."""

    def watch() -> None:
        end = time.monotonic() + PATIENCE
        while not there.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_deepafl_is_that_of_one_process(service: Service, nodes: Nodes, sites: Sites):
    nodes.start(service.address, *NAMES)
    federation = federate(service)
    model = METHOD.fit(federation)
    assert [record.cohort for record in model.history] == [NAMES] * 3
    assert sites.difference_from_textbook(model) <= TOLERANCE
    assert same_bits(model, SINGLE.fit(sites.local()))
    assert federation.evaluate(model) == sites.local().evaluate(model)


REGISTERED = {info.key for info in registry.methods()}


@pytest.mark.parametrize("key", sorted(REGISTERED & {"afl", "apfl", "cascade", "fedavg", "scaffold"}))
def test_other_methods_are_those_of_one_process(service: Service, nodes: Nodes, sites: Sites, key: str):
    nodes.start(service.address, *NAMES)
    model, expected = small(key).fit(federate(service)), small(key).fit(sites.local())
    assert relative_difference(model, expected) <= (1e-6 if key in ("fedavg", "scaffold") else TOLERANCE)


def test_sites_say_what_they_sent(service: Service, nodes: Nodes):
    nodes.start(service.address, *NAMES)
    fs.AFL(ridge=0.1).fit(federate(service))
    assert "MB up (cross, gram, label_square)" in nodes.log("north")
    assert '"arrays": ["cross", "gram", "label_square"]' in (nodes.state("north") / "sent.jsonl").read_text()


def test_a_node_killed_in_mid_exchange_and_restarted(service: Service, nodes: Nodes, sites: Sites):
    nodes.start(service.address, *NAMES)
    nodes.start_slow(service.address, "south", exchange=1, seconds=600)

    def restart() -> None:
        nodes.kill("south")
        nodes.start(service.address, "south")

    watcher = when(nodes.answering("south"), restart)
    federation = federate(service)
    model = METHOD.fit(federation)
    watcher.join()
    assert federation.reports[1].again == {"south": 1}
    assert model.history[1].catch_up_bytes > 0
    assert [record.cohort for record in model.history] == [NAMES] * 3
    assert sites.difference_from_textbook(model) <= TOLERANCE
    assert same_bits(model, SINGLE.fit(sites.local()))


def test_a_node_that_never_comes_back(service: Service, nodes: Nodes, sites: Sites):
    nodes.start(service.address, *NAMES)
    nodes.start_slow(service.address, "south", exchange=1, seconds=600)
    watcher = when(nodes.answering("south"), lambda: nodes.kill("south"))
    federation = federate(service, missing="continue", min_clients=3)
    model = METHOD.fit(federation)
    watcher.join()
    others = tuple(name for name in NAMES if name != "south")
    assert model.history[0].cohort == NAMES
    assert model.history[1].missing == {"south": "not connected"}
    assert {record.cohort for record in model.history[1:]} == {others}
    assert federation.reports[1].coverage == 0.75
    assert sites.difference_from_textbook(model) <= TOLERANCE


def test_a_frozen_site_does_not_keep_the_others_from_answering(service: Service, nodes: Nodes, sites: Sites):
    """The first in the order of names: what the others answer is at the server while it is waited for."""
    nodes.start(service.address, *NAMES)
    federation = federate(service)
    federation.describe()
    os.kill(nodes.processes[NAMES[0]].pid, signal.SIGSTOP)
    found: list[Any] = []
    run = threading.Thread(target=lambda: found.append(fs.AFL(ridge=0.1).fit(federation)), daemon=True)
    try:
        run.start()
        mail, end = service.link.mail, time.monotonic() + PATIENCE
        while len([path for path in mail.iterdir() if not path.name.startswith("to-")]) < len(NAMES) - 1:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert run.is_alive()
    finally:
        os.kill(nodes.processes[NAMES[0]].pid, signal.SIGCONT)
    run.join(PATIENCE)
    assert found[0].history[0].cohort == NAMES
    assert same_bits(found[0], fs.AFL(ridge=0.1).fit(sites.local()))


def test_a_node_that_joins_after_two_layers(service: Service, nodes: Nodes, sites: Sites):
    nodes.start(service.address, *NAMES)
    nodes.stop("west")
    federation = federate(service, clients=3)

    def join(record, expected) -> None:
        if record.exchange == 1:
            nodes.start(service.address, "west")
            end = time.monotonic() + PATIENCE
            while "west" not in federation.clients:
                assert time.monotonic() < end
                time.sleep(0.1)

    model = fs.DeepAFL(layers=4, width=WIDTH).fit(federation, follow=join)
    cohorts = [record.cohort for record in model.history]
    assert cohorts[:2] == [("east", "north", "south")] * 2
    assert cohorts[-1] == NAMES
    assert model.history[2].catch_up_bytes > 0
    assert sites.difference_from_textbook(model) <= TOLERANCE


class Rogue(Answerer):
    """Answers what a site has as it should, and every letter with 300 MB."""

    def reply(self, note, payload):
        told, _ = super().reply(note if note["ask"] != "letter" else {**note, "ask": "tell"}, payload)
        return told, bytes(300 << 20) if note["ask"] == "letter" else b""


def test_a_letter_that_is_too_large_is_refused_by_name_and_not_read(
    service: Service, nodes: Nodes, sites: Sites
):
    """A reply of 3 GB to a letter about the seed took 6.2 GB of the server's memory."""
    for name in list(nodes.processes):
        nodes.stop(name)

    def memory() -> float:
        status = Path(f"/proc/{service.link.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    connection = Connection(service.address, nodes.keys.authority, nodes.keys.client_key("south"))
    site = SiteNode(Rogue("south", sites.client_data("south")), connection)
    thread = threading.Thread(target=site.serve, daemon=True)
    thread.start()
    try:
        federation = federate(service, clients=1)
        federation.describe()
        before = memory()
        ((name, problem),) = federation.carry("seed", {"south": b"?"}, 1 << 16)
        assert name == "south"
        assert "'south'" in str(problem)
        assert "314572" in str(problem)
        assert "at most 2,162,688 are taken" in str(problem)
        assert memory() - before < 32
        assert not [path for path in service.link.mail.iterdir() if path.stat().st_size > 3 << 20]
    finally:
        site.stop()
        thread.join(PATIENCE)
