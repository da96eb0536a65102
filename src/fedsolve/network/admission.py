"""Who may pass the gate: the signature of a registered site, a body of known size, its own name only."""

from __future__ import annotations

import base64
import binascii
import datetime
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedsolve.container import write_atomically
from fedsolve.errors import FedsolveError
from fedsolve.network.keyfolder import Keys
from fedsolve.network.security import Site, registered

MOST_BYTES = 64 * 2**20
"""Flower cuts arrays into objects of 5 MiB; nothing a node sends is much larger."""

CLOCK_AHEAD = 5.0
CLOCK_BEHIND = 305.0
"""Seconds by which a site's clock may be off: what the SuperLink itself accepts."""

_log = logging.getLogger("fedsolve.gate")


class Refusal(Exception):
    """A call that is not forwarded: the status and the sentence that the sender gets.

    reason: the same for all sentences that differ only in what the sender wrote.
    """

    def __init__(self, status: int, sentence: str, reason: str = "") -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason or sentence


class Register:
    """The registered sites by public key, read again whenever the file changes.

    A list that cannot be read lets nobody in: the alternative would keep in a site just removed.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._seen: object = None
        self._sites: dict[bytes, Site] = {}

    def site(self, pem: bytes) -> Site | None:
        self._refresh()
        return self._sites.get(pem)

    def _refresh(self) -> None:
        try:
            state = os.stat(self._keys.registered_file)
            seen: object = (state.st_mtime_ns, state.st_size, state.st_ino)
        except OSError:
            seen = "missing"
        if seen == self._seen:
            return
        try:
            sites = registered(self._keys)
        except FedsolveError as problem:
            _log.error("nobody is let in: %s", problem)
            sites = {}
        _log.info("registered sites: %s", ", ".join(sorted(sites)) or "none")
        self._sites = {site.pem: site for site in sites.values()}
        self._seen = seen


class Quota:
    """How many bytes each site may push while one question is open; the server says so in a file.

    The file holds the number of the question and the bytes of the largest answer to it. What a site pushes is
    kept by the SuperLink in memory, so that one may not push what nobody asked for. An answer may be pushed
    again after a broken connection: `_TIMES` in all. Without a file there is no limit.
    """

    _TIMES = 4

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._question = -1
        self._most = 0
        self._pushed: Counter[str] = Counter()

    @staticmethod
    def write(path: Path, question: int, largest: int) -> None:
        """Say, at the server, what may be pushed from now on."""
        write_atomically(path, f"{question} {largest}".encode(), durable=False)

    def count(self, name: str, size: int) -> None:
        """Enter bytes that a site pushes; refuse what is too much."""
        if self._path is None or not self._path.exists():
            return
        question, largest = map(int, self._path.read_text().split())
        if question != self._question:
            self._question, self._most = question, self._TIMES * (largest + MOST_BYTES // 8)
            self._pushed.clear()
        self._pushed[name] += size
        if self._pushed[name] > self._most:
            raise Refusal(
                413,
                f"'{name}' has pushed more than {self._TIMES} times what an answer to this question takes "
                f"({largest:,} bytes).",
                "quota",
            )


def authenticate(headers: Mapping[str, str], register: Register, now: float | None = None) -> Site:
    """The registered site whose signature the headers carry; raises `Refusal` otherwise."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        pem = base64.b64decode(headers["flwr-public-key"], validate=True)
        signature = base64.b64decode(headers["flwr-signature"], validate=True)
        stamp = headers["flwr-timestamp"]
        signed = datetime.datetime.fromisoformat(stamp)
    except (KeyError, ValueError, binascii.Error) as problem:
        raise Refusal(401, "the call is not signed by a site's key.") from problem
    site = register.site(pem)
    if site is None:
        raise Refusal(401, "this key is not registered at the server: fedsolve keys register NAME.pub")
    if signed.tzinfo is None:
        raise Refusal(401, "the time stamp has no time zone.")
    age = (time.time() if now is None else now) - signed.timestamp()
    if not -CLOCK_AHEAD < age < CLOCK_BEHIND:
        side = "behind" if age > 0 else "ahead of"
        message = f"the site's clock is {abs(age):.0f} s {side} the server's. Set the clocks (NTP)."
        raise Refusal(401, message, reason="clock")
    key = serialization.load_pem_public_key(site.pem)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        key.verify(signature, stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, UnicodeError) as problem:
        raise Refusal(401, "the signature is not by the key of this site.") from problem
    return site


def own_name_only(body: bytes) -> None:
    """Refuse a reply whose named sender is not the node that pushes it."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError

    request = PushMessagesRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as problem:
        raise Refusal(400, "the announced reply cannot be read.") from problem
    senders = {message.metadata.src_node_id for message in request.messages_list}
    if senders != {request.node.node_id}:
        raise Refusal(400, "a node may push replies in its own name only.")


def single(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers by lower-case name; a signed header that comes twice is refused."""
    by_name: dict[str, str] = {}
    for name, value in headers:
        if name in by_name and name.startswith(("flwr-", "content-")):
            raise Refusal(400, f"the header {name[:80]!a} was given twice.", reason="headers")
        by_name[name] = value
    return by_name


def declared_size(headers: Mapping[str, str]) -> int:
    """The size of the body in bytes, from the headers."""
    declared = headers.get("content-length", "")
    if not declared.isdecimal():
        raise Refusal(411, "the size of the body must be declared.")
    if len(declared) > 20 or int(declared) > MOST_BYTES:
        raise Refusal(413, f"{declared[:20]} bytes in one call; the most is {MOST_BYTES}.", "size")
    return int(declared)
