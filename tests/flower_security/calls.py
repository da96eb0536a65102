"""Calls on a gate, with whatever credentials a test wants to show."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedsolve.network import security
from fedsolve.network.gate_client import GateClient
from fedsolve.network.handshake import NOTHING, Call
from fedsolve.network.keyfolder import Keys


def pem(key: ec.EllipticCurvePrivateKey) -> str:
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


@dataclass(frozen=True)
class Caller:
    """Somebody with a site's private key and the authority's certificate, as every site has them."""

    keys: Keys
    name: str
    process: str = field(default="0" * 32)

    def client(self, address: str, claimed: str | None = None) -> GateClient:
        """Our own client of a gate; `claimed`: says that it is another site."""
        key = security.load_client_key(self.keys, self.name)
        shown = key if claimed is None else security.load_client_key(self.keys, claimed)
        return GateClient(address, str(self.keys.authority), key, pem(shown), self.process)

    def sealed(self, client: GateClient, path: str, body: str = NOTHING, **other: Any) -> dict[str, str]:
        """The headers of a call on the session of a client; `other` changes what the HMAC is made over."""
        client._counter += 1
        parts = {"counter": client._counter, "server": client._server, "session": client._session, **other}
        return Call("POST", path, body, **parts).headers(client._secret)

    def call(
        self, address: str, path: str, headers: dict[str, str], body: Any = b"", method: str = "POST"
    ) -> httpx.Response:
        context = ssl.create_default_context(cafile=str(self.keys.authority))
        with httpx.Client(verify=context, trust_env=False, timeout=30) as client:
            return client.request(method, f"https://{address}{path}", headers=headers, content=body)

    def send(self, address: str, data: bytes, wait: bool = True) -> bytes:
        """Send bytes over TLS as they are; gives the beginning of the answer."""
        host, port = address.split(":")
        context = ssl.create_default_context(cafile=str(self.keys.authority))
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname=host) as stream,
        ):
            stream.sendall(data)
            return stream.recv(4096) if wait else b""


def reason(answer: httpx.Response) -> str:
    """Why a gate refused."""
    return str(json.loads(answer.content)["reason"])
