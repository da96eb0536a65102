"""Files that LibreOffice 7.4 wrote in four locales, cells as shown: all give the same numbers and days.

The sheet has 24 rows: a number with gaps, an amount with thousands, a share in per cent, a day, a time and a
label.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from fedsolve.tables.proposal import propose
from fedsolve.tables.table_file import read_table

FILES = sorted((Path(__file__).parent / "spreadsheets").glob("*.csv"))
ROWS = np.arange(24)
SEEN = [datetime(2021, 1, 31) + timedelta(days=29 * row, hours=row, minutes=30) for row in ROWS.tolist()]


def days(moments):
    return np.array([(moment - datetime(1970, 1, 1)).total_seconds() / 86400 for moment in moments])


EXPECTED = {
    "value": np.where(ROWS % 7 == 3, np.nan, (20 + 1.37 * ROWS + 0.1 * (ROWS % 3)).round(2)),
    "amount": 1234.5 + 1001.25 * ROWS,
    "share": (5 + 3.1 * ROWS).round(1),
    "day": np.floor(days(SEEN)),
    "seen": days(SEEN),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_locale_gives_the_same_table(path):
    assert len(FILES) == 4
    schema = propose(path)
    assert [column.kind for column in schema.columns] == ["number"] * 3 + ["date"] * 2
    table = read_table(path, schema)
    assert table.labels.tolist() == ["ab"[7 * row % 5 % 2] for row in ROWS.tolist()]
    places = dict(zip(schema.names, table.features.T, strict=True))
    for column in schema.columns:
        found = places[column.name]
        if column.kind == "date":
            found = found * column.scale + column.reference
        np.testing.assert_allclose(found, EXPECTED[column.name], rtol=0, atol=1e-9)
