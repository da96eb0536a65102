"""What every engine offers a method, and what a method learns before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from fedsolve.container import Array
from fedsolve.federation.holdings import Holdings
from fedsolve.federation.messages import Chain, Request, Total


@dataclass(frozen=True)
class Spec:
    """What a method knows of a federation: the width of the features, the classes (None for regression).

    prefers: what is worth saving where a method can choose, bytes or exchanges.
    device:  where the server solves, see `backends`; the model does not depend on it.
    """

    features: int
    classes: Array | None
    outputs: int
    prefers: Literal["bytes", "exchanges"]
    device: str = "cpu"


class Federation(Protocol):
    """Carries requests to a cohort and returns the total; it knows nothing about what is summed."""

    prefers: Literal["bytes", "exchanges"]

    @property
    def clients(self) -> tuple[str, ...]: ...

    def describe(self) -> Spec: ...

    def exchange(self, request: Request, chain: Chain) -> Total: ...


@runtime_checkable
class KeepsStates(Protocol):
    """An engine whose clients live in this process, so that a checkpoint can hold their states too."""

    def keep_states(self, folder: Path | None) -> None: ...


@runtime_checkable
class KnowsHoldings(Protocol):
    """An engine that knows whose rows are which, so that a checkpoint is not resumed with others."""

    def holdings(self) -> Holdings | None:
        """Who holds what at this moment; None where clients may change as they like, as over a network."""


@runtime_checkable
class PlansAhead(Protocol):
    """An engine that prepares a run, and so is told before it starts how many exchanges it takes."""

    def plan(self, exchanges: int, method: Any = None, done: int = 0) -> None:
        """Begin a run of so many exchanges more; done: those behind it, where it is resumed."""


@runtime_checkable
class DrawsSeeds(Protocol):
    """An engine whose clients draw the seed of a method together."""

    def seeded(self, method: Any, spec: Spec) -> Any:
        """The method with that seed."""


@runtime_checkable
class Wraps(Protocol):
    """An engine around another one."""

    @property
    def federation(self) -> Federation: ...


@runtime_checkable
class CarriesLetters(Protocol):
    """An engine that hands bytes to clients and brings back theirs, without knowing what they mean.

    channel: which of the client's functions they are for. largest: bytes that a reply may have; None: any
    number. A letter that failed gives the error in its place; replies come in any order, and only as they are
    asked for.
    """

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int | None = None
    ) -> Iterator[tuple[str, bytes | Exception]]: ...
