"""Who may pass the gate: registered sites, with a body of known size."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

from fedsolve.errors import FedsolveError
from fedsolve.network.keyfolder import Keys
from fedsolve.network.security import Site, registered

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


def single(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers by lower-case name; one that a call is sealed with must not come twice."""
    by_name: dict[str, str] = {}
    for name, value in headers:
        if name in by_name and name.startswith(("fedsolve-", "content-")):
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
