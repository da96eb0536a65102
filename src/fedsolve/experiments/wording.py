"""How coordinates are written for people: axes, their values, parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsolve.experiments.metrics import METRICS

_SIGNS = {
    "depth": "T",
    "clients": "K",
    "ridge": "λ",
    "residual_ridge": "γ",
    "regulariser": "γ",
    "width": "d",
    "hidden_width": "d_F",
    "reconstruction": "1 - ρ",
    "refinement_ridge": "β",
    "refinement_width": "d_R",
}
"""The papers' signs, where they have one."""

_SHARES = {"noise": "τ", "participation": "η"}
_WORDS = {
    "consistent": {True: "consistent", False: "inconsistent"},
    "remove": {True: "removed (RI)", False: "left in"},
}
_PLAIN = (
    "dataset",
    "backbone",
    "partition",
    "stage",
    "network",
    "feedback",
    "activation",
    "zero_activation",
    "refinement_activation",
)
_NAMES = {"remove": "regulariser", "noise": "flipped labels", "regulariser": "regulariser"}


def axis_name(axis: str) -> str:
    """What an axis is called at the head of a table."""
    return _NAMES.get(axis, axis.replace("_", " "))


def axis_label(axis: str, value: Any) -> str:
    """A value along an axis; empty where a model has none."""
    if axis == "method":
        name, depth = value if isinstance(value, tuple) else (value, None)
        return str(name) if depth is None else f"{name} ({axis_label('depth', depth)})"
    if value is None:
        return ""
    if axis == "metric":
        return METRICS[value].label
    if axis in _WORDS:
        return _WORDS[axis][value]
    if axis in _SHARES:
        return f"{_SHARES[axis]} = {100 * value:g} %"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if axis in _PLAIN else f"{_SIGNS.get(axis, axis.replace('_', ' '))} = {text}"


def spoken(parameter: str) -> str:
    """A parameter's name as an axis shows it: in words, with the papers' sign where there is one."""
    words = parameter.replace("_", " ")
    sign, equals, _ = axis_label(parameter, 0).partition(" = ")
    return f"{words} {sign}" if equals and sign != words else words


def tell(parameter: str, value: Any) -> str:
    """A parameter's value as people write it, without its name."""
    label = axis_label(parameter, value)
    return label.partition(" = ")[2] or label


def counted(count: int, noun: str) -> str:
    """The number with its noun: "1 block", "2 blocks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(words: Sequence[str], most: int | None = None) -> str:
    """The words as part of a sentence; beyond `most` only how many more there are."""
    if most is not None and len(words) > most + 1:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
