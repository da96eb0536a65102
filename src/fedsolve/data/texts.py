"""Texts of a column, as a backbone reads them; identified by their contents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

from fedsolve.arrays import Array


class Texts:
    """Texts in the place of `Images`."""

    def __init__(self, texts: Sequence[str], source: str) -> None:
        self._texts, self._source = list(texts), source

    def __len__(self) -> int:
        return len(self._texts)

    def name(self, row: int) -> str:
        return f"{self._source}, text {row}"

    def read(self, rows: slice | Array) -> list[str]:
        return self._texts[rows] if isinstance(rows, slice) else [self._texts[row] for row in rows]

    def take(self, rows: Array) -> Texts:
        return Texts(self.read(rows), self._source)

    @cached_property
    def identity(self) -> str:
        digest = hashlib.sha256(b"texts\n")
        for text in self._texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d " % len(data) + data)
        return digest.hexdigest()
