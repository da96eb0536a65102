"""Click commands whose help teaches: purpose, examples, options in named groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 100
LAST = "Output"
"""The group that closes every help page; click's own --help is in it."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH, "show_default": True}


class Option(click.Option):
    """An option that belongs to a named group of the help page."""

    def __init__(self, *names: Any, group: str = "Options", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group


class Command(click.Command):
    """A command with examples before its options, and its options in groups.

    examples: pairs of (what it does, the command line).
    """

    def __init__(self, *args: Any, examples: tuple[tuple[str, str], ...] = (), **settings: Any) -> None:
        settings.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **settings)
        self.examples = examples
        self.params.append(
            Option(
                ["--debug"],
                group=LAST,
                is_flag=True,
                expose_value=False,
                help="Show the traceback of an error (also FEDSOLVE_DEBUG=1).",
            )
        )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        write_examples(formatter, self.examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", LAST), []).append(record)
        for title in sorted(groups, key=lambda title: title == LAST):
            with formatter.section(title):
                formatter.write_dl(groups[title], col_max=34)


class ExamplesGroup(click.Group):
    """A group of commands whose help page ends with examples."""

    def __init__(self, *args: Any, examples: tuple[tuple[str, str], ...] = (), **settings: Any) -> None:
        settings.setdefault("context_settings", CONTEXT)
        super().__init__(*args, **settings)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)


def write_examples(formatter: click.HelpFormatter, examples: tuple[tuple[str, str], ...]) -> None:
    """A section of command lines, each under a comment that says what it does."""
    if not examples:
        return
    with formatter.section("Examples"):
        for number, (purpose, line) in enumerate(examples):
            if number:
                formatter.write("\n")
            indent = " " * formatter.current_indent
            formatter.write(f"{indent}# {purpose}\n")
            for part in line.splitlines():
                formatter.write(f"{indent}{part}\n")


def option(*names: str, group: str = "Options", **settings: Any) -> Callable[[F], F]:
    """Decorator: `click.option` in a group of the help page."""
    return click.option(*names, cls=Option, group=group, **settings)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in this order on the help page."""

    def decorate(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate
