"""A note and bytes as one body: how messages travel between a site and the gate, and lie on its disk.

    "FSPARCEL", the length of the note (8 bytes, little-endian), the note (JSON), the bytes

The note is filled up with spaces, so that numbers in the bytes lie where processors want them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedsolve.arrays import Array
from fedsolve.container import canonical_json
from fedsolve.errors import TermError

Note = dict[str, Any]

LARGEST = 8 << 30
"""Bytes that one message may hold unless another limit is given."""

_MAGIC = b"FSPARCEL"
_ALIGNED = 64
_HEAD = len(_MAGIC) + 8
LARGEST_NOTE = 16 << 20
PIECE = 1 << 18
"""Bytes that are read, written or sent at a time."""


@dataclass(frozen=True)
class Parcel:
    """A message ready to be sent: its head with the note, and its bytes."""

    head: bytes
    payload: memoryview

    @classmethod
    def of(cls, note: Note, payload: bytes = b"") -> Parcel:
        text = canonical_json(note).encode()
        text += b" " * (-(_HEAD + len(text)) % _ALIGNED)
        return cls(_MAGIC + len(text).to_bytes(8, "little") + text, memoryview(payload).cast("B"))

    def __len__(self) -> int:
        return len(self.head) + len(self.payload)

    def pieces(self) -> Iterator[bytes | memoryview]:
        yield self.head
        for start in range(0, len(self.payload), PIECE):
            yield self.payload[start : start + PIECE]

    def digest(self) -> str:
        found = hashlib.sha256(self.head)
        found.update(self.payload)
        return found.hexdigest()


def open_parcel(body: Array, digest: str) -> tuple[Note, Array]:
    """The note and the bytes (uint8) of a body that must have this SHA-256; a `TermError` otherwise."""
    if hashlib.sha256(body.data).hexdigest() != digest:
        raise TermError("the message was damaged on the way: its SHA-256 is another.")
    length = int.from_bytes(body[len(_MAGIC) : _HEAD].tobytes(), "little")
    if body[: len(_MAGIC)].tobytes() != _MAGIC or length > min(len(body) - _HEAD, LARGEST_NOTE):
        raise strange("it has no readable head")
    return note_from(body[_HEAD : _HEAD + length].tobytes()), body[_HEAD + length :]


def note_from(text: Any) -> Note:
    try:
        note = json.loads(text)
    except (ValueError, TypeError, RecursionError) as problem:
        raise strange(str(problem)) from problem
    if not isinstance(note, dict):
        raise strange("its note is not a table")
    return note


def strange(why: str) -> TermError:
    """The refusal of a message that is not one of ours."""
    return TermError(f"this message was not written by fedsolve: {why}.")
