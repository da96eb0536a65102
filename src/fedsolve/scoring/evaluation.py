"""Federated evaluation: each client scores a model on its own rows and answers with sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from fedsolve.arrays import Array
from fedsolve.calibration import REACH
from fedsolve.container import with_prefix
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation
from fedsolve.federation.folds import PART, Part, part_from
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.model import Model, model_from_contents
from fedsolve.scoring.quality import RELIABILITY_BINS, Evaluation, LabelsEvaluation, truth_of
from fedsolve.scoring.residuals import RegressionEvaluation, error_sums, origin_of

_MANY = 65536

_BINS = ((2, 640), (16, 320))
_LEAST_BINS = 160

_COARSE = np.array(
    [-16, -8, -6, -4.8, -4, -3.2, -2.4, -1.8, -1.2, -0.6, 0, 0.6, 1.2, 1.8, 2.4, 3.2, 4, 4.8, 6]
)
"""Lower ends, in logits, of the bins that secure sums count rows in: 20 with that of certainty."""

_LEAST = np.finfo(np.float64).eps
"""A probability of zero counts as this one in the log loss, as in scikit-learn."""

_WHOLE = ("confusion", "histogram")

COUNTS = (*_WHOLE, "reliability")
"""What a tally has numbers of rows in; of rows in cells, no probabilities are added up either."""

Tally = dict[str, Array]

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


def models_question(models: Mapping[str, tuple[Model, Part]]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Note and arrays of a question about models, each on a part of the rows."""
    notes: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, (model, part) in models.items():
        contents, note = model.contents()
        notes[name] = {"model": note, **part.note()}
        arrays |= {f"{name}.{key}": array for key, array in contents.items()}
    return {"models": notes}, arrays


def models_asked(request: Request, memory: Memory) -> Iterator[tuple[str, Model, Part]]:
    """The models that a question is about, by name, each with its part, where the client computes."""
    for name, one in request.note["models"].items():
        contents = with_prefix(dict(request.arrays), f"{name}.")
        part = part_from(one[PART])
        assert part is not None
        yield name, model_from_contents(contents, one["model"]).placed(memory.device), part


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


# -- sums over rows: what they hold is in `quality` --------------------------------------------------


def empty_tally(classes: int) -> Tally:
    """The tally of no rows. Each class has a histogram, with fewer bins if there are many classes."""
    bins = 2 + next((bins for most, bins in _BINS if classes <= most), _LEAST_BINS)
    return {
        "confusion": np.zeros((classes, classes), dtype=np.int64),
        "histogram": np.zeros((1 if classes == 2 else classes, 2, bins), dtype=np.int64),
        "reliability": np.zeros((3, RELIABILITY_BINS)),
        "losses": np.zeros((2, 2)),
    }


def tally(
    probabilities: Array, answers: Array, codes: Array, coarse: bool = False, sums: Tally | None = None
) -> Tally:
    """The tally of these rows: probabilities (rows, classes); answers and true classes by position.

    coarse: in the few bins of secure sums, whose probabilities count as their middle.
    sums: that of other rows, to which these are added.
    """
    classes = probabilities.shape[1]
    sums = empty_tally(classes) if sums is None else sums
    np.add.at(sums["confusion"], (codes, answers), 1)
    bins = sums["histogram"].shape[-1]
    for place, number in enumerate((1,) if classes == 2 else range(classes)):
        sums["histogram"][place] += logit_histogram(probabilities[:, number], codes == number, bins, coarse)
    if classes == 2:
        told, true = probabilities[:, 1], codes == 1
    else:
        told, true = probabilities.max(axis=1), probabilities.argmax(axis=1) == codes
    places = np.minimum((told * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    if coarse:  # a sum over a bin of one row would be its probability
        told = (places + 0.5) / RELIABILITY_BINS
    for row, weights in enumerate((None, told, true)):
        sums["reliability"][row] += np.bincount(places, weights, minlength=RELIABILITY_BINS)
    given = np.take_along_axis(probabilities, codes[:, None], axis=1)[:, 0]
    # |p - y|², y being 1 at the true class: of two classes, by custom, that of one of them.
    squares = (np.sum(probabilities**2, axis=1) - 2 * given + 1) / (2 if classes == 2 else 1)
    for place, losses in enumerate((-np.log(np.maximum(given, _LEAST)), squares)):
        sums["losses"][place] += losses.sum(), (losses**2).sum()
    return sums


def tally_term(sums: Tally, rows: int) -> Term:
    """Sums of an evaluation as clients send them; counts of rows take half the bytes where that is exact."""
    narrow = np.float32 if rows < 2**24 else np.float64
    counts = {name: sums[name].astype(narrow) for name in _WHOLE if name in sums}
    return Term({**sums, **counts}, {"rows": rows})


def tally_from(arrays: Tally) -> Tally:
    """Sums of an evaluation from a total, with counts of rows rounded to whole numbers again."""
    whole = {name: np.rint(arrays[name]).astype(np.int64) for name in _WHOLE if name in arrays}
    if "reliability" in arrays:
        reliability = whole["reliability"] = arrays["reliability"].copy()
        reliability[..., [0, 2], :] = np.rint(reliability[..., [0, 2], :])
    return {**arrays, **whole}


def logit_histogram(probabilities: Array, members: Array, bins: int, coarse: bool = False) -> Array:
    """The histogram (2, bins) of these rows. probabilities: (rows,). members: (rows,) booleans.

    coarse: rows are counted at the lower ends of 20 bins, one fixed grid for all questions.
    """
    inner = bins - 2
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities) - np.log1p(-probabilities)
    inside = np.clip(logits, -REACH, REACH)
    if coarse:
        inside = _COARSE[np.searchsorted(_COARSE, inside, side="right") - 1] + 1e-9
        probabilities = np.maximum(probabilities, 1e-300)
    places = 1 + np.minimum((inside + REACH) * (inner / (2 * REACH)), inner - 1).astype(np.int64)
    places[probabilities <= 0] = 0
    places[probabilities >= 1] = bins - 1
    return np.bincount(members * bins + places, minlength=2 * bins).reshape(2, bins)
