"""Private: methods with noise, so that what comes out says next to nothing about any one row.

Of AFL and Softmax three kinds of sums leave, each with noise that `federation.noisy_sums` adds (mu² is what
an account adds up):

    mean      sum u, n                     u = x / |x|                                  1 % of mu²
    gram      G = sum a aᵀ, H = sum a yᵀ   a = (u - m) / |u - m|, m the noisy mean      the rest, or 25 %
    gradient  sum a (p - y)ᵀ               |p - y| clipped to 1, `steps` times          the rest, equal parts

Every a has length 1, so one row changes G and H by at most 1 each. Eigenvalues of the noisy G are clamped at
0, and the ridge is as large as what noise makes of them: s sqrt(2 d) / 2, half the largest eigenvalue of a
noise matrix with deviation s (off the diagonal s / sqrt 2). Without steps, W = (G + ridge)^-1 H. With steps,
W starts from the gradient at 0, which H holds already, and follows W -= 5 (G/2 + ridge)^-1 (noisy gradient).

A constant column in a is the intercept. Tables are prepared by the schema's reference and scale, which are
agreed in advance: means of the rows would be releases too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import numpy as np
from scipy.special import softmax

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.predictors import LinearModel
from fedsolve.closedform.softmax import Softmax
from fedsolve.closedform.sums import blocks_with, chunks
from fedsolve.container import canonical_json
from fedsolve.errors import DataError
from fedsolve.federation.dialogue import Ask, DialogueMethod, DialogueRun, Talk
from fedsolve.federation.engine import schema_of
from fedsolve.federation.method import Block, Federation, Method, Request, Spec, Term, opening_classes
from fedsolve.federation.noisy_sums import mu_of
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.labels import encode_labels, labels_from_note
from fedsolve.parameters import parameter
from fedsolve.registry import register

MEAN, GRAM, GRADIENT = "private-mean", "private-gram", "private-gradient"
_MEAN_SHARE = 0.01
_GRAM_SHARE = 0.25
_CONSTANT = 0.25
_FIRST, _STRIDE = 8.0, 5.0
_CLIP = 1.0
STEPS, FROM_EPSILON = 6, 0.2
"""Softmax steps where none are given, and the epsilon from which they are worth their noise."""


class PrivateModel(LinearModel):
    """Scores [a, c] W of rows that are put on the unit sphere about a centre; c is a constant."""

    family: ClassVar[str] = "private-linear"

    def __init__(
        self, weight: Array, centre: Array, classes: Array | None, parameters: dict[str, Any]
    ) -> None:
        super().__init__(weight, np.zeros(weight.shape[1]), classes, None, parameters)
        self.features, self.centre = len(centre), centre

    def scores(self, features: Array) -> Array:
        found: Array = on_sphere(features, self.centre, len(self.weight) > len(self.centre)) @ self.weight
        return found

    def arrays(self) -> dict[str, Array]:
        return {"weight": self.weight, "centre": self.centre}

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> Self:
        classes = labels_from_note(note["classes"])
        return cls(arrays["weight"], arrays["centre"], classes, note["parameters"])


@register(
    paper="Dong, Roth and Su 2022; Sheffet 2017",
    exchanges="2, and one per softmax step; statistics: 1 to 4",
    up="noisy sums: mean (d), Gram and cross matrix as afl, then gradients (d x C)",
    down="the noisy mean, then weights, d x C",
)
@dataclass(frozen=True)
class Private(DialogueMethod[Any]):
    """Private: AFL, Softmax, GLM or Describe with differential privacy.

    of:   fs.AFL(), fs.Softmax(), fs.GLM(...), fs.Describe(), or a name. Others are refused: nobody has
          bounded what a row changes.
    unit: what is hidden: one row, or everything that one site has.
    """

    of: str = parameter("softmax", "The method that is made private: afl, softmax, glm or describe.")
    epsilon: float = parameter(1.0, "How much may be learnt about a row, in all.", above=0)
    delta: float = parameter(1e-5, "Chance that more is learnt.", above=0, below=1)
    unit: Literal["row", "site"] = parameter("row", "What is hidden: a row, or a whole site.")
    steps: int | None = parameter(
        None,
        "Softmax steps; 0 solves in one shot.",
        least=0,
        most=1000,
        none=f"{STEPS} for softmax from epsilon {FROM_EPSILON:g} on",
    )
    intercept: bool = parameter(True, "Fit an intercept, as a constant column.")
    honest: float = parameter(
        0.75, "Share of the sites whose noise must be in a secure sum.", above=0, most=1
    )
    site_rows: int = parameter(100, "With unit=site: rows by which one site counts at most.", least=1)
    within: str = parameter("", "Parameters of the method that is made private, as JSON.")

    def __init_subclass__(cls, **keywords: Any) -> None:
        raise TypeError("Private is not derived from: what leaves it is what its steps declare.")

    def __post_init__(self) -> None:
        given: Any = self.of
        if isinstance(given, Method):
            if isinstance(given, AFL | Softmax):
                plain, what = type(given)(), type(given).__name__
                set_here = [f.name for f in fields(given) if getattr(given, f.name) != getattr(plain, f.name)]
                if set_here:
                    raise DataError(
                        f"Private({what}) chooses {', '.join(set_here)} by its noise, or has its own (steps, "
                        "intercept). Leave it out of the method within."
                    )
            object.__setattr__(self, "of", given.key)
            if hasattr(given, "privately"):
                object.__setattr__(self, "within", canonical_json(given.parameters()))
        if self.of not in ("afl", "softmax") and not hasattr(registry.method_class(self.of), "privately"):
            raise DataError(
                f"method '{self.of}' cannot be made private: how much one row changes its answers is not "
                "bounded. Private takes afl, softmax, glm and describe; fs.Release answers linear models."
            )
        super().__post_init__()

    @property
    def statistic(self) -> Any:
        """The method of statistics that is made private; None where it is AFL or Softmax."""
        if self.of in ("afl", "softmax"):
            return None
        return registry.method_class(self.of)(**json.loads(self.within or "{}"))

    @property
    def preparation(self) -> Literal["none", "public"]:  # type: ignore[override]
        return "none" if self.statistic else "public"

    @property
    def mu(self) -> float:
        """What the whole run costs."""
        return mu_of(self.epsilon, self.delta)

    def agreement(self) -> dict[str, Any]:
        names = ("epsilon", "delta", "unit", "honest")
        privacy = {**{n: getattr(self, n) for n in names}, "rows": self.site_rows}
        return {**(self.statistic.agreement() if self.statistic else {}), "privacy": privacy}

    def fit(self, federation: Federation, *args: Any, **settings: Any) -> Any:
        known = {"schema": schema_of(federation)} if self.statistic else {}
        return super().fit(federation, *args, **{**known, **settings})

    def gradients(self) -> int:
        """How many softmax steps there are."""
        if self.of == "afl":
            return 0
        return (STEPS if self.epsilon >= FROM_EPSILON else 0) if self.steps is None else self.steps

    def costs(self) -> tuple[float, ...]:
        """mu of each exchange; together they are the mu of the run."""
        count, rest = self.gradients(), 1.0 - _MEAN_SHARE
        gram = rest * (_GRAM_SHARE if count else 1.0)
        each = [(rest - gram) / count] * count if count else []
        return tuple(self.mu * math.sqrt(share) for share in (_MEAN_SHARE, gram, *each))

    @property
    def usual(self) -> int:
        return 1 if self.statistic else 2 + self.gradients()

    def largest_side(self, spec: Spec) -> int:
        return spec.features + int(self.intercept)

    def talk(self, run: DialogueRun[Any]) -> Talk[Any]:
        if self.statistic:
            return (yield from self.statistic.privately(run, self.mu))
        if run.spec.classes is None:
            raise DataError("Private is for classes; for targets that are numbers see fs.Release.")
        mean, gram, *steps = ({"mu": cost, "intercept": self.intercept} for cost in self.costs())
        total = yield Ask(MEAN, mean)
        rows = float(total["rows"][0])
        if rows < 1:
            raise DataError(
                f"with its noise the number of rows is {rows:.0f}: there are too few for "
                f"epsilon {self.epsilon:g}. Collect more rows, or raise epsilon."
            )
        centre = total["sum"] / rows
        centre /= max(1.0, float(np.linalg.norm(centre)))
        run.add(Block({"private": True}, {"centre": centre}))
        total = yield Ask(GRAM, gram)
        values, vectors = np.linalg.eigh(total["gram"])
        values, cross = np.maximum(values, 0.0) / (2 if steps else 1), total["cross"]
        values += total.noise["gram"] * math.sqrt(2 * len(values)) / 2

        def smoothed(sums: Array) -> Array:
            return np.asarray(vectors @ ((vectors.T @ sums) / values[:, None]))

        if not steps:
            weight = smoothed(cross)
        else:
            weight = _FIRST * smoothed(cross - cross.sum(axis=1, keepdims=True) / cross.shape[1])
        for step_note in steps:
            total = yield Ask(GRADIENT, step_note, {"weight": weight})
            weight = weight - _STRIDE * smoothed(total["gradient"])
        parameters = {**self.parameters(), "noise": "sites" if total.noised else "server"}
        return PrivateModel(weight, centre, run.spec.classes, parameters)


# -- the client's steps ----------------------------------------------------------------------------


def on_sphere(rows: Array, centre: Array | None, constant: bool = False) -> Array:
    """Rows of length 1: seen from a centre where there is one, with a constant column where asked for."""
    found = _unit(np.asarray(rows, dtype=np.float64))
    if centre is not None:
        found = _unit(found - centre)
    if constant:
        found = np.hstack([found, np.full((len(found), 1), _CONSTANT)]) / math.hypot(1.0, _CONSTANT)
    return found


def _unit(rows: Array) -> Array:
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1.0))


def _seen(data: ClientData, request: Request, memory: Memory) -> Iterator[tuple[Array, slice]]:
    """Some thousand rows at a time, on the sphere."""
    if data.own_weights is not None:
        raise DataError("rows with weights are not private: a weight is as much as it says. Leave them out.")
    blocks = blocks_with(memory.chain, "private")
    centre = blocks[0].arrays["centre"] if blocks else None
    for span in chunks(len(data), data.width):
        yield on_sphere(data.features(span), centre, bool(blocks) and request.note["intercept"]), span


@step(MEAN, releases={"sum": 1.0, "rows": 1.0})
def answer_mean(data: ClientData, request: Request, memory: Memory) -> Term:
    """The sum of the rows, each of length 1, and how many there are."""
    total = np.zeros(data.width)
    for rows, _ in _seen(data, request, memory):
        total += rows.sum(axis=0)
    return Term({"sum": total, "rows": np.array([float(len(data))])})


@step(GRAM, releases={"gram": 1.0, "cross": 1.0})
def answer_gram(data: ClientData, request: Request, memory: Memory) -> Term:
    """G and H of rows of length 1 and of labels as one-hot rows."""
    labels, classes = _labels(data, memory)
    width = data.width + int(request.note["intercept"])
    gram, cross = np.zeros((width, width)), np.zeros((width, classes))
    for rows, span in _seen(data, request, memory):
        gram += rows.T @ rows
        cross += rows.T @ np.eye(classes)[labels[span]]
    return Term({"gram": gram, "cross": cross}, {}, frozenset({"gram"}))


@step(GRADIENT, releases={"gradient": _CLIP})
def answer_gradient(data: ClientData, request: Request, memory: Memory) -> Term:
    """sum a (p - y)ᵀ at the weights of the request, every |p - y| at most 1."""
    labels, classes = _labels(data, memory)
    weight = request.arrays["weight"]
    gradient = np.zeros(weight.shape)
    for rows, span in _seen(data, request, memory):
        residual = softmax(rows @ weight, axis=1) - np.eye(classes)[labels[span]]
        length = np.linalg.norm(residual, axis=1, keepdims=True)
        gradient += rows.T @ (residual / np.maximum(1.0, length / _CLIP))
    return Term({"gradient": gradient})


def _labels(data: ClientData, memory: Memory) -> tuple[Array, int]:
    classes = opening_classes(memory.chain)
    if classes is None:
        raise DataError("a private run is about classes; this one has none.")
    return encode_labels(data.own_labels, classes), len(classes)
