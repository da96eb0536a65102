"""The algorithms an experiment can name: the registered methods, and what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import fedsolve.closedform.cascade
import fedsolve.gradient  # noqa: F401  (both enter the registry)
from fedsolve import parameters, registry
from fedsolve.parameters import parameter


@dataclass(frozen=True)
class LocalRidge:
    """Every client by itself, never aggregated (AFL, Table A.2)."""

    ridge: float = parameter(1.0, "Penalty on each client's own model.", least=0)
    statistic: Literal["mean", "best"] = parameter("mean", "Test accuracy over clients with rows.")

    def __post_init__(self) -> None:
        parameters.check(self)


@dataclass(frozen=True)
class AggregationLaw:
    """AFL by the paper's own route: local solutions merged pair by pair (AFL, Tables 3 and A.1)."""

    regulariser: float = parameter(1.0, "What every client adds to its Gram matrix.", least=0)
    remove: bool = parameter(True, "Whether the regulariser is taken out again (RI).")

    def __post_init__(self) -> None:
        parameters.check(self)


COMPARISONS: dict[str, type] = {"local": LocalRidge, "law": AggregationLaw}


def algorithms() -> dict[str, type]:
    """Parameter classes by key."""
    return {info.key: registry.method_class(info.key) for info in registry.methods()} | COMPARISONS


def parameter_names(key: str) -> list[str]:
    """The parameters of an algorithm, its seed among them where it has one."""
    return list(parameters.described(algorithms()[key]))


def build(key: str, values: Mapping[str, Any]) -> Any:
    """The algorithm with these parameters; the others keep their defaults."""
    return parameters.build(algorithms()[key], values)
