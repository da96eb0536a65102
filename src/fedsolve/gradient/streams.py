"""Random streams by name: switching one part of a method off leaves every other part's numbers alone."""

from __future__ import annotations

import hashlib
import threading

import numpy as np

GENERATOR = threading.RLock()
"""Held by whoever draws from torch's own generator, which all threads share."""


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator of this seed and these names, such as stream(seed, "batches", client, round)."""
    digest = hashlib.sha256("|".join(["fedsolve-gradient", str(seed), *map(str, names)]).encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))
