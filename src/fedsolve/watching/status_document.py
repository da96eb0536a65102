"""The document in which a board tells how a run stands: read, and believed or not."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from fedsolve import formats

SILENT = 20.0
"""Seconds without a word after which a run that has not ended is not believed to be under way."""


def read_document(data: bytes | str) -> dict[str, Any]:
    """A document as a board wrote it; a `ValueError` where it is none."""
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("form") not in formats.STATUS.read:
        raise ValueError("it is not the status of a run, or of another version of fedsolve")
    return found


def silent(document: Mapping[str, Any], now: float | None = None) -> float | None:
    """Seconds since the last word of a run that has not ended, where they are too many to believe in it."""
    age = (time.time() if now is None else now) - float(document["now"])
    return age if document["phase"] in ("starting", "gathering", "running") and age > SILENT else None
