"""What sites call at the gate, and by which words both understand each other.

    GET  about               -> {"site", "wire", "wait", "time", "versions"}
    POST hello               the same; the site is there from now on
    POST pull                {"have": [ID]} -> the next message
    POST answer/ID           the answer to a message
    POST leave               the site goes

Who calls is known from TLS: both ends show certificates. The headers say which start of a site's process
calls, and in which version of these calls.
"""

from __future__ import annotations

from fedsolve.errors import DataError

PREFIX = "/v1/fedsolve/"
ABOUT, HELLO, PULL, LEAVE = (f"{PREFIX}{name}" for name in ("about", "hello", "pull", "leave"))
ANSWER = f"{PREFIX}answer/"

WIRE, PROCESS, SITE = "fedsolve-wire", "fedsolve-process", "fedsolve-site"
"""Headers of a site's call. SITE tells sites apart at a server without keys."""

BODY, MESSAGE, DROPPED = "fedsolve-body", "fedsolve-message", "fedsolve-dropped"
"""Headers of the gate's answer to a pull: the SHA-256 of the message, its id, and which of the messages that
the site has nobody waits for any more."""

REPLACED, UNREGISTERED, OTHER_WIRE, UNWANTED = "replaced", "unregistered", "other wire", "unwanted"
"""Reasons of refusals: what a site does about one depends on it."""


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [ADDRESS]:PORT."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DataError(f"{text!r} is not an address. Give HOST:PORT, for example 0.0.0.0:9092.")
    return host, int(port)
