"""What the network reaches of a server: calls of registered sites, known by their certificates."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fedsolve.network import certificates, gate, security, versions
from fedsolve.network.calls import ABOUT, ANSWER, LEAVE, PROCESS, PULL, WIRE
from fedsolve.network.gate_client import GateClient, Refused, site_context
from fedsolve.network.gate_link import serving
from fedsolve.network.keyfolder import Keys
from fedsolve.network.parcels import LARGEST, Parcel

from .calls import Caller, reason
from .conftest import SITES, STRANGER, Deployment
from .processes import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.network]

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


def received(deployment: Deployment, message: str) -> Any:
    """The reply to a message, as soon as it is there."""
    end = time.monotonic() + 20
    while (reply := deployment.link.receive(message)) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return reply


def asked(deployment: Deployment, client: GateClient, name: str = "north", largest: int = LARGEST) -> str:
    """A message that a site was sent and has."""
    (message,) = deployment.link.send([deployment.node(name).id], NOTE, b"x", largest)
    found = client.pull([], 1 << 20)
    assert found is not None
    assert found[0] == message
    return message


@pytest.mark.parametrize("size", [0, 1, 65_536, 1_000_003, 20 << 20])
def test_messages_and_answers_arrive_whole(deployment: Deployment, north: Caller, size: int) -> None:
    client = north.client(deployment.gate)
    client.hello()
    sent = np.random.default_rng(size).bytes(size)
    (message,) = deployment.link.send([deployment.node("north").id], NOTE, sent, size)
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
    deployment.link.forget([first, second])
    assert client.pull([first, second], 1000) is None
    assert client.dropped == {first, second}
    with pytest.raises(Refused, match="not wanted any more"):
        client.answer(first, Parcel.of({}))
    assert deployment.link.receive(second).absent
    client.leave()


def test_an_answer_larger_than_the_server_takes_is_refused_at_both_ends(
    deployment: Deployment, north: Caller
) -> None:
    client = north.client(deployment.gate)
    client.hello()
    message = asked(deployment, client, largest=1000)
    # Its body is not read: the connection may break before the site has heard why.
    with pytest.raises((Refused, httpx.HTTPError)):
        client.answer(message, Parcel.of({}, bytes(4 << 20)))
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
    with north.stream(deployment.gate) as stream:
        stream.sendall(north.head(f"{ANSWER}{message}", size) + bytes(1_000_000))

        end = time.monotonic() + 20
        while (seen := deployment.link.coming(message)) is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert 0 < seen[0] <= 1_000_000
        assert seen[1] == size
        deployment.link.forget([message])
        time.sleep(0.2)
        # The rest is not read: the connection may break before the site has heard why.
        with suppress(ConnectionError, ssl.SSLError):
            stream.sendall(bytes(1_000_000))
            assert b"410" in stream.recv(4096)
    assert list((deployment.folder / "mail").glob(f"{message}*")) == []
    client.leave()


def test_a_large_answer_goes_to_the_disk_and_not_into_memory(deployment: Deployment, north: Caller) -> None:
    """One of 16 x 60 MB took 1.8 GB in the process that kept the messages before."""

    def memory() -> float:
        status = Path(f"/proc/{deployment.link.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    client = north.client(deployment.gate)
    client.hello()
    message, before = asked(deployment, client), memory()
    client.answer(message, Parcel.of({"ok": True}, bytes(256 << 20)))
    assert memory() - before < 32
    assert len(received(deployment, message).payload) == 256 << 20
    client.leave()


def test_a_letter_larger_than_its_kind_allows_costs_no_memory(deployment: Deployment, north: Caller) -> None:
    """A seed letter of 3 GB took 6.2 GB of the server's memory, and nobody knew whose it was."""
    client = north.client(deployment.gate)
    client.hello()
    letter = Parcel.of({"ok": True}, bytes(64 << 20))
    try:
        message = asked(deployment, client, largest=1 << 16)
        with pytest.raises(Refused):
            client.answer(message, letter)
        reply = received(deployment, message)
        assert "bytes in one call; at most 2,162,688 are taken" in str(reply.failure)
        assert not reply.payload
        message = asked(deployment, client, largest=1 << 40)  # without the rule it is taken
        client.answer(message, letter)
        assert len(received(deployment, message).payload) == 64 << 20
    finally:
        client.leave()


def test_an_answer_that_is_brought_anew_ends_the_one_under_way(deployment: Deployment, north: Caller) -> None:
    """A connection broke, which the gate has not seen; or a site would fill the disk with one answer."""
    client = north.client(deployment.gate)
    client.hello()
    message = asked(deployment, client)
    parcel = Parcel.of({"ok": True}, bytes(1_000_000))
    with north.stream(deployment.gate) as stream:
        stream.sendall(north.head(f"{ANSWER}{message}", len(parcel)) + parcel.head + bytes(600_000))
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


def test_only_the_key_of_a_registered_site_passes(
    deployment: Deployment, north: Caller, keys: Keys, tmp_path: Path
) -> None:
    """No certificate, the key of a stranger, a certificate of the authority, a stolen name."""
    unverified = ssl._create_unverified_context()
    other = Keys(tmp_path / "other")
    security.create_client(other, "north")  # the right name, another key
    server = ssl.create_default_context(cafile=str(keys.authority))
    server.load_cert_chain(keys.server_certificate, keys.server_key)  # signed by the authority itself
    contexts = [unverified, server]
    contexts += [
        site_context(str(keys.authority), security.load_client_key(*held))
        for held in ((keys, STRANGER), (other, "north"))
    ]
    for context in contexts:
        with pytest.raises(httpx.TransportError), httpx.Client(verify=context, trust_env=False) as client:
            client.get(f"https://{deployment.gate}{ABOUT}", headers=north.headers)
    told = (deployment.folder / "gate.log").read_text()
    assert "refused 127.0.0.1: it did not show the certificate of a registered site" in told
    assert north.call(deployment.gate, ABOUT, method="GET").json()["site"] == "north"


def test_a_registered_site_cannot_lend_its_name(deployment: Deployment, keys: Keys, tmp_path: Path) -> None:
    """A certificate that a registered key has signed for another key: TLS takes it, the gate does not."""
    from cryptography.hazmat.primitives import serialization

    lent, south = certificates.new_key(), security.load_client_key(keys, "south")
    issuer = certificates._anchor_name(south.public_key())
    made = certificates._signed(certificates._subject("north"), issuer, lent.public_key(), south)
    file = tmp_path / "lent.pem"
    file.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + lent.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.create_default_context(cafile=str(keys.authority))
    context.load_cert_chain(file)
    with httpx.Client(verify=context, trust_env=False) as client:
        answer = client.get(f"https://{deployment.gate}{ABOUT}", headers=Caller(keys, "south").headers)
    assert answer.status_code == 401
    assert reason(answer) == "unregistered"


def test_a_call_says_its_wire_and_its_process(deployment: Deployment, north: Caller) -> None:
    other = north.call(deployment.gate, PULL, **{WIRE: "1"})
    assert (other.status_code, reason(other)) == (412, "other wire")
    assert "Install the same version" in other.text
    assert north.call(deployment.gate, PULL, **{PROCESS: "x"}).status_code == 400


def test_a_site_has_a_bounded_number_of_connections(deployment: Deployment, north: Caller) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(north.stream(deployment.gate)) for _ in range(gate.PER_SITE + 3)]
        for stream in streams[:3]:
            with suppress(ConnectionError, ssl.SSLError):
                assert stream.recv(1) == b""
        for stream in streams[3:]:
            stream.sendall(north.head(LEAVE, 0))
            assert stream.recv(4096).split()[1] == b"200"
    assert f"more than {gate.PER_SITE} connections" in (deployment.folder / "gate.log").read_text()


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
    assert deployment.link.receive(message) is None
    for client in (north, south):
        client.leave()


@pytest.mark.parametrize("path", OUTSIDE)
def test_every_other_path_is_refused(deployment: Deployment, north: Caller, path: str) -> None:
    for method in ("POST", "PUT"):
        assert north.call(deployment.gate, path, method=method).status_code in (404, 405)


def test_a_body_is_declared_and_of_bounded_size(deployment: Deployment, north: Caller) -> None:
    def parts() -> Any:
        yield b"1"

    assert north.call(deployment.gate, PULL, parts()).status_code == 411
    assert north.call(deployment.gate, PULL, bytes(1 << 17)).status_code == 413


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
        with north.stream(deployment.gate) as stream:
            stream.sendall(north.head(path, 60_000) + b"begun")
    client.answer(message, Parcel.of({"ok": True}))
    assert received(deployment, message).note == {"ok": True}
    assert "Traceback" not in (deployment.folder / "gate.log").read_text()
    assert list((deployment.folder / "mail").glob(f"{message}*")) == []


def test_removal_and_registration_take_effect_at_once(deployment: Deployment, keys: Keys) -> None:
    """On a connection that is open, and on a new one; a list that cannot be read lets nobody in."""
    south, newcomer = Caller(keys, "south"), "newcomer"
    client = south.client(deployment.gate)
    client.hello()
    keys.registered.remove("south")
    try:
        for refused in (client, south.client(deployment.gate)):
            with pytest.raises(Refused, match="not registered"):
                refused.hello()
        listed = keys.registered.path.read_text()
        keys.registered.path.write_text("not a list\n")
        with pytest.raises(Refused, match="not registered"):
            Caller(keys, "north").client(deployment.gate).hello()
        keys.registered.path.write_text(listed)
        security.create_client(keys, newcomer)
        with pytest.raises(httpx.TransportError):
            Caller(keys, newcomer).client(deployment.gate).hello()
        keys.registered.add(keys.client_public_key(newcomer))
        Caller(keys, newcomer).client(deployment.gate).hello()
        keys.registered.remove(newcomer)
    finally:
        keys.registered.add(keys.client_public_key("south"))
    client.hello()
    client.leave()


def test_about_tells_a_registered_site_its_name(deployment: Deployment, north: Caller) -> None:
    told = north.call(deployment.gate, ABOUT, method="GET").json()
    assert told["site"] == "north"
    assert told["versions"] == versions()


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
        client.get(f"http://{deployment.gate}{ABOUT}").raise_for_status()


def test_nothing_listens_but_the_gate(keys: Keys, tmp_path: Path) -> None:
    """Neither the server's process nor its gate has a port besides the one that sites use."""
    port = free_ports(1)[0]
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom fedsolve.network.gate_link import serving\n"
        f"with serving(Path({str(tmp_path)!r}), '127.0.0.1:{port}', Path({str(keys.folder)!r})) as link:\n"
        "    print(link.process.pid, flush=True)\n    time.sleep(600)\n"
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
