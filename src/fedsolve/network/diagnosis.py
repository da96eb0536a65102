"""What can keep a federation from working, one check after the other: `fedsolve doctor`.

A check never raises: whatever goes wrong is a finding, with the remedy beside it.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedsolve.errors import CohortError, DataError, FedsolveError, ModelFileError
from fedsolve.network import certificates, gate_client, security, versions
from fedsolve.network.calls import OTHER_WIRE, address
from fedsolve.network.certificates import Validity
from fedsolve.network.doorway import Doorway
from fedsolve.network.keyfolder import Keys, Site, verify_private

State = Literal["ok", "warning", "failed"]

SCARCE, LOW = 500e6, 5e9
_WRONG_PORT = "Is this the port of 'fedsolve server'? Is it started with the same --insecure as here?"


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was seen, and what to do about it. `code` is an exit code."""

    check: str
    state: State
    seen: str
    remedy: str = ""
    code: int = 0


def attempt(check: str, look: Callable[[], str | Finding]) -> Finding:
    """What `look` returns, or the error it raises, as a finding."""
    try:
        found = look()
        return found if isinstance(found, Finding) else Finding(check, "ok", found)
    except FedsolveError as problem:
        return Finding(check, "failed", str(problem), code=problem.exit_code)
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        return Finding(check, "failed", f"{where}{problem.strerror or problem}", "", 4)


def verify(findings: Iterable[Finding]) -> None:
    """Raise what has failed first."""
    kinds: dict[int, type[FedsolveError]] = {3: CohortError, 4: ModelFileError}
    for one in findings:
        if one.state == "failed":
            raise kinds.get(one.code, DataError)(f"{one.seen} {one.remedy}".rstrip())


def installed() -> Iterator[Finding]:
    """Versions here: fedsolve, and what a federation over a network needs besides."""
    for name, found in versions().items():
        if found is None:
            yield Finding(name, "failed", "not installed", "pip install 'fedsolve[network]'", 2)
        else:
            yield Finding(name, "ok", found)


def server_keys(keys: Keys, hosts: tuple[str, ...] = ()) -> Iterator[Finding]:
    """The server's side of the key folder: dates, chain, pair, modes, hosts and the list of sites."""
    yield _dates("authority", keys.authority, certificates.NEW_AUTHORITY)
    yield _dates("server certificate", keys.server_certificate, certificates.RENEW)
    if not keys.server_certificate.exists():
        return

    def private() -> str:
        verify_private(keys.server_key)
        if keys.authority_key.exists():
            verify_private(keys.authority_key)
        return "private keys are readable by their owner only"

    def named() -> str | Finding:
        known = certificates.certificate_hosts(certificates.load_certificate(keys.server_certificate))
        lacking = [host for host in hosts if host not in known]
        seen = f"certificate for {', '.join(known)}"
        if lacking:
            others = [f"--host {host}" for host in (*lacking, *known) if host not in certificates.ALWAYS]
            remedy = f"fedsolve keys renew {' '.join(others)}"
            return Finding("hosts", "failed", f"{seen}; not for {', '.join(lacking)}", remedy, 4)
        if not hosts and set(known) <= set(certificates.ALWAYS):
            remedy = "fedsolve keys renew --host NAME, with the name that sites use"
            return Finding("hosts", "warning", f"{seen}: no other machine can connect", remedy)
        return seen

    def sites() -> str:
        names = keys.registered.sites()
        if not names:
            raise DataError(
                f"no site is registered in {keys.registered.path}. Register each by the public key it sent "
                "you: fedsolve keys register NAME.pub"
            )
        return f"{len(names)}: {', '.join(names)}"

    yield attempt("chain", lambda: certificates.verify_chain(keys))
    pair, renew = (keys.server_certificate, keys.server_key), "Make a new pair: fedsolve keys renew"
    yield attempt("key pair", lambda: certificates.verify_pair(*pair, renew))
    for check, look in {"file modes": private, "hosts": named, "registered sites": sites}.items():
        yield attempt(check, look)


def site_keys(keys: Keys, name: str) -> Iterator[Finding]:
    """A site's side of the key folder, without its roster."""
    yield authority(keys)

    def key() -> str:
        pair = security.load_client_key(keys, name)
        verify_private(keys.client_key(name))
        public = keys.client_public_key(name)
        site = Site.of(pair.public_key(), name)
        if public.exists() and public.read_text().split()[:2] != site.line.split()[:2]:
            raise ModelFileError(
                f"{public} does not belong to {keys.client_key(name)}. Delete both, make them anew with "
                f"'fedsolve keys client {name}' and have the new key registered."
            )
        return f"{keys.client_key(name)}, {site.fingerprint}"

    yield attempt("site key", key)


def roster(keys: Keys, name: str) -> Finding:
    """The sites that a site knows by its own roster, without which secure sums believe nobody."""

    def known() -> str | Finding:
        others = sorted(set(keys.roster.sites()) - {name})
        seen = ", ".join([f"{keys.roster.path}: {len(others)} other site(s)", *others])
        if len(others) < (least := security.LEAST_SITES - 1):
            remedy = (
                "Compare fingerprints with those sites by telephone, then: fedsolve keys roster SITE.pub ..."
            )
            return Finding("roster", "warning", f"{seen}; secure sums take {least} at least", remedy)
        security.believed_keys(keys, name)
        return seen

    found = attempt("roster", known)
    return replace(found, code=4) if found.state == "failed" else found


def authority(keys: Keys) -> Finding:
    """The authority's certificate, by which a site knows its server."""
    return _dates("authority", keys.authority, certificates.ASK_FOR_AUTHORITY)


def _dates(check: str, path: Path, remedy: str) -> Finding:
    def look() -> str | Finding:
        found = Validity.of(certificates.load_certificate(path), check, remedy)
        found.check(path)
        seen = f"{path}, valid until {found.until:%Y-%m-%d}"
        if found.announced is None:
            return seen
        return Finding(check, "warning", f"{seen}, {found.days} days left", remedy)

    return attempt(check, look)


def port(listen: str, keys: Keys | None) -> Finding:
    """Whether the server can listen there, or does so already."""
    try:
        host, number = address(listen)
        Doorway(host, number).close()
    except (FedsolveError, socket.gaierror) as problem:
        remedy = "Give an address of this machine, or 0.0.0.0."
        return Finding("port", "failed", f"{listen}: {problem}", remedy, 2)
    except PermissionError:
        return Finding("port", "failed", f"{listen}: not allowed", "Use a port above 1023.", 3)
    except OSError as problem:
        inside = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        with suppress(OSError, ValueError):
            if keys is not None and gate_client.shown(inside, number, keys.authority) is not None:
                return Finding("port", "ok", f"{listen}: a fedsolve server is listening")
        remedy = "Choose another port with --listen, or stop the program that has it (ss -ltnp)."
        return Finding("port", "failed", f"{listen}: {problem.strerror}", remedy, 3)
    return Finding("port", "ok", f"{listen} is free")


def connection(server: str, keys: Keys | None, name: str | None) -> Iterator[Finding]:
    """From a site to its server: name, port, TLS, this site's certificate, wire, clock, versions."""
    try:
        host, number = address(server)
    except FedsolveError as problem:
        yield Finding("server address", "failed", str(problem), "", 2)
        return
    yield _proxy(host)
    trusted, key = None if keys is None else keys.authority, None
    try:
        if keys is not None and name is not None:
            key = security.load_client_key(keys, name)
        shown = gate_client.shown(host, number, trusted, key)
    except socket.gaierror as problem:
        remedy = "Check the name, and the DNS."
        yield Finding("server name", "failed", f"{host}: {problem.strerror}", remedy, 3)
        return
    except ssl.SSLCertVerificationError as problem:
        reason = problem.verify_message or str(problem)
        yield Finding("server TLS", "failed", reason, gate_client.remedy(reason, server, trusted, key), 3)
        return
    except ssl.SSLError as problem:
        yield Finding("server TLS", "failed", str(problem), _WRONG_PORT, 3)
        return
    except (OSError, ValueError, FedsolveError) as problem:
        remedy = "Is the server started? Does a firewall let this machine reach that port?"
        yield Finding("server port", "failed", f"{server}: {problem}", remedy, 3)
        return
    yield Finding("server port", "ok", f"{server} answers")
    if shown is None:
        plain = "plain HTTP: anybody on the way reads and changes everything"
        yield Finding("server TLS", "warning", plain)
    else:
        yield Finding("server TLS", "ok", "the server proved its identity by our authority")
        if text := shown.announced:
            seen = text.removesuffix(f" {shown.remedy}")
            yield Finding("server certificate", "warning", seen, shown.remedy)
    if keys is None or name is not None:
        yield from _known(server, trusted, key, name)


def _known(server: str, trusted: Path | None, key: Any, name: str | None) -> Iterator[Finding]:
    """Whether the server lets this site in, under its name; clocks and versions of both."""
    import httpx

    register = f"Send {name}.pub to the server's operator: fedsolve keys register {name}.pub"
    try:
        about, clock = gate_client.look(server, trusted, key)
        there, site = about["versions"], about["site"]
    except gate_client.Refused as refusal:
        if refusal.reason == OTHER_WIRE:
            yield Finding("wire", "failed", str(refusal), "Install the same fedsolve at both ends.", 3)
        else:
            yield Finding("registration", "failed", str(refusal), register, 3)
        return
    except httpx.HTTPError as problem:
        why = f"{type(problem).__name__}: {problem}"
        unknown = f"the server does not know the certificate of '{name}' ({why})"
        check, seen, remedy = ("registration", unknown, register) if trusted else ("server", why, _WRONG_PORT)
        yield Finding(check, "failed", seen, remedy, 3)
        return
    except (ValueError, KeyError, TypeError) as problem:
        seen = f"it does not answer as a fedsolve server ({problem})"
        yield Finding("server", "failed", seen, "Check the port.", 3)
        return
    yield Finding("wire", "ok", f"{about['wire']} at both ends")
    seen = f"{abs(clock):.1f} s {'behind' if clock > 0 else 'ahead of'} the server's"
    if apart := gate_client.clocks_apart(clock):
        seen = f"{seen}; certificates and logs need the right time"
    yield Finding("clock", "warning" if apart else "ok", seen, apart or "")
    if site == name:
        yield Finding("registration", "ok", f"the server knows this site as {name}")
    elif trusted is not None:
        remedy = f"Use --name {site} here, or register the key under the right name."
        yield Finding("registration", "warning", f"the server knows this key as {site}", remedy)
    for package in ("fedsolve", "numpy"):
        here, other = versions()[package], there.get(package)
        if here == other:
            yield Finding(f"same {package}", "ok", f"{here} at both ends")
            continue
        remedy = f"Install the same at both ends: pip install {package}=={other}"
        yield Finding(f"same {package}", "warning", f"{here} here, {other} at the server", remedy)


def _proxy(host: str) -> Finding:
    """Whether the client's calls would go through a proxy; the checks here go straight to the server."""
    known = urllib.request.getproxies()
    proxy = known.get("https") or known.get("all")
    if proxy is None or urllib.request.proxy_bypass(host):
        return Finding("proxy", "ok", "none on the way to the server")
    where = urllib.parse.urlsplit(proxy).hostname or proxy
    remedy = f"export NO_PROXY={host}, unless that proxy passes TLS through unopened."
    name = "HTTPS_PROXY" if "https" in known else "ALL_PROXY"
    return Finding("proxy", "warning", f"{name} sends calls to {where} first", remedy)


def disk(folder: Path) -> Finding:
    """Free space where features, checkpoints and models are written."""
    present = folder.absolute()
    while not present.exists():
        present = present.parent
    free = shutil.disk_usage(present).free
    seen = f"{free / 1e9:.1f} GB free in {folder}"
    remedy = "Free some space or choose another folder: rows x features x 4 bytes are needed for features."
    if free < SCARCE:
        return Finding("disk", "failed", seen, remedy, 4)
    return Finding("disk", "warning", seen, remedy) if free < LOW else Finding("disk", "ok", seen)
