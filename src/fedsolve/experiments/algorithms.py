"""The algorithms an experiment can name: the registered methods, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import fedsolve.closedform.cascade
import fedsolve.gradient  # noqa: F401  (both enter the registry)
from fedsolve import parameters, registry
from fedsolve.experiments.comparisons import AggregationLaw, LocalRidge
from fedsolve.experiments.softmax_fedavg import SoftmaxFedAvg
from fedsolve.gradient.gradient_method import GradientMethod

COMPARISONS: dict[str, type] = {
    "local": LocalRidge,
    "law": AggregationLaw,
    "fedavg-numpy": SoftmaxFedAvg,
}
"""What methods are compared with and is no method of a federation; each has a `run` of its own."""


EXTRA = "fedsolve[torch]"
"""What gradient methods need besides the core of fedsolve."""


def algorithms() -> dict[str, type]:
    """Parameter classes by key."""
    return {info.key: registry.method_class(info.key) for info in registry.methods()} | COMPARISONS


def algorithm_class(key: str) -> type:
    """The class of an algorithm: a comparison, a method of ours, or one of other people by its address."""
    return COMPARISONS[key] if key in COMPARISONS else registry.method_class(key)


def lacking(key: str) -> str | None:
    """The package that an algorithm needs and that is not installed here, as pip calls it."""
    needs_torch = issubclass(algorithm_class(key), GradientMethod)
    return EXTRA if needs_torch and find_spec("torch") is None else None


def parameter_names(key: str) -> list[str]:
    """The parameters of an algorithm, its seed among them where it has one."""
    return list(parameters.described(algorithm_class(key)))


def build(key: str, values: Mapping[str, Any]) -> Any:
    """The algorithm with these parameters; the others keep their defaults."""
    return parameters.build(algorithm_class(key), values)
