"""Who follows a training while it goes on: bars, looks at test rows, trackers and pages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from fedsolve.federation.engine import Spec

if TYPE_CHECKING:
    from fedsolve.federation.method import Record


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


def following(follow: Follow) -> Followers:
    """All who follow, as one."""
    several = list(follow) if isinstance(follow, Sequence) else [follow]
    return Followers(*(one if isinstance(one, Follower) else hears("advanced", one) for one in several))


class Followers(Follower):
    """Several as one: of every event, those that want to hear it are told in turn.

    seconds: the time that they took; the training itself was not under way in it.
    """

    def __init__(self, *followers: Follower) -> None:
        self.followers = followers
        self.seconds = 0.0

    def __getattr__(self, event: str) -> Any:
        if event.startswith("_"):
            raise AttributeError(event)
        return partial(self.tell, event)

    def tell(self, event: str, *given: Any) -> dict[str, Any]:
        """Tell all of an event; what they measured, together."""
        began = time.perf_counter()
        try:
            heard = [getattr(each, event, None) for each in self.followers]
            found = [hear(*given) for hear in heard if hear is not None]
        finally:
            self.seconds += time.perf_counter() - began
        return {name: value for one in found if one is not None for name, value in one.items()}

    def close(self) -> None:
        self.tell("close")


class Within(Followers):
    """Followers of a larger whole, told of one training in it under its name there; they stay open."""

    def __init__(self, followers: Sequence[Follower], name: str, about: Mapping[str, Any]) -> None:
        super().__init__(*followers)
        self._name, self._about = name, about

    def started(self, training: Training) -> None:
        self.tell("started", dataclasses.replace(training, name=self._name, about=self._about))

    def close(self) -> None: ...
