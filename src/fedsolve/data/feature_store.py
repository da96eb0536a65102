"""The feature store: a folder of features, each set named by the data and the backbone it came from.

    STORE/KEY/manifest.json                 what it is; written last, so that a set with it is complete
    STORE/KEY/x_train.npy, x_test.npy       float32 (rows, width), opened by mmap
    STORE/KEY/y_train.npy, y_test.npy       int64 (rows,), positions in the manifest's class names
    STORE/KEY/progress.json                 instead of the manifest while extraction is under way

KEY is the SHA-256 of canonical JSON that holds the identity of the data (digests of images, labels and
class names) and that of the backbone (weights and preprocessing).

Features are extracted batch by batch, and extraction can stop and resume at any time. Rows are written in
place into a .npy file of final size; a record of how many are safely on disk follows behind. Batches begin at
multiples of the batch size that the record names: an image meets the same neighbours with or without an
interruption, and the file comes out the same to the last bit.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.format import open_memmap

from fedsolve import container, version
from fedsolve.arrays import Array, check_whole
from fedsolve.container import locked
from fedsolve.data.backbones import Backbone
from fedsolve.data.datasets.dataset import Dataset
from fedsolve.data.images import Images
from fedsolve.errors import DataError, ModelFileError, explained, naming
from fedsolve.labels import labels_from_note, labels_note
from fedsolve.tables.schema import Extractor
from fedsolve.version import __version__

__all__ = ["ExtractionProgress", "FeatureStore", "Features", "StoredFeatures"]

MANIFEST = "manifest.json"
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_KEY = re.compile(r"[0-9a-f]{64}")
RECORD = "progress.json"
_STORED = "<f4"
_RECORD_SECONDS = 1.0
"""Seconds of work that a power cut may lose. Syncing after every batch would be slower."""

Limit = int | tuple[int | None, int | None] | None


@dataclass(frozen=True)
class Features:
    """Features and labels of a dataset, ready for a federation.

    x_train, x_test: (rows, width); those of a store are memory-mapped float32, read as they are used.
    y_train, y_test: (rows,) positions in `class_names` and `classes`.
    classes:         (classes,) the label of each class as the dataset has it, in its type.
    """

    key: str
    x_train: Array
    y_train: Array
    x_test: Array | None
    y_test: Array | None
    class_names: tuple[str, ...]
    classes: Array
    manifest: dict[str, Any] = field(repr=False)

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> Features:
        """A dataset's own features, without a backbone."""
        arrays: dict[str, Any] = dict.fromkeys(_ARRAYS)
        for part, split in dataset.parts().items():
            rows = split.inputs if isinstance(split.inputs, np.ndarray) else split.features
            if rows is None:
                raise DataError(
                    f"{dataset.name} holds {dataset.reads}, which need a backbone to become features. Name "
                    "one: --backbone efficientnet-lite0, or pixels; st:NAME for text."
                )
            arrays |= {f"x_{part}": rows, f"y_{part}": split.labels}
        identity = {"format": version.STORE, "data": dataset.identity, "backbone": None}
        manifest = _about(dataset, None) | {"identity": identity, "width": int(arrays["x_train"].shape[1])}
        if dataset.is_images:
            manifest["own_features"] = f"those of {dataset.name.partition('?')[0]}"
        return cls(
            container.digest(identity, {}),
            **arrays,
            class_names=dataset.class_names,
            classes=dataset.classes,
            manifest=json.loads(json.dumps(manifest)),  # as it comes back from a file
        )

    @property
    def extractor(self) -> Extractor | None:
        """Where the features came from; None where they are no features of images."""
        width = int(self.manifest["width"])
        identity = self.manifest["identity"]["backbone"]
        if identity is not None:
            return Extractor.of(self.manifest.get("address", self.manifest["backbone"]), identity, width)
        own = self.manifest.get("own_features")
        return None if own is None else Extractor("", {}, "", width, {"name": own})

    def names(self, labels: Array) -> Array:
        """Names of the classes that labels stand for."""
        return np.array(self.class_names)[labels]

    def compact(self, directions: int | None = None) -> dict[str, Array]:
        """The arrays of an npz file, a byte for each number: features are offset + scale * x by columns.

        directions: that many principal directions of the training rows, the largest first; None: all columns.
        """
        found = {"x_train": np.asarray(self.x_train, np.float64), "y_train": self.y_train}
        if self.x_test is not None and self.y_test is not None:
            found |= {"x_test": np.asarray(self.x_test, np.float64), "y_test": self.y_test}
        tables = [name for name in found if name.startswith("x_")]
        if directions is not None:
            width = self.x_train.shape[1]
            if not 1 <= directions <= width:
                raise DataError(f"directions must be a whole number in [1, {width}]; got {directions}.")
            turned = np.linalg.eigh(np.cov(found["x_train"].T))[1][:, ::-1][:, :directions]
            found |= {name: found[name] @ turned for name in tables}
        offset, spread = found["x_train"].min(axis=0), np.ptp(found["x_train"], axis=0)
        scale = np.where(spread > 0, spread, 1.0) / 255
        for name in tables:
            found[name] = np.rint((found[name] - offset) / scale).clip(0, 255).astype(np.uint8)
        return found | {"offset": offset, "scale": scale, "classes": np.array(self.class_names)}


@dataclass(frozen=True)
class StoredFeatures:
    """A line of the store's list.

    state: "complete"; "partial", where extraction stopped after `done` images; "damaged".
    """

    key: str
    state: Literal["complete", "partial", "damaged"]
    dataset: str = "?"
    backbone: str = "?"
    rows: dict[str, int] = field(default_factory=dict)
    done: int = 0
    width: int | None = None
    nbytes: int = 0
    created: str | None = None

    @property
    def total(self) -> int:
        return sum(self.rows.values())


class FeatureStore:
    """A folder of features: FEDSOLVE_STORE or ~/.cache/fedsolve/features unless one is named."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        chosen = folder or os.environ.get("FEDSOLVE_STORE") or Path.home() / ".cache/fedsolve/features"
        self.folder = Path(chosen).expanduser()

    def build(
        self,
        dataset: Dataset,
        backbone: Backbone | None,
        *,
        batch: int = 64,
        progress: Callable[[ExtractionProgress], None] | None = None,
        limit: Limit = None,
        address: str | None = None,
    ) -> Features:
        """The features of a dataset: from the store, or extracted now and stored.

        A build that was stopped continues where it stopped. Without a backbone the features are the dataset's
        own, and nothing is stored.

        batch:    images that go through the backbone together; a build that is continued keeps its own.
        progress: called after every batch.
        limit:    at most this many rows of each part (a pair: of the training and of the test part), with
                  every class in proportion.
        address:  how the backbone was named, which a model that is made of the features keeps.
        """
        if limit is not None:
            dataset = dataset.limited(*((limit, limit) if isinstance(limit, int) else limit))
        if backbone is None:
            return Features.from_dataset(dataset)
        check_whole(1, batch=batch)
        inputs = {part: split.inputs for part, split in dataset.parts().items()}
        images = {part: rows for part, rows in inputs.items() if not isinstance(rows, np.ndarray)}
        if not images:
            raise DataError(f"{dataset.name} holds features already; leave out backbone {backbone.name}.")
        if getattr(backbone, "reads", "images") != dataset.reads:
            known = "st:NAME or hf:NAME" if dataset.reads == "text" else "efficientnet-lite0"
            raise DataError(
                f"{dataset.name} holds {dataset.reads}, which {backbone.name} does not read. Use --backbone "
                f"{known}."
            )
        identity = {"format": version.STORE, "data": dataset.identity, "backbone": backbone.identity}
        key = container.digest(identity, {})
        folder = self.folder / key
        if (folder / MANIFEST).exists():
            return self._labelled(key, dataset, address)
        with locked(self.folder / f"{key}.lock", f"these features ({key[:12]}) are being built"):
            if (folder / MANIFEST).exists():
                return self._labelled(key, dataset, address)
            about = _about(dataset, backbone) | ({} if address is None else {"address": address})
            started = time.perf_counter()
            record = extract(folder, images, backbone, batch=batch, about=about, progress=progress)
            for part, split in dataset.parts().items():
                np.save(folder / f"y_{part}.npy", split.labels.astype("<i8"))
            for path in folder.glob("*.npy"):
                path.chmod(0o600)
            if dataset.reads == "text" and hasattr(backbone, "cut"):
                whole = [rows.read(slice(None)) for rows in images.values()]
                about["cut"] = sum(int(backbone.cut(texts).sum()) for texts in whole)
            manifest = about | {
                "format": version.STORE,
                "key": key,
                "identity": identity,
                "width": record.width,
                "batch": record.batch,
                "arrays": {
                    name: _array_facts(folder / f"{name}.npy") for name in _ARRAYS if name[2:] in images
                },
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.perf_counter() - started, 3),
                "runtime": {
                    "fedsolve": __version__,
                    "numpy": np.__version__,
                    "python": platform.python_version(),
                    "machine": platform.machine(),
                    "backbone": getattr(backbone, "runtime", ""),
                },
            }
            container.write_atomically(
                folder / MANIFEST, container.sealed_json(json.loads(json.dumps(manifest))), private=True
            )
            (folder / RECORD).unlink(missing_ok=True)
        return self._labelled(key, dataset, address)

    def _labelled(self, key: str, dataset: Dataset, address: str | None) -> Features:
        """Features from the store, with label types and backbone address, which the key leaves out."""
        found = self.get(key)
        named = found.manifest if address is None else found.manifest | {"address": address}
        return replace(found, classes=dataset.classes, manifest=named)

    def get(self, key: str) -> Features:
        """The features with this key, or with the only key that begins so.

        Arrays are compared with the manifest's checksums and mapped, not kept in memory.
        """
        key = self.resolve(key)
        folder = self.folder / key
        manifest = _manifest(folder)
        arrays: dict[str, Any] = dict.fromkeys(_ARRAYS)
        for name, facts in manifest["arrays"].items():
            mapped = _open(folder / f"{name}.npy", facts)
            arrays[name] = np.array(mapped) if name.startswith("y_") else mapped
        names, classes = tuple(manifest["class_names"]), labels_from_note(manifest["classes"])
        assert classes is not None
        return Features(key, **arrays, class_names=names, classes=classes, manifest=manifest)

    def entries(self) -> list[StoredFeatures]:
        """Everything in the store, complete or not, sorted by name."""
        there = self.folder.iterdir() if self.folder.is_dir() else ()
        entries = [self._entry(path) for path in there if _KEY.fullmatch(path.name)]
        return sorted(entries, key=lambda entry: (entry.dataset, entry.backbone, entry.key))

    def resolve(self, key: str) -> str:
        """The full key that begins with `key`."""
        if not re.fullmatch(r"[0-9a-f]+", key):
            raise DataError(f"'{key}' is not a key of features; see 'fedsolve features list'.")
        keys = [entry.key for entry in self.entries() if entry.key.startswith(key)]
        if len(keys) != 1:
            seen = f"{len(keys)} keys begin with" if keys else "no features have a key that begins with"
            raise DataError(f"{seen} '{key}' in {self.folder}; see 'fedsolve features list'.")
        return keys[0]

    def remove(self, key: str) -> StoredFeatures:
        """Delete features, complete or not."""
        key = self.resolve(key)
        folder = self.folder / key
        entry = self._entry(folder)
        with (
            locked(self.folder / f"{key}.lock", f"these features ({key[:12]}) are being built"),
            explained(f"cannot remove {folder}", error=ModelFileError, kinds=OSError),
        ):
            # The manifest first: a set that is half deleted must not look complete.
            for name in (MANIFEST, RECORD, *(f"{array}.npy" for array in _ARRAYS)):
                (folder / name).unlink(missing_ok=True)
            for left in folder.glob(".*"):
                left.unlink()
            folder.rmdir()
        return entry

    def _entry(self, folder: Path) -> StoredFeatures:
        size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
        state: Literal["complete", "partial"] = "complete" if (folder / MANIFEST).exists() else "partial"
        try:
            if state == "complete":
                about = _manifest(folder)
                done, width, created = sum(about["rows"].values()), about["width"], about["created"]
            else:
                record = ExtractionRecord.load(folder)
                if record is None:
                    return StoredFeatures(folder.name, state, nbytes=size)
                about, done = record.about, sum(record.done.values())
                width, created = record.width, None
            known = (about["dataset"], about["backbone"], about["rows"])
            return StoredFeatures(folder.name, state, *known, done, width, size, created)
        except (ModelFileError, KeyError, TypeError):
            return StoredFeatures(folder.name, "damaged", nbytes=size)


def _about(dataset: Dataset, backbone: Backbone | None) -> dict[str, Any]:
    return {
        "dataset": dataset.name,
        "backbone": None if backbone is None else backbone.name,
        "rows": {part: len(split) for part, split in dataset.parts().items()},
        "class_names": list(dataset.class_names),
        "classes": labels_note(dataset.classes),
        **({} if (licence := getattr(backbone, "licence", None)) is None else {"licence": licence}),
    }


def _array_facts(path: Path) -> dict[str, Any]:
    array = np.load(path, mmap_mode="r")
    facts = {"shape": list(array.shape), "dtype": array.dtype.str, "bytes": path.stat().st_size}
    return facts | {"sha256": container.file_digest(path)}


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        raise ModelFileError(
            f"{folder}: extraction has not finished. Run the same 'fedsolve features build' again to go on."
        )
    with container.undamaged(path, _rebuild(folder)):
        manifest = container.from_sealed_json(
            container.read(path), what=str(path), error=ModelFileError, remedy=_rebuild(folder)
        )
        if manifest["format"] != version.STORE:
            raise ModelFileError(
                f"{path}: written in format {manifest['format']}, this fedsolve reads "
                f"{version.STORE}. {_rebuild(folder)}"
            )
        for name in ("arrays", "class_names", "rows", "dataset", "backbone", "width"):
            manifest[name]
        labels_from_note(manifest["classes"])
    return manifest


def _open(path: Path, facts: dict[str, Any]) -> Array:
    with explained(f"{path}: cannot be read", _rebuild(path.parent), ModelFileError, OSError):
        digest = container.file_digest(path)
    if digest != facts["sha256"]:
        raise ModelFileError(
            f"{path}: contents changed since they were written (SHA-256 {digest[:12]}..., expected "
            f"{facts['sha256'][:12]}...). {_rebuild(path.parent)}"
        )
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _rebuild(folder: Path) -> str:
    return f"Remove it ('fedsolve features remove {folder.name[:12]}') and build it again."


# -- extraction --------------------------------------------------------------------------------------


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
    path: Path,
    part: str,
    images: Images,
    backbone: Backbone,
    record: ExtractionRecord,
    tell: Callable[[str, int, bool], None],
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
