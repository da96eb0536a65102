"""A site's table read by a schema; everything that does not fit is reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fedsolve.data.datasets import is_address
from fedsolve.errors import DataError
from fedsolve.tables.csv_text import Dialect
from fedsolve.tables.schema import Column, Schema
from fedsolve.tables.table_file import ColumnLayout, Table, file_columns, read_table


def read_site(data: str, schema: Schema, layout: ColumnLayout) -> Table:
    """The labelled rows of a site's file. Errors name all columns that do not fit, with their lines."""
    if schema.extractor is not None:
        raise DataError(f"{data} is a table, and the schema is of images. Name a dataset: folder:PATH.")
    if dataclasses.replace(layout, **dataclasses.asdict(Dialect())) != ColumnLayout():
        raise DataError(
            "--label, --drop and --*-key do not go with --schema: it names the label column, and columns "
            'that are not to be used have kind = "unused" in it.'
        )
    if is_address(data):
        raise DataError(f"{data}: a schema describes a csv or parquet file; give its path.")
    try:
        return read_table(data, schema, layout, weighted=True)
    except DataError as problem:
        faults = _faults(data, schema, layout)
        raise (DataError(f"{data}: {' '.join(faults)}") if len(faults) > 1 else problem) from problem


def _faults(data: str, schema: Schema, dialect: Dialect) -> list[str]:
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
