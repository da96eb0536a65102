"""What comes out of training: predict, score, save; and how to read it back."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedsolve import container
from fedsolve.container import Array
from fedsolve.errors import DataError, ModelFileError
from fedsolve.labels import labels_note, regression_targets

if TYPE_CHECKING:
    from fedsolve.federation.method import Record
    from fedsolve.federation.participant import ClientData
    from fedsolve.federation.states import StateStore

MODEL_VERSION = 1

_FAMILIES: dict[str, type[Model]] = {}


class Model(ABC):
    """A trained predictor. Scores have one column per class or target: least-squares estimates, or logits."""

    family: ClassVar[str]
    private: ClassVar[bool] = False
    """Whether the model belongs to one client and must not be sent to anybody."""

    def __init__(self, features: int, classes: Array | None, outputs: int) -> None:
        self.features = features
        self.classes = classes
        self.outputs = outputs
        self.history: Sequence[Record] = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "family" in cls.__dict__:
            _FAMILIES[cls.family] = cls

    @abstractmethod
    def _scores(self, features: Array) -> Array:
        """Scores (rows, outputs) of checked features."""

    @abstractmethod
    def _arrays(self) -> dict[str, Array]: ...

    @abstractmethod
    def _note(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def _from(cls, arrays: dict[str, Array], note: dict[str, Any]) -> Model: ...

    def decision_function(self, features: Any) -> Array:
        """Scores, shape (rows, classes) or (rows, targets)."""
        return self._scores(self._checked(features))

    def estimates(self, features: Any) -> Array:
        """What the targets are expected to be, ones and zeros for classes: (rows, outputs).

        Errors of least squares are taken against these. Here the scores themselves; models whose scores are
        on another scale give their own.
        """
        return self.decision_function(features)

    def predict(self, features: Any) -> Array:
        """The class with the largest score, or the predicted targets."""
        return self._decide(self.decision_function(features))

    def score(self, features: Any, labels: Any) -> float:
        """Accuracy, or the mean R² over targets for regression."""
        return self._rate(self.predict(features), labels)

    @property
    def predicts(self) -> bool:
        """Whether it is one to predict with, or only what clients make their own of."""
        return True

    @property
    def personalises(self) -> bool:
        """Whether `personalised` gives every client a predictor of its own."""
        return False

    def personalised(self, data: ClientData, states: StateStore | None = None) -> Model:
        """The predictor of the client that owns `data`, made where the data are.

        states: what the client kept from the run, for methods whose clients keep something.
        """
        if self.private:
            raise DataError(
                "this model is one client's own already; personalise the shared model it was made from."
            )
        raise DataError(
            f"a model of family '{self.family}' is the same for everybody; train with a personalised method "
            "such as APFL, or put refinements over it with APFL(...).over(model)."
        )

    def _decide(self, scores: Array) -> Array:
        if self.classes is not None:
            return np.asarray(self.classes[np.argmax(scores, axis=1)])
        return scores[:, 0] if self.outputs == 1 else scores

    def _rate(self, predicted: Array, labels: Any) -> float:
        labels = np.asarray(labels)
        if len(labels) != len(predicted):
            raise DataError(f"{len(predicted)} rows but {len(labels)} labels.")
        if len(labels) == 0:
            raise DataError("cannot score a model on no rows at all.")
        if self.classes is not None:
            return float(np.mean(predicted == labels))
        target = regression_targets(labels, self.outputs).astype(np.float64)
        error = np.sum((target - predicted.reshape(target.shape)) ** 2, axis=0)
        spread = np.sum((target - target.mean(axis=0)) ** 2, axis=0)
        return float(np.mean(1.0 - error / spread))

    def _checked(self, values: Any) -> Array:
        features: Array = values if isinstance(values, np.ndarray) else np.asarray(values)
        if features.ndim != 2 or features.shape[1] != self.features:
            raise DataError(
                f"this model takes rows of {self.features} features; got an array of shape {features.shape}."
            )
        if features.dtype.kind not in "fiub":
            raise DataError(f"features must be real numbers; got dtype {features.dtype}.")
        if features.dtype.kind == "f" and not np.all(np.isfinite(features)):
            raise DataError("features contain NaN or infinite values. Remove or impute them.")
        return features

    # -- files -----------------------------------------------------------------------------------

    def contents(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything that makes this model, as named arrays and a JSON note."""
        note = {
            **self._note(),
            "model": MODEL_VERSION,
            "family": self.family,
            "features": self.features,
            "outputs": self.outputs,
            "classes": labels_note(self.classes),
        }
        return self._arrays(), note

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model file; equal models give equal bytes. One client's own is for its owner to read."""
        container.write_atomically(path, container.to_bytes(*self.contents()), private=self.private)


def load_model(path: str | os.PathLike[str]) -> Model:
    """The model saved at `path`."""
    arrays, note = container.from_bytes(container.read(path), what=f"model file {path}", error=ModelFileError)
    return model_from_contents(arrays, note, str(path))


def model_from_contents(arrays: dict[str, Array], note: Mapping[str, Any], path: str = "this model") -> Model:
    """The model that `Model.contents` described."""
    version = note.get("model")
    if not isinstance(version, int):
        raise ModelFileError(f"{path} is not a fedsolve model (it may be a checkpoint).")
    if version > MODEL_VERSION:
        raise ModelFileError(
            f"{path} has model version {version}; this fedsolve reads up to {MODEL_VERSION}. Upgrade it."
        )
    family = note.get("family")
    if family not in _FAMILIES:
        raise ModelFileError(
            f"{path} holds a model of family {family!r}; known are {sorted(_FAMILIES)}. Upgrade fedsolve."
        )
    try:
        return _FAMILIES[family]._from(arrays, dict(note))
    except (KeyError, TypeError, IndexError) as problem:
        raise ModelFileError(
            f"{path} is incomplete ({type(problem).__name__}: {problem}). Fetch or write it again."
        ) from problem
