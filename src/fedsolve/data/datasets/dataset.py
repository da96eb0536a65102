"""What a dataset is: images or features with labels, in its official training and test part."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.images import Images, Texts
from fedsolve.errors import DataError
from fedsolve.labels import spelled_labels
from fedsolve.tables.schema import Schema

HELD_OUT = 0.2
"""Share of every class kept for testing where a dataset has no test part of its own."""


@dataclass(frozen=True)
class Split:
    """One part of a dataset.

    inputs:   images, texts, or features (rows, width).
    labels:   (rows,) positions in the dataset's class names.
    features: (rows, width) what stands for features when images are used without a backbone, if anything.
    owners:   (rows,) the names of those who own the rows, where the data say it.
    """

    inputs: Images | Array
    labels: Array
    features: Array | None = None
    owners: Array | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Array) -> Split:
        """Only these rows."""
        inputs = self.inputs[rows] if isinstance(self.inputs, np.ndarray) else self.inputs.take(rows)
        features, owners = (None if array is None else array[rows] for array in (self.features, self.owners))
        return Split(inputs, self.labels[rows], features, owners)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What identifies the contents, as JSON values."""
        inputs = digest_of(self.inputs) if isinstance(self.inputs, np.ndarray) else self.inputs.identity
        return {"inputs": inputs, "labels": digest_of(self.labels), "rows": len(self)}


@dataclass(frozen=True)
class Dataset:
    """Labelled rows in a training and, usually, a test part, and the names of their classes.

    file_labels: (classes,) the label of each class as the data have it, in its type; None where names are
                 all there is.
    schema:      what the columns are, of a table that names them.
    held_out:    whether the test part is a share of the rows that was held out, rather than one of its own.
    """

    name: str
    train: Split
    test: Split | None
    class_names: tuple[str, ...]
    file_labels: Array | None = None
    schema: Schema | None = None
    held_out: bool = False

    def __post_init__(self) -> None:
        for title, split in self.parts().items():
            labels, where = split.labels, f"{self.name}: the {title} part has"
            if len(split) == 0:
                raise DataError(f"{where} no rows.")
            if labels.ndim != 1 or labels.dtype.kind not in "iu":
                raise DataError(f"{self.name}: labels must be positions of classes; got {labels.dtype}.")
            if len(split.inputs) != len(labels):
                raise DataError(f"{where} {len(split.inputs)} rows but {len(labels)} labels.")
            if not 0 <= labels.min() <= labels.max() < len(self.class_names):
                raise DataError(
                    f"{where} labels that run from {labels.min()} to {labels.max()}, but there are "
                    f"{len(self.class_names)} classes."
                )
        present = np.bincount(self.train.labels, minlength=len(self.class_names))
        if not present.all():
            missing = [self.class_names[index] for index in np.flatnonzero(present == 0)]
            raise DataError(
                f"{self.name}: no training row of {named_classes(missing)}. Add some, or leave the class out."
            )

    @classmethod
    def parted(
        cls,
        address: Address,
        rows: Split,
        source: str,
        class_names: Sequence[str],
        file_labels: Array | None = None,
        schema: Schema | None = None,
    ) -> Dataset:
        """The rows of a source that has no test part of its own: a share is held out (`hold_out`)."""
        train, test = hold_out(rows, address, source)
        names = tuple(class_names)
        return cls(address.text, train, test, names, file_labels, schema, held_out=test is not None)

    @cached_property
    def classes(self) -> Array:
        """The labels that positions stand for, and that a model learns: those of the data, or the names."""
        return labels_of_names(self.class_names) if self.file_labels is None else self.file_labels

    @property
    def is_images(self) -> bool:
        """Whether rows are images or texts, which a backbone turns into features."""
        return not isinstance(self.train.inputs, np.ndarray)

    @property
    def reads(self) -> str:
        """What a backbone must read: "images" or "text"."""
        return "text" if isinstance(self.train.inputs, Texts) else "images"

    def parts(self) -> dict[str, Split]:
        """The parts that exist, by name."""
        return {"train": self.train} | ({} if self.test is None else {"test": self.test})

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What identifies the contents, as JSON values; where they are stored does not matter."""
        parts = {title: split.identity for title, split in self.parts().items()}
        return parts | {"class_names": list(self.class_names)}

    def limited(self, train: int | None = None, test: int | None = None, seed: int = 0) -> Dataset:
        """At most this many rows of each part, chosen at random with every class in proportion."""
        parts: dict[str, Split] = {}
        for title, limit in (("train", train), ("test", test)):
            split = self.parts().get(title)
            if split is None or limit is None or limit >= len(split):
                continue
            classes = len(np.unique(split.labels))
            if limit < classes:
                raise DataError(
                    f"{self.name}: {limit} rows cannot hold all {classes} classes of the {title} part; "
                    f"ask for {classes} at least."
                )
            parts[title] = split.take(in_proportion(split.labels, limit, seed))
        return replace(self, train=parts.get("train", self.train), test=parts.get("test", self.test))


def labels_of_names(names: Sequence[str]) -> Array:
    """The labels that class names spell (`spelled_labels`); the names themselves if two spell the same."""
    labels = spelled_labels(names)
    return labels if len(np.unique(labels)) == len(names) else np.array(names)


def digest_of(array: Array) -> str:
    """Hex digest of an array's type, shape and values."""
    array = np.ascontiguousarray(array)
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    digest.update(array.data)
    return digest.hexdigest()


def named_classes(names: Sequence[str]) -> str:
    """The first few class names, for a message."""
    shown = ", ".join(repr(name) for name in names[:5])
    word = "class" if len(names) == 1 else "classes"
    return f"{word} {shown}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def in_proportion(labels: Array, count: int, seed: int) -> Array:
    """`count` sorted rows, with each class in proportion and at least once."""
    rows_of = _shuffled(labels, seed, "limit")
    sizes = np.array([len(rows) for rows in rows_of])
    exact = sizes * (count / len(labels))
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    while shares.sum() != count:
        # The class furthest from its exact share gives or gets a row; ties go to the first.
        step = 1 if shares.sum() < count else -1
        allowed = shares < sizes if step == 1 else shares > 1
        shares[np.argmax(np.where(allowed, step * (exact - shares), -np.inf))] += step
    return np.sort(np.concatenate([rows[:share] for rows, share in zip(rows_of, shares, strict=True)]))


def hold_out(split: Split, address: Address, name: str) -> tuple[Split, Split | None]:
    """The split as a training and a test part: the same share of every class, chosen at random.

    A class keeps at least one training row. The address may say the share (test) and the choice (seed);
    share 0 gives no test part.
    """
    share = address.number("test")
    share = HELD_OUT if share is None else share
    seed = address.whole("seed", "a whole number", least=0, most=2**63) or 0
    if not 0 <= share < 1:
        raise DataError(f"{name}: the share to hold out for testing must be in [0, 1); got {share:g}.")
    if share == 0:
        return split, None
    taken = [
        rows[: min(len(rows) - 1, round(share * len(rows)))] for rows in _shuffled(split.labels, seed, "test")
    ]
    tested = np.zeros(len(split), dtype=bool)
    tested[np.concatenate(taken)] = True
    if not tested.any():
        raise DataError(
            f"{name}: {len(split)} rows are too few to hold out {share:g} of every class for testing. "
            "Add rows, or keep all for training with ?test=0."
        )
    return split.take(np.flatnonzero(~tested)), split.take(np.flatnonzero(tested))


def _shuffled(labels: Array, seed: int, role: str) -> list[Array]:
    """The rows of each class present, in random order.

    Sorted by raw Philox integers, which numpy guarantees never to change, so that choices can be repeated.
    """
    key = int.from_bytes(hashlib.sha256(f"fedsolve dataset {role} {seed}".encode()).digest()[:16], "little")
    ranks = np.random.Philox(key=key).random_raw(len(labels))
    order = np.lexsort((ranks, labels))
    bounds = np.flatnonzero(np.diff(labels[order])) + 1
    return np.split(order, bounds)
