"""Who holds which rows in a run of one process, so that its checkpoint is not resumed with others.

Of each client a checkpoint keeps the number of rows and a digest of their labels and weights, of the first
row and of the last. Of features that are read as they are used, such as parquet, only the first row of the
source is looked at: for more, all row groups would have to be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import ModelFileError
from fedsolve.federation.client_data import ClientData
from fedsolve.streamed import StreamedRows

Held = tuple[int, str]
"""A client's number of rows, and the digest of what they are."""


@dataclass(frozen=True)
class Holdings:
    """What each client holds, by name.

    dealt: whether they share the rows of common arrays, and nobody joined or left: other clients are another
        partition then. Otherwise clients may come and go between exchanges, with the rows they had.
    """

    clients: Mapping[str, Held]
    dealt: bool

    def note(self) -> dict[str, list[Any]]:
        """As a checkpoint keeps it."""
        return {name: list(held) for name, held in self.clients.items()}

    def check(self, kept: Mapping[str, Sequence[Any]], path: str) -> None:
        """Refuse to go on from a checkpoint at `path` that was made with other clients or other rows."""
        there = {name: tuple(held) for name, held in kept.items()}
        common = there.keys() & self.clients.keys()
        if (self.dealt and there.keys() != self.clients.keys()) or (there and not common):
            raise _refused(
                path,
                f"other clients: it knows {_named(sorted(there))}, and here are "
                f"{_named(sorted(self.clients))}",
            )
        changed = [name for name in sorted(common) if there[name] != self.clients[name]]
        if changed:
            rows, now = there[changed[0]][0], self.clients[changed[0]][0]
            counts = f"{rows:,} rows as now, but not these" if rows == now else f"{rows:,} rows, now {now:,}"
            more = f", and of {len(changed) - 1} more" if len(changed) > 1 else ""
            raise _refused(path, f"other rows of '{changed[0]}' ({counts}){more}")


def held_by(data: ClientData) -> Held:
    """What a client holds."""
    digest = hashlib.blake2b(f"{len(data)}|{data.width}".encode(), digest_size=12)
    for part in (data.own_labels(), data.own_weights(), _glance(data)):
        digest.update(b"|" if part is None else _plain(part))
    return len(data), digest.hexdigest()


def _glance(data: ClientData) -> Array:
    """The first row and the last, or the first row of a source that is read as it is used."""
    source = data.source
    if isinstance(source, StreamedRows):
        return source[:1]
    ends = np.array([0, len(data) - 1] if len(data) else [], dtype=np.intp)
    return np.asarray(source[ends if data.rows is None else data.rows[ends]])


def _plain(values: Array) -> bytes:
    """Numbers as float64, whatever type they have, and text by its letters."""
    if values.dtype.kind in "fiub":
        return (np.ascontiguousarray(values, dtype=np.float64) + 0.0).tobytes()  # -0.0 + 0.0 is 0.0
    return "\0".join(map(str, values.ravel().tolist())).encode()


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{len(names)} ({shown}{', ...' if len(names) > 3 else ''})"


def _refused(path: str, what: str) -> ModelFileError:
    return ModelFileError(
        f"checkpoint {path} was made with {what}. Give the data and the partition that it was made with, or "
        "start afresh: without resuming, and with another checkpoint path."
    )
