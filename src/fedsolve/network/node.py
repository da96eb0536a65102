"""A node in one process: speaks Flower's Fleet API to a SuperLink and answers with a participant.

Flower's own SuperNode looks for messages every three seconds and starts a fresh process for each, which
runs the code that the server sent. This one looks several times a second, keeps its data and the model
so far in memory, opens no port, and runs nothing but the fedsolve that is installed here: the bundle of
code that comes with a run is never fetched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import container
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.network import require_flower, validity
from fedsolve.network.answering import Answerer
from fedsolve.network.wire import LARGEST, assemble, record

HEARTBEAT = 10
"""Seconds between signs of life; after two without one the server counts a node as gone. Flower's least."""

_log = logging.getLogger("fedsolve")

_NOT_YET = "Failed to activate SuperNode"
_EAGER, _IDLE = 0.1, 1.0
_EAGER_FOR = 120.0
_LONGEST_PAUSE = 5.0


@dataclass(frozen=True)
class Connection:
    """Where the server is, and what proves who we are.

    address: HOST:PORT. authority: file of the certificate authority; None only together with `insecure`.
    key:     file of this site's private key; without one the node registers itself, which only an
             insecure server allows.
    """

    address: str
    authority: Path | None = None
    key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.insecure and (self.authority is not None or self.key is not None):
            raise DataError("keys are of no use without TLS: leave out the keys, or --insecure.")
        if not self.insecure and self.authority is None:
            raise DataError("a secure connection needs the authority's certificate (ca.crt).")


class FleetNode:
    """Connects, answers until stopped, and connects again when the server was away.

    state: folder that remembers which node this was. A SuperLink refuses a node that started anew as long
           as it counts the earlier one as alive; with its number the node signs itself off first.
    """

    def __init__(
        self,
        answerer: Answerer,
        connection: Connection,
        *,
        state: Path | None = None,
        tell: Callable[[str], None] | None = None,
        connected: Callable[[], None] | None = None,
        largest: int = LARGEST,
    ) -> None:
        """connected: called when a connection was made."""
        require_flower()
        self._connected = connected or (lambda: None)
        self._remembered = None if state is None else state / "node-id"
        self._answerer = answerer
        self._connection = connection
        self._tell = tell or (lambda text: None)
        self._largest = largest
        self._stopped = threading.Event()
        self._keys = _load_keys(connection.key)

    def stop(self) -> None:
        """End after the answer under way; safe to call from a signal handler or another thread."""
        self._stopped.set()

    def serve(self, once: bool = False) -> None:
        """Answer until stopped. once: raise instead of trying again when the server cannot be reached."""
        pause, announced = 0.5, ""
        while not self._stopped.is_set():
            try:
                self._session()
                pause, announced = 0.5, ""
            except _Refused:
                raise
            except _Lost as problem:
                if once:
                    raise CohortError(str(problem)) from problem
                if str(problem) != announced:
                    announced = str(problem)
                    self._tell(f"{problem} Trying again.")
                if problem.was_connected:
                    pause = 0.5
                self._stopped.wait(pause)
                pause = min(_LONGEST_PAUSE, pause * 1.5)

    def _session(self) -> None:
        """From activation to the loss of the connection, or to the stop."""
        client = self._client()
        try:
            node = self._activate(client)
            self._tell(f"connected to {self._connection.address}")
            self._connected()
            lost = threading.Event()
            beats = threading.Thread(target=self._beat, args=(client, node, lost), daemon=True)
            beats.start()
            try:
                self._answer_all(client, node, lost)
            except _Lost as problem:
                problem.was_connected = True
                raise
            finally:
                lost.set()
                if self._stopped.is_set():
                    self._leave(client, node)
        finally:
            client.close()

    def _client(self) -> Any:
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        authority = self._connection.authority
        return FleetHttpClient.from_server_address(
            self._connection.address,
            self._connection.insecure,
            None if authority is None else str(authority),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(*self._keys),
            ],
        )

    def _activate(self, client: Any) -> Any:
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        public = public_key_to_bytes(self._keys[1])
        self._sign_off(client)
        if self._connection.key is None:
            try:
                client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
            except Exception as problem:
                # Registered before the connection broke; whether that holds shows in the next call.
                if _status(problem) is None:
                    raise self._explained(problem) from problem
        try:
            response = client.ActivateNode(
                ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT)
            )
        except Exception as problem:
            raise self._explained(problem) from problem
        if self._remembered is not None:
            container.write_atomically(self._remembered, str(response.node_id).encode())
        return Node(node_id=response.node_id)

    def _sign_off(self, client: Any) -> None:
        """End what is left of an earlier process of this node."""
        from flwr.proto.node_pb2 import Node

        if self._remembered is not None and self._remembered.exists():
            number = self._remembered.read_bytes().strip()
            if number.isdigit() and int(number) < 1 << 64:  # else it is damaged, and as good as none
                self._leave(client, Node(node_id=int(number)))

    def _beat(self, client: Any, node: Any, lost: threading.Event) -> None:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT)
        while not lost.wait(HEARTBEAT / 2):
            try:
                if not client.SendNodeHeartbeat(request).success:
                    lost.set()
            except Exception as problem:
                # A missed beat is harmless; a server that does not know us any more is not.
                if _status(problem) in (401, 403, 404):
                    lost.set()

    def _answer_all(self, client: Any, node: Any, lost: threading.Event) -> None:
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        pause, active = _EAGER, time.monotonic()
        while not self._stopped.is_set():
            if lost.is_set():
                raise _Lost("the server does not know this node any more.")
            try:
                response = client.PullMessages(PullMessagesRequest(node=node))
            except Exception as problem:
                raise self._explained(problem) from problem
            if response.messages_list:
                self._try_answer(client, node, response.messages_list[0], response.message_object_trees[0])
                pause, active = _EAGER, time.monotonic()
                continue
            if time.monotonic() - active > _EAGER_FOR:
                pause = min(_IDLE, pause * 1.2)
            self._stopped.wait(pause)

    def _try_answer(self, client: Any, node: Any, asked: Any, tree: Any) -> None:
        """Answer a message; one whose run has ended meanwhile is dropped."""
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

        from fedsolve.network.link import Gone

        try:
            self._answer(client, node, asked, tree)
        except (Gone, ObjectPushError) as problem:
            self._tell(f"an answer is not wanted any more ({problem})")
        except Exception as problem:
            import httpx

            # A finished run answers 403 here; whether the server still knows us shows at the next look.
            known = isinstance(problem, httpx.HTTPError | OSError | _Lost | _Refused)
            if not known and _status(problem) is None:
                _log.exception("a message could not be answered")
                self._tell(f"a message could not be answered ({type(problem).__name__}: {problem})")
                self._stopped.wait(_EAGER)
                return
            if _status(problem) in (None, 401, 503):
                raise self._explained(problem) from problem
            self._tell(f"an answer is not wanted any more ({_detail(problem)})")

    def _answer(self, client: Any, node: Any, asked: Any, tree: Any) -> None:
        from flwr.app import Message
        from flwr.common.serde import message_from_proto
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        from fedsolve.network.link import Puller

        run = asked.metadata.run_id
        pull = Puller(client, node, run, lambda done, size: not self._stopped.is_set())
        try:
            note, payload = assemble(tree, pull, self._largest)
        except TermError as problem:
            note, payload = {"damaged": str(problem)}, np.empty(0, dtype=np.uint8)
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=asked.metadata.message_id)
        )
        content, answer = self._answerer.reply(note, payload)
        reply = Message(record(content, answer), reply_to=message_from_proto(asked))
        self._push(client, node, reply)

    def _push(self, client: Any, node: Any, reply: Any) -> None:
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import push_objects

        run = reply.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            response = client.PushMessages(
                PushMessagesRequest(
                    node=node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                )
            )
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(client.PushObject, node, run, response.session_id),
                object_ids_to_push=set(response.objects_to_push),
            )

    def _leave(self, client: Any, node: Any) -> None:
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        except Exception:
            return  # the server will notice by itself

    def _explained(self, problem: Exception) -> Exception:
        """The problem as one that a person understands: worth trying again, or not."""
        import httpx

        address = self._connection.address
        if isinstance(problem, _Lost | _Refused):
            return problem
        status = _status(problem)
        if status in (401, 403):
            if self._connection.key is None:
                return _Refused(f"{address} refuses this node: it has no key. Ask for one ('fedsolve keys').")
            return _Refused(
                f"{address} refuses this node ({status}): the key {self._connection.key} is not registered "
                f"there, or the clocks differ by minutes. {_detail(problem)}"
            )
        if status == 412 and _NOT_YET not in _detail(problem):
            return _Refused(f"{address} refuses this node: {_detail(problem)}")
        if status == 412:
            return _Lost(f"{address} still counts an earlier process of this node as alive.")
        if isinstance(problem, httpx.ConnectError) and "certificate" in str(problem).lower():
            host = address.rpartition(":")[0].strip("[]")
            what = validity.remedy(str(problem), host, self._connection.authority)
            words = f"{address} does not prove that it is the server ({problem}). {what}"
            # A certificate that has expired is renewed over there, and this site need not be started again.
            return _Lost(words) if what == validity.RENEW else _Refused(words)
        if status is not None:
            return _Lost(f"{address} answered {status}: {_detail(problem)}")
        if isinstance(problem, httpx.HTTPError | OSError):
            return _Lost(f"{address} cannot be reached ({type(problem).__name__}: {problem}).")
        return problem


class _Lost(Exception):
    """The connection is gone or was not there; worth trying again."""

    was_connected = False


class _Refused(CohortError):
    """The server refuses us; trying again does not help."""


def _status(problem: Exception) -> int | None:
    response = getattr(problem, "response", None)
    return None if response is None else int(response.status_code)


def _detail(problem: Exception) -> str:
    from flwr.supercore.error import FlowerError

    text = getattr(problem, "response", None)
    known = None if text is None else FlowerError.from_json(text.text)
    return str(problem) if known is None else f"{known.message} (code {known.code})"


def _load_keys(path: Path | None) -> tuple[Any, Any]:
    """The node's key pair; a new one for a node without a key of its own."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    if path is None:
        private = ec.generate_private_key(ec.SECP384R1())
        return private, private.public_key()
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as problem:
        raise DataError(f"cannot read the key {path}: {problem.strerror or problem}.") from problem
    except (ValueError, TypeError) as problem:
        raise DataError(f"{path} is not a private key of OpenSSH's form ({problem}).") from problem
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DataError(f"{path} is not an elliptic-curve key. Make one with 'fedsolve keys'.")
    return key, key.public_key()
