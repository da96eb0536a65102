"""Who hears of a training while it goes on: bars, looks at test rows, trackers and pages are all followers.

Of one training, in this order:

started    what is trained, over whom, and the exchanges that an earlier part of it had
asked      an exchange begins: whom it asks, and for what
look       it has ended; what a follower measures of the run joins the metrics of its record
advanced   its record: bytes, seconds, risk, accuracy, metrics; the checkpoint holds it
finished   the model; None of what an experiment compares with and has none
scored     what the model was found to do on rows, where somebody counted that
stopped    instead of `finished`: what ended the training, which is raised after it
close      nothing more comes; a training after this one would begin with `started`
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Request
from fedsolve.model import Model

if TYPE_CHECKING:
    from fedsolve.federation.method import Record, Run


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
    """Hears a training from its beginning to its end; a subclass has the events that it wants to hear.

    What it raises stops the training, which its checkpoint can go on with.
    """

    def started(self, training: Training) -> None: ...

    def asked(self, request: Request, expected: int) -> None: ...

    def look(self, run: Run[Any]) -> Mapping[str, Any]:
        return {}

    def advanced(self, record: Record, expected: int) -> None: ...

    def finished(self, model: Model | None) -> None: ...

    def scored(self, scores: Mapping[str, float]) -> None: ...

    def stopped(self, problem: BaseException) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def hears(event: str, function: Callable[..., Any] | Follower | None) -> Follower:
    """A follower of one event by a function; one that is a follower already stays as it is."""
    if isinstance(function, Follower):
        return function
    follower = Follower()
    if function is not None:
        setattr(follower, event, function)
    return follower


class Followers(Follower):
    """Several as one, each told in turn.

    seconds: the time that they took; the training itself was not under way in it.
    """

    def __init__(self, *followers: Follower) -> None:
        self.followers = followers
        self.seconds = 0.0

    def started(self, training: Training) -> None:
        with self._timed():
            for follower in self.followers:
                follower.started(training)

    def asked(self, request: Request, expected: int) -> None:
        with self._timed():
            for follower in self.followers:
                follower.asked(request, expected)

    def look(self, run: Run[Any]) -> Mapping[str, Any]:
        with self._timed():
            return {name: value for each in self.followers for name, value in each.look(run).items()}

    def advanced(self, record: Record, expected: int) -> None:
        with self._timed():
            for follower in self.followers:
                follower.advanced(record, expected)

    def finished(self, model: Model | None) -> None:
        with self._timed():
            for follower in self.followers:
                follower.finished(model)

    def scored(self, scores: Mapping[str, float]) -> None:
        with self._timed():
            for follower in self.followers:
                follower.scored(scores)

    def stopped(self, problem: BaseException) -> None:
        with self._timed():
            for follower in self.followers:
                follower.stopped(problem)

    def close(self) -> None:
        for follower in self.followers:
            follower.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


class Within(Followers):
    """Followers of a larger whole, told of one training in it under its name there; they stay open."""

    def __init__(self, followers: Sequence[Follower], name: str, about: Mapping[str, Any]) -> None:
        super().__init__(*followers)
        self._name, self._about = name, about

    def started(self, training: Training) -> None:
        super().started(dataclasses.replace(training, name=self._name, about=self._about))

    def close(self) -> None: ...
