"""The gate: all that the network reaches of a server.

    site ──TLS──► gate (network, one port) ◄── pipes and files ──► fedsolve server

It keeps the mailbox: sites fetch messages here and bring answers, which it writes to disk. The server starts
it, and talks to it over the pipes between them: nothing else on the machine listens, and no other account of
it can take part.

Who calls is settled by TLS 1.3 before anything is read: the server shows a certificate of its authority, and
the site one that its own key has signed. The handshake of a key that is not on the list of registered sites
fails. The list is read again when it changes: a new site comes in at once, and a call of one that was removed
is refused, on an open connection too.

For each call the gate checks method and path, that the site is on the list now, and the size, which must be
declared, and for an answer below what the server said that it takes; then the body is read.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
import re
import resource
import secrets
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedsolve import version
from fedsolve.errors import CohortError, FedsolveError, explained
from fedsolve.network import calls, versions
from fedsolve.network.certificates import anchors, load_certificate, load_key, public_pem
from fedsolve.network.doorway import Doorway
from fedsolve.network.keyfolder import Keys, Site
from fedsolve.network.mailbox import Caller, Mailbox, Refusal
from fedsolve.network.parcels import PIECE
from fedsolve.network.security import WatchedFile
from fedsolve.watching import log_lines

PER_SITE = 8
"""Connections that a site may have; one more closes its oldest."""

WAIT = 10.0
"""Seconds after which a call for a message is answered although there is none."""

_WORD = re.compile(r"[0-9a-f]{32}")
STUCK = 60.0
"""Seconds in which the next piece of a body must come."""

_SMALL = 1 << 16
_LOG_AGAIN = 60.0
_MOST_LINES = 1000
_log = logging.getLogger("fedsolve.gate")

SiteCall = Callable[[Request, Caller], Awaitable[Response]]


def register(keys: Keys) -> WatchedFile[dict[bytes, Site]]:
    """The registered sites by public key, read again whenever the file changes."""

    def read() -> dict[bytes, Site]:
        sites = keys.registered.sites()
        _log.info("registered sites: %s", ", ".join(sorted(sites)) or "none")
        return {site.pem: site for site in sites.values()}

    def failed(problem: Exception, _: object) -> dict[bytes, Site]:
        _log.error("nobody is let in: %s", problem)  # the list of before would keep in a site just removed
        return {}

    return WatchedFile(keys.registered.path, read, failed)


class Gate:
    """The gate in front of a mailbox; without keys, in plain HTTP and for whoever comes."""

    def __init__(self, mailbox: Mailbox, keys: Keys | None, door: Doorway) -> None:
        """door: is told whose connections are known."""
        self.mailbox, self._door = mailbox, door
        self._sites = None if keys is None else register(keys)
        if keys is not None:
            unknown = "it did not show the certificate of a registered site"
            door.refused = lambda host: self._once(f"refused {host}: {unknown}", sender=host)
        self._connections: dict[str, dict[Any, asyncio.Transport]] = {}
        self._logged: dict[str, float] = {}
        self._versions = versions()

    def app(self) -> Starlette:
        def route(verb: str, path: str, call: SiteCall) -> Route:
            async def answer(request: Request) -> Response:
                return await call(request, self._caller(request))

            return Route(path, answer, methods=[verb])

        unknown = Refusal(404, "this call is not for the network.")
        app = Starlette(
            routes=[
                route("GET", calls.ABOUT, self._about),
                route("POST", calls.HELLO, self._hello),
                route("POST", calls.PULL, self._pull),
                route("POST", calls.LEAVE, self._leave),
                route("POST", f"{calls.ANSWER}{{message:str}}", self._answer),
            ],
            exception_handlers={
                HTTPException: lambda request, _: self._refuse(request, unknown),
                Refusal: self._refuse,
                ClientDisconnect: lambda request, gone: Response(status_code=400),
            },
        )
        app.router.redirect_slashes = False
        return app

    def trust(self, context: ssl.SSLContext) -> None:
        """Let handshakes of registered sites succeed, at any time; calls of one removed are refused."""
        assert self._sites is not None
        sites, trusted = self._sites, set[bytes]()

        def trust_new(*_: object) -> None:
            if new := sites().keys() - trusted:
                context.load_verify_locations(cadata=anchors(new))
                trusted.update(new)

        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.num_tickets = 0
        context.sni_callback = trust_new

    def connected(self, connection: Any, transport: asyncio.Transport) -> bytes:
        """Enter a connection whose handshake is done; the public key (PEM) of who is at its other end."""
        shown = transport.get_extra_info("ssl_object")
        if shown is None or self._sites is None:
            return b""
        pem = public_pem(shown.getpeercert(True))
        if (site := self._sites().get(pem)) is not None:
            self._known(transport.get_extra_info("peername"))
            mine = self._connections.setdefault(site.name, {})
            if len(mine) >= PER_SITE:
                self._once(f"'{site.name}' has more than {PER_SITE} connections; its oldest is closed")
                mine.pop(next(iter(mine))).abort()
            mine[connection] = transport
        return pem

    def disconnected(self, connection: Any) -> None:
        for mine in self._connections.values():
            mine.pop(connection, None)

    def _known(self, place: Any) -> None:
        if place is not None:
            self._door.known(tuple(place[:2]))

    def _caller(self, request: Request) -> Caller:
        """Who makes this call; refused where nobody may."""
        wire, process = (request.headers.get(name, "") for name in (calls.WIRE, calls.PROCESS))
        if wire != str(version.WIRE):
            raise Refusal(
                412,
                f"this site speaks wire {wire[:20]!a}; the server speaks {version.WIRE} (fedsolve "
                f"{version.__version__}). Install the same version on both sides.",
                calls.OTHER_WIRE,
            )
        if not _WORD.fullmatch(process):
            raise Refusal(400, "the call does not say which process makes it.", "process")
        if self._sites is None:
            mark = request.headers.get(calls.SITE, "")
            if not _WORD.fullmatch(mark):
                raise Refusal(400, "this server is insecure: start the site with --insecure, too.", "site")
            self._known(request.client)
            return Caller(mark, None, process)
        site = self._sites().get(request.scope["state"]["key"])
        if site is None:
            raise Refusal(401, "this site is not registered at the server any more.", calls.UNREGISTERED)
        return Caller(site.name, site.name, process)

    async def _about(self, _: Request, caller: Caller) -> Response:
        about = {"site": caller.name, "wire": version.WIRE, "wait": WAIT}
        return JSONResponse({**about, "time": time.time(), "versions": self._versions})

    async def _hello(self, request: Request, caller: Caller) -> Response:
        self.mailbox.hole(caller)
        return await self._about(request, caller)

    async def _pull(self, request: Request, caller: Caller) -> Response:
        try:
            declared_size(request.headers, _SMALL)
            have = json.loads(b"".join([piece async for piece in _in_time(request)]))["have"]
            if not all(isinstance(each, str) and _WORD.fullmatch(each) for each in have):
                raise ValueError("not the names of messages")
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise Refusal(400, "what the site has already is not said.", "pull") from problem
        hole = self.mailbox.hole(caller)
        waiting = asyncio.ensure_future(self.mailbox.next(hole, have, WAIT))
        ended = asyncio.ensure_future(request.receive())
        await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, ended):
            task.cancel()
        try:
            post = await waiting
        except asyncio.CancelledError:
            self.mailbox.hung_up(hole)
            raise ClientDisconnect from None
        headers = {calls.DROPPED: ",".join(self.mailbox.dropped(hole, have))}
        if post is None:
            return Response(status_code=204, headers=headers)
        headers |= {calls.MESSAGE: post.id, calls.BODY: post.digest, "content-length": str(post.size)}
        try:
            if post.size <= PIECE:  # read in less time than a thread takes to begin
                return Response((self.mailbox.folder / post.file).read_bytes(), headers=headers)
            stream = await asyncio.to_thread(open, self.mailbox.folder / post.file, "rb")
        except FileNotFoundError:  # dropped at this moment
            return Response(status_code=204)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while piece := await asyncio.to_thread(stream.read, PIECE):
                    self.mailbox.alive(hole)
                    yield piece
            finally:
                stream.close()

        return StreamingResponse(pieces(), headers=headers)

    async def _answer(self, request: Request, caller: Caller) -> Response:
        hole = self.mailbox.hole(caller)
        post = self.mailbox.wanted(hole, request.path_params["message"])
        try:
            size = declared_size(request.headers, post.largest)
        except Refusal as refusal:
            self.mailbox.settle(hole, post, {"is": "failed", "why": str(refusal)})
            raise
        file = f"{post.id}.{secrets.token_hex(4)}"
        path = self.mailbox.folder / file
        try:
            with self.mailbox.uploading(hole, post):
                digest = await store(request, path, lambda done: self.mailbox.coming(hole, post, done, size))
            self.mailbox.wanted(hole, post.id)
        except OSError as problem:
            path.unlink(missing_ok=True)
            text = f"an answer cannot be written: {path.parent}: {problem.strerror or problem}. Make room."
            if self._once(text):
                self.mailbox.tell({"is": "trouble", "text": text})
            raise Refusal(507, "the server's disk takes no more; its operator must act.", "disk") from problem
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.mailbox.settle(hole, post, {"is": "answer", "file": file, "digest": digest})
        return JSONResponse({})

    async def _leave(self, _: Request, caller: Caller) -> Response:
        self.mailbox.place(self.mailbox.hole(caller), here=False)
        return JSONResponse({})

    def _refuse(self, request: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, Refusal)
        path = ascii(request.url.path[:80])[1:-1]
        # By sender and reason: a sender chooses its paths, and could fill the disk with them.
        sender = request.client.host if request.client else "?"
        text, topic = f"refused {sender} {request.method} {path}: {refusal}", f"{sender} {refusal.reason}"
        self._once(text, topic, sender=sender, path=path, status=refusal.status)
        # The rest of a refused body is not read, so the connection cannot be used again.
        document = {"code": refusal.status, "reason": refusal.reason, "detail": str(refusal)}
        return JSONResponse(document, refusal.status, {"connection": "close"})

    def _once(self, text: str, topic: str | None = None, **fields: Any) -> bool:
        """Log a line that would otherwise come with every call of a site: once a minute for each topic.

        There are at most `_MOST_LINES` in a minute, whoever sends from however many addresses.
        """
        topic = text if topic is None else topic
        now = time.monotonic()
        if now - self._logged.get(topic, -_LOG_AGAIN) < _LOG_AGAIN:
            return False
        if len(self._logged) >= _MOST_LINES:
            self._logged = {known: at for known, at in self._logged.items() if now - at < _LOG_AGAIN}
            if len(self._logged) >= _MOST_LINES:
                return False
        self._logged[topic] = now
        _log.warning("%s", text, extra={"fields": fields})
        return True


def connections(gate: Gate) -> Any:
    """The class of uvicorn's connections that tells this gate of them."""

    class SiteConnection(H11Protocol):  # type: ignore[misc, unused-ignore]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "key": gate.connected(self, transport)}

        def connection_lost(self, exc: Exception | None) -> None:
            gate.disconnected(self)
            super().connection_lost(exc)

    return SiteConnection


def until_gone(app: Any) -> Any:
    """An ASGI application whose answer to a sender that went away is dropped.

    Written to after its connection is lost, the TLS transport of Python 3.11 fails with AttributeError.
    """

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        gone = False

        async def sending(message: Any) -> None:
            nonlocal gone
            try:
                if not gone:
                    await send(message)
            except AttributeError:
                gone = True

        await app(scope, receive, sending)

    return answering


def declared_size(headers: Mapping[str, str], most: int) -> int:
    """The size of the body in bytes, from the headers; refused if it is not declared, or more than `most`."""
    declared = headers.get("content-length", "")
    if not declared.isdecimal():
        raise Refusal(411, "the size of the body must be declared.")
    if len(declared) > 20 or int(declared) > most:
        raise Refusal(413, f"{declared[:20]} bytes in one call; at most {most:,} are taken.", "size")
    return int(declared)


async def store(request: Request, path: Path, came: Callable[[int], None]) -> str:
    """Write a body to a new file; its SHA-256. came: is told how many bytes are there."""
    found, done, held = hashlib.sha256(), 0, bytearray()

    def write(data: bytes, flags: int) -> None:
        found.update(data)
        with open(os.open(path, os.O_WRONLY | flags, 0o600), "ab") as stream:
            stream.write(data)

    flags = os.O_CREAT | os.O_EXCL
    async for piece in _in_time(request):
        held += piece
        if len(held) >= PIECE:
            done += len(held)
            await asyncio.to_thread(write, bytes(held), flags)
            held.clear()
            flags = 0
            came(done)
    write(bytes(held), flags)  # the rest, in less time than a thread takes to begin
    return found.hexdigest()


async def _in_time(request: Request) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(STUCK):
                piece = await anext(stream, None)
        except TimeoutError as problem:
            raise Refusal(408, f"nothing of the body came for {STUCK:.0f} s.", "slow") from problem
        if piece is None:
            return
        yield piece


# ----------------------------------------------------------------------------------- as a process


class GateServer(uvicorn.Server):
    """uvicorn, which opens the mailbox when it listens, and ends with the process that started it."""

    def __init__(self, config: uvicorn.Config, mailbox: Mailbox, door: Doorway, parent: int) -> None:
        super().__init__(config)
        self._mailbox, self._door, self._parent = mailbox, door, parent
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: Any = None) -> None:
        self._door.listen()
        self._mailbox.tell({"is": "open"})  # before anybody is let in, and told of
        await super().startup(sockets)
        threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), daemon=True).start()
        watches = self._mailbox.keep_watch(), self._door.keep_time(), self._keep_parent(), self._report()
        self._tasks = [asyncio.create_task(watch) for watch in watches]

    async def shutdown(self, sockets: Any = None) -> None:
        self._mailbox.close()
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear what the server says, until it ends."""
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(self._mailbox.take, json.loads(line))
        self._close()

    def _close(self) -> None:
        _log.info("the server process is gone; the gate closes.")
        self.should_exit = True

    async def _keep_parent(self) -> None:
        # A process that the server forked may hold the pipe open when the server is killed.
        while os.getppid() == self._parent:
            await asyncio.sleep(0.25)
        self._close()

    async def _report(self) -> None:
        seen = 0
        while True:
            await asyncio.sleep(_LOG_AGAIN)
            if (now := self._door.turned_away.total()) > seen:
                _log.warning("connections of strangers closed so far: %s", dict(self._door.turned_away))
                seen = now


def main(listen: str, mail: str, parent: str, folder: str | None = None) -> int:
    """Run the gate until it is told to stop or its parent is gone. folder: of keys."""
    log_lines.begin("gate", logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    keys = None if folder is None else Keys(folder)
    if keys is not None:
        load_certificate(keys.authority)
        load_certificate(keys.server_certificate)
        load_key(keys.server_key)
    remedy = "Is another server running? Stop it, or choose another --listen."
    with explained("it cannot listen there", remedy, CohortError, OSError):
        door = Doorway(*calls.address(listen))
    # What libraries print goes to the log: the pipe to the server holds events, and nothing else.
    told = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)

    def tell(event: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the server is gone; the gate closes by itself
            told.write(json.dumps(event).encode() + b"\n")

    mailbox = Mailbox(Path(mail), tell)
    gate = Gate(mailbox, keys, door)
    config = uvicorn.Config(
        until_gone(gate.app()),
        http=connections(gate),
        loop="asyncio",  # which accepts connections through the doorway,
        backlog=32,  # so many at a time: the closed ones are taken apart before more come in
        ssl_certfile=None if keys is None else str(keys.server_certificate),
        ssl_keyfile=None if keys is None else str(keys.server_key),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
        ws="none",
        access_log=False,
        server_header=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=75,  # longer than sites keep theirs
        timeout_graceful_shutdown=2,
        proxy_headers=False,
    )
    config.load()
    if config.ssl is not None:
        gate.trust(config.ssl)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server = GateServer(config, mailbox, door, int(parent))
    gc.freeze()  # what is there now stays: collections look at connections only
    _log.info("open, %s", "INSECURE" if keys is None else "TLS")
    server.run(sockets=[door])
    return 0 if server.started else 1


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except FedsolveError as problem:
        _log.error("%s", problem)
        sys.exit(1)
    except KeyboardInterrupt:
        pass
