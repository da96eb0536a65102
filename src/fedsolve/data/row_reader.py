"""Rows to train, predict and evaluate with: from a table file, or from a dataset through a backbone.

`new_rows` are rows to predict, all of them: of tables, folders of images, images and standard input.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal, Protocol

import numpy as np

from fedsolve.arrays import Array
from fedsolve.data.address import Address
from fedsolve.data.backbones import DEFAULT_BACKBONE, Backbone, check_same, known_backbone, load_backbone
from fedsolve.data.datasets import ADDRESSES, Dataset, load_dataset
from fedsolve.data.datasets.dataset import data_root
from fedsolve.data.datasets.tabular import OPTIONS, layout_of
from fedsolve.data.feature_store import Features, features_of
from fedsolve.data.images import SUFFIXES, FileImages, is_images, list_images
from fedsolve.data.text_rows import text_work
from fedsolve.errors import DataError, FedsolveError, ModelFileError, naming
from fedsolve.labels import labels_like
from fedsolve.tables.csv_text import Dialect
from fedsolve.tables.schema import Column, Schema
from fedsolve.tables.table_file import (
    ColumnLayout,
    Table,
    TrainOrTest,
    column_position,
    file_columns,
    parts,
    read_table,
)

Extract = Callable[[Dataset, str, Backbone | None], Features]
"""Makes the features of a dataset by the backbone of an address; that is given where it is loaded already."""


class Audience(Protocol):
    """Receives warnings and progress."""

    def warn(self, text: str, /) -> None: ...

    def bar(self, title: str, unit: str) -> AbstractContextManager[Callable[[int, int, str], None]]: ...


def is_address(text: str) -> bool:
    """Whether a text is the address of a dataset, not the path of a file."""
    address = Address.parse(text)
    return (address.scheme, bool(address.rest)) in ADDRESSES


def site_names(files: Sequence[str]) -> list[str]:
    """Client names: the file names, with their folders where names repeat."""
    bare = [file.removesuffix(".gz") for file in files]
    names = [Path(file).stem for file in bare]
    if len(set(names)) < len(names):
        names = [str(Path(file).with_suffix("")) for file in bare]
    twice = [file for file, name in zip(files, names, strict=True) if names.count(name) > 1]
    if twice:
        raise DataError(f"clients are called as their files; rename {' or '.join(map(repr, twice))}.")
    return names


@dataclass
class RowReader:
    """Reads rows; features of images are extracted once and kept.

    layout:   how tables are spelled, and where they have labels and owners.
    backbone: address of what makes features of images or text; None for the model's or the usual one.
    root:     folder of named datasets. store: folder of features.
    """

    layout: ColumnLayout
    backbone: str | None
    root: str | None
    extract: Extract
    told: Audience
    store: str | None = None
    _found: dict[str, Features] = field(default_factory=dict, init=False)
    _datasets: dict[str, Dataset] = field(default_factory=dict, init=False)

    def parts(self, data: str) -> tuple[TrainOrTest, ...]:
        """The parts that there are, of training and test; none if a file holds one set of rows."""
        if not is_address(data):
            return parts(data) if data.lower().endswith(".npz") else ()
        if self.layout.client is not None:
            data = self._owned(data)
        return ("train",) if self._dataset(data).test is None else ("train", "test")

    def rows(
        self,
        data: str,
        part: TrainOrTest | None = None,
        *,
        labelled: bool = True,
        owned: bool = False,
        classes: Array | None = None,
        width: int | None = None,
        schema: Schema | None = None,
        extra: Literal["refuse", "ignore"] = "refuse",
        whole: bool = False,
        keep: Sequence[str] | None = None,
    ) -> Table:
        """The rows of a file or of a dataset's part, checked against classes and width where known.

        schema: what a model takes; columns of a table are then found by name. extra: whether columns that it
        does not know are refused, or told and ignored. whole: every row, also those that an address would
        hold out, unless a part is named. keep: columns of a table to give back as they are, besides the
        identifiers of the schema; None for none at all.
        """
        by_names = schema is not None and schema.extractor is None
        known: dict[str, Any] = {"labelled": labelled, "classes": classes}
        wanted = known | {"keep": keep, "extra": extra}
        if not is_address(data):
            if data != "-" and not os.path.exists(data):
                raise ModelFileError(f"cannot read {data}: No such file or folder.")
            if schema is not None and by_names and Path(data).suffix.lower() != ".npz":
                if self.layout.header:
                    return self._described(data, schema, **wanted)
                self.told.warn(
                    f"{data} is read without names, so its columns are taken by position; they must be in "
                    f"the order {', '.join(column.name for column in schema.used)}."
                )
            if keep:
                raise DataError(f"{data}: its columns have no names that the model knows; leave out --keep.")
            return read_table(data, layout=self.layout, part=part, owned=owned, width=width, **known)
        if owned or self.layout.client is not None:
            data = self._owned(data)
        if whole and part is None:
            if schema is not None and by_names and Address.parse(data).scheme in OPTIONS:
                return self._named_by(data, schema, **wanted)
            address = Address.parse(data)
            if address.rest and load_dataset(data, self.root).held_out:
                data = address.adding(test="0")
        features = self._features(data, schema)
        if part is None:
            part = "train" if features.x_test is None else "test"
        rows = features.x_train if part == "train" else features.x_test
        codes = features.y_train if part == "train" else features.y_test
        if rows is None or codes is None:
            raise DataError(f"{data} has no test part.")
        own = self._datasets[data].schema
        if own is None and features.extractor is not None:
            own = Schema(extractor=features.extractor)
        if schema is not None and own is not None:
            with naming(data):
                rows = _fitting(rows, own, schema, extra)
        if width is not None and rows.shape[1] != width:
            raise DataError(
                f"{data} gives {rows.shape[1]} features per row, the model takes {width}. "
                "Use the backbone that the model was trained with."
            )
        split = self._datasets[data].train if part == "train" else None
        labels = features.classes[codes]
        if labelled and classes is not None:
            labels = labels_like(labels, classes)
        owners = split.owners if owned and split is not None else None
        return Table(rows, labels if labelled else None, owners, data, own)

    def described(self, data: str, schema: Schema, owned: bool) -> Table:
        """The rows of a file that a schema describes, to train with; missing values as NaN."""
        if schema.extractor is None:
            with text_work(self.told.bar, self.store):
                return read_site(data, schema.moved(self.backbone), self.layout, owned)
        if not is_address(data):
            raise DataError(f"{data}: this schema is of images; name a dataset, such as folder:PATH.")
        found = self.rows(data, "train", classes=schema.class_array, schema=schema)
        return replace(found, schema=schema)

    def sites(self, files: Sequence[str], schema: Schema | None) -> Table:
        """The rows of several files, each a client named after its file. Columns are found by name.

        schema: where one describes them; else the first file says what the columns are.
        """
        owners = site_names(files)
        tables: list[Table] = []
        for file in files:
            if is_address(file):
                raise DataError(f"{file}: of several clients each is a file, not an address.")
            if schema is not None:
                tables.append(self.described(file, schema, owned=False))
            elif not tables:
                tables.append(self.rows(file, "train"))
            else:
                first, reader = tables[0], self
                if first.schema is not None:  # it says what --label and --drop said
                    reader = replace(self, layout=replace(self.layout, label=None, labels=None, drop=()))
                tables.append(reader.rows(file, "train", width=first.features.shape[1], schema=first.schema))
        labels = [np.asarray(table.labels) for table in tables]
        if len({part.dtype.kind in "US" for part in labels}) > 1:
            told = ", ".join(f"{file} {part[0].item()!r}" for file, part in zip(files, labels, strict=True))
            raise DataError(f"labels are text in some files, numbers in others ({told}). Spell them alike.")
        weights = [table.weights for table in tables if table.weights is not None]
        return Table(
            np.concatenate([table.features for table in tables]),
            np.concatenate(labels),
            np.repeat(owners, [len(table) for table in tables]),
            ", ".join(files),
            tables[0].schema,
            np.concatenate(weights) if weights else None,
        )

    def _described(self, data: str, schema: Schema, keep: Sequence[str] | None, **wanted: Any) -> Table:
        """The rows of a table whose columns a model knows by name; options may say more about this file."""
        names = file_columns(data, self.layout)
        schema = self._for_file(data, names, schema)
        kept = [] if keep is None else [name for name in schema.identifiers if name in names]
        kept += [name for name in keep or () if name not in kept]
        with text_work(self.told.bar, self.store):
            rows = read_table(data, schema.moved(self.backbone), self.layout, keep=kept, **wanted)
        told = {*schema.label_columns, schema.client, schema.weight, *kept}
        known = {column.name for column in schema.columns} | told
        strange = [name for name in names if name not in known]
        if strange:
            hint = f" (--keep {quote(strange[0])} writes it beside the predictions)"
            hint *= not (wanted["labelled"] or kept)
            self.told.warn(
                f"{data}: the model does not use {', '.join(map(repr, strange))}, which "
                f"{'are' if len(strange) > 1 else 'is'} ignored{hint}."
            )
        return replace(rows, schema=None)

    def _named_by(self, data: str, schema: Schema, **wanted: Any) -> Table:
        """The rows of the table that an address names, as if the file itself had been named."""
        self._check_no_layout(data)
        address = Address.parse(data)
        address.allow(*OPTIONS[address.scheme], "test", "seed")
        path = str(address.path(data_root(self.root)))
        return replace(self, layout=layout_of(address)).rows(
            path, width=schema.width, schema=schema, **wanted
        )

    def _owned(self, data: str) -> str:
        """The address with the column that names owners in it."""
        address = Address.parse(data)
        if address.scheme not in OPTIONS:
            raise DataError(f"{data} does not say who owns its rows; choose a --partition.")
        return data if self.layout.client is None else address.adding(client=self.layout.client)

    def _for_file(self, data: str, names: list[str], schema: Schema) -> Schema:
        """The schema with the label column of this file, and with those left out that --drop names."""
        used = {column.name for column in schema.used}
        others = {*schema.label_columns, schema.client, schema.weight}
        known = {column.name for column in schema.columns} | others
        if self.layout.label_names not in ((), schema.labels):
            raise DataError(f"the model's labels (--labels) are {', '.join(schema.labels) or 'classes'}.")
        label = schema.label
        with naming(data):
            asked = [each for each in self.layout.drop if each not in known - used]
            dropped = [names[column_position(names, each, "column to drop")] for each in asked]
            for name in dropped:
                if name in used:
                    raise DataError(f"the model uses column '{name}'; it cannot be left out (--drop).")
            if self.layout.label is not None:
                label = names[column_position(names, self.layout.label, "label column")]
                if label in used:
                    raise DataError(f"the model uses column '{label}'; it cannot be the label (--label).")
        columns = [column for column in schema.columns if column.name != label]
        columns += [Column(name, "unused") for name in dict.fromkeys(dropped) if name not in {*known, label}]
        return replace(schema, columns=tuple(columns), label=label)

    def _check_no_layout(self, data: str) -> None:
        if replace(self.layout, client=None) != ColumnLayout():
            raise DataError(
                f"{data}: --label, --drop, --delimiter, --no-header, --decimal and the like do not apply to "
                "an address; write them after a question mark, e.g. csv:FILE?label=NAME&header=no."
            )

    def _dataset(self, data: str) -> Dataset:
        if data not in self._datasets:
            self._datasets[data] = load_dataset(data, self.root)
        return self._datasets[data]

    def _features(self, data: str, schema: Schema | None = None) -> Features:
        """Features of a dataset. schema: that of a model, whose backbone must then make them."""
        self._check_no_layout(data)
        if data in self._found:
            return self._found[data]
        dataset, backbone, loaded = self._dataset(data), self.backbone, None
        wanted = None if schema is None else schema.extractor
        if schema is not None and wanted is None and dataset.is_images:
            raise DataError(f"{data}: these are images, and the model takes columns of a table.")
        if not dataset.is_images and backbone is not None:
            raise DataError(f"{data} holds features already; leave out --backbone.")
        own = dataset.train.features is not None and (wanted is None or not wanted.address)
        if not dataset.is_images or (backbone is None and own):
            found = Features.from_dataset(dataset)
        else:
            if wanted is not None:
                backbone, loaded = known_backbone(wanted, backbone)
            found = self.extract(dataset, backbone or DEFAULT_BACKBONE, loaded)
        self._found[data] = found
        return found


def _fitting(rows: Array, own: Schema, wanted: Schema, extra: Literal["refuse", "ignore"]) -> Array:
    """The rows of a dataset as a model takes them: columns by name, or features of the same backbone."""
    if wanted.extractor is not None:
        if own.extractor is not None:
            check_same(own.extractor, wanted.extractor, own.extractor.name)
        return rows
    if own.extractor is not None:
        raise DataError("these are features of images, and the model takes columns of a table.")
    if any(column.kind != "number" for column in wanted.used):
        raise DataError("the model takes raw columns, such as dates. Name the file itself, not an address.")
    names = [column.name for column in own.used]
    wanted.check_columns(names, extra=extra)
    places = [names.index(column.name) for column in wanted.used]
    return rows if places == list(range(len(names))) else rows[:, places]


def read_site(data: str, schema: Schema, layout: ColumnLayout, owned: bool = False) -> Table:
    """The labelled rows of a file that a schema describes. Errors name all that does not fit, with lines.

    owned: whether the schema's column of owners is wanted, too.
    """
    if schema.extractor is not None:
        raise DataError(f"{data} is a table, and the schema is of images. Name a dataset: folder:PATH.")
    if is_address(data) or data.lower().endswith(".npz"):
        raise DataError(f"{data}: --schema describes the columns of a csv or parquet file; give its path.")
    try:
        return read_table(data, schema, layout, owned=owned, weighted=True)
    except DataError as problem:
        if len(faults := _site_faults(data, schema, layout)) > 1:
            raise DataError(f"{data}: {' '.join(faults)}") from problem
        raise


def dialect_only(layout: ColumnLayout) -> ColumnLayout:
    """The same layout; refused where it says which columns there are, for that is in a schema."""
    if replace(layout, **asdict(Dialect())) != ColumnLayout():
        raise DataError(
            "--label, --drop and --*-key do not go with --schema: it names the label column, and columns "
            'that are not to be used have kind = "unused" in it.'
        )
    return layout


def _site_faults(data: str, schema: Schema, dialect: Dialect) -> list[str]:
    """All faults of a file: column names, cells, labels. Reading stops at the first, so look at each."""
    names = file_columns(data, dialect)
    there = tuple(column for column in schema.used if names.count(column.name) == 1)
    looks: list[Callable[[], Any]] = [
        lambda: schema.check_columns(names, bool(schema.label_columns), weighted=True)
    ]
    if there:
        cells = Schema(there)
        looks.append(lambda: read_table(data, cells, dialect, labelled=False, extra="ignore"))
        if schema.label is not None and names.count(schema.label) == 1:
            # A text may be anything, so that labels alone are refused.
            labels = Schema((Column(there[0].name, "text"),), schema.label, schema.classes)
            looks.append(lambda: read_table(data, labels, dialect, extra="ignore"))
    faults = []
    for look in looks:
        try:
            look()
        except DataError as problem:
            faults.append(str(problem).removeprefix(f"{data}: "))
    return faults


# -- rows to predict ---------------------------------------------------------------------------------

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
    if schema is not None:
        if schema.extractor is None:
            raise DataError(f"{paths[0]}: these are images, and the model takes columns of a table.")
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
    """The sources, with standard input ("-") as a temporary file that only its owner can read.

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
