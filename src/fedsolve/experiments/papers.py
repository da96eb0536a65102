"""The numbers printed in the papers' tables, found by what they are about.

papers.json holds each table as a grid: `axes` names the coordinates of rows and of columns, `fixed`
those of the whole table, and a value is a number or [number, spread]. Accuracies are in per cent.
Coordinates are spelt as in experiment files: dataset, partition ("α = 0.1"), method, depth, the
methods' parameters, metric.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from fedsolve.errors import DataError


@dataclass(frozen=True)
class Printed:
    """One number of a paper, with what it is about and the table it stands in."""

    coordinates: Mapping[str, Any]
    mean: float
    spread: float | None
    table: str

    def about(self, coordinates: Mapping[str, Any]) -> bool:
        """Whether all that the paper says of this number holds for `coordinates`.

        A number whose dataset the paper does not name is about no dataset of ours.
        """
        return "dataset" in self.coordinates and all(
            name in coordinates and same(value, coordinates[name]) for name, value in self.coordinates.items()
        )


@cache
def papers() -> dict[str, Any]:
    """All papers by key: {paper, spread, tables: {number: {caption, axes, fixed, columns, rows}}}."""
    text = resources.files("fedsolve.experiments").joinpath("papers.json").read_text(encoding="utf-8")
    by_key: dict[str, Any] = json.loads(text)
    return by_key


def check_tables(key: str, tables: Sequence[str]) -> None:
    """Refuse an unknown paper or table, by name."""
    if key not in papers():
        raise DataError(f"unknown paper '{key}'; known are {', '.join(papers())}.")
    known = papers()[key]["tables"]
    for table in tables:
        if table not in known:
            raise DataError(f"paper '{key}' has no table '{table}' here; known are {', '.join(known)}.")


def printed(key: str, tables: Sequence[str]) -> list[Printed]:
    """Every number of these tables."""
    check_tables(key, tables)
    return [value for table in tables for value in _numbers(table, papers()[key]["tables"][table])]


def _numbers(number: str, table: Mapping[str, Any]) -> Iterator[Printed]:
    row_axes, column_axes = table["axes"]
    for row, values in table["rows"]:
        for column, value in zip(table["columns"], values, strict=True):
            if value is None:
                continue
            mean, spread = value if isinstance(value, list) else (value, None)
            coordinates = dict(table["fixed"])
            coordinates |= dict(zip(row_axes, row, strict=True)) | dict(zip(column_axes, column, strict=True))
            yield Printed(coordinates, float(mean), None if spread is None else float(spread), number)


def same(first: Any, second: Any) -> bool:
    """Whether two coordinates are equal; numbers up to rounding."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (first, second))
    return math.isclose(first, second, rel_tol=1e-9) if numbers else first == second
