"""Whether a site's rows are still the ones it took part in a run with."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np

from fedsolve import container
from fedsolve.container import Array
from fedsolve.errors import ModelFileError
from fedsolve.federation.participant import ClientData

_RUNS = 100
_BLOCK = 4096


class RowMarks:
    """Digests of a site's rows by run, in a file; those of the last runs are kept."""

    def __init__(self, path: Path, data: ClientData) -> None:
        self._path = path
        self._data = data
        self._known: set[str] = set()

    def same(self, run: str) -> bool:
        """Whether these are the rows of this run; the first ones that are asked about become them."""
        if run in self._known:
            return True
        marks = self._read()
        if marks.setdefault(run, self._digest) != self._digest:
            return False
        kept = dict(list(marks.items())[-_RUNS:])
        container.write_atomically(self._path, container.sealed_json(kept))
        self._known.add(run)
        return True

    def _read(self) -> dict[str, str]:
        """The file; without it every run is a new one."""
        if not self._path.exists():
            return {}
        return container.from_sealed_json(
            container.read(self._path),
            what=str(self._path),
            error=ModelFileError,
            remedy="It says which rows this site took part with. Put a copy of it back, or remove it.",
        )

    @cached_property
    def _digest(self) -> str:
        state, data = hashlib.blake2b(digest_size=16), self._data
        _enter(state, data.own_labels())
        if (weights := data.own_weights()) is not None:
            _enter(state, weights)
        for start in range(0, len(data), _BLOCK):
            _enter(state, data.features(slice(start, start + _BLOCK), data.source.dtype))
        return state.hexdigest()


def _enter(state: hashlib.blake2b, array: Array) -> None:
    array = np.ascontiguousarray(array)
    state.update(f"|{array.dtype.str}|{array.shape}|".encode())
    state.update(array.tobytes())
