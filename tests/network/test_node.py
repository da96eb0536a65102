"""A site's own decisions: what ends it, what makes it try again, what it lets pass."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import CohortError, DataError
from fedsolve.network import node as node_module
from fedsolve.network.answering import Answerer
from fedsolve.network.calls import SITE
from fedsolve.network.gate_client import Refused
from fedsolve.network.node import Connection, SiteNode

pytestmark = pytest.mark.network

NOTHING = np.empty(0, dtype=np.uint8)


class PretendedGate:
    """A gate that has one question; problems are raised by calls, each once."""

    def __init__(self, node: SiteNode, **problems: Exception) -> None:
        self.node = node
        self.problems = problems
        self.hellos = 0
        self.have: list[list[str]] = []
        self.brought: list[str] = []
        self.left = False
        self.asked = threading.Event()
        self.dropped: set[str] = set()

    def _call(self, name: str) -> None:
        if (problem := self.problems.pop(name, None)) is not None:
            raise problem

    clock = 0.0
    certificate = None

    def hello(self) -> None:
        self.hellos += 1
        self._call("hello")

    def pull(self, have, largest):
        self.have.append(list(have))
        if self.asked.is_set():
            self.node._stopped.wait(0.01)
            return None
        self._call("pull")
        self.asked.set()
        return "question", {"ask": "tell", "message": "hello"}, NOTHING

    def answer(self, message, parcel) -> None:
        self._call("answer")
        self.brought.append(message)
        self.node.stop()

    def leave(self) -> None:
        self.left = True

    def close(self) -> None:
        pass


told: list[str] = []


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    told.clear()
    monkeypatch.setattr(node_module, "_FIRST_PAUSE", 0.001)


@pytest.fixture
def node() -> SiteNode:
    site = Answerer("north", fs.ClientData(np.zeros((2, 3)), np.array([0, 1])))
    return SiteNode(site, Connection("127.0.0.1:1", insecure=True), tell=told.append)


def serve(node: SiteNode, monkeypatch, **problems: Exception) -> PretendedGate:
    gate = PretendedGate(node, **problems)
    monkeypatch.setattr(node, "_client", lambda: gate)
    node.serve()
    return gate


def test_it_answers_once_and_signs_off(node, monkeypatch):
    gate = serve(node, monkeypatch)
    assert gate.brought == ["question"]
    assert gate.left
    assert gate.have[0] == []
    assert all(have in ([], ["question"]) for have in gate.have)


def test_an_answer_that_nobody_waits_for_is_dropped(node, monkeypatch):
    monkeypatch.setattr(node, "_tell", lambda text: (told.append(text), "wanted" in text and node.stop()))
    gate = serve(node, monkeypatch, answer=Refused(410, "unwanted", "this answer is not wanted any more."))
    assert gate.brought == []
    assert any("not wanted any more" in text for text in told)


def test_a_message_that_it_cannot_answer_does_not_end_it(node, monkeypatch):
    monkeypatch.setattr(node._answerer, "reply", lambda *_: (_ for _ in ()).throw(RecursionError("too deep")))
    monkeypatch.setattr(node, "_tell", lambda text: (told.append(text), "answered" in text and node.stop()))
    assert serve(node, monkeypatch).brought == []
    assert any("could not be answered (RecursionError: too deep)" in text for text in told)


@pytest.mark.parametrize("problem", [httpx.ReadError("reset"), Refused(503, "", "busy")])
def test_an_answer_is_brought_again_when_the_connection_breaks(node, monkeypatch, problem):
    gate = serve(node, monkeypatch, answer=problem)
    assert gate.brought == ["question"]


def test_an_answer_whose_refusal_is_not_heard_is_not_brought_for_ever(node, monkeypatch):
    """Of a large body that is refused the connection breaks; the thread that waits for messages is told."""
    monkeypatch.setattr(node, "_tell", lambda text: (told.append(text), "wanted" in text and node.stop()))
    gate = PretendedGate(node)
    tries = []

    def broken(message, parcel):
        tries.append(message)
        if len(tries) == 3:
            gate.dropped = {"question"}
        raise httpx.WriteError("broken pipe")

    gate.answer = broken
    monkeypatch.setattr(node, "_client", lambda: gate)
    node.serve()
    assert len(tries) >= 3
    assert node._held == set()


@pytest.mark.parametrize("call", ["hello", "pull"])
@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Refused(401, "unregistered", "this key is not registered"), "this key is not registered"),
        (Refused(401, "replaced", "another process"), "refuses this node: another process"),
        (Refused(412, "other wire", "the server's wire is 1"), "the server's wire is 1"),
        (httpx.ConnectError("certificate verify failed"), "does not prove that it is the server"),
    ],
)
def test_what_trying_again_cannot_mend_ends_it(node, monkeypatch, call, problem, words):
    with pytest.raises(CohortError, match=words):
        serve(node, monkeypatch, **{call: problem})


@pytest.mark.parametrize("call", ["hello", "pull"])
@pytest.mark.parametrize(
    "problem",
    [
        httpx.RemoteProtocolError("Server disconnected"),
        Refused(503, "", "busy"),
        httpx.ConnectError("connection refused"),
        httpx.ReadTimeout("slow"),
    ],
)
def test_what_may_mend_itself_is_tried_again(node, monkeypatch, call, problem):
    gate = serve(node, monkeypatch, **{call: problem})
    assert gate.hellos == 2
    assert any("Trying again" in text for text in told)


def test_without_keys_it_is_known_by_its_name(node):
    again = SiteNode(node._answerer, Connection("127.0.0.1:1", insecure=True))
    marks = {each._client()._http.headers[SITE] for each in (node, again)}
    assert len(marks) == 1
    assert len(marks.pop()) == 32


def test_keys_and_insecure_exclude_each_other():
    with pytest.raises(DataError, match="leave out the keys"):
        Connection("h:1", authority=Path("ca.crt"), insecure=True)
    with pytest.raises(DataError, match=r"ca\.crt"):
        Connection("h:1")
