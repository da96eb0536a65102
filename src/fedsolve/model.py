"""What comes out of training: predict, score, save; and how to read it back.

A model of one's own needs `scores` and nothing else: its attributes are stored as they are.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedsolve import attributes, container, registry
from fedsolve.container import Array
from fedsolve.errors import DataError, ModelFileError
from fedsolve.labels import labels_from_note, labels_note, regression_targets
from fedsolve.permissions import allowing, restricted

if TYPE_CHECKING:
    from fedsolve.federation.method import Record
    from fedsolve.federation.participant import ClientData
    from fedsolve.federation.states import StateStore

MODEL_VERSION = 1

_BASE = {"features", "classes", "outputs", "history"}
_FAMILIES: dict[str, type[Model]] = {}


class Model(ABC):
    """A trained predictor. Scores have one column per class or target: least-squares estimates, or logits."""

    family: ClassVar[str]
    """Under which name files say what they hold; the class's address unless it is given."""
    private: ClassVar[bool] = False
    """Whether the model belongs to one client and must not be sent to anybody."""

    def __init__(self, features: int, classes: Array | None, outputs: int) -> None:
        self.features = features
        self.classes = classes
        self.outputs = outputs
        self.history: Sequence[Record] = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "family" not in cls.__dict__:
            cls.family = registry.address_of(cls)
        _FAMILIES[cls.family] = cls

    @abstractmethod
    def scores(self, features: Array) -> Array:
        """Scores (rows, outputs) of checked features."""

    def arrays(self) -> dict[str, Array]:
        """The arrays that make this model, by name; by default its attributes."""
        return self._stored()[0]

    def note(self) -> dict[str, Any]:
        """What else makes this model, as JSON values; by default its attributes."""
        return {"attributes": self._stored()[1]}

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> Model:
        """The model of these arrays and this note."""
        model = cls.__new__(cls)
        Model.__init__(model, note["features"], labels_from_note(note["classes"]), note["outputs"])
        model.__dict__.update(attributes.from_parts(arrays, note["attributes"]))
        return model

    def _stored(self) -> tuple[dict[str, Array], dict[str, Any]]:
        own = {name: value for name, value in vars(self).items() if name not in _BASE}
        return attributes.to_parts(own, f"the model {type(self).__name__}")

    def decision_function(self, features: Any) -> Array:
        """Scores, shape (rows, classes) or (rows, targets)."""
        return self.scores(self._checked(features))

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
            **self.note(),
            "model": MODEL_VERSION,
            "family": self.family,
            "features": self.features,
            "outputs": self.outputs,
            "classes": labels_note(self.classes),
        }
        return self.arrays(), note

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model file; equal models give equal bytes. One client's own is for its owner to read."""
        container.write_atomically(path, container.to_bytes(*self.contents()), private=self.private)


def load_model(path: str | os.PathLike[str], allow_methods: Iterable[str] | None = None) -> Model:
    """The model saved at `path`.

    allow_methods: methods from outside fedsolve, as "package.module:Class" or by the name of their entry
        point, whose code the file may have imported; none when None, unless `permissions.allowing` says more
        at this moment. Those imported already need no leave.
    """
    arrays, note = container.from_bytes(container.read(path), what=f"model file {path}", error=ModelFileError)
    settled = allow_methods is None and restricted()
    with nullcontext() if settled else allowing(networks=None, methods=allow_methods or ()):
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
    if isinstance(family, str) and ":" in family and family not in _FAMILIES:
        registry.import_model(family)  # its definition enters it
    if family not in _FAMILIES:
        raise ModelFileError(
            f"{path} holds a model of family {family!r}; known are {sorted(_FAMILIES)}. Upgrade fedsolve."
        )
    try:
        return _FAMILIES[family].restored(arrays, dict(note))
    except (KeyError, TypeError, IndexError) as problem:
        raise ModelFileError(
            f"{path} is incomplete ({type(problem).__name__}: {problem}). Fetch or write it again."
        ) from problem
