"""Federated evaluation: each client scores a model on its own rows and answers with sums; and what a result
leaves to doubt, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from fedsolve.arrays import Array
from fedsolve.calibration import REACH
from fedsolve.container import with_prefix
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation
from fedsolve.federation.folds import PART, Part
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.model import Model, model_from_contents
from fedsolve.pages.words import percent
from fedsolve.scoring.quality import RELIABILITY_BINS, Evaluation, LabelsEvaluation, truth_of
from fedsolve.scoring.residuals import RegressionEvaluation, error_sums, origin_of
from fedsolve.tables.proposal import numbers_the_rows
from fedsolve.tables.table_file import Table

GAP = 0.2
"""Warn when accuracy on training rows exceeds accuracy on other rows by this much."""

MISCALIBRATED = 0.1
"""Warn from this expected calibration error (ECE) on."""

_UNLEARNT = "The model has not learnt what it should; check columns, scales and parameters."

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
    sums = dict(total.term.arrays)
    for name in _WHOLE:  # whole numbers again, which masks leave nearly so
        if name in sums:
            sums[name] = np.rint(sums[name]).astype(np.int64)
    if "reliability" in sums:
        rows, told, true = np.moveaxis(sums["reliability"], -2, 0)
        sums["reliability"] = np.stack([np.rint(rows), told, np.rint(true)], axis=-2)
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
    return model_from_contents(own, dict(request.note)).placed(memory.kernels.device)


def models_question(
    models: Mapping[str, tuple[Model, Part]], at: Mapping[str, Array] = {}
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Note and arrays of a question about models, each on a part of the rows; at: further arrays of it."""
    notes: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, (model, part) in models.items():
        contents, note = model.contents()
        notes[name] = {"model": note, **part.note()}
        arrays |= {f"{name}.{key}": array for key, array in contents.items()}
    return {"models": notes}, arrays | {f"at.{name}": array for name, array in at.items()}


def models_asked(request: Request, memory: Memory) -> Iterator[tuple[str, Model, Part]]:
    """The models that a question is about, by name, each with its part, where the client computes."""
    for name, one in request.note["models"].items():
        contents = with_prefix(dict(request.arrays), f"{name}.")
        model = model_from_contents(contents, one["model"]).placed(memory.kernels.device)
        yield name, model, Part(**one[PART])


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
    truth, coarse = truth_of(model, data.own_labels), data.cells is not None
    classes = 2 if model.labels else model.outputs if model.judged is None else len(model.judged)
    no_rows = np.zeros((0, classes)), np.zeros(0, np.int64), np.zeros(0, np.int64)
    exact, each = 0, [tally(*no_rows) for _ in model.labels or ("the only one",)]
    for span in data.spans():
        answers, shares = model.told(data.features(span, data.source.dtype))
        if not model.labels:
            tally(shares, answers, truth[span], coarse, each[0])
            continue
        for place, of_label in enumerate(shares.T):
            two = np.column_stack([1.0 - of_label, of_label])
            tally(two, answers[:, place], truth[span, place], coarse, each[place])
        exact += int(np.sum((answers == truth[span]).all(axis=1)))
    if not model.labels:
        return each[0]
    sums = {name: np.stack([one[name] for one in each]) for name in each[0]}
    return sums | {"exact": np.array([float(exact)])}


@step("evaluate", over_rows=True)
def answer_accuracy(data: ClientData, request: Request, memory: Memory) -> Term:
    """Correct predictions and rows; for regression the sums that R² needs."""
    model, labels = model_about(request, memory), data.own_labels
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


def tally(
    probabilities: Array, answers: Array, codes: Array, coarse: bool = False, sums: Tally | None = None
) -> Tally:
    """The tally of these rows: probabilities (rows, classes); answers and true classes by position.

    coarse: in the few bins of secure sums, whose probabilities count as their middle.
    sums: that of other rows, to which these are added.
    """
    classes = probabilities.shape[1]
    if sums is None:  # each class has a histogram, with fewer bins if there are many classes
        bins = 2 + next((bins for most, bins in _BINS if classes <= most), _LEAST_BINS)
        sums = {
            "confusion": np.zeros((classes, classes), dtype=np.int64),
            "histogram": np.zeros((1 if classes == 2 else classes, 2, bins), dtype=np.int64),
            "reliability": np.zeros((3, RELIABILITY_BINS)),
            "losses": np.zeros((2, 2)),
        }
    np.add.at(sums["confusion"], (codes, answers), 1)
    bins = sums["histogram"].shape[-1]
    for place, number in enumerate((1,) if classes == 2 else range(classes)):
        shares, members = probabilities[:, number], codes == number
        with np.errstate(divide="ignore"):
            inside = np.clip(np.log(shares) - np.log1p(-shares), -REACH, REACH)
        if coarse:  # at the lower ends of the bins, one fixed grid for all questions
            inside = _COARSE[np.searchsorted(_COARSE, inside, side="right") - 1] + 1e-9
            shares = np.maximum(shares, 1e-300)
        slots = 1 + np.minimum((inside + REACH) * ((bins - 2) / (2 * REACH)), bins - 3).astype(np.int64)
        slots[shares <= 0] = 0
        slots[shares >= 1] = bins - 1
        sums["histogram"][place] += np.bincount(members * bins + slots, minlength=2 * bins).reshape(2, bins)
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


# -- reasons to doubt a model, in words to show after a result -----------------------------------------


def caveats(model: Model) -> list[str]:
    """The model's own warning about predicting with it, as a list."""
    return [] if model.caveat is None else [model.caveat]


def majority_doubt(accuracy: float, labels: Array, where: str, balanced: float | None = None) -> list[str]:
    """A warning if always answering the most frequent label would be right more often.

    balanced: the balanced accuracy, where it is known: a model that weighs classes is to be judged by that.
    """
    classes, counts = np.unique(labels, return_counts=True)
    share = float(counts.max() / len(labels))
    if accuracy >= share:
        return []
    most, why = classes[int(np.argmax(counts))].item(), _UNLEARNT
    if balanced is not None and balanced > 1 / len(classes):
        why = (
            f"That is so where classes were weighed to count alike (balanced accuracy {percent(balanced)}); "
            "otherwise check columns, scales and parameters."
        )
    told = f"{percent(accuracy)} on {where} is worse than always answering {most!r} ({percent(share)})."
    return [f"{told} {why}"]


def mean_doubt(r2: float, where: str = "these rows") -> list[str]:
    """A warning if always answering the mean would be more accurate."""
    told = f"R² {r2:.4f} on {where} is worse than always answering the mean of the targets (0). {_UNLEARNT}"
    return [told] if r2 < 0 else []


def chance_doubt(accuracy: float, labels: Array, where: str) -> list[str]:
    """A warning if the model is no better than guessing, where classes count alike."""
    count = len(np.unique(labels))
    if accuracy > 1 / count:
        return []
    return [
        f"{percent(accuracy)} on {where}, all classes counting alike, is no better than drawing lots among "
        f"{count} classes. {_UNLEARNT}"
    ]


def gap_doubt(train: float, test: float, where: str = "test rows", shown: Any = percent) -> list[str]:
    """A warning if the model has learnt its training rows by heart."""
    if train - test < GAP:
        return []
    return [
        f"{shown(train)} on training rows but {shown(test)} on {where}: the model has learnt the "
        "training rows by heart. Use a smaller width, fewer layers or a larger ridge, or more rows."
    ]


def held_out_accuracy(model: Model, balanced: bool) -> float | None:
    """Accuracy or R² on rows held out of what was chosen: of the model that was calibrated, or of its trial.

    The trial may have been a smaller one. balanced: classes count alike, and so do mistakes of the trial.
    """
    if model.spread is not None:
        return float(model.spread.metrics["r2"] or 0.0)
    known = None if model.calibration is None else model.calibration.metrics.get("accuracy")
    if model.tried and known is not None and not balanced:
        return float(known)
    chosen = (tried.errors for tried in model.tried if tried.chosen and tried.errors is not None)
    return next((1.0 - errors for errors in chosen), None)


def doubts_about(
    model: Model, data: Table, test: Table | None, accuracy: dict[str, Any], plain: bool, balanced: bool
) -> list[str]:
    """The warnings about this model.

    plain: whether no schema describes the rows. balanced: whether classes count alike, so that their shares
    are no measure.
    """
    doubts: list[str] = []
    columns = data.schema.used if plain and data.schema is not None else ()
    if names := [one.name for place, one in enumerate(columns) if numbers_the_rows(data.features[:, place])]:
        drops = " ".join(f"--drop {name}" for name in names)
        doubts.append(
            f"the model uses {', '.join(map(repr, names))}, whole numbers that are nearly all different, "
            f"like an identifier. Such a column teaches nothing about new rows; leave it out with {drops}."
        )
    if not model.predicts:  # which the page says beside the accuracy
        return doubts
    assert data.labels is not None
    if caveat := model.caveat:  # why accuracies are low, if they are
        return [*doubts, caveat]
    if model.labels:
        return doubts
    if model.classes is None:
        other, where = ("test", "test rows") if test is not None else ("held_out", "rows held out")
        if (reached := accuracy[other]) is None:
            return doubts + mean_doubt(accuracy["train"], "training rows")
        gap = gap_doubt(accuracy["train"], reached, where, "R² {:.4f}".format)
        return doubts + mean_doubt(reached, where) + gap
    known = model.calibration
    error = None if known is None else known.metrics.get("ece")
    chance = 0.0 if known is None else 1.5 / max(1, known.rows) ** 0.5
    if known is not None and error is not None and error >= max(MISCALIBRATED, chance):
        doubts.append(
            f"probabilities are off by {percent(error)} on average on {known.rows:,} rows held out: do not "
            "use them as they are. Look for codes among the numbers, which a schema can make categories."
        )
    if test is not None and test.labels is not None:
        doubts += [] if balanced else majority_doubt(accuracy["test"], test.labels, "test rows")
        doubts += gap_doubt(accuracy["train"], accuracy["test"])
    if accuracy["held_out"] is not None:
        told = chance_doubt if balanced else majority_doubt
        doubts += told(accuracy["held_out"], data.labels, "rows held out")
        if test is None:
            doubts += gap_doubt(accuracy["train"], accuracy["held_out"], "rows held out")
    elif not balanced:
        doubts += majority_doubt(accuracy["train"], data.labels, "training rows")
    return doubts
