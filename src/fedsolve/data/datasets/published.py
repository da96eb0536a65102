"""Images as published: `mnist`, `fashion-mnist`, `cifar10`, `cifar100`, `medmnist:NAME` and `digits`."""

from __future__ import annotations

import io
import math
import pickle
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.datasets import folder
from fedsolve.data.datasets.dataset import (
    Dataset,
    Known,
    Published,
    Split,
    find,
    official,
    read_file,
    unknown,
)
from fedsolve.data.images import ArrayImages
from fedsolve.errors import DataError, explained
from fedsolve.tables.table_file import open_npz

# -- the idx files of MNIST, gzipped or not -----------------------------------------------------------

_BYTES = b"\0\0\x08"

IDX_FILES = (
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
    """

    folders: tuple[str, ...]
    class_names: tuple[str, ...]
    rows: tuple[int, int] = (60000, 10000)
    size: tuple[int, int] = (28, 28)


def load_idx(spec: IdxDataset, root: Path | None) -> Dataset:
    """The dataset, its files checked for shape and contents."""
    paths = find(spec, root, spec.folders, IDX_FILES)
    arrays: list[Array] = []
    for file, rows in zip(IDX_FILES, np.repeat(spec.rows, 2).tolist(), strict=True):
        shape = (rows, *spec.size) if "images" in file else (rows,)
        array = read_idx(paths[file], read_file(paths[file], spec), spec)
        if array.shape != shape:
            seen = f"{paths[file]}: holds an array of shape {array.shape}"
            raise DataError(f"{seen}, but {spec.name} has {shape}. {spec.again}")
        arrays.append(array)
    train, test = (
        Split(ArrayImages(images, str(paths[file])), labels.astype(np.int64))
        for images, labels, file in zip(arrays[::2], arrays[1::2], IDX_FILES[::2], strict=True)
    )
    return Dataset(spec.name, train, test, spec.class_names)


def read_idx(path: Path, contents: bytes, known: Known) -> Array:
    """The array of an idx file of bytes: two zeros, type, number of sizes, sizes, values."""
    if not contents.startswith(_BYTES) or len(contents) < 4:
        raise DataError(
            f"{path}: not an idx file of bytes (it starts with {contents[:4].hex(' ') or 'nothing'}, "
            f"expected {_BYTES.hex(' ')}). {known.again}"
        )
    start = 4 + 4 * contents[3]
    if len(contents) < start:
        raise DataError(f"{path}: truncated within the idx header. {known.again}")
    shape = tuple(np.frombuffer(contents[4:start], dtype=">u4").tolist())
    expected = start + math.prod(shape)
    if len(contents) != expected:
        raise DataError(
            f"{path}: {'truncated' if len(contents) < expected else 'too long'}: {len(contents):,} bytes "
            f"where an array of shape {shape} takes {expected:,}. {known.again}"
        )
    return np.frombuffer(contents, dtype=np.uint8, offset=start).reshape(shape)


_IDX = f"{', '.join(IDX_FILES)} (plain or .gz) in {{}}/ of the data folder"

MNIST = IdxDataset(
    "mnist",
    "handwritten digits, 28 x 28 grey, 10 classes, 60,000 + 10,000 images",
    _IDX.format("mnist"),
    "https://yann.lecun.com/exdb/mnist (mirror: https://ossci-datasets.s3.amazonaws.com/mnist)",
    load_idx,
    ("mnist", "MNIST/raw", "MNIST", "."),
    tuple(str(digit) for digit in range(10)),
    digests={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)

FASHION_MNIST = IdxDataset(
    "fashion-mnist",
    "photographs of clothes, 28 x 28 grey, 10 classes, 60,000 + 10,000 images",
    _IDX.format("fashion-mnist"),
    "https://github.com/zalandoresearch/fashion-mnist (or Debian's package dataset-fashion-mnist)",
    load_idx,
    ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST", "."),
    ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    digests={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
)


# -- CIFAR: the official archive or its Python pickles, or PNG files in class folders ----------------

_SIDE = 32


@dataclass(frozen=True)
class CifarDataset(Published):
    """Which files make a CIFAR dataset.

    batches, archive: the folder of its pickles, and the file that unpacks to it.
    labels, names:    keys of the labels in a batch, and of the class names in the file `meta`.
    """

    batches: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    classes: int
    rows: tuple[int, int] = (50000, 10000)

    @property
    def again(self) -> str:
        return f"Get {self.archive} again from {self.source}."


def load_cifar(spec: CifarDataset, root: Path | None) -> Dataset:
    """The dataset, from pickles where there are some, else from class folders."""
    home = None if root is None else root / spec.name
    if home is not None and (home / "train").is_dir():
        dataset = _from_folders(spec, home)
    else:
        dataset, home = _from_pickles(spec, root)
    assert dataset.test is not None
    rows = (len(dataset.train), len(dataset.test))
    if rows != spec.rows:
        raise DataError(
            f"{home}: {rows[0]:,} training and {rows[1]:,} test images, but {spec.name} has {spec.rows[0]:,} "
            f"and {spec.rows[1]:,}. {spec.again}"
        )
    return dataset


def _from_pickles(spec: CifarDataset, root: Path | None) -> tuple[Dataset, Path]:
    """The dataset and where it lies: a folder, or the archive as it is."""
    files = [*spec.train, spec.test, spec.meta]
    folders = (spec.batches, f"{spec.name}/{spec.batches}", spec.name, ".")
    archive = None
    if root is not None and not any((root / place / spec.test).is_file() for place in folders):
        archives = (root / spec.archive, root / spec.name / spec.archive)
        archive = next((path for path in archives if path.is_file()), None)
    if archive is None:
        paths = find(spec, root, folders, files)
        contents = {file: read_file(path, spec) for file, path in paths.items()}
    else:
        contents = _packed(spec, archive, files)
        paths = {file: archive / file for file in files}
    batches = {file: _unpickled(spec, paths[file], contents[file]) for file in files}
    train = [_batch(spec, paths[file], batches[file]) for file in spec.train]
    pixels, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    names = batches[spec.meta].get(spec.names)
    if not isinstance(names, list) or len(names) != spec.classes:
        raise DataError(f"{paths[spec.meta]}: no {spec.classes} names in '{spec.names}'. {spec.again}")
    test_pixels, test_labels = _batch(spec, paths[spec.test], batches[spec.test])
    home = paths[spec.test].parent
    return Dataset(
        spec.name,
        Split(ArrayImages(pixels, str(paths[spec.train[0]].parent)), labels),
        Split(ArrayImages(test_pixels, str(paths[spec.test])), test_labels),
        tuple(_text(name) for name in names),
    ), home


def _from_folders(spec: CifarDataset, path: Path) -> Dataset:
    classes = folder.class_folders(path / "train")
    if len(classes) != spec.classes:
        raise DataError(
            f"{path / 'train'}: {len(classes)} class folders, but {spec.name} has {spec.classes} classes."
        )
    train = folder.class_split(path / "train", classes)
    return Dataset(spec.name, train, folder.evaluation_split(path / "test", classes), tuple(classes))


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
                found[name] = official(archive / name, stream.read(), spec)
    missing = [file for file in files if file not in found]
    if missing:
        raise DataError(f"{archive} has no {', '.join(missing)}. {spec.again}")
    return found


def _unpickled(spec: CifarDataset, path: Path, contents: bytes) -> dict[str, Any]:
    with explained(f"{path}: truncated or damaged pickle", spec.again):
        batch = _Unpickler(io.BytesIO(contents), path).load()
    if not isinstance(batch, dict):
        raise DataError(f"{path}: holds a {type(batch).__name__}, not a dictionary. {spec.again}")
    return {_text(key): value for key, value in batch.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class _Unpickler(pickle.Unpickler):
    """Reads arrays, lists, dictionaries, text and numbers; refuses everything that could run code."""

    def __init__(self, stream: io.BytesIO, path: Path) -> None:
        super().__init__(stream, encoding="bytes")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.").replace("__builtin__", "builtins")
        allowed: dict[tuple[str, str], Any] = {
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            # How Python 3 wrote bytes for readers of Python 2.
            ("_codecs", "encode"): lambda text, encoding="latin1": text.encode("latin1"),
            ("builtins", "bytes"): bytes,
        }
        if (module, name) not in allowed:
            raise DataError(
                f"{self._path}: the pickle asks for {module}.{name}, which no official file does; refused."
            )
        return allowed[module, name]


_COLOURS = "32 x 32 colour, 50,000 + 10,000 images"
_PICKLES = "{0} or {1}/ as it unpacks, or PNG files in {2}/train/CLASS and {2}/test/CLASS, in the data folder"
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"

CIFAR10 = CifarDataset(
    "cifar10",
    f"photographs of animals and vehicles, 10 classes, {_COLOURS}",
    _PICKLES.format("cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar10"),
    _SOURCE,
    load_cifar,
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
    _PICKLES.format("cifar-100-python.tar.gz", "cifar-100-python", "cifar100"),
    _SOURCE,
    load_cifar,
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


# -- MedMNIST: one npz file for each --------------------------------------------------------------------

_ORGANS = (
    "bladder, left femur, right femur, heart, left kidney, right kidney, liver, left lung, right lung, "
    "pancreas, spleen"
)
_SIZES = ("28", "64", "128", "224")

CLASSES: dict[str, tuple[str, ...]] = {
    name: tuple(names.split(", "))
    for name, names in {
        "path": "adipose, background, debris, lymphocytes, mucus, smooth muscle, normal colon mucosa, "
        "cancer-associated stroma, adenocarcinoma epithelium",
        "derma": "actinic keratoses, basal cell carcinoma, benign keratosis, dermatofibroma, melanoma, "
        "melanocytic nevi, vascular lesions",
        "oct": "choroidal neovascularization, diabetic macular edema, drusen, normal",
        "pneumonia": "normal, pneumonia",
        "retina": "grade 0, grade 1, grade 2, grade 3, grade 4",
        "breast": "malignant, normal or benign",
        "blood": "basophil, eosinophil, erythroblast, immature granulocyte, lymphocyte, monocyte, "
        "neutrophil, platelet",
        "tissue": "collecting duct, distal convoluted tubule, glomerular endothelial, interstitial "
        "endothelial, leukocyte, podocyte, proximal tubule, thick ascending limb",
        "organa": _ORGANS,
        "organc": _ORGANS,
        "organs": _ORGANS,
    }.items()
}
"""For each dataset with one label per image, its classes in order."""


def load_medmnist(address: Address, root: Path | None) -> Dataset:
    """The official training and test parts; ?val=train adds the validation part to the former.

    ?size=64 (128, 224) takes the larger images of MedMNIST+.
    """
    address.allow("size", "val")
    name = address.rest.lower().removesuffix("mnist")
    if name == "chest":
        raise DataError("medmnist:chest has several labels per image; fedsolve takes one label per image.")
    if name not in CLASSES:
        raise unknown("MedMNIST dataset", address.rest, CLASSES)
    size = address.word("size", _SIZES) or _SIZES[0]
    validation = address.word("val", ("out", "train"))
    file = f"{name}mnist.npz" if size == _SIZES[0] else f"{name}mnist_{size}.npz"
    path = find(MEDMNIST, root, ("medmnist", "."), [file])[file]
    splits = []
    with open_npz(path) as arrays:
        for sources in (("train", "val") if validation == "train" else ("train",), ("test",)):
            read = [_part(path, arrays, source, int(size)) for source in sources]
            pixels, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
            splits.append(Split(ArrayImages(pixels, str(path)), labels))
    train, test = splits
    return Dataset(f"medmnist:{name}", train, test, CLASSES[name])


def _part(path: Path, arrays: dict[str, Array], part: str, size: int) -> tuple[Array, Array]:
    images = _array(path, arrays, f"{part}_images")
    labels = _array(path, arrays, f"{part}_labels")
    if images.ndim not in (3, 4) or images.shape[1:3] != (size, size):
        raise DataError(
            f"{path}: '{part}_images' must be images of {size} x {size} pixels; got shape {images.shape}. "
            f"{MEDMNIST.again}"
        )
    if labels.shape not in ((len(images),), (len(images), 1)) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{path}: '{part}_labels' must hold one number for each of {len(images)} images; got shape "
            f"{labels.shape}, dtype {labels.dtype}."
        )
    return images, labels.reshape(-1).astype(np.int64)


def _array(path: Path, arrays: dict[str, Array], key: str) -> Array:
    if key not in arrays:
        raise DataError(f"{path}: no array '{key}'. {MEDMNIST.again}")
    with explained(f"{path}: truncated or damaged ('{key}')", MEDMNIST.again):
        return np.asarray(arrays[key])


MEDMNIST = Known(
    "medmnist:NAME",
    f"medical images, 28 x 28 (?size=64, 128, 224); NAME is one of {', '.join(CLASSES)}",
    "medmnist/NAMEmnist.npz (NAMEmnist_64.npz and so on for larger images) in the data folder",
    "https://medmnist.com",
    load_medmnist,
)


# -- digits, which come with scikit-learn ---------------------------------------------------------------

_PEAK = 16


def load_digits(address: Address, root: Path | None) -> Dataset:
    """1,797 images of 8 x 8 pixels; a third of each class is kept for testing, always the same third.

    Without a backbone the features are the pixels divided by 16; as images the same values fill 0 to 255.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    address.allow()
    pixels, labels = datasets.load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        pixels, labels, test_size=1 / 3, stratify=labels, random_state=0
    )
    names = tuple(str(digit) for digit in range(10))
    return Dataset("digits", _digits(x_train, y_train), _digits(x_test, y_test), names)


def _digits(pixels: Array, labels: Array) -> Split:
    bright = np.rint(pixels * (255 / _PEAK)).astype(np.uint8)
    images = ArrayImages(bright.reshape(-1, 8, 8), "digits")
    return Split(images, labels.astype(np.int64), features=pixels / _PEAK)


DIGITS = Known(
    "digits",
    "handwritten digits, 8 x 8 grey, 10 classes, 1,198 + 599 images",
    "none",
    "scikit-learn, embedded",
    load_digits,
)

KNOWN = (DIGITS, MNIST, FASHION_MNIST, CIFAR10, CIFAR100, MEDMNIST)
