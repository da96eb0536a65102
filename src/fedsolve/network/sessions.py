"""The gate's side of sessions: whose hello is believed, and which calls are made on a session, once each."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsolve import formats
from fedsolve.network.admission import Refusal, Register
from fedsolve.network.handshake import (
    BODY,
    CHALLENGE,
    COUNTER,
    KEY,
    MAC,
    OTHER_WIRE,
    REPLACED,
    SERVER,
    SESSION,
    SIGNATURE,
    UNKNOWN_SESSION,
    UNREGISTERED,
    Call,
    about_text,
    hello_text,
    new_share,
    session_key,
    signed_text,
)
from fedsolve.version import __version__

CHALLENGE_SECONDS = 60
"""How long a challenge may be answered."""

_WINDOW = 64
"""A site's calls overtake each other by a few; one that comes later than so many others is not believed."""

_ENDED = 4096
_HEX = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[0-9a-f]{32}")


@dataclass
class SiteSession:
    """A site that has said hello. site: tells sites apart, `process` their starts; name: if it is listed."""

    id: str
    site: str
    name: str | None
    process: str
    pem: bytes
    challenge: str
    key: bytes = field(repr=False)
    _highest: int = -1
    _seen: set[int] = field(default_factory=set)

    def count(self, counter: int) -> bool:
        """Enter the counter of a call; whether it is new."""
        if counter in self._seen or counter <= self._highest - _WINDOW:
            return False
        self._seen.add(counter)
        self._highest = max(self._highest, counter)
        self._seen = {each for each in self._seen if each > self._highest - _WINDOW}
        return True


class Sessions:
    """The sessions of one gate, at most one for each site: a newer hello ends the one before.

    server:   the identity of this server. register: the sites on the list; None where all may come.
    """

    def __init__(self, server: str, register: Register | None) -> None:
        self._server = server
        self._register = register
        self._secret = secrets.token_bytes(32)
        self._answered: dict[str, float] = {}
        self._open: dict[str, SiteSession] = {}
        self._of_site: dict[str, SiteSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def challenge(self) -> str:
        """A word that a hello must repeat; nothing is kept for those who only ask."""
        until = f"{time.time() + CHALLENGE_SECONDS:.0f}-{secrets.token_hex(8)}"
        return f"{until}-{self._sealed(until)}"

    def _sealed(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def believe(self, note: Any) -> tuple[SiteSession, bytes]:
        """The session of a hello whose signature is right, and our share of its key. It is not open yet.

        Takes milliseconds and no state but the list of sites: for a thread.
        """
        try:
            if note["wire"] != formats.WIRE.version:
                raise other_wire(f"wire {note['wire']!r}")
            share = base64.b64decode(note["share"], validate=True)
            signature = base64.b64decode(note["signature"], validate=True)
            challenge, process, server = (str(note[name]) for name in ("challenge", "process", "server"))
            pem = str(note["key"]).encode("ascii")
        except (KeyError, TypeError, ValueError, binascii.Error) as problem:
            raise Refusal(400, "this is not a hello.", "hello") from problem
        if server != self._server:
            raise Refusal(401, "this hello is for another server, with another certificate.", "other server")
        if not _WORD.fullmatch(process):
            raise Refusal(400, "this is not a hello: its process has no number.", "hello")
        text = hello_text(server, challenge, process, share)
        self._until(challenge)
        name, site = self._who(pem, text, signature)
        number = secrets.token_hex(16)
        kept, ours = new_share()
        try:
            key = session_key(kept, share, number, text)
        except ValueError as problem:
            raise Refusal(400, "this is not a hello: its share is none.", "hello") from problem
        return SiteSession(number, site, name, process, pem, challenge, key), ours

    def _who(self, pem: bytes, text: bytes, signature: bytes) -> tuple[str | None, str]:
        """Name and mark of the site that signed."""
        if self._register is None:
            if not _WORD.fullmatch(pem.decode("ascii")):
                raise Refusal(
                    400, "this server is insecure and knows no keys: start the site so, too.", "hello"
                )
            return None, pem.decode("ascii")
        name = self._signer(self._register, pem, text, signature)
        return name, name

    def _signer(self, register: Register, pem: bytes, text: bytes, signature: bytes) -> str:
        found = register.site(pem)
        if found is None:
            raise Refusal(
                401, "this key is not registered at the server: fedsolve keys register NAME.pub", UNREGISTERED
            )
        if not signed_text(found.pem, text, signature):
            raise Refusal(401, "the signature is not by the key of this site.", "signature")
        return found.name

    def known(self, headers: Mapping[str, str]) -> str:
        """The name of the site that asks whether it is known; for a thread."""
        if self._register is None:
            return "(insecure)"
        try:
            pem, signature = (base64.b64decode(headers[name], validate=True) for name in (KEY, SIGNATURE))
            challenge = headers[CHALLENGE]
        except (KeyError, ValueError, binascii.Error) as problem:
            raise Refusal(401, "the call is not signed by a site's key.", "not signed") from problem
        if self._until(challenge) < time.time():
            raise Refusal(401, "this call is signed too late. Ask again.", "challenge")
        return self._signer(self._register, pem, about_text(challenge), signature)

    def _until(self, challenge: str) -> float:
        """When a challenge of ours runs out; anything else is refused."""
        text, _, seal = challenge.rpartition("-")
        if not hmac.compare_digest(self._sealed(text).encode(), seal.encode("utf-8", "replace")):
            raise Refusal(401, "this hello answers the challenge of another server.", "challenge")
        return float(text.partition("-")[0])

    def begin(self, session: SiteSession) -> None:
        """Open a session; one of the same site ends, and its process is told when it was another."""
        now, until = time.time(), self._until(session.challenge)
        self._answered = {known: end for known, end in self._answered.items() if end > now}
        if session.challenge in self._answered or until < now:
            raise Refusal(401, "this hello was said before, or too late. Say it anew.", "challenge")
        self._answered[session.challenge] = until
        before = self._of_site.get(session.site)
        if before is not None:
            del self._open[before.id]
            self._ended[before.id] = UNKNOWN_SESSION if before.process == session.process else REPLACED
            while len(self._ended) > _ENDED:
                self._ended.popitem(last=False)
        self._open[session.id] = self._of_site[session.site] = session

    def end(self, session: SiteSession) -> None:
        """Forget a session whose site has left."""
        self._open.pop(session.id, None)
        if self._of_site.get(session.site) is session:
            del self._of_site[session.site]

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[SiteSession, str]:
        """The session that a call is made on, and the SHA-256 that its body must have."""
        number, counter, body = headers.get(SESSION, ""), headers.get(COUNTER, ""), headers.get(BODY, "")
        if not number or not counter.isdecimal() or len(counter) > 18 or not _HEX.fullmatch(body):
            raise Refusal(401, "the call is made on no session: a site says hello first.", "no session")
        if headers.get(SERVER) != self._server:
            raise Refusal(
                401, "this call is made for another server, with another certificate.", "other server"
            )
        session = self._open.get(number)
        if session is None:
            if self._ended.get(number) == REPLACED:
                raise Refusal(401, "another process of this site has said hello after this one.", REPLACED)
            raise Refusal(
                401, "this session is of another server, or of one that has ended.", UNKNOWN_SESSION
            )
        call = Call(method, path, body, self._server, number, int(counter))
        if not hmac.compare_digest(call.mac(session.key).encode(), headers.get(MAC, "").encode()):
            raise Refusal(401, "the HMAC is not that of this call: it is forged, or was changed.", "forged")
        if not session.count(call.counter):
            raise Refusal(401, f"call {call.counter} of this session was made before.", "replayed")
        if self._register is not None and self._register.site(session.pem) is None:
            raise Refusal(401, f"'{session.name}' is not registered at the server any more.", UNREGISTERED)
        return session, body


def other_wire(theirs: str) -> Refusal:
    """The refusal of a site that does not speak our wire."""
    return Refusal(
        412,
        f"this site speaks {theirs}; the server speaks wire {formats.WIRE.version} (fedsolve {__version__}). "
        "Install the same version on both sides.",
        OTHER_WIRE,
    )
