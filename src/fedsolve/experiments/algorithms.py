"""The algorithms an experiment can name: the registered methods, and what they are compared with."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import fedsolve.closedform.cascade
import fedsolve.gradient  # noqa: F401  (both enter the registry)
from fedsolve import registry
from fedsolve.errors import DataError
from fedsolve.experiments.comparisons import AggregationLaw, LocalRidge
from fedsolve.experiments.softmax_fedavg import SoftmaxFedAvg

COMPARISONS: dict[str, type] = {
    "local": LocalRidge,
    "law": AggregationLaw,
    "fedavg-numpy": SoftmaxFedAvg,
}
"""What methods are compared with and is no method of a federation; each has a `run` of its own."""


def algorithms() -> dict[str, type]:
    """Parameter classes by key."""
    return {info.key: registry.method_class(info.key) for info in registry.methods()} | COMPARISONS


def parameter_names(key: str) -> list[str]:
    """The parameters of an algorithm, its seed among them where it has one."""
    return [field.name for field in dataclasses.fields(algorithms()[key])]


def build(key: str, parameters: Mapping[str, Any]) -> Any:
    """The algorithm with these parameters, checked for their types first."""
    kind = algorithms()[key]
    hints = typing.get_type_hints(kind)
    for name, value in parameters.items():
        if not _fits(value, hints[name]):
            raise DataError(f"parameter '{name}' must be {_told(hints[name])}; got {value!r}.")
    given = {n: float(v) if _is_float(hints[n], v) else v for n, v in parameters.items()}
    return kind(**given)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, inner) for inner in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _is_float(hint: Any, value: Any) -> bool:
    """Whole numbers given for real ones become real, so that 1 and 1.0 describe the same cell."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return float in kinds and isinstance(value, int | float) and not isinstance(value, bool)


def _told(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_told(inner) for inner in typing.get_args(hint) if inner is not type(None))
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))
