"""Parts of the package cryptography, loaded when something of them is first used: it is an optional extra.

from fedsolve.network.ciphers import ec, exceptions, hashes, oid, serialization, x509
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsolve.backends.torch_later import Later

__all__ = ["ec", "exceptions", "hashes", "oid", "serialization", "x509"]

if TYPE_CHECKING:
    from cryptography import exceptions, x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import oid
else:
    exceptions, x509, oid = (Later(f"cryptography.{name}") for name in ("exceptions", "x509", "x509.oid"))
    hashes, serialization, ec = (
        Later(f"cryptography.hazmat.primitives.{name}")
        for name in ("hashes", "serialization", "asymmetric.ec")
    )
