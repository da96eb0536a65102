"""Rows for train, predict and evaluate: from a table file, or from a dataset through a backbone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsolve.cli.command import F, option, options
from fedsolve.cli.features import BACKBONE, built, data_root_option, store_option
from fedsolve.cli.options import READING, data_options, layout_from
from fedsolve.cli.output import Output
from fedsolve.container import Array
from fedsolve.data.columns import column_position, dialect_of
from fedsolve.data.datasets import Dataset, is_address, load_dataset
from fedsolve.data.datasets.dataset_address import Address, data_root
from fedsolve.data.datasets.tabular import OPTIONS, layout_of
from fedsolve.data.feature_store import Features
from fedsolve.data.image_rows import check_same, known_backbone
from fedsolve.data.table_files import file_columns, read_described
from fedsolve.data.tables import ColumnLayout, Part, Table, by_name, classlike, parts, read_table
from fedsolve.data.text_tables import Dialect
from fedsolve.errors import DataError
from fedsolve.labels import labels_like
from fedsolve.schema import Column, Schema

_TABLES = ("csv", "parquet")
"""Schemes of addresses that name a table."""


def row_options(command: F) -> F:
    """Decorator: how to read a table, and which backbone turns a dataset's images into features."""
    backbone = option(
        "--backbone",
        metavar="B",
        group=READING,
        help=f"Makes features of images.  [default: the model's, or {BACKBONE}]",
    )
    return options(data_options, backbone, data_root_option, store_option)(command)


def _site_names(files: Sequence[str]) -> list[str]:
    """What the client of each file is called: as the file, with its folder where that is needed."""
    bare = [file.removesuffix(".gz") for file in files]
    names = [Path(file).stem for file in bare]
    if len(set(names)) < len(names):
        names = [str(Path(file).with_suffix("")) for file in bare]
    twice = [file for file, name in zip(files, names, strict=True) if names.count(name) > 1]
    if twice:
        raise DataError(f"clients are called as their files; rename {' or '.join(map(repr, twice))}.")
    return names


class Reader:
    """Reads the rows that a command's options name; features of images are extracted once and kept."""

    def __init__(self, given: dict[str, Any], output: Output) -> None:
        self._given = given
        self._output = output
        self._layout = layout_from(given)
        self._found: dict[str, Features] = {}
        self._datasets: dict[str, Dataset] = {}

    def parts(self, data: str) -> tuple[Part, ...]:
        """Which of a training and a test part there is; nothing where a file holds one set of rows."""
        if not is_address(data):
            return parts(data)
        if self._layout.client is not None:
            data = self._owned(data)
        return ("train",) if self._dataset(data).test is None else ("train", "test")

    def rows(
        self,
        data: str,
        part: Part | None = None,
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
        if not is_address(data):
            if schema is not None and schema.extractor is None and Path(data).suffix.lower() != ".npz":
                if self._layout.header:
                    return self._described(data, schema, labelled, classes, extra, keep)
                self._output.warn(
                    f"{data} is read without names, so its columns are taken by position; they must be in "
                    f"the order {', '.join(column.name for column in schema.used)}."
                )
            if keep:
                raise DataError(f"{data}: its columns have no names that the model knows; leave out --keep.")
            return read_table(
                data, self._layout, part=part, labelled=labelled, owned=owned, classes=classes, width=width
            )
        if owned or self._layout.client is not None:
            data = self._owned(data)
        if whole and part is None:
            if schema is not None and schema.extractor is None and Address.parse(data).scheme in _TABLES:
                return self._named_by(data, schema, labelled, classes, extra, keep)
            data = self._unparted(data)
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
            try:
                rows = _fitting(rows, own, schema, extra)
            except DataError as problem:
                raise DataError(f"{data}: {problem}") from problem
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
        if schema.extractor is not None:
            if not is_address(data):
                raise DataError(f"{data}: this schema is of images; name a dataset, such as folder:PATH.")
            found = self.rows(data, "train", classes=schema.class_array, schema=schema)
            return dataclasses.replace(found, schema=schema)
        if is_address(data) or Path(data).suffix.lower() == ".npz":
            raise DataError(f"{data}: --schema describes the columns of a csv or parquet file.")
        rows = read_described(data, schema, self._dialect, owned=owned, weighted=True)
        assert rows.labels is not None
        return Table(rows.features, classlike(rows.labels), rows.owners, data, schema, rows.weights)

    def sites(self, files: Sequence[str], schema: Schema | None) -> Table:
        """The rows of several files, each the client of its name; columns are found by name in all of them.

        schema: where one describes them; else the first file says what the columns are.
        """
        owners = _site_names(files)
        tables: list[Table] = []
        for file in files:
            if is_address(file):
                raise DataError(
                    f"{file}: of several clients each is a file (csv, parquet, npz), not an address."
                )
            if schema is not None:
                tables.append(self.described(file, schema, owned=False))
            elif not tables:
                tables.append(self.rows(file, "train"))
            else:
                first = tables[0]
                reader = Reader(self._given, self._output)
                if first.schema is not None:  # it says what --label and --drop said
                    reader._layout = dataclasses.replace(self._layout, label=None, drop=())
                tables.append(reader.rows(file, "train", width=first.features.shape[1], schema=first.schema))
        labels = [table.labels for table in tables if table.labels is not None]
        if len({part.dtype.kind in "US" for part in labels}) > 1:
            told = ", ".join(f"{file} {part[0].item()!r}" for file, part in zip(files, labels, strict=True))
            raise DataError(
                f"labels are text in some files and numbers in others ({told}). Spell them alike."
            )
        return Table(
            np.concatenate([table.features for table in tables]),
            np.concatenate(labels),
            np.repeat(owners, [len(table) for table in tables]),
            ", ".join(files),
            tables[0].schema,
            np.concatenate(weights)
            if (weights := [t.weights for t in tables if t.weights is not None])
            else None,
        )

    @property
    def _dialect(self) -> Dialect:
        # Names are known here, so that the delimiter shows by itself.
        return dialect_of(self._layout, "auto" if self._layout.delimiter == "," else None)

    def _described(
        self,
        data: str,
        schema: Schema,
        labelled: bool,
        classes: Array | None,
        extra: Literal["refuse", "ignore"],
        keep: Sequence[str] | None,
    ) -> Table:
        """The rows of a table whose columns a model knows by name; options may say more about this file."""
        names = file_columns(data, self._dialect)
        schema = self._for_file(data, names, schema)
        kept = [] if keep is None else [name for name in schema.identifiers if name in names]
        kept += [name for name in keep or () if name not in kept]
        rows = read_described(data, schema, self._dialect, labelled=labelled, extra=extra, keep=kept)
        told = {schema.label, schema.client, schema.weight, *kept}
        known = {column.name for column in schema.columns} | told
        strange = [name for name in names if name not in known]
        if strange:
            self._output.warn(
                f"{data}: the model was trained without {', '.join(map(repr, strange))}, which "
                f"{'are' if len(strange) > 1 else 'is'} ignored."
            )
        labels = rows.labels
        if labels is not None and classes is not None:
            labels = labels_like(labels, classes)
        return Table(rows.features, labels, None, data, kept=rows.kept)

    def _named_by(
        self,
        data: str,
        schema: Schema,
        labelled: bool,
        classes: Array | None,
        extra: Literal["refuse", "ignore"],
        keep: Sequence[str] | None,
    ) -> Table:
        """The rows of the table that an address names, as if the file itself had been named."""
        self._check_no_layout(data)
        address = Address.parse(data)
        address.allow(*OPTIONS[address.scheme], "test", "seed")
        reader = Reader(self._given, self._output)
        reader._layout = layout_of(address)
        path = str(address.path(data_root(self._given["root"])))
        return reader.rows(
            path,
            labelled=labelled,
            classes=classes,
            width=schema.width,
            schema=schema,
            extra=extra,
            keep=keep,
        )

    def _owned(self, data: str) -> str:
        """The address with the column that names owners in it."""
        address = Address.parse(data)
        if address.scheme not in OPTIONS:
            raise DataError(f"{data} does not say who owns its rows; choose a --partition.")
        named = address.options | ({} if self._layout.client is None else {"client": self._layout.client})
        return f"{address.scheme}:{address.rest}?{'&'.join(f'{name}={text}' for name, text in named.items())}"

    def _unparted(self, data: str) -> str:
        """The address of all rows, where the test part is a share of them that was held out."""
        address = Address.parse(data)
        if not address.rest or not load_dataset(data, self._given["root"]).held_out:
            return data
        options = "&".join(f"{name}={value}" for name, value in (address.options | {"test": "0"}).items())
        return f"{address.scheme}:{address.rest}?{options}"

    def _for_file(self, data: str, names: list[str], schema: Schema) -> Schema:
        """The schema with the label column of this file, and with those left out that --drop names."""
        used = {column.name for column in schema.used}
        known = {column.name for column in schema.columns} | {schema.label, schema.client, schema.weight}
        dropped: list[str] = []
        label = schema.label
        try:
            for wanted in self._layout.drop:
                if wanted in known - used:
                    continue
                name = names[column_position(names, wanted, "column to drop")]
                if name in used:
                    raise DataError(f"the model uses column '{name}'; it cannot be left out (--drop).")
                if name not in (*dropped, *known):
                    dropped.append(name)
            if self._layout.label is not None:
                label = names[column_position(names, self._layout.label, "label column")]
                if label in used:
                    raise DataError(f"the model uses column '{label}'; it cannot be the label (--label).")
        except DataError as problem:
            raise DataError(f"{data}: {problem}") from problem
        columns = [column for column in schema.columns if column.name != label]
        columns += [Column(name, "unused") for name in dropped if name != label]
        return dataclasses.replace(schema, columns=tuple(columns), label=label)

    def _check_no_layout(self, data: str) -> None:
        if dataclasses.replace(self._layout, client=None) != ColumnLayout():
            raise DataError(
                f"{data}: --label, --drop, --delimiter, --no-header, --decimal and the like do not apply to "
                "an address; write them after a question mark, e.g. csv:FILE?label=NAME&header=no."
            )

    def _dataset(self, data: str) -> Dataset:
        if data not in self._datasets:
            self._datasets[data] = load_dataset(data, self._given["root"])
        return self._datasets[data]

    def _features(self, data: str, schema: Schema | None = None) -> Features:
        """Features of a dataset; `schema`: by the backbone that a model knows, and no other."""
        self._check_no_layout(data)
        if data not in self._found:
            dataset = self._dataset(data)
            backbone = self._given["backbone"]
            wanted = None if schema is None else schema.extractor
            if schema is not None and wanted is None and dataset.is_images:
                raise DataError(f"{data}: these are images, and the model takes columns of a table.")
            if not dataset.is_images and backbone is not None:
                raise DataError(f"{data} holds features already; leave out --backbone.")
            own = dataset.train.features is not None and (wanted is None or not wanted.address)
            if not dataset.is_images or (backbone is None and own):
                found = Features.from_dataset(dataset)
            else:
                loaded = None
                if wanted is not None:
                    backbone, loaded = known_backbone(wanted, backbone)
                store = self._given["store"]
                found = built(self._output, dataset, backbone or BACKBONE, store, loaded=loaded).features
            self._found[data] = found
        return self._found[data]


def _fitting(rows: Array, own: Schema, wanted: Schema, extra: Literal["refuse", "ignore"]) -> Array:
    """The rows of a dataset as a model takes them: columns by name, or features of the same backbone."""
    if wanted.extractor is None:
        if own.extractor is not None:
            raise DataError("these are features of images, and the model takes columns of a table.")
        return by_name(rows, own, wanted, extra)
    if own.extractor is not None:
        check_same(own.extractor, wanted.extractor, own.extractor.name)
    return rows
