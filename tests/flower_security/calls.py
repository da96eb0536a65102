"""Calls on a SuperLink or a gate, with whatever credentials a test wants to show."""

from __future__ import annotations

import base64
import datetime
import socket
import ssl
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsolve.network import security
from fedsolve.network.keyfolder import Keys
from fedsolve.network.superlink import start_request


@dataclass(frozen=True)
class Caller:
    """Somebody with a site's private key and the authority's certificate, as every site has them."""

    keys: Keys
    name: str

    def fleet(self, address: str) -> FleetHttpClient:
        """Flower's own client of the node interface."""
        return self._client(FleetHttpClient, address, "SuperNode")

    def control(self, address: str) -> ControlHttpClient:
        """Flower's own client of the control interface, which signs like a node besides."""
        return self._client(ControlHttpClient, address, "flwr CLI")

    def _client(self, kind: Any, address: str, component: str) -> Any:
        key = security.load_client_key(self.keys, self.name)
        return kind.from_server_address(
            address,
            insecure=False,
            root_certificates=self.keys.authority.read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name=component),
                NodeAuthHttpInterceptor(key, key.public_key()),
            ],
        )

    def refusals(self, address: str, pem: bytes) -> list[int]:
        """The status codes that starting a run, registering a key and listing nodes are refused with."""
        codes = []
        with self.control(address) as client:
            for call, request in (
                (client.StartRun, intruding_run()),
                (client.RegisterNode, RegisterNodeRequest(public_key=pem)),
                (client.ListNodes, ListNodesRequest()),
            ):
                with pytest.raises(httpx.HTTPStatusError) as problem:
                    call(request)
                codes.append(problem.value.response.status_code)
        return codes

    def headers(self, seconds: float = 0.0, public: str | None = None) -> dict[str, str]:
        """Signed headers, as of so many seconds ahead; `public` claims the key of another site."""
        key = security.load_client_key(self.keys, self.name)
        stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()
        signature = key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
        claimed = key if public is None else security.load_client_key(self.keys, public)
        pem = claimed.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return {
            "flwr-public-key": base64.b64encode(pem).decode(),
            "flwr-timestamp": stamp,
            "flwr-signature": base64.b64encode(signature).decode(),
            "content-type": "application/protobuf",
        }

    def post(self, address: str, path: str, headers: dict[str, str], body: bytes = b"") -> httpx.Response:
        context = ssl.create_default_context(cafile=str(self.keys.authority))
        with httpx.Client(verify=context, trust_env=False) as client:
            return client.post(f"https://{address}{path}", headers=headers, content=body)

    def raw(self, address: str, head: str) -> bytes:
        """The first line of the answer to a request that no client library would send."""
        lines = [f"{name}: {value}" for name, value in self.headers().items()]
        text = "\r\n".join([head, f"Host: {address}", "Content-Length: 0", *lines, "", ""])
        return self.send(address, text.encode()).partition(b"\r\n")[0]

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


def intruding_run() -> StartRunRequest:
    """A run whose app would execute whatever its author likes on the server and on every node."""
    names = ("__init__", "server_app", "client_app")
    return start_request("intruder", {f"intruder/{name}.py": b"app = None\n" for name in names})
