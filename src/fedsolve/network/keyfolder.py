"""Keys and certificates of a federation over a network, and the list of sites that may take part.

The server's folder holds a certificate authority of its own, the server's certificate and the list of
registered sites; a site's folder holds the authority's certificate and the site's private key:

    keys/ca.crt, ca.key                 the authority; ca.crt goes to every site, ca.key to nobody
    keys/server.pem, server.key         the server's certificate and its key
    keys/clients/NAME.key, NAME.pub     a site's key pair, made where the site is; NAME.pub goes to the server
    keys/registered                     one line for each site that may take part: its public key and its name
    keys/roster                         at a site: the same for the other sites that it knows, for secure sums

All keys are elliptic-curve keys on P-256. The server's certificate tells a site that it speaks to the right
server; a site's key, in the certificate that it signs for itself, tells the server which site speaks.
"""

from __future__ import annotations

import os
import re
import stat
from importlib.util import find_spec
from pathlib import Path

from fedsolve.errors import DataError, ModelFileError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Keys:
    """The folder of keys, and the names of the files in it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.authority, self.authority_key = self.folder / "ca.crt", self.folder / "ca.key"
        self.server_certificate, self.server_key = self.folder / "server.pem", self.folder / "server.key"
        self.clients = self.folder / "clients"
        self.registered_file, self.roster_file = self.folder / "registered", self.folder / "roster"

    def client_key(self, name: str) -> Path:
        return self.clients / f"{site_name(name)}.key"

    def client_public_key(self, name: str) -> Path:
        return self.clients / f"{site_name(name)}.pub"


def require_ciphers() -> None:
    """Refuse, with the extra to install, where the library for keys and signatures is missing."""
    if find_spec("cryptography") is None:
        missing = "keys and signatures need the package cryptography, which is not installed."
        raise DataError(f"{missing} Install it: pip install 'fedsolve[privacy]'.")


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
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise ModelFileError(f"cannot make {folder}: {problem.strerror or problem}.") from problem


def write_private(path: Path, data: bytes, replace: bool = False) -> None:
    """Write a file that nobody but its owner can ever read, and that is never there in part."""
    partial = path.with_name(f".{path.name}.new")
    try:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if replace:
            partial.replace(path)
        else:
            os.link(partial, path)
            partial.unlink()
    except OSError as problem:
        partial.unlink(missing_ok=True)
        raise ModelFileError(f"cannot write {path}: {problem.strerror or problem}.") from problem
