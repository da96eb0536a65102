"""Who may pass the gate: registered sites, with a body of known size."""

from __future__ import annotations

import base64
import binascii
import datetime
import logging
import os
import time
from collections.abc import Iterable, Mapping

from fedsolve.errors import FedsolveError
from fedsolve.network.keyfolder import Keys
from fedsolve.network.security import Site, registered

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


def single(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers by lower-case name; a signed header that comes twice is refused."""
    by_name: dict[str, str] = {}
    for name, value in headers:
        if name in by_name and name.startswith(("fedsolve-", "flwr-", "content-")):
            raise Refusal(400, f"the header {name[:80]!a} was given twice.", reason="headers")
        by_name[name] = value
    return by_name


def declared_size(headers: Mapping[str, str], most: int) -> int:
    """The size of the body in bytes, from the headers; refused if it is not declared, or more than `most`."""
    declared = headers.get("content-length", "")
    if not declared.isdecimal():
        raise Refusal(411, "the size of the body must be declared.")
    if len(declared) > 20 or int(declared) > most:
        raise Refusal(413, f"{declared[:20]} bytes in one call; at most {most:,} are taken.", "size")
    return int(declared)
