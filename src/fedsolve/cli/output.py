"""What the command prints: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from fedsolve.cli.options import LAST, WIDTH, Options, option, rare
from fedsolve.errors import ModelFileError
from fedsolve.pages.words import harmless, known, one_line, percent
from fedsolve.watching.log_lines import Style, say

# Every command comes through here: what only some of them need is imported where it is used.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedsolve.federation.method import Record


_PAGES = (".html", ".md", ".tex")

Shown = str | Sequence[tuple[str, str]] | Callable[["Console"], None]
"""What people see of an outcome."""


def _unseen(done: int, expected: int, remark: str) -> None:
    """The progress of a bar that is not drawn."""


class Interrupted(click.ClickException):
    """Ctrl-C; the message says what is left and how to go on."""


def console(stream: IO[str] | None = None) -> Console:
    """A console on stdout; of fixed width where there is no terminal to measure."""
    from rich.console import Console

    stream = stream or sys.stdout
    measured = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, width=None if measured else WIDTH, highlight=False, soft_wrap=False)


class Output(Options):
    """Where a command's words go: a page for people, one JSON document, or nothing."""

    title = LAST
    as_json: bool = option(
        False, 'Print one JSON document on stdout, also for an error: {"error": {...}}.', flag="--json"
    )
    quiet: bool = rare(False, "Print nothing but errors and warnings.", also="-q")
    log: Style = "text"
    heard: Callable[[str], None] | None = None

    def result(self, document: dict[str, Any], shown: Shown = "") -> None:
        """The outcome: as JSON, or as a sentence, names with values, or what a function draws.

        The warnings that it lists are lines on stderr too.
        """
        if self.as_json:
            from fedsolve.pages.written_tables import plain

            click.echo(json.dumps(plain(document), indent=2, allow_nan=False))
        elif shown and not self.quiet:
            if callable(shown):
                shown(console())
            elif isinstance(shown, str):
                console().print(shown, markup=False, soft_wrap=True)
            else:
                console().print(fact_grid(shown))
        for doubt in document.get("warnings", ()):
            self.warn(doubt)

    def page(self) -> Console:
        """A page that grows while the command works; empty with --json and --quiet."""
        if not (self.as_json or self.quiet):
            return console()
        from rich.console import Console

        return Console(quiet=True)

    def note(self, text: str, /, **fields: Any) -> None:
        """A remark for people, on stderr; it may quote what the other side wrote. fields: for a JSON log."""
        shown = not self.quiet and (self.log == "json" or not self.as_json)
        say(harmless(text), shown=shown, **fields)
        if self.heard is not None:
            self.heard(harmless(text))

    def warn(self, text: str, /, **fields: Any) -> None:
        """A warning on stderr, which neither --json nor --quiet hides."""
        say(harmless(text), "warning", **fields)

    @contextmanager
    def progress(
        self, title: str, rounds: int | None = None
    ) -> Iterator[list[Callable[[Record, int], None]]]:
        """Followers drawing a bar over exchanges with layer and risk, or rounds with loss and accuracy."""
        said: dict[str, str] = {}

        def tell(record: Record, expected: int) -> None:
            if rounds is None:
                risk = known(record.risk, ", risk {:.4g}")
                advance(record.exchange + 1, expected, f"layer {record.step}{risk}")
                return
            if "loss" in record.metrics:
                said["loss"] = f"loss {record.metrics['loss']:.4f}"
            if "test_accuracy" in record.metrics:
                said["test"] = f"test {percent(record.metrics['test_accuracy'])}"
            advance(record.step + 1, rounds, ", ".join(said.values()))

        with self.bar(title, "exchange" if rounds is None else "round") as advance:
            yield [] if advance is _unseen else [tell]

    @contextmanager
    def bar(self, title: str, unit: str) -> Iterator[Callable[[int, int, str], None]]:
        """A bar on stderr, gone when done; the function it gives takes (done, expected, remark)."""
        if self.as_json or self.quiet or self.log == "json" or not sys.stderr.isatty():
            yield _unseen
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn(unit),
            MofNCompleteColumn(separator=" of "),
            TimeElapsedColumn(),
            TextColumn("{task.fields[remark]}"),
        )
        with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
            task = progress.add_task(title, total=None, remark="")

            def advance(done: int, expected: int, remark: str) -> None:
                progress.update(task, completed=done, total=max(done, expected), remark=remark)

            yield advance


class LoggedOutput(Output):
    """The same for a command that runs for long."""

    log: Style = rare("text", "How lines on stderr and in log files are written; json: one object each.")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> Table:
    """A plain table; all columns but `left` are flush right."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        drawn.add_column(name, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn


def fact_grid(lines: Sequence[tuple[str, str]]) -> Table:
    """Names and values in two columns, without rules; a name without a value is left out."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        if value:
            grid.add_row(escape(name), escape(harmless(value)))
    return grid


def check_target(path: str | None, *inputs: str | None, root: str | None = None) -> None:
    """Refuse, before anything is read, to write over an input or where no file can be written.

    inputs: files, folders and addresses of datasets that the command reads. In a folder, no file that is
            there is written over, but for pages and tables, which nothing reads. root: where addresses look.
    """
    from fedsolve.data.address import Address

    if path is None:
        return
    target = Path(path)
    for text in filter(None, inputs) if target.exists() else ():
        address = Address.parse(text)
        named = [name for name in (text, address.rest, address.options.get("test", "")) if name]
        places = [Path(name).expanduser() for name in named]
        places += [Path(root).expanduser() / name for name in named if root is not None]
        for source in filter(Path.exists, places):
            inside = source.is_dir() and target.resolve().is_relative_to(source.resolve())
            if target.samefile(source) or (inside and target.suffix.lower() not in _PAGES):
                raise ModelFileError(
                    f"{path} is an input of this command ({text}) and would be lost. Name another file."
                )
    if target.is_dir():
        raise ModelFileError(f"cannot write {path}: it is a folder. Name a file in it.")
    if target.exists() and not target.is_file():
        raise ModelFileError(f"cannot write {path}: it is no regular file. Name a file.")
    folder = Path(os.path.realpath(target)).parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ModelFileError(
            f"cannot write {path}: {folder} is not a folder you may write to. Name a folder that is."
        )


def write_text(path: str | Path, text: str) -> None:
    from fedsolve import container

    container.write_atomically(path, text.encode())


@contextmanager
def warnings_told() -> Iterator[None]:
    """Warnings as single lines on stderr: the first of each kind, then how many more there were."""
    counts: dict[type[Warning], int] = {}
    told: set[str] = set()

    def tell(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if str(message) in told:
            return
        told.add(str(message))
        counts[category] = counts.get(category, 0) + 1
        if counts[category] == 1:
            say(one_line(str(message)), "warning")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = tell
        try:
            yield
        finally:
            for category, count in counts.items():
                if count > 1:
                    say(f"{count - 1} more of this kind ({category.__name__}).", "warning")
