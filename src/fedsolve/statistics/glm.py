"""Generalised linear models: the maximum-likelihood fit of the pooled rows, with standard errors, from sums.

    eta = x b + offset,  mu = g⁻¹(eta);   a term is  deviance,  sum w (mu - y) mu' / V x,  sum w mu'² / V x xᵀ

McCullagh and Nelder, Generalized Linear Models, 1989. At the maximum one exchange more gives the
log-likelihood and, where asked for, what robust errors need: sum g gᵀ over rows (HC0, HC1) or over sites
(cluster), and the observed information. `weights` are prior weights, as in R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.dialogue import Ask, DialogueRun, Talk
from fedsolve.federation.method import Request, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.statistics.design import Design, read, survey
from fedsolve.statistics.exponential import FAMILIES, LINKS, RATIOS
from fedsolve.statistics.hiding import check_weights
from fedsolve.statistics.likelihood import LikelihoodMethod, Newton, check_categories
from fedsolve.statistics.noisy import private_glm
from fedsolve.statistics.results import RegressionModel

STEP, CLUSTERS = "glm", "glm-clusters"


class GLMModel(RegressionModel):
    """A fitted model; `predict` gives the mean, `decision_function` the linear predictor."""

    family: ClassVar[str] = "glm"
    title: ClassVar[str] = "Generalised linear model"

    @property
    def judged(self) -> Array | None:
        return np.arange(2) if self.facts["family"] == "binomial" else None

    def told(self, features: Any) -> tuple[Array, Array]:
        if self.judged is None:
            return super().told(features)
        chance = self.estimates(features)
        return (chance[:, 0] >= 0.5).astype(np.int64), np.hstack([1 - chance, chance])

    def estimated(self, scores: Array) -> Array:
        return np.asarray(LINKS[self.facts["link"]].mean(scores))


@register(
    paper="McCullagh and Nelder 1989",
    exchanges="a survey, about 5 Newton steps, a summary",
    up="gradient and information of the formula's p columns: p (p + 3) / 2 numbers",
    down="coefficients",
)
@dataclass(frozen=True)
class GLM(LikelihoodMethod[GLMModel]):
    """Generalised linear model with standard errors. offset and weights are expressions of columns."""

    family: Literal["gaussian", "binomial", "poisson", "gamma", "inverse-gaussian"] = parameter(
        "gaussian", "How the outcome varies: gaussian is the linear model, binomial the logistic one."
    )
    link: (
        Literal["identity", "log", "logit", "probit", "cloglog", "inverse", "inverse-squared", "sqrt"] | None
    ) = parameter(None, "From mean to linear predictor.", none="the family's canonical one")
    offset: str | None = parameter(None, "An expression that is added with coefficient 1.", none="none")
    weights: str | None = parameter(None, "Prior weight of a row, a column.", none="1, or the schema's")
    robust: Literal["HC0", "HC1", "cluster"] | None = parameter(
        None, "Standard errors that need no correct variance: by rows, or by sites.", none="model-based"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen_link not in FAMILIES[self.family].links:
            raise DataError(
                f"the link '{self.link}' does not fit the family '{self.family}'; choose among "
                f"{', '.join(FAMILIES[self.family].links)}."
            )

    @classmethod
    def trial(cls) -> Self:
        return cls("y ~ x0 + x1 + I(x2**2)", family="poisson", robust="HC1")

    @property
    def asked(self) -> str:
        return f"{self.formula} + offset({self.offset})" if self.offset else self.formula

    @property
    def chosen_link(self) -> str:
        return self.link or FAMILIES[self.family].links[0]

    @property
    def _linear(self) -> bool:
        return (self.family, self.chosen_link) == ("gaussian", "identity")

    def talk(self, run: DialogueRun[GLMModel]) -> Talk[GLMModel]:
        design = yield from survey(run)
        self._check_events(design)
        linear = self._linear
        first, second = design.seen["moments"]
        if linear and first > 0 and abs(first - second) < 1e-9 * first:
            run.remarks.append(
                "the outcome is 0 or 1, and this is a linear model; family binomial is logistic."
            )
        ratios = self.chosen_link in ("logit", "probit", "cloglog", "log")
        newton, null = Newton(design, self._start(design), linear, ratios), None
        estimated = FAMILIES[self.family].estimated
        while not newton.converged:
            total = yield Ask(STEP, {"phi": 1.0, "last": False}, {"weight": newton.trial()})
            deviance, slope, curvature = (total[name] for name in ("deviance", "gradient", "curvature"))
            if invalid := total.count("invalid"):
                if not np.isfinite(newton.loss):
                    raise DataError(
                        f"the link '{self.chosen_link}' gives {invalid} rows means that the family "
                        f"'{self.family}' does not have. Choose another link."
                    )
                newton.take(np.inf, slope, curvature)
                continue
            first = not np.isfinite(newton.loss)
            if first and np.any(np.abs(shift := self._shift(design, slope)) > 0.1):
                newton.weight = newton.weight + shift
                continue
            if first and design.plan.intercept and not design.plan.offsets:
                null = float(deviance[0])
            observed = total.term.arrays.get("observed")
            scatter = float(total["pearson"][0]) if estimated else None
            newton.take(0.5 * float(deviance[0]), slope, curvature, observed, scatter)
        phi = newton.dispersion
        if linear:  # its likelihood has the dispersion at its maximum
            phi = max(2 * newton.loss - float(newton.gradient @ newton.towards), 1e-300) / design.used
        kind = CLUSTERS if self.robust == "cluster" else STEP
        total = yield Ask(kind, {"phi": phi, "last": True}, {"weight": newton.weight})
        return self._model(design, newton, total, null)

    privately = private_glm

    def _check_events(self, design: Design) -> None:
        events, binomial = design.seen["outcome"][0], self.family == "binomial"
        if binomial or self.family == "poisson":
            if events == 0 or (binomial and events == design.seen["weight"][0]):
                which = "zero events: the outcome is 0" if events == 0 else "the outcome is 1"
                raise DataError(f"{which} in every row, so that there is nothing to explain.")
            check_categories(design, all_events=binomial)

    def _start(self, design: Design) -> Array:
        """The model of the intercept alone; without one, zero."""
        link, point = self.chosen_link, np.zeros(len(design.names))
        if design.plan.intercept:
            mean = design.seen["outcome"] / design.seen["weight"]
            if link != "identity" and not FAMILIES[self.family].domain(mean)[0]:
                mean = np.ones(1)
            point[design.intercept] = LINKS[link].link(mean)[0]
        elif link.startswith("inverse"):
            raise DataError(f"the link '{link}' needs an intercept in the formula.")
        return point

    def _shift(self, design: Design, slope: Array) -> Array:
        """What the intercept of rates lacks for as many expected events as there are.

        From a first point that an offset makes far too high, Newton's steps go down by about one each.
        """
        shift, events = np.zeros(len(slope)), float(design.seen["outcome"][0])
        if (self.family, self.chosen_link) == ("poisson", "log") and design.plan.offsets:
            shift[design.intercept] = np.log(events / (slope[design.intercept] + events))
        return shift

    def _model(self, design: Design, newton: Newton, last: Total, null: float | None) -> GLMModel:
        estimated, kept = FAMILIES[self.family].estimated, int(design.kept.sum())
        names = ("deviance", "pearson", "log_likelihood")
        deviance, pearson, likelihood = (float(last[name][0]) for name in names)
        phi, free = design.dispersion(pearson) if estimated else 1.0, float(design.used - kept)
        if estimated and free < 1:
            raise DataError(f"{design.used} rows for {kept} coefficients: none is left for errors.")
        if estimated and deviance <= 1e-24 * max(abs(null or 0.0), 1e-250):
            design.run.remark("the columns explain the outcome exactly: standard errors are rounding.")
        facts = {
            "family": self.family,
            "link": self.chosen_link,
            "errors": self.robust or "model-based",
            **newton.facts(likelihood),
            "deviance": deviance,
            "degrees": free,
            "null_deviance": null,
            "dispersion": phi if estimated else None,
            "r_squared" if self._linear else "deviance_explained": 1 - deviance / null if null else None,
            "events": design.seen["outcome"][0] if self.family == "binomial" else None,
        }
        plain, ratio = self.robust is None, "ratio" if self.chosen_link == "log" else ""
        model_based = phi * newton.covariance(newton.curvature)
        covariance = model_based if plain else self._sandwich(design, newton, last)
        more: dict[str, Any] = {"degrees": free if estimated and plain else 0.0}
        more["ratio"] = RATIOS.get((self.family, self.chosen_link), ratio)
        return design.result(GLMModel, newton.weight, covariance, facts, **more)

    def _sandwich(self, design: Design, newton: Newton, last: Total) -> Array:
        """H⁻¹ (sum g gᵀ) H⁻¹, with the correction for few rows or sites that is usual."""
        bread = newton.covariance(last["observed"])
        sites, free, factor = len(last.cohort), design.used - float(design.kept.sum()), 1.0
        if self.robust == "HC1":
            factor = design.used / free
        elif self.robust == "cluster":
            if sites < 2:
                raise DataError("errors by site need at least two sites; this federation has one.")
            factor = sites / (sites - 1) * (design.used - 1) / free
        return np.asarray(factor * bread @ last["meat"] @ bread)


# -- at the client -----------------------------------------------------------------------------------


@step(STEP, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """At the coefficients of the request: deviance, Pearson's sum, gradient and information; at the end
    instead of these two the log-likelihood and, for robust errors, sum g gᵀ over rows or, by site, g gᵀ.
    """
    parameters, rows = memory.chain.opening["parameters"], read(data, memory)
    family, x, w, (y,) = FAMILIES[parameters["family"]], rows.x, rows.weight, rows.outcome
    link, last = LINKS[parameters["link"] or family.links[0]], bool(request.note["last"])
    if wrong := int(np.sum(~family.fits(y))):
        name = parameters["family"]
        raise DataError(f"the outcome must be {family.allowed} in the {name} family; {wrong} rows are not.")
    eta = x @ request.arrays["weight"] + rows.offset
    with np.errstate(all="ignore"):
        mean, slope = link.mean(eta), link.slope(eta)
        variance, gap = family.variance(mean), y - mean
        # Of minus the log-likelihood by eta, times phi, for every row; and minus its second derivative.
        slopes = -w * gap * slope / variance
        turned = link.bend(eta) * variance - slope**2 * family.variance_slope(mean)
        bend = w * (slope**2 / variance - gap * turned / variance**2)
        invalid = int(np.sum(~(family.domain(mean) & np.isfinite(slopes) & np.isfinite(bend))))
        sums = {"deviance": np.array([w @ family.deviance(y, mean)])}
        sums["pearson"] = np.array([w @ (gap**2 / variance)])
        if last:
            likelihood = family.log_likelihood(y, mean, w, float(request.note["phi"]))
            sums["log_likelihood"] = np.array([np.sum(likelihood[w > 0])])
        else:
            sums |= {"gradient": slopes @ x, "curvature": _gram(x, w * slope**2 / variance)}
        if parameters["robust"] if last else link is not LINKS[family.links[0]]:
            sums["observed"] = _gram(x, bend)
        if not invalid:
            check_weights(data, slopes**2 if last and parameters["robust"] else w * slope**2 / variance)
        if last and parameters["robust"]:
            clusters, g = parameters["robust"] == "cluster", slopes @ x
            sums["meat"] = np.outer(g, g) if clusters else _gram(x, slopes**2)
    if invalid:  # without means that the family has there is nothing to sum; the server takes a shorter step
        sums = {name: np.zeros_like(array) for name, array in sums.items()}
    return Term(sums, {"invalid": invalid}, frozenset(sums) & {"curvature", "observed", "meat"})


def _gram(x: Array, weight: Array) -> Array:
    """Sum of weight x xᵀ, the same from either side."""
    found = (x * weight[:, None]).T @ x
    return np.asarray(0.5 * (found + found.T))


step(CLUSTERS)(answer)  # of every site apart: rows that several sites bring together have no g of a site
