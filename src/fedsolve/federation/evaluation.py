"""Federated evaluation: each client scores a model on its own rows and answers with sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.parts import Part
from fedsolve.labels import encode_labels, regression_targets

if TYPE_CHECKING:
    from fedsolve.model import Model

_ROWS = 16384


def evaluate(federation: Federation, model: Model, part: Part | None = None) -> float:
    """Accuracy over all clients' rows or a part of them, or R² for a regression model; one exchange."""
    if model.private:
        raise DataError(
            "this model belongs to one client; an evaluation would send it to all of them. Score it where "
            "it is: model.score(features, labels), or fedsolve.local_scores for every client."
        )
    arrays, note = model.contents()
    if part is not None:
        note = {**note, **part.note()}
    request = Request("evaluate", 0, 0, federation.clients, note=note, arrays=arrays)
    total = federation.exchange(request, Chain())
    if model.classes is not None:
        return total.count("correct") / max(1, total.count("rows"))
    square, target, target_square = (total[n] for n in ("error_square", "target", "target_square"))
    spread = target_square - target**2 / max(1, total.count("rows"))
    return float(np.mean(1.0 - square / spread))


@step("evaluate")
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
