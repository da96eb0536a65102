"""The feature store: a folder of features, each set named by the data and the backbone it came from.

    STORE/KEY/manifest.json                 what it is; written last, so that a set with it is complete
    STORE/KEY/x_train.npy, x_test.npy       float32 (rows, width), opened by mmap
    STORE/KEY/y_train.npy, y_test.npy       int64 (rows,), positions in the manifest's class names
    STORE/KEY/progress.json                 instead of the manifest while extraction is under way

KEY is the SHA-256 of canonical JSON that holds the identity of the data (digests of images, labels and
class names) and that of the backbone (weights and preprocessing).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsolve import container, version
from fedsolve.arrays import Array, check_whole
from fedsolve.container import locked
from fedsolve.data.backbones import Backbone
from fedsolve.data.datasets.dataset import Dataset
from fedsolve.data.extraction import RECORD, ExtractionProgress, ExtractionRecord, extract
from fedsolve.errors import DataError, ModelFileError, explained
from fedsolve.labels import labels_from_note, labels_note
from fedsolve.tables.schema import Extractor
from fedsolve.version import __version__

__all__ = ["ExtractionProgress", "FeatureStore", "Features", "StoredFeatures"]

MANIFEST = "manifest.json"
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_KEY = re.compile(r"[0-9a-f]{64}")

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
        own: dict[str, Array] = {}
        for part, split in dataset.parts().items():
            rows = split.inputs if isinstance(split.inputs, np.ndarray) else split.features
            if rows is None:
                raise DataError(
                    f"{dataset.name} holds {dataset.reads}, which need a backbone to become features. Name "
                    "one: --backbone efficientnet-lite0, or pixels; st:NAME for text."
                )
            own[part] = rows
        identity = {"format": version.STORE, "data": dataset.identity, "backbone": None}
        manifest = _about(dataset, None) | {"identity": identity, "width": int(own["train"].shape[1])}
        if dataset.is_images:
            manifest["own_features"] = f"those of {dataset.name.partition('?')[0]}"
        return cls(
            _key(identity),
            own["train"],
            dataset.train.labels,
            own.get("test"),
            None if dataset.test is None else dataset.test.labels,
            dataset.class_names,
            dataset.classes,
            json.loads(json.dumps(manifest)),  # as it comes back from a file
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
        key = _key(identity)
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
        arrays = {name: _open(folder / f"{name}.npy", facts) for name, facts in manifest["arrays"].items()}
        classes = labels_from_note(manifest["classes"])
        assert classes is not None
        return Features(
            key,
            arrays["x_train"],
            np.array(arrays["y_train"]),
            arrays.get("x_test"),
            np.array(arrays["y_test"]) if "y_test" in arrays else None,
            tuple(manifest["class_names"]),
            classes,
            manifest,
        )

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


def _key(identity: dict[str, Any]) -> str:
    return hashlib.sha256(container.canonical_json(identity).encode()).hexdigest()


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
