"""Any method on rows that a schema describes, prepared by sums over all sites.

One exchange more: every client answers with n, sum z and sum z² of its numbers and dates, over the rows where
they are not missing, with z = (x - reference) / scale as the schema says, and with its rows by class. The
means and scales become a block of the model. From then on every client's rows are filled and standardised
before a step of the method sees them, whatever the method; the model that comes out takes raw tables.

Categories, flags and hashed words stay as they are: they have a common scale already.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from fedsolve.checks import check_choice, check_rows
from fedsolve.container import Array
from fedsolve.errors import ConditionWarning, DataError
from fedsolve.federation.client_data import TABLE_BLOCK, TABLE_MOMENTS, ClientData, run_schema
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.messages import Block, Request, Term, Total
from fedsolve.federation.method import Method, Run, opening_classes
from fedsolve.federation.participant import Memory, step
from fedsolve.labels import encode_labels
from fedsolve.model import Model
from fedsolve.preparation import TablePreparation, mean_and_deviation
from fedsolve.schema import Schema

M = TypeVar("M", bound=Model)

_ROWS = 16384
_LOST = 1e-13
"""Share of its squared distance from the reference below which a variance is rounding and nothing else."""
_FAR = 1e-6
"""Share below which too few digits of a variance are left for equal models on other partitions."""


@dataclass(frozen=True)
class Described(Method[M]):
    """A method and the schema of the rows that it is trained on; None where they are plain numbers.

    standardise:  numbers and dates to mean 0 and deviation 1 over all sites; else they are only filled.
    class_weight: "balanced" lets every class count alike, whatever its rows; None counts rows.
    """

    key: ClassVar[str] = "described"

    method: Method[M]
    schema: Schema | None = None
    standardise: bool = True
    class_weight: Literal["balanced"] | None = None

    def __post_init__(self) -> None:
        check_choice("class_weight", self.class_weight, (None, "balanced"))

    def parameters(self) -> dict[str, Any]:
        return self.method.parameters()

    def agreement(self) -> dict[str, Any]:
        return {} if self.schema is None else {"schema": self.schema.to_note()}

    @property
    def measures(self) -> bool:
        """Whether the sums are needed at all: not for features of images, nor where nothing follows."""
        numbers = [] if self.schema is None else self.schema.places("number", "date")
        fills = any(column.missing != "refuse" for _, column in numbers)
        return fills or (self.standardise and bool(numbers)) or self.class_weight is not None

    def start(self, spec: Spec) -> DescribedRun[M]:
        schema = self.schema
        if schema is not None and spec.features != schema.width:
            raise DataError(
                f"the schema makes {schema.width} features of a row; the federation has {spec.features}."
            )
        classes = None if schema is None else schema.class_array
        if classes is not None and spec.classes is not None:
            encode_labels(spec.classes, classes)
            spec = dataclasses.replace(spec, classes=classes, outputs=len(classes))
        if self.class_weight is not None and spec.classes is None:
            raise DataError("class_weight is for classification; these are targets of a regression.")
        return DescribedRun(self, spec)

    def finished(self, model: M, federation: Federation) -> M:
        return self.method.finished(model, federation)


class DescribedRun(Run[M]):
    """The method's own run, after one exchange for the preparation.

    inner: that run. The chain and the history are its own, so that a checkpoint of it holds everything.
    """

    method: Described[M]

    def __init__(self, method: Described[M], spec: Spec) -> None:
        super().__init__(method, spec)
        self.inner = method.method.start(spec)
        self.inner.agree(method.agreement())
        self._follow()

    def _follow(self) -> None:
        self.chain, self.history = self.inner.chain, self.inner.history

    @property
    def exchanges(self) -> int:
        return self.inner.exchanges + self.method.measures

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self._measuring():
            return self.inner.ask(TABLE_MOMENTS, 0, clients)
        return self.inner.request(clients)

    def absorb(self, total: Total) -> None:
        if not self._measuring():
            self.inner.absorb(total)
            return
        check_rows(total.count("rows"))
        arrays: dict[str, Array] = {}
        if self.method.schema is not None:
            arrays = solve_preparation(self.method.schema, total, self.method.standardise).arrays()
        if self.method.class_weight is not None:
            arrays["class_weight"] = balanced_weights(total["class_rows"])
        self.add(Block({TABLE_BLOCK: True}, arrays))
        self.inner.record(total)

    def within(self) -> Mapping[str, Run[Any]]:
        return {"": self.inner}

    def expect(self, trainings: int, besides: int) -> None:
        self.inner.expect(trainings, besides + trainings * self.method.measures)

    def choice(self) -> dict[str, Any] | None:
        return self.inner.choice()

    def take_choice(self, choice: Mapping[str, Any]) -> None:
        self.inner.take_choice(choice)

    def model(self) -> M:
        return self._described(self.inner.model())

    def targets(self) -> dict[str, M]:
        """The models of this moment by name, of a method that has more than one."""
        named: dict[str, M] = self.inner.targets()  # type: ignore[attr-defined]
        return {name: self._described(model) for name, model in named.items()}

    def reported(self) -> str:
        """Which of the targets `model` gives at this moment."""
        name: str = self.inner.reported()  # type: ignore[attr-defined]
        return name

    def _described(self, model: M) -> M:
        if self.method.schema is None:
            return model
        model.schema = self.method.schema
        prepared = [block for block in self.chain.blocks if TABLE_BLOCK in block.note]
        model.preparing = TablePreparation.from_arrays(prepared[0].arrays) if prepared else None
        return model

    def _measuring(self) -> bool:
        return self.method.measures and not any(TABLE_BLOCK in block.note for block in self.chain.blocks)

    def to_bytes(self) -> bytes:
        self.inner.whose_rows = self.whose_rows
        return self.inner.to_bytes()

    def restore(self, data: bytes, path: str) -> None:
        self.inner.restore(data, path)
        self._follow()


def _measured(schema: Schema) -> tuple[Array, Array, Array]:
    """Which features are summed, and about which reference and in which unit."""
    columns = schema.places("number", "date")
    places = np.array([place for place, _ in columns], dtype=np.intp)
    # Encoded dates are counted from their reference in their unit already.
    numbers = [(c.reference, c.scale) if c.kind == "number" else (0.0, 1.0) for _, c in columns]
    references, units = np.array(numbers, dtype=np.float64).reshape(-1, 2).T
    return places, references, units


@step(TABLE_MOMENTS, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """n, sum z and sum z² of every number and date, over the rows that have it; rows by class."""
    schema = run_schema(memory.chain)
    places, references, units = (np.zeros(0, dtype=np.intp),) * 3 if schema is None else _measured(schema)
    weights = data.own_weights()
    sums = np.zeros((3, len(places)))
    for start in range(0, len(data), _ROWS):
        span = slice(start, start + _ROWS)
        scaled = (data.features(span)[:, places] - references) / units
        there = ~np.isnan(scaled)
        scaled = np.where(there, scaled, 0.0)
        counted = there.astype(np.float64) if weights is None else there * weights[span, None]
        sums += [counted.sum(axis=0), (counted * scaled).sum(axis=0), (counted * scaled**2).sum(axis=0)]
    term = Term({"moments": sums}, {"rows": len(data)})
    classes = opening_classes(memory.chain)
    if classes is not None:
        codes = encode_labels(data.own_labels(), classes)
        term.arrays["class_rows"] = np.bincount(codes, weights, minlength=len(classes)).astype(np.float64)
    return term


def solve_preparation(schema: Schema, total: Total, standardise: bool) -> TablePreparation:
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
    whole = TablePreparation(*(np.zeros(schema.width), np.zeros(schema.width), np.ones(schema.width)))
    whole.mean[places] = references + units * mean
    if standardise:
        whole.centre[places] = whole.mean[places]
        whole.scale[places] = units * deviation
    return whole


def balanced_weights(class_rows: Array) -> Array:
    """A row's weight by its class, so that all classes with rows count alike and the mean weight is 1."""
    there = class_rows > 0
    return np.where(there, class_rows.sum() / (there.sum() * np.where(there, class_rows, 1.0)), 0.0)
