"""What the scikit-learn estimators share: one silo of rows in, a model, predictions the scikit-learn way.

Their parameters are the fields of dataclasses, whose constructors scikit-learn reads.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedsolve.arrays import Array, check_arrays, check_choice
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.deepafl import CHOSEN, DeepAFL
from fedsolve.closedform.predictors import DeepModel, LinearModel
from fedsolve.errors import CalibrationWarning, DataError
from fedsolve.federation.folds import row_hashes
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.messages import Total
from fedsolve.federation.method import Method
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.federation.preparing import balanced_weights
from fedsolve.federation.recipe import Recipe
from fedsolve.labels import plain_labels
from fedsolve.model import Model
from fedsolve.tables.schema import Schema

REAL = (np.float64, np.float32)


class MovedRows(ClientData):
    """Rows counted from another point; which fold a row is in does not depend on that.

    given: the features before they were moved.
    """

    given: Array

    def row_hashes(self, key: int | str = 0) -> Array:
        return row_hashes(self.given, self.labels, key)


# -- what is predicted: classes or numbers ---------------------------------------------------------


class SiloEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What all share: one silo of rows in, scores of the model, predictions from scores."""

    model_: Model
    _task: Literal["classification", "regression"]

    _accepted: ClassVar[Mapping[str, bool]] = {}
    _too_few = False
    calibrate: bool

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from these rows alone."""
        features, targets, weights = self._read(X, y, sample_weight)
        with warnings.catch_warnings():
            # Told by predict_proba and predict_interval, to whom it concerns.
            warnings.simplefilter("ignore", CalibrationWarning)
            self._train(features, targets, self._class_weighted(targets, weights))
        self._too_few = self.calibrate and self.model_.calibration is None
        return self

    def _train(self, features: Array, targets: Array, weights: Array | None) -> None:
        recipe = Recipe(self._method(features, targets), calibrate=self.calibrate, biases=False)
        rows = ClientData(features, targets, weights=weights)
        self._keep(recipe.fit(self._silo(rows)))

    def _read(
        self, X: Any, y: Any, sample_weight: Any, first: bool = True
    ) -> tuple[Array, Array, Array | None]:
        """Features, targets and weights; first: rather than added to rows before."""
        features, y = validate_data(self, X, y, dtype=REAL, reset=first, **self._accepted)
        targets = self._targets(y, first)
        if sample_weight is None:
            return features, targets, None
        weights = np.asarray(sample_weight, dtype=np.float64)
        check_arrays(features, targets, weights)
        if not np.any(weights):
            raise DataError(f"all {len(weights)} sample weights are zero; at least one must be positive.")
        return features, targets, weights

    @abstractmethod
    def _targets(self, y: Any, first: bool) -> Array:
        """Labels, or a column for each target."""

    def _class_weighted(self, targets: Array, weights: Array | None) -> Array | None:
        return weights

    def predict(self, X: Any) -> Array:
        """Classes with the largest score, or targets in the shape y had."""
        return self._decide(self._scores(X))

    def _scores(self, X: Any) -> Array:
        features = self._features(X)  # refuses an estimator that is not fitted
        return self.model_.decision_function(features)

    def _features(self, X: Any) -> Array:
        check_is_fitted(self, "model_")
        try:
            features: Array = validate_data(self, X, dtype=REAL, order="C", reset=False)
        except ValueError as problem:
            if "feature names should match" not in str(problem):
                raise
            raise DataError(
                f"{problem}Give the columns of the training rows in their order, "
                "X[estimator.feature_names_in_], or ask estimator.model_, which finds them by name."
            ) from problem
        return features

    def _keep(self, model: Model) -> None:
        """Keep the model, which knows the columns of a DataFrame it was fitted on and finds them by name."""
        found = Schema.of_numbers(getattr(self, "feature_names_in_", ()), model.classes)
        model.schema = found or model.schema
        self.model_ = model

    def _method(self, features: Array, labels: Array) -> Method[Any]:
        """What learns from these rows."""
        raise NotImplementedError

    def _given(self) -> dict[str, Any]:
        """The parameters that a method takes, as the Python values that requests and files hold."""
        given = self.get_params(deep=False)
        for name in ("calibrate", "class_weight"):
            given.pop(name, None)
        given = {name: v.item() if isinstance(v, np.generic) else v for name, v in given.items()}
        if "fit_intercept" in given:
            given["intercept"] = bool(given.pop("fit_intercept"))
        if "random_state" in given:
            if not isinstance(state := given.pop("random_state"), int):
                state = check_random_state(state).randint(np.iinfo(np.int32).max)
            given["seed"] = int(state)
        return given

    @abstractmethod
    def _decide(self, scores: Array) -> Array:
        """Predictions from scores (rows, outputs)."""

    def _silo(self, rows: ClientData, classes: Array | None = None) -> LocalFederation:
        """All rows in the hands of one client."""
        if classes is None and self._task == "classification":
            classes = np.unique(rows.labels)
        client = Participant("client-0", rows, memory_budget=LOCAL_MEMORY)
        declared = None if classes is None else classes.tolist()
        return LocalFederation([client], classes=declared, task=self._task)


@dataclass(kw_only=True, eq=False, repr=False)
class SiloClassifier(ClassifierMixin, SiloEstimator):  # type: ignore[misc]
    """Labels of any type that sorts."""

    _task = "classification"

    calibrate: bool = True
    class_weight: Literal["balanced"] | Mapping[Any, float] | None = None

    @property
    def classes_(self) -> Array:
        """The classes in order: of the training labels, or as declared to `partial_fit`."""
        classes = self.model_.classes
        assert classes is not None
        return classes

    def decision_function(self, X: Any) -> Array:
        """Scores of the model, (rows, classes); for two classes (rows,), positive for `classes_[1]`."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, (rows, classes), in the order of the scores.

        With `calibrate`, softmax of the scores times a slope that was fitted to rows which the model of the
        others had not seen. Without, after `partial_fit`, and where rows are too few, the probability vectors
        nearest to the scores: zeros and ones are common then and mean "clipped", not "certain".
        """
        features = self._features(X)
        if self._too_few:
            warnings.warn(
                "these probabilities are not calibrated: the rows, or those of a class, were too few to hold "
                "some out. Pass calibrate=False if that is as it should be.",
                CalibrationWarning,
                stacklevel=2,
            )
        return self.model_.predict_proba(features)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy, rows counted by their weight."""
        return float(accuracy_score(class_labels(y), self.predict(X), sample_weight=sample_weight))

    def _decide(self, scores: Array) -> Array:
        return np.asarray(self.classes_[np.argmax(scores, axis=1)])

    def _class_weighted(self, targets: Array, weights: Array | None) -> Array | None:
        """The weights of the rows, times those of their classes where classes are balanced."""
        left = np.unique(targets if weights is None else targets[weights > 0])
        if len(left) < 2:
            raise DataError(
                f"y has only one class ({left[0].item()!r}) in its {len(targets)} rows, those of zero "
                "sample_weight left out; a classifier needs at least two."
            )
        if self.class_weight is None:
            return weights
        classes, codes = np.unique(targets, return_inverse=True)
        if isinstance(self.class_weight, Mapping):
            per_class = np.array([float(self.class_weight.get(name, 1.0)) for name in classes.tolist()])
        else:
            check_choice("class_weight", self.class_weight, (None, "balanced"))
            per_class = balanced_weights(np.bincount(codes, weights).astype(np.float64))
        by_class = per_class[codes]
        return by_class if weights is None else by_class * weights

    def _targets(self, y: Any, first: bool) -> Array:
        return class_labels(y)


@dataclass(kw_only=True, eq=False, repr=False)
class SiloRegressor(RegressorMixin, SiloEstimator):  # type: ignore[misc]
    """One target or several per row."""

    _task = "regression"
    _accepted: ClassVar[Mapping[str, bool]] = {"multi_output": True, "y_numeric": True}
    _flat: bool = field(init=False)

    calibrate: bool = True

    def predict_interval(self, X: Any, level: float = 0.95) -> tuple[Array, Array]:
        """Between which two numbers the targets lie with this probability, by the errors on rows held out."""
        scores = self._scores(X)
        if self.model_.spread is None:
            raise DataError(
                "no rows were held out, or too few, to learn how far predictions are off. Fit with "
                "calibrate=True on more rows."
            )
        reach = self.model_.spread.reach(level)
        return self._decide(scores - reach), self._decide(scores + reach)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _decide(self, scores: Array) -> Array:
        return scores[:, 0] if self._flat else scores

    def _targets(self, y: Any, first: bool) -> Array:
        targets: Array = np.asarray(y, dtype=np.float64)
        flat, targets = targets.ndim == 1, targets.reshape(len(targets), -1)
        if first:
            self._flat = flat
        elif targets.shape[1] != self.model_.outputs:
            raise DataError(
                f"y has {targets.shape[1]} targets per row, but the batches before had {self.model_.outputs}."
            )
        return targets


# -- which method learns: AFL or DeepAFL -----------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class LinearClassifier(SiloClassifier):
    """A classifier with one weight for each column and class."""

    model_: LinearModel = field(init=False)

    @property
    def coef_(self) -> Array:
        """Weights of `decision_function`: (classes, features), or (1, features) for two classes."""
        rows = self.model_.plain()[0].T
        return rows[1:] - rows[:1] if len(rows) == 2 else rows

    @property
    def intercept_(self) -> Array:
        """Intercepts of `decision_function`, one per row of `coef_`."""
        values = self.model_.plain()[1]
        return values[1:] - values[:1] if len(values) == 2 else values


@dataclass(kw_only=True, eq=False, repr=False)
class LinearSilo(SiloEstimator):
    """AFL over one silo, with its sums kept, so that rows can be added at any time."""

    model_: LinearModel = field(init=False)
    _total: Total = field(init=False)
    _origin: Array | None = field(init=False)

    ridge: float | Literal["auto"] = "auto"
    fit_intercept: bool = True

    def _train(self, features: Array, targets: Array, weights: Array | None) -> None:
        silo = self._learn(features, targets, weights, first=True)
        if self.calibrate:
            # What rows held out say: the stages of a run before it trains on all rows.
            run = Recipe(AFL(**self.model_.parameters), calibrate=True, biases=False).start(silo.describe())
            while (asked := run.request(silo.clients)) is not None and run.stage != "training":
                run.absorb(silo.exchange(asked, run.chain))
            found: dict[str, Any] = run.calibrations
            self.model_.calibration, self.model_.spread = found.get("shared"), found.get("spread")

    def _learn(
        self, features: Array, labels: Array, weights: Array | None, first: bool, classes: Array | None = None
    ) -> LocalFederation:
        """Add the sums of these rows to those before (none when `first`) and solve anew; gives the silo."""
        # Classes derived from these may have other parameters.
        ridge = self.ridge.item() if isinstance(self.ridge, np.generic) else self.ridge
        method = AFL(ridge=ridge, intercept=bool(self.fit_intercept))
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
        rows = MovedRows(features, labels, weights=weights)
        rows.given = given
        silo = self._silo(rows, classes)
        # A ridge may be chosen after one was given: the sums are for either.
        total, spec = replace(method, ridge="auto").collect(silo), silo.describe()
        if not first:
            term = self._total.term + total.term
            term.mirror()
            total = Total(term, silo.clients)
        # A class of which no row has come yet is no reason to refuse: the next batch may bring it.
        model = method.solve(total, replace(spec, classes=None))
        model.classes = spec.classes
        if origin is not None:
            model.intercept = model.intercept - origin @ model.weight
        self._total, self._origin = total, origin
        self._keep(model)
        return silo


@dataclass(eq=False, repr=False)
class DeepSilo(SiloEstimator):
    """DeepAFL over one silo."""

    model_: DeepModel = field(init=False)

    layers: int | Literal["auto"] = "auto"
    _: KW_ONLY
    width: int | Literal["auto"] = "auto"
    hidden_width: int | None = None
    ridge: float | Literal["auto"] = "auto"
    residual_ridge: float | Literal["auto"] = "auto"
    activation: str = "gelu"
    zero_activation: str = "tanh"
    gain: float | Literal["auto"] = "auto"
    block_input: Literal["previous", "initial"] = "previous"
    scale: Literal["standard", "centred", "auto"] | None = "auto"
    fit_intercept: bool = True
    precision: Literal["float64", "float32"] = "float64"
    preset: Literal["paper"] | None = None
    random_state: Any = 0

    def staged_predict(self, X: Any) -> Array:
        """Predictions after 0, 1, ..., layers blocks, stacked along the first axis; one pass."""
        features = self._features(X)
        return np.stack([self._decide(scores) for scores in self.model_.staged_decision_function(features)])

    def staged_score(self, X: Any, y: Any, sample_weight: Any = None) -> Array:
        """What `score` would give after 0, 1, ..., layers blocks: layers + 1 numbers."""
        metric, truth = (accuracy_score, class_labels(y)) if is_classifier(self) else (r2_score, y)
        stages = self.staged_predict(X)
        return np.array([metric(truth, stage, sample_weight=sample_weight) for stage in stages])

    def _method(self, features: Array, labels: Array) -> DeepAFL:
        parameters = self._given()
        check_choice("preset", preset := parameters.pop("preset"), (None, "paper"))
        if preset == "paper":
            papers = DeepAFL().parameters()
            parameters |= {name: papers[name] for name in CHOSEN if parameters[name] == "auto"}
        return DeepAFL(**parameters)


# -- small checks ----------------------------------------------------------------------------------


def class_labels(y: Any) -> Array:
    """One-dimensional class labels, as numbers or text."""
    labels = plain_labels(column_or_1d(y))
    check_classification_targets(labels)
    return labels
