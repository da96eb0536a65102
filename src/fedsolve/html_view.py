"""Objects as a few lines of HTML, for notebooks (`_repr_html_`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(title: str, rows: Iterable[Sequence[object]], heading: Sequence[object] = ()) -> str:
    """A table with a title; everything in it is text and is escaped."""
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in heading)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    lines = f"<tr>{head}</tr>{body}" if head else body
    return f"<table><caption><b>{escape(title)}</b></caption>{lines}</table>"
