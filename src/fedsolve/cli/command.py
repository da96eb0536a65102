"""Click commands whose help teaches: purpose, examples, options in named groups.

The docstring of a command is its help page. A paragraph of lines that begin with `# ` ends it: examples, each
a comment that says what the command line under it does. Before them, `Details:` begins what only --help-all
shows.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import click

from fedsolve.errors import DataError, did_you_mean
from fedsolve.parameters import read_toml

WIDTH = 100
LAST = "Output"
"""The group that closes every help page; click's own --help is in it."""

SHORT_EXAMPLES = 2
"""How many examples the short one of two help pages has."""

ALL = "fedsolve.help_all"
"""Where a context says that the longer one is shown."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH, "show_default": True}


class Option(click.Option):
    """An option that belongs to a named group of the help page."""

    def __init__(self, *names: Any, group: str = "Options", more: bool = False, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group
        self.more = more

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        hidden = self.more and isinstance(ctx.command, Command) and not ctx.command.shows_all(ctx)
        return None if hidden else super().get_help_record(ctx)


class Explained(click.Command):
    """A command whose help page is its docstring, with examples."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:
        text, *examples = inspect.cleandoc(help or "").split("\n# ")
        text, _, self.details = text.partition("\nDetails:\n")
        self.examples = [f"# {example.strip()}" for example in examples]
        settings.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **settings | {"help": text.strip()})

    def write_examples(self, formatter: click.HelpFormatter, most: int | None = None) -> None:
        """A section of command lines, each under a comment that says what it does."""
        if self.examples:
            with formatter.section("Examples"):
                indent = " " * formatter.current_indent
                text = textwrap.indent("\n\n".join(self.examples[:most]), indent)
                formatter.write(f"{text}\n")


class Command(Explained):
    """A command with examples before its options, and its options in groups.

    every: what --help-all promises, of a command with a second page that shows more; "" where one shows all.
    """

    every = ""

    def __init__(self, *args: Any, config: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if config:
            told = "TOML file with a table of this command's options, such as [server] or [client]."
            reading = {"is_eager": True, "callback": _read_config, "metavar": "FILE"}
            self._add("--config", told, group="Configuration", **reading)
        told = "Show the traceback of an error (also FEDSOLVE_DEBUG=1)."
        self._add("--debug", told, is_flag=True, more=True)
        if self.every:
            self._add("--help-all", self.every, is_flag=True, is_eager=True, callback=_show_all)

    def _add(self, name: str, told: str, group: str = LAST, **settings: Any) -> None:
        self.params.append(Option([name], group=group, expose_value=False, help=told, **settings))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as problem:
            problem.ctx = problem.ctx or ctx  # the message then names the help page
            raise

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        everything = self.shows_all(ctx)
        self.write_examples(formatter, None if everything else SHORT_EXAMPLES)
        if everything and self.details:
            with formatter.section("Details"):
                formatter.write_text(self.details)

    def shows_all(self, ctx: click.Context) -> bool:
        return not self.every or ALL in ctx.meta

    def help_groups(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(param, "group", LAST), []).append(record)
        return groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = self.help_groups(ctx)
        for title in sorted(groups, key=lambda title: title == LAST):
            with formatter.section(title):
                formatter.write_dl(groups[title], col_max=34)


class TwoPages(Command):
    """A command with two help pages: --help shows what is used most, --help-all all, with details."""

    every = "Show every option."


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class ExamplesGroup(Explained, click.Group):
    """A group of commands whose help page ends with examples: its own, or the first of every command."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.examples:
            commands = (one for one in self.commands.values() if isinstance(one, Explained))
            self.examples = [example for one in commands for example in one.examples[:1]]
        self.write_examples(formatter)


def config_table(path: str, command: str) -> dict[str, Any]:
    document = read_toml(path)
    table = document.get(command, {})
    if not isinstance(table, dict) or not table:
        tables = ", ".join(f"[{key}]" for key in document) or "nothing"
        raise DataError(f"{path} has no table [{command}]; it has {tables}.")
    return table


def _read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Use the values in a TOML file as defaults of this command line."""
    if path is None:
        return
    name = ctx.command.name or ""
    options = [other for other in ctx.command.get_params(ctx) if isinstance(other, click.Option)]
    known = {spelling.removeprefix("--"): other for other in options for spelling in other.opts}
    values: dict[str, Any] = {}
    for key, value in config_table(path, name).items():
        chosen = known.get(key.replace("_", "-"))
        if chosen is None or chosen is param or chosen.name is None:
            raise DataError(f"{path}: [{name}] has the unknown entry '{key}'.{did_you_mean(key, known)}")
        if isinstance(value, list) and not chosen.multiple:
            value = ",".join(map(str, value))
        values[chosen.name] = value
    ctx.default_map = {**(ctx.default_map or {}), **values}
