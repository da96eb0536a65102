"""What the engine needs of a network of nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fedsolve.arrays import Array
from fedsolve.network.parcels import Note


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


class Link(ABC):
    """A network of nodes: `GateLink`, `FileLink` (files that people carry) or `GridLink` (Flower)."""

    @abstractmethod
    def nodes(self) -> dict[int, Node]:
        """The nodes that are there now, by id."""

    @abstractmethod
    def send(self, nodes: Sequence[int], note: Note, payload: bytes, largest: int = 0) -> list[str]:
        """Send the same message to nodes; the ids under which they answer.

        largest: the most bytes that an answer may have besides its note.
        """

    @abstractmethod
    def receive(self, message: str) -> Reply | None:
        """The answer to a message, or None while there is none."""

    def coming(self, message: str) -> tuple[int, int] | None:
        """The bytes that are there of an answer on its way, and those of the whole; None where unknown."""
        return None

    def forget(self, messages: Sequence[str]) -> None:
        """Nobody waits for these answers any more."""
        return

    def registered(self) -> frozenset[str] | None:
        """The names of the sites that may take part; None where there is no list of them."""
        return None
