"""The private keys of sites, and whose signatures a site believes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from fedsolve import container
from fedsolve.errors import FedsolveError, ModelFileError
from fedsolve.network.certificates import elliptic, new_key
from fedsolve.network.ciphers import ec, serialization
from fedsolve.network.keyfolder import Keys, Site, private_folder, write_new_private

T = TypeVar("T")

LEAST_SITES = 3
"""With which a secure sum can be made."""


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
    site = Site.of(key.public_key(), name)
    private_folder(keys.folder)
    private_folder(keys.clients)
    write_new_private(private, secret)
    container.write_atomically(public, f"{site.line}\n".encode())
    return site


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
    return Site.of(load_client_key(keys, name).public_key(), name)


def believed_keys(keys: Keys, name: str) -> dict[str, ec.EllipticCurvePublicKey]:
    """At a site: the public keys that it believes, its own too, by name; refused where they are too few."""
    known, own = keys.roster.sites(), own_site(keys, name)
    if known.get(name, own).pem != own.pem:
        raise ModelFileError(
            f"{keys.roster.path} has another key for {name!r} than {keys.client_key(name)}. Take it off: "
            f"fedsolve keys roster --remove {name}"
        )
    sites = known | {name: own}
    if len(sites) < LEAST_SITES:
        raise ModelFileError(
            f"{keys.roster.path} knows {len(sites) - 1} other site(s); a secure sum takes two at least "
            f"besides {name!r}. Get their public keys, compare fingerprints with them by telephone, and list "
            "them: fedsolve keys roster SITE.pub ... (or, if the server may see this site's sums: --plain)"
        )
    read = serialization.load_pem_public_key
    return {site.name: cast("ec.EllipticCurvePublicKey", read(site.pem)) for site in sites.values()}


class WatchedFile(Generic[T]):
    """What `read` makes of a file, made anew when the file changes.

    failed: called with why it cannot be read, and what was read before (None at first); what it gives counts
            until the file changes again.
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

    return WatchedFile(keys.roster.path, read, failed)
