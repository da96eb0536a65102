"""Method parameters as command-line options, from the descriptions beside their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import click

from fedsolve import registry
from fedsolve.cli.options import (
    ALL,
    METHOD,
    NOT_WRITTEN,
    Command,
    DescribedOption,
    Options,
    config_table,
    option,
    rare,
)
from fedsolve.cli.output import Output
from fedsolve.errors import DataError, did_you_mean
from fedsolve.federation.method import Method
from fedsolve.federation.recipe import Recipe
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.parameters import Description, build, described
from fedsolve.tables.schema import Schema

DEFAULT_METHOD = "auto"
"""What is trained where no method is named, whatever carries the messages: the best on rows held out."""
_DEEP = "deepafl"
"""What is trained where a parameter of it alone is given, and no method is named."""
PRIVATE = "private"
"""The method that --epsilon means; --method says what it makes private."""
BY_GRADIENT, OWN_TITLE = "Training by gradient", "Parameters of {0.key} ({0.paper})"

_BY_ROWS = {"width"}
_OPTIONS = "fedsolve.method_options"
_IMPLIED = "fedsolve.implied_by"
PREFIX = "parameter_"
"""Before the name of a method's parameter where it stands among the values of a command."""


def is_gradient(key: str) -> bool:
    """Whether a method trains by gradient; the others solve in closed form."""
    return issubclass(registry.method_class(key), GradientMethod)


def method_keys() -> list[str]:
    """Keys of the methods that can be trained, the closed-form ones first."""
    return sorted((info.key for info in registry.methods()), key=lambda key: (is_gradient(key), key))


_KEYS = [key for key in method_keys() if not is_gradient(key) and key not in (PRIVATE, "release")]
"""Named on the short help page; those with noise have options and commands of their own."""


class MethodOptions(Options):
    """Which method is trained; `chosen` has the parameters too, which are options of the command."""

    method: str = option(DEFAULT_METHOD, f"{', '.join(_KEYS)}, ...", "NAME")
    preset: Literal["paper"] | None = option(
        None, "paper: the paper's settings.", "paper", none="chosen on rows held out"
    )
    calibrate: bool | None = rare(
        None,
        "Calibrate probabilities, or intervals, on held-out rows; a method that is not chosen trains twice.",
        flag="--calibrate/--no-calibrate",
        none="where a method or its settings are chosen",
    )
    class_weight: Literal["balanced"] | None = rare(
        None, "balanced: rare classes count like frequent ones.", "HOW", none="by rows"
    )

    def chosen(self, output: Output) -> Method[Any]:
        """The method of a command line, with the parameters given there.

        Without a preset, what can be chosen by the data is chosen, as long as none of it is given. A width
        that is not given follows from the rows in any case.
        """
        ctx = click.get_current_context()
        key, given = ctx.meta[METHOD], given_parameters()
        if key == PRIVATE and "method" in self.written and self.method != PRIVATE:
            given = {"of": self.method, **given}
        if flag := ctx.meta.get(_IMPLIED):
            output.note(
                f"{flag} is a parameter of {key}, so that is trained, and no method is chosen by the "
                f"data. Name it with --method {key}, or leave {flag} out."
            )
        # Its own only: what derives from it may take other parameters, or mean others by them.
        kind = registry.method_class(key)
        recommended: Mapping[str, Any] = vars(kind).get("recommended", {})
        if self.preset is None:
            open_ = recommended.keys() if not recommended.keys() & given.keys() else _BY_ROWS
            given = {**{name: recommended[name] for name in open_ & recommended.keys()}, **given}
        made: Method[Any] = build(kind, given)
        return made

    def recipe(self, method: Method[Any], schema: Schema | None) -> Recipe[Any]:
        """The method as a recipe, with these options' class weights and calibration.

        Where no option says, probabilities are calibrated if a choice holds rows out.
        """
        calibrate = method.chooses if self.calibrate is None else self.calibrate
        return Recipe(method, schema, class_weight=self.class_weight, calibrate=calibrate)


def given_parameters() -> dict[str, Any]:
    """The parameters of the method that a command line, or its file, gives."""
    ctx = click.get_current_context()
    names = [name for name in ctx.params if name.startswith(PREFIX)]
    given = [name for name in names if ctx.get_parameter_source(name) not in NOT_WRITTEN]
    return {name.removeprefix(PREFIX): ctx.params[name] for name in given}


def groups(key: str) -> dict[str, list[Description]]:
    """A method's parameters by title of the help page: its own, then those that it shares."""
    titles: dict[str, list[Description]] = {}
    own_title = OWN_TITLE.format(registry.info(key))
    for description in described(registry.method_class(key)).values():
        if object in description.kinds:
            continue  # a type that words of a command line cannot spell; it keeps its default there
        shared = BY_GRADIENT if description.owner is GradientMethod else own_title
        titles.setdefault(description.group or shared, []).append(description)
    return dict(sorted(titles.items(), key=lambda item: item[0] != own_title))


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
        titles[OWN_TITLE.format(registry.info(key))] = [each for each in own if each != common.get(each.name)]
    return {title: each for title, each in titles.items() if each}


def help_records(ctx: click.Context, descriptions: Iterable[Description]) -> list[tuple[str, str]]:
    """One group of the help page; the same long list of words is written out once."""
    records: list[tuple[str, str]] = []
    listed: set[tuple[Any, ...]] = set()
    for each in descriptions:
        name, is_listed = f"{PREFIX}{each.name}", each.choices not in listed
        option = DescribedOption(each, "", listed=is_listed, name=name, default=None)
        records += filter(None, [option.get_help_record(ctx)])
        listed.add(each.choices)
    return records


class ParameterCommand(Command):
    """A command that asks a method, whose parameters are options of the command, but for those `besides`."""

    besides: frozenset[str] = frozenset()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if _OPTIONS not in ctx.meta:
            every = described(registry.method_class(str(ctx.meta.get(METHOD, "")))).values()
            ctx.meta[_OPTIONS] = [
                DescribedOption(each, "", name=f"{PREFIX}{each.name}", default=None, hidden=True)
                for each in every
                if object not in each.kinds and each.option not in self.besides
            ]
        *own, helping = super().get_params(ctx)
        return [*own, *ctx.meta[_OPTIONS], helping]

    def help_groups(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """The parameters stand in groups of their own, which only a help page needs."""
        titles = super().help_groups(ctx)
        for title, descriptions in groups(ctx.meta[METHOD]).items():
            shown = [each for each in descriptions if each.option not in self.besides]
            if shown:
                titles.setdefault(title, []).extend(help_records(ctx, shown))
        return titles


class MethodCommand(ParameterCommand):
    """A command that trains: parameters of the method it names are options of it, on both help pages."""

    every = "Show every option, and the parameters of every method."

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.unnamed = str(next(param.default for param in self.params if param.name == "method"))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Which options there are depends on the method, so its name is looked for first.
        ctx.meta[_OPTIONS], ctx.ignore_unknown_options = [], True
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        del ctx.meta[_OPTIONS]
        ctx.ignore_unknown_options = False
        table = config_table(found["config"], self.name or "") if "config" in found else {}
        words = [word.partition("=")[0] for word in args]
        named = found.get("method") or str(table.get("method", ""))
        if not named:  # DeepAFL if a parameter of it alone is given
            own, others = (described(registry.method_class(key)) for key in (_DEEP, self.unnamed))
            only = [own[name] for name in own.keys() - others.keys()]
            spelt = {word for each in only for word in _spellings(each)}
            flags = words + [f"--{key.replace('_', '-')}" for key in table]
            given = [flag for flag in flags if flag in spelt]
            if given:
                ctx.meta[_IMPLIED] = given[0]
            named = _DEEP if given else self.unnamed
        ctx.meta[METHOD] = named
        own = described(registry.method_class(named))
        if ("--epsilon" in words or "epsilon" in table) and "epsilon" not in own:
            ctx.meta[METHOD] = PRIVATE
        taken = {name for param in self.params for name in param.opts}
        for each in self.get_params(ctx)[len(self.params) : -1]:  # the last one is --help
            for name in taken.intersection(each.opts):
                raise DataError(
                    f"a parameter of {ctx.meta[METHOD]} would be the option {name}, which '{self.name}' has "
                    "already. Give it another: parameter(..., flag='--OTHER')."
                )
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as problem:
            raise self._explained(problem, ctx) from problem

    def help_groups(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        titles = super().help_groups(ctx)
        if ALL in ctx.meta:
            for title, descriptions in all_groups().items():
                titles.setdefault(title, help_records(ctx, descriptions))
        return titles

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
            return click.UsageError(
                f"{problem.option_name} belongs to {told}, not to {ctx.meta[METHOD]}", ctx
            )
        own = {name for param in self.get_params(ctx) for name in param.opts if name.startswith("--")}
        longer = {name for name in own if name.startswith(problem.option_name)}
        guess = did_you_mean(problem.option_name, longer or own.union(*spelt.values()))
        return click.UsageError(f"No such option: {problem.option_name}.{guess}", ctx)


def _spellings(description: Description) -> list[str]:
    return [*filter(None, [description.also]), *description.option.split("/")]
