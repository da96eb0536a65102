"""Sealed files in one folder: what a site, or a server, must still know after a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.errors import ModelFileError

Made = TypeVar("Made")


class Shelf:
    """A folder of files that only their owner reads; without one nothing is kept. remedy: for damage.

    A file is whole and on the disk before `keep` or `write` returns.
    """

    _PLAIN = (".json", ".entries")  # text, for people

    def __init__(self, folder: Path | None, remedy: str = "Put a copy of it back.") -> None:
        self.folder, self._remedy = folder, remedy

    def write(self, name: str, data: bytes) -> None:
        if self.folder is not None:
            container.write_atomically(self.folder / name, data, private=True)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None where there is none."""
        path = None if self.folder is None else self.folder / name
        return container.read(path) if path is not None and path.exists() else None

    def keep(self, name: str, note: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
        """Write a note, and arrays, with their seal."""
        if self.folder is not None:
            plain = name.endswith(self._PLAIN)
            self.write(
                name,
                container.sealed_json(note) if plain else container.to_bytes(arrays or {}, note, sealed=True),
            )

    def kept(self, name: str, make: Callable[[dict[str, Array], dict[str, Any]], Made]) -> Made | None:
        """What `make` gives of the arrays and the note of a file; None where there is none."""
        if (data := self.read(name)) is None:
            return None
        assert self.folder is not None
        what, remedy = str(self.folder / name), self._remedy
        if name.endswith(self._PLAIN):
            note = container.from_sealed_json(data, what=what, error=ModelFileError, remedy=remedy)
            arrays: dict[str, Array] = {}
        else:
            arrays, note = container.from_bytes(data, what=what, error=ModelFileError, remedy=remedy)
        with container.undamaged(what, remedy):
            return make(arrays, note)
