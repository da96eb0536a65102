"""KernelSoftmax: multinomial logistic regression on kernels of landmarks that are nobody's rows, from sums.

    minimise  sum_i w_i CE(softmax(phi(x_i) W + b), y_i) + ridge/2 |W|²        phi(x) = k(x, Z) T^-1

with KernelAFL's landmarks Z, its Gaussian kernel k, and TᵀT = K_MM + 1e-8 M I, so that |W|² is the norm of
the function that W stands for. Squared errors, KernelAFL's, hide a class that lies between two others;
the likelihood does not. Exchange 1 brings AFL's sums, which landmarks follow from; the others are those of
`softmax` over phi: a Gram matrix of M columns once, then a gradient (or, of two classes, a Hessian) each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedsolve.closedform import afl
from fedsolve.closedform.kernel_afl import DIRECT_LANDMARKS, KernelAFL, drawn_from, trial_landmarks
from fedsolve.closedform.landmarks import KernelModel, landmark_agreement
from fedsolve.closedform.predictors import SoftmaxModel
from fedsolve.closedform.rbf import available_memory, check_memory
from fedsolve.closedform.softmax import Softmax, SoftmaxRun
from fedsolve.closedform.sums import base_block
from fedsolve.federation.method import Method, Request, Spec, Total
from fedsolve.parameters import parameter
from fedsolve.registry import register


@register(
    paper="Zhu and Hastie, JCGS 2005; Williams and Seeger, NIPS 2000",
    exchanges="2, and one per gradient",
    up="Gram and cross matrix (as afl), those of M kernel features, then gradients (M x C) or Hessians",
    down="class means and a d x d triangle once; then weights, M x C",
)
@dataclass(frozen=True)
class KernelSoftmax(Method[SoftmaxModel]):
    """KernelSoftmax: logistic regression on kernels of landmarks that are nobody's rows.

    Tolerance and steps as Softmax has them, the others as KernelAFL.
    """

    intercept: ClassVar[bool] = True

    landmarks: int | None = parameter(
        None,
        "M, the number of landmarks.",
        least=1,
        none=f"a quarter of the rows, rounded up to a power of 2, up to {DIRECT_LANDMARKS}",
    )
    ridge: float = parameter(0.01, "Penalty on the weights.", above=0)
    bandwidth: float = parameter(1.0, "h as a multiple of twice the trace of the covariance.", above=0)
    scale: Literal["standard"] | None = parameter("standard", "Standardise features; no exchange more.")
    tolerance: float = parameter(2e-3, "Relative length of the last step.", least=0)
    steps: int = parameter(100, "Most gradients asked for.", least=1)
    curvature: Literal["auto", "exact", "bound"] = parameter(
        "auto", "Hessians or a bound, as Softmax has it."
    )
    least_rows: int = parameter(10, "Rows a class needs for landmarks of its own.", least=1)
    seed: int = parameter(0, "Seed of the landmarks.", least=0)

    @classmethod
    def trial(cls) -> Self:
        return cls(landmarks=12, ridge=0.3)

    def start(self, spec: Spec) -> KernelSoftmaxRun:
        if self.landmarks is not None:
            check_memory(self.landmarks, spec.features, spec.outputs, available_memory())
        return KernelSoftmaxRun(self, spec)  # type: ignore[arg-type]

    def agreement(self) -> dict[str, Any]:
        return landmark_agreement(self.seed)

    def largest_side(self, spec: Spec) -> int:
        return max(spec.features, self.landmarks or DIRECT_LANDMARKS)

    def count(self, rows: int) -> int:
        """How many landmarks there are for so many rows: a function of the rows alone."""
        known = self.landmarks
        return min(DIRECT_LANDMARKS, KernelAFL().count(rows)) if known is None else known

    def traffic(self, spec: Spec, rows: int) -> tuple[int, int]:
        drawn = KernelAFL(self.count(rows), solver="direct").traffic(spec, rows)
        own = Softmax(None, steps=self.steps, curvature=self.curvature)
        steps = own.traffic(replace(spec, features=self.count(rows)), rows)
        return drawn[0] + steps[0], drawn[1] + steps[1]

    def scaled(self, share: float) -> KernelSoftmax:
        """The same for a share of the rows: as many rows for each landmark, a penalty as strong."""
        return replace(self, landmarks=trial_landmarks(self.landmarks, share), ridge=self.ridge * share)


class KernelSoftmaxRun(SoftmaxRun):
    """Moments, which give landmarks; then Softmax over their kernels."""

    method: KernelSoftmax  # type: ignore[assignment]
    scales = False  # standardised kernel features would have another norm

    @property
    def exchanges(self) -> int:
        return super().exchanges + (not self.complete)

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if not self.history:
            return self.ask(afl.KIND, 0, clients, {"intercept": True, "class_rows": True})
        return super().request(clients)

    def absorb(self, total: Total) -> None:
        if self.history:
            super().absorb(total)
            return
        landmarks, preparation = drawn_from(total, self.method, self.spec)
        weights = np.zeros((landmarks.count, self.spec.outputs))
        base = KernelModel(landmarks, weights, self.spec.classes, preparation, {"seed": self.method.seed})
        self.add(base_block(base))
        self.record(total, "moments")
