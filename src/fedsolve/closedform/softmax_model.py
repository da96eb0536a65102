"""What Softmax gives: logits and probabilities."""

from __future__ import annotations

from typing import Any, ClassVar

from fedsolve.arrays import Array
from fedsolve.closedform.predictors import LinearModel, preparation_arrays, preparation_from
from fedsolve.container import with_prefix
from fedsolve.labels import labels_from_note
from fedsolve.model import Model, model_from_contents
from fedsolve.tables.preparation import Preparation


class SoftmaxModel(LinearModel):
    """Logits x W + b and their softmax.

    base: the model whose representation the weights belong to.
    """

    family: ClassVar[str] = "softmax"
    logits = True

    def __init__(
        self,
        weight: Array,
        intercept: Array,
        classes: Array | None,
        preparation: Preparation | None = None,
        parameters: dict[str, Any] | None = None,
        base: Model | None = None,
        features: int | None = None,
    ) -> None:
        super().__init__(weight, intercept, classes, preparation, parameters)
        self.base = base
        self.features = len(weight) if features is None else features

    def scores(self, features: Array) -> Array:
        if self.base is not None:
            self.base.device = self.device
            features = self.base.transform(features)  # type: ignore[attr-defined]
        return super().scores(features)

    def plain(self) -> tuple[Array, Array]:
        """Weights (features, classes) and intercepts for rows as they come: neither centred nor scaled."""
        if self.preparation is None:
            return self.weight, self.intercept
        weight = self.weight / self.preparation.scale[:, None]
        return weight, self.intercept - self.preparation.mean @ weight

    @property
    def column_moments(self) -> Preparation | None:
        """As for every model: of the columns that come in, not of a representation of them."""
        inner = self.base is not None and self.preparing is None
        return self.base.column_moments if inner and self.base is not None else super().column_moments

    def arrays(self) -> dict[str, Array]:
        arrays = {"weight": self.weight, "intercept": self.intercept} | preparation_arrays(self.preparation)
        if self.base is not None:
            arrays |= {f"base.{name}": array for name, array in self.base.contents()[0].items()}
        return arrays

    def note(self) -> dict[str, Any]:
        note = {"parameters": self.parameters}
        return note if self.base is None else note | {"base": self.base.contents()[1]}

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> SoftmaxModel:
        base = None
        if "base" in note:
            base = model_from_contents(with_prefix(arrays, "base."), note["base"])
        return cls(
            arrays["weight"],
            arrays["intercept"],
            labels_from_note(note["classes"]),
            preparation_from({name: a for name, a in arrays.items() if not name.startswith("base.")}),
            note["parameters"],
            base,
            features=note["features"],
        )
