"""Method parameters as command-line options, taken from the methods' own dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import click

from fedsolve import registry
from fedsolve.cli.command import Command, F, Option
from fedsolve.closedform.activations import ACTIVATIONS
from fedsolve.closedform.plans import PLANS
from fedsolve.federation.method import Method
from fedsolve.gradient.gradient_method import GradientMethod

HELP = {
    "layers": "T, the number of residual blocks.",
    "width": "Features per layer.",
    "hidden_width": "Hidden features per block.",
    "ridge": "Penalty on the classifier.",
    "refinement_width": "Features of each client's own stream.",
    "refinement_ridge": "Penalty on each client's own stream; 'auto': each chooses from its training rows.",
    "refinement_activation": "Activation of each client's own stream, one of the same.",
    "balance": "Weight of each client's own stream; 'auto': each chooses from its training rows.",
    "block_activation": "Activation of the shared stream's blocks, one of the same.",
    "residual_ridge": "Penalty on each block.",
    "activation": f"Activation of the blocks (apfl: of the shared stream): {', '.join(ACTIVATIONS)}.",
    "zero_activation": "Activation of the first projection, one of the same.",
    "gain": "Factor on the blocks' random projections.",
    "block_input": "Features a block starts from.",
    "exchange": "Plan: fewest bytes (lean), fewest exchanges (single), the paper's (textbook).",
    "skip": "Keep each layer's features in the next (without: ablation 1).",
    "projection": "Random projections in the blocks, or none (ablation 2).",
    "transformation": "Solve each block, or add its hidden features as they are (ablation 4).",
    "reconstruction": "Weight of recovering the first features beside the labels, in [0, 1).",
    "strategy": "Which of the four deepening strategies, 1 to 4.",
    "participation": "Share of the clients asked for each layer, or in each round, in (0, 1].",
    "consistent": "Whether classifier and block of a layer are asked of the same clients.",
    "scale": "Standardise features by federated sums, one exchange more.",
    "intercept": "Fit an intercept from sums of features and targets.",
    "track": "accuracy (closed form): clients count correct predictions whenever a classifier reaches them. "
    "drift (gradient): measure how far clients move apart, one exchange more a round.",
    "precision": "float32 is faster; closed forms then give up exact invariance.",
    "seed": "Seed of random projections, initial weights, batches and partial participation.",
    "network": "On features: linear, mlp:256, mlp:512,128. On images: cnn, mobilenet_v2, resnet18, resnet50, "
    "the last three also with GroupNorm (resnet18:gn). Your own: package.module:function.",
    "rounds": "Times that weights go to the clients and come back.",
    "epochs": "Local passes over the rows in a round.",
    "batch": "Rows of a local step.",
    "last_batch": "What to do with the rows that do not fill a batch.",
    "rate": "Learning rate.",
    "rate_decay": "Factor on the learning rate from round to round.",
    "optimiser": "Local optimiser, begun afresh in every round.",
    "momentum": "Momentum of the local SGD.",
    "weight_decay": "Local weight decay.",
    "clip": "Largest norm of a local gradient; longer ones are shortened.",
    "weighting": "Whether clients count by their rows or all alike.",
    "buffers": "Running statistics of BatchNorm: averaged, or kept by each client.",
    "feedback": "Replace the backward weights of some layers by the global ones: in the layers where clients "
    "agree least (lowest), most (highest), whichever the distribution suggests (skewness), or in named ones "
    "(features.3,classifier).",
    "feedback_layers": "How many layers are chosen, 1 to 3 in the paper.",
    "feedback_matrix": "Backward weights: the global ones, or fixed random ones (ablation).",
    "feedback_scaling": "Backward weights get the norm of the local layer, of each of its rows, or none.",
    "feedback_route": "direct: the output's error goes straight to the layer (DFA, ablation).",
    "feedback_first": "Let the first layer be chosen too, where it changes nothing (the paper's rule).",
    "feedback_sketch": "Numbers a larger layer's update is sketched to for the choice; 0 sends it whole.",
    "shape": "Images as channels,height,width.  Read off the images of a dataset, or off common widths.",
    "crop": "Black margin in pixels from which training images are cut at random, in their own size.",
    "flip": "Chance that a training image is mirrored left to right.",
    "pixel_mean": "Mean of each channel that images are normalised by, 0 black to 1 white: 0.49,0.48,0.45.",
    "pixel_deviation": "Standard deviation of each channel, likewise; the model normalises alike.",
    "device": "Where to train: cpu, cuda, cuda:1, or auto for a GPU where there is one.",
    "server_form": "momentum as in the paper (classic), Nesterov's, or with steps damped by 1 - beta.",
    "server_steps": "steps on the aggregation weights in every round.",
    "generator_steps": "steps on the generator after every round.",
    "generator_rate": "learning rate of the generator.",
    "noise_width": "numbers of noise the generator starts from.",
    "generator_width": "width of the generator's hidden layer.",
}
"""What a parameter is, in words for a help page; where there are none, those of the algorithm's own class."""

BOTH = "Parameters of closed-form and gradient methods"
EVERY_CLOSED_FORM = "Parameters of every closed-form method"
BY_GRADIENT = "Training by gradient"
FEEDBACK = "Feedback alignment (any gradient method)"
SINGLE = "Parameters of single gradient methods"

_CHOICES = {
    "activation": tuple(ACTIVATIONS),
    "zero_activation": tuple(ACTIVATIONS),
    "refinement_activation": tuple(ACTIVATIONS),
    "block_activation": tuple(ACTIVATIONS),
    "exchange": ("auto", *PLANS),
}
_WORDS = {"balance": ("auto",), "refinement_ridge": ("auto",)}
"""Parameters that are a number or one of these words."""
_FLAGS = {"consistent": "--consistent/--inconsistent", "skip": "--skip/--no-skip"}
_ALSO = {"feedback": "--feedback-alignment"}
_METAVARS = {"network": "NAME", "feedback": "HOW|LAYERS", "shape": "C,H,W", "device": "NAME"}
_METAVARS |= {"pixel_mean": "NUMBERS", "pixel_deviation": "NUMBERS"}
_FOCUS = "fedsolve.method"


def is_gradient(key: str) -> bool:
    """Whether a method trains by gradient; the others solve in closed form."""
    return issubclass(registry.method_class(key), GradientMethod)


def _number_or(words: tuple[str, ...]) -> Callable[[Any], Any]:
    """A click type: a number, or one of the words."""

    def number(value: Any) -> Any:
        if value in words:
            return value
        try:
            return float(value)
        except ValueError:
            told = " or ".join(map(repr, words))
            raise click.BadParameter(f"{value!r} is neither a number nor {told}.") from None

    return number


def method_keys() -> list[str]:
    """Keys of the methods that can be trained, the closed-form ones first."""
    return sorted((info.key for info in registry.methods()), key=lambda key: (is_gradient(key), key))


class FocusedOption(Option):
    """An option that not every method goes with; the help page of one that does not is without it."""

    def __init__(self, *names: Any, applies: Callable[[str], bool], **settings: Any) -> None:
        self.applies = applies
        super().__init__(*names, **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        key = ctx.meta.get(_FOCUS)
        return super().get_help_record(ctx) if key is None or self.applies(key) else None


class MethodOption(FocusedOption):
    """A parameter of methods; the help page of one method shows its own words and default."""

    def __init__(self, *names: Any, name_: str, **settings: Any) -> None:
        self.parameter = name_
        super().__init__(*names, applies=lambda key: key in _owners()[name_], **settings)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        key = ctx.meta.get(_FOCUS)
        if record is None or key is None:
            return record
        defaults = _owners()[self.parameter]
        words = [value for owner in defaults for value in _values(owner, self.parameter) or ()]
        text = _sentence(help_text(key, self.parameter), words)
        return record[0], f"{text}  [default: {_default_text(self.parameter, defaults[key])}]"


class MethodCommand(Command):
    """A command with parameters of methods: `--method NAME --help` is the help page of that method."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        joined = " ".join(args).replace("--method=", "--method ").split()
        after = [word for before, word in pairwise(joined) if before == "--method"]
        if after and after[-1] in method_keys():
            ctx.meta[_FOCUS] = after[-1]
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        key = ctx.meta.get(_FOCUS)
        if key is not None:
            info = next(info for info in registry.methods() if info.key == key)
            with formatter.section(f"Only what goes with --method {key} is shown below"):
                formatter.write_text(f"{info.title}. {info.paper}.")


def method_option(*names: str, applies: Callable[[str], bool], **settings: Any) -> Callable[[F], F]:
    """Decorator: an option of a command that only goes with the methods to which it applies."""
    return click.option(*names, cls=FocusedOption, applies=applies, **settings)


def method_options(command: F) -> F:
    """Decorator: one option for each parameter of each method, with the dataclass's default in its help."""
    owners = _owners()
    ranks = [BOTH, EVERY_CLOSED_FORM, "", BY_GRADIENT, FEEDBACK, SINGLE]

    def place(name: str) -> tuple[int, int]:
        group = _group(name, owners[name])
        return ranks.index(group if group in ranks else ""), list(owners).index(name)

    for name in sorted(owners, key=place, reverse=True):
        settings = _settings(name, owners[name])
        command = click.option(*settings.pop("names"), cls=MethodOption, name_=name, **settings)(command)
    return command


def parameter_names() -> list[str]:
    """Names of all methods' parameters."""
    return list(_owners())


def help_text(key: str, name: str) -> str:
    """What a parameter means to a method.

    Where all gradient methods have it, an algorithm's class may say something more to the point; where only
    some have it, the class is asked when there are no words here.
    """
    own, general = _documented(registry.method_class(key)).get(name, ""), HELP.get(name, "")
    return own or general if is_gradient(key) and name in _common() else general or own


def build_method(key: str, given: dict[str, Any], ctx: click.Context) -> Method[Any]:
    """The method with the parameters that were given (not None); the others keep their defaults."""
    owners = _owners()
    chosen = {name: value for name, value in given.items() if value is not None}
    mine = [name for name in owners if key in owners[name]]
    for name, value in chosen.items():
        if name not in mine:
            takes = f", which takes {', '.join(_option_name(other) for other in mine)}"
            if is_gradient(key):
                takes = f"; --method {key} --help lists what does"
            raise click.UsageError(
                f"{_option_name(name)} belongs to {_owners_told(owners[name])}, not to {key}{takes}", ctx
            )
        values = _values(key, name)
        if values is not None and value not in values:
            raise click.UsageError(
                f"{_option_name(name)} {value} does not go with {key}, which takes {' or '.join(values)}", ctx
            )
    values_of = {
        name: None if value == "none" and _takes_none(key, name) else value for name, value in chosen.items()
    }
    method: Method[Any] = registry.method_class(key)(**values_of)
    return method


def _owners() -> dict[str, dict[str, Any]]:
    """For each parameter name: the methods that take it, with their defaults."""

    def place(key: str) -> tuple[bool, int, str]:
        fields = len(dataclasses.fields(registry.method_class(key)))
        # The longest list of parameters comes first; of gradient methods the plainest.
        return is_gradient(key), fields if is_gradient(key) else -fields, key

    owners: dict[str, dict[str, Any]] = {}
    for key in sorted(method_keys(), key=place):
        for field in dataclasses.fields(registry.method_class(key)):
            owners.setdefault(field.name, {})[key] = field.default
    return owners


def _common() -> set[str]:
    return {field.name for field in dataclasses.fields(GradientMethod)}


def _group(name: str, owners: Mapping[str, Any]) -> str:
    closed = [key for key in owners if not is_gradient(key)]
    if len(closed) < len(owners):
        if closed:
            return BOTH
        if name not in _common():
            return SINGLE
        return FEEDBACK if name.startswith("feedback") else BY_GRADIENT
    if len(closed) == sum(not is_gradient(key) for key in method_keys()):
        return EVERY_CLOSED_FORM
    return f"Parameters of {' and '.join(closed)}"


def _owners_told(owners: Mapping[str, Any]) -> str:
    closed = [key for key in owners if not is_gradient(key)]
    everyone = len(owners) - len(closed) == sum(map(is_gradient, method_keys()))
    return " and ".join([*closed, "gradient methods"] if everyone else owners)


def _hint(key: str, name: str) -> tuple[Any, bool]:
    """The parameter's type without None, and whether None was allowed."""
    hint = typing.get_type_hints(registry.method_class(key))[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0], len(kinds) < len(typing.get_args(hint))
    return hint, False


def _takes_none(key: str, name: str) -> bool:
    """Whether the word "none" stands for None: of choices and of text; a number is left out instead."""
    hint, optional = _hint(key, name)
    return optional and (hint is str or typing.get_origin(hint) is Literal)


def _values(key: str, name: str) -> list[str] | None:
    """The words a method takes for a parameter that has a few; None for all others."""
    hint, _ = _hint(key, name)
    if name in _CHOICES or typing.get_origin(hint) is not Literal:
        return None
    return [*map(str, typing.get_args(hint)), *(["none"] if _takes_none(key, name) else [])]


def _settings(name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """What click is told of a parameter."""
    hint, _ = _hint(next(iter(defaults)), name)
    names = [*([_ALSO[name]] if name in _ALSO else []), _option_name(name), name]
    settings: dict[str, Any] = {"default": None, "show_default": False, "group": _group(name, defaults)}
    if name in _METAVARS:
        settings["metavar"] = _METAVARS[name]
    choices = [value for key in defaults for value in _values(key, name) or ()]
    if name in _CHOICES:
        settings["type"] = click.Choice(_CHOICES[name])
        if len(_CHOICES[name]) > 4:
            settings["metavar"] = "NAME"
    elif choices:
        # "none" last, whichever method brought it.
        settings["type"] = click.Choice(sorted(dict.fromkeys(choices), key=lambda value: value == "none"))
    elif name in _WORDS:
        settings |= {"type": _number_or(_WORDS[name]), "metavar": f"NUMBER|{'|'.join(_WORDS[name])}"}
    elif hint is bool:
        names = [_FLAGS.get(name, f"{_option_name(name)}/--no-{name.replace('_', '-')}"), name]
    else:
        settings["type"] = hint
    text = HELP.get(name, "")
    if settings["group"] == SINGLE:
        text = " ".join(_by_method(name, defaults))
    return settings | {"names": names, "help": f"{text}  [default: {_told(name, defaults)}]".strip()}


def _by_method(name: str, owners: Mapping[str, Any]) -> list[str]:
    """What the parameter is, after the names of the methods that mean the same by it."""
    meanings: dict[str, list[str]] = {}
    for key in owners:
        meanings.setdefault(help_text(key, name), []).append(key)
    return [f"{', '.join(keys)}: {text}" for text, keys in meanings.items()]


@cache
def _documented(method: type) -> dict[str, str]:
    """What a class says of its parameters, in lines `name: text` or `name, name: text` of its docstring."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(method.__doc__ or "").splitlines():
        start = re.fullmatch(r"(\w+(?:, \w+)*): +(\S.*)", line)
        if start is not None:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        elif names and line.startswith(" "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found


def _told(name: str, defaults: dict[str, Any]) -> str:
    """The default, or the defaults with the methods that have them."""
    texts = {key: _default_text(name, value) for key, value in defaults.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    if name not in _common():
        return ", ".join(f"{text} for {key}" for key, text in texts.items())
    closed = {key: text for key, text in texts.items() if not is_gradient(key)}
    usual = Counter(text for key, text in texts.items() if key not in closed).most_common(1)[0][0]
    alike: dict[str, list[str]] = {}
    for key, text in closed.items():
        alike.setdefault(text, []).append(key)
    parts = [f"{text} for {' and '.join(keys)}" for text, keys in alike.items()]
    parts.append(f"{usual} for gradient methods" if closed else usual)
    others: dict[str, list[str]] = {}
    for key, text in texts.items():
        if key not in closed and text != usual:
            others.setdefault(text, []).append(key)
    return "; ".join([", ".join(parts), *(f"{text} for {', '.join(keys)}" for text, keys in others.items())])


def _sentence(text: str, values: Sequence[str]) -> str:
    """The text with a capital, unless its first word is a value that must be typed as it stands."""
    first = text.partition(" ")[0].strip(",:;.")
    return text if first in values else f"{text[:1].upper()}{text[1:]}"


def _default_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        on, off = _FLAGS.get(name, "yes/no").replace("--", "").split("/")
        return on if value else off
    if value is None:
        return "as --width" if name == "hidden_width" else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"
