"""Digests of a client's rows, by which it notices that some were added or removed since an earlier total."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.federation.client_data import ClientData

_BLOCK = 4096


def row_digests(data: ClientData, key: bytes) -> Array:
    """One number of 64 bits for each row with its label and weight, sorted; the order of rows is nothing.

    A label that a server's class list spells as text counts as the number that it is: otherwise a server
    could make all rows look new.
    """
    labels, weights = data.own_labels(), data.own_weights()
    digests = np.empty(len(data), dtype=np.uint64)
    for start in range(0, len(data), _BLOCK):
        features = data.features(slice(start, start + _BLOCK))
        for place, row in enumerate(features, start):
            label = np.atleast_1d(labels[place]).tolist()
            about = [[_spelled(each) for each in label], None if weights is None else float(weights[place])]
            state = hashlib.blake2b(repr(about).encode(), digest_size=8, key=key)
            state.update(row.tobytes())
            digests[place] = int.from_bytes(state.digest(), "little")
    return np.sort(digests)


def _spelled(label: Any) -> str:
    try:
        return repr(float(label))
    except ValueError:
        return str(label)
