"""A node's own decisions: what ends it, what makes it try again, what it lets pass."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import CohortError, DataError
from fedsolve.network.answering import Answerer
from fedsolve.network.node import Connection, FleetNode

pytestmark = pytest.mark.flower


def status(code: int, detail: str = "") -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1/")
    response = httpx.Response(code, json={"code": 2000 + code, "detail": detail}, request=request)
    return httpx.HTTPStatusError("refused", request=request, response=response)


class PretendedClient:
    """A server that has one question; what a call does is up to the test."""

    def __init__(self, node: FleetNode | None = None, **calls) -> None:
        self.node = node
        self.calls = calls
        self.left = False
        self.looks = 0

    def __getattr__(self, name: str):
        def call(request):
            found = self.calls.get(name)
            if isinstance(found, Exception):
                raise found
            return found(request) if callable(found) else SimpleNamespace(node_id=7, success=True)

        return call

    def PullMessages(self, request):
        self.looks += 1
        if self.looks == 1:
            return SimpleNamespace(messages_list=["question"], message_object_trees=["tree"])
        self.node.stop()
        return SimpleNamespace(messages_list=[])

    def DeactivateNode(self, request):
        self.left = True

    def close(self) -> None:
        pass


@pytest.fixture
def node(tmp_path: Path) -> FleetNode:
    site = Answerer("north", fs.ClientData(np.zeros((2, 3)), np.array([0, 1])))
    return FleetNode(site, Connection("127.0.0.1:1", insecure=True), state=tmp_path, tell=told.append)


told: list[str] = []


@pytest.fixture(autouse=True)
def _silence():
    told.clear()


def serve(node: FleetNode, monkeypatch, **calls) -> PretendedClient:
    client = PretendedClient(node, **calls)
    monkeypatch.setattr(node, "_client", lambda: client)
    node.serve(once=True)
    return client


def test_an_answer_to_a_run_that_is_over_is_dropped(node, monkeypatch):
    monkeypatch.setattr(node, "_answer", lambda *_: (_ for _ in ()).throw(status(403, "the run is over")))
    client = serve(node, monkeypatch)
    assert client.looks == 2
    assert any("not wanted any more (the run is over" in text for text in told)


def test_a_message_that_it_cannot_answer_does_not_end_it(node, monkeypatch):
    monkeypatch.setattr(node, "_answer", lambda *_: (_ for _ in ()).throw(RecursionError("too deep")))
    client = serve(node, monkeypatch)
    assert client.looks == 2
    assert any("could not be answered (RecursionError: too deep)" in text for text in told)


def test_it_signs_off_when_it_is_stopped(node, monkeypatch):
    monkeypatch.setattr(node, "_answer", lambda *_: None)
    assert serve(node, monkeypatch).left


def test_it_signs_off_for_the_process_before_it(node, monkeypatch, tmp_path):
    monkeypatch.setattr(node, "_answer", lambda *_: None)
    (tmp_path / "node-id").write_text("41")
    seen = []
    client = PretendedClient(node)
    client.DeactivateNode = lambda request: seen.append(request.node_id)
    monkeypatch.setattr(node, "_client", lambda: client)
    node.serve(once=True)
    assert seen == [41, 7]
    assert (tmp_path / "node-id").read_text() == "7"


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (status(401), "refuses this node: it has no key"),
        (status(412, "no site has this key"), "refuses this node: no site has this key"),
        (httpx.ConnectError("certificate verify failed"), "does not prove that it is the server"),
    ],
)
def test_what_trying_again_cannot_mend_ends_it(node, monkeypatch, problem, words):
    monkeypatch.setattr(node, "_client", lambda: PretendedClient(node, ActivateNode=problem))
    with pytest.raises(CohortError, match=words):
        node.serve()


@pytest.mark.parametrize(
    "problem",
    [
        status(412, "Failed to activate SuperNode."),
        status(503, "the server is not ready; try again."),
        httpx.ConnectError("connection refused"),
        httpx.ReadTimeout("slow"),
    ],
)
def test_what_may_mend_itself_is_tried_again(node, monkeypatch, problem):
    monkeypatch.setattr(node, "_answer", lambda *_: None)
    attempts = []

    def client():
        attempts.append(problem)
        return PretendedClient(node, **({"ActivateNode": problem} if len(attempts) == 1 else {}))

    monkeypatch.setattr(node, "_client", client)
    node.serve()
    assert len(attempts) == 2
    assert any("Trying again" in text for text in told)


def test_keys_and_insecure_exclude_each_other():
    with pytest.raises(DataError, match="leave out the keys"):
        Connection("h:1", authority=Path("ca.crt"), insecure=True)
    with pytest.raises(DataError, match=r"ca\.crt"):
        Connection("h:1")
