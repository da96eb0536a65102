"""How a dataset is named: `scheme`, `scheme:rest` or `scheme:rest?option=value&option=value`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedsolve.data.datasets.dataset import HELD_OUT
from fedsolve.errors import DataError, did_you_mean, explained

if TYPE_CHECKING:
    from fedsolve.data.datasets.dataset import Dataset

HINT = "Say where the files are with --data-root DIR or the variable FEDSOLVE_DATA (root=... in Python)."


@dataclass(frozen=True)
class Address:
    """A dataset's address, taken apart."""

    text: str
    scheme: str
    rest: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Address:
        """Take an address apart; a '?' counts only where name=value pairs follow it."""
        scheme, _, rest = text.partition(":")
        head, mark, tail = (rest or scheme).rpartition("?")
        pairs = [pair.partition("=") for pair in tail.split("&")] if mark else []
        options: dict[str, str] = {}
        if pairs and all(name and sign for name, sign, _ in pairs):
            options = {name: value for name, _, value in pairs}
            if rest:
                rest = head
            else:
                scheme = head
        return cls(text, scheme, rest, options)

    def allow(self, *names: str) -> None:
        """Refuse all other options."""
        for name in self.options:
            if name not in names:
                takes = f"It takes {', '.join(names) or 'none'}."
                raise DataError(f"{self.text}: unknown option '{name}'.{did_you_mean(name, names)} {takes}")

    def option(self, name: str, kind: Callable[[str], float], default: float) -> float:
        """An option that is a number."""
        try:
            return kind(self.options.get(name, str(default)))
        except ValueError as problem:
            raise DataError(
                f"{self.text}: option '{name}' must be a number; got {self.options[name]!r}."
            ) from problem

    def held_out(self) -> tuple[float, int]:
        """The options `test` and `seed`: share of each class to hold out, and the seed of the choice."""
        return self.option("test", float, HELD_OUT), int(self.option("seed", int, 0))

    def path(self, root: Path | None) -> Path:
        """The path of the address: from the working folder or, where that has none, from `root`."""
        if not self.rest:
            raise DataError(f"'{self.text}' names no file; write {self.scheme}:PATH.")
        path = Path(self.rest).expanduser()
        if path.exists() or path.is_absolute() or root is None:
            return path
        return root / path if (root / path).exists() else path


@dataclass(frozen=True)
class Known:
    """A kind of dataset that can be loaded.

    name:   its address, capitals standing for what the user fills in.
    title:  what it is, in one line.
    files:  which files are expected, and where.
    source: where to get the files.
    """

    name: str
    title: str
    files: str
    source: str
    load: Callable[[Address, Path | None], Dataset] = field(repr=False)

    @property
    def scheme(self) -> str:
        return self.name.partition(":")[0]

    @property
    def again(self) -> str:
        """What to do about a file that is not as it was published."""
        return f"Get it again from {self.source}."


def unknown(what: str, value: str, known: Iterable[str]) -> DataError:
    """The error for an unknown name; it suggests the closest known one."""
    known = list(known)
    return DataError(f"no {what} '{value}'.{did_you_mean(value, known)} Known are {', '.join(known)}.")


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
    if expected is None:
        return
    checksum = hashlib.md5(contents, usedforsecurity=False).hexdigest()
    if checksum != expected:
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
