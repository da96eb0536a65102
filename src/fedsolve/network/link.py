"""What the engine needs of a network of nodes.

`gate_link` is the network of `fedsolve server`, `file_link` one of files, `flower` that of `flwr run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedsolve.arrays import Array
from fedsolve.network.parcels import Note

GoOn = Callable[[int, int], bool]
"""Asked while a part of an answer is there, with its bytes so far and in all; False gives it up."""


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
