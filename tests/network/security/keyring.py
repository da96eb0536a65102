"""Keys of a server and its sites, made for a test."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedsolve.network import certificates, security
from fedsolve.network.keyfolder import Keys


def keys_for(folder: Path, sites: Iterable[str], host: str = "localhost") -> Keys:
    """An authority, a server's certificate for `host`, and registered sites."""
    keys = Keys(folder)
    certificates.create_authority(keys, [host])
    for name in sites:
        security.create_client(keys, name)
        keys.registered.add(keys.client_public_key(name))
    return keys
