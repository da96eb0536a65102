"""Requests and answers as Flower's records: a JSON note, and bytes that Flower cuts into 5 MB objects.

Bytes travel in an ArrayRecord: those of a ConfigRecord are not cut. `assemble` puts the objects of a
message together in one buffer, so that receiving a large answer takes its size once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.container import Array, canonical_json
from fedsolve.errors import TermError

if TYPE_CHECKING:
    from flwr.app import RecordDict

LARGEST = 8 << 30
"""Bytes that one message may hold unless another limit is given."""

Note = dict[str, Any]

_NOTE, _JSON, _PAYLOAD, _BYTES = "fedsolve", "note", "payload", "bytes"
_AHEAD = 2
_LEAST_CHUNK = 1 << 20
"""Flower cuts arrays into much larger chunks; a chunk of a few bytes, named a million times, is an attack."""


def record(note: Note, payload: bytes = b"") -> RecordDict:
    """A note and bytes as the content of a Flower message."""
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

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


def assemble(
    tree: Any,
    fetch: Callable[[str], bytes],
    largest: int = LARGEST,
    announce: Callable[[int], None] | None = None,
) -> tuple[Note, Array]:
    """The note and the bytes (uint8) of a message whose objects are fetched one by one.

    tree:  Flower's tree of the message's object ids, each the SHA-256 of an object's contents.
    fetch: the contents of an object. announce: told how many bytes the message has, before they are fetched.

    Whatever was sent, it gives a message or a `TermError`; only what `fetch` itself raises passes.
    """
    problems: list[BaseException] = []

    def fetched(name: str) -> bytes:
        try:
            return fetch(name)
        except BaseException as problem:
            problems.append(problem)
            raise

    try:
        return _assemble(tree, fetched, largest, announce or (lambda size: None))
    except TermError:
        raise
    except Exception as problem:
        if any(problem is known for known in problems):
            raise
        raise strange(f"{type(problem).__name__}: {problem}") from problem


def _assemble(
    tree: Any, fetch: Callable[[str], bytes], largest: int, announce: Callable[[int], None]
) -> tuple[Note, Array]:
    note: Note | None = None
    payload: Array = np.empty(0, dtype=np.uint8)
    arrays = 0
    for branch in _branches(tree):
        contents = fetch(branch.object_id)
        kind, children, body = _open(branch.object_id, contents)
        if kind == "ConfigRecord":
            if note is not None:
                raise strange("it has more than one note")
            note = _config_note(contents)
        elif kind == "Array":
            about = json.loads(bytes(body))
            size = int(about["shape"][0])
            named = [children[index] for index in about["arraychunk_ids"]]
            arrays += 1
            if arrays > 1:
                raise strange("it has more than one array")
            if len(named) > 1 + size // _LEAST_CHUNK or not set(named) == set(children):
                raise strange(f"{size:,} bytes in {len(named):,} chunks, of {len(children):,} that it has")
            if not 0 <= size <= largest:
                raise TermError(
                    f"a message of {size:,} bytes was announced; at most {largest:,} are taken. "
                    "Raise the limit if this is meant."
                )
            announce(size)
            payload = np.empty(size, dtype=np.uint8)
            _fill(payload, named, fetch)
    if note is None:
        raise strange("it has no note")
    return note, payload


def _branches(tree: Any) -> Iterator[Any]:
    """The parts of a message that are not its chunks, parents first."""
    # Message, RecordDict, then records; an ArrayRecord holds Arrays, and these hold chunks.
    yield tree
    for content in tree.children:
        yield content
        for part in content.children:
            yield part
            yield from part.children


@cache
def _pool() -> ThreadPoolExecutor:
    # The same threads for all messages: memory that a thread has freed is kept for that thread.
    return ThreadPoolExecutor(_AHEAD, thread_name_prefix="fedsolve-fetch")


def _fill(target: Array, chunks: list[str], fetch: Callable[[str], bytes]) -> None:
    """Write the chunks one behind the other, fetching a little ahead."""
    start, pool = 0, _pool()
    under_way: list[Future[bytes]] = [pool.submit(fetch, name) for name in chunks[:_AHEAD]]
    for turn, name in enumerate(chunks):
        contents = under_way.pop(0).result()
        if turn + _AHEAD < len(chunks):
            under_way.append(pool.submit(fetch, chunks[turn + _AHEAD]))
        _, _, body = _open(name, contents)
        if start + len(body) > len(target):
            raise strange(f"its chunks hold more than the {len(target):,} bytes announced")
        target[start : start + len(body)] = np.frombuffer(body, dtype=np.uint8)
        start += len(body)
    if start != len(target):
        raise strange(f"its chunks hold {start:,} bytes, {len(target):,} were announced")


def _open(name: str, contents: bytes) -> tuple[str, list[str], memoryview]:
    """Kind, children and body of an object whose contents have the digest that is its name."""
    if hashlib.sha256(contents).hexdigest() != name:
        raise TermError("a part of the message was damaged on the way: its SHA-256 is not its name.")
    try:
        divider = contents.index(b"\x00")
        kind, children, length = contents[:divider].decode().split(" ")
        body = memoryview(contents)[divider + 1 :]
        if len(body) != int(length):
            raise ValueError
    except ValueError:
        raise strange("one of its objects has no readable head") from None
    return kind, children.split(",") if children else [], body


def _config_note(contents: bytes) -> Note:
    from flwr.app import ConfigRecord

    try:
        return note_from(ConfigRecord.inflate(contents)[_JSON])
    except KeyError as problem:
        raise strange("it has no note") from problem


def note_from(text: Any) -> Note:
    try:
        note = json.loads(text)
    except (ValueError, TypeError, RecursionError) as problem:
        raise strange(str(problem)) from problem
    if not isinstance(note, dict):
        raise strange("its note is not a table")
    return note


def strange(why: str) -> TermError:
    return TermError(f"this message was not written by fedsolve: {why}.")
