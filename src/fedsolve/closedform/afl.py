"""AFL: a linear classifier on frozen features, in one exchange, in closed form.

He et al., "AFL", CVPR 2025. The paper merges local solutions pairwise (absolute aggregation law)
and removes each client's regulariser at the end; all of that equals one solve of the summed
statistics, which is what travels here. The paper's own route is in `laws`.

    G = sum_k X_kᵀX_k,  H = sum_k X_kᵀY_k,  W = (G + ridge I)^-1 H
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedsolve.backends import kernels_on
from fedsolve.checks import check_classes, check_rows
from fedsolve.closedform import moments
from fedsolve.closedform.moments import Preparation
from fedsolve.closedform.predictors import LinearModel
from fedsolve.closedform.solvers import regularised_risk, ridge_solve
from fedsolve.closedform.sums import Accumulator, cached_rows, check_opening, chunks
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.messages import Request, Term, Total
from fedsolve.federation.method import Method, Run
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register

KIND = "afl"
SUMS = ("gram", "cross", "label_square")


@register(
    Info(
        key="afl",
        title="AFL: analytic federated learning, a linear classifier in one exchange",
        paper="He et al., AFL, CVPR 2025",
        exchanges="1",
        up="Gram matrix of the features (d x d triangle) and cross matrix (d x C)",
        down="nothing but the request",
    )
)
@dataclass(frozen=True)
class AFL(Method[LinearModel]):
    """Parameters of AFL; a ridge of 0 is the paper after its regulariser is removed."""

    key: ClassVar[str] = "afl"
    additive: ClassVar[frozenset[str]] = frozenset(SUMS)

    ridge: float = parameter(0.0, "Penalty on the classifier; 0 is plain least squares.", least=0)
    intercept: bool = parameter(False, "Fit an intercept from sums.")
    scale: Literal["standard"] | None = parameter(None, "Standardise features: one exchange more.")

    def start(self, spec: Spec) -> AFLRun:
        return AFLRun(self, spec)

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
        return self._solve(total, spec, None)

    def _solve(self, total: Total, spec: Spec, preparation: Preparation | None) -> LinearModel:
        check_rows(total.count("rows"))
        if spec.classes is not None and not np.any(total["label_square"]):
            raise DataError("all sample weights are zero; at least one row must count.")
        if spec.classes is not None:
            check_classes(int(np.sum(total["label_square"] > 0)))
        kernels = kernels_on(spec.device)
        gram, cross = total.on(kernels, "gram"), total.on(kernels, "cross")
        intercept = np.zeros(spec.outputs)
        if self.intercept:
            weight = float(total["weight"][0])
            if weight <= 0:
                raise DataError("all sample weights are zero; at least one row must count.")
            mean, target = total["feature"] / weight, total["target"] / weight
            gram = gram - kernels.array(weight * np.outer(mean, mean))
            cross = cross - kernels.array(weight * np.outer(mean, target))
            solution = kernels.host(ridge_solve(gram, cross, self.ridge))
            intercept = target - mean @ solution
        else:
            solution = kernels.host(ridge_solve(gram, cross, self.ridge))
        return LinearModel(solution, intercept, spec.classes, preparation, self.parameters())


class AFLRun(Run[LinearModel]):
    """At most two exchanges: moments (only when scaling), then the sums."""

    method: AFL

    def __init__(self, method: AFL, spec: Spec) -> None:
        super().__init__(method, spec)
        self.preparation: Preparation | None = None
        self._model: LinearModel | None = None

    @property
    def exchanges(self) -> int:
        return 1 if self.method.scale is None else 2

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self._model is not None:
            return None
        if self.method.scale is not None and self.preparation is None:
            return self.ask(moments.KIND, 0, clients)
        return self.ask(KIND, 0, clients, {"intercept": self.method.intercept})

    def absorb(self, total: Total) -> None:
        if self.method.scale is not None and self.preparation is None:
            self.preparation = Preparation.solve(total, self.method.scale, intercept=False)
            self.chain.append(self.preparation.block())
            self.record(total, "moments")
            return
        self._model = self.method._solve(total, self.spec, self.preparation)
        risk = None
        if not self.method.intercept:
            kernels = kernels_on(self.spec.device)
            weight = kernels.array(self._model.weight)
            gram, cross, label_square = (total.on(kernels, name) for name in SUMS)
            risk = regularised_risk(weight, gram, cross, label_square, self.method.ridge)
        self.record(total, "classifier", risk=risk, solved=("W0",))

    def model(self) -> LinearModel:
        assert self._model is not None
        self._model.history = tuple(self.history)
        return self._model

    def stored(self) -> tuple[dict[str, Array], dict[str, Any]]:
        if self._model is None:
            return {}, {"solved": False}
        return {"weight": self._model.weight, "intercept": self._model.intercept}, {"solved": True}

    def take_stored(self, arrays: dict[str, Array], note: dict[str, Any]) -> None:
        prepared = [block.arrays for block in self.chain.blocks if "preparation" in block.note]
        self.preparation = Preparation.from_arrays(prepared[0]) if prepared else None
        if note["solved"]:
            self._model = LinearModel(
                arrays["weight"],
                arrays["intercept"],
                self.spec.classes,
                self.preparation,
                self.method.parameters(),
            )


@step(KIND)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """G_k = XᵀX and H_k = XᵀY of the client's rows, with sums of x and y when an intercept is fitted."""
    check_opening(data, memory.chain)
    kernels = memory.kernels
    rows = cached_rows(data, memory, np.float64, kernels)
    sums = Accumulator(memory.workspace, np.float64, kernels)
    sums.declare("gram", (data.width, data.width), symmetric=True)
    sums.declare("cross", (data.width, rows.outputs))
    sums.declare("label_square", (rows.outputs,))
    if request.note["intercept"]:
        for name, width in (("weight", 1), ("feature", data.width), ("target", rows.outputs)):
            sums.declare(name, (width,))
    for span in chunks(len(rows), data.width, kernels):
        features = rows.weighted(span, rows.features(span))
        targets = rows.weighted(span, rows.targets(span))
        sums.add_gram("gram", features)
        sums.add_product("cross", features, targets)
        sums.add("label_square", (targets**2).sum(axis=0))
        if request.note["intercept"]:
            root = rows.ones(span)
            sums.add("weight", (root**2).sum(axis=0))
            sums.add("feature", (root.T @ features)[0])
            sums.add("target", (root.T @ targets)[0])
    term = sums.finish()
    term.counts["rows"] = len(rows)
    return term
