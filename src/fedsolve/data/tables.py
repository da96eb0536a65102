"""Features and labels from files: npz, csv and parquet, with errors that name the cell.

A file that cannot be opened or decoded is a `ModelFileError`; contents that cannot be used are a
`DataError` that says where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from fedsolve.checks import check_arrays
from fedsolve.container import Array
from fedsolve.data.columns import read_csv, read_parquet
from fedsolve.data.layout import PARTS, ColumnLayout, Part, Wish
from fedsolve.data.npz import open_npz, read_npz
from fedsolve.errors import DataError, ModelFileError
from fedsolve.labels import labels_like, spelled_labels
from fedsolve.schema import Schema

__all__ = ["ColumnLayout", "Part", "Table", "by_name", "classlike", "parts", "read_table"]


@dataclass(frozen=True)
class Table:
    """Rows of a file: features (rows, width), labels (rows,) or None, owners (rows,) as text or None.

    schema:  what the columns are, where the file names them and a model is to be made of its rows.
    weights: (rows,) or None, how much a row counts.
    kept:    columns that were asked for as they are, by name.
    """

    features: Array
    labels: Array | None
    owners: Array | None
    source: str
    schema: Schema | None = None
    weights: Array | None = None
    kept: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.features)


def parts(path: str | Path) -> tuple[Part, ...]:
    """Which of x_train and x_test an npz file has; nothing for files that hold one set of rows."""
    if _kind(path) != "npz":
        return ()
    with open_npz(path) as arrays:
        return tuple(part for part in PARTS if {f"x_{part}", f"X_{part}"} & set(arrays.files))


def read_table(
    path: str | Path,
    layout: ColumnLayout | None = None,
    *,
    part: Part | None = None,
    labelled: bool = True,
    owned: bool = False,
    classes: Array | None = None,
    width: int | None = None,
) -> Table:
    """The rows of a file, checked: real, finite features and, when `labelled`, a label for each.

    part:    which part of an npz with x_train and x_test; the test part when None.
    owned:   whether to read who owns each row (`layout.client`).
    classes: the labels a model knows, in whose type labels are given (`labels_like`); others are refused.
             When None, labels have the type of the file, and those of a csv the type that they spell.
    width:   features a model expects; others are refused, and an unlabelled file's label column is left out.
    """
    layout = layout or ColumnLayout()
    if owned and layout.client is None:
        raise DataError("owners are wanted, but no client column or key is named.")
    kind = _kind(path)
    wish = Wish(layout, part, labelled, owned, width)
    reader = {"npz": read_npz, "csv": read_csv, "parquet": read_parquet}[kind]
    try:
        features, labels, owners, schema = reader(Path(path), wish)
        if labels is not None:
            labels = _plain_labels(labels)
        check_arrays(features, np.zeros(len(features)) if labels is None else labels)
        if len(features) == 0:
            raise DataError("no rows at all. Check the file or the query that made it.")
        if width is not None and features.shape[1] != width:
            raise DataError(f"rows of {width} features are expected; these have {features.shape[1]}.")
        if labels is not None:
            if kind == "csv" and classes is None:
                labels = spelled_labels(labels)
            labels = classlike(labels) if classes is None else labels_like(labels, classes)
        if owners is not None:
            owners = _owner_names(owners, len(features))
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from problem
    except OSError as problem:
        raise ModelFileError(f"cannot read {path}: {problem.strerror or problem}.") from problem
    return Table(features, labels, owners, str(path), schema)


def by_name(
    features: Array, own: Schema, wanted: Schema, extra: Literal["refuse", "ignore"] = "refuse"
) -> Array:
    """The columns of a plain table in the order of `wanted`; what does not fit is refused by name."""
    if any(column.kind != "number" for column in wanted.used):
        raise DataError(
            "the model takes raw columns, such as categories or dates. Name the file itself, not an address."
        )
    names = [column.name for column in own.used]
    wanted.check_columns(names, extra=extra)
    places = [names.index(column.name) for column in wanted.used]
    return features if places == list(range(len(names))) else features[:, places]


def _kind(path: str | Path) -> Literal["npz", "csv", "parquet"]:
    packed = str(path).lower().endswith(".gz")
    suffix = Path(Path(path).stem if packed else path).suffix.lower()
    if suffix == ".npz" and not packed:
        return "npz"
    if suffix in (".csv", ".tsv", ".txt"):
        return "csv"
    if suffix in (".parquet", ".pq") and not packed:
        return "parquet"
    raise DataError(
        f"{path}: unknown kind of file '{suffix}'; known are .npz, .csv (.tsv, .txt; also .csv.gz) and "
        ".parquet."
    )


def _plain_labels(labels: Array) -> Array:
    """Labels as a vector of numbers, booleans or text."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(
            f"labels must be one per row; got shape {labels.shape}. Give class labels, not one-hot rows."
        )
    if labels.dtype.kind not in "iufbUS":
        raise DataError(f"labels must be numbers or text; got dtype {labels.dtype}.")
    return np.char.decode(labels, "utf-8") if labels.dtype.kind == "S" else labels


def classlike(labels: Array) -> Array:
    """The labels, refused if they are measurements: fractions that hardly ever repeat."""
    if labels.dtype.kind == "f":
        distinct = np.unique(labels)
        if len(distinct) > max(20, len(labels) // 2) and np.any(distinct != np.rint(distinct)):
            raise DataError(
                f"the labels are {len(distinct)} different real numbers (such as {distinct[0]:g}); "
                "classes are expected. Name the right label column or key."
            )
    return labels


def _owner_names(owners: Array, rows: int) -> Array:
    if owners.shape != (rows,):
        raise DataError(f"{rows} rows but owners of shape {owners.shape}; give one owner per row.")
    if owners.dtype.kind == "f" and not np.all(np.isfinite(owners)):
        raise DataError("owners contain NaN or infinite values; give one owner per row.")
    return owners.astype(str)
