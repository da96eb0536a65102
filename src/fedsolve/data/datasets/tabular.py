"""`npz:PATH`, `csv:PATH`, `parquet:PATH`: features, or images of one size, from a file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsolve.container import Array
from fedsolve.data.datasets.dataset import Dataset, Split, hold_out
from fedsolve.data.datasets.dataset_address import Address, Known
from fedsolve.data.images import ArrayImages
from fedsolve.data.npz import open_npz
from fedsolve.data.tables import ColumnLayout, Part, by_name, parts, read_table
from fedsolve.errors import DataError, FedsolveError
from fedsolve.labels import labels_like, plain_labels
from fedsolve.schema import Schema

SUFFIXES = {"npz": (".npz",), "csv": (".csv", ".tsv", ".txt"), "parquet": (".parquet", ".pq")}
OPTIONS = {
    "npz": ("features_key", "labels_key", "client"),
    "csv": ("label", "drop", "delimiter", "header", "decimal", "thousands", "encoding", "client"),
    "parquet": ("label", "drop", "client"),
}


def load(address: Address, root: Path | None) -> Dataset:
    """The rows of a file; its test part is x_test of an npz, the file ?test=PATH, or a share held out."""
    kind = address.scheme
    address.allow(*OPTIONS[kind], "test", "seed")
    path = _existing(address, root)
    layout = layout_of(address)
    other = address.options.get("test", "")
    apart = None if not other or _is_number(other) else _existing(Address(address.text, kind, other), root)
    try:
        own_test = kind == "npz" and apart is None and layout.features_key is None and "test" in parts(path)
        train = _rows(path, layout, "train" if kind == "npz" else None, owned=layout.client is not None)
        classes = np.unique(train.labels)
        names = _class_names(path, classes)
        test: _FileRows | None = None
        if apart is not None:
            test = _rows(apart, layout, None, classes, train.schema)
        elif own_test:
            test = _rows(path, layout, "test", classes)
    except DataError:
        raise
    except FedsolveError as problem:
        raise DataError(str(problem)) from problem
    if own_test and other:
        raise DataError(f"{address.text}: {path} has a test part already; leave out the option 'test'.")
    whole, schema = _split(train, classes, path), train.schema
    if test is None:
        share, seed = address.held_out()
        parted = hold_out(whole, share, seed, str(path))
        return Dataset(address.text, *parted, names, classes, schema, held_out=parted[1] is not None)
    return Dataset(address.text, whole, _split(test, classes, apart or path), names, classes, schema)


class _FileRows(NamedTuple):
    """Rows as a file has them, its columns by name, and who owns each row where that is asked."""

    inputs: Array
    labels: Array
    schema: Schema | None = None
    owners: Array | None = None


def _rows(
    path: Path,
    layout: ColumnLayout,
    part: Part | None,
    classes: Array | None = None,
    schema: Schema | None = None,
    owned: bool = False,
) -> _FileRows:
    """Rows with labels in `classes`; inputs of three or four dimensions are images.

    schema: the columns of the rows that these are to fit. owned: whether to read who owns them.
    """
    images = _images(path, layout, part) if path.suffix.lower() == ".npz" else None
    if images is not None:
        if owned:
            raise DataError(f"{path}: owners of images are not read; leave out the option 'client'.")
        if classes is None:
            return _FileRows(*images)
        try:
            return _FileRows(images[0], labels_like(images[1], classes))
        except DataError as problem:
            raise DataError(f"{path}: {problem}") from problem
    table = read_table(path, layout, part=part, classes=classes, owned=owned)
    assert table.labels is not None
    features = table.features
    if schema is not None and table.schema is not None:
        try:
            features = by_name(features, table.schema, schema)
        except DataError as problem:
            raise DataError(f"{path}: {problem}") from problem
    return _FileRows(features, table.labels, table.schema, table.owners)


def _images(path: Path, layout: ColumnLayout, part: Part | None) -> tuple[Array, Array] | None:
    """The images of an npz file, or None where it holds features; only the header is read to tell."""
    with open_npz(path) as arrays:
        x_key, y_key = _keys(arrays.files, layout, part)
        if x_key is None or len(_shape(path, x_key)) not in (3, 4):
            return None
        if y_key is None:
            raise DataError(f"{path}: '{x_key}' holds images, but there is no array of labels beside it.")
        try:
            return np.asarray(arrays[x_key]), plain_labels(arrays[y_key]).reshape(-1)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as problem:
            raise DataError(f"{path}: truncated or damaged ({problem}). Write it again.") from problem


def _keys(keys: list[str], layout: ColumnLayout, part: Part | None) -> tuple[str | None, str | None]:
    ends = [f"_{part}", ""] if part is not None else ["_test", "_train", ""]
    x_names = [layout.features_key] if layout.features_key else [f"{x}{end}" for end in ends for x in "xX"]
    x_key = next((name for name in x_names if name in keys), None)
    y_names = [layout.labels_key] if layout.labels_key else [f"{y}{end}" for end in ends for y in "yY"]
    return x_key, next((name for name in y_names if name in keys), None)


def _shape(path: Path, key: str) -> tuple[int, ...]:
    """The shape of an array in an npz file, without reading its values."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as stream:
            reader: Any = readers[np.lib.format.read_magic(stream)]
            shape: tuple[int, ...] = reader(stream)[0]
            return shape
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as problem:
        raise DataError(f"{path}: '{key}' cannot be read ({problem}). Write the file again.") from problem


def _class_names(path: Path, classes: Array) -> tuple[str, ...]:
    """Names of the classes: those an npz lists for labels 0, 1, 2, ..., else the labels themselves."""
    if path.suffix.lower() == ".npz" and classes.dtype.kind in "iu":
        with open_npz(path) as arrays:
            for key in ("class_names", "classes"):
                listed = np.asarray(arrays[key]) if key in arrays.files else np.empty(0)
                if listed.dtype.kind in "US" and np.array_equal(classes, np.arange(len(listed))):
                    return tuple(plain_labels(listed).tolist())
    return tuple(str(label) for label in classes.tolist())


def _split(rows: _FileRows, classes: Array, path: Path) -> Split:
    inputs = rows.inputs
    positions = np.searchsorted(classes, rows.labels).astype(np.int64)
    images = ArrayImages(inputs, str(path)) if inputs.ndim > 2 else inputs
    return Split(images, positions, owners=rows.owners)


def _existing(address: Address, root: Path | None) -> Path:
    path = address.path(root)
    if not path.is_file():
        where = f" (nor in {root})" if root is not None and not path.is_absolute() else ""
        raise DataError(
            f"{path}: there is no such file{where}. Check the path, or name its folder with --data-root."
        )
    if path.suffix.lower() not in SUFFIXES[address.scheme]:
        raise DataError(
            f"{path}: a name ending in {' or '.join(SUFFIXES[address.scheme])} is expected after "
            f"'{address.scheme}:'; got '{path.suffix}'."
        )
    return path


def layout_of(address: Address) -> ColumnLayout:
    """Where the file of an address has its features and labels, by the address's options."""
    settings: dict[str, Any] = {
        name: value for name, value in address.options.items() if name not in ("test", "seed")
    }
    if "drop" in settings:
        settings["drop"] = tuple(settings["drop"].split(","))
    if "header" in settings:
        settings["header"] = settings["header"].lower() not in ("0", "no", "false")
    return ColumnLayout(**settings)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_SPLIT = (
    "a fifth of each class is held out (?test=SHARE&seed=N, ?test=0 for none, ?test=FILE for another file)"
)

KNOWN = (
    Known(
        "npz:PATH",
        "your own features (rows, width) or images (rows, height, width[, 3]) from numpy",
        f"arrays x_train, y_train, x_test, y_test, or x and y, of which {_SPLIT}; "
        "features are offset + scale * x where the file has these arrays",
        "numpy.savez",
        load,
    ),
    Known(
        "csv:PATH",
        "your own table with a header line",
        f"a column of labels (?label=NAME) and columns of numbers; {_SPLIT}",
        "your disk",
        load,
    ),
    Known(
        "parquet:PATH",
        "your own table; needs fedsolve[tables]",
        f"a column of labels (?label=NAME) and columns of numbers; {_SPLIT}",
        "your disk",
        load,
    ),
)
