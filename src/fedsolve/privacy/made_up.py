"""What answers to a request look like, found by answering it for rows that nobody owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fedsolve.errors import DataError
from fedsolve.federation.client_data import run_schema
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Chain, Needs, Request, Term
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.privacy.ring_layout import Exponents, Layout


class MadeUpClient:
    """Answers the requests of one run with made-up rows; its answers have the shapes of everybody's."""

    def __init__(self, describe: Callable[[], Spec]) -> None:
        self._describe = describe
        self._participant: Participant | None = None

    def layout(
        self, request: Request, chain: Chain, exponents: Exponents, bounded: Mapping[str, int]
    ) -> Layout:
        """Where each array of an answer to this request stands; bounded: exponents by name alone."""
        if self._participant is None:
            self._participant = Participant("made-up rows", _made_up(self._describe(), chain))
        try:
            term = _answer(self._participant, request, chain)
        except DataError:  # rows like these cannot be: counts below zero, say. No rows have the same shapes.
            data = self._participant.data
            self._participant = Participant("no rows", data.taking(np.zeros(len(data), dtype=bool)))
            term = _answer(self._participant, request, chain)
        own = [name for name in term.arrays if "@" in name]
        if own:
            raise DataError(f"the answers have {own[0]!r}, which is no addend of a sum.")
        by_name = {(name, term.shape(name)): e for name, e in bounded.items() if name in term.arrays}
        return Layout.of(term, {**exponents, **by_name})


def _answer(participant: Participant, request: Request, chain: Chain) -> Term:
    term = participant.answer(request)
    for _ in range(2):
        if isinstance(term, Needs):
            term = participant.answer(request.starting_at(term.have, chain))
    assert not isinstance(term, Needs)
    return term


def _made_up(spec: Spec, chain: Chain) -> ClientData:
    """A few rows of every class."""
    rows = 2 * max(2, spec.outputs)
    features = np.random.default_rng(0).standard_normal((rows, spec.features)).astype(np.float32)
    if spec.classes is None:
        labels = np.zeros(rows if spec.outputs == 1 else (rows, spec.outputs))
    else:
        labels = np.resize(spec.classes, rows)
    return ClientData(features, labels, schema=run_schema(chain))
