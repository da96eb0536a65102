"""What every engine offers a method, and what a method learns before it starts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.fingerprints import Holdings
from fedsolve.federation.messages import Chain, Request, Total
from fedsolve.labels import class_list
from fedsolve.tables.schema import Schema

if TYPE_CHECKING:
    from fedsolve.model import Model


@dataclass(frozen=True)
class Spec:
    """What a method knows of a federation: the width of the features, the classes (None for regression).

    prefers: what is worth saving where a method can choose, bytes or exchanges.
    device:  where the server solves, see `backends`; the model does not depend on it.
    standardised: whether a schema brings numbers to unit variance before a method sees them.
    labels:  names of several labels a row, each 0 or 1: targets of a regression to whatever sums rows.
    """

    features: int
    classes: Array | None
    outputs: int
    prefers: Literal["bytes", "exchanges"]
    device: str = "cpu"
    standardised: bool = False
    labels: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        width: int,
        labels: Iterable[tuple[str, Array]],
        task: str,
        classes: Sequence[Any] | None,
        prefers: Literal["bytes", "exchanges"],
        device: str = "cpu",
    ) -> Spec:
        """What follows from the labels of all clients, by name; classes: those that were declared."""
        found = dict(labels)
        if task != "regression":
            known = class_list(classes, list(found.values()))
            return cls(width, known, len(known), prefers, device)
        for name, targets in found.items():
            if targets.dtype.kind not in "fiub":
                raise DataError(f"'{name}' has targets of type {targets.dtype}; regression needs numbers.")
        outputs = sorted({1 if targets.ndim == 1 else int(targets.shape[1]) for targets in found.values()})
        if len(outputs) > 1:
            raise DataError(f"participants have different numbers of targets: {outputs}.")
        return cls(width, None, outputs[0], prefers, device)


class Federation:
    """An engine: carries requests to a cohort and returns the total; it knows nothing about what is summed.

    told: the most numbers that clients tell for each number that their rows hold, where sums are secure.
    """

    prefers: Literal["bytes", "exchanges"] = "exchanges"
    told: float = math.inf

    @property
    @abstractmethod
    def clients(self) -> tuple[str, ...]:
        """Names of those who can be asked, sorted."""

    @abstractmethod
    def describe(self) -> Spec:
        """What a method needs to know before the first exchange."""

    @abstractmethod
    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms."""

    @property
    def within(self) -> Federation:
        """The engine inside this one, such as that of secure sums."""
        return self

    def plan(self, exchanges: int, recipe: Any = None, done: int = 0) -> None:
        """Prepare for a run of so many more exchanges. done: exchanges already made, if it is resumed."""

    def seeded(self, recipe: Any, spec: Spec) -> Any:
        """The recipe, with a seed that the clients drew together if this engine lets them."""
        return recipe

    def keep_states(self, folder: Path | None) -> None:
        """Keep the clients' shares of a method's state in this folder, where they live in this process."""

    def holdings(self) -> Holdings | None:
        """Who holds which rows now; None where clients may change as they like, as over a network."""
        return None

    def evaluate(self, model: Model) -> float:
        """Federated accuracy (R² for regression): each client scores its own rows and sends sums."""
        from fedsolve.scoring.evaluation import evaluate

        return evaluate(self, model)


def schema_of(federation: Federation) -> Schema | None:
    """The schema of a federation's rows, if it has one."""
    found: Schema | None = getattr(federation.within, "schema", None)
    return found


@runtime_checkable
class CarriesLetters(Protocol):
    """An engine that hands bytes to clients and brings back theirs, without knowing what they mean.

    channel: which of the client's functions they are for. largest: bytes that a reply may have; over a
    network a larger one is refused by its sender's name, before it is read. A letter that failed gives the
    error in its place; replies come in any order, and only as they are asked for.
    """

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]: ...
