"""A site's calls at the gate of its server: hello, then messages and answers."""

from __future__ import annotations

import json
import ssl
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from fedsolve import version
from fedsolve.arrays import Array
from fedsolve.errors import TermError
from fedsolve.network.calls import ANSWER, BODY, DROPPED, HELLO, LEAVE, MESSAGE, PROCESS, PULL, SITE, WIRE
from fedsolve.network.certificates import site_certificate
from fedsolve.network.parcels import Note, Parcel, open_parcel

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
            verify=True if authority is None else site_context(authority, key),
            headers={WIRE: str(version.WIRE), PROCESS: process, SITE: site},
            timeout=httpx.Timeout(_SLOW, connect=20.0),
            limits=httpx.Limits(keepalive_expiry=_IDLE),
            follow_redirects=False,
        )
        self._wait = 0.0
        self._came = False
        self.clock = 0.0
        """Seconds by which the server's clock was ahead of this one's at the last hello."""
        self.dropped: set[str] = set()
        """Of the messages that the last pull said we have, those that nobody waits for any more."""

    def close(self) -> None:
        self._http.close()

    def hello(self) -> None:
        """Come in: from now on the server sees this site."""
        before = time.time()
        told = _refused(self._http.post(HELLO))
        self._wait, self._came = min(float(told["wait"]), _LONGEST_WAIT), True
        self.clock = float(told["time"]) - (before + time.time()) / 2

    def pull(self, have: Iterable[str], largest: int) -> tuple[str, Note, Array] | None:
        """The next message that is none of those: its id, note and bytes; None when there was none.

        A message that cannot be read has a note that says so.
        """
        import httpx

        body = json.dumps({"have": list(have)}).encode()
        patience = httpx.Timeout(_SLOW, read=self._wait + _SLOW)
        with self._http.stream("POST", PULL, content=body, timeout=patience) as response:
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
        pieces = (bytes(piece) for piece in parcel.pieces())
        size = {"content-length": str(len(parcel))}
        _refused(self._http.post(f"{ANSWER}{message}", content=pieces, headers=size))

    def leave(self) -> None:
        if self._came:
            _refused(self._http.post(LEAVE, timeout=5.0))


def site_context(authority: str, key: Any) -> ssl.SSLContext:
    """TLS as a site does it: the server proves itself by the authority, the site by its key."""
    context = ssl.create_default_context(cafile=authority)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if key is not None:
        with tempfile.NamedTemporaryFile(prefix="fedsolve-") as file:  # readable by its owner only
            file.write(site_certificate(key))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _filled(response: Any, size: int) -> Array:
    """The body, put together in one buffer."""
    body = np.empty(size, dtype=np.uint8)
    start = 0
    for piece in response.iter_raw():
        body[start : start + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        start += len(piece)
    return body[:start]


def _refused(response: Any) -> dict[str, Any]:
    """The document of an answer; `Refused` where it is a refusal."""
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(response.content)
    document: dict[str, Any] = found if isinstance(found, dict) else {}
    if response.status_code >= 300:
        detail = str(document.get("detail", response.reason_phrase))[:1000]
        raise Refused(response.status_code, str(document.get("reason", "")), detail)
    return document
