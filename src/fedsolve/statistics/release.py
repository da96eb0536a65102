"""Release: one noisy Gram matrix of a table, which answers linear questions about it ever after.

    z = [1, columns, label] / R     numbers as (x - reference) / (reach scale), cut off at -1 and 1;
                                    categories as 0 and 1; R the largest length that such a row can have
    A = sum z zᵀ + E                one row changes it by at most 1; E is noise of deviation s (s / sqrt 2 off
                                    the diagonal)

Whatever is computed from A costs nothing more. A linear model of y on columns S is b = A_SS^-1 A_Sy. It
differs from that of the exact sums by A_SS^-1 (e_Sy - E_SS b), up to higher orders of the noise; so its
covariance, as far as noise makes it, is

    V = A_SS^-1  s²/2 [(1 + |b|²) I + b bᵀ]  A_SS^-1

Intervals for what the pooled rows would give follow from V; for what rows are drawn from, from V plus the
usual residual variance times A_SS^-1. What is missing counts as the reference of its column, and a category
that the schema does not name as its first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.closedform.sums import chunks
from fedsolve.errors import DataError, did_you_mean
from fedsolve.federation.client_data import run_schema
from fedsolve.federation.dialogue import Ask, DialogueMethod, DialogueRun, Talk
from fedsolve.federation.method import Chain, Request, Term, opening_classes
from fedsolve.federation.noisy_sums import mu_of
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.preparing import public_preparation
from fedsolve.labels import encode_labels, regression_targets
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.statistics.results import CoefficientTable, StatisticModel

KIND = "release-gram"
CONSTANT = "Intercept"
_CLEAR = 3.0
"""How far the least eigenvalue of some columns must stand above the largest that noise gives."""


NoisyFit = tuple[Array, Array, Array]
"""Coefficients, their covariance by noise, and by rows."""


class Release(StatisticModel):
    """A noisy Gram matrix and what its columns are."""

    family: ClassVar[str] = "release"
    title: ClassVar[str] = "Release"

    names: list[str]
    groups: dict[str, list[str]]  # columns of a category, by its name
    gram: Array  # (columns, columns), of z = (x - centre) / scale
    centre: Array
    scale: Array
    deviation: float  # of the noise on the diagonal

    @property
    def rows(self) -> float:
        """How many rows there are, as far as the noise lets it be known."""
        return float(self.gram[0, 0] * self.scale[0] ** 2)

    def moments(self) -> tuple[Array, Array]:
        """Mean and covariance of all columns but the constant, in their own units."""
        mean, scale = self.gram[0, 1:] / self.gram[0, 0], self.scale[1:] / self.scale[0]
        spread = self.gram[1:, 1:] / self.gram[0, 0] - np.outer(mean, mean)
        return self.centre[1:] + mean * scale, spread * np.outer(scale, scale)

    def correlation(self) -> Array:
        """Correlations of all columns but the constant, from -1 to 1; NaN where noise is all there is."""
        covariance = self.moments()[1]
        root = np.sqrt(np.where(np.diag(covariance) > 0, np.diag(covariance), np.nan))
        return np.asarray(np.clip(covariance / np.outer(root, root), -1.0, 1.0))

    def pca(self, columns: Sequence[str] | None = None) -> tuple[Array, Array]:
        """Variances and directions (columns, components) of standardised columns, the largest first."""
        places = [self.names.index(name) - 1 for name in columns or self.names[1:]]
        values, vectors = np.linalg.eigh(self.correlation()[np.ix_(places, places)])
        return np.maximum(values[::-1], 0.0), vectors[:, ::-1]

    def fit(self, formula: str, ridge: float = 0.0) -> ReleasedFit:
        """A linear model such as "y ~ a + sex"; "y ~ ." has all columns. ridge: penalty, as of rows of z."""
        outcome, chosen = self._parsed(formula)
        some, y = [0, *(self.names.index(name) for name in chosen)], self.names.index(outcome)
        gram = self.gram[np.ix_([*some, y], [*some, y])]
        penalty = ridge * np.diag([0.0] + [1.0] * len(chosen))
        found = noisy_least_squares(gram, self.deviation, self.rows, formula, penalty)
        own = float(self.centre[y]), float(self.scale[y])
        known = in_units((CONSTANT, *chosen), self.centre[some], self.scale[some], own, found)
        facts = {"formula": formula, "rows": round(self.rows), **self.facts}
        return ReleasedFit(self.features, facts, degrees=0.0, ratio="", **known)

    def _parsed(self, formula: str) -> tuple[str, list[str]]:
        left, found, right = (part.strip() for part in formula.partition("~"))
        if not found:
            raise DataError(f"'{formula}' is no formula; write it as 'y ~ a + b'.")
        chosen: list[str] = []
        for word in (part.strip() for part in right.split("+")):
            name = word.removeprefix("C(").removesuffix(")") if word.startswith("C(") else word
            if name == ".":
                some = tuple(f"{group}=" for group in self.groups)
                chosen += [n for n in self.names[1:] if n != left and not n.startswith(some)]
                chosen += [n for group in self.groups.values() for n in group[1:] if left not in group]
            elif name in self.groups:
                chosen += self.groups[name][1:]
            else:
                chosen.append(self._known(name))
        if self._known(left) in chosen or not chosen:
            raise DataError(f"'{formula}' needs an outcome on its left and other columns on its right.")
        return left, list(dict.fromkeys(chosen))

    def _known(self, name: str) -> str:
        if name not in self.names[1:]:
            known = [*self.names[1:], *self.groups]
            raise DataError(
                f"this release has no column '{name}'.{did_you_mean(name, known)} It has {', '.join(known)}; "
                "products and functions of columns are not in it."
            )
        return name

    def records(self) -> list[dict[str, Any]]:
        mean, covariance = self.moments()
        spread = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        return [
            {"column": name, "mean": float(mean[place]), "deviation": float(spread[place])}
            for place, name in enumerate(self.names[1:])
        ]


def noisy_least_squares(
    gram: Array, deviation: float, rows: float, formula: str, penalty: Array | float = 0.0
) -> NoisyFit:
    """The fit of y on columns, of the noisy Gram matrix of [columns, y]."""
    within, across = gram[:-1, :-1], gram[:-1, -1]
    noise = deviation * math.sqrt(2 * len(within))
    least = float(np.linalg.eigvalsh(within)[0])
    if least + np.max(penalty) < _CLEAR * noise:
        raise DataError(
            f"the noise of this release is too large for '{formula}': its columns vary by {least:.3g} in "
            f"their weakest direction, and noise alone by {noise:.3g}. Choose fewer columns, or a ridge."
        )
    inverse = np.linalg.inv(within + penalty)
    b = inverse @ across
    spread = deviation**2 / 2 * ((1 + b @ b) * np.eye(len(b)) + np.outer(b, b))
    residual = max(0.0, float(gram[-1, -1] - b @ across)) / max(1.0, rows - len(b))
    return b, inverse @ spread @ inverse, residual * inverse


def in_units(
    names: Sequence[str], middle: Array, unit: Array, outcome: tuple[float, float], fit: NoisyFit
) -> dict[str, Any]:
    """A table's coefficients and covariances, for columns and an outcome as they are.

    fit: of (x - middle) / unit, where the constant has the middle 0; outcome: the same two of y.
    """
    (b, by_noise, by_rows), (low, scale), place = fit, outcome, names.index(CONSTANT)
    units = np.diag(scale / unit)
    units[place] -= scale * middle / unit
    noisy, whole = (units @ each @ units.T for each in (by_noise, by_noise + by_rows))
    coefficient = units @ b
    coefficient[place] += low
    known = {"names": tuple(names), "coefficient": coefficient, "covariance": whole, "by_noise": noisy}
    return {**known, "kept": np.ones(len(names), dtype=bool)}


class ReleasedFit(CoefficientTable):
    """Coefficients from a release, with intervals for the population and for the pooled rows."""

    family: ClassVar[str] = "released-fit"
    title: ClassVar[str] = "Linear model from a release"


def unweighted(data: ClientData) -> ClientData:
    """The rows, refused where they have weights."""
    if data.own_weights is not None:
        raise DataError("rows with weights are not private: a weight is as much as it says. Leave them out.")
    return data


@register(
    "release",
    paper="Sheffet 2017; Dong, Roth and Su 2022",
    exchanges="1",
    up="the noisy Gram matrix of all columns and the label",
    down="nothing but the request",
)
@dataclass(frozen=True)
class Releasing(DialogueMethod[Release]):
    """Release: one noisy Gram matrix of a table for any number of linear questions.

    reach: columns are cut off so many scales of the schema from their reference.
    """

    preparation: ClassVar[Literal["standardise", "fill", "none", "public"]] = "none"

    epsilon: float = parameter(1.0, "How much may be learnt about a row, in all.", above=0)
    delta: float = parameter(1e-5, "Chance that more is learnt.", above=0, below=1)
    reach: float = parameter(3.0, "Scales from the reference at which numbers are cut off.", above=0)
    target_reference: float = parameter(0.0, "A value near which a numeric label lies.")
    target_scale: float = parameter(1.0, "About how far a numeric label spreads.", above=0)
    honest: float = parameter(
        0.75, "Share of the sites whose noise must be in a secure sum.", above=0, most=1
    )

    def agreement(self) -> dict[str, Any]:
        privacy = {"epsilon": self.epsilon, "delta": self.delta, "unit": "row", "honest": self.honest}
        return {"incomplete": True, "privacy": {**privacy, "rows": 1}}

    def talk(self, run: DialogueRun[Release]) -> Talk[Release]:
        names, centre, scale, groups = _columns(run.chain, run.spec.features)
        total = yield Ask(KIND, {"mu": mu_of(self.epsilon, self.delta)})
        noise, by = total.noise["gram"], "sites" if total.noised else "server"
        facts = {"epsilon": self.epsilon, "delta": self.delta, "noise": noise, "noise_by": by}
        known = {"names": names, "groups": groups, "centre": centre, "scale": scale, "gram": total["gram"]}
        parameters = {**self.parameters(), "noise": by}
        return Release(run.spec.features, facts, **known, deviation=noise, parameters=parameters)


def _columns(chain: Chain, width: int) -> tuple[list[str], Array, Array, dict[str, list[str]]]:
    """Names of the columns of z, their centres and scales so that |z| <= 1, and categories."""
    opening = chain.opening
    schema, parameters, classes = run_schema(chain), opening["parameters"], opening_classes(chain)
    reach, groups = parameters["reach"], {}
    names, label = [f"x{place}" for place in range(width)], "y"
    centre, scale, square = np.zeros(width), np.full(width, reach), float(width)
    if schema is not None:
        if schema.extractor is not None or schema.places("text"):
            raise DataError("a release is of numbers, dates and categories; text and images have no bounds.")
        prepared = public_preparation(schema)
        names, label, centre = list(schema.names), schema.label or "y", prepared.origin.copy()
        scale = np.ones(width)
        square = 0.0
        for place, column in schema.places("number", "date", "category"):
            if column.kind == "category":
                square += 1.0
                groups[column.name] = names[place : place + len(column.categories)]
            else:
                square += len(column.names)
                scale[place] = reach * prepared.scale[place]
    own, origin, unit = [label], 0.0, 1.0
    if classes is None:
        origin, unit = parameters["target_reference"], reach * parameters["target_scale"]
    elif len(classes) > 2:
        own = groups[label] = [f"{label}={each}" for each in classes]
    scale = np.concatenate([[1.0], scale, np.full(len(own), unit)]) * math.sqrt(1.0 + square + 1.0)
    return [CONSTANT, *names, *own], np.concatenate([[0.0], centre, np.full(len(own), origin)]), scale, groups


@step(KIND, releases={"gram": 1.0})
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """sum z zᵀ of rows of length 1 at most."""
    unweighted(data)
    names, centre, scale, _ = _columns(memory.chain, data.width)
    classes, labels = opening_classes(memory.chain), data.own_labels
    if classes is None:
        target = regression_targets(labels, 1)
    else:
        codes = encode_labels(labels, classes)
        target = np.eye(len(classes))[codes] if len(classes) > 2 else codes[:, None].astype(np.float64)
    length = float(scale[0])
    gram = np.zeros((len(names), len(names)))
    for span in chunks(len(data), len(names)):
        rows = np.hstack([data.features(span), target[span]])
        z = np.clip((rows - centre[1:]) * (length / scale[1:]), -1.0, 1.0) / length
        z = np.hstack([np.full((len(z), 1), 1.0 / length), np.where(np.isnan(z), 0.0, z)])
        gram += z.T @ z
    return Term({"gram": gram}, {}, frozenset({"gram"}))
