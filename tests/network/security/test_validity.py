"""Certificates that are about to expire are announced; one that is refused is answered with what mends it."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fedsolve.network import certificates, gate_client
from fedsolve.network.keyfolder import Keys
from fedsolve.network.node import Connection, SiteNode
from tests.command import fedsolve

from .keyring import keys_for

pytestmark = pytest.mark.network


@contextmanager
def shown(keys: Keys) -> Iterator[int]:
    """A port behind which somebody shows the server's certificate and says nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.server_certificate, keys.server_key)
    with socket.create_server(("0.0.0.0", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    plain = listening.accept()[0]
                except OSError:
                    return
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def at_a_site(keys: Keys, address: str) -> Exception:
    """What a node says of the server at this address, shown by the TLS that it really uses."""
    node = SiteNode(None, Connection(address, keys.authority, keys.client_key("north")))  # type: ignore[arg-type]
    client = node._client()
    try:
        client.hello()
    except Exception as problem:
        return node._explained(problem)
    else:
        return AssertionError("it was let in")
    finally:
        client.close()


def test_a_certificate_is_announced_from_thirty_days_before_its_end(tmp_path: Path) -> None:
    keys = keys_for(tmp_path / "keys", ["north"])
    assert certificates.of_server(keys).announced is None
    assert certificates.of_authority(keys).announced is None
    certificates.renew_server(keys, days=31)
    assert certificates.of_server(keys).announced is None
    certificates.renew_server(keys, days=30)  # less a moment
    text = certificates.of_server(keys).announced
    assert text is not None
    assert "the server's certificate expires in 29 days" in text
    assert "fedsolve keys renew" in text
    with shown(keys) as port:
        seen = gate_client.shown("127.0.0.1", port, keys.authority)
        assert seen is not None
        assert (seen.days, seen.announced) == (29, text)
        with pytest.raises(ssl.SSLCertVerificationError):
            gate_client.shown("127.0.0.1", port, keys_for(tmp_path / "other", []).authority)
    with pytest.raises(ConnectionRefusedError):
        gate_client.shown("127.0.0.1", port, keys.authority)
    done = fedsolve("doctor", "--keys", keys.folder, "--listen", "127.0.0.1:0", "--json")
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["server certificate"]["state"] == "warning"
    assert "29 days left" in found["server certificate"]["seen"]


def test_a_server_that_starts_says_which_certificate_is_about_to_expire(tmp_path: Path) -> None:
    keys = keys_for(tmp_path / "keys", ["north"])
    certificates.renew_server(keys, days=10)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it gets as far as its port
        words = ("server", "--keys", keys.folder, "--plain", "--clients", "1", "--state", tmp_path / "state")
        done = fedsolve(*words, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.exit_code == 3
    assert "warning: the server's certificate expires in 9 days" in done.stderr
    assert "expires in 9 days" in (tmp_path / "state" / "server.log").read_text()


def test_a_refused_certificate_is_answered_with_what_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_for(tmp_path / "keys", ["north"])
    with shown(keys) as port:
        told = at_a_site(keys, f"127.0.0.2:{port}")
        assert "fedsolve keys renew --host 127.0.0.2" in str(told)
        other = keys_for(tmp_path / "other", ["north"])
        assert "Compare ca.crt's fingerprint" in str(at_a_site(other, f"127.0.0.1:{port}"))
    certificates.renew_server(keys, days=0)
    with shown(keys) as port:
        told = at_a_site(keys, f"127.0.0.1:{port}")
        assert "has expired" in str(told)
        assert certificates.RENEW in str(told)
        assert "ca.crt" not in str(told)
        # Renewed over there, it goes on by itself.
        assert type(told).__name__ == "_Lost"
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=4000)
    monkeypatch.setattr(certificates, "now", lambda: later)
    expired = httpx.ConnectError("certificate verify failed: certificate has expired")
    node = SiteNode(None, Connection("h:1", keys.authority, keys.client_key("north")))  # type: ignore[arg-type]
    assert certificates.ASK_FOR_AUTHORITY in str(node._explained(expired))
