"""How long certificates still last, and what to do about one that is refused."""

from __future__ import annotations

import datetime
import http.client
import json
import secrets
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsolve import version
from fedsolve.errors import FedsolveError
from fedsolve.network.calls import ABOUT, PROCESS, SITE, WIRE
from fedsolve.network.certificates import WARN_DAYS, load_certificate, now
from fedsolve.network.gate_client import site_context
from fedsolve.network.keyfolder import Keys

RENEW = "At the server: fedsolve keys renew, then start it again; sites need nothing."
NEW_AUTHORITY = "Begin anew: fedsolve keys init in another folder; send ca.crt to all sites."
ASK_FOR_AUTHORITY = "Ask the server's operator for the new ca.crt."
SET_CLOCK = "Set the wrong one right (NTP; timedatectl)."
_PATIENCE = 10.0
_CLOCKS_APART = 60.0


@dataclass(frozen=True)
class Validity:
    """Until when a certificate is valid, and what renews it."""

    name: str
    until: datetime.datetime
    remedy: str

    @property
    def days(self) -> int:
        """Whole days that are left; negative once it has expired."""
        return (self.until - now()).days

    @property
    def announced(self) -> str | None:
        """What people should hear, from `WARN_DAYS` days before the end on."""
        if self.days >= WARN_DAYS:
            return None
        ended = self.until <= now()
        when = "has expired" if ended else f"expires in {self.days} days"
        return f"{self.name} {when} ({self.until:%Y-%m-%d}). {self.remedy}"


def of_server(keys: Keys) -> list[Validity]:
    mine, authority = map(load_certificate, (keys.server_certificate, keys.authority))
    return [
        Validity("the server's certificate", mine.not_valid_after_utc, RENEW),
        Validity("the authority's certificate", authority.not_valid_after_utc, NEW_AUTHORITY),
    ]


def of_site(keys: Keys) -> Validity:
    until = load_certificate(keys.authority).not_valid_after_utc
    return Validity("the authority's certificate (ca.crt)", until, ASK_FOR_AUTHORITY)


@contextmanager
def calling(
    host: str, port: int, authority: Path | None, key: Any = None, believed: bool = True
) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server; an OSError or ValueError where there is none, or it is not believed.

    key: of the site that looks, which the gate otherwise takes for a stranger. believed: False takes whoever
    is there, whatever its certificate says.
    """
    link = http.client.HTTPConnection(host, port, timeout=_PATIENCE)
    if authority is not None:
        context = site_context(str(authority), key)
        if not believed:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        link = http.client.HTTPSConnection(host, port, timeout=_PATIENCE, context=context)
    with closing(link):
        link.connect()
        yield link


def shown(link: http.client.HTTPConnection) -> Validity | None:
    """The certificate by which the server of this connection has proved itself; None in plain HTTP."""
    if not isinstance(link.sock, ssl.SSLSocket):
        return None
    seconds = ssl.cert_time_to_seconds(str((link.sock.getpeercert() or {}).get("notAfter", "")))
    return Validity("the server's certificate", datetime.datetime.fromtimestamp(seconds, datetime.UTC), RENEW)


def as_served(host: str, port: int, authority: Path, key: Any = None) -> Validity | None:
    """The certificate of this server; None where it cannot be reached straight or is not believed."""
    with suppress(OSError, ValueError), calling(host, port, authority, key) as link:
        return shown(link)
    return None


def about(link: http.client.HTTPConnection) -> tuple[int, dict[str, Any]]:
    """What the server answers a site that asks who it is: status and document."""
    mark = secrets.token_hex(16)
    link.request("GET", ABOUT, headers={WIRE: str(version.WIRE), PROCESS: mark, SITE: mark})
    answer = link.getresponse()
    return answer.status, json.loads(answer.read(100_000))


def clocks_apart(offset: float) -> str | None:
    """What people should hear of a server's clock that is so many seconds ahead of this one's."""
    if abs(offset) < _CLOCKS_APART:
        return None
    there = now() + datetime.timedelta(seconds=offset)
    return (
        f"this machine's clock says {now():%Y-%m-%d %H:%M:%S}, the server's {there:%Y-%m-%d %H:%M:%S} UTC. "
        f"{SET_CLOCK}"
    )


def remedy(reason: str, address: str, authority: Path | None, key: Any = None) -> str:
    """What to do about a certificate that was refused for this reason, in OpenSSL's words.

    Where the server's clock is far from this one's, the clock is what people should look at. Nobody vouches
    for what the server says then, so it is shown to people and used for nothing.
    """
    words, (host, _, port) = reason.lower(), address.rpartition(":")
    host = host.strip("[]")
    if "mismatch" in words or "not match" in words or "not valid for" in words:
        return f"Use the name in the certificate; or at the server: fedsolve keys renew --host {host}"
    if "expired" in words or "not yet valid" in words:
        kinds = (OSError, ValueError, KeyError, TypeError, http.client.HTTPException)
        with suppress(*kinds), calling(host, int(port), authority, key, believed=False) as link:
            if text := clocks_apart(float(about(link)[1]["time"]) - time.time()):
                return text
    if "expired" in words:
        with suppress(FedsolveError):
            if authority is not None and load_certificate(authority).not_valid_after_utc <= now():
                return ASK_FOR_AUTHORITY
        return RENEW
    if "not yet valid" in words:
        return SET_CLOCK
    return "Compare ca.crt's fingerprint with the server's operator; if it differs, get the right one."
