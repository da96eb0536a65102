"""Masks as long as a ring vector, drawn from AES-256-CTR and added chunk by chunk.

Bytes of a stream go to the numbers of two limbs first, `CHUNK` of them at a time, the lower limbs of a
chunk before its upper ones, then to the numbers of one limb. That order, chunk size included, is part of
the protocol: both ends of a mask must draw the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.privacy.primitives import key_stream
from fedsolve.privacy.ring import CHUNK, RingVector, add_wide, subtract_wide

_BYTES = 16 * CHUNK
_ZEROS = bytes(_BYTES)


def add_masks(vector: RingVector, masks: Iterable[tuple[bytes, int]]) -> None:
    """Add to a vector, in place, the mask of each key with its sign (1 or -1).

    All masks are applied to one chunk before the next, so that a chunk is read from memory once however
    many there are.
    """
    streams = [(key_stream(key), sign) for key, sign in masks]
    # The library asks for room of one block more than it writes.
    room = bytearray(_BYTES + 16)
    drawn = np.frombuffer(room, dtype="<u8", count=2 * CHUNK)
    carry = np.empty(CHUNK, dtype=bool)
    for start in range(0, vector.wide, CHUNK):
        low, high = vector.low[start : start + CHUNK], vector.high[start : start + CHUNK]
        for stream, sign in streams:
            _draw(stream, room, 2 * len(low))
            combine = add_wide if sign > 0 else subtract_wide
            combine(low, high, drawn[: len(low)], drawn[len(low) : 2 * len(low)], carry)
    single = vector.single
    for start in range(0, len(single), 2 * CHUNK):
        part: Array = single[start : start + 2 * CHUNK]
        for stream, sign in streams:
            _draw(stream, room, len(part))
            (np.add if sign > 0 else np.subtract)(part, drawn[: len(part)], out=part)


def _draw(stream: Any, room: bytearray, words: int) -> None:
    stream.update_into(memoryview(_ZEROS)[: 8 * words], room)
