"""Calls on a gate, with whatever credentials a test wants to show."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from fedsolve import version
from fedsolve.network import security
from fedsolve.network.calls import PROCESS, WIRE
from fedsolve.network.gate_client import GateClient, site_context
from fedsolve.network.keyfolder import Keys


@dataclass(frozen=True)
class Caller:
    """Somebody with a site's private key and the authority's certificate, as every site has them."""

    keys: Keys
    name: str
    process: str = field(default="0" * 32)

    @property
    def key(self) -> Any:
        return security.load_client_key(self.keys, self.name)

    @property
    def context(self) -> ssl.SSLContext:
        return site_context(str(self.keys.authority), self.key)

    @property
    def headers(self) -> dict[str, str]:
        return {WIRE: str(version.WIRE), PROCESS: self.process}

    def client(self, address: str) -> GateClient:
        """Our own client of a gate."""
        return GateClient(address, str(self.keys.authority), self.key, "", self.process)

    def call(
        self, address: str, path: str, body: Any = b"", method: str = "POST", **headers: str
    ) -> httpx.Response:
        with httpx.Client(verify=self.context, trust_env=False, timeout=30) as client:
            return client.request(
                method, f"https://{address}{path}", headers=self.headers | headers, content=body
            )

    def head(self, path: str, size: int) -> bytes:
        """The head of a call whose body has so many bytes."""
        lines = "\r\n".join(f"{name}: {value}" for name, value in self.headers.items())
        return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n{lines}\r\n\r\n".encode()

    @contextmanager
    def stream(self, address: str) -> Iterator[ssl.SSLSocket]:
        """A connection on which a test sends what it likes."""
        host, port = address.split(":")
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            self.context.wrap_socket(plain, server_hostname=host) as stream,
        ):
            yield stream


def reason(answer: httpx.Response) -> str:
    """Why a gate refused."""
    return str(json.loads(answer.content)["reason"])
