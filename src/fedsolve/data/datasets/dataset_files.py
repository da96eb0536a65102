"""Kinds of datasets, which files they need, and how these are found and checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedsolve.data.address import Address
from fedsolve.errors import DataError, explained
from fedsolve.parameters import known_are

if TYPE_CHECKING:
    from fedsolve.data.datasets.dataset import Dataset

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
    """A dataset whose files are always the same; its loader takes this description too."""

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
        paths = {file: path for file in files if (path := _present(root / folder / file)) is not None}
        if files[0] in paths:
            missing = [file for file in files if file not in paths]
            if missing:
                raise DataError(f"{known.name}: {root / folder} has no {', '.join(missing)}. {expected}")
            return paths
    tried = ", ".join(dict.fromkeys(str(root / folder) for folder in folders))
    raise DataError(f"{known.name}: no file {files[0]} in {tried}. {HINT} {expected}")


def _present(path: Path) -> Path | None:
    packed = path.with_name(path.name + ".gz")
    return path if path.is_file() else packed if packed.is_file() else None


def read_file(path: Path) -> bytes:
    """The bytes of a data file."""
    with explained(f"{path}: cannot read the file", kinds=OSError):
        return path.read_bytes()


def check_digest(path: Path, contents: bytes, expected: str | None, known: Known) -> None:
    """Refuse contents whose MD5 digest differs from the published one. None: no check."""
    checksum = hashlib.md5(contents, usedforsecurity=False).hexdigest()
    if expected not in (None, checksum):
        raise DataError(
            f"{path}: not the official file of {known.name}: its contents have MD5 checksum {checksum}, "
            f"expected {expected}. {known.again}"
        )


def data_root(root: str | os.PathLike[str] | None) -> Path | None:
    """The data folder: `root`, or that of FEDSOLVE_DATA; None where neither is set."""
    named = root if root is not None else os.environ.get("FEDSOLVE_DATA") or None
    if named is None:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist or is not a folder. {HINT}")
    return folder
