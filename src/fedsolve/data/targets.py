"""Check where a command may write: never over its inputs, and only where a file is possible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fedsolve.data.address import Address
from fedsolve.errors import ModelFileError

_PAGES = (".html", ".md", ".tex")


def check_target(path: str | None, *inputs: str | None, root: str | None = None) -> None:
    """Refuse, before anything is read, to write over an input or where no file can be written.

    inputs: files, folders and addresses of datasets that the command reads. In a folder, no file that is
            there is written over, but for pages and tables, which nothing reads. root: where addresses look.
    """
    if path is None:
        return
    target = Path(path)
    for text in inputs:
        for source in _places(text, root):
            if _would_lose(target, source):
                raise ModelFileError(
                    f"{path} is an input of this command ({text}) and would be lost. Name another file."
                )
    if target.is_dir():
        raise ModelFileError(f"cannot write {path}: it is a folder. Name a file in it.")
    if target.exists() and not target.is_file():
        raise ModelFileError(f"cannot write {path}: it is no regular file. Name a file.")
    folder = Path(os.path.realpath(target)).parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ModelFileError(
            f"cannot write {path}: {folder} is not a folder you may write to. Name a folder that is."
        )


def _places(text: str | None, root: str | None) -> Iterator[Path]:
    """Where an input may lie: a path, or the paths in an address."""
    if text is None:
        return
    address = Address.parse(text)
    for name in (text, address.rest, address.options.get("test", "")):
        if name:
            yield Path(name).expanduser()
            if root is not None:
                yield Path(root).expanduser() / name


def _would_lose(target: Path, source: Path) -> bool:
    """Whether writing `target` destroys `source` or a file in it, by whatever name or link."""
    if not (target.exists() and source.exists()):
        return False
    if target.samefile(source):
        return True
    inside = source.is_dir() and target.resolve().is_relative_to(source.resolve())
    return inside and target.suffix.lower() not in _PAGES
