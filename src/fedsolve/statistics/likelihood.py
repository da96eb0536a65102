"""Maximum likelihood from sums: value, slope and curvature at a point, one exchange each; Newton steps.

    survey, then   f(b), g(b), H(b)   until   sqrt(gᵀ H⁻¹ g) <= tolerance   (a step, in standard errors)

Generalised linear models and Cox regression differ in what a client sums, and in what is asked at the end.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from fedsolve.arrays import Array
from fedsolve.closedform.descent import FLAT, Descent, flattest, inner
from fedsolve.errors import DataError, DivergenceError
from fedsolve.model import Model
from fedsolve.parameters import parameter
from fedsolve.statistics.design import Design, FormulaMethod

M = TypeVar("M", bound=Model)

_NEARLY_FLAT = 1e-3
_NEAR = 1e-4
_FAR = 30.0
"""Logarithms of ratios, for a deviation of a column: where steps go on beyond it, there is no maximum."""


@dataclass(frozen=True)
class LikelihoodMethod(FormulaMethod[M]):
    """What regressions take that are fitted by Newton steps."""

    usual: ClassVar[int] = 8
    _: KW_ONLY
    tolerance: float = parameter(1e-8, "Length of the last step, in standard errors.", above=0)
    steps: int = parameter(30, "Most steps taken.", least=1)


class Newton(Descent):
    """Newton steps on the negative log-likelihood of standard columns.

    quadratic: whether one step reaches the maximum. ratios: whether coefficients are logarithms of ratios.
    """

    def __init__(self, design: Design, start: Array, quadratic: bool = False, ratios: bool = True) -> None:
        super().__init__()
        self.design, self.quadratic, self.ratios = design, quadratic, ratios
        self.weight = start
        self.gradient = self.towards = np.zeros_like(start)
        self.curvature = self.first = np.zeros((0, 0))  # the information at `weight`, and at the first point
        self.dispersion = 1.0  # by what the curvature is divided, to be an information
        self.converged = False
        self.length = np.inf

    def take(
        self,
        loss: float,
        slope: Array,
        curvature: Array,
        observed: Array | None = None,
        scatter: float | None = None,
    ) -> None:
        """Take value (infinite where the point is not allowed), gradient and curvature at the trial point.

        observed: the Hessian, where that is another matrix: near the maximum steps go by it. scatter: the sum
        of squares that the dispersion follows from, where it is not 1.
        """
        method, names = self.design.method, self.design.names
        goal = np.inf if self.quadratic else method.tolerance
        turn = partial(self._turn, curvature, observed, scatter)
        ended, self.design.run.told = self.descend(loss, slope, goal, method.steps, turn)
        if ended == "near" or (ended == "stuck" and self.length <= _NEAR):
            self.weight = self.weight - self.towards  # one step more costs nothing
            self.converged = True
        elif ended:
            self.check_flat(_NEARLY_FLAT)
            if self.ratios and np.any((np.abs(self.weight) > _FAR) & ~self.design.intercept):
                raise self.runaway(self.weight[self.design.kept])
            raise DivergenceError(
                f"not converged after {self.gradients} steps: the last one is {self.length:.1e} standard "
                f"errors long, the tolerance {method.tolerance:g}. It is longest for "
                f"'{names[int(np.argmax(np.abs(self.towards)))]}'. Raise steps, or rescale or leave out that "
                "column."
            )

    def _turn(
        self, curvature: Array, observed: Array | None, scatter: float | None, step: Array, change: Array
    ) -> None:
        """Newton's step from here."""
        self.curvature = curvature
        if not len(self.first):
            self.first = curvature
            self.design.keep_independent(curvature)
        if scatter is not None:
            self.dispersion = self.design.dispersion(scatter)
        side = self.gradient[self.design.kept]
        self.towards = self.design.whole(self.solved(side, curvature))
        square = max(inner(self.gradient, self.towards), 0.0)
        self.length = float(np.sqrt(square / self.dispersion))
        if self.length < 1 and observed is not None:  # from afar, such steps are often much too long
            self.towards = self.design.whole(self.solved(side, observed))
        self.check_flat()

    def facts(self, likelihood: float) -> dict[str, Any]:
        """What a result says of the run to its maximum."""
        found = {"steps": self.gradients, "converged": self.converged, "log_likelihood": likelihood}
        return found | {"aic": 2 * int(self.design.kept.sum()) - 2 * likelihood}

    def step_length(self) -> float:
        return self.length

    def part(self, matrix: Array) -> Array:
        """Of the columns that count."""
        return np.asarray(matrix[np.ix_(self.design.kept, self.design.kept)])

    def solved(self, side: Array, hessian: Array) -> Array:
        """H⁻¹ side, of columns that count; by the information where `hessian` is not positive definite."""
        try:
            return np.asarray(cho_solve(cho_factor(self.part(hessian)), side))
        except np.linalg.LinAlgError:
            if hessian is not self.curvature:
                return self.solved(side, self.curvature)
            raise self.runaway(np.linalg.eigh(self.part(hessian))[1][:, 0]) from None

    def covariance(self, hessian: Array) -> Array:
        """H⁻¹ over all columns; zero where a column does not count."""
        return self.design.whole(self.solved(np.eye(int(self.design.kept.sum())), hessian))

    def check_flat(self, least: float = FLAT) -> None:
        """Refuse coefficients that grow until nothing is left of the curvature that they had at first."""
        if flattest(self.part(self.curvature), self.part(self.first)) < least:
            raise self.runaway(self.weight[self.design.kept])

    def runaway(self, direction: Array) -> DataError:
        """Coefficients grow without end in this direction of the columns that count."""
        design = self.design
        load = np.where(design.intercept, 0.0, design.whole(np.abs(direction)))
        return separated([design.names[k] for k in np.argsort(-load)[:3] if load[k] > 0.3 * load.max()])


def separated(names: list[str], why: str = "") -> DataError:
    """A coefficient runs away."""
    has = f" (rows of this category have {why})" if why else ""
    return DataError(
        f"separation: the coefficient of {', '.join(map(repr, names))} grows without end{has}, so that the "
        "likelihood has no maximum. Merge categories or leave the column out."
    )


def check_categories(design: Design, all_events: bool) -> None:
    """Refuse a category without events (or without anything else) by its name, before the first step."""
    seen, names = design.seen, design.names
    indicator = (seen["set"] == seen["first"]) & (seen["first"] == seen["second"])
    stems = [name.partition("[")[0] for name in names]
    for place in np.flatnonzero(indicator & ~design.constant() & ~design.intercept):
        events, alone = seen["with_outcome"][place], stems.count(stems[place]) == 1
        if events == 0:
            raise separated([names[place]], "no events")
        if all_events and events == seen["first"][place]:
            raise separated([names[place]], "events only")
        if alone and design.fixed and events == seen["outcome"][0]:
            raise separated([names[place]], "all events there are")
