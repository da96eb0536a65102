"""Sums that show nothing but the sum: numbers in a ring, masks that cancel, keys shared among sites.

    secure         the engine: a federation whose server sees sums only
    secure_client  the client's side of it: letters in, letters out
    disclosure     what a client tells of its rows: cells, products, told
    census         how many rows of all lie in which cells
    ledger         what a client remembers of sums, and what it does not help to open
    verifying      a client's own copy of a run, by which it checks what is asked; the server's part in it
    joint_seed     a seed that all clients draw together
    policy         what a site answers at all, from a file at the site, and what that has cost its rows
    run_store      what a server still knows of a run after a restart
    ring           terms in fixed point, added modulo 2^128 or 2^64, and which array travels in how many limbs
    graph          who shares secrets with whom, where clients are many
    sizes          what answers look like, exponents for one limb, and whether a total is known well enough
    shamir         secrets that a threshold of holders can give back
    masking        the client's side of one sum: keys, masked terms, help to open a total
    unmasking      the server's side of one sum: terms added, masks removed; what shows its total to clients
    notes          what the two sides tell each other, as bytes
    primitives     the functions of the library `cryptography` used here: keys, seals, masks and signatures

Nothing here knows a network, and nothing is imported before it is used: cryptography is an optional extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsolve.privacy.secure import SecureFederation

__all__ = ["MISSING_LIBRARY", "SecureFederation"]

MISSING_LIBRARY = (
    "secure sums need the library cryptography, which is not installed. "
    "Install it: pip install 'fedsolve[privacy]'."
)


def __getattr__(name: str) -> Any:
    if name == "SecureFederation":
        from fedsolve.privacy.secure import SecureFederation

        globals()[name] = SecureFederation
        return SecureFederation
    raise AttributeError(f"module 'fedsolve.privacy' has no attribute {name!r}")
