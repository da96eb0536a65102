"""What the network reaches of a server: calls of registered sites, each sealed, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedsolve import formats
from fedsolve.network import gate, security
from fedsolve.network.gate_client import GateClient, Refused
from fedsolve.network.handshake import ABOUT, ANSWER, GREETING, HELLO, KEY, LEAVE, PULL
from fedsolve.network.keyfolder import Keys
from fedsolve.network.parcels import Parcel
from fedsolve.network.service import serving
from fedsolve.network.versions import versions

from .calls import Caller, reason
from .conftest import SITES, STRANGER, Deployment
from .keyring import keys_for
from .processes import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.flower]

OUTSIDE = (
    "/v1/control/start-run",
    "/v1/control/list-nodes",
    "/v1/runtime/acquire-task",
    "/v1/fedsolve/",
    "/v1/fedsolve/send",
    "/v1/fedsolve/answer",
    "/v1/fedsolve/pull/",
    "/v1/fedsolve/%70ull/x",
    "/V1/FEDSOLVE/PULL",
    "/docs",
    "/openapi.json",
    "/",
)
NOTE = {"ask": "answer", "exchange": 0}


@pytest.fixture
def north(keys: Keys) -> Caller:
    return Caller(keys, "north")


def empty(_: int, __: int) -> bool:
    return True


def received(deployment: Deployment, message: str) -> Any:
    """The reply to a message, as soon as it is there."""
    end = time.monotonic() + 20
    while (reply := deployment.link.receive(message, empty)) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return reply


def asked(deployment: Deployment, client: GateClient, name: str = "north") -> str:
    """A message that a site was sent and has."""
    (message,) = deployment.link.send([deployment.node(name).id], NOTE, b"x")
    found = client.pull([], 1 << 20)
    assert found is not None
    assert found[0] == message
    return message


@pytest.mark.parametrize("size", [0, 1, 65_536, 1_000_003, 20 << 20])
def test_messages_and_answers_arrive_whole(deployment: Deployment, north: Caller, size: int) -> None:
    client = north.client(deployment.gate)
    client.hello()
    sent = np.random.default_rng(size).bytes(size)
    (message,) = deployment.link.send([deployment.node("north").id], NOTE, sent)
    found = client.pull([], 1 << 30)
    assert found is not None
    assert (found[0], found[1], found[2].tobytes()) == (message, NOTE, sent)
    assert found[2].ctypes.data % 16 == 0
    client.answer(message, Parcel.of({"ok": True}, sent[::-1]))
    reply = received(deployment, message)
    assert (reply.note, reply.payload.tobytes()) == ({"ok": True}, sent[::-1])
    client.leave()
    assert [path for path in (deployment.folder / "mail").iterdir() if message in path.name] == []


def test_a_message_waits_until_it_is_answered_or_dropped(deployment: Deployment, north: Caller) -> None:
    """One that is lost on its way to the site is handed out again; what a site has is not."""
    client = north.client(deployment.gate)
    client.hello()
    number = deployment.node("north").id
    first, second = (deployment.link.send([number], NOTE | {"exchange": each}, b"x")[0] for each in (1, 2))
    for _ in range(2):
        found = client.pull([], 1000)
        assert found is not None
        assert found[0] == first
    found = client.pull([first], 1000)
    assert found is not None
    assert found[0] == second
    deployment.link.expect(100)
    deployment.link.expect(100)  # two questions later nobody waits for these any more
    assert client.pull([first, second], 1000) is None
    assert client.dropped == {first, second}
    with pytest.raises(Refused, match="not wanted any more"):
        client.answer(first, Parcel.of({}))
    assert deployment.link.receive(second, empty).absent
    client.leave()


def test_an_answer_larger_than_the_server_takes_is_refused_at_both_ends(
    deployment: Deployment, north: Caller
) -> None:
    client = north.client(deployment.gate)
    client.hello()
    deployment.link.expect(1000)
    try:
        message = asked(deployment, client)
    finally:
        deployment.link.expect(1 << 30)
    # Its body is not read: the connection may break before the site has heard why.
    with pytest.raises((Refused, httpx.HTTPError)):
        client.answer(message, Parcel.of({}, bytes(2 << 20)))
    reply = received(deployment, message)
    assert reply.damaged
    assert "bytes in one call; at most" in reply.failure
    with pytest.raises(Refused, match="not wanted any more"):
        client.answer(message, Parcel.of({}))


def test_an_answer_that_trickles_is_told_of_and_can_be_given_up(
    deployment: Deployment, north: Caller
) -> None:
    client = north.client(deployment.gate)
    client.hello()
    message, size = asked(deployment, client), 5_000_000
    path, seen = f"{ANSWER}{message}", []
    lines = "\r\n".join(f"{name}: {value}" for name, value in north.sealed(client, path).items())
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n{lines}\r\n\r\n"
    host, port = deployment.gate.split(":")
    context = ssl.create_default_context(cafile=str(north.keys.authority))
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=host) as stream,
    ):
        stream.sendall(head.encode() + bytes(1_000_000))

        def go_on(done: int, size: int) -> bool:
            seen.append((done, size))
            return False

        end = time.monotonic() + 20
        while (reply := deployment.link.receive(message, go_on)) is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert reply.absent
        assert 0 < seen[0][0] <= 1_000_000
        assert seen[0][1] == size
        time.sleep(0.2)
        stream.sendall(bytes(1_000_000))
        assert b"410" in stream.recv(4096)
    assert list((deployment.folder / "mail").glob(f"{message}*")) == []
    client.leave()


def test_a_large_answer_goes_to_the_disk_and_not_into_memory(deployment: Deployment, north: Caller) -> None:
    """One of 16 x 60 MB took 1.8 GB in the process that kept the messages before."""

    def memory() -> float:
        status = Path(f"/proc/{deployment.link._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    client = north.client(deployment.gate)
    client.hello()
    message, before = asked(deployment, client), memory()
    client.answer(message, Parcel.of({"ok": True}, bytes(256 << 20)))
    assert memory() - before < 32
    assert len(received(deployment, message).payload) == 256 << 20
    client.leave()


def test_an_answer_that_is_brought_anew_ends_the_one_under_way(deployment: Deployment, north: Caller) -> None:
    """A connection broke, which the gate has not seen; or a site would fill the disk with one answer."""
    client = north.client(deployment.gate)
    client.hello()
    message = asked(deployment, client)
    path, parcel = f"{ANSWER}{message}", Parcel.of({"ok": True}, bytes(1_000_000))
    lines = "\r\n".join(f"{n}: {v}" for n, v in north.sealed(client, path, parcel.digest()).items())
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(parcel)}\r\n{lines}\r\n\r\n"
    host, port = deployment.gate.split(":")
    context = ssl.create_default_context(cafile=str(north.keys.authority))
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=host) as stream,
    ):
        stream.sendall(head.encode() + parcel.head + bytes(600_000))
        time.sleep(0.3)
        client.answer(message, parcel)
        assert b"409" in stream.recv(4096)
    assert received(deployment, message).note == {"ok": True}
    assert list((deployment.folder / "mail").glob(f"{message}*")) == []
    client.leave()


def test_a_disk_that_takes_no_more_is_told_at_both_ends(keys: Keys, north: Caller, tmp_path: Path) -> None:
    address, told = f"127.0.0.1:{free_ports(1)[0]}", []
    with serving(tmp_path / "state", address, keys.folder, told.append) as link:
        here = Deployment(keys, address, tmp_path / "state", link)
        client = north.client(address)
        client.hello()
        message = asked(here, client)
        (tmp_path / "state" / "mail").rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(Refused, match="disk takes no more"):
                client.answer(message, Parcel.of({"ok": True}))
        (tmp_path / "away").rename(tmp_path / "state" / "mail")
        client.answer(message, Parcel.of({"ok": True}))
        assert received(here, message).note == {"ok": True}
    assert len(told) == 1
    assert "an answer cannot be written" in told[0]


def test_forged_replayed_and_changed_calls_are_refused_by_name(
    deployment: Deployment, north: Caller, keys: Keys, tmp_path: Path
) -> None:
    client = north.client(deployment.gate)
    client.hello()
    message = asked(deployment, client)
    path, parcel = f"{ANSWER}{message}", Parcel.of({"ok": True}, b"numbers")
    body = b"".join(parcel.pieces())

    def why(headers: dict[str, str], body: bytes = body, path: str = path) -> str:
        answer = north.call(deployment.gate, path, headers, body)
        assert answer.status_code in (400, 401)
        return reason(answer)

    right = north.sealed(client, path, parcel.digest())
    forged = right | {"fedsolve-mac": "0" * 64}
    assert why(forged) == "forged"
    for name, other in (("fedsolve-counter", "99"), ("fedsolve-body", hashlib.sha256(b"else").hexdigest())):
        assert why(right | {name: other}) == "forged"
    assert why(right, path=f"{ANSWER}{'0' * 32}") == "forged"
    assert why(right, path=f"{path}?more") == "forged"
    changed = north.sealed(client, path, parcel.digest())
    assert why(changed, body[:-1] + b"!") == "body"
    assert why(changed) == "replayed"  # a counter is used up, whatever became of the call
    elsewhere = north.sealed(client, path, parcel.digest(), server="1" * 64)
    assert why(elsewhere) == "other server"
    assert why(north.sealed(client, path, parcel.digest(), session="1" * 32)) == "unknown session"
    assert why({}) == "no session"
    # None of them was taken for the answer; the right call is.
    assert deployment.link.receive(message, empty) is None
    assert north.call(deployment.gate, path, right, body).status_code == 200
    assert received(deployment, message).payload.tobytes() == b"numbers"
    assert why(right) == "replayed"
    log = (deployment.folder / "gate.log").read_text()
    for words in ("the HMAC is not that of this call", "was made before", "it was changed", "another server"):
        assert words in log


def test_a_session_of_another_server_is_refused(
    deployment: Deployment, north: Caller, tmp_path: Path
) -> None:
    """The same site, with the same key, at two servers: what it says to one is worth nothing at the other."""
    other = keys_for(tmp_path / "keys", ())
    security.register(other, north.keys.client_public_key("north"))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    here = north.client(deployment.gate)
    here.hello()
    with serving(tmp_path / "server", address, other.folder) as link:
        answer = Caller(other, "north").call(address, LEAVE, north.sealed(here, LEAVE))
        assert reason(answer) == "other server"
        # A server that passes a hello on to another one, to speak there in the site's name.
        for said in ("server", "challenge"):
            note = _hello_note(north, deployment.gate)
            if said == "challenge":  # it knows the certificates of both
                note["server"] = hashlib.sha256(_certificate(address)).hexdigest()
            answer = Caller(other, "north").call(address, HELLO, {}, json.dumps(note).encode())
            assert answer.status_code == 401
            assert reason(answer) in ("other server", "challenge")
        assert link.nodes() == {}
    here.leave()


def _certificate(address: str) -> bytes:
    host, port = address.split(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))


def _hello_note(caller: Caller, address: str) -> dict[str, Any]:
    """A hello as this caller would say it at an address."""
    client, said = caller.client(address), []
    post = client._http.post

    def keep(path: str, **words: Any) -> Any:
        said.append(json.loads(words["content"]))
        raise InterruptedError

    client._http.post = keep  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        client.hello()
    client._http.post = post  # type: ignore[method-assign]
    client.close()
    return dict(said[0])


def test_a_hello_is_believed_once_and_from_its_signer(
    deployment: Deployment, north: Caller, keys: Keys
) -> None:
    def said(note: dict[str, Any]) -> tuple[int, str]:
        answer = north.call(deployment.gate, HELLO, {}, json.dumps(note).encode())
        return answer.status_code, "" if answer.status_code == 200 else reason(answer)

    note = _hello_note(north, deployment.gate)
    assert said(note | {"process": "1" * 32}) == (401, "signature")
    assert said(note | {"share": note["signature"]})[0] == 401
    assert said(note | {"challenge": "1-2-3"}) == (401, "challenge")
    assert said(note) == (200, "")
    assert said(note) == (401, "challenge")
    assert said({**note, "wire": 1}) == (412, "other wire")
    for spoilt in ({}, {"wire": formats.WIRE.version}, [], {**note, "key": "é"}, {**note, "process": "x"}):
        assert said(spoilt) == (400, "hello")  # type: ignore[arg-type]
    for caller, claimed, words in (
        (Caller(keys, STRANGER), None, "not registered"),
        (Caller(keys, STRANGER), "north", "not by the key"),
        (Caller(keys, "south"), "north", "not by the key"),
    ):
        with pytest.raises(Refused, match=words):
            caller.client(deployment.gate, claimed).hello()


def test_a_newer_process_of_a_site_ends_the_older(deployment: Deployment, keys: Keys) -> None:
    older, newer = (Caller(keys, "south", mark * 32).client(deployment.gate) for mark in "12")
    older.hello()
    number = deployment.node("south").id
    (message,) = deployment.link.send([number], NOTE, b"x")
    older.hello()  # the same process: its messages stay
    found = older.pull([], 1000)
    assert found is not None
    assert found[0] == message
    newer.hello()
    with pytest.raises(Refused, match="another process of this site"):
        older.pull([], 1000)
    with pytest.raises(Refused, match="not wanted any more"):
        newer.answer(message, Parcel.of({}))
    end = time.monotonic() + 20
    while deployment.node("south").activation != "2" * 32:
        assert time.monotonic() < end
    assert deployment.node("south").id == number
    newer.leave()


def test_a_registered_site_cannot_act_for_another(deployment: Deployment, keys: Keys) -> None:
    north, south = (Caller(keys, name).client(deployment.gate) for name in SITES)
    north.hello()
    south.hello()
    message = asked(deployment, south, "south")
    with pytest.raises(Refused, match="not wanted any more"):
        north.answer(message, Parcel.of({}))
    # With the session of the other it lacks the key of that session.
    path = f"{ANSWER}{message}"
    headers = Caller(keys, "north").sealed(north, path, session=south._session)
    assert reason(Caller(keys, "north").call(deployment.gate, path, headers)) == "forged"
    assert deployment.link.receive(message, empty) is None
    for client in (north, south):
        client.leave()


@pytest.mark.parametrize("path", OUTSIDE)
def test_every_other_path_is_refused(deployment: Deployment, north: Caller, path: str) -> None:
    client = north.client(deployment.gate)
    client.hello()
    assert north.call(deployment.gate, path, north.sealed(client, path)).status_code in (404, 405)
    assert north.call(deployment.gate, path, {}, method="PUT").status_code in (404, 405)


def test_a_body_is_declared_and_of_bounded_size(deployment: Deployment, north: Caller) -> None:
    client = north.client(deployment.gate)
    client.hello()

    def parts() -> Any:
        yield b"1"

    assert north.call(deployment.gate, PULL, north.sealed(client, PULL), parts()).status_code == 411
    assert north.call(deployment.gate, HELLO, {}, bytes(1 << 17)).status_code == 413
    twice = "\r\n".join(f"{name}: {value}" for name, value in north.sealed(client, PULL).items())
    head = f"POST {PULL} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n{twice}\r\nfedsolve-mac: 00\r\n\r\n"
    assert north.send(deployment.gate, head.encode()).split()[1] == b"400"


def test_an_answer_to_a_sender_that_is_gone_is_dropped() -> None:
    sent: list[str] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])
        if len(sent) == 2:
            raise AttributeError("'NoneType' object has no attribute '_write_appdata'")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for kind in ("http.response.start", "http.response.body", "http.response.body"):
            await send({"type": kind})

    asyncio.run(gate.until_gone(app)({"type": "http"}, None, send))
    assert sent == ["http.response.start", "http.response.body"]


def test_a_sender_that_goes_away_in_mid_body_does_no_harm(deployment: Deployment, north: Caller) -> None:
    client = north.client(deployment.gate)
    client.hello()
    message = asked(deployment, client)
    for path in (PULL, f"{ANSWER}{message}"):
        lines = "\r\n".join(f"{name}: {value}" for name, value in north.sealed(client, path).items())
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n{lines}\r\n\r\n"
        north.send(deployment.gate, head.encode() + b"begun", wait=False)
    client.answer(message, Parcel.of({"ok": True}))
    assert received(deployment, message).note == {"ok": True}
    assert "Traceback" not in (deployment.folder / "gate.log").read_text()
    assert list((deployment.folder / "mail").glob(f"{message}*")) == []


def test_removal_and_registration_take_effect_at_once(deployment: Deployment, keys: Keys) -> None:
    south = Caller(keys, "south")
    client = south.client(deployment.gate)
    client.hello()

    def passes() -> bool:
        """Whether a call gets as far as asking whether its answer is wanted."""
        path = f"{ANSWER}{'0' * 32}"
        answer = south.call(deployment.gate, path, south.sealed(client, path))
        assert answer.status_code in (401, 410)
        return answer.status_code == 410

    assert passes()
    security.remove(keys, "south")
    try:
        assert not passes()
        with pytest.raises(Refused, match="not registered"):
            south.client(deployment.gate).hello()
        listed = keys.registered_file.read_text()
        keys.registered_file.write_text("not a list\n")
        assert not passes()
        keys.registered_file.write_text(listed)
    finally:
        security.register(keys, keys.client_public_key("south"))
    assert passes()


def test_about_tells_a_registered_site_its_name(deployment: Deployment, north: Caller, keys: Keys) -> None:
    def about(headers: dict[str, str]) -> httpx.Response:
        return north.call(deployment.gate, ABOUT, headers, method="GET")

    challenge = north.call(deployment.gate, GREETING, {}, method="GET").json()["challenge"]
    right = security.signed_headers(keys, "north", challenge)
    told = about(right).json()
    assert told["site"] == "north"
    assert told["versions"] == versions()
    for headers, words in (
        (security.signed_headers(keys, STRANGER, challenge), "not registered"),
        (security.signed_headers(keys, "south", challenge) | {KEY: right[KEY]}, "not by the key"),
        (security.signed_headers(keys, "north", "1-2-3"), "another server"),
        ({}, "not signed"),
    ):
        answer = about(headers)
        assert answer.status_code == 401
        assert words in answer.text


def test_old_tls_and_plain_http_are_refused(deployment: Deployment, keys: Keys) -> None:
    host, port = deployment.gate.split(":")
    context = ssl.create_default_context(cafile=str(keys.authority))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname=host)
    with pytest.raises(httpx.HTTPError), httpx.Client(trust_env=False) as client:
        client.get(f"http://{deployment.gate}{gate.HEALTH}").raise_for_status()


def test_nothing_listens_but_the_gate(keys: Keys, tmp_path: Path) -> None:
    """Neither the server's process nor its gate has a port besides the one that sites use."""
    port = free_ports(1)[0]
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom fedsolve.network.service import serving\n"
        f"with serving(Path({str(tmp_path)!r}), '127.0.0.1:{port}', Path({str(keys.folder)!r})) as link:\n"
        "    print(link._process.pid, flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        gate_pid = int(process.stdout.readline())
        listening = {
            int(line.split()[1].rpartition(":")[2], 16): line.split()[9]
            for table in ("/proc/net/tcp", "/proc/net/tcp6")
            for line in Path(table).read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        }
        owned = set()
        for pid in (process.pid, gate_pid):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(link)
                owned |= {number for number, inode in listening.items() if target == f"socket:[{inode}]"}
        assert owned == {port}
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
