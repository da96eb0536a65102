"""Words on stderr: warnings in one line each, text of others that cannot steer a terminal, interruptions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

LONGEST = 2000
"""Characters of a remark; whoever wrote more wants to flood a terminal."""


class Interrupted(click.ClickException):
    """Ctrl-C; the message says what is left and how to go on."""

    exit_code = 130


@contextmanager
def warnings_told() -> Iterator[None]:
    """Warnings as single lines on stderr: the first of each kind, then how many more there were."""
    counts: dict[type[Warning], int] = {}

    def tell(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        counts[category] = counts.get(category, 0) + 1
        if counts[category] == 1:
            click.echo(f"warning: {one_line(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = tell
        try:
            yield
        finally:
            for category, count in counts.items():
                if count > 1:
                    click.echo(f"warning: {count - 1} more of this kind ({category.__name__}).", err=True)


def one_line(text: str) -> str:
    return " ".join(text.split())


def harmless(text: str) -> str:
    """The text in one line that cannot steer a terminal, of a length that people read."""
    shown = "".join(" " if c.isspace() else c if c.isprintable() else "\ufffd" for c in text[:LONGEST])
    return shown if len(text) <= LONGEST else f"{shown} ... ({len(text):,} characters)"
