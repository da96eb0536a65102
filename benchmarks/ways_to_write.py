"""Ways to write numbers and dates, and what `fedsolve schema` proposes: `python -m benchmarks.ways_to_write`.

The ways are those of `tests/tables/test_ways_to_write.py`, where the values read are tested too; the last
lines are columns of files that LibreOffice wrote in four locales (`tests/tables/spreadsheets`).
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from tests.tables.test_spreadsheets import FILES
from tests.tables.test_ways_to_write import DATES, DAYS, NUMBERS, every, written

from fedsolve.tables.proposal import propose


@click.command(help=__doc__)
def main() -> None:
    page = Table("way", "cells", "kind", "remark")
    cells = {way: (sign, cells) for way, (sign, cells, _) in NUMBERS.items()}
    for way, (sign, form, _) in DATES.items():
        cells[way] = sign, every(7, "", [day.strftime(form) for day in DAYS])
    with tempfile.TemporaryDirectory() as folder:
        for way, (sign, column) in cells.items():
            (found,) = propose(written(Path(folder) / "d.csv", sign, column)).columns
            page.add_row(way, "  ".join(cell.strip() for cell in column[2:4]), found.kind, found.remark)
    page.add_section()
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        rows = list(csv.DictReader(text.splitlines(), delimiter=";" if ";" in text else ","))
        for found in propose(path).columns:
            shown = "  ".join(row[found.name] for row in rows[2:4])
            page.add_row(f"{path.stem}: {found.name}", shown, found.kind, found.remark)
    Console(width=150).print(page)


if __name__ == "__main__":
    main()
