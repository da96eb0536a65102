"""What every engine offers a method, what a method learns before it starts, and who follows its training:
bars, looks at test rows, trackers and pages.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.fingerprints import Holdings
from fedsolve.federation.messages import Chain, Request, Total
from fedsolve.labels import class_list, warn_of_alike
from fedsolve.tables.schema import Schema

if TYPE_CHECKING:
    from fedsolve.federation.method import Record
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
            if known.dtype.kind == "U":
                warn_of_alike(known)
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
    within: the engine inside this one, such as that of secure sums; None where there is none.
    """

    prefers: Literal["bytes", "exchanges"] = "exchanges"
    told: float = math.inf
    within: Federation | None = None

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
    within = federation if federation.within is None else federation.within
    found: Schema | None = getattr(within, "schema", None)
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


# -- who follows a training -------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What is about to be trained.

    method, parameters: the method's key and its parameters. spec: features and classes.
    clients:    who is there at the start.
    expected:   exchanges of the whole training, as far as can be told.
    history:    what is done already, of a training that is resumed.
    checkpoint: the file that holds its state, if any.
    name:       what it is called within a larger whole, such as a cell of an experiment; "" by itself.
    about:      what else is known of it there: experiment, dataset, partition, seed.
    """

    method: str
    parameters: Mapping[str, Any]
    spec: Spec
    clients: tuple[str, ...]
    expected: int
    history: tuple[Record, ...] = ()
    checkpoint: str | None = None
    name: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


class Follower:
    """Hears a training from its beginning to its end; a subclass defines the events that it wants to hear.

    Of one training, in this order:

    started(training)           what is trained, over whom, and the exchanges that are done already
    planned(plan)               what a choice will try, and what that takes, in words
    asked(request, expected)    an exchange begins: whom it asks, and for what
    look(run)                   it has ended; the dictionary that is returned joins the metrics of its record
    advanced(record, expected)  its record: bytes, seconds, risk, accuracy, metrics; the checkpoint holds it
    finished(model)             the model; None of what an experiment compares with and has none
    scored(scores)              what the model was found to do on rows, where somebody counted that
    stopped(problem)            instead of `finished`: what ended the training, which is raised after it
    close()                     nothing more comes; a training after this one would begin with `started`

    What it raises stops the training, which its checkpoint can go on with.
    """

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def hears(event: str, function: Callable[..., Any]) -> Follower:
    """A follower of one event by a function."""
    follower = Follower()
    setattr(follower, event, function)
    return follower


Follow = Follower | Callable[..., Any] | Sequence[Follower | Callable[..., Any]]
"""Who follows: followers, and functions that are called with every record and the expected exchanges."""


@dataclass(eq=False)
class Followers(Follower):
    """Several as one: of every event, those that want to hear it are told in turn; functions of "advanced".

    seconds: the time that they took; the training itself was not under way in it.
    """

    followers: Sequence[Follower | Callable[..., Any]] = ()
    seconds: float = field(default=0.0, init=False)

    def tell(self, event: str, *given: Any) -> dict[str, Any]:
        """Tell all of an event; what they measured, together."""
        began, found = time.perf_counter(), dict[str, Any]()
        try:
            for each in self.followers:
                if isinstance(each, Followers):
                    found |= each.tell(event, *given)
                elif isinstance(each, Follower):
                    if hear := getattr(each, event, None):
                        found |= hear(*given) or {}
                elif event == "advanced":
                    found |= each(*given) or {}
        finally:
            self.seconds += time.perf_counter() - began
        return found

    def close(self) -> None:
        self.tell("close")


@dataclass(eq=False)
class Within(Followers):
    """Followers of a larger whole, told of one training in it under its name there; they stay open."""

    name: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    def tell(self, event: str, *given: Any) -> dict[str, Any]:
        if event == "close":
            return {}
        if event == "started":
            given = (replace(given[0], name=self.name, about=self.about),)
        return super().tell(event, *given)

    def close(self) -> None: ...
