"""Method parameters as command-line options, from the descriptions beside their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import click

import fedsolve.closedform.auto
import fedsolve.closedform.cascade
import fedsolve.closedform.kernel_afl
import fedsolve.closedform.softmax
import fedsolve.gradient  # noqa: F401  (both enter the registry)
from fedsolve import registry
from fedsolve.cli.command import LAST, Choice, Command, F, Option, option
from fedsolve.cli.options_file import config_table
from fedsolve.errors import DataError, did_you_mean
from fedsolve.federation.described import Described
from fedsolve.federation.method import Method
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.parameters import Description, build, described
from fedsolve.schema import Schema

DEFAULT_METHOD = "deepafl"
BY_GRADIENT = "Training by gradient"
SHORT_EXAMPLES = 2
"""How many examples the short help page shows."""

_METHOD = "fedsolve.method"
_OPTIONS = "fedsolve.method_options"
_GIVEN = "fedsolve.given_parameters"
_ALL = "fedsolve.help_all"


def is_gradient(key: str) -> bool:
    """Whether a method trains by gradient; the others solve in closed form."""
    return issubclass(registry.method_class(key), GradientMethod)


def method_keys() -> list[str]:
    """Keys of the methods that can be trained, the closed-form ones first."""
    return sorted((info.key for info in registry.methods()), key=lambda key: (is_gradient(key), key))


def focus(ctx: click.Context) -> str:
    """The method that a command line names, or the one that is trained when it names none."""
    key: str = ctx.meta.get(_METHOD, DEFAULT_METHOD)
    return key


def chosen_method(ctx: click.Context) -> Method[Any]:
    """The method of a command line with the parameters that were given.

    A command with --preset has what can be chosen by the data chosen, where none of it is given; as soon as
    one is, or with --preset paper, the others are those of the paper.
    """
    kind = registry.method_class(focus(ctx))
    given: dict[str, Any] = ctx.meta.get(_GIVEN, {})
    # Its own only: what derives from it may take other parameters, or mean others by them.
    friendly: Mapping[str, Any] = vars(kind).get("friendly", {})
    wanted = "preset" in ctx.params and ctx.params["preset"] is None
    if wanted and not friendly.keys() & given.keys():
        given = {**friendly, **given}
    method: Method[Any] = build(kind, given)
    return method


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether a command line, or its file, gives this parameter of the method."""
    return name in ctx.meta.get(_GIVEN, {})


def groups(key: str) -> dict[str, list[Description]]:
    """A method's parameters as its help page shows them: its own, then those that it shares."""
    titles: dict[str, list[Description]] = {}
    for description in described(registry.method_class(key)).values():
        if object in description.kinds:
            continue  # a type that words of a command line cannot spell; it keeps its default there
        shared = BY_GRADIENT if description.owner is GradientMethod else own_title(key)
        titles.setdefault(description.group or shared, []).append(description)
    return dict(sorted(titles.items(), key=lambda item: item[0] != own_title(key)))


def own_title(key: str) -> str:
    """The title over a method's own parameters."""
    return f"Parameters of {key} ({registry.info(key).paper})"


def all_groups() -> dict[str, list[Description]]:
    """All parameters: of each closed-form method, of every gradient method, and what each of these adds."""
    titles: dict[str, list[Description]] = {}
    common = described(GradientMethod)
    for key in method_keys():
        if not is_gradient(key):
            titles |= groups(key)
    for description in common.values():
        titles.setdefault(description.group or BY_GRADIENT, []).append(description)
    for key in filter(is_gradient, method_keys()):
        own = described(registry.method_class(key)).values()
        titles[own_title(key)] = [each for each in own if each != common.get(each.name)]
    return {title: each for title, each in titles.items() if each}


class ParameterOption(Option):
    """One parameter of a method as an option; `chosen_method` takes what it was given."""

    def __init__(self, description: Description, group: str, listed: bool = True) -> None:
        flag = description.kinds == (bool,)
        names = [*filter(None, [description.also]), description.option, f"parameter_{description.name}"]
        super().__init__(
            names,
            group=group,
            type=bool if flag else str,
            metavar=None if flag else value_text(description),
            default=None,
            show_default=False,
            expose_value=False,
            callback=partial(_take, description),
            help=f"{meaning(description, listed)}  [default: {description.default_text}]".strip(),
        )


def parameter_options(title: str, descriptions: Iterable[Description]) -> list[ParameterOption]:
    """Options of one group of the help page; the same long list of words is written out once."""
    made: list[ParameterOption] = []
    listed: set[tuple[Any, ...]] = set()
    for description in descriptions:
        made.append(ParameterOption(description, title, description.choices not in listed))
        listed.add(description.choices)
    return made


def _take(description: Description, ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        read = description.parse(value) if isinstance(value, str) else value
        ctx.meta.setdefault(_GIVEN, {})[description.name] = read


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


def meaning(description: Description, listed: bool = True) -> str:
    """The sentence of a help page, with the words (where `listed`) or the range that a value must be of."""
    text = description.help
    if listed and value_text(description) == "NAME" and description.choices:
        text = f"{text.removesuffix('.')}: {', '.join(map(str, description.choices))}."
    if description.lower is not None and description.upper is not None:
        text = f"{text.removesuffix('.')},{description.range()}."
    return text


class FocusedOption(Option):
    """An option that not every method goes with; the help page of one that does not is without it."""

    def __init__(self, *names: Any, applies: Callable[[str], bool], **settings: Any) -> None:
        self.applies = applies
        super().__init__(*names, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if self.applies(focus(ctx)) else None


class MethodCommand(Command):
    """A command that trains: parameters of the method it names are options of it.

    --help shows what is used most and the method's parameters, --help-all the rest, `details` among it.
    """

    def __init__(self, *args: Any, details: str = "", unnamed: str = DEFAULT_METHOD, **settings: Any) -> None:
        """unnamed: the method where neither one nor a parameter of DeepAFL is named."""
        super().__init__(*args, **settings)
        self.details = details
        self.unnamed = unnamed
        self.params.append(
            Option(
                ["--help-all"],
                group=LAST,
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every option, and the parameters of every method.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else args
        has_config = any("--config" in param.opts for param in self.params)
        path = _value_of("--config", words) if has_config else None
        table = {} if path is None else config_table(path, self.name or "")
        ctx.meta[_METHOD] = _value_of("--method", words) or str(
            table.get("method") or _meant(words, table, self.unnamed)
        )
        registry.method_class(focus(ctx))
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as problem:
            raise self._explained(problem, ctx) from problem

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if _OPTIONS not in ctx.meta:
            ctx.meta[_OPTIONS] = self._method_options(focus(ctx))
        *own, helping = super().get_params(ctx)
        return [*own, *ctx.meta[_OPTIONS], helping]

    def help_groups(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        titles = super().help_groups(ctx)
        if ctx.meta.get(_ALL):
            for title, descriptions in all_groups().items():
                records = (each.get_help_record(ctx) for each in parameter_options(title, descriptions))
                titles.setdefault(title, [record for record in records if record is not None])
        return titles

    def shown(self, ctx: click.Context, param: click.Parameter) -> bool:
        short = not ctx.meta.get(_ALL)
        return super().shown(ctx, param) and not (short and getattr(param, "more", False))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        everything = bool(ctx.meta.get(_ALL))
        self.write_help(ctx, formatter, self.examples if everything else self.examples[:SHORT_EXAMPLES])
        if everything and self.details:
            with formatter.section("Details"):
                for paragraph in self.details.strip().split("\n\n"):
                    formatter.write_text(" ".join(paragraph.split()))
                    formatter.write_paragraph()

    def _method_options(self, key: str) -> list[ParameterOption]:
        taken = {name for param in self.params for name in param.opts}
        made = [each for title, group in groups(key).items() for each in parameter_options(title, group)]
        for each in made:
            for name in taken.intersection(each.opts):
                raise DataError(
                    f"a parameter of {key} would be the option {name}, which '{self.name}' has already. "
                    "Give it another: parameter(..., flag='--OTHER')."
                )
        return made

    def _explained(self, problem: click.NoSuchOption, ctx: click.Context) -> click.UsageError:
        """The error, with the methods that the option belongs to, or the parameter that was meant."""
        spelt = {
            key: {name for group in groups(key).values() for each in group for name in _spellings(each)}
            for key in method_keys()
        }
        owners = [key for key in spelt if problem.option_name in spelt[key]]
        if owners:
            gradient = [key for key in spelt if is_gradient(key)]
            if set(gradient) <= set(owners):
                owners = [*(key for key in owners if key not in gradient), "gradient methods"]
            told = " and ".join([", ".join(owners[:-1]), owners[-1]] if len(owners) > 1 else owners)
            return click.UsageError(f"{problem.option_name} belongs to {told}, not to {focus(ctx)}", ctx)
        own = {name for param in self.get_params(ctx) for name in param.opts if name.startswith("--")}
        guess = did_you_mean(problem.option_name, own.union(*spelt.values()))
        return click.UsageError(f"No such option: {problem.option_name}.{guess}", ctx)


def method_option(group: str, default: str = DEFAULT_METHOD) -> Callable[[F], F]:
    """Decorator: --method; default: what the command takes where none is named."""
    closed = ", ".join(key for key in method_keys() if not is_gradient(key))
    return option(
        "--method",
        default=default,
        metavar="NAME",
        group=group,
        help=f"{closed}, ...",
    )


def preset_option(group: str) -> Callable[[F], F]:
    """Decorator: --preset."""
    return option(
        "--preset",
        type=Choice(["paper"]),
        group=group,
        help="paper: the paper's settings.  [default: chosen on rows held out, unless some are given]",
    )


def class_weight_option(group: str, more: bool = True) -> Callable[[F], F]:
    """Decorator: --class-weight."""
    return option(
        "--class-weight",
        type=Choice(["balanced"]),
        metavar="HOW",
        more=more,
        group=group,
        help="balanced: rare classes count as much as frequent ones.  [default: by rows]",
    )


def weighed(
    method: Method[Any], schema: Schema | None, class_weight: Literal["balanced"] | None
) -> Method[Any]:
    """The method on rows that a schema describes and classes weigh, where either is so."""
    plain = schema is None and class_weight is None
    return method if plain else Described(method, schema, class_weight=class_weight)


def focused_option(*names: str, applies: Callable[[str], bool], **settings: Any) -> Callable[[F], F]:
    """Decorator: an option of a command that only goes with the methods to which it applies."""
    return click.option(*names, cls=FocusedOption, applies=applies, **settings)


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _meant(words: list[str], table: Mapping[str, Any], unnamed: str) -> str:
    """The method where none is named: DeepAFL if a parameter of it alone is given, else `unnamed`."""
    own, others = (described(registry.method_class(key)) for key in (DEFAULT_METHOD, unnamed))
    names = own.keys() - others.keys()
    spelt = {name for key in names for name in _spellings(own[key])}
    given = any(word.partition("=")[0] in spelt for word in words) or bool(names & set(table))
    return DEFAULT_METHOD if given else unnamed


def _spellings(description: Description) -> list[str]:
    return [*filter(None, [description.also]), *description.option.split("/")]


def _value_of(name: str, words: list[str]) -> str | None:
    """The value of an option among the words of a command line, the last where there are several."""
    parts = [
        part for word in words for part in (word.split("=", 1) if word.startswith(f"{name}=") else [word])
    ]
    return next((after for before, after in reversed([*pairwise(parts)]) if before == name), None)
