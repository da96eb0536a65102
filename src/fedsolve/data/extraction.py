"""From images to a file of features, batch by batch, so that it can be stopped and continued at any point.

Rows are written in place into a .npy file of final size; a record of how many are safely on disk follows
behind. Batches begin at multiples of the batch size that the record names: an image meets the same
neighbours with or without an interruption, and the file comes out the same to the last bit.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve import container
from fedsolve.container import Array
from fedsolve.data.images import Images
from fedsolve.errors import DataError, ModelFileError

if TYPE_CHECKING:
    from fedsolve.data.backbones import Backbone

RECORD = "progress.json"
_RECORD_SECONDS = 1.0
"""How much work may be lost by a power cut; asking the disk after every batch would cost more."""


@dataclass(frozen=True)
class ExtractionProgress:
    """How far an extraction has come.

    part:    "train" or "test".
    done:    images of all parts that are done, those of earlier runs included.
    total:   images of all parts.
    fresh:   images that this run extracted.
    seconds: since this run began.
    rate:    images per second of this run.
    """

    part: str
    done: int
    total: int
    fresh: int
    seconds: float
    rate: float

    @property
    def remaining(self) -> float | None:
        """Seconds still to go, or None while there is nothing to judge by."""
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
        """The record of an earlier run; None if there is none that makes sense."""
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
    """Write x_PART.npy for every part, going on where an earlier run stopped; the record of the whole.

    about: a description for people who list unfinished work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # features are as confidential as the images they came from
    record = ExtractionRecord.load(folder) or ExtractionRecord(batch, None, {})
    record.done = {part: record.done.get(part, 0) for part in parts}
    record.about = about
    clock = _Clock(sum(len(images) for images in parts.values()), progress)
    for part, images in parts.items():
        _extract_part(folder / f"x_{part}.npy", part, images, backbone, record, clock)
    return record


class _Clock:
    """Counts images and measures how fast they come."""

    def __init__(self, total: int, progress: Callable[[ExtractionProgress], None] | None) -> None:
        self._total = total
        self._progress = progress
        self._started = time.perf_counter()
        self._done = 0
        self._fresh = 0

    def tell(self, part: str, images: int, fresh: bool) -> None:
        self._done += images
        self._fresh += images if fresh else 0
        if self._progress is not None:
            seconds = time.perf_counter() - self._started
            rate = self._fresh / seconds if seconds > 0 else 0.0
            self._progress(ExtractionProgress(part, self._done, self._total, self._fresh, seconds, rate))


def _extract_part(
    path: Path, part: str, images: Images, backbone: Backbone, record: ExtractionRecord, clock: _Clock
) -> None:
    total = len(images)
    rows = None
    if record.width is not None:
        if record.done[part] and not _FeatureRows.fit(path, total, record.width):
            # The file was tampered with. Say so before a new one of the right size takes its place.
            record.done[part] = 0
            record.save(path.parent)
        rows = _FeatureRows(path, total, record.width)
    done = 0 if rows is None else record.done[part]
    # Batches begin at multiples of the batch size, so a record in between is not one of ours.
    done = total if done == total else min(done, total) // record.batch * record.batch
    clock.tell(part, done, fresh=False)
    safe = time.monotonic()
    try:
        with closing(_read_ahead(images, done, record.batch)) as batches:
            for span, pictures in batches:
                features = _features(backbone, images, span, pictures, record.width)
                if rows is None:
                    record.width = features.shape[1]
                    rows = _FeatureRows(path, total, record.width)
                rows.write(span.start, features)
                done = span.stop
                if time.monotonic() - safe > _RECORD_SECONDS:
                    _make_safe(rows, record, part, done)
                    safe = time.monotonic()
                clock.tell(part, len(features), fresh=True)
    finally:
        # Also when interrupted: all batches written so far count.
        if rows is not None:
            _make_safe(rows, record, part, done)
            rows.close()


def _make_safe(rows: _FeatureRows, record: ExtractionRecord, part: str, done: int) -> None:
    rows.sync()
    record.done[part] = done
    record.save(rows.path.parent)


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


def _features(
    backbone: Backbone, images: Images, span: slice, pictures: list[Array], width: int | None
) -> Array:
    """Checked features of a batch."""
    where = f"images {span.start} to {span.stop - 1}, beginning with {images.name(span.start)}"
    try:
        features: Array = np.asarray(backbone.extract(pictures))
    except DataError as problem:
        raise DataError(f"{where}: {problem}") from problem
    expected = (len(pictures), features.shape[1] if width is None and features.ndim == 2 else width)
    if features.shape != expected or 0 in features.shape:
        raise DataError(
            f"{where}: backbone {backbone.name} gave features of shape {features.shape}; expected "
            f"({expected[0]}, {expected[1] or 'width'})."
        )
    with np.errstate(over="ignore"):
        features = np.ascontiguousarray(features, dtype="<f4")
    if not np.isfinite(features).all():
        row = int(np.flatnonzero(~np.isfinite(features).all(axis=1))[0])
        raise DataError(
            f"{images.name(span.start + row)}: backbone {backbone.name} gave NaN or infinite features. "
            "Check the image, and mean and std of the preprocessing."
        )
    return features


class _FeatureRows:
    """A .npy file of float32 rows, of its final size from the start and written in place."""

    def __init__(self, path: Path, rows: int, width: int) -> None:
        self.path = path
        header, size = self._layout(rows, width)
        self._start = len(header)
        self._row_bytes = 4 * width
        try:
            keep = self.fit(path, rows, width)
            free = shutil.disk_usage(path.parent).free
            if not keep and free < size:
                raise ModelFileError(
                    f"cannot write {path}: {size / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free. "
                    "Make room, or name another store (--store DIR)."
                )
            self._stream = open(path, "r+b" if keep else "w+b")  # noqa: SIM115
            if not keep:
                self._stream.write(header)
                self._stream.truncate(size)
        except OSError as problem:
            raise _unwritable(path, problem) from problem

    @staticmethod
    def _layout(rows: int, width: int) -> tuple[bytes, int]:
        """The header of the file, and the size of the whole."""
        header = io.BytesIO()
        layout = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        np.lib.format.write_array_header_1_0(header, layout)
        return header.getvalue(), header.tell() + 4 * rows * width

    @classmethod
    def fit(cls, path: Path, rows: int, width: int) -> bool:
        """Whether the file is there with this header and size, so that its rows may be kept."""
        header, size = cls._layout(rows, width)
        if not path.exists() or path.stat().st_size != size:
            return False
        with open(path, "rb") as stream:
            return stream.read(len(header)) == header

    def write(self, row: int, values: Array) -> None:
        try:
            self._stream.seek(self._start + row * self._row_bytes)
            self._stream.write(values.data)
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as problem:
            raise _unwritable(self.path, problem) from problem

    def close(self) -> None:
        self._stream.close()


def _unwritable(path: Path, problem: OSError) -> ModelFileError:
    return ModelFileError(
        f"cannot write {path}: {problem.strerror or problem}. What was done so far is kept."
    )
