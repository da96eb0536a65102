"""Philox 4x64 in torch, with the bits of numpy's: random projections are made where they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_LOW = (1 << 32) - 1
_WORD = (1 << 64) - 1
_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = ((0, 0x9E3779B97F4A7C15), (64, 0xBB67AE8584CAA73B))
"""Where in the key a word begins, and what is added to it from round to round."""


def philox_uniforms_on(place: torch.device, keys: Sequence[int], count: int) -> Any:
    """`count` uniforms in [0, 1) of 53 bits each for every key, as `uniforms.philox_uniforms` gives them.

    Four of them come of every counter, 1, 2, ...; words are int64, whose products wrap as unsigned ones do.
    """
    counters = -(-count // 4)
    zeros = torch.zeros((2, len(keys), counters), dtype=torch.int64, device=place)
    # Of a counter's four words the first and the third are multiplied in every round.
    multiplied, other = zeros.clone(), zeros
    multiplied[0] = torch.arange(1, counters + 1, device=place)
    # Nothing is copied from the host: that would wait for all that the device has still to do.
    turns = torch.arange(_ROUNDS, device=place)
    words = [
        torch.stack([turns * _signed(weyl) + _signed((key >> shift) & _WORD) for key in keys], dim=1)
        for shift, weyl in _WEYL
    ]
    schedule = torch.stack(words, dim=1)[..., None]
    factor = torch.stack([turns[:1] + _signed(word) for word in _MULTIPLIERS])[..., None]
    low, high = factor & _LOW, (factor >> 32) & _LOW
    for turn in range(_ROUNDS):
        upper = _upper_half(multiplied, low, high)
        mixed = upper.flip(0).bitwise_xor_(other).bitwise_xor_(schedule[turn])
        multiplied, other = mixed, (multiplied * factor).flip(0)
    raw = torch.stack([multiplied[0], other[0], multiplied[1], other[1]], dim=2).flatten(1)[:, :count]
    return ((raw >> 11) & (_WORD >> 11)).to(torch.float64).mul_(2.0**-53)


def _upper_half(words: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The upper 64 bits of unsigned products, by halves of 32 bits."""
    below, above = words & _LOW, (words >> 32) & _LOW
    cross, other = below * high, above * low
    carry = (((below * low) >> 32) & _LOW) + (cross & _LOW) + (other & _LOW)
    return above * high + ((cross >> 32) & _LOW) + ((other >> 32) & _LOW) + (carry >> 32)


def _signed(word: int) -> int:
    """The same 64 bits as a signed number."""
    return word - (1 << 64) if word >> 63 else word
