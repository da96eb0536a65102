"""The preparation of rows that a schema describes, by sums over all sites.

Every client answers with n, sum z and sum z² of its numbers and dates, over the rows where they are not
missing, with z = (x - reference) / scale as the schema says, and with its rows by class. The means and scales
become a block of the model. From then on every client's rows are filled and standardised before a step of a
method sees them, whatever the method; the model that comes out takes raw tables.

Categories, flags and hashed words stay as they are: they have a common scale already.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array, check_rows
from fedsolve.errors import ConditionWarning
from fedsolve.federation.client_data import TABLE_BLOCK, TABLE_MOMENTS, ClientData, run_schema
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Block, Request, Term, Total
from fedsolve.federation.method import Run, opening_classes
from fedsolve.federation.participant import Memory, step
from fedsolve.labels import encode_labels
from fedsolve.model import Model
from fedsolve.tables.preparation import Preparation, mean_and_deviation
from fedsolve.tables.schema import Schema

if TYPE_CHECKING:
    from fedsolve.federation.recipe import Recipe

LARGEST = "rows of the largest class"

_LOST = 1e-13
"""Share of its squared distance from the reference below which a variance is rounding and nothing else."""
_FAR = 1e-6
"""Share below which too few digits of a variance are left for equal models on other partitions."""


class PreparationRun(Run[Model]):
    """One exchange. rows: how many there are in all."""

    transient = frozenset({"recipe"})

    def __init__(self, recipe: Recipe[Any], spec: Spec) -> None:
        super().__init__(recipe.method, spec)
        self.recipe = recipe
        self.rows: int | None = None

    def request(self, clients: tuple[str, ...]) -> Request | None:
        return self.ask(TABLE_MOMENTS, 0, clients) if self.rows is None else None

    def absorb(self, total: Total) -> None:
        self.rows = total.count("rows")
        check_rows(self.rows)
        arrays: dict[str, Array] = {}
        if self.recipe.schema is not None:
            arrays = solve_preparation(self.recipe.schema, total, self.recipe.scales).arrays()
        if self.recipe.class_weight is not None:
            arrays["class_weight"] = balanced_weights(total["class_rows"])
        if arrays:
            self.add(Block({TABLE_BLOCK: True}, arrays))
        largest = float(total["class_rows"].max()) if "class_rows" in total.term.arrays else float(self.rows)
        self.record(total, metrics={LARGEST: largest})


def _measured(schema: Schema) -> tuple[Array, Array, Array]:
    """Which features are summed, and about which reference and in which unit."""
    columns = schema.places("number", "date")
    places = np.array([place for place, _ in columns], dtype=np.intp)
    # Encoded dates are counted from their reference in their unit already.
    numbers = [(c.reference, c.scale) if c.kind == "number" else (0.0, 1.0) for _, c in columns]
    references, units = np.array(numbers, dtype=np.float64).reshape(-1, 2).T
    return places, references, units


@step(TABLE_MOMENTS, over_rows=True)
def answer_table_moments(data: ClientData, request: Request, memory: Memory) -> Term:
    """n, sum z and sum z² of every number and date, over the rows that have it; rows by class."""
    schema = run_schema(memory.chain)
    places, references, units = (np.zeros(0, dtype=np.intp),) * 3 if schema is None else _measured(schema)
    weights = data.own_weights
    sums = np.zeros((3, len(places)))
    for span in data.spans():
        scaled = (data.features(span)[:, places] - references) / units
        there = ~np.isnan(scaled)
        scaled = np.where(there, scaled, 0.0)
        counted = there.astype(np.float64) if weights is None else there * weights[span, None]
        sums += [counted.sum(axis=0), (counted * scaled).sum(axis=0), (counted * scaled**2).sum(axis=0)]
    term = Term({"moments": sums}, {"rows": len(data)})
    classes = opening_classes(memory.chain)
    if classes is not None:
        codes = encode_labels(data.own_labels, classes)
        term.arrays["class_rows"] = np.bincount(codes, weights, minlength=len(classes)).astype(np.float64)
    return term


def solve_preparation(schema: Schema, total: Total, standardise: bool) -> Preparation:
    """What fills and standardises the rows of all clients together.

    A column that is constant is only centred, and one that is missing everywhere becomes zero.
    """
    check_rows(total.count("rows"))
    places, references, units = _measured(schema)
    count, first, second = total["moments"]
    seen = np.where(count > 0, count, 1.0)
    mean, deviation = mean_and_deviation(seen, first, second, _LOST)
    far = (deviation != 1.0) & (deviation**2 < _FAR * mean**2)  # 1: constant
    if np.any(far):
        names = ", ".join(f"'{schema.names[place]}'" for place in places[far])
        warnings.warn(
            f"the schema's reference is far from the values of {names}, compared with their spread, and "
            "digits of the spread are lost. Name a reference nearer to them.",
            ConditionWarning,
            stacklevel=2,
        )
    means, centre, scale = np.zeros(schema.width), np.zeros(schema.width), np.ones(schema.width)
    means[places] = references + units * mean
    if standardise:
        centre[places] = means[places]
        scale[places] = units * deviation
    return Preparation(means, scale, centre=centre)


def public_preparation(schema: Schema) -> Preparation:
    """What the schema's own references and scales make of numbers; what is missing becomes the reference."""
    places, references, units = _measured(schema)
    centre, scale = np.zeros(schema.width), np.ones(schema.width)
    centre[places], scale[places] = references, units
    return Preparation(centre, scale, centre=centre)


def balanced_weights(class_rows: Array) -> Array:
    """A row's weight by its class, so that all classes with rows count alike and the mean weight is 1."""
    there = class_rows > 0
    return np.where(there, class_rows.sum() / (there.sum() * np.where(there, class_rows, 1.0)), 0.0)
