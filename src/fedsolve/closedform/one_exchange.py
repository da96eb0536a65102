"""Methods of one exchange: a client's sums over its rows, and what is solved from their total.

The shortest way to a method of one's own:

    @dataclass(frozen=True)
    class NearestMean(OneExchange):
        def answer(self, rows): ...        # at each client: a Term of sums over `rows.blocks()`
        def solve(self, total, spec): ...  # at the server: a Model

Rows are counted for the method, in all (`total.count("rows")`) and by class (`total["class_rows"]`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

import numpy as np

from fedsolve import registry
from fedsolve.arrays import check_classes, check_rows
from fedsolve.closedform.sums import Rows, cached_rows
from fedsolve.federation.method import Method, Request, Run, Spec, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.model import Model, model_from_contents

KIND = "one-exchange"

M = TypeVar("M", bound=Model)


class OneExchange(Method[M]):
    """A method that solves for its model from one total."""

    @abstractmethod
    def answer(self, rows: Rows) -> Term:
        """The client's term: sums over its rows."""

    @abstractmethod
    def solve(self, total: Total, spec: Spec) -> M:
        """The model of the total of all terms."""

    def start(self, spec: Spec) -> Run[M]:
        return OneExchangeRun(self, spec)


class OneExchangeRun(Run[M]):
    """Asks once and solves."""

    method: OneExchange[M]
    _model: M | None = None

    def request(self, clients: tuple[str, ...]) -> Request | None:
        return self.ask(KIND, 0, clients) if self._model is None else None

    def absorb(self, total: Total) -> None:
        check_rows(total.count("rows"))
        if self.spec.classes is not None:
            check_classes(int(np.count_nonzero(total["class_rows"])))
        self._model = self.method.solve(total, self.spec)
        self.record(total, "classifier")

    def model(self) -> M:
        assert self._model is not None
        return self._model

    def stored(self) -> dict[str, Any]:
        return {"model": None if self._model is None else self._model.contents()}

    def take_stored(self, kept: dict[str, Any]) -> None:
        if kept["model"] is not None:
            self._model = model_from_contents(*kept["model"])  # type: ignore[assignment]


@step(KIND)
def answer_once(data: ClientData, request: Request, memory: Memory) -> Term:
    """The method's own answer, with the client's rows counted."""
    method: OneExchange[Any] = registry.method_of(memory.chain.opening)
    rows = cached_rows(data, memory, np.float64)
    term = method.answer(rows)
    term.counts["rows"] = len(rows)
    if rows.codes is not None:
        term.arrays["class_rows"] = np.bincount(rows.codes, minlength=rows.outputs).astype(np.float64)
    return term
