"""The closed forms as scikit-learn estimators: a federation of one silo behind fit and predict.

Each estimator checks its input the scikit-learn way, hands the rows to the method that a
federation would run, and keeps the resulting `Model` as `model_`. Over any partition of the same
rows, the method gives the same model.

Fitted on a DataFrame, an estimator refuses other columns or another order by name, as scikit-learn wants it;
`model_` finds columns by name in any order, and so does the command on a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import clone
from sklearn.utils.validation import validate_data

from fedsolve import registry
from fedsolve.calibration import project_to_simplex
from fedsolve.closedform.auto import Auto
from fedsolve.closedform.candidates import Tried
from fedsolve.closedform.kernel_afl import KernelAFL
from fedsolve.closedform.kernel_model import KernelModel
from fedsolve.closedform.predictors import DeepModel
from fedsolve.closedform.softmax import Softmax
from fedsolve.closedform.softmax_model import SoftmaxModel
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.estimators.estimator_bases import (
    REAL,
    DeepSilo,
    LinearSilo,
    SiloClassifier,
    SiloRegressor,
    class_labels,
    plain_value,
    row_weights,
    seed_of,
)
from fedsolve.federation.method import Method

__all__ = [
    "AFLClassifier",
    "AFLRegressor",
    "AutoClassifier",
    "DeepAFLClassifier",
    "DeepAFLRegressor",
    "KernelAFLClassifier",
    "SoftmaxClassifier",
    "project_to_simplex",
]

_NEWTON_AT_HOME = 1024
"""Coefficients up to which Softmax takes Newton steps where nothing travels."""


class AFLClassifier(SiloClassifier, LinearSilo):
    """Linear classifier by least squares on one-hot labels, exact in one pass: AFL over one silo.

    ridge:         penalty on the weights, not on the intercept. "auto" takes the one with the least k-fold
                   error, exactly, from sums of the same pass; the paper's is 0.
    fit_intercept: centre features and labels by their sums, since tables seldom pass through the
                   origin. The paper has no intercept: it starts from a backbone's features.
    class_weight:  "balanced" lets every class count alike; a dict gives weights by label; None counts rows.
    calibrate:     hold a fifth of the rows out to calibrate `predict_proba`, then learn from all: two fits.

    Attributes: `model_` (a fedsolve `Model`; `model_.save(path)` stores it), `classes_`, `coef_`,
    `intercept_`, `n_features_in_`, `feature_names_in_`.
    """

    def __init__(
        self,
        *,
        ridge: float | Literal["auto"] = "auto",
        fit_intercept: bool = True,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        calibrate: bool = True,
    ) -> None:
        super().__init__(ridge=ridge, fit_intercept=fit_intercept)
        self.class_weight = class_weight
        self.calibrate = calibrate

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows alone; `partial_fit` may add to them later."""
        return self._learn_calibrated(*self._read(X, y, sample_weight))

    def _train(self, features: Array, labels: Array, weights: Array | None, classes: Array) -> Self:
        return self._learn(features, labels, weights, first=True, classes=classes)

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
        declared = self._declared(classes, first)
        features, y = validate_data(self, X, y, dtype=REAL, reset=first)
        labels = class_labels(y)
        return self._learn(features, labels, row_weights(features, labels, sample_weight), first, declared)

    def _declared(self, classes: Any, first: bool) -> Array:
        if classes is None:
            if first:
                raise DataError("the first call of partial_fit needs classes=[...], all that will ever come.")
            return self.classes_
        declared = np.unique(class_labels(classes))
        if not first and not np.array_equal(declared, self.classes_):
            raise DataError(
                f"classes {declared.tolist()} differ from those of the batches before, "
                f"{self.classes_.tolist()}. Leave classes out, or start afresh with fit."
            )
        return declared

    @property
    def coef_(self) -> Array:
        """Weights of `decision_function`: (classes, features), or (1, features) for two classes."""
        rows = self.model_.weight.T
        return rows[1:] - rows[:1] if len(rows) == 2 else rows

    @property
    def intercept_(self) -> Array:
        """Intercepts of `decision_function`, one per row of `coef_`."""
        values = self.model_.intercept
        return values[1:] - values[:1] if len(values) == 2 else values


class AFLRegressor(SiloRegressor, LinearSilo):
    """Linear regression by ridge least squares, exact in one pass: AFL over one silo.

    Parameters and attributes as in `AFLClassifier`; y may hold several targets per row.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows alone; `partial_fit` may add to them later."""
        return self._learn(*self._read(X, y, sample_weight), first=True)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Add rows: any sequence of batches gives the model of one `fit` on all their rows."""
        first = not hasattr(self, "model_")
        return self._learn(*self._read(X, y, sample_weight, first), first)

    @property
    def coef_(self) -> Array:
        """Weights: (features,), or (targets, features) when y had two dimensions."""
        return self.model_.weight[:, 0] if self._flat else self.model_.weight.T

    @property
    def intercept_(self) -> Any:
        """Intercept: one number, or one per target when y had two dimensions."""
        return self.model_.intercept[0] if self._flat else self.model_.intercept


class DeepAFLClassifier(SiloClassifier, DeepSilo):
    """Deep residual classifier, layer by layer in closed form: DeepAFL over one silo.

    layers:         number of residual blocks; layers + 1 classifiers come out (`staged_predict`).
    width:          features per layer; hidden_width: random features of a block, as width when None.
    ridge:          penalty of every classifier; residual_ridge: penalty of every block.
    activation:     of the blocks; zero_activation: of the first projection.
    gain:           factor on the blocks' random projections.
    block_input:    "previous" or "initial": which features a block starts from.
    scale:          "standard" standardises columns by their sums, "centred" centres them; None leaves them.
    fit_intercept:  centre features and labels by their sums.
    precision:      "float64", or "float32" for speed.
    random_state:   seed of the projections. An integer gives the same model everywhere; None or a
                    RandomState draws one, and `model_.parameters["seed"]` tells which.
    calibrate:      hold a fifth of the rows out to calibrate `predict_proba`, then learn from all.

    layers, width, ridge, residual_ridge, gain and scale are "auto": settings are compared on rows held out,
    and the best are trained on all rows; `model_.parameters` has what was chosen and `model_.tried` the
    table. preset="paper" takes the paper's values instead, those of `fedsolve.DeepAFL`.
    class_weight: "balanced" lets every class count alike; a dict gives weights by label; None counts rows.

    Attributes: `model_` (a fedsolve `Model`; `model_.save(path)` stores it), `classes_`,
    `n_features_in_`, `feature_names_in_`.
    """

    def __init__(
        self,
        layers: int | Literal["auto"] = "auto",
        *,
        width: int | Literal["auto"] = "auto",
        hidden_width: int | None = None,
        ridge: float | Literal["auto"] = "auto",
        residual_ridge: float | Literal["auto"] = "auto",
        activation: str = "gelu",
        zero_activation: str = "tanh",
        gain: float | Literal["auto"] = "auto",
        block_input: Literal["previous", "initial"] = "previous",
        scale: Literal["standard", "centred", "auto"] | None = "auto",
        fit_intercept: bool = True,
        precision: Literal["float64", "float32"] = "float64",
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        preset: Literal["paper"] | None = None,
        random_state: Any = 0,
        calibrate: bool = True,
    ) -> None:
        super().__init__(
            layers,
            width=width,
            hidden_width=hidden_width,
            ridge=ridge,
            residual_ridge=residual_ridge,
            activation=activation,
            zero_activation=zero_activation,
            gain=gain,
            block_input=block_input,
            scale=scale,
            fit_intercept=fit_intercept,
            precision=precision,
            preset=preset,
            random_state=random_state,
        )
        self.class_weight = class_weight
        self.calibrate = calibrate

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows."""
        return self._learn_calibrated(*self._read(X, y, sample_weight))

    def _train(self, features: Array, labels: Array, weights: Array | None, classes: Array) -> Self:
        method = self._method()
        self.model_ = self._knowing_columns(method.fit(self._silo(features, labels, weights, classes)))
        return self


class DeepAFLRegressor(SiloRegressor, DeepSilo):
    """Deep residual regression, layer by layer in closed form: DeepAFL over one silo.

    Parameters and attributes as in `DeepAFLClassifier`; y may hold several targets per row. Targets
    are brought to unit variance for training and back afterwards, because a block's penalty is
    weighed against squared weights: otherwise the fit would depend on the unit of y. `model_`
    predicts in that unit; `model_.risk` is that of the scaled targets.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows."""
        method = self._method()
        features, targets, weights = self._read(X, y, sample_weight)
        spread = _spread(targets, weights, centred=method.intercept)
        model = method.fit(self._silo(features, targets / spread, weights))
        self.model_ = self._knowing_columns(_rescaled(model, spread))
        return self


class AutoClassifier(SiloClassifier):
    """The best of the closed forms for these rows: Auto over one silo.

    Linear models, logistic regression, kernel machines and deep networks, with several settings each, are
    compared on rows held out by their content; the best is learnt from all rows.

    methods:      what is tried, such as "afl,kernelafl"; "all" of afl, softmax, kernelafl, kernelsoftmax and
                  deepafl.
    random_state: seed of landmarks and random projections, as in `DeepAFLClassifier`.
    calibrate:    hold a fifth of the rows out to calibrate `predict_proba`, then learn from all; logits need
                  none.
    class_weight: "balanced" lets every class count alike; a dict gives weights by label; None counts rows.

    Attributes: `model_`, `tried_` (every candidate, with its mistakes and its squared error on the rows held
    out), `method_` (what was chosen), `classes_`, `n_features_in_`, `feature_names_in_`.
    """

    def __init__(
        self,
        *,
        methods: str = "all",
        random_state: Any = 0,
        calibrate: bool = True,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
    ) -> None:
        self.methods = methods
        self.random_state = random_state
        self.calibrate = calibrate
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Choose, and learn from these rows."""
        return self._learn_calibrated(*self._read(X, y, sample_weight))

    def _train(self, features: Array, labels: Array, weights: Array | None, classes: Array) -> Self:
        method = self._known or Auto(methods=self.methods, seed=seed_of(self.random_state))
        self.model_ = self._knowing_columns(method.fit(self._silo(features, labels, weights, classes)))
        return self

    _known: Method[Any] | None = None

    def _settled(self) -> Self:
        other: Self = clone(self)
        other._known = self.method_
        return other

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

    def decision_function(self, X: Any) -> Array:
        """Scores of the model, (rows, classes); for two classes (rows,), positive for `classes_[1]`."""
        return super().decision_function(X)

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, (rows, classes): calibrated, or the softmax of the model's logits."""
        features = self._features(X)  # says first whether it was fitted
        if isinstance(self.model_, SoftmaxModel):
            return self.model_.predict_proba(features)
        return super().predict_proba(X)


class SoftmaxClassifier(SiloClassifier):
    """Multinomial logistic regression at its optimum: Softmax over one silo.

    ridge:         penalty on the weights, ridge/2 |W|², not on the intercept; scikit-learn's C is 1 / ridge.
                   None follows the size of the columns.
    fit_intercept: whether there is an intercept.
    scale:         "standard" standardises columns by their sums; None leaves them as they are.
    tolerance:     relative length of the last step. steps: most gradients.
    class_weight:  "balanced" lets every class count alike; a dict gives weights by label; None counts rows.

    Attributes: `model_` (a fedsolve `Model`; `model_.coefficients()` has standard errors, for two classes at
    ridge 0), `classes_`, `coef_`, `intercept_`, `n_features_in_`, `feature_names_in_`.
    """

    model_: SoftmaxModel
    calibrate = False  # its logits are those of probabilities already

    def __init__(
        self,
        *,
        ridge: float | None = None,
        fit_intercept: bool = True,
        scale: Literal["standard"] | None = "standard",
        tolerance: float = 1e-6,
        steps: int = 500,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
    ) -> None:
        self.ridge = ridge
        self.fit_intercept = fit_intercept
        self.scale = scale
        self.tolerance = tolerance
        self.steps = steps
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows."""
        return self._learn_calibrated(*self._read(X, y, sample_weight))

    def _train(self, features: Array, labels: Array, weights: Array | None, classes: Array) -> Self:
        given = {name: plain_value(value) for name, value in self.get_params(deep=False).items()}
        del given["class_weight"]
        method = Softmax(
            intercept=bool(given.pop("fit_intercept")),
            curvature="exact" if _coefficients(features, labels) <= _NEWTON_AT_HOME else "auto",
            **given,
        )
        self.model_ = self._knowing_columns(method.fit(self._silo(features, labels, weights, classes)))
        return self

    def decision_function(self, X: Any) -> Array:
        """Logits, (rows, classes); for two classes (rows,), positive for `classes_[1]`."""
        return super().decision_function(X)

    def predict_proba(self, X: Any) -> Array:
        """Probabilities, (rows, classes): the softmax of the logits."""
        features = self._features(X)  # says first whether it was fitted
        return self.model_.predict_proba(features)

    @property
    def coef_(self) -> Array:
        """Weights of columns as they come: (classes, features), or (1, features) for two classes."""
        rows = self.model_.plain()[0].T
        return rows[1:] - rows[:1] if len(rows) == 2 else rows

    @property
    def intercept_(self) -> Array:
        """Intercepts, one per row of `coef_`."""
        values = self.model_.plain()[1]
        return values[1:] - values[:1] if len(values) == 2 else values


class KernelAFLClassifier(SiloClassifier):
    """Gaussian kernel machine by landmarks: KernelAFL over one silo.

    landmarks:    how many; None follows the number of rows. steps: of conjugate gradients, where there are
                  more than 1,024 landmarks. ridge: penalty on the weights.
    bandwidth:    of the kernel, as a multiple of twice the trace of the covariance.
    scale:        "standard" standardises columns by their sums; None leaves them as they are.
    random_state: seed of the landmarks, as in `DeepAFLClassifier`.
    calibrate:    hold a fifth of the rows out to calibrate `predict_proba`, then learn from all: two fits.
    class_weight: "balanced" lets every class count alike; a dict gives weights by label; None counts rows.

    Attributes: `model_`, `classes_`, `n_features_in_`, `feature_names_in_`.
    """

    model_: KernelModel

    def __init__(
        self,
        landmarks: int | None = None,
        *,
        steps: int = 12,
        ridge: float = 0.01,
        bandwidth: float = 1.0,
        scale: Literal["standard"] | None = "standard",
        random_state: Any = 0,
        calibrate: bool = True,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
    ) -> None:
        self.landmarks = landmarks
        self.steps = steps
        self.ridge = ridge
        self.bandwidth = bandwidth
        self.scale = scale
        self.random_state = random_state
        self.calibrate = calibrate
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows."""
        return self._learn_calibrated(*self._read(X, y, sample_weight))

    def _train(self, features: Array, labels: Array, weights: Array | None, classes: Array) -> Self:
        given = {name: plain_value(value) for name, value in self.get_params(deep=False).items()}
        del given["calibrate"], given["class_weight"]
        # One silo draws its own landmarks, so that a class of few rows may have some.
        method = KernelAFL(seed=seed_of(given.pop("random_state")), least_rows=1, **given)
        self.model_ = self._knowing_columns(method.fit(self._silo(features, labels, weights, classes)))
        return self


def _coefficients(features: Array, labels: Array) -> int:
    """How many numbers a softmax regression fits."""
    return int((features.shape[1] + 1) * len(np.unique(labels)))


def _spread(targets: Array, weights: Array | None, centred: bool) -> Array:
    """Root mean square of every target, about its mean when centred; 1 for a constant one."""
    centre = np.average(targets, axis=0, weights=weights) if centred else np.zeros(targets.shape[1])
    spread = np.sqrt(np.average((targets - centre) ** 2, axis=0, weights=weights))
    rounding = 8 * np.finfo(np.float64).eps * np.abs(centre)
    return np.where(spread > rounding, spread, 1.0)


def _rescaled(model: DeepModel, spread: Array) -> DeepModel:
    """The model whose scores are those of `model` times `spread`, target by target."""
    preparation = model.preparation
    if preparation is not None:
        preparation = replace(preparation, target_mean=preparation.target_mean * spread)
    classifiers = [weight * spread for weight in model.classifiers]
    fixed = (model.parameters, model.risk)
    scaled = DeepModel(model.network, None, model.outputs, classifiers, model.blocks, preparation, *fixed)
    scaled.history = model.history
    return scaled
