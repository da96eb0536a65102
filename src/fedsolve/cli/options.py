"""Typed options, and commands made of them: every value says where it came from.

A command is a function of option classes. Each option is described once, beside its field, in the words of
`fedsolve.parameters`:

    class Saving(Options):
        title = "Training"
        out: str | None = option(None, "Where to save the model.", "FILE")

    @command()
    def train(saving: Saving, output: Output) -> None: ...

The docstring of the function is the help page (`cli.command`).
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from inspect import get_annotations
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar

import click
from click.core import ParameterSource

from fedsolve.cli.command import Command, Option
from fedsolve.errors import DataError
from fedsolve.parameters import Description, described, parameter

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_KEY = "fedsolve.option"


class Source(Enum):
    """Where the value of an option came from."""

    COMMAND_LINE = "command line"
    FILE = "options file"
    MODEL = "model"
    DEFAULT = "default"


_SOURCES = {
    ParameterSource.COMMANDLINE: Source.COMMAND_LINE,
    ParameterSource.ENVIRONMENT: Source.COMMAND_LINE,
    ParameterSource.DEFAULT_MAP: Source.FILE,
}


@dataclass(frozen=True)
class _Shown:
    """What the command line needs to know of an option besides its description."""

    more: bool
    argument: bool
    applies: Callable[[str], bool] | None


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
    made.metadata = MappingProxyType({**made.metadata, _KEY: _Shown(more, argument, applies)})
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
    """Base of option classes, which are frozen dataclasses. title: the group of their options in the help."""

    title: ClassVar[str] = "Options"
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False, kw_only=True)

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def source(self, name: str) -> Source:
        return self.sources.get(name, Source.DEFAULT)

    def given(self, *names: str) -> list[str]:
        """The flags, among these options, that a person wrote: on the command line or in the options file."""
        known = described(type(self))
        written = (Source.COMMAND_LINE, Source.FILE)
        return [known[name].option.partition("/")[0] for name in names if self.sources.get(name) in written]

    def from_model(self, **values: Any) -> Self:
        """The same options with these values, which the model gives."""
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        told = {**self.sources, **dict.fromkeys(values, Source.MODEL)}
        return type(self)(**kept | values | {"sources": told})


class _Value(click.ParamType):  # type: ignore[type-arg]  # click 8.2 has it without a type
    """A value as its description reads and checks it."""

    name = "value"

    def __init__(self, description: Description) -> None:
        self.description = description

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        read = self.description.parse(value) if isinstance(value, str) else self.description.read(value)
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
        applies: Callable[[str], bool] | None = None,
        default_text: str | None = None,
        **settings: Any,
    ) -> None:
        """listed: whether a long list of choices is written out. default_text: if not the description's."""
        self.applies = applies
        flag, text, stands = description.kinds == (bool,), description.help, value_text(description)
        if listed and stands == "NAME" and description.choices:
            text = f"{text.removesuffix('.')}: {', '.join(map(str, description.choices))}."
        if description.within:
            text = f"{text.removesuffix('.')},{description.range()}."
        default = description.default_text if default_text is None else default_text
        settings["type"] = bool if flag else settings.get("type") or _Value(description)
        super().__init__(
            [*filter(None, [description.also]), description.option, settings.pop("name", description.name)],
            group=group,
            is_flag=flag,
            metavar=None if flag else stands,
            show_default=False,
            help=text + (f"  [default: {default}]" if default else ""),
            **settings,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        hidden = self.applies is not None and not self.applies(focus(ctx))
        return None if hidden else super().get_help_record(ctx)


METHOD = "fedsolve.method"


def focus(ctx: click.Context) -> str:
    """The method that a command line names, or the one that its command trains by default."""
    return str(ctx.meta.get(METHOD, ""))


def value_text(description: Description) -> str:
    """What stands for the value on help pages."""
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


def _click_parameter(cls: type[Options], description: Description, shown: _Shown) -> click.Parameter:
    """A field of an option class as click takes it."""
    default, name = description.default, description.name
    needed, several = default is MISSING, description.kinds == (object,)
    if shown.argument:
        return click.Argument(
            [name],
            nargs=-1 if several else 1,
            required=needed,
            default=None if needed or several else default,
            metavar=description.metavar or None,
        )
    if default is False and not description.flag:
        description = replace(description, flag=f"--{name.replace('_', '-')}")
    unset = several or default is None or default is False or default == ""
    return DescribedOption(
        description,
        description.group or cls.title,
        applies=shown.applies,
        more=shown.more,
        required=needed,
        multiple=several,
        default=None if needed or several else default,
        default_text="" if needed else description.none if unset else description.default_text,
        type=str if several or description.kinds == (str,) else None,
    )


def _shown_fields(cls: type[Options]) -> list[Field[Any]]:
    """The options of a class as its help page lists them: its own before those that it inherits."""
    known = {each.name: each for each in fields(cls) if _KEY in each.metadata}
    words = [each for each in known.values() if each.metadata[_KEY].argument]
    stated = dict.fromkeys(name for base in cls.__mro__ for name in get_annotations(base) if name in known)
    return [*words, *(known[name] for name in stated if known[name] not in words)]


def source_of(ctx: click.Context, name: str) -> Source:
    found = ctx.get_parameter_source(name)
    return Source.DEFAULT if found is None else _SOURCES.get(found, Source.DEFAULT)


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
                sources = {name: source_of(ctx, name) for name in names}
                given[each] = kind(**{name: values[name] for name in names}, sources=sources)
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
