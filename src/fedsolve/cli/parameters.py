"""Method parameters as command-line options, taken from the methods' own dataclasses."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import click

from fedsolve import registry
from fedsolve.cli.command import F, option
from fedsolve.closedform.activations import ACTIVATIONS
from fedsolve.closedform.plans import PLANS
from fedsolve.federation.method import Method

HELP = {
    "layers": "T, the number of residual blocks.",
    "width": "Features per layer.",
    "hidden_width": "Hidden features per block.",
    "ridge": "Penalty on the classifier.",
    "refinement_width": "Features of each client's own stream.",
    "refinement_ridge": "Penalty on each client's own stream.",
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
    "participation": "Share of the clients asked for each layer, in (0, 1].",
    "consistent": "Whether classifier and block of a layer are asked of the same clients.",
    "scale": "Standardise features by federated sums, one exchange more.",
    "intercept": "Fit an intercept from sums of features and targets.",
    "track": "Let clients count correct predictions whenever a classifier reaches them.",
    "precision": "float32 is faster and gives up exact invariance.",
    "seed": "Seed of the random projections and of partial participation.",
}

_CHOICES = {
    "activation": tuple(ACTIVATIONS),
    "zero_activation": tuple(ACTIVATIONS),
    "refinement_activation": tuple(ACTIVATIONS),
    "block_activation": tuple(ACTIVATIONS),
    "exchange": ("auto", *PLANS),
}
_WORDS = {"balance": ("auto",)}
"""Parameters that are a number or one of these words."""
_FLAGS = {"consistent": "--consistent/--inconsistent", "skip": "--skip/--no-skip"}


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
    """Keys of the methods that can be trained."""
    return [info.key for info in registry.methods()]


def method_options(command: F) -> F:
    """Decorator: one option for each parameter of each method, with the dataclass's default in its help."""
    owners = _owners()
    everyone = len(method_keys())

    def place(name: str) -> tuple[bool, int]:
        return len(owners[name]) < everyone, list(owners).index(name)

    for name in sorted(owners, key=place, reverse=True):
        command = _decorator(name, owners[name], everyone)(command)
    return command


def parameter_names() -> list[str]:
    """Names of all methods' parameters."""
    return list(_owners())


def build_method(key: str, given: dict[str, Any], ctx: click.Context) -> Method[Any]:
    """The method with the parameters that were given (not None); the others keep their defaults."""
    owners = _owners()
    chosen = {name: value for name, value in given.items() if value is not None}
    mine = [name for name in owners if key in owners[name]]
    for name in chosen:
        if name not in mine:
            takes = ", ".join(_option_name(other) for other in mine)
            raise click.UsageError(
                f"{_option_name(name)} belongs to {' and '.join(owners[name])}, not to {key}, "
                f"which takes {takes}",
                ctx,
            )
    values = {
        name: None if value == "none" and _nullable(key, name) else value for name, value in chosen.items()
    }
    method: Method[Any] = registry.method_class(key)(**values)
    return method


def _owners() -> dict[str, dict[str, Any]]:
    """For each parameter name: the methods that take it, with their defaults."""
    owners: dict[str, dict[str, Any]] = {}
    for key in sorted(method_keys(), key=lambda key: -len(dataclasses.fields(registry.method_class(key)))):
        for field in dataclasses.fields(registry.method_class(key)):
            owners.setdefault(field.name, {})[key] = field.default
    return owners


def _hint(key: str, name: str) -> tuple[Any, bool]:
    """The parameter's type without None, and whether None was allowed."""
    hint = typing.get_type_hints(registry.method_class(key))[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0], len(kinds) < len(typing.get_args(hint))
    return hint, False


def _nullable(key: str, name: str) -> bool:
    hint, optional = _hint(key, name)
    return optional and typing.get_origin(hint) is Literal


def _decorator(name: str, defaults: dict[str, Any], everyone: int) -> Callable[[F], F]:
    key = next(iter(defaults))
    hint, _ = _hint(key, name)
    settings: dict[str, Any] = {"default": None, "show_default": False}
    names = [_option_name(name), name]
    if name in _CHOICES:
        settings["type"] = click.Choice(_CHOICES[name])
        if len(_CHOICES[name]) > 4:
            settings["metavar"] = "NAME"
    elif typing.get_origin(hint) is Literal:
        choices = [str(value) for value in typing.get_args(hint)]
        settings["type"] = click.Choice([*choices, "none"] if _nullable(key, name) else choices)
    elif name in _WORDS:
        settings |= {"type": _number_or(_WORDS[name]), "metavar": f"NUMBER|{'|'.join(_WORDS[name])}"}
    elif hint is bool:
        names = [_FLAGS.get(name, f"{_option_name(name)}/--no-{name.replace('_', '-')}"), name]
    else:
        settings["type"] = hint
    shared = len(defaults) == everyone
    settings["group"] = "Parameters of every method" if shared else f"Parameters of {' and '.join(defaults)}"
    settings["help"] = f"{HELP.get(name, '')}  [default: {_told(name, defaults)}]".strip()
    return option(*names, **settings)


def _told(name: str, defaults: dict[str, Any]) -> str:
    texts = {key: _default_text(name, value) for key, value in defaults.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{text} for {key}" for key, text in texts.items())


def _default_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        on, off = _FLAGS.get(name, "yes/no").replace("--", "").split("/")
        return on if value else off
    if value is None:
        return "as --width" if name == "hidden_width" else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"
