"""Federated evaluation: each client scores a model on its own rows and answers with sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.parts import Part
from fedsolve.federation.quality import Evaluation
from fedsolve.federation.tallies import empty_tally, tally, tally_from, tally_term
from fedsolve.labels import encode_labels, regression_targets

if TYPE_CHECKING:
    from fedsolve.model import Model

_ROWS = 16384


def evaluate(federation: Federation, model: Model, part: Part | None = None) -> float:
    """Accuracy over all clients' rows or a part of them, or R² for a regression model; one exchange."""
    total = federation.exchange(about("evaluate", model, federation.clients, part), Chain())
    if model.classes is not None:
        return total.count("correct") / max(1, total.count("rows"))
    square, target, target_square = (total[n] for n in ("error_square", "target", "target_square"))
    spread = target_square - target**2 / max(1, total.count("rows"))
    return float(np.mean(1.0 - square / spread))


def evaluation(federation: Federation, model: Model, part: Part | None = None) -> Evaluation:
    """What `Evaluation` tells of a classifier, over all clients' rows or a part of them; one exchange."""
    request = about("tally", model, federation.clients, part)
    return evaluation_from(model, federation.exchange(request, Chain()))


def evaluation_from(model: Model, total: Total) -> Evaluation:
    """The evaluation that the clients' tallies add up to."""
    assert model.classes is not None
    return Evaluation(model.classes, tally_from(total.term.arrays), model.calibration is not None)


def evaluation_of(model: Model, features: Any, labels: Any) -> Evaluation:
    """The same of rows that lie here."""
    data = ClientData(features, labels, schema=model.schema if model.preparing is not None else None)
    if model.classes is None:
        raise DataError(REGRESSION)
    return Evaluation(model.classes, tally_of(model, data), model.calibration is not None)


REGRESSION = (
    "this is a regression model: it has neither classes nor probabilities. R² of it: fedsolve.evaluate, or "
    "model.score(features, targets)."
)


def about(
    kind: str,
    model: Model,
    clients: tuple[str, ...],
    part: Part | None = None,
    exchange: int = 0,
    **more: Any,
) -> Request:
    """A question about a model, which goes with it; clients need not know a run. more: added to its note."""
    if model.private:
        raise DataError(
            "this model belongs to one client; an evaluation would send it to all of them. Score it where "
            "it is: model.score(features, labels), or fedsolve.local_scores for every client."
        )
    if model.classes is None and kind != "evaluate":
        raise DataError(REGRESSION)
    arrays, note = model.contents()
    note = {**note, **more, **({} if part is None else part.note())}
    return Request(kind, exchange, 0, clients, note=note, arrays=arrays)


@step("tally", over_rows=True)
def answer_tally(data: ClientData, request: Request, memory: Memory) -> Term:
    """What an evaluation needs of this client's rows."""
    from fedsolve.model import model_from_contents

    model = model_from_contents(dict(request.arrays), dict(request.note))
    return tally_term(tally_of(model, data), len(data))


def tally_of(model: Model, data: ClientData) -> dict[str, Array]:
    """The tally of a client's rows, some of them at a time."""
    assert model.classes is not None
    codes = encode_labels(data.own_labels(), model.classes)
    sums = empty_tally(len(model.classes))
    for start in range(0, len(data), _ROWS):
        span = slice(start, start + _ROWS)
        answers, probabilities = model.told(data.features(span, data.source.dtype))
        for name, more in tally(probabilities, answers, codes[span]).items():
            sums[name] += more
    return sums


@step("evaluate", over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """Correct predictions and rows; for regression the sums that R² needs."""
    from fedsolve.model import model_from_contents

    model = model_from_contents(dict(request.arrays), dict(request.note))
    labels = data.own_labels()
    if model.classes is not None:
        encode_labels(labels, model.classes)
    correct = 0
    sums = np.zeros((3, model.outputs))
    # R² does not depend on where targets are counted from; near them, their squares keep all digits.
    origin = model.decision_function(np.zeros((1, model.features)))[0]
    for start in range(0, len(data), _ROWS):
        span = slice(start, start + _ROWS)
        predicted = model.predict(data.features(span, data.source.dtype))
        if model.classes is not None:
            correct += int(np.sum(predicted == labels[span]))
        else:
            target = regression_targets(labels[span], model.outputs).astype(np.float64)
            error = target - predicted.reshape(target.shape)
            target = target - origin
            sums += [np.sum(error**2, axis=0), np.sum(target, axis=0), np.sum(target**2, axis=0)]
    if model.classes is not None:
        return Term(counts={"correct": correct, "rows": len(data)})
    named = dict(zip(("error_square", "target", "target_square"), sums, strict=True))
    return Term(named, {"rows": len(data)})
