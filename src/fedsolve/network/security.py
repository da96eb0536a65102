"""The sites that may take part: their keys, and the list of them."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from fedsolve import container
from fedsolve.errors import DataError, FedsolveError, ModelFileError
from fedsolve.network.certificates import (
    elliptic,
    load_certificate,
    new_key,
    verify_chain,
    verify_dates,
    verify_pair,
)
from fedsolve.network.ciphers import ec, exceptions, serialization
from fedsolve.network.keyfolder import Keys as Keys
from fedsolve.network.keyfolder import private_folder, site_name, verify_private, write_private

T = TypeVar("T")

_LEAST_SITES = 3
"""With which a secure sum can be made."""


@dataclass(frozen=True)
class Site:
    """A registered site: its name, its public key as one OpenSSH line and in PEM form."""

    name: str
    line: str
    pem: bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public key as `ssh-keygen -l` prints it, to be compared by telephone."""
        digest = hashlib.sha256(base64.b64decode(self.line.split()[1])).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def create_client(keys: Keys, name: str) -> Site:
    """A key pair for a site. Run it at the site: then the private key never leaves the building."""
    private, public = keys.client_key(name), keys.client_public_key(name)
    for path in (private, public):
        if path.exists():
            raise ModelFileError(
                f"{path} exists. Give the site another name, or delete {private.name} and {public.name} "
                "and register the new key at the server."
            )
    key = new_key()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    line = _openssh(key.public_key(), name)
    private_folder(keys.folder)
    private_folder(keys.clients)
    write_private(private, secret)
    container.write_atomically(public, f"{line}\n".encode())
    return _site(line, str(public))


def registered(keys: Keys) -> dict[str, Site]:
    """The sites that may take part, by name. No list means no site."""
    return _sites_in(keys.registered_file)


def known_sites(keys: Keys) -> dict[str, Site]:
    """At a site: the sites whose keys its own people have compared, by name."""
    return _sites_in(keys.roster_file)


def _sites_in(path: Path) -> dict[str, Site]:
    if not path.exists():
        return {}
    sites: dict[str, Site] = {}
    for number, line in enumerate(container.read(path).decode("utf-8", "replace").splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            site = _site(line, f"{path}, line {number}")
            sites[site.name] = site
    return sites


def register(keys: Keys, public_key: str | os.PathLike[str], name: str | None = None) -> Site:
    """Put a site on the list of those that may take part, by its public key file."""
    return _add(keys.registered_file, public_key, name, "fedsolve keys remove")


def know(keys: Keys, public_key: str | os.PathLike[str]) -> Site:
    """At a site: put another site on the roster of those that it knows, by its public key file."""
    return _add(keys.roster_file, public_key, None, "fedsolve keys roster --remove")


def _add(path: Path, public_key: str | os.PathLike[str], name: str | None, removing: str) -> Site:
    """Put a site on a list. The same key again changes nothing."""
    text = container.read(public_key).decode("utf-8", "replace").strip()
    words = text.split()
    if name is not None:
        text = " ".join([*words[:2], site_name(name)])
    elif len(words) < 3:
        text = " ".join([*words[:2], site_name(Path(public_key).stem)])
    site = _site(text, str(public_key))
    sites = _sites_in(path)
    old = sites.get(site.name)
    if old is not None and old.pem != site.pem:
        raise DataError(
            f"a site {site.name!r} with another key ({old.fingerprint}) is registered. If it has a new key, "
            f"remove the old one first: {removing} {site.name}"
        )
    for other in sites.values():
        if other.pem == site.pem and other.name != site.name:
            raise DataError(
                f"this key is registered for the site {other.name!r} already. Every site needs its own: "
                f"fedsolve keys client {site.name}"
            )
    _write_sites(path, sites | {site.name: site})
    return site


def remove(keys: Keys, name: str) -> Site:
    """Take a site off the list. A running server refuses its next call."""
    return _drop(keys.registered_file, name)


def forget(keys: Keys, name: str) -> Site:
    """At a site: take another site off the roster."""
    return _drop(keys.roster_file, name)


def _drop(path: Path, name: str) -> Site:
    sites = _sites_in(path)
    if name not in sites:
        known = ", ".join(sites) or "nobody"
        raise DataError(f"no site {name!r} is registered (registered: {known}).")
    site = sites.pop(name)
    _write_sites(path, sites)
    return site


def _write_sites(path: Path, sites: dict[str, Site]) -> None:
    lines = ["# Public key and name of each site. Written by 'fedsolve keys'."]
    lines += [sites[name].line for name in sorted(sites)]
    container.write_atomically(path, ("\n".join(lines) + "\n").encode())


def verify_server(keys: Keys) -> None:
    """Raise unless the server can start with these keys, saying what to do."""
    anew = "Begin anew with 'fedsolve keys init' and send ca.crt to all sites."
    verify_dates(keys.authority, load_certificate(keys.authority), anew)
    renew = "Make a new one: fedsolve keys renew"
    verify_dates(keys.server_certificate, load_certificate(keys.server_certificate), renew)
    verify_chain(keys)
    verify_pair(keys)
    verify_private(keys.server_key)
    if not registered(keys):
        raise DataError(
            f"no site is registered in {keys.registered_file}. Register each by the public key it sent you: "
            "fedsolve keys register NAME.pub"
        )


def verify_client(keys: Keys, name: str) -> None:
    """Raise unless the site can start with these keys, saying what to do."""
    authority = load_certificate(keys.authority)
    verify_dates(keys.authority, authority, "Ask the server's operator for a new ca.crt.")
    load_client_key(keys, name)
    verify_private(keys.client_key(name))


def load_client_key(keys: Keys, name: str) -> ec.EllipticCurvePrivateKey:
    path = keys.client_key(name)
    if not path.exists():
        raise ModelFileError(
            f"{path} is missing. Make the site's key: fedsolve keys client {name} --keys {keys.folder}"
        )
    return site_key(path)


def site_key(path: Path) -> ec.EllipticCurvePrivateKey:
    return elliptic(path, lambda data: serialization.load_ssh_private_key(data, None))


def own_site(keys: Keys, name: str) -> Site:
    return site_of(load_client_key(keys, name), name)


def believed_keys(keys: Keys, name: str) -> dict[str, ec.EllipticCurvePublicKey]:
    """At a site: the public keys that it believes, its own too, by name; refused where they are too few."""
    known, own = known_sites(keys), own_site(keys, name)
    if known.get(name, own).pem != own.pem:
        raise ModelFileError(
            f"{keys.roster_file} has another key for {name!r} than {keys.client_key(name)}. Take it off: "
            f"fedsolve keys roster --remove {name}"
        )
    sites = known | {name: own}
    if len(sites) < _LEAST_SITES:
        raise ModelFileError(
            f"{keys.roster_file} knows {len(sites) - 1} other site(s); a secure sum takes two at least "
            f"besides {name!r}. Get their public keys, compare fingerprints with them by telephone, and list "
            "them: fedsolve keys roster SITE.pub ... (or, if the server may see this site's sums: --plain)"
        )
    found = {}
    for site in sites.values():
        key = serialization.load_pem_public_key(site.pem)
        found[site.name] = cast("ec.EllipticCurvePublicKey", key)
    return found


class WatchedFile(Generic[T]):
    """What `read` makes of a file, made anew when the file changes.

    failed: called once with why it cannot be read, and with what was read before (None at first); what it
            gives counts until the file changes again.
    """

    def __init__(self, path: Path, read: Callable[[], T], failed: Callable[[Exception, T | None], T]) -> None:
        self._path, self._read, self._failed = path, read, failed
        self._seen: object = None
        self._found: T | None = None

    def __call__(self) -> T:
        try:
            state = self._path.stat()
            seen: object = (state.st_mtime_ns, state.st_size, state.st_ino)
        except OSError as problem:
            seen = str(problem)
        if seen != self._seen:
            try:
                if isinstance(seen, str):
                    raise ModelFileError(seen)
                self._found = self._read()
            except FedsolveError as problem:
                self._found = self._failed(problem, self._found)
            self._seen = seen
        return cast("T", self._found)


def latest_keys(
    keys: Keys, name: str, tell: Callable[[str], None]
) -> Callable[[], dict[str, ec.EllipticCurvePublicKey]]:
    """At a site: the keys that it believes, read again when its roster changes."""
    known = believed_keys(keys, name)

    def read() -> dict[str, ec.EllipticCurvePublicKey]:
        nonlocal known
        found = believed_keys(keys, name)
        if found != known:
            tell(f"the roster has changed: {', '.join(sorted(found.keys() - {name}))}")
            known = found
        return known

    def failed(problem: Exception, before: Any) -> dict[str, ec.EllipticCurvePublicKey]:
        tell(f"{problem} The roster of before stays in force.")
        return known

    return WatchedFile(keys.roster_file, read, failed)


def site_of(key: ec.EllipticCurvePrivateKey, name: str) -> Site:
    return _site(_openssh(key.public_key(), name), name)


def _site(line: str, where: str) -> Site:
    """A site by its OpenSSH line; anything else is refused."""
    words = line.split()
    try:
        key = serialization.load_ssh_public_key(" ".join(words[:2]).encode())
    except (ValueError, exceptions.UnsupportedAlgorithm) as problem:
        raise DataError(
            f"{where} is not a public key in OpenSSH form ({problem}). "
            "The file to register is the site's NAME.pub, from 'fedsolve keys client NAME'."
        ) from problem
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise DataError(f"{where} is not a key on the curve P-256. Make one: fedsolve keys client NAME")
    if len(words) != 3:
        raise DataError(f"{where} must have three words: type, key and the site's name, not {len(words)}.")
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Site(site_name(words[2]), _openssh(key, words[2]), pem)


def _openssh(key: ec.EllipticCurvePublicKey, name: str) -> str:
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return f"{line.decode()} {name}"
