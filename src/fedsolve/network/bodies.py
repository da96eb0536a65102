"""Bodies of calls at the gate: read piece by piece, each in time, and refused unless they are the sealed."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fedsolve.network.admission import Refusal, declared_size
from fedsolve.network.parcels import PIECE

if TYPE_CHECKING:
    from starlette.requests import Request

STUCK = 60.0
"""Seconds in which the next piece of a body must come."""

_SMALL = 1 << 16


async def whole(request: Request, digest: str | None) -> bytes:
    """A small body, which must have this SHA-256, if one is given."""
    declared_size(request.headers, _SMALL)
    text = b"".join([piece async for piece in _in_time(request)])
    if digest is not None and hashlib.sha256(text).hexdigest() != digest:
        raise _changed()
    return text


async def store(request: Request, path: Path, digest: str, came: Callable[[int], None]) -> None:
    """Write a body, which must have this SHA-256, to a new file. came: is told how many bytes are there."""
    found, done, held = hashlib.sha256(), 0, bytearray()

    def write(stream: BinaryIO, data: bytes) -> None:
        found.update(data)
        stream.write(data)

    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as stream:
        async for piece in _in_time(request):
            held += piece
            if len(held) >= PIECE:
                done += len(held)
                await asyncio.to_thread(write, stream, bytes(held))
                held.clear()
                came(done)
        await asyncio.to_thread(write, stream, bytes(held))
        await asyncio.to_thread(stream.flush)
    if found.hexdigest() != digest:
        raise _changed()


async def _in_time(request: Request) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(STUCK):
                piece = await anext(stream, None)
        except TimeoutError as problem:
            raise Refusal(408, f"nothing of the body came for {STUCK:.0f} s.", "slow") from problem
        if piece is None:
            return
        yield piece


def _changed() -> Refusal:
    return Refusal(400, "the body is not the one that this call was made for: it was changed.", "body")
