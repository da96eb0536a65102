"""Extract features of rows into a file, batch by batch; extraction can stop and resume at any time.

Rows are written in place into a .npy file of final size; a record of how many are safely on disk follows
behind. Batches begin at multiples of the batch size that the record names: an image meets the same
neighbours with or without an interruption, and the file comes out the same to the last bit.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.data.backbones import Backbone
from fedsolve.data.images import Images
from fedsolve.errors import DataError, ModelFileError, explained, naming

RECORD = "progress.json"
_STORED = "<f4"
Tell = Callable[[str, int, bool], None]
_RECORD_SECONDS = 1.0
"""Seconds of work that a power cut may lose. Syncing after every batch would be slower."""


@dataclass(frozen=True)
class ExtractionProgress:
    """How far an extraction has come: rows done of all parts, by earlier runs too, and those of this run
    (fresh) with its seconds.
    """

    part: str
    done: int
    total: int
    fresh: int
    seconds: float

    @property
    def rate(self) -> float:
        """Rows a second in this run."""
        return self.fresh / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Estimated seconds left, or None."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None


@dataclass
class ExtractionRecord:
    """What is safely on disk: rows done per part, for these batches and this width."""

    batch: int
    width: int | None
    done: dict[str, int]
    about: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        container.write_atomically(folder / RECORD, container.sealed_json(vars(self)), private=True)

    @classmethod
    def load(cls, folder: Path) -> ExtractionRecord | None:
        """The record of an earlier run, or None."""
        try:
            data = (folder / RECORD).read_bytes()
            record = cls(**container.from_sealed_json(data, what=RECORD, error=DataError, remedy=""))
            sound = record.batch > 0 and all(rows >= 0 for rows in record.done.values())
            return record if sound else None
        except (OSError, DataError, TypeError, AttributeError):
            return None


def extract(
    folder: Path,
    parts: Mapping[str, Images],
    backbone: Backbone,
    *,
    batch: int,
    about: dict[str, Any],
    progress: Callable[[ExtractionProgress], None] | None = None,
) -> ExtractionRecord:
    """Write x_PART.npy for every part, resuming an earlier run; return the record.

    about: a description, shown in lists of unfinished work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # features are as confidential as the images they came from
    record = ExtractionRecord.load(folder) or ExtractionRecord(batch, None, {})
    record.done = {part: record.done.get(part, 0) for part in parts}
    record.about = about
    total, done, fresh = sum(map(len, parts.values())), 0, 0
    started = time.perf_counter()

    def tell(part: str, rows: int, computed: bool) -> None:
        nonlocal done, fresh
        done += rows
        fresh += rows if computed else 0
        if progress is not None:
            progress(ExtractionProgress(part, done, total, fresh, time.perf_counter() - started))

    for part, images in parts.items():
        _extract_part(folder / f"x_{part}.npy", part, images, backbone, record, tell)
    return record


def _extract_part(
    path: Path, part: str, images: Images, backbone: Backbone, record: ExtractionRecord, tell: Tell
) -> None:
    total = len(images)
    rows = None
    if record.width is not None:
        if record.done[part] and not _fits(path, total, record.width):
            # The file was tampered with. Say so before a new one of the right size takes its place.
            record.done[part] = 0
            record.save(path.parent)
        rows = _feature_file(path, total, record.width)
    done = 0 if rows is None else record.done[part]
    # Batches begin at multiples of the batch size, so a record in between is not one of ours.
    done = total if done == total else min(done, total) // record.batch * record.batch
    tell(part, done, False)
    safe = time.monotonic()

    def keep() -> None:
        if rows is None:
            return
        with _writing(path):
            rows.flush()
        record.done[part] = done
        record.save(path.parent)

    try:
        with closing(_read_ahead(images, done, record.batch)) as batches:
            for span, pictures in batches:
                features = features_of(backbone, images, span, pictures, record.width)
                if rows is None:
                    record.width = features.shape[1]
                    rows = _feature_file(path, total, record.width)
                rows[span] = features
                done = span.stop
                if time.monotonic() - safe > _RECORD_SECONDS:
                    keep()
                    safe = time.monotonic()
                tell(part, len(features), True)
    finally:
        keep()  # also when interrupted: all batches written so far count


def _read_ahead(images: Images, start: int, batch: int) -> Generator[tuple[slice, list[Array]], None, None]:
    """Batches of decoded images, the next one being read while this one is used."""
    spans = [slice(at, min(at + batch, len(images))) for at in range(start, len(images), batch)]
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader:
        ahead = [reader.submit(images.read, span) for span in spans[:1]]
        for span, following in zip(spans, [*spans[1:], None], strict=False):
            pictures = ahead.pop().result()
            if following is not None:
                ahead.append(reader.submit(images.read, following))
            yield span, pictures


def features_of(
    backbone: Backbone, images: Images, span: slice, pictures: list[Array], width: int | None
) -> Array:
    """Checked features of a batch."""
    with naming(f"rows {span.start} to {span.stop - 1}, beginning with {images.name(span.start)}"):
        features: Array = np.asarray(backbone.extract(pictures))
        expected = (len(pictures), features.shape[1] if width is None and features.ndim == 2 else width)
        if features.shape != expected or 0 in features.shape:
            raise DataError(
                f"backbone {backbone.name} gave features of shape {features.shape}; expected "
                f"({expected[0]}, {expected[1] or 'width'})."
            )
    with np.errstate(over="ignore"):
        features = np.ascontiguousarray(features, dtype=_STORED)
    if not np.isfinite(features).all():
        row = int(np.flatnonzero(~np.isfinite(features).all(axis=1))[0])
        raise DataError(
            f"{images.name(span.start + row)}: backbone {backbone.name} gave NaN or infinite features. "
            "Check it, and the preprocessing (mean and std of an image)."
        )
    return features


def _fits(path: Path, rows: int, width: int) -> bool:
    """Whether the file is there with this shape, so that its rows may be kept."""
    try:
        there = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return False
    return bool(there.shape == (rows, width) and there.dtype == _STORED)


def _feature_file(path: Path, rows: int, width: int) -> np.memmap[Any, Any]:
    """A .npy file of float32 rows, mapped to be written in place; a new one has its final size at once."""
    with _writing(path):
        if _fits(path, rows, width):
            return open_memmap(path, mode="r+")
        size, free = 4 * rows * width, shutil.disk_usage(path.parent).free
        if free < size:
            raise ModelFileError(
                f"cannot write {path}: {size / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free. "
                "Make room, or name another store (--store DIR)."
            )
        made = open_memmap(path, mode="w+", dtype=_STORED, shape=(rows, width))
        if hasattr(os, "posix_fallocate"):  # a disk that fills up later would end the process
            with open(path, "r+b") as stream:
                os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
        return made


def _writing(path: Path) -> AbstractContextManager[None]:
    return explained(f"cannot write {path}", "What was done so far is kept.", ModelFileError, OSError)
