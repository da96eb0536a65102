"""Typed options, commands made of them, and help pages that teach: purpose, examples, options in groups.

A command is a function of option classes. Each option is described once, beside its field, in the words of
`fedsolve.parameters`:

    class Saving(Options):
        title = "Training"
        out: str | None = option(None, "Where to save the model.", "FILE")

    @command()
    def train(saving: Saving, output: Output) -> None: ...

The docstring of the function is the help page. A paragraph of lines that begin with `# ` ends it: examples,
each a comment that says what the command line under it does. Before them, `Details:` begins what only
--help-all shows.
"""

from __future__ import annotations

import inspect
import textwrap
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from inspect import get_annotations
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import click
from click.core import ParameterSource

from fedsolve.errors import DataError, did_you_mean
from fedsolve.parameters import Description, described, parameter, read_toml

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_KEY = "fedsolve.option"
NOT_WRITTEN = (None, ParameterSource.DEFAULT)
"""Sources of values that no person wrote: on the command line, in the environment or in the options file."""

WIDTH = 100
LAST = "Output"
"""The group that closes every help page; click's own --help is in it."""

SHORT_EXAMPLES = 2
"""How many examples the short one of two help pages has."""

ALL, METHOD = "fedsolve.help_all", "fedsolve.method"
"""Where a context says that the longer one is shown, and which method the command line asks for."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH, "show_default": True}


class Option(click.Option):
    """An option of a command's help page.

    group: the title it stands under. more: whether only the longer of two pages shows it. applies: the
    methods it goes with, by key.
    """

    group = LAST
    more = False
    applies: Callable[[str], bool] | None = None

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        hidden = self.more and isinstance(ctx.command, Command) and not ctx.command.shows_all(ctx)
        hidden |= self.applies is not None and not self.applies(str(ctx.meta.get(METHOD, "")))
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

    every: what --help-all promises, of a command with two help pages: --help shows what is used most,
           --help-all all, with details. "" where one page shows all.
    """

    every = ""

    def __init__(self, *args: Any, config: bool = False, every: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.every = every or self.every
        if config:
            told = "TOML file with a table of this command's options, such as [server] or [client]."
            reading: dict[str, Any] = {"is_eager": True, "callback": _read_config, "metavar": "FILE"}
            self._add("--config", told, group="Configuration", **reading)
        told = "Show the traceback of an error (also FEDSOLVE_DEBUG=1)."
        self._add("--debug", told, is_flag=True, more=True)
        if self.every:
            self._add("--help-all", self.every, is_flag=True, is_eager=True, callback=_show_all)

    def _add(self, name: str, told: str, group: str = LAST, more: bool = False, **settings: Any) -> None:
        made = Option([name], expose_value=False, help=told, **settings)
        made.group, made.more = group, more
        self.params.append(made)

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
        told = ", ".join(f"[{key}]" if isinstance(document[key], dict) else key for key in document)
        raise DataError(f"{path} has no table [{command}] with entries; it has {told or 'nothing'}.")
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


# -- options described beside fields -----------------------------------------------------------------


def option(
    default: T,
    help: str = "",
    metavar: str = "",
    *,
    more: bool = False,
    argument: bool = False,
    applies: Callable[[str], bool] | None = None,
    **stated: Any,
) -> T:
    """A field of an option class.

    more:     whether it is one of the rarer options, which a command with two help pages shows on the longer.
    argument: whether it is a word of its own instead of an option. applies: the methods it goes with, by key.
    metavar, stated: what `fedsolve.parameters.parameter` takes.
    """
    made: Any = parameter(default, help, metavar=metavar, **stated)
    shown = {"more": more, "argument": argument, "applies": applies}
    made.metadata = MappingProxyType({**made.metadata, _KEY: shown})
    return typing.cast(T, made)


def rare(default: T, help: str = "", metavar: str = "", **stated: Any) -> T:
    """The same for an option that only the longer help page shows."""
    return option(default, help, metavar, more=True, **stated)


def required(help: str = "", metavar: str = "", **stated: Any) -> Any:
    """The same for a value that must be given."""
    return option(MISSING, help, metavar, **stated)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Options:
    """Base of option classes, which are frozen dataclasses.

    title: the group of their options in the help. written: names of those that a person wrote.
    """

    title: ClassVar[str] = "Options"
    written: frozenset[str] = field(default=frozenset(), repr=False, compare=False, kw_only=True)

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def given(self, *names: str) -> list[str]:
        """The flags, among these options, that a person wrote: on the command line or in the options file."""
        known = described(type(self))
        return [known[name].option.partition("/")[0] for name in names if name in self.written]


@dataclass(frozen=True)
class _Value(click.ParamType):  # type: ignore[type-arg]  # click 8.2 has it without a type
    """A value as its description reads and checks it."""

    description: Description
    name = "value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        read = self.description.read(value, spelled=isinstance(value, str))
        try:
            self.description.check(read)
        except DataError as problem:
            self.fail(str(problem).replace(" must be None, ", " must be "), param, ctx)
        return read


class DescribedOption(Option):
    """One described parameter as an option: of a command, or of the method that it trains."""

    def __init__(
        self,
        description: Description,
        group: str,
        *,
        listed: bool = True,
        more: bool = False,
        applies: Callable[[str], bool] | None = None,
        default_text: str | None = None,
        **settings: Any,
    ) -> None:
        """listed: whether a long list of choices is written out. default_text: if not the description's."""
        flag = description.kinds == (bool,)
        settings["type"] = bool if flag else settings.get("type") or _Value(description)
        also, name = filter(None, [description.also]), settings.pop("name", description.name)
        super().__init__([*also, description.option, name], is_flag=flag, show_default=False, **settings)
        self.group, self.more, self.applies = group, more, applies
        self.description, self.listed, self.default_text = description, listed, default_text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        described, stands = self.description, value_text(self.description)
        text, default = described.help, self.default_text
        if self.listed and stands == "NAME" and described.choices:
            text = f"{text.removesuffix('.')}: {', '.join(map(str, described.choices))}."
        if described.within:
            text = f"{text.removesuffix('.')},{described.range()}."
        default = described.default_text if default is None else default
        self.help = text + (f"  [default: {default}]" if default else "")
        self.metavar = None if self.is_flag else stands
        return super().get_help_record(ctx)


def value_text(description: Description) -> str:
    """The placeholder of a value on help pages."""
    if description.metavar:
        return description.metavar
    words = [*map(str, description.choices)]
    if not description.kinds and len(words) > 4:
        return "NAME"
    kinds = {int: "INTEGER", float: "FLOAT", bool: "", str: "TEXT"}
    words = [*(kinds[kind] for kind in description.kinds), *words]
    if description.optional and not description.kinds:
        words.append("none")
    text = "|".join(words)
    return text if description.kinds else f"[{text}]"


def _click_parameter(cls: type[Options], description: Description, shown: dict[str, Any]) -> click.Parameter:
    """A field of an option class as click takes it."""
    default, name = description.default, description.name
    needed, several = default is MISSING, description.kinds == (object,)
    if shown["argument"]:
        return click.Argument(
            [name],
            nargs=-1 if several else 1,
            required=needed,
            default=None if needed or several else default,
            metavar=description.metavar or None,
        )
    if several:
        description = replace(description, help=f"{description.help} May be repeated.")
    if default is False and not description.flag:
        description = replace(description, option=f"--{name.replace('_', '-')}")
    unset = several or default is None or default is False or default == ""
    return DescribedOption(
        description,
        description.group or cls.title,
        applies=shown["applies"],
        more=shown["more"],
        required=needed,
        multiple=several,
        default=None if needed or several else default,
        default_text="" if needed else description.none if unset else description.default_text,
        type=str if several or description.kinds == (str,) else None,
    )


def _shown_fields(cls: type[Options]) -> list[Field[Any]]:
    """The options of a class as its help page lists them: its own before those that it inherits."""
    known = {each.name: each for each in fields(cls) if _KEY in each.metadata}
    words = [each for each in known.values() if each.metadata[_KEY]["argument"]]
    stated = dict.fromkeys(name for base in cls.__mro__ for name in get_annotations(base) if name in known)
    return [*words, *(known[name] for name in stated if known[name] not in words)]


def command(
    name: str | None = None,
    *,
    cls: type[Command] = Command,
    group: click.Group | None = None,
    help: str | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Any]], Command]:
    """Decorator: a command from a function whose arguments are annotated with option classes.

    group: the group of commands it belongs to. help: its page, if not the docstring. settings: of `Command`.
    """

    def decorate(function: Callable[..., Any]) -> Command:
        hints = {each: kind for each, kind in typing.get_type_hints(function).items() if each != "return"}

        @click.pass_context
        def callback(ctx: click.Context, /, **values: Any) -> Any:
            given: dict[str, Options] = {}
            for each, kind in hints.items():
                names = [one.name for one in fields(kind) if _KEY in one.metadata]
                written = frozenset(n for n in names if ctx.get_parameter_source(n) not in NOT_WRITTEN)
                given[each] = kind(**{name: values[name] for name in names}, written=written)
            return function(**given)

        params = [
            _click_parameter(kind, described(kind)[each.name], each.metadata[_KEY])
            for kind in hints.values()
            for each in _shown_fields(kind)
        ]
        made = cls(
            name or function.__name__,
            callback=callback,
            params=params,
            help=help or function.__doc__,
            **settings,
        )
        if group is not None:
            group.add_command(made)
        return made

    return decorate
