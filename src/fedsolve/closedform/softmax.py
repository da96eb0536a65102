"""Softmax: multinomial logistic regression with the optimum of the pooled rows, from sums.

    minimise  sum_i w_i CE(softmax(x_i W + b), y_i) + ridge/2 |W|²          the intercept b is not penalised
    gradient  sum_i w_i [x_i, 1]ᵀ (p_i - y_i) + ridge W                     (d + 1) x C, with the loss

Boehning (1992): the Hessian is nowhere above 1/2 (I - 11ᵀ/C) ⊗ G, so M = G/2 + ridge I, of AFL's Gram matrix
about the mean and factorised once, majorises it for all classes at once. The server takes L-BFGS steps about
M (`descent`); the gradient at W = 0 follows from AFL's sums, so the first step costs no exchange.

Small problems take exact Newton steps instead: a client adds its Hessian to the gradient. Two classes do
unless a bound is asked for, with one column of weights as in scikit-learn: the sum is p (1 - p) [x, 1]ᵀ[x,
1], of d x d. Coefficients with standard errors are what `statistics.glm` is for.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
from scipy.linalg import block_diag

from fedsolve.arrays import Array
from fedsolve.closedform import afl
from fedsolve.closedform.descent import (
    FLAT,
    Curvature,
    Descent,
    anchored,
    at_zero,
    direction,
    flattest,
    inner,
    penalised,
)
from fedsolve.closedform.predictors import SoftmaxModel
from fedsolve.closedform.solvers import EPS
from fedsolve.closedform.sums import (
    MOMENTS,
    Accumulator,
    base_block,
    base_of,
    cached_rows,
    check_sums,
    moments_block,
    preparation_block,
    preparation_in,
)
from fedsolve.container import digest
from fedsolve.errors import DataError, DivergenceError
from fedsolve.federation.method import Block, Federation, Method, Request, Run, Spec, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.model import Model
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.tables.preparation import Preparation

FIRST_STEP = 4.0
"""How far the first step goes along M^-1 g: at W = 0 the bound is far above the loss that it bounds."""

USUAL_STEPS = 12
"""How many gradients a run is expected to take."""

NEWTON_SIDE = 256
"""The largest (d + 1) x C for which exact Newton steps are taken unless asked for: 263 kB each."""

_PAIRS = 20
_NEWTON_GOAL = 1e-7  # the step before was near the root of this, so it costs one exchange at most
_UPWARDS = 1e-14  # below this share of its norms, what a step tells of a convex function is rounding
_AUTO_RIDGE = 0.002


@register(
    paper="Boehning 1992; Nocedal and Wright 2006",
    exchanges="1, and one per gradient: about 10 at the default tolerance",
    up="Gram and cross matrix once (as afl), then gradients (d x C); small problems: Hessians",
    down="weights, d x C",
)
@dataclass(frozen=True)
class Softmax(Method[SoftmaxModel]):
    """Softmax: multinomial logistic regression at the pooled optimum.

    tolerance: the run ends when the preconditioned gradient is no longer than this share of the weights, both
        measured by M (or by the Hessian). 2e-3 is enough to classify; coefficients to six digits need 1e-8.
    steps: the most gradients that are asked for; with tolerance 0, exactly so many.
    """

    ridge: float | None = parameter(
        None, "Penalty on the weights.", least=0, none=f"{_AUTO_RIDGE:g} of a column's mean square sum"
    )
    intercept: bool = parameter(True, "Fit an intercept, which is not penalised.")
    scale: Literal["standard"] | None = parameter(None, "Standardise features: one exchange more.")
    tolerance: float = parameter(2e-3, "Relative length of the last step.", least=0)
    steps: int = parameter(100, "Most gradients asked for.", least=1)
    curvature: Literal["auto", "exact", "bound"] = parameter(
        "auto",
        f"Newton steps by Hessians, or a bound; auto: of two classes, or up to {NEWTON_SIDE} coefficients.",
    )

    @classmethod
    def trial(cls) -> Self:
        return cls(ridge=1.0)

    def start(self, spec: Spec) -> SoftmaxRun:
        return SoftmaxRun(self, spec)

    def traffic(self, spec: Spec, rows: int) -> tuple[int, int]:
        columns = 1 if spec.outputs == 2 else spec.outputs
        count = (spec.features + 1) * columns
        hessian = count * (count + 1) // 2 if _newton(self, count, spec.outputs) else 0
        steps = min(self.steps, USUAL_STEPS)
        return steps * (count + hessian), steps * count

    def scaled(self, share: float) -> Softmax:
        """The same for a share of the rows, with a penalty in proportion."""
        return self if self.ridge is None else replace(self, ridge=self.ridge * share)

    def over(self, base: Model) -> SoftmaxOver:
        """The same on what a model makes of its rows, such as the last layer of a DeepAFL."""
        return SoftmaxOver(self, base)

    def collect(self, federation: Federation) -> Total:
        """AFL's sums, which a later run can begin with; `later_classes.united` adds those of newcomers."""
        if not self.intercept:
            raise DataError("collect() is for runs with an intercept.")
        return afl.AFL(intercept=True, scale=self.scale).collect(federation)

    def after(self, total: Total, model: SoftmaxModel) -> SoftmaxAfter:
        """The same, begun with the sums of everybody's rows and the weights of a model of some classes."""
        return SoftmaxAfter(self, total, model)


@dataclass(frozen=True)
class SoftmaxAfter(Method[SoftmaxModel]):
    """Softmax that goes on from an earlier model: nobody is asked for a Gram matrix again.

    total: AFL's sums over all rows, old and new. Gradients are everybody's, so the optimum is the joint one.
    """

    key: ClassVar[str] = "softmax-after"

    method: Softmax
    total: Total
    model: SoftmaxModel

    def __post_init__(self) -> None:
        if self.method.scale is not None or not self.method.intercept or self.model.base is not None:
            raise DataError("going on from a model is for runs on the rows themselves, with an intercept.")

    def parameters(self) -> dict[str, Any]:
        return self.method.parameters()

    def start(self, spec: Spec) -> SoftmaxRun:
        if spec.classes is None or self.total["cross"].shape[1] != spec.outputs:
            raise DataError(
                f"the sums are of {self.total['cross'].shape[1]} classes, the federation has {spec.outputs}."
            )
        assert self.model.classes is not None
        unknown = np.setdiff1d(self.model.classes, spec.classes)
        if len(unknown):
            raise DataError(f"the model knows the class {unknown[0]!r}; the federation does not. Declare it.")
        known, intercepts = self.model.plain()
        places = np.searchsorted(spec.classes, self.model.classes)
        weight, intercept = np.zeros((len(known), spec.outputs)), np.zeros(spec.outputs)
        weight[:, places], intercept[places] = known, intercepts
        run = SoftmaxRun(self.method, spec)
        run.agree({"after": digest({}, {"weight": weight, "intercept": intercept})})
        run.known = self.total, weight, intercept
        return run


def _newton(method: Any, coefficients: int, outputs: int) -> bool:
    """Whether Hessians of so many coefficients are asked for."""
    small = outputs == 2 or coefficients <= NEWTON_SIDE
    return bool(method.curvature == "exact" or (method.curvature == "auto" and small))


@dataclass(frozen=True)
class SoftmaxOver(Method[SoftmaxModel]):
    """Softmax on the representation of a trained model, which travels to the clients once."""

    key: ClassVar[str] = "softmax-over"

    method: Softmax
    base: Model

    def __post_init__(self) -> None:
        base_block(self.base)  # refuses what cannot be a base

    def parameters(self) -> dict[str, Any]:
        return self.method.parameters()

    def start(self, spec: Spec) -> SoftmaxRun:
        if spec.features != self.base.features:
            raise DataError(
                f"the model takes rows of {self.base.features} features; the federation has {spec.features}."
            )
        return SoftmaxRun(self.method, spec, base_block(self.base))


class SoftmaxRun(Descent, Run[SoftmaxModel]):
    """Sums of AFL, then a gradient per exchange, at the trial point of a line search.

    weight: (width + 1, columns), the intercept in its last row, for the classes that occur; hessian belongs
    to it too.
    """

    method: Softmax
    transient: ClassVar[frozenset[str]] = frozenset({"base", "known", "scale", "_metric"})
    scales: ClassVar[bool] = True

    def __init__(self, method: Softmax, spec: Spec, base: Block | None = None) -> None:
        Descent.__init__(self)
        Run.__init__(self, method, spec)
        self.complete = False
        self.scale = method.scale if self.scales else None
        self.base = base
        self.known: tuple[Total, Array, Array] | None = None
        if base is not None:
            self.agree({"over": digest(base.note, base.arrays)})
        if spec.classes is None:
            raise DataError("softmax regression is for classes; these are targets of a regression. Use AFL.")
        self.single = spec.outputs == 2
        self.exact = self.single
        self.present = np.ones(spec.outputs, dtype=bool)
        self.whole: Array | None = None
        self.hessian: Array | None = None
        self.ridge = 0.0
        self.steps: list[Array] = []
        self.changes: list[Array] = []
        self._metric: Curvature | None = None

    # -- what is asked -----------------------------------------------------------------------------

    @property
    def exchanges(self) -> int:
        if self.complete:
            return len(self.history)
        return self.method.steps + 1 + (self.scale is not None)

    @property
    def expected(self) -> int:
        return min(self.exchanges, max(len(self.history) + 1, USUAL_STEPS))

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self.complete:
            return None
        if self.base is not None and base_of(self.chain) is None:
            self.chain.append(self.base)
        if self.known is not None and self.whole is None:
            self._begin(*self.known)
        if self.scale is not None and not preparation_in(self.chain):
            return self.ask(MOMENTS, 0, clients)
        if self.whole is None:
            return self.ask(afl.KIND, 0, clients, {"intercept": self.method.intercept})
        weight, intercept = self._columns_of(self.trial())
        arrays = {"weight": weight, "intercept": intercept}
        return self.ask(KIND, self.gradients + 1, clients, {"exact": self.exact}, arrays)

    def _begin(self, total: Total, weight: Array, intercept: Array) -> None:
        """Take sums that are known, and try these weights of raw rows first."""
        self._take_sums(total)
        prepared = preparation_in(self.chain)
        assert prepared is not None
        aim = np.vstack([weight, intercept + prepared.mean @ weight])
        aim = aim[:, 1:] - aim[:, :1] if self.single else aim[:, self.present]
        # Down the line from zero, where loss and gradient are known, to these weights.
        self.towards, self.reach = self.weight - aim, 1.0

    def _columns_of(self, point: Array) -> tuple[Array, Array]:
        """Weight (width, columns) and intercept of all classes; one that has no rows is never predicted."""
        if self.single:
            return np.ascontiguousarray(point[:-1]), point[-1].copy()
        weight = np.zeros((len(point) - 1, self.spec.outputs))
        intercept = np.full(self.spec.outputs, afl.NEVER)
        weight[:, self.present], intercept[self.present] = point[:-1], point[-1]
        return weight, intercept

    # -- what is made of the answer ----------------------------------------------------------------

    def absorb(self, total: Total) -> None:
        if self.scale is not None and not preparation_in(self.chain):
            self.add(moments_block(total, self.scale, intercept=False))
            self.record(total, "moments")
        elif self.whole is None:
            self._take_sums(total)
            self.record(total, "sums")
        else:
            self._take_gradient(total)

    def _take_sums(self, total: Total) -> None:
        """The Gram matrix, and the gradient at W = 0, where every class that occurs is as likely."""
        check_sums(total, self.spec)
        counts = total["label_square"]
        rows, self.present = float(np.sum(counts)), counts > 0
        classes = int(np.sum(self.present))
        counts, cross, gram = counts[self.present], total["cross"][:, self.present], total["gram"]
        if self.method.intercept:
            mean = total["feature"] / rows
            gram = gram - rows * np.outer(mean, mean)
            cross = cross - np.outer(mean, counts)
            if preparation_in(self.chain) is None:
                nothing = np.zeros(self.spec.outputs)
                self.add(preparation_block(Preparation(mean, np.ones_like(mean), nothing)))
        slope = np.vstack([cross.sum(axis=1, keepdims=True) / classes - cross, rows / classes - counts[None]])
        if self.method.intercept:
            # From here on rows are counted from their mean, and the mean of what is left is zero.
            slope[:-1] = -cross
        else:
            slope[-1] = 0.0
        given = self.method.ridge
        self.ridge = _AUTO_RIDGE * float(np.trace(gram)) / len(gram) if given is None else given
        if self.ridge == 0:
            self._check_rank(gram)
        self.gradient = np.ascontiguousarray(slope[:, 1:] if self.single else slope)
        self.weight = np.zeros_like(self.gradient)
        self.loss = rows * float(np.log(classes))
        self.whole = block_diag(gram, rows)  # of [x, 1], with x counted from their mean
        self.exact = _newton(self.method, self.gradient.size, self.spec.outputs)
        self.hessian = at_zero(self.whole, self.weight.shape[1]) if self.exact else None
        self.reach = 1.0 if self.exact else FIRST_STEP
        self.towards = direction(self.gradient, (), (), self.metric.solve)

    def _check_rank(self, gram: Array) -> None:
        """At ridge 0 columns must be independent: the likelihood has no single maximum otherwise."""
        spread = np.sqrt(np.clip(np.diag(gram), 0.0, None))
        scaled = gram / np.outer(*(2 * [np.where(spread > 0, spread, 1.0)]))
        if not np.all(spread > 0) or float(np.linalg.eigvalsh(scaled)[0]) <= len(gram) ** 2 * EPS:
            raise DataError(
                "at ridge 0 the columns must be linearly independent, and these are not (constant columns "
                "and the last category of each feature count too). Leave columns out, or set a ridge > 0."
            )

    def _take_gradient(self, total: Total) -> None:
        trial = self.trial()
        keep = slice(None) if self.single else self.present
        slope = np.vstack([total["gradient"][:, keep], total["residual"][None, keep]])
        slope[:-1] += self.ridge * trial[:-1]
        if not self.method.intercept:
            slope[-1] = 0.0
        loss = float(total["loss"][0]) + 0.5 * self.ridge * float(np.sum(trial[:-1] ** 2))
        if not np.isfinite(loss):
            raise DivergenceError(
                f"the loss became {loss} after {self.gradients} gradients. Rescale columns."
            )
        if self.ridge == 0 and total.count("correct") == total.count("counted"):
            raise DataError(
                "the classes are separable: a linear rule is right about every row, so at ridge 0 the "
                "likelihood has no maximum. Set a ridge > 0."
            )
        goal = min(self.method.tolerance, _NEWTON_GOAL) if self.exact else self.method.tolerance
        turn = partial(self._accept, total)
        ended, told = self.descend(loss, slope, goal, self.method.steps, turn)
        self.record(total, "gradient", **told)
        if ended:
            self.complete = True
            if self.ridge == 0 and self.hessian is not None:
                self._check_flat(self.hessian)
        if ended == "spent" and self.method.tolerance > 0:
            warnings.warn(
                f"not converged after {self.gradients} gradients: the last step is "
                f"{self.step_length():.1e} of the weights, the tolerance {self.method.tolerance:g}. Raise "
                "steps, the ridge or the tolerance.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _accept(self, total: Total, step: Array, change: Array) -> None:
        if self.exact:
            diagonal = total["diagonal"] if self.single else total["diagonal"][self.present]
            self.hessian, self._metric = block_diag(*diagonal), None
            if not self.single:
                kept = np.repeat(self.present, len(self.weight))
                self.hessian -= total["crossed"][np.ix_(kept, kept)]
        elif inner(step, change) > _UPWARDS * float(np.linalg.norm(step) * np.linalg.norm(change)):
            self.steps = [*self.steps, step][-_PAIRS:]
            self.changes = [*self.changes, change][-_PAIRS:]
        self.towards = direction(self.gradient, self.steps, self.changes, self.metric.solve)

    @property
    def metric(self) -> Curvature:
        """What steps are measured by: the Hessian, or Boehning's bound."""
        if self._metric is None:
            assert self.whole is not None
            exact, matrix = self.hessian is not None, 0.5 * self.whole
            if self.hessian is not None:
                matrix = anchored(self.hessian, self.whole, self.weight.shape[1])
            matrix = penalised(matrix, len(self.whole) - 1, self.ridge, self.method.intercept)
            self._metric = Curvature(matrix, exact, self.spec.device)
        return self._metric

    def step_length(self) -> float:
        """How long the next step is beside the weights."""
        return self.metric.step_length(self.gradient, self.weight)

    # -- the end -----------------------------------------------------------------------------------

    def _check_flat(self, hessian: Array) -> None:
        """Refuse coefficients that still grow: almost nothing is left of the curvature at zero."""
        assert self.whole is not None
        first, last = (
            anchored(each, self.whole, self.weight.shape[1])
            for each in (at_zero(self.whole, self.weight.shape[1]), hessian)
        )
        if not self.method.intercept:
            first, last = (penalised(each, len(self.whole) - 1, 0.0, False) for each in (first, last))
        if flattest(last, first) < FLAT:
            raise DataError(
                f"after {self.gradients} Newton steps some coefficients still grow: rows of a class are "
                "separable from the others by some columns, and at ridge 0 the likelihood has no maximum. "
                "Set a ridge > 0, or leave out the columns that separate."
            )

    def model(self) -> SoftmaxModel:
        weight, intercept = self._columns_of(self.weight)
        if self.single:
            weight, intercept = (np.hstack([np.zeros_like(each), each]) for each in (weight, intercept))
        parameters = {**self.method.parameters(), "ridge": self.ridge}
        preparation, base = preparation_in(self.chain), base_of(self.chain)
        return SoftmaxModel(weight, intercept, self.spec.classes, preparation, parameters, base)


KIND = "softmax"


@step(KIND, over_rows=True)
def answer_gradient(data: ClientData, request: Request, memory: Memory) -> Term:
    """sum CE, sum xᵀ(p - y) and sum (p - y); rows that are classified rightly; the Hessian where asked for.

    One column of weights means two classes, of which it is the second.
    """
    kernels = memory.kernels
    rows = cached_rows(data, memory, np.float64, kernels)
    weight, intercept = (kernels.array(request.arrays[name]) for name in ("weight", "intercept"))
    single, exact = len(intercept) == 1, bool(request.note["exact"])
    sums = Accumulator(memory.workspace, np.float64, kernels)
    correct = counted = 0
    for span in rows.spans((rows.width + 1) * len(intercept) if exact else rows.width):
        features, targets = rows.features(span), rows.targets(span)
        scores = features @ weight + intercept
        root = rows.ones(span)
        probabilities, losses, right = kernels.likelihood(scores, targets)
        residual = root * (probabilities - (targets[:, 1:] if single else targets))
        sums.add("loss", (root[:, 0] ** 2 * losses).sum()[None])
        sums.add_product("gradient", root * features, residual)
        sums.add("residual", (root.T @ residual)[0])
        if exact and single:
            spread = root * (probabilities * (1.0 - probabilities)) ** 0.5
            bent = kernels.beside(spread * features, spread)
            sums.add("diagonal", (bent.T @ bent)[None])
        elif exact:
            # sum (diag(p) - p pᵀ) ⊗ [x, 1] [x, 1]ᵀ: of each class a block of the diagonal, less the Gram
            # matrix of the rows p ⊗ [x, 1].
            whole, roots = kernels.beside(root * features, root), probabilities**0.5
            bends = [whole * roots[:, [column]] for column in range(roots.shape[1])]
            sums.add("diagonal", kernels.stacked([bent.T @ bent for bent in bends]))
            crossed = probabilities[:, :, None] * whole[:, None, :]
            sums.add_product("crossed", crossed.reshape(len(whole), roots.shape[1] * whole.shape[1]))
        correct += int((right & (root[:, 0] > 0)).sum())
        counted += int((root > 0).sum())
    return sums.finish(rows=len(rows), correct=correct, counted=counted)
