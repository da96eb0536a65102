"""How long certificates still last, and what to do about one that is refused."""

from __future__ import annotations

import datetime
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedsolve.errors import FedsolveError
from fedsolve.network.certificates import WARN_DAYS, load_certificate, now
from fedsolve.network.keyfolder import Keys

RENEW = "At the server: fedsolve keys renew, then start it again; sites need nothing."
NEW_AUTHORITY = "Begin anew: fedsolve keys init in another folder; send ca.crt to all sites."
ASK_FOR_AUTHORITY = "Ask the server's operator for the new ca.crt."
_PATIENCE = 5.0


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
    """The certificates that a server needs."""
    files = (
        ("the server's certificate", keys.server_certificate, RENEW),
        ("the authority's certificate", keys.authority, NEW_AUTHORITY),
    )
    return [
        Validity(name, load_certificate(path).not_valid_after_utc, remedy) for name, path, remedy in files
    ]


def of_site(keys: Keys) -> Validity:
    """The certificate by which a site knows its server."""
    until = load_certificate(keys.authority).not_valid_after_utc
    return Validity("the authority's certificate (ca.crt)", until, ASK_FOR_AUTHORITY)


def as_served(host: str, port: int, authority: Path, patience: float = _PATIENCE) -> Validity | None:
    """The certificate that a server shows; None where it cannot be reached straight or is not believed."""
    context = ssl.create_default_context(cafile=str(authority))
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host, port), timeout=patience) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        shown = secure.getpeercert() or {}
        seconds = ssl.cert_time_to_seconds(str(shown.get("notAfter", "")))
        until = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        return Validity("the server's certificate", until, RENEW)
    return None


def remedy(reason: str, host: str, authority: Path | None) -> str:
    """What to do about a certificate that was refused for this reason, in OpenSSL's words."""
    words = reason.lower()
    if "mismatch" in words or "not match" in words or "not valid for" in words:
        return f"Use the name in the certificate; or at the server: fedsolve keys renew --host {host}"
    if "expired" in words:
        return ASK_FOR_AUTHORITY if _ended(authority) else RENEW
    if "not yet valid" in words:
        return "Set this machine's clock."
    return "Compare ca.crt's fingerprint with the server's operator; if it differs, get the right one."


def _ended(authority: Path | None) -> bool:
    with suppress(FedsolveError):
        return authority is not None and load_certificate(authority).not_valid_after_utc <= now()
    return False
