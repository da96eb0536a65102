"""The gate: all that the network reaches of a SuperLink, which itself listens on loopback only.

Flower serves three interfaces on one port: the one that nodes use (Fleet), the one that starts runs and
registers nodes (Control) and the one that apps use (Runtime). Control has no authentication in the open
edition. The gate stands between: it forwards the calls of `NODE_CALLS` and nothing else, each to a fixed
path, and only for senders whose signature belongs to a registered site. A call it does not know is refused,
so a new version of Flower can break the gate but not open it.

    site ──TLS──► gate (network, one port) ──TLS──► SuperLink (127.0.0.1) ◄── fedsolve server

What the gate checks, before a body is read:

* the call: method and path, in the list;
* the sender: the public key in the headers is on the list of registered sites, which is read again when it
  changes; the signature is by that key, over a time stamp that is not old;
* the size, which must be declared and below `MOST_BYTES`;

and then, where a reply is announced, that a node speaks in its own name only, which Flower does not check. A
connection on which no such call comes is closed soon (`doorway`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsolve import log_lines
from fedsolve.errors import DataError, FedsolveError
from fedsolve.network.admission import (
    Quota,
    Refusal,
    Register,
    authenticate,
    declared_size,
    own_name_only,
    single,
)
from fedsolve.network.certificates import load_certificate, load_key
from fedsolve.network.doorway import Doorway
from fedsolve.network.keyfolder import Keys
from fedsolve.network.versions import versions

if TYPE_CHECKING:
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PREFIX = "/v1/fleet/"
NODE_CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
OPEN_CALLS = ("register-node", "unregister-node")
"""With --insecure nodes have no registered keys and announce themselves."""

HEALTH = "/healthz"
ABOUT = "/v1/fedsolve/about"

_LOG_AGAIN = 60.0
_MOST_LINES = 1000
_log = logging.getLogger("fedsolve.gate")


class Gate:
    """The gate in front of the SuperLink at `upstream` (host:port); without keys, in plain HTTP."""

    def __init__(
        self, upstream: str, keys: Keys | None, door: Doorway | None = None, quota: Path | None = None
    ) -> None:
        """door: is told whose connections are known. quota: file that says how much sites may push."""
        self._quota = Quota(quota)
        self._upstream = upstream
        self._door = door
        self._keys = keys
        self._register = None if keys is None else Register(keys)
        self._calls = NODE_CALLS if keys is not None else (*NODE_CALLS, *OPEN_CALLS)
        self._logged: dict[str, float] = {}
        self._here: set[str] = set()
        self._client: httpx.AsyncClient

    def app(self) -> Starlette:
        """The gate as an ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
        routes = [
            Route(HEALTH, self._health, methods=["GET"]),
            Route(ABOUT, self._about, methods=["GET"]),
            Route(PREFIX + "{call:str}", self._node_call, methods=["POST"]),
            Route("/{rest:path}", self._anything, methods=every),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        import httpx

        secure = self._keys is not None
        verify: ssl.SSLContext | bool = False
        if self._keys is not None:
            verify = ssl.create_default_context(cafile=str(self._keys.authority))
        # Proxies of the environment are for the outside; this hop never leaves the machine.
        async with httpx.AsyncClient(
            base_url=f"{'https' if secure else 'http'}://{self._upstream}",
            verify=verify,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(120.0, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        ) as self._client:
            _log.info("forwarding node calls to %s, %s", self._upstream, "TLS" if secure else "INSECURE")
            yield

    async def _health(self, _: Request) -> Response:
        return _json({"gate": "ok", "time": time.time()})

    async def _about(self, request: Request) -> Response:
        try:
            name = self._admit(request)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        return _json({"site": name, "time": time.time(), "versions": versions()})

    async def _anything(self, request: Request) -> Response:
        return self._refuse(request, Refusal(404, "this call is not for the network."))

    async def _node_call(self, request: Request) -> Response:
        from starlette.requests import ClientDisconnect

        call = request.path_params["call"]
        if call not in self._calls:
            return await self._anything(request)
        try:
            name = self._admit(request)
            size = declared_size(request.headers)
            if call.startswith("push-"):
                self._quota.count(name, size)
            content: Any = request.stream()
            if call == "push-messages":
                content = await request.body()
                own_name_only(content)
            return await self._forward(request, call, name, size, content)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        except ClientDisconnect:
            return _json({"code": 400, "detail": "the sender went away."}, 400)

    async def _forward(self, request: Request, call: str, name: str, size: int, content: Any) -> Response:
        """The SuperLink's answer to the call; the path is ours, whatever the sender wrote."""
        import httpx
        from starlette.responses import StreamingResponse

        headers = {
            key: value
            for key, value in single(request.headers.items()).items()
            if key.startswith("flwr-") or key in ("content-type", "accept")
        }
        headers["content-length"] = str(size)
        outgoing = self._client.build_request("POST", f"{PREFIX}{call}", headers=headers, content=content)
        try:
            answer = await self._client.send(outgoing, stream=True)
        except httpx.HTTPError as problem:
            self._once(f"the SuperLink at {self._upstream} does not answer ({type(problem).__name__})")
            return _json({"code": 503, "detail": "the server is not ready; try again."}, 503)
        _log.debug("%s %s, %s bytes: %s", name, call, size, answer.status_code)
        if answer.status_code >= 400:
            self._once(f"{name} {call}: the SuperLink answered {answer.status_code}")

        async def body() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        kept = {k: v for k, v in answer.headers.items() if k in _ANSWER_HEADERS or k.startswith("flwr-")}
        return StreamingResponse(body(), answer.status_code, headers=kept)

    def _admit(self, request: Request) -> str:
        """The name of the site that signed the call."""
        if self._register is None:
            self._vouch(request)
            return "(insecure)"
        site = authenticate(single(request.headers.items()), self._register)
        self._vouch(request)
        if site.name not in self._here:
            self._here.add(site.name)
            fields = {"site": site.name, "sender": _sender(request)}
            _log.info("site %(site)s is here, from %(sender)s", fields, extra={"fields": fields})
        return site.name

    def _vouch(self, request: Request) -> None:
        if self._door is not None and request.client is not None:
            self._door.known((request.client.host, request.client.port))

    def _refuse(self, request: Request, refusal: Refusal) -> Response:
        path = ascii(request.url.path[:80])[1:-1]
        # By sender and reason: a sender chooses its paths, and could fill the disk with them.
        sender = _sender(request)
        self._once(
            f"refused {sender} {request.method} {path}: {refusal}",
            f"{sender} {refusal.reason}",
            sender=sender,
            path=path,
            status=refusal.status,
        )
        code, status = refusal.status, refusal.status
        if status == 401 and request.url.path == f"{PREFIX}activate-node":
            code, status = _NOT_ACTIVATED
        # The rest of a refused body is not read, so the connection cannot be used again.
        return _json({"code": code, "detail": str(refusal)}, status, {"connection": "close"})

    def _once(self, text: str, topic: str | None = None, **fields: Any) -> None:
        """Log a line that would otherwise come with every poll of a node: once a minute for each topic.

        There are at most `_MOST_LINES` in a minute, whoever sends from however many addresses.
        """
        topic = text if topic is None else topic
        now = time.monotonic()
        if now - self._logged.get(topic, -_LOG_AGAIN) < _LOG_AGAIN:
            return
        if len(self._logged) >= _MOST_LINES:
            self._logged = {known: at for known, at in self._logged.items() if now - at < _LOG_AGAIN}
            if len(self._logged) >= _MOST_LINES:
                return
        self._logged[topic] = now
        _log.warning("%s", text, extra={"fields": fields})


_ANSWER_HEADERS = ("content-type", "content-length")
_NOT_ACTIVATED = (2004, 412)
"""Code and status with which Flower tells a node that is starting why it is refused. On 401 its nodes stop
without a word, which suits only a site that was removed."""


def until_gone(app: Any) -> Any:
    """An ASGI application whose answer to a sender that went away is dropped.

    Written to after its connection is lost, the TLS transport of Python 3.11 fails with AttributeError.
    """

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        gone = False

        async def sending(message: Any) -> None:
            nonlocal gone
            if gone:
                return
            try:
                await send(message)
            except AttributeError as problem:
                gone = True
                _log.debug("an answer was dropped: its reader is gone (%s)", problem)

        await app(scope, receive, sending)

    return answering


def _json(document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(document, status, headers)


def _sender(request: Request) -> str:
    return request.client.host if request.client else "?"


# ----------------------------------------------------------------------------------- as a process


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [ADDRESS]:PORT."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DataError(f"{text!r} is not an address. Give HOST:PORT, for example 0.0.0.0:9092.")
    return host, int(port)


def command(
    listen: str,
    upstream: str,
    keys: str | os.PathLike[str] | None,
    *,
    quota: Path | None = None,
    verbose: bool = False,
) -> list[str]:
    """The command line of a gate that ends when the calling process does; its log goes to stderr."""
    address(listen), address(upstream)
    line = [sys.executable, "-m", "fedsolve.network.gate", "--listen", listen]
    line += ["--upstream", upstream, "--parent", str(os.getpid())]
    line += [] if quota is None else ["--quota", str(quota.absolute())]
    line += ["--insecure"] if keys is None else ["--keys", str(Path(keys).absolute())]
    return [*line, "--verbose"] if verbose else line


def main(words: list[str] | None = None) -> int:
    """Run the gate until it is told to stop or its parent is gone."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="fedsolve-gate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--upstream", required=True, metavar="HOST:PORT")
    parser.add_argument("--keys", metavar="DIR")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--parent", type=int, metavar="PID")
    parser.add_argument("--quota", type=Path, metavar="FILE")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(words)
    if options.insecure == (options.keys is not None):
        parser.error("give either --keys or --insecure")
    log_lines.begin("gate", logging.DEBUG if options.verbose else logging.INFO)
    for noisy in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    keys = None if options.insecure else Keys(options.keys)
    if keys is not None:
        load_certificate(keys.authority)
        load_certificate(keys.server_certificate)
        load_key(keys.server_key)
    door = Doorway.at(*address(options.listen))
    config = uvicorn.Config(
        until_gone(Gate(options.upstream, keys, door, options.quota).app()),
        loop="asyncio",  # which accepts connections through the doorway,
        backlog=32,  # so many at a time: the closed ones are taken apart before more come in
        ssl_certfile=None if keys is None else str(keys.server_certificate),
        ssl_keyfile=None if keys is None else str(keys.server_key),
        ws="none",
        access_log=False,
        server_header=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=5,
        proxy_headers=False,
    )
    config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    server = uvicorn.Server(config)
    gc.freeze()  # what is there now stays: collections look at connections only
    asyncio.run(_serve(server, door, options.parent))
    return 0 if server.started else 1


async def _serve(server: Any, door: Doorway, parent: int | None) -> None:
    async def watch() -> None:
        while parent is None or os.getppid() == parent:
            await asyncio.sleep(0.5)
        _log.info("the server process is gone; the gate closes.")
        os.kill(os.getpid(), signal.SIGTERM)

    async def report() -> None:
        seen = 0
        while True:
            await asyncio.sleep(_LOG_AGAIN)
            if (now := door.turned_away.total()) > seen:
                _log.warning("connections of strangers closed so far: %s", dict(door.turned_away))
                seen = now

    tasks = [asyncio.create_task(task) for task in (watch(), door.keep_time(), report())]
    try:
        await server.serve(sockets=[door])
    finally:
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    try:
        code = main()
    except FedsolveError as problem:
        sys.exit(f"error: {problem}")
    except (KeyboardInterrupt, SystemExit) as stop:
        code = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 0
    sys.exit(code)
