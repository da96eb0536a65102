"""AFL: a linear classifier on frozen features, in one exchange, in closed form.

He et al., "AFL", CVPR 2025. The paper merges local solutions pairwise (absolute aggregation law)
and removes each client's regulariser at the end; all of that equals one solve of the summed
statistics, which is what travels here. The paper's own route is in `laws`.

    G = sum_k X_kᵀX_k,  H = sum_k X_kᵀY_k,  W = (G + ridge I)^-1 H
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from fedsolve.backends import kernels_on
from fedsolve.checks import check_classes, check_rows
from fedsolve.closedform import moments
from fedsolve.closedform.fold_sums import KEY, added, choose_ridge_by_folds, fold_count, fold_sums
from fedsolve.closedform.linear_heads import HEADS, solve_head
from fedsolve.closedform.moments import Preparation
from fedsolve.closedform.predictors import LinearModel
from fedsolve.closedform.solvers import regularised_risk, ridge_solve, solves
from fedsolve.closedform.sums import Accumulator, Rows, cached_rows, check_opening, chunks
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.meaning import differing
from fedsolve.federation.messages import Request, Term, Total
from fedsolve.federation.method import Method, Run
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.held_out import fold_numbers
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
    friendly: ClassVar[Mapping[str, Any]] = {"ridge": "auto", "intercept": True, "head": "ridge"}
    additive: ClassVar[frozenset[str]] = frozenset(
        f"{fold}{name}"
        for fold in ("", *(f"fold{number}." for number in range(fold_count(1))))
        for name in SUMS
    )

    ridge: float | Literal["auto"] = parameter(
        0.0,
        "Penalty on the classifier; 0 is plain least squares, auto the best by exact k-fold sums.",
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

    def parameters(self) -> dict[str, Any]:
        """The parameters by name; the head that AFL always had goes without saying, as in older files."""
        values = super().parameters()
        if self.head == "ridge":
            del values["head"]
        return values

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
        settled, whole, _ = self.settled(total, spec)
        return settled._solve(whole, spec, None)

    def settled(self, total: Total, spec: Spec) -> tuple[AFL, Total, dict[str, Any]]:
        """This method with its ridge, the one that a total by folds chooses where it is "auto"; the sums of
        all rows; and how the ridges did.
        """
        if "gram" in total.term.arrays:
            if self.ridge == "auto":
                raise DataError("ridge='auto' needs sums by fold, and these are not. Collect them with it.")
            return self, total, {}
        check_rows(total.count("rows"))
        parts = fold_sums(total, fold_count(spec.features))
        whole = added(parts)
        arrays = {"gram": whole.gram, "cross": whole.cross, "label_square": whole.label_square}
        arrays |= {"weight": np.array([whole.weight]), "feature": whole.feature, "target": whole.target}
        merged = replace(total, term=Term(arrays, total.term.counts))
        if self.ridge != "auto":
            return self, merged, {}
        ridge, ridges, errors = choose_ridge_by_folds(parts, self.intercept)
        told = {"ridges": ridges, "errors": errors, "folds": len(parts)}
        return replace(self, ridge=ridge), merged, told

    def _solve(self, total: Total, spec: Spec, preparation: Preparation | None) -> LinearModel:
        assert self.ridge != "auto"
        check_rows(total.count("rows"))
        if spec.classes is not None and not np.any(total["label_square"]):
            raise DataError("all sample weights are zero; at least one row must count.")
        if spec.classes is not None:
            check_classes(int(np.sum(total["label_square"] > 0)))
        kernels = kernels_on(spec.device)
        gram, cross = total.on(kernels, "gram"), total.on(kernels, "cross")
        intercept = np.zeros(spec.outputs)
        if self.head != "ridge":
            if spec.classes is None:
                raise DataError(f"the head '{self.head}' is for classes; these are targets of a regression.")
            sums = total["gram"], total["cross"], total["label_square"]
            solution, intercept = solve_head(self.head, *sums, self.ridge)
        elif self.intercept:
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
        self._system: tuple[Array, Array, float] | None = None

    @property
    def exchanges(self) -> int:
        return 1 if self.method.scale is None else 2

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self._model is not None:
            return None
        if self.method.scale is not None and self.preparation is None:
            return self.ask(moments.KIND, 0, clients)
        note: dict[str, Any] = {"intercept": self.method.intercept}
        if self.method.ridge == "auto":
            note |= {"folds": fold_count(self.spec.features)}
        return self.ask(KIND, 0, clients, note)

    def absorb(self, total: Total) -> None:
        if self.method.scale is not None and self.preparation is None:
            self.preparation = Preparation.solve(total, self.method.scale, intercept=False)
            self.add(self.preparation.block())
            self.record(total, "moments")
            return
        settled, whole, compared = self.method.settled(total, self.spec)
        self._model = settled._solve(whole, self.spec, self.preparation)
        risk = None
        if not settled.intercept and settled.head == "ridge":
            assert settled.ridge != "auto"
            kernels = kernels_on(self.spec.device)
            weight = kernels.array(self._model.weight)
            gram, cross, label_square = (whole.on(kernels, name) for name in SUMS)
            self._system = gram, cross, settled.ridge
            risk = regularised_risk(weight, gram, cross, label_square, settled.ridge)
        self.record(total, "classifier", risk=risk, solved=("W0",), metrics=compared)

    def differs(self, mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> str | None:
        """A classifier means the solution of its system."""
        if self._system is not None and "weight" in theirs and solves(*self._system, theirs["weight"]):
            mine, theirs = ({n: a for n, a in m.items() if n != "weight"} for m in (mine, theirs))
        return differing(mine, theirs)

    def model(self) -> LinearModel:
        assert self._model is not None
        self._model.history = tuple(self.history)
        return self._model

    def stored(self) -> tuple[dict[str, Array], dict[str, Any]]:
        if self._model is None:
            return {}, {"solved": False}
        arrays = {"weight": self._model.weight, "intercept": self._model.intercept}
        return arrays, {"solved": True, "parameters": self._model.parameters}

    def take_stored(self, arrays: dict[str, Array], note: dict[str, Any]) -> None:
        prepared = [block.arrays for block in self.chain.blocks if "preparation" in block.note]
        self.preparation = Preparation.from_arrays(prepared[0]) if prepared else None
        if note["solved"]:
            self._model = LinearModel(
                arrays["weight"],
                arrays["intercept"],
                self.spec.classes,
                self.preparation,
                note.get("parameters", self.method.parameters()),
            )


@step(KIND, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """G_k = XᵀX and H_k = XᵀY of the client's rows, with sums of x and y when an intercept is fitted.

    Where asked for, also the rows of each class that count at all.
    """
    check_opening(data, memory.chain)
    kernels = memory.kernels
    sums = Accumulator(memory.workspace, np.float64, kernels)
    folds, intercept = request.note.get("folds"), request.note["intercept"]
    if folds is None:
        rows = cached_rows(data, memory, np.float64, kernels)
        _add(sums, rows, intercept)
    else:
        numbers = fold_numbers(data.marks(KEY), folds)
        for fold in range(folds):
            rows = Rows(data.taking(numbers == fold), memory.chain, np.float64, kernels)
            _add(sums, rows, True, f"fold{fold}.")
    term = sums.finish()
    term.counts["rows"] = len(data)
    if request.note.get("class_rows") and rows.codes is not None:
        weights = data.own_weights()
        counted = rows.codes if weights is None else rows.codes[weights > 0]
        term.arrays["class_rows"] = np.bincount(counted, minlength=rows.outputs).astype(np.float64)
    return term


def _add(sums: Accumulator, rows: Rows, intercept: bool, prefix: str = "") -> None:
    """Declare the sums of some rows under their names, and add them up."""
    width = rows.width
    gram, cross, square = (f"{prefix}{name}" for name in SUMS)
    sums.declare(gram, (width, width), symmetric=True)
    sums.declare(cross, (width, rows.outputs))
    sums.declare(square, (rows.outputs,))
    if intercept:
        for name, size in (("weight", 1), ("feature", width), ("target", rows.outputs)):
            sums.declare(f"{prefix}{name}", (size,))
    for span in chunks(len(rows), width, rows.kernels):
        features = rows.weighted(span, rows.features(span))
        targets = rows.weighted(span, rows.targets(span))
        sums.add_gram(gram, features)
        sums.add_product(cross, features, targets)
        sums.add(square, (targets**2).sum(axis=0))
        if intercept:
            root = rows.ones(span)
            sums.add(f"{prefix}weight", (root**2).sum(axis=0))
            sums.add(f"{prefix}feature", (root.T @ features)[0])
            sums.add(f"{prefix}target", (root.T @ targets)[0])
