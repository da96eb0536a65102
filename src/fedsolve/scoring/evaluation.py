"""Federated evaluation: each client scores a model on its own rows and answers with sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation
from fedsolve.federation.folds import Part
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.model import Model, model_from_contents
from fedsolve.scoring.quality import Evaluation, LabelsEvaluation
from fedsolve.scoring.residuals import RegressionEvaluation, error_sums, origin_of
from fedsolve.scoring.tallies import COUNTS, empty_tally, tally, tally_from, tally_term, truth_of

_MANY = 65536

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
    kind = "tally" if detailed else "evaluate"
    total = federation.exchange(about(kind, model, federation.clients, part), Chain())
    if detailed:
        return evaluation_from(model, total)
    if not model.regression:
        answers = max(1, total.count("rows")) * (len(model.labels) or 1)
        return total.count("correct") / answers
    square, target, target_square = (total[n] for n in ("error_square", "target", "target_square"))
    spread = target_square - target**2 / max(1, total.count("rows"))
    return float(np.mean(1.0 - square / spread))


def evaluation_from(model: Model, total: Total) -> Found:
    """The evaluation that the clients' sums add up to."""
    sums = tally_from(total.term.arrays)
    if model.regression and model.judged is None:
        return RegressionEvaluation(total.count("rows"), sums, origin_of(model), model.spread)
    # The likelihood that a regression of probabilities maximises calibrates them.
    calibrated = model.calibration is not None or model.regression
    if model.labels:
        return LabelsEvaluation(np.arange(2), sums, calibrated, model.labels)
    assert model.judged is not None
    return Evaluation(model.judged, sums, calibrated)


def evaluation_of(model: Model, features: Any, labels: Any) -> Found:
    """The evaluation of rows in this process."""
    data = ClientData(features, labels, schema=model.schema if model.preparing is not None else None)
    return evaluation_from(model, Total(tally_term(sums_of(model, data), len(data)), ()))


def scores_of(model: Model, features: Sequence[Array]) -> Array:
    """Scores of rows, some thousand at a time, so that what layers give is never held whole; NaN where a row
    lacks what the model needs."""
    spans = (part[i : i + _MANY] for part in features for i in range(0, max(1, len(part)), _MANY))
    return np.concatenate([model.known_scores(rows) for rows in spans])


def about(
    kind: str,
    model: Model,
    clients: tuple[str, ...],
    part: Part | None = None,
    at: Mapping[str, Array] = {},
    **more: Any,
) -> Request:
    """A question about a model that is sent along; clients need to know no run.

    at: further arrays, by the names that `with_prefix(request.arrays, "at.")` gives back. more: added to its
    note.
    """
    if model.private:
        raise DataError(
            "this model belongs to one client; an evaluation would send it to all of them. Score it where "
            "it is: model.score(features, labels), or fedsolve.client_scores for every client."
        )
    arrays, note = model.contents()
    note = {**note, **more, **({} if part is None else part.note())}
    arrays |= {f"at.{name}": array for name, array in at.items()}
    return Request(kind, 0, 0, clients, note=note, arrays=arrays)


def model_about(request: Request, memory: Memory) -> Model:
    """The model of a question, on the client's device."""
    own = {name: array for name, array in request.arrays.items() if not name.startswith("at.")}
    return model_from_contents(own, dict(request.note)).placed(memory.device)


@step("tally", over_rows=True, counts=COUNTS)
def answer_tally(data: ClientData, request: Request, memory: Memory) -> Term:
    """The sums of an evaluation over this client's rows."""
    return tally_term(sums_of(model_about(request, memory), data), len(data))


def sums_of(model: Model, data: ClientData) -> dict[str, Array]:
    """The sums of an evaluation over a client's rows, some thousand at a time.

    Of several labels a row: the tally of each by itself, along a first axis, and `exact`, the rows of which
    every label is right.
    """
    if model.regression and model.judged is None:
        return error_sums(model, data)
    truth, coarse = truth_of(model, data.own_labels()), data.cells is not None
    whole = empty_tally(model.outputs if model.judged is None else len(model.judged))
    exact, each = 0, [empty_tally(2) for _ in model.labels]
    for span in data.spans():
        answers, shares = model.told(data.features(span, data.source.dtype))
        if not model.labels:
            tally(shares, answers, truth[span], coarse, whole)
            continue
        for place, of_label in enumerate(shares.T):
            two = np.column_stack([1.0 - of_label, of_label])
            tally(two, answers[:, place], truth[span, place], coarse, each[place])
        exact += int(np.sum((answers == truth[span]).all(axis=1)))
    if not model.labels:
        return whole
    sums = {name: np.stack([one[name] for one in each]) for name in each[0]}
    return sums | {"exact": np.array([float(exact)])}


@step("evaluate", over_rows=True)
def answer_accuracy(data: ClientData, request: Request, memory: Memory) -> Term:
    """Correct predictions and rows; for regression the sums that R² needs."""
    model, labels = model_about(request, memory), data.own_labels()
    if model.regression:
        errors = error_sums(model, data)["errors"]
        return Term(
            {"error_square": errors[2], "target": errors[4], "target_square": errors[5]}, {"rows": len(data)}
        )
    truth = truth_of(model, labels)  # refuses labels that the model does not know
    labels = truth if model.labels else labels
    correct = sum(
        int(np.sum(model.predict(data.features(span, data.source.dtype)) == labels[span]))
        for span in data.spans()
    )
    return Term(counts={"correct": correct, "rows": len(data)})
