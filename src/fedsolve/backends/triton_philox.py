"""Philox 4x64 as a Triton kernel, with the bits of numpy's: projections are made where they are applied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 256
"""Counters of a program; four uniforms come of each."""

PIECE = 30
"""Bits of a key that are passed as one number, so that all of them have the same type."""


def drawn_on(place: torch.device, key: int, count: int, halves: bool = False) -> Tensor:
    """`count` uniforms in [0, 1) of 53 bits each, as `arrays.philox_uniforms` gives them.

    halves: instead the sums of the four 16-bit numbers of each word, which `arrays.philox_normals` adds.
    """
    made = torch.empty(count, dtype=torch.float64, device=place)
    words = (key & (2**64 - 1), key >> 64)
    pieces = [word >> shift & (2**PIECE - 1) for word in words for shift in (0, PIECE, 2 * PIECE)]
    if count:
        with torch.cuda.device_of(made):
            _numbers[(triton.cdiv(count, 4 * WIDE),)](made, count, *pieces, halves, WIDE)
    return made


@triton.jit(do_not_specialize=["count", "a", "b", "c", "d", "e", "f"])
def _numbers(made, count, a, b, c, d, e, f, HALVES: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of the counters 1, 2, ... and the key whose two words are a, b, c and d, e, f from below."""
    number = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    first = (number + 1).to(tl.uint64)
    second = tl.zeros([WIDE], tl.uint64)
    third = tl.zeros([WIDE], tl.uint64)
    fourth = tl.zeros([WIDE], tl.uint64)
    lower = second + (a.to(tl.uint64) | (b.to(tl.uint64) << 30) | (c.to(tl.uint64) << 60))
    upper = second + (d.to(tl.uint64) | (e.to(tl.uint64) << 30) | (f.to(tl.uint64) << 60))
    one = tl.full([WIDE], 0xD2E7470EE14C6C93, tl.uint64)
    other = tl.full([WIDE], 0xCA5A826395121157, tl.uint64)
    for _ in tl.static_range(10):
        mixed = tl.umulhi(third, other) ^ second ^ lower
        third, fourth, second = tl.umulhi(first, one) ^ fourth ^ upper, first * one, third * other
        first = mixed
        lower += tl.full([WIDE], 0x9E3779B97F4A7C15, tl.uint64)
        upper += tl.full([WIDE], 0xBB67AE8584CAA73B, tl.uint64)
    at = number * 4
    _store(made, at, count, first, HALVES)
    _store(made, at + 1, count, second, HALVES)
    _store(made, at + 2, count, third, HALVES)
    _store(made, at + 3, count, fourth, HALVES)


@triton.jit
def _store(made, at, count, word, HALVES: tl.constexpr):
    """A word as a uniform, or as the sum of its four 16-bit numbers."""
    if HALVES:
        number = (word & 0xFFFF) + ((word >> 16) & 0xFFFF) + ((word >> 32) & 0xFFFF) + (word >> 48)
        tl.store(made + at, number.to(tl.float64), mask=at < count)
    else:
        tl.store(made + at, (word >> 11).to(tl.float64) * 2.0**-53, mask=at < count)
