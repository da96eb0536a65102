"""`cifar10` and `cifar100`: the official archive or its Python pickles, or PNG files in class folders."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.datasets import folder
from fedsolve.data.datasets.dataset import Dataset, Split
from fedsolve.data.datasets.dataset_files import Published, check_digest, find, read_file
from fedsolve.data.images import ArrayImages
from fedsolve.errors import DataError, explained

_SIDE = 32


@dataclass(frozen=True)
class CifarDataset(Published):
    """Which files make a CIFAR dataset.

    batches, archive: the folder of its pickles, and the file that unpacks to it.
    labels, names:    keys of the labels in a batch, and of the class names in the file `meta`.
    digests:          MD5 of each file; those without are not checked.
    """

    batches: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    classes: int
    digests: dict[str, str] = field(default_factory=dict)
    rows: tuple[int, int] = (50000, 10000)

    @property
    def again(self) -> str:
        return f"Get {self.archive} again from {self.source}."


def load(spec: CifarDataset, root: Path | None) -> Dataset:
    """The dataset, from pickles where there are some, else from class folders."""
    if root is not None and (root / spec.name / "train").is_dir():
        return _from_folders(spec, root / spec.name)
    files = [*spec.train, spec.test, spec.meta]
    folders = (spec.batches, f"{spec.name}/{spec.batches}", spec.name, ".")
    unpacked = root is None or any((root / place / spec.test).is_file() for place in folders)
    archives = [] if unpacked or root is None else [root / spec.archive, root / spec.name / spec.archive]
    packed = next((path for path in archives if path.is_file()), None)
    if packed is None:
        paths = find(spec, root, folders, files)
        contents = {file: read_file(path) for file, path in paths.items()}
    else:
        contents = _packed(spec, packed, files)
        paths = {file: packed / file for file in files}
    batches = {file: _unpickled(spec, paths[file], contents[file]) for file in files}
    train = [_batch(spec, paths[file], batches[file]) for file in spec.train]
    pixels, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    names = batches[spec.meta].get(spec.names)
    if not isinstance(names, list) or len(names) != spec.classes:
        raise DataError(f"{paths[spec.meta]}: no {spec.classes} names in '{spec.names}'. {spec.again}")
    test_pixels, test_labels = _batch(spec, paths[spec.test], batches[spec.test])
    dataset = Dataset(
        spec.name,
        Split(ArrayImages(pixels, str(paths[spec.train[0]].parent)), labels),
        Split(ArrayImages(test_pixels, str(paths[spec.test])), test_labels),
        tuple(_text(name) for name in names),
    )
    return _counted(spec, dataset, paths[spec.test].parent)


def _from_folders(spec: CifarDataset, path: Path) -> Dataset:
    classes = folder.class_folders(path / "train")
    if len(classes) != spec.classes:
        raise DataError(
            f"{path / 'train'}: {len(classes)} class folders, but {spec.name} has {spec.classes} classes."
        )
    train = folder.class_split(path / "train", classes)
    test = folder.evaluation_split(path / "test", classes)
    return _counted(spec, Dataset(spec.name, train, test, tuple(classes)), path)


def _counted(spec: CifarDataset, dataset: Dataset, path: Path) -> Dataset:
    assert dataset.test is not None
    rows = (len(dataset.train), len(dataset.test))
    if rows != spec.rows:
        raise DataError(
            f"{path}: {rows[0]:,} training and {rows[1]:,} test images, but {spec.name} has {spec.rows[0]:,} "
            f"and {spec.rows[1]:,}. {spec.again}"
        )
    return dataset


def _batch(spec: CifarDataset, path: Path, batch: dict[str, Any]) -> tuple[Array, Array]:
    """Images (rows, 32, 32, 3) and labels of one file."""
    pixels, labels = batch.get("data"), batch.get(spec.labels)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * _SIDE**2,):
        seen = f"shape {pixels.shape}, dtype {pixels.dtype}" if isinstance(pixels, np.ndarray) else "none"
        raise DataError(f"{path}: 'data' must be bytes of shape (images, 3072); got {seen}. {spec.again}")
    positions = np.asarray([] if labels is None else labels)
    if positions.shape != (len(pixels),) or positions.dtype.kind not in "iu":
        raise DataError(
            f"{path}: '{spec.labels}' must hold one number for each of {len(pixels)} images; got shape "
            f"{positions.shape}, dtype {positions.dtype}. {spec.again}"
        )
    planes = pixels.reshape(-1, 3, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), positions.astype(np.int64)


def _packed(spec: CifarDataset, archive: Path, files: Sequence[str]) -> dict[str, bytes]:
    """The files of an archive, by name; nothing is written."""
    found: dict[str, bytes] = {}
    with (
        explained(f"{archive}: truncated or damaged archive", spec.again),
        tarfile.open(archive) as tar,
    ):
        for member in tar:
            name = Path(member.name).name
            stream = tar.extractfile(member) if name in files and member.isfile() else None
            if stream is not None:
                found[name] = stream.read()
    missing = [file for file in files if file not in found]
    if missing:
        raise DataError(f"{archive} has no {', '.join(missing)}. {spec.again}")
    return found


def _unpickled(spec: CifarDataset, path: Path, contents: bytes) -> dict[str, Any]:
    with explained(f"{path}: truncated or damaged pickle", spec.again):
        batch = _Unpickler(io.BytesIO(contents), path).load()
    if not isinstance(batch, dict):
        raise DataError(f"{path}: holds a {type(batch).__name__}, not a dictionary. {spec.again}")
    check_digest(path, contents, spec.digests.get(path.name), spec)
    return {_text(key): value for key, value in batch.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """How Python 3 wrote bytes for readers of Python 2."""
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Reads arrays, lists, dictionaries, text and numbers; refuses everything that could run code."""

    def __init__(self, stream: io.BytesIO, path: Path) -> None:
        super().__init__(stream, encoding="bytes")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.").replace("__builtin__", "builtins")
        allowed: dict[tuple[str, str], Any] = {
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.numeric", "_frombuffer"): _from_buffer,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encoded,
            ("builtins", "bytes"): bytes,
        }
        if (module, name) not in allowed:
            raise DataError(
                f"{self._path}: the pickle asks for {module}.{name}, which no official file does; refused."
            )
        return allowed[module, name]


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> Array:
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


_COLOURS = "32 x 32 colour, 50,000 + 10,000 images"
_FILES = "{0} or {1}/ as it unpacks, or PNG files in {2}/train/CLASS and {2}/test/CLASS, in the data folder"
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"

CIFAR10 = CifarDataset(
    "cifar10",
    f"photographs of animals and vehicles, 10 classes, {_COLOURS}",
    _FILES.format("cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar10"),
    _SOURCE,
    load,
    batches="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    labels="labels",
    names="label_names",
    classes=10,
    digests={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)

CIFAR100 = CifarDataset(
    "cifar100",
    f"photographs of things and animals, 100 fine classes, {_COLOURS}",
    _FILES.format("cifar-100-python.tar.gz", "cifar-100-python", "cifar100"),
    _SOURCE,
    load,
    batches="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    train=("train",),
    test="test",
    meta="meta",
    labels="fine_labels",
    names="fine_label_names",
    classes=100,
    digests={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
)

KNOWN = (CIFAR10, CIFAR100)
