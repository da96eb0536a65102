"""Rows to predict, all of them: of tables, folders of images, images and standard input, each by its name."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets.dataset_files import data_root
from fedsolve.data.extraction import features_of
from fedsolve.data.image_rows import DEFAULT_BACKBONE, is_images, known_backbone
from fedsolve.data.images import SUFFIXES, FileImages, list_images
from fedsolve.data.row_reader import RowReader
from fedsolve.errors import DataError, FedsolveError, ModelFileError
from fedsolve.tables.npz import TrainOrTest
from fedsolve.tables.schema import Schema

_BATCH = 64

_KINDS = {b"PAR1": ".parquet", b"PK\x03\x04": ".npz", b"\x1f\x8b": ".csv.gz"}
"""How packed files begin, and what they are; everything else is csv."""


@dataclass(frozen=True)
class NewRows:
    """Rows of one source: features (rows, width), and columns by name that tell the rows apart."""

    source: str
    features: Array
    beside: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.features)


def new_rows(
    sources: Sequence[str],
    reader: RowReader,
    schema: Schema | None,
    width: int,
    part: TrainOrTest | None,
    keep: Sequence[str],
) -> Iterator[NewRows]:
    """The rows of every source, in the order of sources; images come together, as one.

    schema: what the model takes, and width: how many features. part: of data with two parts, which.
    keep: columns to give back besides the identifiers.
    """
    wanted: dict[str, Any] = {"part": part, "schema": schema, "width": width, "keep": keep}
    found = [image_path(source, reader.root, part) for source in sources]
    pictures = [path for path in found if path is not None]
    with spooled(sources) as paths:
        for source, path, picture in zip(sources, paths, found, strict=True):
            if picture is None:
                rows = reader.rows(path, labelled=False, extra="ignore", whole=True, **wanted)
                yield NewRows(source, rows.features, dict(rows.kept))
            elif pictures:
                yield _images(pictures, reader, schema, width)
                pictures = []


def beside_predictions(found: Sequence[NewRows]) -> dict[str, list[Any]]:
    """The columns written beside predictions: row, file if there are several, identifiers.

    A column of the file that is called as one of ours gets "id_" before its name.
    """
    named = list(dict.fromkeys(name for rows in found for name in rows.beside if name != "file"))
    images = any("file" in rows.beside for rows in found)
    beside: dict[str, list[Any]] = {"row": [row for rows in found for row in range(len(rows))]}
    if images or len(found) > 1:
        beside["file"] = [
            name for rows in found for name in rows.beside.get("file", [rows.source] * len(rows))
        ]
    for name in named:
        spelt = name
        while spelt in beside or spelt == "label" or spelt.startswith("score_"):
            spelt = f"id_{spelt}"
        beside[spelt] = [cell for rows in found for cell in rows.beside.get(name, [""] * len(rows))]
    return beside


def image_path(source: str, root: str | None, part: TrainOrTest | None) -> str | None:
    """The path of images: a folder, `folder:PATH` or an image file; None where it is something else."""
    address = Address.parse(source)
    if address.scheme == "folder" and address.rest and part is None:
        return str(address.path(data_root(root)))
    return source if is_images(source) else None


def _images(paths: Sequence[str], reader: RowReader, schema: Schema | None, width: int) -> NewRows:
    """Features of images by the model's own backbone, and the names of their files."""
    named = reader.backbone
    for path in paths:
        if not Path(path).exists():
            raise ModelFileError(f"cannot read {path}: No such file or folder.")
    if schema is not None and schema.extractor is None:
        raise DataError(f"{paths[0]}: these are images, and the model takes columns of a table.")
    if schema is not None and schema.extractor is not None:
        backbone = known_backbone(schema.extractor, named)[1]
    else:
        backbone = load_backbone(named or DEFAULT_BACKBONE)
        if named is None:
            reader.told.warn(
                f"the model does not know its backbone; {DEFAULT_BACKBONE} is used. Name the one that it was "
                "trained with (--backbone), or train it again, and it will know."
            )
    images, blocks = _image_files(paths), []
    with reader.told.bar(backbone.name, "image") as bar:
        for start in range(0, len(images), _BATCH):
            span = slice(start, min(start + _BATCH, len(images)))
            blocks.append(features_of(backbone, images, span, images.read(span), None))
            bar(span.stop, len(images), "")
    features = np.concatenate(blocks)
    if features.shape[1] != width:
        raise DataError(
            f"{backbone.name} gives {features.shape[1]} features of an image, the model takes "
            f"{width}. Use the backbone that the model was trained with."
        )
    return NewRows(paths[0], features, {"file": images.names})


def _image_files(paths: Sequence[str]) -> FileImages:
    """The images that paths name: files, and everything in a folder.

    Images of a single folder are named as they are called in it; others as their paths are.
    """
    names: list[str] = []
    for path in paths:
        found = [path]
        if os.path.isdir(path):
            found = list_images(path)
            if not found:
                raise DataError(f"{path}: no images in this folder (looked for {', '.join(SUFFIXES)}).")
            if len(paths) == 1:
                return FileImages(found, path)
            found = [os.path.join(path, name) for name in found]
        names += found
    return FileImages(names, "")


@contextmanager
def spooled(sources: Sequence[str]) -> Iterator[list[str]]:
    """The sources, with what standard input ("-") holds in a file for its owner only, gone afterwards.

    Errors call that file standard input.
    """
    if "-" not in sources:
        yield list(sources)
        return
    if list(sources).count("-") > 1:
        raise DataError("'-' is standard input, which can be read once; name it once.")
    content = sys.stdin.buffer.read()
    ending = next((ending for mark, ending in _KINDS.items() if content.startswith(mark)), ".csv")
    with tempfile.TemporaryDirectory(prefix="fedsolve-") as folder:
        path = Path(folder) / f"stdin{ending}"
        path.write_bytes(content)
        del content
        try:
            yield [str(path) if source == "-" else source for source in sources]
        except FedsolveError as problem:
            raise type(problem)(str(problem).replace(str(path), "standard input")) from problem
