"""Probabilities that mean what they say: a calibration fitted to rows that a model was not trained on.

    minimise  sum_i lse(z_i) - (1 - e) z_i[y_i] - e mean(z_i)       z_i = slope s_i + b,  e = 1 / (1 + rows)

the log loss with one row's weight spread evenly over the classes, so that rows without a mistake do not ask
for an infinite slope. It is convex, and a sum over rows: clients answer with their terms at a list of
candidates, `Search` chooses the next ones. Without biases (a temperature, 1 / slope) one list is enough; with
them (Platt's two numbers, for two classes) Newton's steps follow, each with its line search in one list.
Slopes are positive and bounded. Scores that say hardly more of these rows than how frequent the classes are
get the smallest slope and the biases of those frequencies. One exchange more evaluates the calibrated models.
Where a method chose its penalty by the rows, the slope follows the spread of the final scores.

The models are those of a choice, each scored on the fold that it was not trained on, or that of a trial.
Clients with models of their own make them of the other rows, and the same exchanges calibrate those.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.calibration import FLAT, Calibration, LabelCalibration, Spread, kept_from
from fedsolve.container import to_bytes, with_prefix
from fedsolve.errors import CalibrationWarning, DataError
from fedsolve.federation.engine import Spec
from fedsolve.federation.folds import Part
from fedsolve.federation.messages import Request, Term, Total
from fedsolve.federation.method import SCORES, Method, Run
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.preparing import LARGEST
from fedsolve.federation.recipe import Recipe, Stage, StagedRun, expected_training
from fedsolve.model import Model
from fedsolve.scoring.candidates import sums_of_rows
from fedsolve.scoring.evaluation import (
    COUNTS,
    evaluation_from,
    models_asked,
    models_question,
    sums_of,
    tally_term,
)
from fedsolve.scoring.quality import truth_of
from fedsolve.scoring.residuals import RegressionEvaluation, error_sums, origin_of

LOSSES, TALLY, SPREAD = "calibrate", "calibrate-tally", "spread"

SLOPES = FLAT * 2.0 ** (np.arange(35) / 2)
"""The slopes that are tried first: scores may be estimates of ones and zeros, or logits."""
SHIFTS = np.linspace(-6.0, 6.0, 9)
"""The biases of the second class against the first that are tried first."""
FRACTIONS = np.array([1.0, 0.5, 0.25, 1 / 16, 2.0])
"""Fractions of a Newton step that are tried in one exchange."""
LEAST_ROWS, LEAST_SPREAD = 10, 40
"""With fewer rows held out nothing is calibrated, and a regression has no intervals."""

_TOO_FEW = "{} rows are held out, and {} are the fewest that say something"
_NUMBERS = 1 << 21
"""The most logits in memory at once."""
_DIVIDED = 60
_SAYS_MORE = 3.0
"""Log-likelihood that scores must gain over the frequencies of the classes: without signal 1 in 70 does."""
_NEARLY = 0.9  # sites count what they tell; this side estimates it
_CLOSE = 1e-3
"""Newton decrement per row below which the objective is as good as quadratic."""


class HeldOutRun(Run[Any]):
    """Questions about models, each on the rows that it was not trained on.

    models: by name, each with those rows; first, one of them. members: the runs that made them, where they
    are still known. searches: of the calibrations that are asked for, by name. found: what a model keeps of
    the answers, by name.
    """

    exchanges = 1

    def __init__(
        self,
        method: Method[Any],
        spec: Spec,
        models: Mapping[str, tuple[Model, Part]],
        searches: Mapping[str, Search],
    ) -> None:
        super().__init__(method, spec)
        self.models, self.first = dict(models), next(iter(models.values()))[0]
        self.searches = searches
        self.exchanges += max((search.exchanges for search in searches.values()), default=0)
        self.members: Mapping[str, Run[Any]] = {}
        self.found: dict[str, Any] = {}


class CalibrationRun(HeldOutRun):
    """Asks for losses until calibrations are found, then for the tally of the calibrated models."""

    _complete = False

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self._complete:
            return None
        if not self.searches:
            raise DataError("the model is not one to predict with")
        if self.found:
            for model, _ in self.models.values():
                model.calibration = self.found.get("shared")
        lists = {} if self.found else {name: one.candidates for name, one in self.searches.items()}
        kind, number = TALLY if self.found else LOSSES, self.offset + len(self.history)
        self._asked = Request(kind, number, 0, clients, *models_question(self.models, lists))
        return self._asked

    def absorb(self, total: Total) -> None:
        if self.found:
            seen = evaluation_from(self.first, total)
            histogram: Array | None = None
            if self.spec.labels or self.spec.outputs == 2:
                histogram = seen.sums["histogram"][..., 0, :, :].astype(np.int32)
            metrics = {name: value if np.isfinite(value) else None for name, value in seen.measures().items()}
            shared = dataclasses.replace(self.found["shared"], metrics=metrics, thresholds=histogram)
            self.found["shared"], self._complete = shared, True
            self.record(total, "held-out evaluation")
            return
        rows, sums = total.count("rows"), total.term.arrays
        # Weights of whole numbers stand for rows that are there so often; shares of one do not.
        counted = max(float(sums[f"{name}.class_rows"].sum()) for name in self.searches)
        if max(rows, counted) < LEAST_ROWS:
            raise DataError(_TOO_FEW.format(rows, LEAST_ROWS))
        for name, search in self.searches.items():
            search.absorb(with_prefix(sums, f"{name}."))
        if all(search.steps == search.exchanges for search in self.searches.values()):
            found = {name: search.result() for name, search in self.searches.items()}
            if self.spec.labels:
                slopes, biases = zip(*found.values(), strict=True)
                shifts = np.array([bias[1] - bias[0] for bias in biases])
                self.found = {"shared": LabelCalibration(np.array(slopes), shifts, rows)}
            else:
                self.found = {name: Calibration(*one, rows) for name, one in found.items()}
            self._complete = "shared" not in self.found
        self.record(total)

    def stored(self) -> dict[str, Any]:
        return {
            "found": {name: calibration.parts() for name, calibration in self.found.items()},
            "searches": {name: [one.steps, one.best, one.candidates] for name, one in self.searches.items()},
            "complete": self._complete,
        }

    def take_stored(self, kept: dict[str, Any]) -> None:
        for name, search in self.searches.items():
            search.steps, search.best, search.candidates = kept["searches"][name]
        self.found = {name: kept_from(*parts) for name, parts in kept["found"].items()}
        self._complete = kept["complete"]


class SpreadRun(HeldOutRun):
    """Two questions: sums of errors, then counts. found: the spread, without counts after the first."""

    exchanges = 2

    def request(self, clients: tuple[str, ...]) -> Request | None:
        half = self.found.get("spread")
        if half is not None and half.counts.size:
            return None
        at = {"origin": origin_of(self.first)} if half is None else {"scale": half.scale}
        number = self.offset + len(self.history)
        self._asked = Request(SPREAD, number, 0, clients, *models_question(self.models, at))
        return self._asked

    def absorb(self, total: Total) -> None:
        rows = total.count("rows")
        if rows < LEAST_SPREAD:
            raise DataError(_TOO_FEW.format(rows, LEAST_SPREAD))
        if not self.found:
            origin = origin_of(self.first)  # from where the targets of all models are counted
            seen = RegressionEvaluation(rows, total.term.arrays, origin)
            _, square, middle, variance = seen._moments
            scale, deviation = (np.where(v > 0, np.sqrt(v), 1.0) for v in (square, variance))
            metrics = {name: v if np.isfinite(v) else None for name, v in seen.measures().items()}
            half = Spread(origin + middle, deviation, scale, np.zeros((0, 0)), rows, metrics)
            self.found = {"spread": half}
            self.record(total, "held-out errors")
            return
        spread = dataclasses.replace(self.found["spread"], counts=np.rint(total["counts"]), rows=rows)
        spread.reach()  # refused here, where it would be later
        self.found = {"spread": spread}
        self.record(total, "held-out intervals")

    def stored(self) -> dict[str, Any]:
        return {"kept": self.found["spread"].parts() if self.found else None}

    def take_stored(self, kept: dict[str, Any]) -> None:
        self.found = {} if kept["kept"] is None else {"spread": kept_from(*kept["kept"])}


# -- the client's side -----------------------------------------------------------------------------


@step(LOSSES, over_rows=True)
def answer_calibration(data: ClientData, request: Request, memory: Memory) -> Term:
    """Sums of the log losses of the rows held out, at every candidate; of this client's own model too.

    Scores of the models are kept while the same are asked about: of every model, scores and true classes by
    name, and number and weights of the rows that it was not trained on.
    """
    lists = with_prefix(dict(request.arrays), "at.")
    models = {name: array for name, array in request.arrays.items() if not name.startswith("at.")}
    digest = hashlib.sha256(to_bytes(models, request.note)).hexdigest()
    kept = memory.cache.get(LOSSES)
    if kept is None or kept[0] != digest:
        found = []
        for _, model, held in models_asked(request, memory):
            rows, scored = held.of(data), {}
            truth = truth_of(model, rows.own_labels)
            for name in ("shared",) if model.labels else lists:
                scorer = model.personalised(held.rest.of(data), memory.states) if name == "own" else model
                parts = [scorer.decision_function(rows.features(s, rows.source.dtype)) for s in rows.spans()]
                scored[name] = np.concatenate([np.zeros((0, scorer.outputs)), *parts]), truth
            if model.labels:
                scores, _ = scored.pop("shared")
                labels = enumerate(zip(scores.T, truth.T, strict=True))
                scored = {f"label{n}": (np.column_stack([1.0 - s, s]), true) for n, (s, true) in labels}
            found.append((scored, len(rows), rows.own_weights))
        kept = memory.cache[LOSSES] = (digest, found)
    term = Term(counts={"rows": 0})
    for scored, count, weights in kept[1]:
        term.counts["rows"] += count if weights is None else int(np.count_nonzero(weights))
        for name, candidates in lists.items():
            with np.errstate(over="ignore", invalid="ignore"):  # refused by name where the term is checked
                scores, codes = scored[name]
                sums = calibration_sums(scores, codes, candidates, weights)
            for key, array in sums.items():
                term.arrays[f"{name}.{key}"] = term.arrays.get(f"{name}.{key}", 0.0) + array
    return term


@step(TALLY, over_rows=True, counts=COUNTS)
def answer_tally(data: ClientData, request: Request, memory: Memory) -> Term:
    """The sums of an evaluation over rows held out, each scored by the model not trained on it."""
    whole: dict[str, Array] = {}
    count = 0
    for _, model, held in models_asked(request, memory):
        rows = held.of(data)
        count += len(rows)
        for name, more in sums_of(model, rows).items():
            whole[name] = whole[name] + more if name in whole else more
    return tally_term(whole, count)


@step(SPREAD, over_rows=True, counts=("counts",))
def answer_held_out_errors(data: ClientData, request: Request, memory: Memory) -> Term:
    """Of the rows held out, each by the model that was not trained on it: sums of errors, or their counts."""
    term = Term(counts={"rows": 0})
    scale, origin = request.arrays.get("at.scale"), request.arrays.get("at.origin")
    for _, model, held in models_asked(request, memory):
        rows = held.of(data)
        if scale is None:
            sums = {"errors": error_sums(model, rows, origin=origin)["errors"]}
        else:
            nought = np.zeros_like(scale)
            spread = Spread(nought, nought + 1, scale, nought)
            sums = {"counts": error_sums(model, rows, spread)["covered"]}
        term.add(Term(sums, {"rows": len(rows)}))
    return term


# -- the fit ---------------------------------------------------------------------------------------


def calibration_sums(
    scores: Array, codes: Array, candidates: Array, weights: Array | None = None
) -> dict[str, Array]:
    """A client's term of the objective at every candidate (slope, biases...), one per row of `candidates`.

    scores: (rows, classes). codes: (rows,) positions of the true classes. With a single column of candidates
    there are no biases. Gives `class_rows`, `linear` (sum of s[y] and of mean(s)), and at each candidate
    `normaliser` = sum lse(z), its gradient and its Hessian in (slope, biases).
    """
    classes, count = scores.shape[1], candidates.shape[1]
    counted = np.ones(len(scores)) if weights is None else weights
    true = np.take_along_axis(scores, codes[:, None], axis=1)[:, 0] if len(scores) else np.zeros(0)
    normaliser = np.zeros(len(candidates))
    gradient = np.zeros((len(candidates), count))
    hessian = np.zeros((len(candidates), count, count))
    span = max(1, _NUMBERS // max(1, len(candidates) * classes))
    slope, biases = candidates[:, :1, None], candidates[:, None, 1:]
    for start in range(0, len(scores), span):
        part, weight = scores[start : start + span], counted[start : start + span]
        logits = slope * part + (biases if count > 1 else 0.0)  # (candidates, rows, classes)
        largest = logits.max(axis=2, keepdims=True)
        shares = np.exp(logits - largest)
        whole = shares.sum(axis=2, keepdims=True)
        normaliser += (largest + np.log(whole))[:, :, 0] @ weight
        shares /= whole
        expected = np.sum(shares * part, axis=2)
        weighted, apart = shares * weight[:, None], part - expected[:, :, None]
        gradient[:, 0] += expected @ weight
        hessian[:, 0, 0] += np.sum(weighted * apart**2, axis=(1, 2))
        if count > 1:
            told = weighted.sum(axis=1)
            gradient[:, 1:] += told
            hessian[:, 0, 1:] += np.sum(weighted * apart, axis=1)
            hessian[:, 1:, 1:] += told[:, :, None] * np.eye(classes) - weighted.transpose(0, 2, 1) @ shares
    hessian[:, 1:, 0] = hessian[:, 0, 1:]
    return {
        "class_rows": np.bincount(codes, counted, minlength=classes).astype(np.float64),
        "linear": np.array([counted @ true, counted @ scores.mean(axis=1)]),
        "normaliser": normaliser,
        "gradient": gradient,
        "hessian": hessian,
    }


class Search:
    """The minimiser of the objective: asks for `candidates`, `absorb` takes their sums, so many `exchanges`.

    candidates: (candidates, 1 or 1 + classes), a slope and biases each.
    tried: of how many methods this is the best on the same rows. Of two classes the slope is a share
    log(tried) / gain smaller, gain being the log-likelihood over the frequencies of the classes: about as
    much as the best of so many gains by chance.
    """

    def __init__(self, biases: bool, classes: int, tried: int = 1) -> None:
        self.biases, self.classes, self.tried = biases, classes, tried
        self.exchanges = 1 if not biases else 3 if classes == 2 else 5
        self.steps = 0
        self.best: Array | None = None
        if biases and classes == 2:
            slope, shift = np.meshgrid(SLOPES[::2], SHIFTS / 2)
            self.candidates = np.stack([slope.ravel(), -shift.ravel(), shift.ravel()], axis=1)
        else:
            self.candidates = np.zeros((len(SLOPES), 1 + classes * biases))
            self.candidates[:, 0] = SLOPES

    def absorb(self, sums: Mapping[str, Array]) -> None:
        candidates = self.candidates
        (true, mean), count, curvatures = sums["linear"], sums["class_rows"].sum(), sums["hessian"]
        # Rows by class, one row's weight of them spread evenly.
        drawn = (sums["class_rows"] * count + count / self.classes) / (1.0 + count)
        spread = 1.0 / (1.0 + count)
        linear = np.concatenate([[(1 - spread) * true + spread * mean], drawn])[: candidates.shape[1]]
        losses, slopes_of = sums["normaliser"] - candidates @ linear, sums["gradient"] - linear
        place = int(np.argmin(losses))
        self.steps += 1
        done = self.steps == self.exchanges
        # Without scores the objective is the least with the logarithms of the shares as biases.
        rates = np.log(drawn / drawn.sum())
        told = float(-drawn @ rates)
        few = self.biases and self.classes == 2 and sums["class_rows"].min() < LEAST_ROWS
        if done and (few or losses[place] >= told - _SAYS_MORE):
            # The scores say no more than chance would, or nobody can tell.
            self.best = np.concatenate([SLOPES[:1], rates])
            warnings.warn(
                "the probabilities are little more than the shares of the classes: scores say hardly more "
                "of the rows held out, or a class has fewer than ten of them.",
                CalibrationWarning,
                stacklevel=2,
            )
            return
        if not self.biases:
            self.best = np.array([_root(candidates[:, 0], slopes_of[:, 0], curvatures[:, 0, 0], place)])
            return
        self.best = candidates[place]
        # The loss does not change when all biases do: the smallest of the solutions is wanted.
        step = np.linalg.lstsq(curvatures[place], -slopes_of[place], rcond=1e-10)[0]
        longest = -0.9 * self.best[0] / step[0] if step[0] < 0 else np.inf  # slopes stay positive
        lengths = np.minimum(FRACTIONS, longest)
        self.candidates = np.concatenate([self.best[None], self.best + lengths[:, None] * step])
        if done and -slopes_of[place] @ step < _CLOSE * count:
            self.best = self.candidates[1]  # so near to the minimum that the whole step needs no proof
        if done and self.classes == 2 and self.tried > 1:
            # Biases follow, so that the mean probability stays that of the class.
            less = -min(1.0, math.log(self.tried) / (told - losses[place])) * (self.best[0] - SLOPES[0])
            apart = less + self.best[0] - candidates[place, 0]
            wanted = slopes_of[place, 1:] + apart * curvatures[place, 1:, 0]
            moved = np.linalg.lstsq(curvatures[place, 1:, 1:], -wanted, rcond=1e-10)[0]
            self.best = np.concatenate([[self.best[0] + less], candidates[place, 1:] + moved])

    def result(self) -> tuple[float, Array | None]:
        """Slope and biases."""
        assert self.best is not None
        biases = self.best[1:] - self.best[1:].mean() if len(self.best) > 1 else None
        return float(self.best[0]), biases


def _root(slopes: Array, derivative: Array, curvature: Array, place: int) -> float:
    """Where the derivative vanishes: between the two slopes at which its sign changes, by a cubic."""
    other = place + (1 if derivative[place] < 0 else -1)
    if not 0 <= other < len(slopes):
        return float(slopes[place])
    two = slice(min(place, other), max(place, other) + 1)
    from scipy.interpolate import CubicHermiteSpline  # brings all of scipy.optimize along

    inside = CubicHermiteSpline(slopes[two], derivative[two], curvature[two]).roots(extrapolate=False)
    return float(inside[0]) if len(inside) else float(slopes[place])


# -- the stage -------------------------------------------------------------------------------------


def search_for(recipe: Recipe[Any], spec: Spec, tried: int = 1) -> Search:
    """The search for the calibration of this recipe; with several labels a row, of each label."""
    if spec.labels:  # each is a problem of two classes, its absence and its presence
        return Search(True, 2, tried)
    by_default = recipe.class_weight is not None or spec.outputs == 2
    return Search(by_default if recipe.biases is None else recipe.biases, spec.outputs, tried)


def room(whole: StagedRun[Any]) -> float:
    """How many numbers choice and training may tell, besides calibration, where a limit is set."""
    recipe, spec = whole.recipe, whole.spec
    assert recipe.told is not None
    if whole.history and whole.history[0].metrics.get(LARGEST, 0.0) < _DIVIDED:
        return 0.0  # sites do not divide rows of which few are of one class
    held = float(spec.features)
    if (schema := recipe.schema) is not None and schema.extractor is None:
        numbers = len(schema.places("number", "date"))
        held = numbers + (schema.width - numbers) / 6  # an indicator holds that much of a number
    besides = whole.rows // 2 if recipe.calibrate else 0  # counts of rows, and lists of sums
    if recipe.calibrate and (spec.classes is not None or spec.labels):
        search = search_for(recipe, spec)
        first, width = search.candidates.shape
        later = (len(FRACTIONS) + 1) * (search.exchanges - 1)
        besides = (len(spec.labels) or 1) * ((first + later) * (1 + width + width**2) + besides)
    return _NEARLY * recipe.told * whole.rows * (held + 1) - besides


def _try(whole: StagedRun[Any]) -> Run[Any] | None:
    if whole.folded:
        return None
    if whole.recipe.told is not None and whole.rows:
        numbers = 2 * (sums_of_rows(whole.spec) + whole.method.traffic(whole.spec, whole.rows)[0])
        if whole.rows < 3 * whole.spec.features or numbers > room(whole):
            warnings.warn(
                f"the probabilities are not calibrated: {whole.rows:,} rows of {whole.spec.features:,} "
                "features are too few to be told about twice.",
                CalibrationWarning,
                stacklevel=2,
            )
            return None
    return whole.opened(whole.method.start(whole.spec), whole.held_out.rest)


def _tried(whole: StagedRun[Any], run: Run[Any]) -> None:
    whole.folded, whole.folded_by = {"0": (whole.described(run.model()), whole.held_out)}, {"0": run}
    whole.scores = [run.history[-1].metrics.get(SCORES) if run.history else None]


def _start(whole: StagedRun[Any]) -> HeldOutRun | None:
    if not whole.folded:  # there was no room for a trial
        return None
    run: HeldOutRun
    if whole.spec.classes is None and not whole.spec.labels:
        run = SpreadRun(whole.method, whole.spec, whole.folded, {})
    else:
        tried = max(1, sum(one.loss is not None for one in whole.tried))
        first, _ = next(iter(whole.folded.values()))
        names = ["shared"] * first.predicts + ["own"] * first.personalises
        if whole.spec.labels:
            names = [f"label{place}" for place in range(whole.spec.outputs)]
        searches = {name: search_for(whole.recipe, whole.spec, tried) for name in names}
        run = CalibrationRun(whole.method, whole.spec, whole.folded, searches)
    run.members = whole.folded_by
    return run


def _expected(whole: StagedRun[Any]) -> int:
    if whole.spec.classes is None and not whole.spec.labels:
        return SpreadRun.exchanges
    return search_for(whole.recipe, whole.spec).exchanges + 1


TRIAL = Stage(
    "trial",
    _try,
    _tried,
    lambda whole: 0 if whole.folded or whole.method.chooses else expected_training(whole),
    optional=True,
)
CALIBRATION = Stage(
    "calibration",
    _start,
    lambda whole, run: whole.calibrations.update(run.found),
    _expected,
    optional=True,
)
