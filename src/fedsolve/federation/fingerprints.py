"""Fingerprints: digests of a client's rows. Those of single rows are in `folds`.

* A checkpoint keeps what every client held (`Holdings`): the number of rows, and a digest of labels, weights,
  the first row and the last. More would mean reading all rows of all clients.
* A site keeps a digest of all its rows by run (`RowsByRun`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import container
from fedsolve.arrays import Array, StreamedRows
from fedsolve.errors import ModelFileError
from fedsolve.federation.client_data import ClientData

_BLOCK = 4096
_RUNS = 100


Held = tuple[int, str]
"""A client's number of rows, and the digest of what they are."""


def held_by(data: ClientData, whole: bool = False) -> Held:
    """What a client holds; `whole`: by all its rows, not only the first and the last.

    Of features that are streamed, such as parquet, only the first row of the source is looked at: for more,
    all row groups would have to be read.
    """
    digest = hashlib.blake2b(f"{len(data)}|{data.width}".encode(), digest_size=16)
    for part in (data.own_labels, data.own_weights):
        digest.update(b"|" if part is None else _plain(part))
    if not whole:
        ends: Any = slice(1)
        if not isinstance(data.source, StreamedRows):
            ends = np.array([0, len(data) - 1] if len(data) else [], dtype=np.intp)
            ends = ends if data.rows is None else data.rows[ends]
        digest.update(_plain(np.asarray(data.source[ends])))
    for start in range(0, len(data) if whole else 0, _BLOCK):
        digest.update(_plain(data.features(slice(start, start + _BLOCK))))
    return len(data), digest.hexdigest()


@dataclass(frozen=True)
class Holdings:
    """What each client holds, by name.

    dealt: whether they share the rows of common arrays, and nobody joined or left: other clients are another
        partition then. Otherwise clients may come and go between exchanges, with the rows they had.
    """

    clients: Mapping[str, Held]
    dealt: bool

    def note(self) -> dict[str, list[Any]]:
        """The form that a checkpoint keeps."""
        return {name: list(held) for name, held in self.clients.items()}

    def check(self, kept: Mapping[str, Sequence[Any]], path: str) -> None:
        """Refuse to resume a checkpoint that was made with other clients or other rows."""
        there = {name: tuple(held) for name, held in kept.items()}
        common = there.keys() & self.clients.keys()
        changed = [name for name in sorted(common) if there[name] != self.clients[name]]
        if (self.dealt and there.keys() != self.clients.keys()) or (there and not common):
            what = f"other clients: it knows {_named(there)}, and here are {_named(self.clients)}"
        elif changed:
            rows, now = there[changed[0]][0], self.clients[changed[0]][0]
            counts = f"{rows:,} rows as now, but not these" if rows == now else f"{rows:,} rows, now {now:,}"
            more = f", and of {len(changed) - 1} more" if len(changed) > 1 else ""
            what = f"other rows of '{changed[0]}' ({counts}){more}"
        else:
            return
        raise ModelFileError(
            f"checkpoint {path} was made with {what}. Give the data and the partition that it was made with, "
            "or start afresh: without resuming, and with another checkpoint path."
        )


@dataclass
class RowsByRun:
    """A file that records with which rows a site took part in its last runs."""

    path: Path
    data: ClientData
    _known: set[str] = field(default_factory=set)

    def same(self, run: str) -> bool:
        """Whether these are the rows this run began with. The first call for a run records them."""
        if run in self._known:
            return True
        kept: dict[str, str] = {}
        if self.path.exists():
            kept = container.from_sealed_json(
                container.read(self.path),
                what=str(self.path),
                error=ModelFileError,
                remedy="It says which rows this site took part with. Put a copy of it back, or remove it.",
            )
        if kept.setdefault(run, self._digest) != self._digest:
            return False
        last = dict(list(kept.items())[-_RUNS:])
        container.write_atomically(self.path, container.sealed_json(last))
        self._known.add(run)
        return True

    @cached_property
    def _digest(self) -> str:
        return held_by(self.data, whole=True)[1]


def _plain(values: Array) -> bytes:
    """Numbers as float64, whatever type they have, and text by its letters."""
    if values.dtype.kind in "fiub":
        return (np.ascontiguousarray(values, dtype=np.float64) + 0.0).tobytes()  # -0.0 + 0.0 is 0.0
    return "\0".join(map(str, values.ravel().tolist())).encode()


def _named(clients: Mapping[str, Any]) -> str:
    names = sorted(clients)
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})"
