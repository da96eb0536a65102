"""`npz:PATH`, `csv:PATH`, `parquet:PATH`: features, images of one size, or texts from a file.

Also `features:KEY`, features from the feature store.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.datasets.dataset import Dataset, Known, Split
from fedsolve.data.images import ArrayImages, Texts
from fedsolve.errors import DataError, FedsolveError
from fedsolve.labels import number, plain_labels
from fedsolve.tables.schema import Column, Schema
from fedsolve.tables.table_file import (
    SUFFIXES,
    ColumnLayout,
    Table,
    TrainOrTest,
    file_columns,
    label_place,
    open_npz,
    parts,
    read_table,
)

OPTIONS = {
    "npz": ("features_key", "labels_key", "client"),
    "csv": ("label", "drop", "delimiter", "header", "decimal", "thousands", "encoding", "client", "text"),
    "parquet": ("label", "drop", "client", "text"),
}


def load(address: Address, root: Path | None) -> Dataset:
    """The rows of a file; its test part is x_test of an npz, the file ?test=PATH, or a share held out."""
    kind = address.scheme
    address.allow(*OPTIONS[kind], "test", "seed")
    path = _existing(address, root)
    layout = layout_of(address)
    text = address.options.get("text")
    other = address.options.get("test", "")
    apart = None
    if other and number(other) is None:
        apart = _existing(Address(address.text, kind, other), root)
    try:
        own_test = kind == "npz" and apart is None and layout.features_key is None and "test" in parts(path)
        part: TrainOrTest | None = "train" if kind == "npz" else None
        train = _rows(path, layout, part, text, owned=layout.client is not None)
        assert train.labels is not None
        classes = np.unique(train.labels)
        names = _class_names(path, classes)
        test = None
        if apart is not None:
            test = _rows(apart, layout, None, text, classes=classes, schema=train.schema)
        elif own_test:
            test = _rows(path, layout, "test", classes=classes)
    except DataError:
        raise
    except FedsolveError as problem:
        raise DataError(str(problem)) from problem
    if own_test and other:
        raise DataError(f"{address.text}: {path} has a test part already; leave out the option 'test'.")
    whole, schema = _split(train, classes, path), train.schema
    if test is None:
        return Dataset.parted(address, whole, str(path), names, classes, schema)
    return Dataset(address.text, whole, _split(test, classes, apart or path), names, classes, schema)


def _rows(
    path: Path, layout: ColumnLayout, part: TrainOrTest | None, text: str | None = None, **known: Any
) -> Table:
    """Labelled rows; features of three or four dimensions are images, and of one the texts of a column."""
    if text is None:
        return read_table(path, layout=layout, part=part, images=True, **known)
    names = file_columns(path, layout)
    left = [place for place, name in enumerate(names) if name not in (text, layout.client)]
    label = label_place(names, left, layout.label) if left else None
    if label is None:
        raise DataError(f"{path}: no column of labels besides the text '{text}'.")
    column = Column(text, "text", missing="refuse", buckets=1)
    known["schema"] = Schema((column,), names[label], client=layout.client)
    found = read_table(path, layout=layout, keep=(text,), extra="ignore", **known)
    return replace(found, features=found.kept[text], schema=None)


def _class_names(path: Path, classes: Array) -> tuple[str, ...]:
    """Names of the classes: those an npz lists for labels 0, 1, 2, ..., else the labels themselves."""
    if path.suffix.lower() == ".npz" and classes.dtype.kind in "iu":
        with open_npz(path) as arrays:
            for key in ("class_names", "classes"):
                listed = np.asarray(arrays[key]) if key in arrays.files else np.empty(0)
                if listed.dtype.kind in "US" and np.array_equal(classes, np.arange(len(listed))):
                    return tuple(plain_labels(listed).tolist())
    return tuple(str(label) for label in classes.tolist())


def _split(rows: Table, classes: Array, path: Path) -> Split:
    assert rows.labels is not None
    positions = np.searchsorted(classes, rows.labels).astype(np.int64)
    inputs: Any = rows.features
    if inputs.ndim != 2:
        inputs = (ArrayImages if inputs.ndim > 2 else Texts)(inputs, str(path))
    return Split(inputs, positions, owners=rows.owners)


def _existing(address: Address, root: Path | None) -> Path:
    path = address.path(root)
    if not path.is_file():
        where = f" (nor in {root})" if root is not None and not path.is_absolute() else ""
        raise DataError(f"{path}: there is no such file{where}. Check it, or name its folder (--data-root).")
    if path.suffix.lower() not in SUFFIXES[address.scheme]:
        raise DataError(
            f"{path}: a name ending in {' or '.join(SUFFIXES[address.scheme])} is expected after "
            f"'{address.scheme}:'; got '{path.suffix}'."
        )
    return path


def layout_of(address: Address) -> ColumnLayout:
    """Where the file of an address has its features and labels, by the address's options."""
    settings: dict[str, Any] = {
        name: value for name, value in address.options.items() if name not in ("test", "seed", "text")
    }
    if "drop" in settings:
        settings["drop"] = tuple(settings["drop"].split(","))
    if "header" in settings:
        settings["header"] = settings["header"].lower() not in ("0", "no", "false")
    return ColumnLayout(**settings)


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


_SPLIT = (
    "a fifth of each class is held out (?test=SHARE&seed=N, ?test=0 for none, ?test=FILE for another file)"
)

_COLUMNS = f"labels (?label=NAME) and columns of numbers, or one of text (?text=NAME); {_SPLIT}"

KNOWN = (
    Known(
        "npz:PATH",
        "your own features (rows, width) or images (rows, height, width[, 3]) from numpy",
        f"arrays x_train, y_train, x_test, y_test, or x and y, of which {_SPLIT}; "
        "features are offset + scale * x where the file has these arrays",
        "numpy.savez",
        load,
    ),
    Known("csv:PATH", "your own table with a header line", _COLUMNS, "your disk", load),
    Known("parquet:PATH", "your own table", _COLUMNS, "your disk", load),
    Known(
        "features:KEY",
        "features in the store, and the backbone they came from",
        "what 'fedsolve features build' made; ?store=DIR for another store than FEDSOLVE_STORE",
        "fedsolve features list",
        stored,
    ),
)
