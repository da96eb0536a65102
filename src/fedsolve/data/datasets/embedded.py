"""Datasets that need no download: `digits` from scikit-learn, and `features:KEY` from the feature store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.datasets.dataset import Dataset, Split
from fedsolve.data.datasets.dataset_files import Known
from fedsolve.data.images import ArrayImages
from fedsolve.errors import DataError
from fedsolve.tables.schema import Schema

_PEAK = 16


def load(address: Address, root: Path | None = None) -> Dataset:
    """1,797 images of 8 x 8 pixels; a third of each class is kept for testing, always the same third.

    Without a backbone the features are the pixels divided by 16; as images the same values fill 0 to 255.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    address.allow()
    pixels, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        pixels, labels, test_size=1 / 3, stratify=labels, random_state=0
    )
    names = tuple(str(digit) for digit in range(10))
    return Dataset("digits", _split(x_train, y_train), _split(x_test, y_test), names)


def _split(pixels: Array, labels: Array) -> Split:
    bright = np.rint(pixels * (255 / _PEAK)).astype(np.uint8)
    images = ArrayImages(bright.reshape(-1, 8, 8), "digits")
    return Split(images, labels.astype(np.int64), features=pixels / _PEAK)


def stored(address: Address, root: Path | None) -> Dataset:
    """The stored features whose key begins with KEY."""
    from fedsolve.data.feature_store import FeatureStore

    address.allow("store")
    if not address.rest:
        raise DataError(f"'{address.text}' names no key; see 'fedsolve features list'.")
    found = FeatureStore(address.options.get("store")).get(address.rest)
    test = None
    if found.x_test is not None and found.y_test is not None:
        test = Split(found.x_test, found.y_test)
    train = Split(found.x_train, found.y_train)
    schema = None if found.extractor is None else Schema(extractor=found.extractor)
    return Dataset(address.text, train, test, found.class_names, found.classes, schema)


KNOWN = (
    Known(
        "digits",
        "handwritten digits, 8 x 8 grey, 10 classes, 1,198 + 599 images",
        "none",
        "scikit-learn, embedded",
        load,
    ),
    Known(
        "features:KEY",
        "features in the store, and the backbone they came from",
        "what 'fedsolve features build' made; ?store=DIR for another store than FEDSOLVE_STORE",
        "fedsolve features list",
        stored,
    ),
)
