"""The closed forms as scikit-learn estimators: a federation of one silo behind fit and predict.

Each estimator checks its input the scikit-learn way, hands the rows to the method that a
federation would run, and keeps the resulting `Model` as `model_`. Over any partition of the same
rows, the method gives the same model.

Fitted on a DataFrame, an estimator refuses other columns or another order by name, as scikit-learn wants it;
`model_` finds columns by name in any order, and so does the command on a file.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.closedform.auto import Auto
from fedsolve.closedform.kernel_afl import DIRECT_LANDMARKS, KernelAFL
from fedsolve.closedform.landmarks import KernelModel
from fedsolve.closedform.softmax import Softmax
from fedsolve.errors import DataError
from fedsolve.estimators.estimator_bases import (
    DeepSilo,
    LinearClassifier,
    LinearSilo,
    SiloClassifier,
    SiloEstimator,
    SiloRegressor,
    class_labels,
)
from fedsolve.federation.method import Method
from fedsolve.federation.recipe import Tried

_NEWTON_AT_HOME = 1024
"""Coefficients up to which Softmax takes Newton steps where nothing travels."""


@dataclass(kw_only=True, eq=False, repr=False)
class AFLClassifier(LinearClassifier, LinearSilo):
    """Linear classifier by least squares on one-hot labels, exact in one pass: AFL over one silo.

    ridge:         penalty on the weights, not on the intercept. "auto" takes the one with the least error of
                   generalised cross-validation, from the same sums; the paper's is 0.
    fit_intercept: centre features and labels by their sums, since tables seldom pass through the
                   origin. The paper has no intercept: it starts from a backbone's features.
    class_weight:  "balanced" lets every class count alike; a dict gives weights by label; None counts rows.
    calibrate:     hold a third of the rows out to calibrate `predict_proba`, then learn from all: two fits.

    Attributes: `model_` (a fedsolve `Model`; `model_.save(path)` stores it), `classes_`, `coef_`,
    `intercept_`, `n_features_in_`, `feature_names_in_`.
    """

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Add rows: any sequence of batches gives the model of one `fit` on all their rows.

        classes: all that will ever come; needed in the first call. Only sums are kept, so memory
        does not grow with the number of batches.
        """
        if self.class_weight is not None:
            raise DataError(
                "class_weight='balanced' needs the counts of all rows, which partial_fit does not have yet. "
                "Use fit, or pass sample_weight."
            )
        first = not hasattr(self, "model_")
        if first and classes is None:
            raise DataError("the first call of partial_fit needs classes=[...], all that will ever come.")
        declared = self.classes_ if classes is None else np.unique(class_labels(classes))
        if not first and not np.array_equal(declared, self.classes_):
            raise DataError(
                f"classes {declared.tolist()} differ from those of the batches before, "
                f"{self.classes_.tolist()}. Leave classes out, or start afresh with fit."
            )
        self._learn(*self._read(X, y, sample_weight, first), first, declared)
        return self


@dataclass(kw_only=True, eq=False, repr=False)
class AFLRegressor(SiloRegressor, LinearSilo):
    """Linear regression by ridge least squares, exact in one pass: AFL over one silo.

    Parameters and attributes as in `AFLClassifier`; y may hold several targets per row. calibrate: hold a
    third of the rows out for `predict_interval`, then learn from all: two fits.
    """

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Add rows: any sequence of batches gives the model of one `fit` on all their rows."""
        first = not hasattr(self, "model_")
        self._learn(*self._read(X, y, sample_weight, first), first)
        return self

    @property
    def coef_(self) -> Array:
        """Weights: (features,), or (targets, features) when y had two dimensions."""
        return self.model_.weight[:, 0] if self._flat else self.model_.weight.T

    @property
    def intercept_(self) -> Any:
        """Intercept: one number, or one per target when y had two dimensions."""
        return self.model_.intercept[0] if self._flat else self.model_.intercept


@dataclass(kw_only=True, eq=False, repr=False)
class DeepAFLClassifier(SiloClassifier, DeepSilo):
    """Deep residual classifier, layer by layer in closed form: DeepAFL over one silo.

    The parameters are those of `fedsolve.DeepAFL`, and

    fit_intercept:  centre features and labels by their sums.
    random_state:   seed of the projections. An integer gives the same model everywhere; None or a
                    RandomState draws one, and `model_.parameters["seed"]` tells which.

    layers, width, ridge, residual_ridge, gain and scale are "auto": settings are compared on rows held out,
    and the best are trained on all rows; `model_.parameters` has what was chosen and `model_.tried` the
    table. preset="paper" takes the paper's values instead, those of `fedsolve.DeepAFL`. class_weight,
    calibrate and attributes as in `AFLClassifier`, without coefficients.
    """


@dataclass(kw_only=True, eq=False, repr=False)
class DeepAFLRegressor(SiloRegressor, DeepSilo):
    """Deep residual regression, layer by layer in closed form: DeepAFL over one silo.

    Parameters and attributes as in `DeepAFLClassifier`, calibrate as in `AFLRegressor`; y may hold several
    targets per row. Targets are brought to unit variance for training and back afterwards (with an intercept
    or a scale), because a block's penalty is weighed against squared weights: otherwise the fit would depend
    on the unit of y. `model_` predicts in that unit; `model_.risk` is that of the scaled targets.
    """


@dataclass(kw_only=True, eq=False, repr=False)
class AutoSilo(SiloEstimator):
    """Auto over one silo: what was tried, and what was chosen."""

    methods: str = "all"
    random_state: Any = 0

    def _method(self, features: Array, labels: Array) -> Auto:
        return Auto(**self._given())

    @property
    def tried_(self) -> tuple[Tried, ...]:
        """The candidates, and how they did on the rows held out."""
        return tuple(self.model_.tried)

    @property
    def method_(self) -> Method[Any]:
        """The method that was chosen, with its settings."""
        chosen = next(one for one in self.tried_ if one.chosen)
        settings = dict(chosen.settings)
        if chosen.layers is not None:
            settings["layers"] = chosen.layers
        method: Method[Any] = registry.method_class(chosen.method)(**settings)
        return method


@dataclass(kw_only=True, eq=False, repr=False)
class AutoRegressor(SiloRegressor, AutoSilo):
    """The best of the closed forms for these rows and targets: Auto over one silo.

    Parameters and attributes as in `AutoClassifier`, without classes: linear models, kernel machines and deep
    networks are compared by their squared error on rows held out. y may hold several targets per row;
    calibrate: the same rows tell how far predictions are off (`predict_interval`).
    """


@dataclass(kw_only=True, eq=False, repr=False)
class AutoClassifier(SiloClassifier, AutoSilo):
    """The best of the closed forms for these rows: Auto over one silo.

    Linear models, logistic regression, kernel machines and deep networks, with several settings each, are
    compared on rows held out by their content; the best is learnt from all rows.

    methods:      what is tried, such as "afl,kernelafl"; "all" of afl, softmax, kernelafl, kernelsoftmax and
                  deepafl.
    random_state: seed of landmarks and random projections, as in `DeepAFLClassifier`.
    calibrate:    calibrate `predict_proba` on the rows held out. class_weight: as in `AFLClassifier`.

    Attributes: those of `AFLClassifier` without coefficients, `tried_` (every candidate, with its mistakes
    and its squared error on the rows held out) and `method_` (what was chosen).
    """


@dataclass(kw_only=True, eq=False, repr=False)
class SoftmaxClassifier(LinearClassifier):
    """Multinomial logistic regression at its optimum: Softmax over one silo.

    ridge:         penalty on the weights, ridge/2 |W|², not on the intercept; scikit-learn's C is 1 / ridge.
                   None follows the size of the columns.
    fit_intercept: whether there is an intercept.
    scale:         "standard" standardises columns by their sums; None leaves them as they are.
    tolerance:     relative length of the last step. steps: most gradients.

    class_weight and attributes as in `AFLClassifier`.
    """

    # Its logits are those of probabilities already.
    calibrate: ClassVar[bool] = False  # type: ignore[misc]

    ridge: float | None = None
    fit_intercept: bool = True
    scale: Literal["standard"] | None = "standard"
    tolerance: float = 1e-6
    steps: int = 500

    def _method(self, features: Array, labels: Array) -> Method[Any]:
        coefficients = (features.shape[1] + 1) * len(np.unique(labels))
        return Softmax(curvature="exact" if coefficients <= _NEWTON_AT_HOME else "auto", **self._given())


@dataclass(eq=False, repr=False)
class KernelSilo(SiloEstimator):
    """KernelAFL over one silo."""

    model_: KernelModel = field(init=False)

    landmarks: int | None = None
    _: KW_ONLY
    steps: int = 12
    ridge: float | Literal["auto"] = 0.01
    bandwidth: float = 1.0
    scale: Literal["standard"] | None = "standard"
    random_state: Any = 0

    def _method(self, features: Array, labels: Array) -> Method[Any]:
        given = self._given()
        if len(features) == 1:
            raise DataError("1 sample has no spread to draw landmarks from; give more rows.")
        if given["landmarks"] is None and given["ridge"] == "auto":
            given["landmarks"] = min(DIRECT_LANDMARKS, KernelAFL().count(len(features)))
        # One silo draws its own landmarks, so that a class of few rows may have some.
        return KernelAFL(least_rows=1, **given)


@dataclass(eq=False, repr=False)
class KernelAFLRegressor(SiloRegressor, KernelSilo):
    """Gaussian kernel ridge regression by landmarks: KernelAFL over one silo.

    Parameters and attributes as in `KernelAFLClassifier`, calibrate as in `AFLRegressor`; y may hold several
    targets per row. ridge="auto": by generalised cross-validation, of 1,024 landmarks at most.
    """

    _: KW_ONLY
    ridge: float | Literal["auto"] = "auto"


@dataclass(eq=False, repr=False)
class KernelAFLClassifier(SiloClassifier, KernelSilo):
    """Gaussian kernel machine by landmarks: KernelAFL over one silo.

    The parameters are those of `fedsolve.KernelAFL`, and
    random_state: seed of the landmarks, as in `DeepAFLClassifier`.

    class_weight, calibrate and attributes as in `AFLClassifier`, without coefficients.
    """
