"""What the network reaches of a server: node calls of registered sites, and nothing else."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node

from fedsolve.network import gate, security
from fedsolve.network.admission import MOST_BYTES
from fedsolve.network.keyfolder import Keys
from fedsolve.network.versions import versions

from .calls import Caller, intruding_run
from .conftest import SITES, STRANGER, Deployment
from .processes import answers, free_ports, program, running

pytestmark = [pytest.mark.slow, pytest.mark.flower]

OUTSIDE = (
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/control/list-nodes",
    "/v1/control/stop-run",
    "/v1/control/stream-logs",
    "/v1/runtime/acquire-task",
    "/v1/runtime/get-nodes",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/docs",
    "/openapi.json",
    "/health",
    "/",
)

TRICKS = (
    "POST /v1/fleet/../control/list-nodes HTTP/1.1",
    "POST /v1/fleet/%2e%2e/control/list-nodes HTTP/1.1",
    "POST /v1/fleet/..%2fcontrol%2flist-nodes HTTP/1.1",
    "POST //v1/control/list-nodes HTTP/1.1",
    "POST /v1/fleet//../../v1/control/list-nodes HTTP/1.1",
    "POST /v1/control/list-nodes/ HTTP/1.1",
    "POST /V1/CONTROL/LIST-NODES HTTP/1.1",
    "POST /v1/fleet/pull-messages/../../control/list-nodes HTTP/1.1",
    "POST /v1/fleet/pull-messages%00/v1/control/list-nodes HTTP/1.1",
    "POST http://127.0.0.1/v1/control/list-nodes HTTP/1.1",
    "POST /v1/control/list-nodes?/v1/fleet/pull-messages HTTP/1.1",
    "POST /v1/fleet/pull-messages;/v1/control/list-nodes HTTP/1.1",
    "GET /v1/fleet/pull-messages HTTP/1.1",
    "PUT /v1/fleet/pull-messages HTTP/1.1",
    "CONNECT 127.0.0.1:22 HTTP/1.1",
    "POST /v1/control/list-nodes HTTP/1.0",
)


@pytest.fixture
def north(keys: Keys) -> Caller:
    return Caller(keys, "north")


def control_calls(deployment: Deployment) -> int:
    """How often the SuperLink was called on anything but its node interface."""
    lines = (deployment.folder / "superlink.log").read_text().splitlines()
    return sum("/v1/control" in line or "/v1/runtime" in line for line in lines if "HTTP/1" in line)


def test_a_registered_site_passes(deployment: Deployment, north: Caller) -> None:
    node = Node(node_id=deployment.nodes["north"])
    with north.fleet(deployment.gate) as client:
        key = security.registered(deployment.keys)["north"].pem
        activated = client.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30))
        assert activated.node_id == node.node_id
        assert client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=30)).success
        assert not client.PullMessages(PullMessagesRequest(node=node)).messages_list
        client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


def test_the_control_interface_is_open_on_loopback_which_is_why_there_is_a_gate(
    deployment: Deployment, keys: Keys, tmp_path: Path
) -> None:
    """Without this, the refusals below would prove nothing: the same calls succeed behind the gate."""
    other = Keys(tmp_path)
    pem = security.create_client(other, "intruder").pem
    before = control_calls(deployment)
    with Caller(keys, STRANGER).control(deployment.control) as client:
        assert {node.name for node in client.ListNodes(ListNodesRequest()).nodes_info} >= set(SITES)
        assert client.RegisterNode(RegisterNodeRequest(public_key=pem)).node_id
        assert client.StartRun(intruding_run()).run_id
    # The refusals below look for such lines and find none.
    assert control_calls(deployment) >= before + 3


@pytest.mark.parametrize("name", [*SITES, STRANGER])
def test_nobody_starts_a_run_or_registers_a_node_from_the_network(
    deployment: Deployment, keys: Keys, tmp_path: Path, name: str
) -> None:
    pem = security.create_client(Keys(tmp_path), "intruder").pem
    before = control_calls(deployment)
    caller = Caller(keys, name)
    assert caller.refusals(deployment.gate, pem) == [404, 404, 404]
    with caller.fleet(deployment.gate) as client, pytest.raises(httpx.HTTPStatusError) as problem:
        client.RegisterNode(RegisterNodeFleetRequest(public_key=pem))
    assert problem.value.response.status_code == 404
    assert control_calls(deployment) == before


@pytest.mark.parametrize("path", OUTSIDE)
def test_every_other_path_is_refused(deployment: Deployment, north: Caller, path: str) -> None:
    before = control_calls(deployment)
    assert north.post(deployment.gate, path, north.headers()).status_code == 404
    assert control_calls(deployment) == before


@pytest.mark.parametrize("head", TRICKS)
def test_no_spelling_of_a_path_gets_through(deployment: Deployment, north: Caller, head: str) -> None:
    before = control_calls(deployment)
    assert north.raw(deployment.gate, head).split()[1] in (b"400", b"403", b"404", b"405")
    assert control_calls(deployment) == before


def test_the_superlink_listens_on_loopback_only(deployment: Deployment) -> None:
    port = f":{int(deployment.control.split(':')[1]):04X}"
    listening = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[1].endswith(port) and line.split()[3] == "0A"
    ]
    assert listening == [f"0100007F{port}"]


def test_the_sender_must_be_registered_and_sign(deployment: Deployment, north: Caller, keys: Keys) -> None:
    path = "/v1/fleet/pull-messages"
    body = PullMessagesRequest(node=Node(node_id=deployment.nodes["north"])).SerializeToString()

    def status(headers: dict[str, str]) -> tuple[int, str]:
        answer = north.post(deployment.gate, path, headers, body)
        return answer.status_code, answer.text

    assert status(north.headers())[0] == 200
    unsigned = north.headers()
    del unsigned["flwr-signature"]
    assert status(unsigned)[0] == 401
    assert status({"content-type": "application/protobuf"})[0] == 401
    code, text = status(Caller(keys, STRANGER).headers())
    assert code == 401
    assert "not registered" in text
    code, text = status(Caller(keys, STRANGER).headers(public="north"))
    assert code == 401
    assert "signature" in text
    code, text = status(north.headers(seconds=20))
    assert code == 401
    assert "ahead" in text
    code, text = status(north.headers(seconds=-400))
    assert code == 401
    assert "behind" in text


def test_a_registered_site_cannot_act_for_another(deployment: Deployment, north: Caller) -> None:
    south = Node(node_id=deployment.nodes["south"])
    with north.fleet(deployment.gate) as client, pytest.raises(httpx.HTTPStatusError) as problem:
        client.PullMessages(PullMessagesRequest(node=south))
    assert problem.value.response.status_code == 401
    request = PushMessagesRequest(node=Node(node_id=deployment.nodes["north"]))
    request.messages_list.add().metadata.src_node_id = south.node_id
    with north.fleet(deployment.gate) as client, pytest.raises(httpx.HTTPStatusError) as problem:
        client.PushMessages(request)
    assert problem.value.response.status_code == 400
    assert "own name" in problem.value.response.text


def test_a_body_is_declared_and_of_bounded_size(deployment: Deployment, north: Caller) -> None:
    path = "/v1/fleet/push-object"

    def parts() -> object:
        yield b"1"

    context = ssl.create_default_context(cafile=str(deployment.keys.authority))
    with httpx.Client(verify=context, trust_env=False) as client:
        url = f"https://{deployment.gate}{path}"
        assert client.post(url, headers=north.headers(), content=parts()).status_code == 411
    head = f"POST {path} HTTP/1.1\r\nX-Filler: 1"
    huge = head.replace("X-Filler: 1", f"Content-Length: {MOST_BYTES + 1}")
    assert north.raw(deployment.gate, huge).split()[1] in (b"400", b"413")
    twice = f"POST {path} HTTP/1.1\r\nflwr-public-key: eA=="
    assert north.raw(deployment.gate, twice).split()[1] == b"400"


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: {size}\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: {size}",
        "Transfer-Encoding: xchunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: {size}",
        "Content-Length: 5",
    ],
)
def test_no_request_hides_in_the_body_of_another(deployment: Deployment, north: Caller, framing: str) -> None:
    """The SuperLink never takes what lies in or behind the body of a permitted request for a request."""
    before = control_calls(deployment)
    hidden = f"POST /v1/control/list-nodes HTTP/1.1\r\nHost: {deployment.gate}\r\nContent-Length: 0\r\n\r\n"
    body = f"0\r\n\r\n{hidden}"
    signed = "\r\n".join(f"{name}: {value}" for name, value in north.headers().items())
    head = f"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: {deployment.gate}\r\n{signed}\r\n"
    north.send(deployment.gate, f"{head}{framing.format(size=len(body))}\r\n\r\n{body}".encode())
    assert control_calls(deployment) == before


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
    signed = "\r\n".join(f"{name}: {value}" for name, value in north.headers().items())
    for call in ("push-object", "push-messages"):
        head = f"POST /v1/fleet/{call} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n{signed}\r\n\r\n"
        north.send(deployment.gate, head.encode() + b"begun", wait=False)
    node = Node(node_id=deployment.nodes["north"])
    with north.fleet(deployment.gate) as client:
        assert not client.PullMessages(PullMessagesRequest(node=node)).messages_list
    assert "Traceback" not in (deployment.folder / "gate.log").read_text()


def test_bodies_of_many_sizes_arrive_whole(deployment: Deployment, north: Caller) -> None:
    """The SuperLink parses each: a byte lost or added on the way would be an error of the payload."""
    node = Node(node_id=deployment.nodes["north"])
    for size in (0, 1, 65_535, 65_536, 1_000_003, 5 * 2**20):
        request = PullMessagesRequest(node=node, message_ids=["x" * size])
        with north.fleet(deployment.gate) as client:
            assert not client.PullMessages(request).messages_list


def test_removal_and_registration_take_effect_at_once(deployment: Deployment, keys: Keys) -> None:
    south = Caller(keys, "south")
    body = PullMessagesRequest(node=Node(node_id=deployment.nodes["south"])).SerializeToString()

    def status() -> int:
        return south.post(deployment.gate, "/v1/fleet/pull-messages", south.headers(), body).status_code

    assert status() == 200
    security.remove(keys, "south")
    try:
        assert status() == 401
        listed = keys.registered_file.read_text()
        keys.registered_file.write_text("not a list\n")
        assert status() == 401
        keys.registered_file.write_text(listed)
    finally:
        security.register(keys, keys.client_public_key("south"))
    assert status() == 200
    assert security.register_sites(deployment.control, keys) == deployment.nodes


def test_about_tells_a_registered_site_its_name(deployment: Deployment, north: Caller, keys: Keys) -> None:
    context = ssl.create_default_context(cafile=str(keys.authority))
    with httpx.Client(verify=context, trust_env=False) as client:
        url = f"https://{deployment.gate}{gate.ABOUT}"
        told = client.get(url, headers=north.headers()).json()
        assert told["site"] == "north"
        assert told["versions"] == versions()
        assert client.get(url, headers=Caller(keys, STRANGER).headers()).status_code == 401


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


def test_a_superlink_that_is_away_means_try_again(keys: Keys, north: Caller, tmp_path: Path) -> None:
    inner, outer = (f"127.0.0.1:{port}" for port in free_ports(2))
    ready = answers(f"https://{outer}/healthz", keys.authority)
    with running(gate.command(outer, inner, keys.folder), tmp_path / "gate.log", ready) as process:
        answer = north.post(outer, "/v1/fleet/pull-messages", north.headers())
        assert answer.status_code == 503
        process.terminate()
        assert process.wait(20) in (0, -15)
    log = (tmp_path / "gate.log").read_text()
    assert "does not answer" in log
    assert "Traceback" not in log


def test_insecure_still_closes_the_control_interface(tmp_path: Path) -> None:
    inner, outer = (f"127.0.0.1:{port}" for port in free_ports(2))
    host, port = inner.split(":")
    superlink = [program("flower-superlink"), "--insecure", "--host", host, "--port", port]
    superlink += ["--isolation", "process", "--disable-runtime-dependency-installation"]
    with (
        running(superlink, tmp_path / "superlink.log", answers(f"http://{inner}/health"), home=tmp_path),
        running(gate.command(outer, inner, None), tmp_path / "gate.log", answers(f"http://{outer}/healthz")),
        httpx.Client(trust_env=False) as client,
    ):
        assert client.post(f"http://{outer}/v1/control/list-nodes").status_code == 404
        supernode = [program("flower-supernode"), "--insecure", "--superlink", outer, "--host", "127.0.0.1"]
        supernode += ["--port", str(free_ports(1)[0]), "--isolation", "process"]
        log = tmp_path / "supernode.log"
        with running(supernode, log, lambda: "SuperNode ID" in log.read_text(), home=tmp_path):
            pass
