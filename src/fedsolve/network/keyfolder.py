"""Keys and certificates of a federation over a network, and the list of sites that may take part.

The server's folder holds a certificate authority of its own, the server's certificate and the list of
registered sites; a site's folder holds the authority's certificate and the site's private key:

    keys/ca.crt, ca.key                 the authority; ca.crt goes to every site, ca.key to nobody
    keys/server.pem, server.key         the server's certificate and its key
    keys/clients/NAME.key, NAME.pub     a site's key pair, made where the site is; NAME.pub goes to the server
    keys/registered                     one line for each site that may take part: its public key and its name
    keys/roster                         at a site: the same for those whose keys its own people have compared

All keys are elliptic-curve keys on P-256. The server's certificate tells a site that it speaks to the right
server; a site's key, in the certificate that it signs for itself, tells the server which site speaks.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedsolve import container
from fedsolve.errors import DataError, ModelFileError, explained, require
from fedsolve.network.ciphers import ec, exceptions, serialization

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Site:
    """A site of a list: its name, its public key as one OpenSSH line and in PEM form."""

    name: str
    line: str
    pem: bytes

    @classmethod
    def of(cls, key: ec.EllipticCurvePublicKey, name: str) -> Site:
        pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return cls(site_name(name), f"{line.decode()} {name}", pem)

    @classmethod
    def read(cls, line: str, where: str) -> Site:
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
            raise DataError(
                f"{where} must have three words: type, key and the site's name, not {len(words)}."
            )
        return cls.of(key, words[2])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the public key as `ssh-keygen -l` prints it, to be compared by telephone."""
        digest = hashlib.sha256(base64.b64decode(self.line.split()[1])).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class SiteList:
    """A file with a line for each site: its public key and its name. No file means no site.

    removing: the command that takes a site off, for messages.
    """

    def __init__(self, path: Path, removing: str) -> None:
        self.path = path
        self._removing = removing

    def sites(self) -> dict[str, Site]:
        if not self.path.exists():
            return {}
        lines = enumerate(container.read(self.path).decode("utf-8", "replace").splitlines(), 1)
        told = [(number, line) for number, line in lines if line.strip() and not line.startswith("#")]
        found = [Site.read(line, f"{self.path}, line {number}") for number, line in told]
        return {site.name: site for site in found}

    def add(self, public_key: str | os.PathLike[str], name: str | None = None) -> Site:
        """Put a site on the list by its public key file. The same key again changes nothing."""
        text = container.read(public_key).decode("utf-8", "replace").strip()
        words = text.split()
        if name is not None or len(words) < 3:
            text = " ".join([*words[:2], site_name(name or Path(public_key).stem)])
        site, sites = Site.read(text, str(public_key)), self.sites()
        old = sites.get(site.name)
        if old is not None and old.pem != site.pem:
            raise DataError(
                f"a site {site.name!r} with another key ({old.fingerprint}) is registered. If it has a new "
                f"key, remove the old one first: {self._removing} {site.name}"
            )
        for other in sites.values():
            if other.pem == site.pem and other.name != site.name:
                raise DataError(
                    f"this key is registered for the site {other.name!r} already. Every site needs its own: "
                    f"fedsolve keys client {site.name}"
                )
        self._write(sites | {site.name: site})
        return site

    def remove(self, name: str) -> Site:
        """Take a site off the list."""
        sites = self.sites()
        if name not in sites:
            known = ", ".join(sites) or "nobody"
            raise DataError(f"no site {name!r} is registered (registered: {known}).")
        site = sites.pop(name)
        self._write(sites)
        return site

    def _write(self, sites: dict[str, Site]) -> None:
        lines = ["# Public key and name of each site. Written by 'fedsolve keys'."]
        lines += [sites[name].line for name in sorted(sites)]
        container.write_atomically(self.path, ("\n".join(lines) + "\n").encode())


class Keys:
    """The folder of keys, and the names of the files in it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.authority, self.authority_key = self.folder / "ca.crt", self.folder / "ca.key"
        self.server_certificate, self.server_key = self.folder / "server.pem", self.folder / "server.key"
        self.clients = self.folder / "clients"
        self.registered = SiteList(self.folder / "registered", "fedsolve keys remove")
        self.roster = SiteList(self.folder / "roster", "fedsolve keys roster --remove")

    def client_key(self, name: str) -> Path:
        return self.clients / f"{site_name(name)}.key"

    def client_public_key(self, name: str) -> Path:
        return self.clients / f"{site_name(name)}.pub"


def require_ciphers() -> None:
    """Refuse, with the extra to install, where the library for keys and signatures is missing."""
    require("cryptography", "privacy", "a key or a signature")


def site_name(text: str) -> str:
    """The name, if a site may have it: it becomes a file name, a client's id and a word in logs."""
    if not _NAME.fullmatch(text):
        raise DataError(
            f"{text!r} cannot name a site. Use up to 63 letters, digits, dots, dashes and underscores, "
            "the first one a letter or a digit."
        )
    return text


def verify_private(path: Path) -> None:
    """Raise if anybody but its owner may read a private key."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise ModelFileError(f"{path}, a private key, may be read by others ({mode:04o}). chmod 600 {path}")


def private_folder(folder: Path) -> None:
    """Make the folder, open to its owner only; one that exists stays as it is."""
    with explained(f"cannot make {folder}", "", ModelFileError, OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def state_folder(folder: Path, wait: float = 0) -> Iterator[None]:
    """Hold a folder of state, open to its owner only; refused if another process has it, after `wait` s."""
    private_folder(folder)
    with container.locked(folder / "lock", f"the state folder {folder} is used", wait):
        yield


def write_new_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read; one that another process has made meanwhile stays."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    container.write_atomically(partial, data, private=True)
    try:
        with explained(f"cannot write {path}", "", ModelFileError, OSError):
            os.link(partial, path)
    finally:
        partial.unlink()
