"""Shamir's shares against an implementation of their own: linear systems modulo the prime."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsolve.errors import DataError, TermError
from fedsolve.privacy.shamir import PRIME, SHARE_BYTES, joined, split


def coefficients(points: dict[int, int], prime: int) -> list[int]:
    """The polynomial through the points, constant first: Gauss-Jordan on the Vandermonde system."""
    size = len(points)
    rows = [[pow(x, power, prime) for power in range(size)] + [y % prime] for x, y in points.items()]
    for column in range(size):
        pivot = next(row for row in range(column, size) if rows[row][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = pow(rows[column][column], prime - 2, prime)  # Fermat's inverse
        rows[column] = [entry * scale % prime for entry in rows[column]]
        for row in range(size):
            if row != column:
                factor = rows[row][column]
                rows[row] = [(a - factor * b) % prime for a, b in zip(rows[row], rows[column], strict=True)]
    return [row[-1] for row in rows]


def is_prime(number: int) -> bool:
    """Miller-Rabin with fixed bases and random ones."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in [2, 3, 5, 7, 11, 13, *(secrets.randbelow(number - 3) + 2 for _ in range(20))]:
        value = pow(base, odd, number)
        if value in (1, number - 1):
            continue
        if not any((value := value * value % number) == number - 1 for _ in range(twos - 1)):
            return False
    return True


def numbers(shares: list[bytes]) -> dict[int, int]:
    return {holder: int.from_bytes(share, "big") for holder, share in enumerate(shares, 1)}


def test_the_prime_is_the_smallest_above_2_to_the_256() -> None:
    assert is_prime(PRIME)
    assert not any(is_prime(number) for number in range(2**256 + 1, PRIME, 2))


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 5), st.randoms())
def test_any_threshold_of_shares_gives_the_secret(
    secret: bytes, threshold: int, more: int, random: object
) -> None:
    shares = split(secret, threshold, threshold + more)
    points = list(numbers(shares).items())
    random.shuffle(points)  # type: ignore[attr-defined]
    some = dict(points[:threshold])
    assert coefficients(some, PRIME)[0] == int.from_bytes(secret, "big")
    assert joined({h: shares[h - 1] for h in some}) == secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_extreme_secrets(secret: bytes) -> None:
    shares = split(secret, 3, 5)
    for chosen in itertools.combinations(range(1, 6), 3):
        assert joined({h: shares[h - 1] for h in chosen}) == secret


def test_shares_lie_on_the_polynomial_that_was_drawn() -> None:
    drawn = [bytes([7] * 49), bytes([9] * 49)]
    given_out = iter(drawn)
    shares = split(b"\x05" * 32, 3, 6, lambda size: next(given_out))
    found = coefficients({h: y for h, y in numbers(shares).items() if h in (2, 4, 5)}, PRIME)
    expected = [int.from_bytes(part, "big") % PRIME for part in (b"\x05" * 32, drawn[1], drawn[0])]
    assert found == expected


def test_one_share_too_few_fits_every_secret() -> None:
    shares = numbers(split(secrets.token_bytes(32), 4, 7))
    few = {holder: shares[holder] for holder in (1, 3, 6)}
    for other in (0, 1, 2**256 - 1):
        polynomial = coefficients({0: other, **few}, PRIME)
        assert len(polynomial) == 4
        assert polynomial[0] == other


def test_shares_are_uniform() -> None:
    """Of one secret, whatever it is: the leading byte of a share, over many sharings."""
    leading = [split(bytes(32), 2, 2)[1][1] for _ in range(20_000)]
    counts = np.bincount(leading, minlength=256)
    chi_squared = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert 255 - 6 * np.sqrt(510) < chi_squared < 255 + 6 * np.sqrt(510)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: split(b"short", 2, 3),
        lambda: split(bytes(32), 4, 3),
        lambda: split(bytes(32), 0, 3),
        lambda: joined({0: bytes(33), 1: bytes(33)}),
        lambda: joined({}),
    ],
)
def test_impossible_sharings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(DataError):
        wrong()


def test_missing_and_damaged_shares_are_refused() -> None:
    shares = dict(enumerate(split(bytes(32), 2, 3), 1))
    with pytest.raises(TermError, match="holder 3"):
        joined({1: shares[1], 3: b""})
    with pytest.raises(TermError, match="holder 1"):
        joined({1: b"1", 3: shares[3]})
    outside = (PRIME - 1).to_bytes(SHARE_BYTES, "big")
    with pytest.raises(TermError, match="belong together"):
        joined({1: outside})
