"""Which worker answers for which clients: neighbours together, and the same worker as before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Seated = tuple[int, Sequence[str]]
"""A place of the tree and the clients that answer there as one."""

_PACKETS = 4
"""Packets that a worker has at least, where it can: for progress, and little to do again after a loss."""

_ROWS = 65536
"""Rows compared at a time where a system does not tell which file is mapped."""


class Placing:
    """Remembers who answered for whom: what a worker has derived from rows is used again.

    machines: of every worker, the machine it is bound to, or None. bound: by client, the machine of its rows.
    """

    def __init__(self, machines: Sequence[str | None], bound: Mapping[str, str]) -> None:
        self._machines = machines
        self._bound = bound
        self._at: dict[str, int] = {}

    @property
    def binds(self) -> bool:
        """Whether rows of some clients can be read on one machine alone."""
        return bool(self._bound)

    def divided(self, leaves: Sequence[Sequence[str]], rows: Callable[[str], int]) -> dict[int, list[Seated]]:
        """The leaves of every worker, in their order."""
        if not all(names[0] in self._at for names in leaves):
            self._place(leaves, rows)
        found: dict[int, list[Seated]] = {}
        for place, names in enumerate(leaves):
            worker = self._at[names[0]]
            found.setdefault(worker, []).append((place, names))
            self._at.update(dict.fromkeys(names, worker))
        return found

    def _place(self, leaves: Sequence[Sequence[str]], rows: Callable[[str], int]) -> None:
        """Runs of neighbours with about as many rows for each worker."""
        self._at = {}
        work = np.array([sum(max(1, rows(name)) for name in names) for names in leaves], dtype=float)
        middle = (np.cumsum(work) - work / 2) / max(1.0, work.sum())
        for names, share in zip(leaves, middle, strict=True):
            machine = self._bound.get(names[0])
            free = [w for w, own in enumerate(self._machines) if machine is None or own == machine]
            self._at[names[0]] = free[min(len(free) - 1, int(share * len(free)))]


def packets_of(leaves: Sequence[Seated]) -> list[list[Seated]]:
    """A worker's leaves in packets whose sums meet: as many places as a power of two, beginning at one."""
    size = 1
    while 2 * size * _PACKETS <= len(leaves):
        size *= 2
    packets: dict[int, list[Seated]] = {}
    for leaf in leaves:
        packets.setdefault(leaf[0] // size, []).append(leaf)
    return list(packets.values())


def file_of(features: Any) -> str | None:
    """The .npy file of which this array is the whole.

    None for a part, for changes not in the file, and where another file has taken the path since.
    """
    path = getattr(features, "filename", None)
    if not isinstance(features, np.memmap) or features.mode == "c" or not str(path).endswith(".npy"):
        return None
    try:
        whole = np.load(str(path), mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None

    def place(array: Any) -> tuple[object, ...]:
        return array.shape, array.strides, array.dtype, array.offset

    if place(whole) != place(features) or not _same_file(whole, features):
        return None
    return str(Path(str(path)).absolute())


def _same_file(one: np.memmap[Any, Any], other: np.memmap[Any, Any]) -> bool:
    """Whether two arrays of one shape are maps of one file, or at least of equal ones."""
    try:
        files = _mapped_files()
    except OSError:  # a system that does not tell
        blocks = [slice(start, start + _ROWS) for start in range(0, len(one), _ROWS)]
        return all(one[block].tobytes() == other[block].tobytes() for block in blocks)

    def identity(array: np.memmap[Any, Any]) -> tuple[str, str] | None:
        address = array.ctypes.data
        return next((found for first, last, found in files if first <= address < last), None)

    found = identity(one)
    return found is not None and found == identity(other)


def _mapped_files() -> list[tuple[int, int, tuple[str, str]]]:
    """From where to where this process has mapped something, and the device and inode of what."""
    spans = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        span, _, _, device, inode = line.split()[:5]
        first, last = (int(end, 16) for end in span.split("-"))
        spans.append((first, last, (device, inode)))
    return spans
