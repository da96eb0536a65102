"""What a training took, from the records of its exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from fedsolve.federation.method import Record


def totals(history: Sequence[Record]) -> dict[str, int]:
    """Exchanges, and bytes up, down and for catching up, over all clients together."""
    return {
        "exchanges": len(history),
        "bytes_up": sum(record.bytes_up for record in history),
        "bytes_down": sum(record.bytes_down for record in history),
        "catch_up_bytes": sum(record.catch_up_bytes for record in history),
    }
