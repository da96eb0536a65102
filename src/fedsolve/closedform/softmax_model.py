"""What Softmax gives: logits, probabilities, and of two classes what is known of each coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.special import ndtr, ndtri, softmax

from fedsolve.closedform.moments import Preparation
from fedsolve.closedform.predictors import LinearModel, preparation_arrays, preparation_from
from fedsolve.container import Array, with_prefix
from fedsolve.errors import DataError
from fedsolve.labels import labels_from_note
from fedsolve.model import Model, model_from_contents


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of two classes, the intercept last: value, standard error, z, p-value, interval."""

    value: Array
    standard_error: Array
    z: Array
    p_value: Array
    low: Array
    high: Array


class SoftmaxModel(LinearModel):
    """Logits x W + b and their softmax.

    covariance: of the coefficients (width + 1, width + 1) about the mean of the rows, the intercept last;
        two classes at ridge 0 only. base: the model whose representation the weights belong to.
    """

    family: ClassVar[str] = "softmax"

    def __init__(
        self,
        weight: Array,
        intercept: Array,
        classes: Array | None,
        preparation: Preparation | None = None,
        parameters: dict[str, Any] | None = None,
        covariance: Array | None = None,
        base: Model | None = None,
        features: int | None = None,
    ) -> None:
        super().__init__(weight, intercept, classes, preparation, parameters)
        self.covariance = covariance
        self.base = base
        self.features = len(weight) if features is None else features

    def scores(self, features: Array) -> Array:
        return super().scores(features if self.base is None else self.base.transform(features))  # type: ignore[attr-defined]

    def estimates(self, features: Any) -> Array:
        """The classes' probabilities: softmax of the logits."""
        return np.asarray(softmax(self.decision_function(features), axis=1))

    def uncalibrated(self, features: Any) -> Array:
        return self.estimates(features)

    def plain(self) -> tuple[Array, Array]:
        """Weights (features, classes) and intercepts for rows as they come: neither centred nor scaled."""
        if self.preparation is None:
            return self.weight, self.intercept
        weight = self.weight / self.preparation.scale[:, None]
        return weight, self.intercept - self.preparation.mean @ weight

    def coefficients(self, level: float = 0.95) -> Coefficients:
        """The coefficients of the second class against the first, and how well they are known.

        By the inverse of the Hessian at the maximum of the likelihood, as logistic regression usually has it.
        """
        if self.covariance is None:
            raise DataError(
                "standard errors are for two classes at ridge 0 with an intercept: a penalty moves the "
                "coefficients by an amount that no standard error shows. Train Softmax(ridge=0.0)."
            )
        if not 0 < level < 1:
            raise DataError(f"the level of confidence must lie in (0, 1); got {level!r}.")
        weight, intercept = self.plain()
        value = np.append(weight[:, 1] - weight[:, 0], intercept[1] - intercept[0])
        turn = np.eye(len(value))
        if self.preparation is not None:
            turn[np.arange(len(weight)), np.arange(len(weight))] = 1.0 / self.preparation.scale
            turn[-1, :-1] = -self.preparation.mean / self.preparation.scale
        error = np.sqrt(np.einsum("ij,jk,ik->i", turn, self.covariance, turn, optimize=True))
        z, reach = value / error, float(ndtri(0.5 + level / 2)) * error
        return Coefficients(value, error, z, 2.0 * ndtr(-np.abs(z)), value - reach, value + reach)

    def arrays(self) -> dict[str, Array]:
        arrays = {"weight": self.weight, "intercept": self.intercept} | preparation_arrays(self.preparation)
        if self.covariance is not None:
            arrays["covariance"] = self.covariance
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
            arrays.get("covariance"),
            base,
            features=note["features"],
        )
