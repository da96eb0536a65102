"""`mnist` and `fashion-mnist`: the official idx files, gzipped or not."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.datasets.dataset import Dataset, Split
from fedsolve.data.datasets.dataset_files import Known, Published, check_digest, find, read_file
from fedsolve.data.images import ArrayImages
from fedsolve.errors import DataError, explained

_BYTES = 0x08

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class IdxDataset(Published):
    """Which files make an idx dataset.

    folders: where they may lie under the data folder.
    rows:    training and test images.
    digests: MD5 of the unpacked contents of `FILES`; not checked when empty.
    """

    folders: tuple[str, ...]
    class_names: tuple[str, ...]
    digests: tuple[str, ...] = ()
    rows: tuple[int, int] = (60000, 10000)
    size: tuple[int, int] = (28, 28)


def load(spec: IdxDataset, root: Path | None) -> Dataset:
    """The dataset, its files checked for shape and contents."""
    paths = find(spec, root, spec.folders, FILES)
    arrays = []
    for index, file in enumerate(FILES):
        rows = spec.rows[index // 2]
        shape = (rows,) if index % 2 else (rows, *spec.size)
        digest = spec.digests[index] if spec.digests else None
        arrays.append(_checked(paths[file], shape, digest, spec))
    train, test = (
        Split(ArrayImages(images, str(paths[file])), labels.astype(np.int64))
        for images, labels, file in zip(arrays[::2], arrays[1::2], FILES[::2], strict=True)
    )
    return Dataset(spec.name, train, test, spec.class_names)


def read_idx(path: Path, contents: bytes) -> Array:
    """The array of an idx file of bytes: two zeros, type, number of sizes, sizes, values."""
    if len(contents) < 4 or contents[:2] != b"\0\0" or contents[2] != _BYTES:
        raise DataError(
            f"{path}: not an idx file of bytes (it starts with {contents[:4].hex(' ') or 'nothing'}, "
            "expected 00 00 08). Get the file again."
        )
    start = 4 + 4 * contents[3]
    if len(contents) < start:
        raise DataError(f"{path}: truncated within the idx header. Get the file again.")
    shape = tuple(int(size) for size in np.frombuffer(contents[4:start], dtype=">u4"))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(contents) != expected:
        raise DataError(
            f"{path}: {'truncated' if len(contents) < expected else 'too long'}: {len(contents):,} bytes "
            f"where an array of shape {shape} takes {expected:,}. Get the file again."
        )
    return np.frombuffer(contents, dtype=np.uint8, offset=start).reshape(shape)


def _checked(path: Path, shape: tuple[int, ...], digest: str | None, known: Known) -> Array:
    contents = read_file(path)
    if contents[:2] == b"\x1f\x8b":
        with explained(f"{path}: truncated or damaged gzip file", known.again):
            contents = gzip.decompress(contents)
    array = read_idx(path, contents)
    if array.shape != shape:
        raise DataError(
            f"{path}: holds an array of shape {array.shape}, but {known.name} has {shape}. {known.again}"
        )
    check_digest(path, contents, digest, known)
    return array


_FILES = f"{', '.join(FILES)} (plain or .gz) in {{}}/ of the data folder"

MNIST = IdxDataset(
    "mnist",
    "handwritten digits, 28 x 28 grey, 10 classes, 60,000 + 10,000 images",
    _FILES.format("mnist"),
    "https://yann.lecun.com/exdb/mnist (mirror: https://ossci-datasets.s3.amazonaws.com/mnist)",
    load,
    ("mnist", "MNIST/raw", "MNIST", "."),
    tuple(str(digit) for digit in range(10)),
    (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
)

FASHION_MNIST = IdxDataset(
    "fashion-mnist",
    "photographs of clothes, 28 x 28 grey, 10 classes, 60,000 + 10,000 images",
    _FILES.format("fashion-mnist"),
    "https://github.com/zalandoresearch/fashion-mnist (or Debian's package dataset-fashion-mnist)",
    load,
    ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST", "."),
    ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
)

KNOWN = (MNIST, FASHION_MNIST)
