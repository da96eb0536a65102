"""Who may pass the gate: registered sites, known by the key in their certificate."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from fedsolve.network.certificates import anchors
from fedsolve.network.keyfolder import Keys, Site
from fedsolve.network.security import WatchedFile

_log = logging.getLogger("fedsolve.gate")


class Refusal(Exception):
    """A call that is refused: the status and the sentence that the sender gets.

    reason: the same for all sentences that differ only in what the sender wrote.
    """

    def __init__(self, status: int, sentence: str, reason: str = "") -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason or sentence


@dataclass(frozen=True)
class Caller:
    """Who makes a call. site: tells sites apart, `process` their starts; name: where there is a list."""

    site: str
    name: str | None
    process: str


class Register:
    """The registered sites by public key, read again whenever the file changes.

    A list that cannot be read lets nobody in: the alternative would keep in a site just removed.
    """

    def __init__(self, keys: Keys) -> None:
        def read() -> dict[bytes, Site]:
            sites = keys.registered.sites()
            _log.info("registered sites: %s", ", ".join(sorted(sites)) or "none")
            return {site.pem: site for site in sites.values()}

        def failed(problem: Exception, _: object) -> dict[bytes, Site]:
            _log.error("nobody is let in: %s", problem)
            return {}

        self._sites = WatchedFile(keys.registered.path, read, failed)
        self._trusted: set[bytes] = set()

    def site(self, pem: bytes) -> Site | None:
        return self._sites().get(pem)

    def trust(self, context: ssl.SSLContext) -> None:
        """Let the handshakes of registered sites succeed; a site that is removed is refused by `site`."""
        if new := self._sites().keys() - self._trusted:
            context.load_verify_locations(cadata=anchors(new))
            self._trusted |= new


def declared_size(headers: Mapping[str, str], most: int) -> int:
    """The size of the body in bytes, from the headers; refused if it is not declared, or more than `most`."""
    declared = headers.get("content-length", "")
    if not declared.isdecimal():
        raise Refusal(411, "the size of the body must be declared.")
    if len(declared) > 20 or int(declared) > most:
        raise Refusal(413, f"{declared[:20]} bytes in one call; at most {most:,} are taken.", "size")
    return int(declared)
