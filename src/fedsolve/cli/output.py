"""What the command prints: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from fedsolve import log_lines
from fedsolve.cli.command import WIDTH
from fedsolve.errors import ModelFileError
from fedsolve.log_lines import Style

# Every command comes through here: what only some of them need is imported where it is used.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedsolve.federation.method import Record

_PAGES = (".html", ".md", ".tex")

LONGEST = 2000
"""Characters of a remark; whoever wrote more wants to flood a terminal."""


class Interrupted(click.ClickException):
    """Ctrl-C; the message says what is left and how to go on."""

    exit_code = 130


def console(stream: IO[str] | None = None) -> Console:
    """A console on stdout; of fixed width where there is no terminal to measure."""
    from rich.console import Console

    stream = stream or sys.stdout
    measured = stream.isatty() or "COLUMNS" in os.environ
    return Console(file=stream, width=None if measured else WIDTH, highlight=False, soft_wrap=False)


@dataclass(frozen=True)
class Output:
    """Where a command's words go: a page for people, one JSON document, or nothing."""

    as_json: bool = False
    quiet: bool = False
    log: Style = "text"
    heard: Callable[[str], None] | None = None
    """Who is told of every remark, too."""

    def result(self, document: dict[str, Any], show: Callable[[Console], None]) -> None:
        """The outcome: as JSON, or as `show` draws it."""
        if self.as_json:
            click.echo(json.dumps(plain(document), indent=2, allow_nan=False))
        elif not self.quiet:
            show(console())

    def page(self) -> Console:
        """The page that grows while the command works; swallowed by --json and --quiet."""
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
        """What nobody should miss, on stderr, whatever was asked for."""
        say(harmless(text), "warning", **fields)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[Record, int], None]]:
        """A bar over exchanges, on stderr when that is a terminal: exchange n of N, layer, risk."""

        def remark(record: Record) -> str:
            return f"layer {record.step}" + ("" if record.risk is None else f", risk {record.risk:.4g}")

        with self.bar(title, "exchange") as advance:
            yield lambda record, expected: advance(record.exchange + 1, expected, remark(record))

    @contextmanager
    def bar(self, title: str, unit: str) -> Iterator[Callable[[int, int, str], None]]:
        """A bar on stderr, gone when done; the function it gives takes (done, expected, remark)."""
        if self.as_json or self.quiet or self.log == "json" or not sys.stderr.isatty():
            yield lambda done, expected, remark: None
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


_LOG = logging.getLogger("fedsolve")


@contextmanager
def logging_lines() -> Iterator[None]:
    """A block in which a command may begin a log; it ends with the block."""
    try:
        yield
    finally:
        for handler in [each for each in _LOG.handlers if isinstance(each, log_lines.Lines)]:
            _LOG.removeHandler(handler)
            handler.close()
        _LOG.propagate = True


def begin_lines(process: str, style: Style) -> None:
    """Have a command say what it says on stderr as JSON, if that is the style."""
    if style == "json":
        _LOG.addHandler(_StderrLines(style, process))
        _LOG.setLevel(logging.INFO)
        _LOG.propagate = False


def keep_lines(path: Path, process: str, style: Style) -> None:
    """Have a command keep what it says in a file too, whether it is shown or not."""
    try:
        _LOG.addHandler(log_lines.LogFile(path, style, process))
    except OSError as problem:
        raise ModelFileError(f"cannot write {path}: {problem.strerror or problem}.") from problem
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False


class _StderrLines(log_lines.Lines):
    """Lines on stderr, but for those that people did not want to see."""

    def __init__(self, style: Style, process: str) -> None:
        super().__init__(2, style, process)
        self.addFilter(lambda record: getattr(record, "shown", True))

    def put(self, text: str) -> None:
        click.echo(text, err=True)


def say(text: str, level: str = "info", /, *, shown: bool = True, **fields: Any) -> None:
    """A line on stderr, in the style of the log where one was begun; also in its file."""
    if _LOG.handlers:
        _LOG.log(_LEVELS[level], "%s", text, extra={"fields": fields, "shown": shown})
    if shown and not any(isinstance(each, _StderrLines) for each in _LOG.handlers):
        click.echo(text if level == "info" else f"{level}: {text}", err=True)


_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


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


def facts(page: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Names and values in two columns, without rules."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(name, escape(harmless(value)))
    page.print(grid)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def megabytes(nbytes: float) -> str:
    """Megabytes (10^6 bytes) with three significant digits."""
    value = nbytes / 1e6
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1}f}"


def plain(value: Any) -> Any:
    """The value as JSON can hold it; NaN and infinity become null."""
    import numpy as np

    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def check_target(path: str | None, *inputs: str | None, root: str | None = None) -> None:
    """Refuse, before anything is read, a place where no file can be written, or where an input lies.

    inputs: files, folders and addresses of datasets that the command reads. In a folder, no file that is
            there is written over, but for pages and tables, which nothing reads. root: where addresses look.
    """
    if path is None:
        return
    target = Path(path)
    for text in inputs:
        for source in _places(text, root):
            if _would_lose(target, source):
                raise ModelFileError(
                    f"{path} is an input of this command ({text}) and would be lost. Name another file."
                )
    if target.is_dir():
        raise ModelFileError(f"cannot write {path}: it is a folder. Name a file in it.")
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ModelFileError(f"cannot write {path}: {folder} is not a folder you may write to.")


def _places(text: str | None, root: str | None) -> Iterator[Path]:
    """Where an input may lie: a path, or the paths in an address."""
    if text is None:
        return
    from fedsolve.data.datasets.dataset_address import Address

    address = Address.parse(text)
    for name in (text, address.rest, address.options.get("test", "")):
        if name:
            yield Path(name).expanduser()
            if root is not None:
                yield Path(root).expanduser() / name


def _would_lose(target: Path, source: Path) -> bool:
    """Whether writing `target` destroys `source` or a file in it, by whatever name or link."""
    if not (target.exists() and source.exists()):
        return False
    if target.samefile(source):
        return True
    inside = source.is_dir() and target.resolve().is_relative_to(source.resolve())
    return inside and target.suffix.lower() not in _PAGES


def write_text(path: str | Path, text: str) -> None:
    """Write a whole file in one step."""
    from fedsolve import container

    container.write_atomically(path, text.encode())


@contextmanager
def warnings_told() -> Iterator[None]:
    """Warnings as single lines on stderr: the first of each kind, then how many more there were."""
    counts: dict[type[Warning], int] = {}

    def tell(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
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


def one_line(text: str) -> str:
    return " ".join(text.split())


def harmless(text: str) -> str:
    """The text in one line that cannot steer a terminal, of a length that people read."""
    shown = "".join(" " if c.isspace() else c if c.isprintable() else "\ufffd" for c in text[:LONGEST])
    return shown if len(text) <= LONGEST else f"{shown} ... ({len(text):,} characters)"
