"""The closed forms as scikit-learn estimators: a federation of one silo behind fit and predict.

Each estimator checks its input the scikit-learn way, hands the rows to the method that a
federation would run, and keeps the resulting `Model` as `model_`. Over any partition of the same
rows, the method gives the same model.

Fitted on a DataFrame, an estimator refuses other columns or another order by name, as scikit-learn wants it;
`model_` finds columns by name in any order, and so does the command on a file.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, Self, TypeVar

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone, is_classifier
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedsolve.calibration import LEAST_ROWS, Calibration, fitted, project_to_simplex
from fedsolve.checks import check_arrays, check_choice
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.deepafl import CHOSEN, DeepAFL
from fedsolve.closedform.kernel_afl import KernelAFL
from fedsolve.closedform.kernel_model import KernelModel
from fedsolve.closedform.predictors import DeepModel, LinearModel
from fedsolve.closedform.softmax import Softmax
from fedsolve.closedform.softmax_model import SoftmaxModel
from fedsolve.container import Array
from fedsolve.errors import CalibrationWarning, DataError
from fedsolve.federation.described import balanced_weights
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.messages import Total
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.held_out import held_out, row_marks
from fedsolve.labels import encode_labels, plain_labels
from fedsolve.model import Model
from fedsolve.schema import Column, Schema

__all__ = [
    "AFLClassifier",
    "AFLRegressor",
    "DeepAFLClassifier",
    "DeepAFLRegressor",
    "KernelAFLClassifier",
    "SoftmaxClassifier",
    "project_to_simplex",
]

_NEWTON_AT_HOME = 1024
"""Coefficients up to which Softmax takes Newton steps where nothing travels."""

_REAL = (np.float64, np.float32)
_SHARE, _KEY = 0.2, "calibration"
"""Which rows are held out for the probabilities."""

M = TypeVar("M", bound=Model)


class _Silo(ClientData):
    """Rows of one silo, counted from any point; which fold a row is in does not depend on that."""

    given: Array

    def marks(self, key: int | str = 0) -> Array:
        return row_marks(self.given, self.labels, key)


# -- what is predicted: classes or numbers ---------------------------------------------------------


class _Estimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What all share: one silo of rows in, scores of the model, predictions from scores."""

    model_: Model
    _task: Literal["classification", "regression"]

    def predict(self, X: Any) -> Array:
        """Classes with the largest score, or targets in the shape y had."""
        return self._decide(self._scores(X))

    def _scores(self, X: Any) -> Array:
        features = self._features(X)
        return self.model_.decision_function(features)

    def _features(self, X: Any) -> Array:
        check_is_fitted(self, "model_")
        try:
            features: Array = validate_data(self, X, dtype=_REAL, reset=False)
        except ValueError as problem:
            if "feature names should match" not in str(problem):
                raise
            raise DataError(
                f"{problem}Give the columns of the training rows in their order, "
                "X[estimator.feature_names_in_], or ask estimator.model_, which finds them by name."
            ) from problem
        return features

    def _knowing_columns(self, model: M) -> M:
        """The model, which knows the columns of a DataFrame it was fitted on and finds them by name."""
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        if names and len(set(names)) == len(names):
            classes = () if model.classes is None else tuple(model.classes.tolist())
            columns = tuple(Column(name, missing="refuse") for name in names)
            model.schema = Schema(columns, classes=classes)
        return model

    @abstractmethod
    def _decide(self, scores: Array) -> Array:
        """Predictions from scores (rows, outputs)."""

    def _silo(
        self,
        features: Array,
        targets: Array,
        weights: Array | None,
        classes: Array | None = None,
        given: Array | None = None,
    ) -> LocalFederation:
        """All rows in the hands of one client; `given`: the features before they were moved."""
        rows = _Silo(features, targets, weights=weights)
        rows.given = features if given is None else given
        return LocalFederation(
            [Participant("client-0", rows, memory_budget=LOCAL_MEMORY)],
            classes=None if classes is None else classes.tolist(),
            task=self._task,
        )


class _Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Labels of any type that sorts."""

    _task = "classification"
    calibrate: bool
    class_weight: Literal["balanced"] | Mapping[Any, float] | None = None
    _too_few = False

    @property
    def classes_(self) -> Array:
        """The classes in order: of the training labels, or as declared to `partial_fit`."""
        classes = self.model_.classes
        assert classes is not None
        return classes

    def decision_function(self, X: Any) -> Array:
        """Least-squares scores, (rows, classes); for two classes (rows,), positive for `classes_[1]`."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, (rows, classes), in the order of the scores.

        With `calibrate`, softmax of the scores times a slope that was fitted to rows which the model of the
        others had not seen. Without, after `partial_fit`, and where rows are too few, the probability vectors
        nearest to the scores: zeros and ones are common then and mean "clipped", not "certain".
        """
        scores = self._scores(X)
        known = self.model_.calibration
        if known is None and self._too_few:
            warnings.warn(
                "these probabilities are not calibrated: the rows, or those of a class, were too few to hold "
                "some out. Pass calibrate=False if that is as it should be.",
                CalibrationWarning,
                stacklevel=2,
            )
        return project_to_simplex(scores) if known is None else known.probabilities(scores)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy, rows counted by their weight."""
        return float(accuracy_score(_labels(y), self.predict(X), sample_weight=sample_weight))

    def _decide(self, scores: Array) -> Array:
        return np.asarray(self.classes_[np.argmax(scores, axis=1)])

    @abstractmethod
    def _train(self, features: Array, labels: Array, weights: Array | None, classes: Array) -> Self:
        """Learn from these rows, of which some classes may have none."""

    def _learn_calibrated(self, features: Array, labels: Array, weights: Array | None) -> Self:
        """Learn from all rows; the calibration is that of the model without those held out, on those."""
        classes = np.unique(labels)
        self._train(features, labels, weights, classes)
        if not self.calibrate:
            return self
        apart = held_out(features, labels, _SHARE, _KEY)
        counted = apart if weights is None else apart & (weights > 0)
        found = None
        if np.count_nonzero(counted) >= LEAST_ROWS:
            kept = None if weights is None else weights[~apart]
            try:
                # What was chosen for all rows is not chosen again.
                other = clone(self).set_params(**self._chosen())
                other._train(features[~apart], labels[~apart], kept, classes)
            except DataError:  # a class of which all rows are held out
                pass
            else:
                scores = other.model_.decision_function(features[counted])
                codes = encode_labels(labels[counted], classes)
                found = fitted(scores, codes, None if weights is None else weights[counted])
        self._too_few = found is None
        if found is None:
            return self
        self.model_.calibration = Calibration(*found, _SHARE, _KEY, int(np.count_nonzero(counted)))
        return self

    def _chosen(self) -> dict[str, Any]:
        """The settings that were left to be chosen, as they were."""
        auto = [name for name, value in self.get_params(deep=False).items() if value == "auto"]
        return {name: self.model_.parameters[name] for name in auto}  # type: ignore[attr-defined]

    def _weighed(self, labels: Array, weights: Array | None) -> Array | None:
        """The weights of the rows, times those of their classes where classes are balanced."""
        if self.class_weight is None:
            return weights
        classes, codes = np.unique(labels, return_inverse=True)
        if isinstance(self.class_weight, Mapping):
            per_class = np.array([float(self.class_weight.get(name, 1.0)) for name in classes.tolist()])
        else:
            check_choice("class_weight", self.class_weight, (None, "balanced"))
            per_class = balanced_weights(np.bincount(codes, weights).astype(np.float64))
        by_class = per_class[codes]
        return by_class if weights is None else by_class * weights

    def _read(self, X: Any, y: Any, sample_weight: Any) -> tuple[Array, Array, Array | None]:
        """Features, labels and weights of a whole training set."""
        features, y = validate_data(self, X, y, dtype=_REAL)
        labels = _labels(y)
        weights = self._weighed(labels, _weights(features, labels, sample_weight))
        left = np.unique(labels if weights is None else labels[weights > 0])
        if len(left) < 2:
            raise DataError(
                f"y has only one class ({left[0].item()!r}) in its {len(labels)} rows, those of zero "
                "sample_weight left out; a classifier needs at least two."
            )
        return features, labels, weights


class _Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """One target or several per row."""

    _task = "regression"
    _flat: bool

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _decide(self, scores: Array) -> Array:
        return scores[:, 0] if self._flat else scores

    def _read(
        self, X: Any, y: Any, sample_weight: Any, first: bool = True
    ) -> tuple[Array, Array, Array | None]:
        """Features, targets (rows, targets) and weights."""
        features, y = validate_data(self, X, y, dtype=_REAL, multi_output=True, y_numeric=True, reset=first)
        targets: Array = np.asarray(y, dtype=np.float64)
        flat, targets = targets.ndim == 1, targets.reshape(len(targets), -1)
        if first:
            self._flat = flat
        elif targets.shape[1] != self.model_.outputs:
            raise DataError(
                f"y has {targets.shape[1]} targets per row, but the batches before had {self.model_.outputs}."
            )
        return features, targets, _weights(features, targets, sample_weight)


# -- which method learns: AFL or DeepAFL -----------------------------------------------------------


class _Linear(_Estimator):
    """AFL over one silo, with its sums kept, so that rows can be added at any time."""

    model_: LinearModel
    _total: Total
    _origin: Array | None

    def __init__(self, *, ridge: float | Literal["auto"] = "auto", fit_intercept: bool = True) -> None:
        self.ridge = ridge
        self.fit_intercept = fit_intercept

    def _learn(
        self,
        features: Array,
        targets: Array,
        weights: Array | None,
        first: bool,
        classes: Array | None = None,
    ) -> Self:
        """Add the sums of these rows to those before (none when `first`) and solve anew."""
        method = AFL(ridge=_scalar(self.ridge), intercept=bool(self.fit_intercept))
        if not first and method.intercept != (self._origin is not None):
            raise DataError(
                f"fit_intercept became {method.intercept} between two partial fits, but the sums of the rows "
                f"so far are for {not method.intercept}. Set it back, or call fit with all rows."
            )
        origin, given = None, features
        if method.intercept:
            # Sums about a point amid the data lose no digits to columns far from zero, and with an
            # intercept the solution does not depend on that point.
            features = features.astype(np.float64)
            origin = np.average(features, axis=0, weights=weights) if first else self._origin
            features -= origin
        silo = self._silo(features, targets, weights, classes, given)
        # A ridge may be given after one was chosen: the sums stay by fold.
        folded = not first and "gram" not in self._total.term.arrays
        collector = replace(method, ridge="auto") if folded else method
        total, spec = collector.collect(silo), silo.describe()
        if not first:
            term = self._total.term + total.term
            term.mirror()
            total = Total(term, silo.clients)
        # A class of which no row has come yet is no reason to refuse: the next batch may bring it.
        model = method.solve(total, replace(spec, classes=None))
        model.classes = spec.classes
        if origin is not None:
            model.intercept = model.intercept - origin @ model.weight
        self._total, self._origin, self.model_ = total, origin, self._knowing_columns(model)
        return self


class _Deep(_Estimator):
    """DeepAFL over one silo."""

    model_: DeepModel

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
        preset: Literal["paper"] | None = None,
        random_state: Any = 0,
    ) -> None:
        self.layers = layers
        self.width = width
        self.hidden_width = hidden_width
        self.ridge = ridge
        self.residual_ridge = residual_ridge
        self.activation = activation
        self.zero_activation = zero_activation
        self.gain = gain
        self.block_input = block_input
        self.scale = scale
        self.fit_intercept = fit_intercept
        self.precision = precision
        self.preset = preset
        self.random_state = random_state

    def staged_predict(self, X: Any) -> Array:
        """Predictions after 0, 1, ..., layers blocks, stacked along the first axis; one pass."""
        features = self._features(X)
        return np.stack([self._decide(scores) for scores in self.model_.staged_decision_function(features)])

    def staged_score(self, X: Any, y: Any, sample_weight: Any = None) -> Array:
        """What `score` would give after 0, 1, ..., layers blocks: layers + 1 numbers."""
        metric, truth = (accuracy_score, _labels(y)) if is_classifier(self) else (r2_score, y)
        stages = self.staged_predict(X)
        return np.array([metric(truth, stage, sample_weight=sample_weight) for stage in stages])

    def _method(self) -> DeepAFL:
        parameters = {name: _scalar(value) for name, value in self.get_params(deep=False).items()}
        for name in ("calibrate", "class_weight"):
            parameters.pop(name, None)
        check_choice("preset", preset := parameters.pop("preset"), (None, "paper"))
        if preset == "paper":
            papers = DeepAFL().parameters()
            parameters |= {name: papers[name] for name in CHOSEN if parameters[name] == "auto"}
        return DeepAFL(
            intercept=bool(parameters.pop("fit_intercept")),
            seed=_seed(parameters.pop("random_state")),
            **parameters,
        )


# -- the estimators --------------------------------------------------------------------------------


class AFLClassifier(_Classifier, _Linear):
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
        features, y = validate_data(self, X, y, dtype=_REAL, reset=first)
        labels = _labels(y)
        return self._learn(features, labels, _weights(features, labels, sample_weight), first, declared)

    def _declared(self, classes: Any, first: bool) -> Array:
        if classes is None:
            if first:
                raise DataError("the first call of partial_fit needs classes=[...], all that will ever come.")
            return self.classes_
        declared = np.unique(_labels(classes))
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


class AFLRegressor(_Regressor, _Linear):
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


class DeepAFLClassifier(_Classifier, _Deep):
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


class DeepAFLRegressor(_Regressor, _Deep):
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


class SoftmaxClassifier(_Classifier):
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
        given = {name: _scalar(value) for name, value in self.get_params(deep=False).items()}
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


class KernelAFLClassifier(_Classifier):
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
        given = {name: _scalar(value) for name, value in self.get_params(deep=False).items()}
        del given["calibrate"], given["class_weight"]
        # One silo draws its own landmarks, so that a class of few rows may have some.
        method = KernelAFL(seed=_seed(given.pop("random_state")), least_rows=1, **given)
        self.model_ = self._knowing_columns(method.fit(self._silo(features, labels, weights, classes)))
        return self


# -- small checks ----------------------------------------------------------------------------------


def _labels(y: Any) -> Array:
    """One-dimensional class labels, as numbers or text."""
    labels = plain_labels(column_or_1d(y))
    check_classification_targets(labels)
    return labels


def _coefficients(features: Array, labels: Array) -> int:
    """How many numbers a softmax regression fits."""
    return int((features.shape[1] + 1) * len(np.unique(labels)))


def _weights(features: Array, targets: Array, sample_weight: Any) -> Array | None:
    """Sample weights as they enter the sums, or None."""
    if sample_weight is None:
        return None
    weights = np.asarray(sample_weight, dtype=np.float64)
    check_arrays(features, targets, weights)
    if not np.any(weights):
        raise DataError(f"all {len(weights)} sample weights are zero; at least one must be positive.")
    return weights


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


def _scalar(value: Any) -> Any:
    """A numpy scalar, such as a grid search gives, as the Python one that requests and files hold."""
    return value.item() if isinstance(value, np.generic) else value


def _seed(random_state: Any) -> int:
    if isinstance(random_state, Integral):
        return int(random_state)
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
