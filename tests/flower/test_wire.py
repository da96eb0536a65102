"""Bytes on their way: Flower's objects put together again, and terms read from them."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from fedsolve import formats
from fedsolve.errors import TermError
from fedsolve.federation.encoding import encode_term, read_term
from fedsolve.federation.messages import Needs, Term
from fedsolve.network import require_flower
from fedsolve.network.link import RuntimeLink
from fedsolve.network.wire import assemble, record, unpack

pytestmark = pytest.mark.flower

NOTE = {"ask": "answer", "exchange": 3, "text": "ÄÖ"}


def objects(payload: bytes):
    """The tree and the contents of a message's objects, as a SuperLink holds them."""
    require_flower()
    from flwr.app import Message, Metadata
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    about = Metadata(1, "", 1, 2, "", "", 0.0, 60.0, "query")
    message = Message(content=record(NOTE, payload), metadata=about)
    return get_object_tree(message), {n: o.deflate() for n, o in get_all_nested_objects(message).items()}


@pytest.mark.parametrize("size", [0, 1, 5_000_000, 12_345_678])
def test_what_is_sent_is_what_arrives(size):
    payload = np.random.default_rng(0).bytes(size)
    tree, contents = objects(payload)
    note, found = assemble(tree, contents.__getitem__)
    assert (note, found.tobytes()) == (NOTE, payload)
    note, found = unpack(record(NOTE, payload))
    assert (note, found.tobytes()) == (NOTE, payload)


def test_equal_chunks_travel_once_and_arrive_in_place():
    payload = bytes(16_000_000)
    tree, contents = objects(payload)
    assert sum(map(len, contents.values())) < len(payload) / 1.5
    assert assemble(tree, contents.__getitem__)[1].tobytes() == payload


def test_a_damaged_part_is_refused():
    tree, contents = objects(np.random.default_rng(0).bytes(6_000_000))
    for name in contents:
        spoiled = contents | {name: contents[name][:-1] + bytes([contents[name][-1] ^ 1])}
        with pytest.raises(TermError, match="damaged on the way"):
            assemble(tree, spoiled.__getitem__)


def test_more_than_allowed_is_refused_before_it_is_fetched():
    tree, contents = objects(bytes(range(256)) * 10)
    with pytest.raises(TermError, match="2,560 bytes was announced; at most 1,000"):
        assemble(tree, contents.__getitem__, largest=1000)


def test_strangers_are_refused():
    require_flower()
    from flwr.app import ConfigRecord, RecordDict

    for content in (RecordDict(), RecordDict({"fedsolve": ConfigRecord({"note": "[1]"})})):
        with pytest.raises(TermError, match="not written by fedsolve"):
            unpack(content)


@pytest.mark.parametrize("field", ['"have":Infinity', '"have":1e999', '"have":' + "[" * 100_000])
def test_numbers_without_an_end_are_refused(field):
    note = '{"wire":2,"message":"needs",' + field + "}"
    head = json.dumps({"__metadata__": {"fedsolve": note}}).encode()
    with pytest.raises(TermError):
        read_term(np.frombuffer(len(head).to_bytes(8, "little") + head, dtype=np.uint8))


class Branch:
    """A part of Flower's tree of a message."""

    def __init__(self, name, children=()):
        self.object_id, self.children = name, list(children)


def made_by_hand(about: bytes, note: str = "{}"):
    """The tree and objects of a message whose array is described by these bytes."""
    require_flower()
    from flwr.app import ConfigRecord

    contents = {}

    def held(data: bytes, *children: Branch) -> Branch:
        name = hashlib.sha256(data).hexdigest()
        contents[name] = data
        return Branch(name, children)

    def made(kind: str, body: bytes, *children: Branch) -> Branch:
        names = ",".join(child.object_id for child in children)
        return held(f"{kind} {names} {len(body)}".encode() + b"\0" + body, *children)

    chunk = made("ArrayChunk", b"z" * 10)
    arrays = made("ArrayRecord", b"{}", made("Array", about, chunk))
    content = made("RecordDict", b"{}", arrays, held(ConfigRecord({"note": note}).deflate()))
    return made("Message", b"", content), contents


@pytest.mark.parametrize(
    "about",
    [
        b"not json",
        b'{"shape":[10],"arraychunk_ids":[5]}',
        b'{"shape":[],"arraychunk_ids":[0]}',
        b'{"shape":["x"],"arraychunk_ids":[0]}',
        b'{"shape":[1e999],"arraychunk_ids":[0]}',
        b'{"shape":[20],"arraychunk_ids":[0]}',
        b'{"shape":[20],"arraychunk_ids":[0,0,0]}',
        b'{"shape":[10],"arraychunk_ids":[0,0]}',
        b'{"shape":[10],"arraychunk_ids":[]}',
        b'{"shape":[0],"arraychunk_ids":[]}',
        b"[" * 100_000,
    ],
)
def test_whatever_is_sent_is_a_message_or_refused(about):
    tree, contents = made_by_hand(b'{"shape":[10],"arraychunk_ids":[0]}')
    assert assemble(tree, contents.__getitem__)[1].tobytes() == b"z" * 10
    tree, contents = made_by_hand(about)
    with pytest.raises(TermError):
        assemble(tree, contents.__getitem__)
    tree, contents = made_by_hand(b'{"shape":[10],"arraychunk_ids":[0]}', "[" * 100_000)
    with pytest.raises(TermError):
        assemble(tree, contents.__getitem__)


def test_a_small_chunk_named_many_times_is_not_fetched():
    tree, contents = made_by_hand(b'{"shape":[4000],"arraychunk_ids":[' + b",".join([b"0"] * 400) + b"]}")
    fetched = []

    def fetch(name):
        fetched.append(name)
        return contents[name]

    with pytest.raises(TermError, match="4,000 bytes in 400 chunks"):
        assemble(tree, fetch)
    assert len(fetched) < len(contents)


@pytest.mark.parametrize("largest", [9, 10])
@pytest.mark.parametrize("about", [b'{"shape":[10],"arraychunk_ids":[0]}', b"not json"])
def test_a_link_gives_a_reply_whatever_is_sent(about, largest):
    tree, contents = made_by_hand(about)
    from flwr.proto.node_pb2 import Node

    confirmed = []
    answer = SimpleNamespace(HasField=lambda name: False, metadata=SimpleNamespace(message_id="m"))
    client = SimpleNamespace(
        PullMessages=lambda _: SimpleNamespace(messages_list=[answer], message_object_trees=[tree]),
        PullObject=lambda asked: SimpleNamespace(
            object_found=True, object_available=True, object_content=contents[asked.object_id]
        ),
        ConfirmMessageReceived=confirmed.append,
    )
    grid = SimpleNamespace(_runtime_client=client, run=SimpleNamespace(run_id=1), node=Node(node_id=1))
    link = RuntimeLink(grid)
    link.expect(largest)
    reply = link.receive("x", lambda done, size: True)
    usable = largest == 10 and about != b"not json"
    assert reply is not None
    assert (reply.damaged, reply.failure is None) == (not usable, usable)
    assert len(confirmed) == 1


def test_what_fetching_raises_passes():
    tree, _ = made_by_hand(b"{}")

    def gone(name):
        raise ConnectionResetError(name)

    with pytest.raises(ConnectionResetError):
        assemble(tree, gone)


def test_needs_and_damage():
    assert read_term(np.frombuffer(encode_term(Needs(3)), dtype=np.uint8)) == Needs(3)
    whole = np.frombuffer(encode_term(Term({"gram": np.eye(5)}, {"rows": 1})), dtype=np.uint8)
    for size in range(0, len(whole), 7):
        with pytest.raises(TermError):
            read_term(whole[:size])
    ours, other = (
        f'wire\\":{version}'.encode() for version in (formats.MESSAGE.version, formats.MESSAGE.version + 1)
    )
    with pytest.raises(TermError, match="wire version"):
        read_term(np.frombuffer(whole.tobytes().replace(ours, other), dtype=np.uint8))
