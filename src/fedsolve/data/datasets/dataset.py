"""What a dataset is: labelled rows in a training and a test part; which kinds there are, and their files."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.images import Images, Texts
from fedsolve.errors import DataError, explained
from fedsolve.labels import spelled_labels
from fedsolve.parameters import known_are
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
        """The rows of a source that has no test part of its own: the same share of every class is held out.

        A class keeps at least one training row. The address may say the share (test) and the choice (seed);
        share 0 gives no test part.
        """
        share = address.number("test")
        share = HELD_OUT if share is None else share
        seed = address.whole("seed", "a whole number", least=0, most=2**63) or 0
        if not 0 <= share < 1:
            raise DataError(f"{source}: the share to hold out for testing must be in [0, 1); got {share:g}.")
        tested = np.zeros(len(rows), dtype=bool)
        for own in _shuffled(rows.labels, seed, "test"):
            tested[own[: min(len(own) - 1, round(share * len(own)))]] = True
        if share and not tested.any():
            raise DataError(
                f"{source}: {len(rows)} rows are too few to hold out {share:g} of every class for testing. "
                "Add rows, or keep all for training with ?test=0."
            )
        test = rows.take(np.flatnonzero(tested)) if share else None
        train = rows if test is None else rows.take(np.flatnonzero(~tested))
        names = tuple(class_names)
        return cls(address.text, train, test, names, file_labels, schema, held_out=test is not None)

    @cached_property
    def classes(self) -> Array:
        """The labels that positions stand for, and that a model learns: those of the data, or what the names
        spell; the names themselves if two spell the same.
        """
        if self.file_labels is not None:
            return self.file_labels
        labels = spelled_labels(self.class_names)
        return labels if len(np.unique(labels)) == len(labels) else np.array(self.class_names)

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
        parts = self.parts()
        for title, split in self.parts().items():
            limit = train if title == "train" else test
            if limit is None or limit >= len(split):
                continue
            classes = len(np.unique(split.labels))
            if limit < classes:
                raise DataError(
                    f"{self.name}: {limit} rows cannot hold all {classes} classes of the {title} part; "
                    f"ask for {classes} at least."
                )
            parts[title] = split.take(in_proportion(split.labels, limit, seed))
        return replace(self, train=parts["train"], test=parts.get("test"))


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


def _shuffled(labels: Array, seed: int, role: str) -> list[Array]:
    """The rows of each class present, in random order.

    Sorted by raw Philox integers, which numpy guarantees never to change, so that choices can be repeated.
    """
    key = int.from_bytes(hashlib.sha256(f"fedsolve dataset {role} {seed}".encode()).digest()[:16], "little")
    ranks = np.random.Philox(key=key).random_raw(len(labels))
    order = np.lexsort((ranks, labels))
    bounds = np.flatnonzero(np.diff(labels[order])) + 1
    return np.split(order, bounds)


# -- kinds of datasets, and their files ------------------------------------------------------------

HINT = "Say where the files are with --data-root DIR or the variable FEDSOLVE_DATA (root=... in Python)."


@dataclass(frozen=True)
class Known:
    """A kind of dataset that can be loaded.

    name:   its address, capitals standing for what the user fills in.
    title:  what it is, in one line.
    files:  which files are expected, and where.
    source: where to get the files.
    loader: loads the dataset of an address; its files are looked for in a folder.
    """

    name: str
    title: str
    files: str
    source: str
    loader: Callable[..., Dataset] = field(repr=False)

    def load(self, address: Address, root: Path | None) -> Dataset:
        """The dataset of this address."""
        return self.loader(address, root)

    @property
    def scheme(self) -> str:
        return self.name.partition(":")[0]

    @property
    def again(self) -> str:
        """What to do about a file that is not as it was published."""
        return f"Get it again from {self.source}."


@dataclass(frozen=True)
class Published(Known):
    """A dataset whose files are always the same; its loader takes this description too.

    digests: MD5 of each file, unpacked; those without are not checked.
    """

    digests: dict[str, str] = field(default_factory=dict, kw_only=True)

    def load(self, address: Address, root: Path | None) -> Dataset:
        address.allow()
        return self.loader(self, root)


def unknown(what: str, value: str, known: Iterable[str]) -> DataError:
    """The error for an unknown name."""
    return DataError(f"no {what} '{value}'.{known_are(value, known)}")


def find(known: Known, root: Path | None, folders: Iterable[str], files: Iterable[str]) -> dict[str, Path]:
    """The first of `folders` (relative to root) that has the first file, and all its files, by name.

    A file may also be there under its name with .gz added. Missing ones are named in the error.
    """
    files, folders = list(files), list(folders)
    expected = f"Expected: {known.files}. Get them from {known.source}."
    if root is None:
        raise DataError(f"{known.name} is not embedded and no data folder was given. {HINT} {expected}")
    for folder in folders:
        named = [(file, root / folder / f"{file}{end}") for file in files for end in (".gz", "")]
        paths = {file: path for file, path in named if path.is_file()}
        if files[0] in paths:
            missing = [file for file in files if file not in paths]
            if missing:
                raise DataError(f"{known.name}: {root / folder} has no {', '.join(missing)}. {expected}")
            return paths
    tried = ", ".join(dict.fromkeys(str(root / folder) for folder in folders))
    raise DataError(f"{known.name}: no file {files[0]} in {tried}. {HINT} {expected}")


def read_file(path: Path, known: Published) -> bytes:
    """The contents of a data file, as they were published."""
    with explained(f"{path}: cannot read the file", kinds=OSError):
        return official(path, path.read_bytes(), known)


def official(path: Path, contents: bytes, known: Published) -> bytes:
    """The contents of a data file, unpacked; refused where their digest is not the published one."""
    if contents.startswith(b"\x1f\x8b"):
        with explained(f"{path}: truncated or damaged gzip file", known.again):
            contents = gzip.decompress(contents)
    checksum = hashlib.md5(contents, usedforsecurity=False).hexdigest()
    expected = known.digests.get(path.name.removesuffix(".gz"), checksum)
    if checksum != expected:
        raise DataError(
            f"{path}: not the official file of {known.name}: its contents have MD5 checksum {checksum}, "
            f"expected {expected}. {known.again}"
        )
    return contents


def data_root(root: str | os.PathLike[str] | None) -> Path | None:
    """The data folder: `root`, or that of FEDSOLVE_DATA; None where neither is set."""
    named = root if root is not None else os.environ.get("FEDSOLVE_DATA") or None
    if named is None:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist or is not a folder. {HINT}")
    return folder
