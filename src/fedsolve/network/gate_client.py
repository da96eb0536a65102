"""A site's calls at the gate of its server: hello once, then messages and answers, each call sealed."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedsolve import formats
from fedsolve.container import Array
from fedsolve.network.handshake import (
    ANSWER,
    BODY,
    DROPPED,
    GREETING,
    HELLO,
    LEAVE,
    MESSAGE,
    NOTHING,
    OTHER_WIRE,
    PULL,
    Call,
    hello_text,
    identity,
    new_share,
    session_key,
    sign_text,
)
from fedsolve.network.parcels import Parcel, open_parcel
from fedsolve.network.wire import Note
from fedsolve.version import __version__

_IDLE = 50.0
"""Seconds that a connection is kept without a call; less than the gate keeps it."""

_SLOW = 60.0
_LONGEST_WAIT = 120.0


class Refused(Exception):
    """The gate refuses a call: `status`, the reason in a word, and the sentence for people."""

    def __init__(self, status: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason


class GateClient:
    """Calls of one site's process. key: the site's private key; None for a server without keys.

    site: the mark by which such a server tells sites apart. process: the mark of this process, which stays
    the same when it connects again.
    """

    def __init__(self, address: str, authority: str | None, key: Any, site: str, process: str) -> None:
        import httpx

        self._http = httpx.Client(
            base_url=f"{'http' if authority is None else 'https'}://{address}",
            verify=True if authority is None else ssl.create_default_context(cafile=authority),
            timeout=httpx.Timeout(_SLOW, connect=20.0),
            limits=httpx.Limits(keepalive_expiry=_IDLE),
            follow_redirects=False,
        )
        self._key = key
        self._site = site
        self._process = process
        self._lock = threading.Lock()
        self._server = self._session = ""
        self._secret = b""
        self._counter = 0
        self._wait = 0.0
        self.dropped: set[str] = set()
        """Of the messages that the last pull said we have, those that nobody waits for any more."""

    def close(self) -> None:
        self._http.close()

    def hello(self) -> None:
        """Say who this is, and begin a session."""
        greeting = self._http.get(GREETING)
        # A server of before answers with a refusal that knows no greeting.
        told = _document(greeting) if greeting.status_code in (200, 404) else _refused(greeting)
        if told.get("wire") != formats.WIRE.version:
            theirs = told.get("wire", "that of an earlier fedsolve, or is none")
            raise Refused(
                412,
                OTHER_WIRE,
                f"the server's wire is {theirs}; this site speaks {formats.WIRE.version} (fedsolve "
                f"{__version__}). Install the same version on both sides.",
            )
        self._server = identity(_certificate(greeting))
        kept, share = new_share()
        text = hello_text(self._server, str(told["challenge"]), self._process, share)
        note = {
            "wire": formats.WIRE.version,
            "key": self._site,
            "server": self._server,
            "challenge": told["challenge"],
            "process": self._process,
            "share": base64.b64encode(share).decode(),
            "signature": "" if self._key is None else base64.b64encode(sign_text(self._key, text)).decode(),
        }
        answer = _refused(self._http.post(HELLO, content=json.dumps(note).encode()))
        secret = session_key(kept, bytes.fromhex(answer["share"]), str(answer["session"]), text)
        with self._lock:
            self._session, self._secret, self._counter = str(answer["session"]), secret, 0
        self._wait = min(float(answer["wait"]), _LONGEST_WAIT)

    def pull(self, have: Iterable[str], largest: int) -> tuple[str, Note, Array] | None:
        """The next message that is none of those: its id, note and bytes; None when there was none.

        A message that cannot be read has a note that says so.
        """
        import httpx

        from fedsolve.errors import TermError

        body = json.dumps({"have": list(have)}).encode()
        headers = self._sealed(PULL, hashlib.sha256(body).hexdigest())
        patience = httpx.Timeout(_SLOW, read=self._wait + _SLOW)
        with self._http.stream("POST", PULL, content=body, headers=headers, timeout=patience) as response:
            if response.status_code not in (200, 204):
                response.read()
                _refused(response)
            self.dropped = set(filter(None, response.headers.get(DROPPED, "").split(",")))
            if response.status_code == 204:
                return None
            message = str(response.headers[MESSAGE])
            size = int(response.headers["content-length"])
            try:
                if size > largest:
                    raise TermError(
                        f"a message of {size:,} bytes was announced; at most {largest:,} are taken."
                    )
                note, payload = open_parcel(_filled(response, size), str(response.headers[BODY]))
            except TermError as problem:
                note, payload = {"damaged": str(problem)}, np.empty(0, dtype=np.uint8)
        return message, note, payload

    def answer(self, message: str, parcel: Parcel) -> None:
        """Bring the answer to a message."""
        path = f"{ANSWER}{message}"
        headers = self._sealed(path, parcel.digest()) | {"content-length": str(len(parcel))}
        pieces = (bytes(piece) for piece in parcel.pieces())
        _refused(self._http.post(path, content=pieces, headers=headers))

    def leave(self) -> None:
        """Say that this site goes, if it came."""
        if self._session:
            _refused(self._http.post(LEAVE, headers=self._sealed(LEAVE, NOTHING), timeout=5.0))

    def _sealed(self, path: str, body: str) -> dict[str, str]:
        with self._lock:
            self._counter += 1
            call = Call("POST", path, body, self._server, self._session, self._counter)
            return call.headers(self._secret)


def _filled(response: Any, size: int) -> Array:
    """The body, put together in one buffer."""
    body = np.empty(size, dtype=np.uint8)
    start = 0
    for piece in response.iter_raw():
        body[start : start + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        start += len(piece)
    return body[:start]


def _certificate(response: Any) -> bytes | None:
    """The certificate of the server that gave this answer (DER); None without TLS."""
    stream = response.extensions["network_stream"].get_extra_info("ssl_object")
    return None if stream is None else bytes(stream.getpeercert(True))


def _document(response: Any) -> dict[str, Any]:
    try:
        document = json.loads(response.content)
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) else {}


def _refused(response: Any) -> dict[str, Any]:
    """The document of an answer; `Refused` where it is a refusal."""
    document = _document(response)
    if response.status_code >= 300:
        detail = str(document.get("detail", response.reason_phrase))[:1000]
        raise Refused(response.status_code, str(document.get("reason", "")), detail)
    return document
