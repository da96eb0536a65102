"""Flower's public `Grid` as a link: its SuperLink and SuperNodes carry the messages of a run.

The apps that use it are `cli/flower_apps.py`; everything above a link is that of every other engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedsolve.arrays import Array
from fedsolve.container import canonical_json
from fedsolve.errors import TermError
from fedsolve.network.link import Link, Node, Reply
from fedsolve.network.parcels import Note, note_from, strange

_MESSAGE_LIFE = 7 * 24 * 3600.0
"""Seconds after which the SuperLink throws away a message that nobody took."""

_ABSENT = {3: "its answer was lost", 4: "its answer was lost", 5: "it is not connected"}
"""Flower's error codes for a message, a reply and a node that is unavailable."""

_NOTE, _JSON, _PAYLOAD, _BYTES = "fedsolve", "note", "payload", "bytes"


def record(note: Note, payload: bytes = b"") -> RecordDict:
    """A note and bytes as the content of a Flower message. Flower cuts only arrays into pieces."""
    content = RecordDict({_NOTE: ConfigRecord({_JSON: canonical_json(note)})})
    if payload:
        array = FlowerArray(dtype="uint8", shape=(len(payload),), stype="fedsolve", data=payload)
        content[_PAYLOAD] = ArrayRecord({_BYTES: array})
    return content


def unpack(content: RecordDict) -> tuple[Note, Array]:
    """The note and the bytes (uint8) of a message's content."""
    try:
        note = note_from(content[_NOTE][_JSON])
        payload = content[_PAYLOAD][_BYTES].data if _PAYLOAD in content else b""
    except (KeyError, TypeError, AttributeError) as problem:
        raise strange(f"{type(problem).__name__}: {problem}") from problem
    return note, np.frombuffer(payload, dtype=np.uint8)


class GridLink(Link):
    """The nodes of a Flower grid."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self._largest: dict[str, int] = {}

    def nodes(self) -> dict[int, Node]:
        return {int(node): Node(int(node)) for node in self._grid.get_node_ids()}

    def send(self, nodes: Sequence[int], note: Note, payload: bytes, largest: int = 0) -> list[str]:
        content, group = record(note, payload), str(note.get("exchange", ""))
        messages = [Message(content, node, "query", ttl=_MESSAGE_LIFE, group_id=group) for node in nodes]
        sent = [str(name) for name in self._grid.push_messages(messages)]
        self._largest.update(dict.fromkeys(sent, largest))
        return sent

    def forget(self, messages: Sequence[str]) -> None:
        for message in messages:
            self._largest.pop(message, None)

    def receive(self, message: str) -> Reply | None:
        messages = list(self._grid.pull_messages([message]))
        if not messages:
            return None
        if messages[0].has_error():
            error = messages[0].error
            if error.code in _ABSENT:
                return Reply({}, failure=_ABSENT[error.code], absent=True)
            return Reply({}, failure=f"Flower's error {error.code}: {error.reason}")
        try:
            note, answer = unpack(messages[0].content)
        except TermError as problem:
            return Reply({}, failure=str(problem), damaged=True)
        if len(answer) > (largest := self._largest[message]):
            why = f"{len(answer):,} bytes; at most {largest:,} are taken"
            return Reply({}, failure=why, damaged=True)
        return Reply(note, answer)
