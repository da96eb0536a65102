"""Secrets shared among holders so that a threshold of them gives the secret and fewer give nothing.

Shamir (1979): the secret is the value at 0 of a random polynomial of degree threshold - 1 over a prime
field, and holder i has its value at i, counted from 1. The field's prime is the smallest above 2^256, so
that any 32 bytes are an element.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from functools import cache

from fedsolve.errors import DataError, TermError

PRIME = (1 << 256) + 297
"""The smallest prime above 2^256."""

SECRET_BYTES = 32
SHARE_BYTES = 33

Random = Callable[[int], bytes]
"""So many random bytes."""


def split(secret: bytes, threshold: int, holders: int, random: Random = secrets.token_bytes) -> list[bytes]:
    """The shares of holders 1 to `holders`, any `threshold` of which give the secret back."""
    if len(secret) != SECRET_BYTES:
        raise DataError(f"a secret of {SECRET_BYTES} bytes can be shared; got {len(secret)}.")
    if not 1 <= threshold <= holders:
        raise DataError(f"a threshold must lie between 1 and the {holders} holders; got {threshold}.")
    # 16 bytes more than an element has: what the remainder favours is beyond notice (2^-128).
    drawn = [int.from_bytes(random(SHARE_BYTES + 16), "big") % PRIME for _ in range(threshold - 1)]
    shares = []
    for holder in range(1, holders + 1):
        value = 0  # by Horner's rule, the highest coefficient first
        for coefficient in (*drawn, int.from_bytes(secret, "big")):
            value = (value * holder + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def joined(shares: Mapping[int, bytes]) -> bytes:
    """The secret whose shares these are, by holder from 1: of as many holders as the threshold says."""
    total = 0
    for holder, weight in _weights(tuple(shares)).items():
        if len(shares[holder]) != SHARE_BYTES:
            raise TermError(f"the share of holder {holder} is not {SHARE_BYTES} bytes long.")
        total += weight * int.from_bytes(shares[holder], "big")
    value = total % PRIME
    if value >> (8 * SECRET_BYTES):
        raise TermError("the shares do not belong together: they give no secret.")
    return value.to_bytes(SECRET_BYTES, "big")


@cache  # the same holders give back the secrets of all members in all slots
def _weights(holders: tuple[int, ...]) -> dict[int, int]:
    """Lagrange's weights of the holders' values for the value at 0."""
    if not holders or min(holders) < 1:
        raise DataError(f"holders must be numbers from 1; got {list(holders)}.")
    weights = {}
    for holder in holders:
        others = [other for other in holders if other != holder]
        below = math.prod(other - holder for other in others)
        weights[holder] = math.prod(others) * pow(below, -1, PRIME) % PRIME
    return weights
