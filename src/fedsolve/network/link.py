"""What the engine needs of a network of nodes, and a SuperLink of Flower's own as one.

`gate_link` is the network that `fedsolve server` makes; here is the one of `flwr run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fedsolve.container import Array
from fedsolve.errors import CohortError, TermError
from fedsolve.network.wire import LARGEST, Note, assemble, record, unpack

GoOn = Callable[[int, int], bool]
"""Asked while a part of an answer is there, with its bytes so far and in all; False gives it up."""

DAYS = 24 * 3600.0
MESSAGE_LIFE = 7 * DAYS
"""Seconds after which the SuperLink throws away a message that nobody took."""

_WAIT_FOR_PART = 0.05


@dataclass(frozen=True)
class Node:
    """A node that is there now; `activation` changes when it starts anew."""

    id: int
    activation: str = ""
    name: str | None = None


@dataclass(frozen=True)
class Reply:
    """What came back: a note with bytes, or why not (`failure`).

    absent: the node is gone. damaged: it answered, but not with a message that can be read.
    """

    note: Note
    payload: Array | None = None
    failure: str | None = None
    absent: bool = False
    damaged: bool = False


class Link(Protocol):
    """What the engine needs of a network of nodes."""

    def nodes(self) -> dict[int, Node]:
        """The nodes that are there now, by id."""

    def send(self, nodes: Sequence[int], note: Note, payload: bytes) -> list[str]:
        """Send the same message to nodes; the ids under which they answer."""

    def receive(self, message: str, go_on: GoOn) -> Reply | None:
        """The answer to a message, or None while there is none; absent where `go_on` gave it up."""

    def expect(self, largest: int) -> None:
        """Refuse answers of more bytes to what is asked from now on."""

    def registered(self) -> frozenset[str] | None:
        """The names of the sites that may take part; None where there is no list of them."""


@runtime_checkable
class TellsArrivals(Protocol):
    """A network that knows how much of the answers that were not taken yet has come."""

    def arrivals(self) -> dict[int, tuple[int, int]]:
        """By node, the bytes of its answer that are there and those of the whole."""


class GridLink:
    """Any Flower grid, through its public interface."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def registered(self) -> frozenset[str] | None:
        return None

    def expect(self, largest: int) -> None:
        """Nothing: Flower has put an answer together before we see it."""

    def nodes(self) -> dict[int, Node]:
        return {int(node): Node(int(node)) for node in self._grid.get_node_ids()}

    def send(self, nodes: Sequence[int], note: Note, payload: bytes) -> list[str]:
        from flwr.app import Message

        content = record(note, payload)
        messages = [
            Message(content, node, "query", ttl=MESSAGE_LIFE, group_id=str(note.get("exchange", "")))
            for node in nodes
        ]
        return [str(name) for name in self._grid.push_messages(messages)]

    def receive(self, message: str, go_on: GoOn) -> Reply | None:
        messages = list(self._grid.pull_messages([message]))
        if not messages:
            return None
        if messages[0].has_error():
            return _failed(messages[0].error.code, messages[0].error.reason)
        try:
            return Reply(*unpack(messages[0].content))
        except TermError as problem:
            return Reply({}, failure=str(problem), damaged=True)


class RuntimeLink(GridLink):
    """Flower's HTTP grid, below its public interface: objects go straight into one buffer.

    `Grid.pull_messages` holds a large answer twice and waits a whole second for an object that is still
    on its way.
    """

    def __init__(self, grid: Any, largest: int = LARGEST) -> None:
        super().__init__(grid)
        self._largest = self._allowed = largest

    def expect(self, largest: int) -> None:
        self._allowed = min(largest, self._largest)

    @property
    def _client(self) -> Any:
        return self._grid._runtime_client

    def nodes(self) -> dict[int, Node]:
        with self._explained():
            nodes = self._grid.get_nodes()
        return {node.node_id: Node(node.node_id, node.last_activated_at, node.name or None) for node in nodes}

    def send(self, nodes: Sequence[int], note: Note, payload: bytes) -> list[str]:
        with self._explained():
            return super().send(nodes, note, payload)

    def receive(self, message: str, go_on: GoOn) -> Reply | None:
        with self._explained():
            return self._receive(message, go_on)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A SuperLink that does not answer, as an error that says what to do."""
        import httpx

        try:
            yield
        except httpx.HTTPError as problem:
            raise CohortError(
                f"the SuperLink does not answer ({type(problem).__name__}: {problem}); its log says why. "
                "Start again with the same state folder to go on."
            ) from problem

    def _receive(self, message: str, go_on: GoOn) -> Reply | None:
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        response = self._client.PullMessages(PullAppMessagesRequest(message_ids=[message]))
        if not response.messages_list:
            return None
        answer, tree = response.messages_list[0], response.message_object_trees[0]
        if answer.HasField("error"):
            return _failed(answer.error.code, answer.error.reason)
        run = self._grid.run.run_id
        try:
            pull = Puller(self._client, self._grid.node, run, go_on)
            note, payload = assemble(tree, pull, self._allowed, pull.announce)
            reply = Reply(note, payload)
        except Gone as problem:
            return Reply({}, failure=str(problem), absent=True)
        except TermError as problem:
            reply = Reply({}, failure=str(problem), damaged=True)
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self._grid.node, run_id=run, message_object_id=answer.metadata.message_id
            )
        )
        return reply


def link_for(grid: Any, largest: int = LARGEST) -> Link:
    """The best link this grid allows."""
    return RuntimeLink(grid, largest) if hasattr(grid, "_runtime_client") else GridLink(grid)


class Gone(Exception):
    """The objects of a message will not come any more."""


class Puller:
    """Fetches objects, waiting for those that the node is still sending as long as `go_on` says so."""

    def __init__(self, client: Any, node: Any, run: int, go_on: GoOn) -> None:
        self._client = client
        self._node = node
        self._run = run
        self._go_on = go_on
        self._size = self._done = 0
        self._looked = time.monotonic()

    def announce(self, size: int) -> None:
        """Know how many bytes the answer has."""
        self._size = size

    def __call__(self, name: str) -> bytes:
        from flwr.proto.message_pb2 import PullObjectRequest

        while True:
            # However steadily a trickle comes: who waits decides how long.
            if time.monotonic() - self._looked > 1.0:
                if not self._go_on(self._done, self._size):
                    raise Gone("it left in the middle of its answer")
                self._looked = time.monotonic()
            request = PullObjectRequest(node=self._node, run_id=self._run, object_id=name)
            response = self._client.PullObject(request)
            if not response.object_found:
                raise Gone("it stopped in the middle of its answer")
            if response.object_available:
                self._done += len(response.object_content)
                return bytes(response.object_content)
            time.sleep(_WAIT_FOR_PART)


_ABSENT: Mapping[str, str] = {
    "NODE_UNAVAILABLE": "it is not connected",
    "MESSAGE_UNAVAILABLE": "its answer was lost",
    "REPLY_MESSAGE_UNAVAILABLE": "its answer was lost",
}


def _failed(code: int, reason: str) -> Reply:
    from flwr.common.constant import ErrorCode

    names = {value: name for name, value in vars(ErrorCode).items() if isinstance(value, int)}
    name = names.get(code, str(code))
    if name in _ABSENT:
        return Reply({}, failure=_ABSENT[name], absent=True)
    return Reply({}, failure=f"{name}: {reason}")


def check_sent(names: Sequence[str], nodes: Sequence[int]) -> None:
    """Refuse messages that the SuperLink did not take."""
    if len(names) != len(nodes) or not all(names):
        raise CohortError(
            f"the SuperLink took {sum(map(bool, names))} of {len(nodes)} messages; its log says why. Resume."
        )
