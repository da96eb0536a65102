"""Click commands whose help teaches: purpose, examples, options in named groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from fedsolve.errors import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 100
LAST = "Output"
"""The group that closes every help page; click's own --help is in it."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH, "show_default": True}


class Option(click.Option):
    """An option that belongs to a named group of the help page.

    more: whether it is one of the rarer ones, which a command with two help pages shows on the longer.
    """

    def __init__(self, *names: Any, group: str = "Options", more: bool = False, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group
        self.more = more


class Choice(click.Choice[str]):
    """One of a few words; a mistyped one is told which was meant."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{super().get_invalid_choice_message(value, ctx)}{did_you_mean(str(value), self.choices)}"


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
                more=True,
                is_flag=True,
                expose_value=False,
                help="Show the traceback of an error (also FEDSOLVE_DEBUG=1).",
            )
        )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_help(ctx, formatter, self.examples)

    def write_help(
        self, ctx: click.Context, formatter: click.HelpFormatter, examples: tuple[tuple[str, str], ...]
    ) -> None:
        """What the command does, and these examples of it."""
        super().format_help_text(ctx, formatter)
        write_examples(formatter, examples)

    def shown(self, ctx: click.Context, param: click.Parameter) -> bool:
        """Whether the help page has this option."""
        return isinstance(param, click.Option)

    def help_groups(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """The options of the help page under the titles of their groups."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and self.shown(ctx, param):
                groups.setdefault(getattr(param, "group", LAST), []).append(record)
        return groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = self.help_groups(ctx)
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
