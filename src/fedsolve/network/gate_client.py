"""A site's calls at the gate of its server, and what to do about a server that is not believed."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import version
from fedsolve.arrays import Array
from fedsolve.errors import ModelFileError, TermError
from fedsolve.network import calls, certificates
from fedsolve.network.certificates import ASK_FOR_AUTHORITY, RENEW, Validity, load_certificate, now
from fedsolve.network.parcels import Note, Parcel, open_parcel

_IDLE = 50.0
"""Seconds that a connection is kept without a call; less than the gate keeps it."""

_SLOW = 60.0
_LONGEST_WAIT = 120.0
_PATIENCE = 10.0
_CLOCKS_APART = 60.0
SET_CLOCK = "Set the wrong one right (NTP; timedatectl)."


class Refused(Exception):
    """The gate refuses a call: `status`, the reason in a word, and the sentence for people."""

    def __init__(self, status: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason


class GateClient:
    """Calls of one site's process. key: the site's private key; None for a server without keys.

    site:    the mark by which such a server tells sites apart. process: the mark of this process, which stays
             the same when it connects again.
    looking: only to look: whoever is there is taken for the server, straight, past every proxy.
    """

    def __init__(
        self, address: str, authority: Path | None, key: Any, site: str, process: str, looking: bool = False
    ) -> None:
        import httpx

        context = None if authority is None else site_context(authority, key)
        if context is not None and looking:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._http = httpx.Client(
            base_url=f"{'http' if authority is None else 'https'}://{address}",
            verify=True if context is None else context,
            headers={calls.WIRE: str(version.WIRE), calls.PROCESS: process, calls.SITE: site},
            timeout=httpx.Timeout(_SLOW, connect=20.0),
            limits=httpx.Limits(keepalive_expiry=_IDLE),
            follow_redirects=False,
            trust_env=not looking,
        )
        self._wait: float | None = None  # until it has come in
        self.clock = 0.0
        """Seconds by which the server's clock was ahead of this one's when it was last asked."""
        self.certificate: Validity | None = None
        """By which the server proved itself then; None without TLS."""
        self.dropped: set[str] = set()
        """Of the messages that the last pull said we have, those that nobody waits for any more."""

    def close(self) -> None:
        self._http.close()

    def hello(self) -> None:
        """Come in: from now on the server sees this site."""
        told = self.about("POST", calls.HELLO)
        self._wait = min(float(told["wait"]), _LONGEST_WAIT)

    def about(self, method: str = "GET", path: str = calls.ABOUT) -> dict[str, Any]:
        """What the server says of itself, by a call that does not come in."""
        before = time.time()
        response = self._http.request(method, path)
        told = _refused(response)
        self.clock = float(told["time"]) - (before + time.time()) / 2
        self.certificate = _proof(response.extensions["network_stream"].get_extra_info("ssl_object"))
        return told

    def pull(self, have: Iterable[str], largest: int) -> tuple[str, Note, Array] | None:
        """The next message that is none of those: its id, note and bytes; None when there was none.

        A message that cannot be read has a note that says so.
        """
        import httpx

        body = json.dumps({"have": list(have)}).encode()
        patience = httpx.Timeout(_SLOW, read=(self._wait or 0.0) + _SLOW)
        with self._http.stream("POST", calls.PULL, content=body, timeout=patience) as response:
            if response.status_code not in (200, 204):
                _refused(response)
            self.dropped = set(filter(None, response.headers.get(calls.DROPPED, "").split(",")))
            if response.status_code == 204:
                return None
            message = str(response.headers[calls.MESSAGE])
            size = int(response.headers["content-length"])
            try:
                if size > largest:
                    raise TermError(
                        f"a message of {size:,} bytes was announced; at most {largest:,} are taken."
                    )
                note, payload = open_parcel(_filled(response, size), str(response.headers[calls.BODY]))
            except TermError as problem:
                note, payload = {"damaged": str(problem)}, np.empty(0, dtype=np.uint8)
        return message, note, payload

    def answer(self, message: str, parcel: Parcel) -> None:
        pieces = (bytes(piece) for piece in parcel.pieces())
        size = {"content-length": str(len(parcel))}
        with self._http.stream("POST", f"{calls.ANSWER}{message}", content=pieces, headers=size) as response:
            _refused(response)

    def leave(self) -> None:
        if self._wait is not None:
            _refused(self._http.post(calls.LEAVE, timeout=5.0))


def look(address: str, authority: Path | None, key: Any) -> tuple[dict[str, Any], float]:
    """What whoever is at this address says of itself, and how far its clock is ahead."""
    mark = "0" * 32
    with closing(GateClient(address, authority, key, mark, mark, looking=True)) as client:
        return client.about(), client.clock


def site_context(authority: Path, key: Any) -> ssl.SSLContext:
    """TLS as a site does it: the server proves itself by the authority, the site by its key."""
    context = ssl.create_default_context(cafile=str(authority))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if key is not None:
        with tempfile.NamedTemporaryFile(prefix="fedsolve-") as file:  # readable by its owner only
            file.write(certificates.site_certificate(key))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _filled(response: Any, size: int) -> Array:
    """The body, put together in one buffer."""
    body, start = np.empty(size, dtype=np.uint8), 0
    for piece in response.iter_raw():
        body[start : start + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        start += len(piece)
    return body[:start]


def _refused(response: Any) -> dict[str, Any]:
    """The document of an answer; `Refused` where it is a refusal."""
    import httpx

    found: Any = None
    try:
        found = json.loads(response.read())
    except httpx.TransportError:  # who refuses a large answer hangs up while it still comes in
        if response.status_code < 300:
            raise
    except (ValueError, RecursionError):
        pass
    document: dict[str, Any] = found if isinstance(found, dict) else {}
    if response.status_code >= 300:
        detail = str(document.get("detail", response.reason_phrase))[:1000]
        raise Refused(response.status_code, str(document.get("reason", "")), detail)
    return document


def shown(host: str, port: int, authority: Path | None, key: Any = None) -> Validity | None:
    """The certificate by which a server proves itself, None for one without TLS.

    An OSError or ValueError where there is none, or it is not believed. key: of the site that looks, which
    the gate otherwise takes for a stranger.
    """
    with socket.create_connection((host, port), timeout=_PATIENCE) as plain:
        if authority is None:
            return None
        with site_context(authority, key).wrap_socket(plain, server_hostname=host) as link:
            return _proof(link)


def _proof(link: ssl.SSLSocket | None) -> Validity | None:
    """The certificate that the other end of a connection was believed by."""
    if link is None or not (told := link.getpeercert()):
        return None
    seconds = ssl.cert_time_to_seconds(str(told["notAfter"]))
    until = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return Validity("the server's certificate", until, RENEW)


def clocks_apart(offset: float) -> str | None:
    """What people should hear of a server's clock that is so many seconds ahead of this one's."""
    if abs(offset) < _CLOCKS_APART:
        return None
    here = now()
    there = here + datetime.timedelta(seconds=offset)
    clocks = f"this machine's clock says {here:%Y-%m-%d %H:%M:%S}, the server's {there:%Y-%m-%d %H:%M:%S} UTC"
    return f"{clocks}. {SET_CLOCK}"


def remedy(reason: str, address: str, authority: Path | None, key: Any = None) -> str:
    """What to do about a certificate that was refused for this reason, in OpenSSL's words.

    Where the server's clock is far from this one's, the clock is what people should look at. Nobody vouches
    for what the server says then, so it is shown to people and used for nothing.
    """
    words = reason.lower()
    if "mismatch" in words or "not match" in words or "not valid for" in words:
        host = address.rpartition(":")[0].strip("[]")
        return f"Use the name in the certificate; or at the server: fedsolve keys renew --host {host}"
    expired, early = "expired" in words, "not yet valid" in words
    if (expired or early) and authority is not None:
        with suppress(Exception):  # whoever is there may answer anything
            if text := clocks_apart(look(address, authority, key)[1]):
                return text
        with suppress(ModelFileError):
            if expired and load_certificate(authority).not_valid_after_utc <= certificates.now():
                return ASK_FOR_AUTHORITY
    if expired:
        return RENEW
    if early:
        return SET_CLOCK
    return "Compare ca.crt's fingerprint with the server's operator; if it differs, get the right one."
