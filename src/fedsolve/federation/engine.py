"""What every engine offers a method, and what a method learns before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from fedsolve.container import Array
from fedsolve.federation.messages import Chain, Request, Total


@dataclass(frozen=True)
class Spec:
    """The federation as a method sees it: feature width, classes (None: regression), what is dear."""

    features: int
    classes: Array | None
    outputs: int
    prefers: Literal["bytes", "exchanges"]


class Federation(Protocol):
    """Carries a request to a cohort and returns the total. Knows nothing of least squares."""

    prefers: Literal["bytes", "exchanges"]

    @property
    def clients(self) -> tuple[str, ...]: ...

    def describe(self) -> Spec: ...

    def exchange(self, request: Request, chain: Chain) -> Total: ...


@runtime_checkable
class KeepsStates(Protocol):
    """An engine whose clients live in this process, so that a checkpoint can hold their states too."""

    def keep_states(self, folder: Path | None) -> None: ...
