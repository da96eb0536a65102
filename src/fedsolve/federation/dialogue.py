"""Runs that a method writes as one function: it yields what it asks, is sent totals, and returns the model.

    def talk(self, run):
        total = yield Ask("my-sums")
        return MyModel(total["gram"])

A checkpoint holds the totals that were heard; a resumed run hears them again. Of a private run nobody hears
a total before `noisy_sums.released` has seen to its noise.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from fedsolve.arrays import Array
from fedsolve.errors import ConditionWarning
from fedsolve.federation.method import Block, Method, Request, Run, Spec, Term, Total
from fedsolve.federation.noisy_sums import composed, epsilon_of, privacy_of, released
from fedsolve.federation.participant import kind_of
from fedsolve.model import Model

M = TypeVar("M", bound=Model)
T = TypeVar("T")


class Ask(NamedTuple):
    """What is asked of all clients."""

    kind: str
    note: Mapping[str, Any] = {}
    arrays: Mapping[str, Array] = {}


Talk = Generator[Ask, Total, T]


class DialogueMethod(Method[M]):
    """A method whose run is `talk`."""

    @property
    def usual(self) -> int:
        """Exchanges that a run is expected to take, until it takes more."""
        return 1

    @abstractmethod
    def talk(self, run: DialogueRun[M]) -> Talk[M]:
        """Yield questions, hear totals, return the model."""

    def start(self, spec: Spec) -> DialogueRun[M]:
        return DialogueRun(self, spec)


class DialogueRun(Run[M]):
    """A `talk` under way.

    clients: those of the first question. costs: mu of every question of a private run. remarks: sentences
    that a reader of the result must know. told: what the talk adds to the record of the exchange that it has
    just heard.
    """

    method: DialogueMethod[M]

    def __init__(self, method: DialogueMethod[M], spec: Spec) -> None:
        super().__init__(method, spec)
        self.clients: tuple[str, ...] = ()
        self.remarks: list[str] = []
        self.costs: list[float] = []
        self.told: dict[str, Any] = {}
        self._heard: list[Total] = []
        self._talk: Talk[M] | None = None
        self._asks = Ask("")
        self._made: M | None = None
        self._again = False

    @property
    def exchanges(self) -> int:
        done = len(self.history)
        return done if self._made is not None else max(self.method.usual, done + 1)

    def request(self, clients: tuple[str, ...]) -> Request | None:
        self.clients = self.clients or clients
        if self._talk is None:
            self._go_on(None)
        if self._made is not None:
            return None
        kind, note, arrays = self._asks
        return self.ask(kind, len(self._heard), clients, note, arrays)

    def absorb(self, total: Total) -> None:
        privacy, metrics = privacy_of(self.chain), {}
        if privacy is not None:
            total = released(self._asked, self.chain, kind_of(self._asked.kind).releases, total)
            self.costs.append(float(self._asked.note["mu"]))
            metrics["epsilon"] = epsilon_of(composed(self.costs), privacy["delta"])
        self.record(total, metrics=metrics)
        self._go_on(total)
        self.history[-1] = replace(self.history[-1], **self.told)

    def _go_on(self, total: Total | None) -> None:
        self.told = {}
        try:
            if total is None:
                self._talk = self.method.talk(self)
                self._asks = next(self._talk)
            else:
                assert self._talk is not None
                self._heard.append(total)
                self._asks = self._talk.send(total)
        except StopIteration as end:
            self._made = end.value

    def add(self, block: Block) -> Block:
        return block if self._again else super().add(block)

    def remark(self, text: str) -> None:
        """Keep a sentence for the result, and say it now."""
        self.remarks.append(text)
        warnings.warn(text, ConditionWarning, stacklevel=2)

    def model(self) -> M:
        assert self._made is not None
        self._made.history = tuple(self.history)
        return self._made

    def stored(self) -> dict[str, Any]:
        heard = [
            [dict(total.term.arrays), total.term.counts, dict(total.noise), total.noised]
            for total in self._heard
        ]
        return {"clients": self.clients, "heard": heard, "costs": self.costs}

    def take_stored(self, kept: dict[str, Any]) -> None:
        self.clients, self.costs, self._again = kept["clients"], kept["costs"], True
        if self.clients:
            self._go_on(None)
        for place, (arrays, counts, noise, noised) in enumerate(kept["heard"]):
            cohort = self.history[place].cohort
            self._go_on(Total(Term(arrays, counts), cohort, noise=noise, noised=noised))
        self._again = False
