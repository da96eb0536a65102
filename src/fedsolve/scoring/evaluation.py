"""Federated evaluation: each client scores a model on its own rows and answers with sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation
from fedsolve.federation.folds import Part
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.labels import encode_labels, label_matrix
from fedsolve.scoring.label_quality import labels_evaluation, labels_tally
from fedsolve.scoring.quality import Evaluation
from fedsolve.scoring.residuals import RegressionEvaluation, error_sums, origin_of
from fedsolve.scoring.tallies import COUNTS, empty_tally, tally, tally_from, tally_term

if TYPE_CHECKING:
    from fedsolve.model import Model


Found = Evaluation | RegressionEvaluation
"""What an evaluation tells: of a classifier, or of a regression."""


@overload
def evaluate(federation: Federation, model: Model, part: Part | None = None) -> float: ...
@overload
def evaluate(
    federation: Federation, model: Model, part: Part | None = None, *, detailed: Literal[True]
) -> Found: ...
def evaluate(
    federation: Federation, model: Model, part: Part | None = None, *, detailed: bool = False
) -> float | Found:
    """Accuracy over all clients' rows or a part of them, or R² for a regression model; one exchange.

    Of several labels a row, the mean accuracy of the labels. detailed: everything that `Evaluation` tells of
    a classifier, `LabelsEvaluation` of several labels, or `RegressionEvaluation` of a regression, instead.
    """
    if detailed:
        return evaluation_from(
            model, federation.exchange(about("tally", model, federation.clients, part), Chain())
        )
    total = federation.exchange(about("evaluate", model, federation.clients, part), Chain())
    if not model.regression:
        answers = max(1, total.count("rows")) * (len(model.labels) or 1)
        return total.count("correct") / answers
    square, target, target_square = (total[n] for n in ("error_square", "target", "target_square"))
    spread = target_square - target**2 / max(1, total.count("rows"))
    return float(np.mean(1.0 - square / spread))


def evaluation_from(model: Model, total: Total) -> Found:
    """The evaluation that the clients' tallies add up to."""
    arrays = total.term.arrays
    if model.regression:
        return RegressionEvaluation(total.count("rows"), arrays, origin_of(model), model.spread)
    if model.labels:
        return labels_evaluation(model, tally_from(arrays))
    assert model.classes is not None
    return Evaluation(model.classes, tally_from(arrays), model.calibration is not None)


def evaluation_of(model: Model, features: Any, labels: Any) -> Found:
    """The same of rows that lie here."""
    data = ClientData(features, labels, schema=model.schema if model.preparing is not None else None)
    if model.regression:
        return RegressionEvaluation(len(data), error_sums(model, data), origin_of(model), model.spread)
    if model.labels:
        return labels_evaluation(model, labels_tally(model, data))
    assert model.classes is not None
    return Evaluation(model.classes, tally_of(model, data), model.calibration is not None)


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
            "it is: model.score(features, labels), or fedsolve.client_scores for every client."
        )
    arrays, note = model.contents()
    note = {**note, **more, **({} if part is None else part.note())}
    return Request(kind, exchange, 0, clients, note=note, arrays=arrays)


@step("tally", over_rows=True, counts=COUNTS)
def answer_tally(data: ClientData, request: Request, memory: Memory) -> Term:
    """What an evaluation needs of this client's rows."""
    from fedsolve.model import model_from_contents

    model = model_from_contents(dict(request.arrays), dict(request.note)).placed(memory.device)
    return tally_term_of(model, data)


def tally_term_of(model: Model, data: ClientData) -> Term:
    """What a client sends about its rows."""
    if model.regression:
        return Term(error_sums(model, data), {"rows": len(data)})
    return tally_term(tally_of(model, data), len(data))


def tally_of(model: Model, data: ClientData) -> dict[str, Array]:
    """The tally of a client's rows, some of them at a time."""
    if model.labels:
        return labels_tally(model, data)
    assert model.classes is not None
    codes = encode_labels(data.own_labels(), model.classes)
    sums = empty_tally(len(model.classes))
    for span in data.spans():
        answers, probabilities = model.told(data.features(span, data.source.dtype))
        for name, more in tally(probabilities, answers, codes[span], data.cells is not None).items():
            sums[name] += more
    return sums


@step("evaluate", over_rows=True)
def answer_accuracy(data: ClientData, request: Request, memory: Memory) -> Term:
    """Correct predictions and rows; for regression the sums that R² needs."""
    from fedsolve.model import model_from_contents

    model = model_from_contents(dict(request.arrays), dict(request.note)).placed(memory.device)
    labels = data.own_labels()
    if model.regression:
        errors = error_sums(model, data)["errors"]
        return Term(
            {"error_square": errors[2], "target": errors[4], "target_square": errors[5]}, {"rows": len(data)}
        )
    if model.labels:
        labels = label_matrix(labels, model.labels)
    else:
        assert model.classes is not None
        encode_labels(labels, model.classes)
    correct = sum(
        int(np.sum(model.predict(data.features(span, data.source.dtype)) == labels[span]))
        for span in data.spans()
    )
    return Term(counts={"correct": correct, "rows": len(data)})
