"""Images from an array or from files, decoded on demand, and texts, identified by their contents.

An image is (height, width, channels) uint8: three channels in the order RGB, or one for grey images.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import file_digest
from fedsolve.errors import DataError, explained
from fedsolve.threads import usable_cores

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
"""Names of image files end like this, in any case."""

_BLOCK = 4096
_ORIENTATION = 0x0112


class Images(Protocol):
    """A sequence of images, decoded when read; or of texts."""

    def __len__(self) -> int: ...

    @property
    def identity(self) -> str:
        """Hex digest that names the contents: equal images in equal order, equal identity."""

    def read(self, rows: slice | Array) -> list[Any]:
        """These images, each (height, width, channels) uint8; sizes may differ. Or these texts."""

    def take(self, rows: Array) -> Images:
        """The sequence of these images alone, still not decoded."""

    def name(self, row: int) -> str:
        """The name of an image in a message."""


class ArrayImages:
    """Images of one size: an array of bytes (images, height, width) or (images, height, width, channels)."""

    def __init__(self, pixels: Array, source: str = "array") -> None:
        self.pixels = pixels[..., None] if pixels.ndim == 3 else pixels
        sizes = self.pixels.shape[1:]
        if pixels.dtype != np.uint8 or len(sizes) != 3 or sizes[2] not in (1, 3) or 0 in sizes:
            raise DataError(
                f"{source}: images must be bytes (uint8) of shape (images, height, width[, channels]), with "
                f"1 or 3 channels and no empty side; got shape {pixels.shape}, dtype {pixels.dtype}."
            )
        self.source = source

    def __len__(self) -> int:
        return len(self.pixels)

    @cached_property
    def identity(self) -> str:
        digest = hashlib.sha256(f"array {self.pixels.shape}\n".encode())
        for start in range(0, len(self), _BLOCK):
            digest.update(np.ascontiguousarray(self.pixels[start : start + _BLOCK]).data)
        return digest.hexdigest()

    def read(self, rows: slice | Array) -> list[Array]:
        return list(self.pixels[rows])

    def take(self, rows: Array) -> ArrayImages:
        return ArrayImages(self.pixels[rows], self.source)

    def name(self, row: int) -> str:
        return f"{self.source}, image {row}"


class FileImages:
    """Image files under a folder, decoded by a pool of threads; only what was asked for is in memory.

    names:   paths relative to `root`, with '/' between folders; they are part of the identity.
    workers: threads that decode; one per core when None.
    """

    def __init__(
        self, names: Sequence[str], root: str | os.PathLike[str] = ".", workers: int | None = None
    ) -> None:
        self.names = list(names)
        self.root = str(root)
        self.workers = workers or usable_cores()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return self._path(self.names[row])

    def read(self, rows: slice | Array) -> list[Array]:
        names = self.names[rows] if isinstance(rows, slice) else [self.names[row] for row in rows]
        return list(self._pool.map(decode, map(self._path, names)))

    def take(self, rows: Array) -> FileImages:
        return FileImages([self.names[row] for row in rows], self.root, self.workers)

    @cached_property
    def identity(self) -> str:
        """Digest of every file's name, size and contents."""
        digest = hashlib.sha256(b"files\n")
        for start in range(0, len(self), _BLOCK):
            names = self.names[start : start + _BLOCK]
            found = self._pool.map(_contents, map(self._path, names))
            for name, (size, contents) in zip(names, found, strict=True):
                spelled = name.encode("utf-8", "surrogateescape")
                digest.update(b"%d %d " % (len(spelled), size) + spelled + contents)
        return digest.hexdigest()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        from PIL import Image

        Image.preinit()  # loading Pillow's decoders is not safe from several threads at once
        return ThreadPoolExecutor(self.workers, thread_name_prefix="images")

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)


class Texts:
    """Texts in the place of `Images`."""

    def __init__(self, texts: Sequence[str], source: str) -> None:
        self._texts, self._source = list(texts), source

    def __len__(self) -> int:
        return len(self._texts)

    def name(self, row: int) -> str:
        return f"{self._source}, text {row}"

    def read(self, rows: slice | Array) -> list[str]:
        return self._texts[rows] if isinstance(rows, slice) else [self._texts[row] for row in rows]

    def take(self, rows: Array) -> Texts:
        return Texts(self.read(rows), self._source)

    @cached_property
    def identity(self) -> str:
        digest = hashlib.sha256(b"texts\n")
        for text in self._texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d " % len(data) + data)
        return digest.hexdigest()


def decode(path: str | os.PathLike[str]) -> Array:
    """The image in a file; one that cannot be read is a `DataError` that names it."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return to_array(image)
    except (FileNotFoundError, PermissionError) as problem:
        gone = isinstance(problem, FileNotFoundError)
        remedy = "is gone. Put it back, or start again without it" if gone else "may not be read"
        raise DataError(f"{path}: the image file {remedy}.") from problem
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from problem
    except Image.DecompressionBombError as problem:
        raise DataError(f"{path}: {problem} Scale the image down.") from problem
    # Pillow's decoders raise whatever error the damage leads to.
    except Exception as problem:
        reason = str(problem).split("\n")[0].removesuffix(f" {str(path)!r}") or type(problem).__name__
        raise DataError(
            f"{path}: the image is truncated, damaged or of an unknown kind ({reason}). "
            "Replace the file or take it out of the folder."
        ) from problem


def to_array(image: Any) -> Array:
    """A Pillow image as (height, width, channels) bytes; EXIF orientation is applied.

    Grey stays one channel, everything else becomes RGB; transparency is dropped, 16-bit grey keeps its
    upper 8 bits.
    """
    if image.getexif().get(_ORIENTATION, 1) != 1:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)[..., None]
    if image.mode in ("I", "F"):
        raise DataError(f"pixels of kind {image.mode} have no fixed range; save the image with 8 bits.")
    pixels = np.array(image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB"))
    return pixels[..., None] if pixels.ndim == 2 else pixels


def list_images(folder: str | os.PathLike[str]) -> list[str]:
    """Names of the image files under a folder, relative to it and sorted; links are followed."""
    names: list[str] = []
    _collect(str(folder), "", names, frozenset())
    return names


def is_images(path: str) -> bool:
    """Whether a path names an image file, or a folder, in which images are looked for."""
    return path.lower().endswith(SUFFIXES) or os.path.isdir(path)


def _collect(folder: str, prefix: str, names: list[str], above: frozenset[tuple[int, int]]) -> None:
    state = os.stat(folder)
    here = (state.st_dev, state.st_ino)
    if here in above:  # a link to a folder that contains it
        return
    with os.scandir(folder) as listing:
        entries = sorted((entry.name, entry.is_dir()) for entry in listing if not entry.name.startswith("."))
    for name, is_folder in entries:
        if is_folder:
            _collect(os.path.join(folder, name), f"{prefix}{name}/", names, above | {here})
        elif name.lower().endswith(SUFFIXES):
            names.append(prefix + name)


def _contents(path: str) -> tuple[int, bytes]:
    """Size and digest of a file."""
    with explained(f"{path}: cannot read the image file", kinds=OSError):
        return os.stat(path).st_size, bytes.fromhex(file_digest(path))
