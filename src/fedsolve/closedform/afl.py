"""AFL: a linear classifier on frozen features, in one exchange, in closed form.

He et al., "AFL", CVPR 2025. The paper merges local solutions pairwise (absolute aggregation law)
and removes each client's regulariser at the end; all of that equals one solve of the summed
statistics, which is what travels here. The paper's own route is in `laws`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import host, kernels_on
from fedsolve.closedform.predictors import LinearModel
from fedsolve.closedform.solvers import gcv_ridge, regularised_risk, ridge_solve, score_moments
from fedsolve.closedform.sums import (
    LEVEL,
    MOMENTS,
    Accumulator,
    OneExchangeRun,
    cached_rows,
    check_sums,
    moments_block,
    preparation_in,
)
from fedsolve.errors import DataError
from fedsolve.federation.method import SCORES, Federation, Method, Request, Spec, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.tables.preparation import Preparation

KIND = "afl"
HEADS = ("ridge", "lda", "fedcgs", "mean", "normalised")

NEVER = -1e9
"""The intercept of a class without rows, which is never predicted."""


@register(
    paper="He et al., AFL, CVPR 2025",
    exchanges="1",
    up="Gram matrix of the features (d x d triangle) and cross matrix (d x C)",
    down="nothing but the request",
)
@dataclass(frozen=True)
class AFL(Method[LinearModel]):
    """AFL: analytic federated learning, a linear classifier in one exchange.

    Each client sends two sums over its rows, XᵀX and XᵀY (a column of Y for each class). The server adds
    them up and solves W = (sum XᵀX + ridge I)^-1 sum XᵀY: the least squares of all rows, whoever owns which.
    A ridge of 0 is the paper (He et al., CVPR 2025) after its regulariser is removed.

    >>> model = fs.AFL(ridge=1.0).fit(federation)  # doctest: +SKIP
    """

    recommended: ClassVar[Mapping[str, Any]] = {"ridge": "auto", "intercept": True, "head": "ridge"}
    unnamed: ClassVar[Mapping[str, Any]] = {"head": "ridge"}
    multilabel: ClassVar[bool] = True

    ridge: float | Literal["auto"] = parameter(
        0.0,
        "Penalty on the classifier; 0 is plain least squares, auto the best by cross-validation.",
        least=0,
    )
    intercept: bool = parameter(False, "Fit an intercept from sums.")
    scale: Literal["standard", "centred"] | None = parameter(
        None, "Standardise or centre features: one exchange more."
    )
    head: str = parameter("ridge", "What is solved from the same sums.", choices=HEADS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head != "ridge" and self.intercept:
            raise DataError(f"the head '{self.head}' has its own intercept; leave intercept=True out.")
        if self.head != "ridge" and self.ridge == "auto":
            raise DataError(f"ridge='auto' is for the head 'ridge'; give one for the head '{self.head}'.")

    def start(self, spec: Spec) -> AFLRun:
        return AFLRun(self, spec)

    def traffic(self, spec: Spec, rows: int) -> tuple[int, int]:
        return 0, spec.features * spec.outputs

    def collect(self, federation: Federation) -> Total:
        """The total of the single exchange; `Total.including` and `.without` change its cohort."""
        if self.scale is not None:
            raise DataError("collect() is for one-exchange runs; scale='standard' needs two.")
        run = self.start(federation.describe())
        request = run.request(federation.clients)
        assert request is not None
        return federation.exchange(request, run.chain)

    def solve(self, total: Total, spec: Spec) -> LinearModel:
        """The model of a total: W = (G + ridge I)^-1 H, centred by the sums when there is an intercept."""
        return self.solved(total, spec)[0]

    def solved(
        self, total: Total, spec: Spec, preparation: Preparation | None = None
    ) -> tuple[LinearModel, float, dict[str, Any]]:
        """The model of a total and its ridge, which generalised cross-validation chooses where it is "auto";
        and how the ridges did.
        """
        check_sums(total, spec)
        compared: dict[str, Any] = {}
        ridge = self.ridge
        if self.head != "ridge":
            if spec.classes is None:
                raise DataError(f"the head '{self.head}' is for classes; these are targets of a regression.")
            assert ridge != "auto"
            gram, cross, counts = (total[name] for name in LEVEL)
            solution, intercept = solve_head(self.head, gram, cross, counts, ridge)
            return LinearModel(solution, intercept, spec.classes, preparation, self.parameters()), ridge, {}
        if ridge == "auto" and "weight" not in total.term.arrays:
            raise DataError("ridge='auto' needs sums that were collected for it. Collect them with it.")
        kernels = kernels_on(spec.device)
        gram, cross = total.on(kernels, "gram"), total.on(kernels, "cross")
        mean, target = np.zeros(len(gram)), np.zeros(cross.shape[1])
        if self.intercept:
            weight = float(total["weight"][0])
            mean, target = total["feature"] / weight, total["target"] / weight
            gram = gram - kernels.array(weight * np.outer(mean, mean))
            cross = cross - kernels.array(weight * np.outer(mean, target))
        if ridge == "auto":
            weight = float(total["weight"][0])
            label_square = float(total["label_square"].sum()) - weight * float(target @ target)
            # Weights of whole numbers stand for rows that are there so often; shares of one do not.
            rows = max(weight, float(total.count("counted")))
            ridge, ridges, errors = gcv_ridge(gram, cross, label_square, rows, int(self.intercept))
            compared = {"ridges": ridges, "errors": errors}
        solution = host(ridge_solve(gram, cross, ridge))
        told = replace(self, ridge=ridge).parameters() if compared else self.parameters()
        model = LinearModel(solution, target - mean @ solution, spec.classes, preparation, told)
        return model, ridge, compared


def solve_head(head: str, gram: Array, cross: Array, counts: Array, ridge: float) -> tuple[Array, Array]:
    """Weight (d, C) and intercept (C,) of another classifier from the same sums and the class counts n_c.

        mu_c = H_c / n_c,   m = sum_c H_c / n,   S_w = (G - sum_c n_c mu_c mu_cᵀ) / n,   S = (G - n m mᵀ) / n

        lda         w_c = S_w^-1 mu_c,  b_c = -mu_cᵀ w_c / 2 + log(n_c / n)     Fisher's discriminant
        fedcgs      the same with S: Guan et al., FedCGS (2025)
        mean        w_c = mu_c,         b_c = -|mu_c|² / 2                      the nearest class mean
        normalised  columns of (G + ridge I)^-1 H, each of length 1             Fanì et al., Fed3R (ICML 2024)

    The ridge is AFL's: ridge / n is added to the diagonal of a covariance.
    """
    seen = counts > 0
    weight, intercept = np.zeros_like(cross), np.where(seen, 0.0, NEVER)
    if head == "normalised":
        found = ridge_solve(gram, cross[:, seen], ridge)
        lengths = np.linalg.norm(found, axis=0)
        weight[:, seen] = found / np.where(lengths > 0, lengths, 1.0)
        return weight, intercept
    rows, means = float(np.sum(counts)), cross[:, seen] / counts[seen]
    if head == "mean":
        weight[:, seen] = means
        intercept[seen] = -0.5 * np.sum(means**2, axis=0)
        return weight, intercept
    mean = cross.sum(axis=1) / rows
    taken = means * counts[seen] @ means.T if head == "lda" else rows * np.outer(mean, mean)
    solved = rows * ridge_solve(gram - taken, means, ridge)
    weight[:, seen] = solved
    intercept[seen] = np.log(counts[seen] / rows) - 0.5 * np.sum(means * solved, axis=0)
    return weight, intercept


class AFLRun(OneExchangeRun[LinearModel]):
    """At most two exchanges: moments (only when scaling), then the sums."""

    method: AFL  # type: ignore[assignment]
    system: tuple[Array, Array, float] | None = None

    @property
    def exchanges(self) -> int:
        return 1 if self.method.scale is None else 2

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self._model is not None:
            return None
        if self.method.scale is not None and not self.history:
            return self.ask(MOMENTS, 0, clients)
        auto = self.method.ridge == "auto"
        note = {"intercept": True, "counted": True} if auto else {"intercept": self.method.intercept}
        return self.ask(KIND, 0, clients, note)

    def absorb(self, total: Total) -> None:
        if self.method.scale is not None and not self.history:
            self.add(moments_block(total, self.method.scale, intercept=False))
            self.record(total, "moments")
            return
        preparation = None if self.method.scale is None else preparation_in(self.chain)
        model, ridge, compared = self.method.solved(total, self.spec, preparation)
        self._model = model
        if compared and self.spec.classes is not None:
            rows = total["weight"][0]
            moments = total["feature"] / rows, total["gram"] / rows
            compared[SCORES] = score_moments(*moments, model.weight, model.intercept)
        risk = None
        if not self.method.intercept and self.method.head == "ridge":
            kernels = kernels_on(self.spec.device)
            gram, cross, label_square = (total.on(kernels, name) for name in LEVEL)
            self.system = gram, cross, ridge
            risk = regularised_risk(kernels.array(model.weight), gram, cross, label_square, ridge)
        self.record(total, "classifier", risk=risk, solved=("W0",), metrics=compared)


@step(KIND, over_rows=True)
def answer_products(data: ClientData, request: Request, memory: Memory) -> Term:
    """G_k = XᵀX and H_k = XᵀY of the client's rows, with sums of x and y when an intercept is fitted.

    Where asked for, also the rows of each class that count at all.
    """
    sums = Accumulator(memory.workspace, np.float64, memory.kernels)
    rows = cached_rows(data, memory, np.float64, memory.kernels)
    for span in rows.spans():
        features = rows.weighted(span, rows.features(span))
        targets = rows.weighted(span, rows.targets(span))
        sums.add_level(features, targets)
        if request.note["intercept"]:
            root = rows.ones(span)
            sums.add("weight", (root**2).sum(axis=0))
            sums.add("feature", (root.T @ features)[0])
            sums.add("target", (root.T @ targets)[0])
    term = sums.finish(rows=len(data))
    weights = data.own_weights
    if request.note.get("counted"):
        term.counts["counted"] = len(data) if weights is None else int(np.count_nonzero(weights))
    if request.note.get("class_rows") and rows.codes is not None:
        counted = rows.codes if weights is None else rows.codes[weights > 0]
        term.arrays["class_rows"] = np.bincount(counted, minlength=rows.outputs).astype(np.float64)
    return term
