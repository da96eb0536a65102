"""Rows to predict, all of them: of tables, folders of images, images and standard input, each by its name."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsolve.cli.features import BACKBONE
from fedsolve.cli.inputs import Reader
from fedsolve.cli.output import Output
from fedsolve.container import Array
from fedsolve.data.backbones import load_backbone
from fedsolve.data.datasets.dataset_address import Address, data_root
from fedsolve.data.image_rows import image_features, image_files, is_images, known_backbone
from fedsolve.errors import DataError, FedsolveError
from fedsolve.model import Model

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
    sources: Sequence[str], model: Model, given: dict[str, Any], output: Output
) -> Iterator[NewRows]:
    """The rows of every source, in the order of sources; images come together, as one."""
    if list(sources).count("-") > 1:
        raise DataError("'-' is standard input, which can be read once; name it once.")
    pictures = [path for path in (image_path(source, given) for source in sources) if path is not None]
    for source in sources:
        if image_path(source, given) is not None:
            if pictures:
                yield _images(pictures, model, given, output)
            pictures = []
        elif source == "-":
            with _spooled() as path:
                yield _named(source, path, model, given, output)
        else:
            yield _named(source, source, model, given, output)


def beside_predictions(found: Sequence[NewRows]) -> dict[str, list[Any]]:
    """What stands beside predictions: the row, the file where there are several, and what identifies a row.

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


def image_path(source: str, given: dict[str, Any]) -> str | None:
    """The path of images: a folder, `folder:PATH` or an image file; None where it is something else."""
    address = Address.parse(source)
    if address.scheme == "folder" and address.rest and given["part"] is None:
        return str(address.path(data_root(given["root"])))
    return source if is_images(source) else None


def _images(paths: Sequence[str], model: Model, given: dict[str, Any], output: Output) -> NewRows:
    """Features of images by the model's own backbone, and the names of their files."""
    schema, named = model.schema, given["backbone"]
    if schema is not None and schema.extractor is None:
        raise DataError(f"{paths[0]}: these are images, and the model takes columns of a table.")
    for path in paths:
        if not Path(path).exists():
            raise DataError(f"{path}: there is no such file or folder. Check the path.")
    if schema is not None and schema.extractor is not None:
        backbone = known_backbone(schema.extractor, named)[1]
    else:
        backbone = load_backbone(named or BACKBONE)
        if named is None:
            output.warn(
                f"the model does not know its backbone; {BACKBONE} is used. Name the one that it was trained "
                "with (--backbone), or train it again, and it will know."
            )
    images = image_files(paths)
    with output.bar(backbone.name, "image") as bar:
        features = image_features(images, backbone, lambda done, total: bar(done, total, ""))
    if features.shape[1] != model.features:
        raise DataError(
            f"{backbone.name} gives {features.shape[1]} features of an image, the model takes "
            f"{model.features}. Use the backbone that the model was trained with."
        )
    return NewRows(paths[0], features, {"file": images.names})


def _named(source: str, path: str, model: Model, given: dict[str, Any], output: Output) -> NewRows:
    """The rows of a table or a dataset, with the columns that identify them; errors call it by its source."""
    try:
        rows = Reader(given, output).rows(
            path,
            given["part"],
            labelled=False,
            width=model.features,
            schema=model.schema,
            extra="ignore",
            whole=True,
            keep=given["keep"],
        )
    except FedsolveError as problem:
        if source == path:
            raise
        raise type(problem)(str(problem).replace(path, "standard input")) from problem
    return NewRows(source, rows.features, dict(rows.kept))


@contextmanager
def _spooled() -> Iterator[str]:
    """The path of a file with what standard input holds, for its owner only and gone afterwards."""
    content = sys.stdin.buffer.read()
    ending = next((ending for mark, ending in _KINDS.items() if content.startswith(mark)), ".csv")
    with tempfile.TemporaryDirectory(prefix="fedsolve-") as folder:
        path = Path(folder) / f"stdin{ending}"
        path.write_bytes(content)
        del content
        yield str(path)
