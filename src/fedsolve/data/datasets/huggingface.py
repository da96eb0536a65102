"""`hf:NAME`: an image dataset of the Hugging Face hub, or one saved on disk, if `datasets` is installed."""

from __future__ import annotations

import hashlib
import importlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.datasets.dataset import Dataset, Known, Split, unknown
from fedsolve.data.images import to_array
from fedsolve.errors import DataError, explained, require
from fedsolve.labels import encode_labels

_TESTS = ("test", "validation", "valid", "val")
_LABELS = ("label", "labels", "fine_label", "target", "class")


class HubImages:
    """The image column of a Hugging Face dataset, decoded row by row."""

    def __init__(self, rows: Any, column: str, source: str) -> None:
        self._rows = rows
        self._column = column
        self._source = source

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def identity(self) -> str:
        """Digest of the encoded images, whatever their names and wherever they are cached."""
        kind = importlib.import_module("datasets").Image(decode=False)
        digest = hashlib.sha256(b"hub\n")
        encoded = self._rows.select_columns([self._column]).cast_column(self._column, kind)
        for row in encoded:
            image = row[self._column]
            contents = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
            digest.update(b"%d " % len(contents) + contents)
        return digest.hexdigest()

    def read(self, rows: slice | Array) -> list[Array]:
        images = []
        for row in np.arange(len(self))[rows].tolist():
            with explained(f"{self.name(row)}: the image cannot be decoded"):
                images.append(to_array(self._rows[row][self._column]))
        return images

    def take(self, rows: Array) -> HubImages:
        return HubImages(self._rows.select(rows.tolist()), self._column, self._source)

    def name(self, row: int) -> str:
        return f"{self._source}, image {row}"


def load(address: Address, root: Path | None) -> Dataset:
    """The dataset's training part and its test part, or validation part, or a share held out."""
    address.allow("config", "train", "test", "image", "label", "seed")
    loaded = _fetch(require("datasets", "hf", address.text), address, root)
    parts: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    train = _chosen(parts, address, "train", ("train",))
    image, label = _columns(train, address)
    feature = train.features[label]
    names = list(getattr(feature, "names", None) or [])
    values = _labels(train, label)
    classes = np.arange(len(names)) if names else np.unique(values)
    labels = None if names else classes
    names = names or [str(value) for value in classes.tolist()]
    whole = Split(HubImages(train, image, f"{address.text}, train"), _positions(values, classes, address))
    wanted = address.options.get("test", "")
    if wanted not in parts and (wanted.replace(".", "", 1).isdigit() or not set(_TESTS) & set(parts)):
        return Dataset.parted(address, whole, address.text, names, labels)
    test = _chosen(parts, address, "test", _TESTS)
    images = HubImages(test, image, f"{address.text}, test")
    positions = _positions(_labels(test, label), classes, address)
    return Dataset(address.text, whole, Split(images, positions), tuple(names), labels)


def _fetch(library: Any, address: Address, root: Path | None) -> Any:
    path = address.path(root)
    saved = any((path / f"{kind}.json").exists() for kind in ("dataset_dict", "dataset_info"))
    remedy = (
        "Check the name at https://huggingface.co/datasets, or save the dataset with save_to_disk and name "
        "that folder."
    )
    with explained(f"{address.text}: cannot be loaded", remedy):
        if saved:
            return library.load_from_disk(str(path))
        name = str(path) if path.exists() else address.rest
        return library.load_dataset(name, address.options.get("config"))


def _chosen(parts: dict[str, Any], address: Address, option: str, usual: tuple[str, ...]) -> Any:
    name = address.options.get(option) or next((name for name in usual if name in parts), usual[0])
    if name not in parts:
        raise unknown(f"{option} part in {address.text}", name, parts)
    return parts[name]


def _columns(rows: Any, address: Address) -> tuple[str, str]:
    """Names of the columns of images and of labels."""
    features = rows.features
    images = [name for name, kind in features.items() if type(kind).__name__ == "Image"]
    labels = [name for name, kind in features.items() if type(kind).__name__ == "ClassLabel"]
    labels += [name for name in _LABELS if name in features and name not in labels]
    chosen = []
    for option, candidates in (("image", images), ("label", labels)):
        name = address.options.get(option) or next(iter(candidates), "")
        if name not in features:
            called = f" called '{name}'" if name else ""
            raise DataError(
                f"{address.text}: no column of {option}s{called}; the columns are {', '.join(features)}. "
                f"Name it with ?{option}=COLUMN."
            )
        chosen.append(name)
    return chosen[0], chosen[1]


def _labels(rows: Any, column: str) -> Array:
    return np.asarray(rows.select_columns([column])[:][column])


def _positions(values: Array, classes: Array, address: Address) -> Array:
    codes = encode_labels(values, classes, known=False)
    strange = np.unique(values[codes < 0])
    if len(strange):
        raise DataError(
            f"{address.text}: label {strange[0]} is not one of the classes. Choose a part that has labels "
            "(?test=NAME), or hold out a share (?test=0.2)."
        )
    return codes.astype(np.int64)


KNOWN = (
    Known(
        "hf:NAME",
        "an image dataset of the Hugging Face hub, or a folder made by save_to_disk",
        "none; ?config=, ?train=, ?test= (a part or a share), ?image= and ?label= choose configuration, "
        "parts and columns",
        "https://huggingface.co/datasets (needs fedsolve[hf])",
        load,
    ),
)
