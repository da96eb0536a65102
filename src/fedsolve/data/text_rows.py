"""Features of the texts in a column, by the backbone that a schema names; each text is computed once.

Features are kept in the feature store, in a file for each backbone, by a digest of the text. So the features
of a text keep their bits when other texts come or go, and work that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import canonical_json, digest
from fedsolve.data.backbones import known_backbone, load_backbone
from fedsolve.data.feature_store import FeatureStore
from fedsolve.errors import DataError, ModelFileError, TruncationWarning, explained
from fedsolve.tables.schema import Extractor

KINDS = ("hf", "st")
"""Backbones that read text. They never run code that comes with a model, whoever wrote the schema."""

_BATCH = 64

Bar = Callable[[str, str], AbstractContextManager[Callable[[int, int, str], None]]]
_surroundings: ContextVar[tuple[Bar, str | None] | None] = ContextVar("surroundings", default=None)


@contextmanager
def text_work(bar: Bar, store: str | None = None) -> Iterator[None]:
    """Within, progress is shown by this bar, and features are kept in this store."""
    token = _surroundings.set((bar, store))
    try:
        yield
    finally:
        _surroundings.reset(token)


def described(address: str) -> Extractor:
    """The backbone of this address as a schema names it."""
    backbone = load_backbone(checked(address))
    if getattr(backbone, "reads", "images") != "text":
        raise DataError(f"{address} reads images, not text.")
    return Extractor.of(address, backbone.identity, backbone.width or 0)


def checked(address: str) -> str:
    """The same address, if it is of a kind that reads text."""
    if address.partition(":")[0].strip() not in KINDS:
        raise DataError(f"'{address}' does not read text; use hf:NAME or st:NAME, or a folder.")
    return address


def text_features(texts: Sequence[str], wanted: Extractor) -> Array:
    """Features (texts, width) in float32 by exactly the backbone `wanted`.

    Texts of which only a part is read are counted in a warning.
    """
    checked(wanted.address)
    backbone = _loaded(canonical_json(wanted.to_note()))
    if cut := int(backbone.cut(texts).sum()):
        warnings.warn(
            f"{cut} of {len(texts)} different texts are longer than the {backbone.preprocessing.length} "
            f"tokens that {backbone.name} reads; the rest of them is left out.",
            TruncationWarning,
            stacklevel=1,
        )
    features = np.empty((len(texts), wanted.width), dtype=np.float32)
    keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
    bar, store = _surroundings.get() or (lambda title, unit: nullcontext(lambda *told: None), None)
    with closing(_kept(backbone, FeatureStore(store).folder)) as kept:
        missing = []
        for row, key in enumerate(keys):
            found = kept.execute("SELECT features FROM texts WHERE digest = ?", (key,)).fetchone()
            if found is None:
                missing.append(row)
            else:
                features[row] = np.frombuffer(found[0], dtype="<f4")
        # Texts of like length together, so that little of a batch is filling.
        missing.sort(key=lambda row: (len(texts[row]), keys[row]))
        with bar(backbone.name, "text") as advance:
            for start in range(0, len(missing), _BATCH):
                rows = missing[start : start + _BATCH]
                features[rows] = backbone.extract([texts[row] for row in rows])
                made = [(keys[row], features[row].astype("<f4").tobytes()) for row in rows]
                with kept:
                    kept.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?)", made)
                advance(start + len(rows), len(missing), "")
    return features


@lru_cache(maxsize=4)
def _loaded(note: str) -> Any:
    """The loaded backbone, compared with what the schema says of it."""
    return known_backbone(Extractor(**json.loads(note)))[1]


def _kept(backbone: Any, folder: Path) -> sqlite3.Connection:
    """The file of features by this backbone, readable for its owner only."""
    path = folder / f"texts-{digest(backbone.identity, {})[:32]}.sqlite"
    remedy = "Name another folder in FEDSOLVE_STORE, or remove the file."
    with explained(f"{path} cannot be used", remedy, ModelFileError, (OSError, sqlite3.Error)):
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        kept = sqlite3.connect(path, timeout=600)
        kept.execute("CREATE TABLE IF NOT EXISTS texts (digest BLOB PRIMARY KEY, features BLOB)")
    return kept
