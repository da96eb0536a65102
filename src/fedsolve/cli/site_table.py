"""A site's table read by a schema, with everything that does not fit told at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fedsolve.cli.command import F, option
from fedsolve.data.columns import dialect_of
from fedsolve.data.datasets import is_address
from fedsolve.data.table_files import DescribedRows, file_columns, read_described
from fedsolve.data.tables import ColumnLayout
from fedsolve.data.text_tables import Dialect
from fedsolve.errors import DataError
from fedsolve.schema import Column, Schema


def schema_option(group: str, help: str) -> Callable[[F], F]:
    """Decorator: --schema, the file that says what a row is."""
    return option("--schema", metavar="FILE", group=group, help=help)


def read_site(data: str, schema: Schema, layout: ColumnLayout) -> DescribedRows:
    """The labelled rows of a site's file; where it does not fit, all columns are named, with their lines."""
    if schema.extractor is not None:
        raise DataError(f"{data} is a table, and the schema is of images. Name a dataset: folder:PATH.")
    spelling = ("decimal", "thousands", "encoding")
    plain = dataclasses.replace(
        layout, delimiter=",", header=True, **{name: getattr(ColumnLayout(), name) for name in spelling}
    )
    if plain != ColumnLayout():
        raise DataError(
            "--label, --drop and --*-key do not go with --schema: it names the label column, and columns "
            'that are not to be used have kind = "unused" in it.'
        )
    if is_address(data):
        raise DataError(f"{data}: a schema describes a csv or parquet file; give its path.")
    # The names are known, so that the delimiter shows by itself.
    dialect = dialect_of(layout, "auto" if layout.delimiter == "," else None)
    try:
        return read_described(data, schema, dialect, weighted=True)
    except DataError as problem:
        faults = _faults(data, schema, dialect)
        raise (DataError(f"{data}: {' '.join(faults)}") if len(faults) > 1 else problem) from problem


def _faults(data: str, schema: Schema, dialect: Dialect) -> list[str]:
    """What is wrong with a file: names of columns, cells, labels; each would hide those after it."""
    names = file_columns(data, dialect)
    there = tuple(column for column in schema.used if names.count(column.name) == 1)
    looks: list[Callable[[], Any]] = [
        lambda: schema.check_columns(names, schema.label is not None, weighted=True)
    ]
    if there:
        cells = Schema(there)
        looks.append(lambda: read_described(data, cells, dialect, labelled=False, extra="ignore"))
        if schema.label is not None and names.count(schema.label) == 1:
            # A text may be anything, so that labels alone are refused.
            labels = Schema((Column(there[0].name, "text"),), schema.label, schema.classes)
            looks.append(lambda: read_described(data, labels, dialect, extra="ignore"))
    faults = []
    for look in looks:
        try:
            look()
        except DataError as problem:
            faults.append(str(problem).removeprefix(f"{data}: "))
    return faults
