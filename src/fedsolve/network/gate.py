"""The gate: all that the network reaches of a server.

    site ──TLS──► gate (network, one port) ◄── pipes and files ──► fedsolve server

It keeps the mailbox: sites fetch messages here and bring answers, which it writes to disk. The server starts
it, and talks to it over the pipes between them: nothing else on the machine listens, and no other account of
it can take part. A site says hello once, signed with its key, and makes every further call under the key of
that session (`handshake`); a call for a message is answered when there is one, or after `WAIT` seconds.

What the gate checks, before a body is read:

* the call: method and path, in the list;
* the sender: a session of a site that is on the list of registered sites now, and an HMAC over the call, its
  body, this server and a counter that was not used before;
* the size, which must be declared, and for an answer below what the server said that it takes;

and then that the body is the one the HMAC was made for. A connection on which no such call comes is closed
soon (`doorway`). What takes long, signatures and files, is done in threads, beside the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import logging
import os
import re
import secrets
import signal
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedsolve import formats, log_lines
from fedsolve.errors import DataError, FedsolveError
from fedsolve.network.admission import Refusal, Register, declared_size, single
from fedsolve.network.bodies import store, whole
from fedsolve.network.certificates import load_certificate, load_key
from fedsolve.network.doorway import Doorway
from fedsolve.network.handshake import (
    ABOUT,
    ANSWER,
    BODY,
    DROPPED,
    GREETING,
    HELLO,
    LEAVE,
    MESSAGE,
    PULL,
    identity,
)
from fedsolve.network.keyfolder import Keys
from fedsolve.network.mailbox import Mailbox
from fedsolve.network.parcels import PIECE
from fedsolve.network.sessions import Sessions, SiteSession, other_wire
from fedsolve.network.versions import versions

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HEALTH = "/healthz"
CALLS = (GREETING, HELLO, PULL, ANSWER, LEAVE)
"""What sites call, besides the two that answer whoever looks for trouble."""

FLOWER = "/v1/fleet/"
"""Where sites call that speak the wire of before: Flower's."""

WAIT = 10.0
"""Seconds after which a call for a message is answered although there is none."""

_MESSAGE = re.compile(r"[0-9a-f]{32}")
_LOG_AGAIN = 60.0
_MOST_LINES = 1000
_log = logging.getLogger("fedsolve.gate")

SiteCall = Callable[["Request", SiteSession, str], Awaitable["Response"]]


class Gate:
    """The gate in front of a mailbox; without keys, in plain HTTP and for whoever comes."""

    def __init__(self, mailbox: Mailbox, keys: Keys | None, door: Doorway | None = None) -> None:
        """door: is told whose connections are known."""
        self.mailbox = mailbox
        self._door = door
        self._register = None if keys is None else Register(keys)
        certificate = None if keys is None else load_certificate(keys.server_certificate)
        self._sessions = Sessions(identity(_der(certificate)), self._register)
        self._logged: dict[str, float] = {}
        self._here: set[str] = set()

    def app(self) -> Starlette:
        """The gate as an ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
        calls = {PULL: self._pull, f"{ANSWER}{{message:str}}": self._answer, LEAVE: self._leave}
        routes = [
            Route(HEALTH, self._health, methods=["GET"]),
            Route(ABOUT, self._about, methods=["GET"]),
            Route(GREETING, self._greeting, methods=["GET"]),
            Route(HELLO, self._hello, methods=["POST"]),
            *(Route(path, partial(self._call, call), methods=["POST"]) for path, call in calls.items()),
            Route(FLOWER + "{call:str}", self._earlier, methods=["POST"]),
            Route("/{rest:path}", self._anything, methods=every),
        ]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(self.mailbox.keep_watch())
        _log.info("open, %s", "INSECURE" if self._register is None else "TLS")
        yield
        watch.cancel()

    # -- for whoever looks for trouble -----------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        return _json({"gate": "ok", "time": time.time()})

    async def _about(self, request: Request) -> Response:
        try:
            name = await asyncio.to_thread(self._sessions.known, single(request.headers.items()))
        except Refusal as refusal:
            return self._refuse(request, refusal)
        return _json({"site": name, "time": time.time(), "versions": versions()})

    async def _anything(self, request: Request) -> Response:
        return self._refuse(request, Refusal(404, "this call is not for the network."))

    async def _earlier(self, request: Request) -> Response:
        """A site, or a node of Flower's own, that speaks the wire of before."""
        who = "a node"
        with suppress(ValueError):
            shown = base64.b64decode(request.headers.get("flwr-public-key", ""), validate=True)
            if self._register is not None and (site := self._register.site(shown)) is not None:
                who = f"the site '{site.name}'"
        refusal = other_wire("Flower's wire, as fedsolve did before")
        self._once(f"{who} at {_sender(request)} is of another version: {refusal}", f"{who} wire")
        # Code and status with which Flower tells a node that is starting why it is refused.
        return _json({"code": 2004, "detail": str(refusal)}, refusal.status, {"connection": "close"})

    # -- hello -----------------------------------------------------------------------------------

    async def _greeting(self, _: Request) -> Response:
        return _json({"wire": formats.WIRE.version, "challenge": self._sessions.challenge()})

    async def _hello(self, request: Request) -> Response:
        from starlette.requests import ClientDisconnect

        try:
            text = await whole(request, None)
            try:
                note = json.loads(text)
            except (ValueError, RecursionError) as problem:
                raise Refusal(400, "this is not a hello.", "hello") from problem
            session, share = await asyncio.to_thread(self._sessions.believe, note)
            self._sessions.begin(session)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        except ClientDisconnect:
            return _gone()
        self._vouch(request)
        self.mailbox.welcome(session)
        if session.site not in self._here:
            self._here.add(session.site)
            fields = {"site": session.name or session.site, "sender": _sender(request)}
            _log.info("site %(site)s is here, from %(sender)s", fields, extra={"fields": fields})
        return _json({"session": session.id, "share": share.hex(), "wait": WAIT})

    # -- calls on a session ----------------------------------------------------------------------

    async def _call(self, call: SiteCall, request: Request) -> Response:
        """A call of a site that has said hello, on its session and with the body it was made for."""
        from starlette.requests import ClientDisconnect

        try:
            scope = request.scope
            path = b"?".join(filter(None, (scope["raw_path"], scope["query_string"]))).decode("latin-1")
            session, body = self._sessions.check(request.method, path, single(request.headers.items()))
            self._vouch(request)
            return await call(request, session, body)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        except ClientDisconnect:
            return _gone()

    async def _pull(self, request: Request, session: SiteSession, body: str) -> Response:
        """The next message, when there is one."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response as Plain
        from starlette.responses import StreamingResponse

        try:
            have = json.loads(await whole(request, body))["have"]
            if not all(isinstance(each, str) and _MESSAGE.fullmatch(each) for each in have):
                raise ValueError("not the names of messages")
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            raise Refusal(400, "what the site has already is not said.", "pull") from problem
        hole = self.mailbox.hole(session)
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
        headers = {DROPPED: ",".join(self.mailbox.dropped(hole, have))}
        if post is None:
            return Plain(status_code=204, headers=headers)
        headers |= {MESSAGE: post.id, BODY: post.digest, "content-length": str(post.size)}
        try:
            stream = await asyncio.to_thread(open, self.mailbox.folder / post.file, "rb")
        except FileNotFoundError:  # dropped at this moment
            return Plain(status_code=204)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while piece := await asyncio.to_thread(stream.read, PIECE):
                    self.mailbox.alive(hole)
                    yield piece
            finally:
                stream.close()

        return StreamingResponse(pieces(), headers=headers)

    async def _answer(self, request: Request, session: SiteSession, body: str) -> Response:
        """Take an answer and write it to disk."""
        hole = self.mailbox.hole(session)
        post = self.mailbox.wanted(hole, request.path_params["message"])
        try:
            size = declared_size(request.headers, post.largest)
        except Refusal as refusal:
            self.mailbox.failed(hole, post, str(refusal))
            raise
        file = f"{post.id}.{secrets.token_hex(4)}"
        path = self.mailbox.folder / file
        try:
            with self.mailbox.uploading(hole, post):
                await store(request, path, body, lambda done: self.mailbox.coming(hole, post, done, size))
            self.mailbox.wanted(hole, post.id)
        except OSError as problem:
            path.unlink(missing_ok=True)
            text = f"an answer cannot be written: {path.parent}: {problem.strerror or problem}. Make room."
            if self._once(text):
                self.mailbox.trouble(text)
            raise Refusal(507, "the server's disk takes no more; its operator must act.", "disk") from problem
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self.mailbox.answered(hole, post, file, body)
        return _json({})

    async def _leave(self, request: Request, session: SiteSession, body: str) -> Response:
        await whole(request, body)
        self.mailbox.leave(self.mailbox.hole(session))
        self._sessions.end(session)
        return _json({})

    # -- what happened ---------------------------------------------------------------------------

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
        # The rest of a refused body is not read, so the connection cannot be used again.
        document = {"code": refusal.status, "reason": refusal.reason, "detail": str(refusal)}
        return _json(document, refusal.status, {"connection": "close"})

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


def _der(certificate: Any) -> bytes | None:
    from cryptography.hazmat.primitives.serialization import Encoding

    return None if certificate is None else certificate.public_bytes(Encoding.DER)


def _gone() -> Response:
    return _json({"code": 400, "detail": "the sender went away."}, 400)


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
    listen: str, mail: Path, keys: str | os.PathLike[str] | None, *, verbose: bool = False
) -> list[str]:
    """The command line of a gate that ends when the calling process does; its log goes to stderr.

    mail: the folder of messages and answers. The gate is told on its standard input what to do, and says on
          its standard output what happens (`mailbox`).
    """
    address(listen)
    line = [sys.executable, "-m", "fedsolve.network.gate", "--listen", listen]
    line += ["--mail", str(mail.absolute()), "--parent", str(os.getpid())]
    line += ["--insecure"] if keys is None else ["--keys", str(Path(keys).absolute())]
    return [*line, "--verbose"] if verbose else line


def main(words: list[str] | None = None) -> int:
    """Run the gate until it is told to stop or its parent is gone."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="fedsolve-gate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--mail", required=True, type=Path, metavar="DIR")
    parser.add_argument("--keys", metavar="DIR")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--parent", type=int, metavar="PID")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(words)
    if options.insecure == (options.keys is not None):
        parser.error("give either --keys or --insecure")
    log_lines.begin("gate", logging.DEBUG if options.verbose else logging.INFO)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    keys = None if options.insecure else Keys(options.keys)
    if keys is not None:
        load_certificate(keys.authority)
        load_certificate(keys.server_certificate)
        load_key(keys.server_key)
    door = Doorway.at(*address(options.listen))
    # What libraries print goes to the log: the pipe to the server holds events, and nothing else.
    told = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    mailbox = Mailbox(options.mail, partial(_tell, told))
    config = uvicorn.Config(
        until_gone(Gate(mailbox, keys, door).app()),
        loop="asyncio",  # which accepts connections through the doorway,
        backlog=32,  # so many at a time: the closed ones are taken apart before more come in
        ssl_certfile=None if keys is None else str(keys.server_certificate),
        ssl_keyfile=None if keys is None else str(keys.server_key),
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
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    server = uvicorn.Server(config)
    gc.freeze()  # what is there now stays: collections look at connections only
    asyncio.run(_serve(server, door, mailbox, options.parent))
    return 0 if server.started else 1


def _tell(told: BinaryIO, event: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the server is gone; the gate closes by itself
        told.write(json.dumps(event).encode() + b"\n")


def _listen(mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
    """Hear what the server says, until it ends."""
    for line in sys.stdin.buffer:
        loop.call_soon_threadsafe(mailbox.take, json.loads(line))
    _close()


def _close() -> None:
    _log.info("the server process is gone; the gate closes.")
    os.kill(os.getpid(), signal.SIGTERM)


async def _serve(server: Any, door: Doorway, mailbox: Mailbox, parent: int | None) -> None:
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(mailbox, loop), daemon=True).start()

    async def watch() -> None:
        # A process that the server forked may hold the pipe open when the server is killed.
        while not server.should_exit:
            await asyncio.sleep(0.25)
            if parent is not None and os.getppid() != parent:
                _close()
                break
        mailbox.close()

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
