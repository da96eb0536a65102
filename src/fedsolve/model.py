"""What comes out of training: predict, score, save; and how to read it back.

A model of one's own needs `scores` and nothing else: its attributes are stored as they are.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from inspect import get_annotations
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from scipy.special import softmax

from fedsolve import container, registry, version
from fedsolve.arrays import Array
from fedsolve.calibration import (
    Calibration,
    LabelCalibration,
    Spread,
    kept_from,
    project_to_simplex,
    threshold,
)
from fedsolve.errors import DataError, DivergenceError, ModelFileError
from fedsolve.labels import label_matrix, labels_from_note, labels_note, regression_targets
from fedsolve.pages.templates import html_table
from fedsolve.registry import allowing, restricted
from fedsolve.tables.encoder import encode, is_table
from fedsolve.tables.preparation import Preparation, far_outside
from fedsolve.tables.schema import Schema

if TYPE_CHECKING:
    from fedsolve.export import OnnxFile
    from fedsolve.federation.local import LocalFederation
    from fedsolve.federation.method import Record
    from fedsolve.federation.participant import ClientData
    from fedsolve.federation.states import StateStore

_PREPARING = "preparing."
_CALIBRATIONS = ("calibration", "own_calibration", "spread")
_FAMILIES: dict[str, type[Model]] = {}


class Model(ABC):
    """A trained predictor. Scores have one column per class or target: least-squares estimates, or logits.

    labels:    names of several labels a row, each 0 or 1; `classes` is None then, and predictions are 0 and 1
               (rows, labels).
    cuts:      (labels,) from which probability on a label is predicted, such as `threshold(0.9)`; None: 0.5.
    schema:    what a row is, where the model was trained on rows that a schema describes. Rows may then be a
               table (a DataFrame, a pyarrow Table, a mapping of columns), whose columns are found by name.
    preparing: how encoded rows are filled and standardised before the model sees them. A plain array is taken
               as encoded and not yet prepared: what `encoder.encode` gives, NaN where a value is missing.
    calibration: how scores become probabilities, where rows were held out to learn it.
    own_calibration: the same of the models that clients make their own of this one.
    spread:    how far predictions of a regression are off, where rows were held out to learn it.
    device:    where predictions are computed: "cpu", "cuda", "cuda:1", "torch:cpu"; not in the file.
    card:      how the model came about, as JSON values for people (`fedsolve info`); only files hold it.
    tried:     candidates that a choice was made from, with how they did on rows held out; not in the file.
    federation: the local one that the model was trained in, for `personal`; not in the file.
    """

    family: ClassVar[str]
    """Under which name files say what they hold; the class's address unless it is given."""
    private: ClassVar[bool] = False
    """Whether the model belongs to one client and must not be sent to anybody."""
    logits = False
    """Whether softmax of the scores gives probabilities."""
    personalises: ClassVar[bool] = False
    """Whether `personalised` gives every client a predictor of its own."""
    predicts: ClassVar[bool] = True
    """Whether it can predict by itself; if not, clients make their own models from it."""
    predicted: ClassVar[str] = "prediction"
    scored: ClassVar[str] = ""
    """What a regression's answers are called, and its scores where they are something else."""

    labels: tuple[str, ...] = ()
    cuts: Array | None = None
    history: Sequence[Record] = ()
    tried: Sequence[Any] = ()
    schema: Schema | None = None
    preparing: Preparation | None = None
    calibration: Calibration | LabelCalibration | None = None
    own_calibration: Calibration | None = None
    spread: Spread | None = None
    card: dict[str, Any] | None = None
    device: str = "cpu"
    federation: LocalFederation | None = None

    def __init__(self, features: int, classes: Array | None, outputs: int) -> None:
        self.features, self.classes, self.outputs = features, classes, outputs

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
        model.__dict__.update(container.from_parts(arrays, note["attributes"]))
        return model

    def _stored(self) -> tuple[dict[str, Array], dict[str, Any]]:
        known = {"features", "classes", "outputs", *get_annotations(Model)}  # stored for every model
        own = {name: value for name, value in vars(self).items() if name not in known}
        return container.to_parts(own, f"the model {type(self).__name__}")

    @property
    def regression(self) -> bool:
        """Whether it predicts numbers, not classes or labels."""
        return self.classes is None and not self.labels

    @property
    def judged(self) -> Array | None:
        """The classes by whose probabilities it is evaluated; None where it is not by those."""
        return self.classes

    @property
    def middle(self) -> Array:
        """(outputs,) numbers near the targets: what it says of a row of zeros."""
        return np.asarray(self.estimates(np.zeros((1, self.features)))[0])

    def scored_by(self, label: str | None) -> Self:
        """This model for rows with the truth in this column; None: in the model's own column.

        Refused where no column can have it.
        """
        return self

    def truths(self, labels: Array) -> Array:
        """What its predictions are compared with, from labels."""
        return labels

    def complete(self, features: Array) -> Array:
        """Which encoded rows it has a prediction for."""
        return np.ones(len(features), dtype=bool)

    def decision_function(self, features: Any) -> Array:
        """Scores, shape (rows, classes), (rows, targets) or (rows, labels)."""
        return self.scores(self._checked(features))

    def estimates(self, features: Any) -> Array:
        """Estimates of the targets, which are ones and zeros for classes: (rows, outputs).

        Errors of least squares are taken against these: the scores themselves, or the softmax of logits.
        """
        return self.estimated(self.decision_function(features))

    def estimated(self, scores: Array) -> Array:
        """The estimates that belong to these scores."""
        return np.asarray(softmax(scores, axis=1)) if self.logits else scores

    def known_scores(self, features: Any) -> Array:
        """Scores of rows, NaN for those that lack what the model needs; by default such rows are refused."""
        return self.decision_function(features)

    def predict(self, features: Any) -> Array:
        """The class with the largest score, the predicted targets, or 0 and 1 for each of several labels."""
        return self.decided(self.decision_function(features))

    def predict_proba(self, features: Any) -> Array:
        """Probabilities of the classes, (rows, classes), or of each of several labels, (rows, labels).

        Calibrated on rows that were not trained on, where it was trained with calibrate=True. Otherwise what
        is nearest to the model's estimates: zeros and ones are common then and mean "clipped".
        """
        return self.told(features)[1]

    def told(self, features: Any) -> tuple[Array, Array]:
        """What the model says of rows: positions of the answers, and probabilities (rows, classes)."""
        if self.regression:
            raise DataError("this is a regression model; it has no classes, and so no probabilities.")
        scores = self.decision_function(features)
        return self.decided(scores) if self.labels else np.argmax(scores, axis=1), self.shares(scores)

    def shares(self, scores: Array, calibrated: bool = True) -> Array:
        """Probabilities (rows, classes) of scores; without calibration those nearest to the estimates."""
        if calibrated and self.calibration is not None:
            return self.calibration.probabilities(scores)
        if self.labels:
            return np.clip(scores, 0.0, 1.0)
        return np.asarray(softmax(scores, axis=1)) if self.logits else project_to_simplex(scores)

    def threshold(self, sensitivity: float) -> Any:
        """The probability from which to predict the second class so that this share of its rows is found.

        Chosen on the rows that were held out when the model was calibrated, of two classes only; of several
        labels one for each, (labels,).
        """
        known = None if self.calibration is None else self.calibration.thresholds
        if known is None:
            raise DataError(
                "a threshold is chosen on rows that were held out of training, and this model knows of none. "
                "Train a classifier of two classes with calibrate=True, or 'fedsolve train --calibrate'."
            )
        if self.labels:
            return np.array([threshold(histogram, sensitivity) for histogram in known])
        return threshold(known, sensitivity)

    def predict_interval(self, features: Any, level: float = 0.95) -> tuple[Array, Array]:
        """The two numbers between which targets lie with this probability, each shaped like `predict`.

        By the errors on rows that were held out; the same width for every row.
        """
        if self.classes is not None or self.spread is None:
            raise DataError(
                "intervals follow from rows that were held out of training, and this model knows of none. "
                "Train a regression with calibrate=True, or 'fedsolve train --calibrate'."
            )
        scores, reach = self.decision_function(features), self.spread.reach(level)
        return self.decided(scores - reach), self.decided(scores + reach)

    def score(self, features: Any, labels: Any) -> float:
        """Accuracy, or the mean R² over targets for regression; of several labels, their mean accuracy."""
        return self._rate(self.predict(features), labels)

    @property
    def column_moments(self) -> Preparation | None:
        """Mean and spread of the training columns, where rows were standardised by them."""
        known = getattr(self, "preparation", None) if self.preparing is None else self.preparing
        return known if known is not None and np.any(known.scale != 1.0) else None

    @property
    def caveat(self) -> str | None:
        """A warning to whoever predicts with it; None if there is none."""
        if self.predicts:
            return None
        return (
            "this model is the shared part of the clients' own and not meant to predict by itself. Make a "
            "client's model of it ('fedsolve personalise', model.personalised(data)) and use that."
        )

    def personalised(self, data: ClientData, states: StateStore | None = None) -> Model:
        """The predictor of the client that owns `data`, made where the data are.

        states: what the client kept from the run, for methods whose clients keep something.
        """
        own = self.undescribed().own_model(self.shown(data), states).described_as(self)
        own.calibration = self.own_calibration
        return own

    def personal(self, client: str) -> Model:
        """The predictor of a client of the local federation that this model was trained in."""
        if self.federation is None:
            raise DataError(
                f"this model does not know '{client}': it was loaded from a file or trained over a network. "
                "Where the data are: participant.personalise(model)."
            )
        known = self.federation.clients
        if client not in known:
            more = ", ..." * (len(known) > 5)
            raise DataError(f"no participant is called '{client}'; there are {', '.join(known[:5])}{more}.")
        return self.federation.participants[known.index(client)].personalise(self)

    def own_model(self, data: ClientData, states: StateStore | None = None) -> Model:
        """Like `personalised`, for prepared rows. Methods with personal models override this."""
        if self.private:
            raise DataError(
                "this model is one client's own already; personalise the shared model it was made from."
            )
        raise DataError(
            f"a model of family '{self.family}' is the same for everybody; train with a personalised method "
            "such as APFL, or put refinements over it with APFL(...).over(model)."
        )

    def placed(self, device: str) -> Self:
        """This model, which computes on this device from now on."""
        self.device = device
        return self

    # -- what a row is -----------------------------------------------------------------------------

    def describe(self, schema: Schema, preparing: Preparation | None) -> None:
        """Take raw rows of this schema from now on, prepared like this."""
        self.schema, self.preparing = schema, preparing

    def described_as(self, other: Model) -> Self:
        """This model, which takes the same raw rows as `other` from now on."""
        self.schema, self.preparing = other.schema, other.preparing
        return self

    def undescribed(self) -> Self:
        """The model of prepared rows that is inside this one."""
        if self.schema is None and self.preparing is None:
            return self
        inside = copy.copy(self)
        inside.schema = inside.preparing = None
        return inside

    def shown(self, data: ClientData) -> ClientData:
        """A client's rows as the model inside this one sees them."""
        return data if self.preparing is None else data.prepared(self.preparing)

    def decided(self, scores: Array, calibrated: bool = True) -> Array:
        """The predictions that belong to these scores."""
        if self.labels:
            cuts = 0.5 if self.cuts is None else self.cuts
            return (self.shares(scores, calibrated) >= cuts).astype(np.int64)
        if self.classes is not None:
            return np.asarray(self.classes[np.argmax(scores, axis=1)])
        found = self.estimated(scores)
        return found[:, 0] if self.outputs == 1 else found

    def strange(self, features: Array, source: str) -> list[str]:
        """One sentence for each way in which these encoded rows are not like those of training."""
        return far_outside(self.schema, self.column_moments, features, source)

    def _rate(self, predicted: Array, labels: Any) -> float:
        labels = np.asarray(labels)
        if len(labels) != len(predicted):
            raise DataError(f"{len(predicted)} rows but {len(labels)} labels.")
        if len(labels) == 0:
            raise DataError("cannot score a model on no rows at all.")
        if self.classes is not None:
            return float(np.mean(predicted == labels))
        if self.labels:
            return float(np.mean(predicted == label_matrix(labels, self.labels)))
        target = regression_targets(labels, self.outputs).astype(np.float64)
        error = np.sum((target - predicted.reshape(target.shape)) ** 2, axis=0)
        spread = np.sum((target - target.mean(axis=0)) ** 2, axis=0)
        return float(np.mean(1.0 - error / spread))

    def _checked(self, values: Any, prepared: bool = True) -> Array:
        """Rows as numbers of the right width; prepared: as the model inside this one sees them."""
        if is_table(values):
            if self.schema is None:
                raise DataError(
                    "this model knows no names of columns, only their number. Give an array with the columns "
                    f"in the order of training ({self.features} of them)."
                )
            values = encode(self.schema, values)
        # In one layout: a product with another one may differ in its last digit.
        features: Array = np.ascontiguousarray(values)
        if features.ndim != 2 or features.shape[1] != self.features:
            raise DataError(
                f"this model takes rows of {self.features} features; got an array of shape {features.shape}."
            )
        if features.dtype.kind not in "fiub":
            raise DataError(f"features must be real numbers; got dtype {features.dtype}.")
        if not prepared:
            return features
        if self.preparing is not None:
            features = self.preparing.apply(features)
        if features.dtype.kind == "f" and not np.all(np.isfinite(features)):
            row, column = np.argwhere(~np.isfinite(features))[0]
            raise DataError(
                f"features contain NaN or infinite values (first in row {row}, column {column}). Remove or "
                "impute them."
            )
        return features

    def check_finite(self, what: str = "the model") -> None:
        """Refuse a model that holds NaN or infinity."""
        for name, array in self.arrays().items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise DivergenceError(
                    f"{what} holds values that are not finite numbers ({name}): the training diverged. Lower "
                    "the rate or set clip, or use a larger ridge, and train again."
                )

    # -- files -----------------------------------------------------------------------------------

    def contents(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Everything that makes this model, as named arrays and a JSON note."""
        note = {
            **self.note(),
            "model": version.MODEL,
            "family": self.family,
            "features": self.features,
            "outputs": self.outputs,
            "classes": labels_note(self.classes),
        }
        if self.labels:
            note["labels"] = list(self.labels)
            note["cuts"] = None if self.cuts is None else [float(cut) for cut in self.cuts]
        arrays = self.arrays()
        for name in _CALIBRATIONS:
            if getattr(self, name) is not None:
                parts, note[name] = getattr(self, name).parts()
                arrays |= {f"{name}.{part}": array for part, array in parts.items()}
        if self.schema is not None:
            note["schema"] = self.schema.to_note()
        if self.preparing is not None:
            arrays |= self.preparing.arrays(_PREPARING)
        return arrays, note

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model file; equal models give equal bytes. One client's own is for its owner to read."""
        container.write_atomically(path, self.to_bytes(), private=self.private)

    def to_bytes(self) -> bytes:
        """The contents of the model file."""
        arrays, note = self.contents()
        note = note if self.card is None else {**note, "card": self.card}
        return container.to_bytes(arrays, note, sealed=True)

    def to_onnx(
        self, path: str | os.PathLike[str], precision: str = "float64", images: bool | str = False
    ) -> OnnxFile:
        """Write the whole way from raw rows to labels and probabilities as one ONNX file; what was written.

        A model of columns has an input for each of them, others have `features`. precision: "float64" or
        "float32". images: join the backbone of a model of image features, so that `pixels` go in; its address
        where its files lie elsewhere now. One client's own model is for its owner to read.
        """
        from fedsolve.export import write_onnx

        return write_onnx(self, path, precision, images)

    def __repr__(self) -> str:
        what = f"{self.outputs} {'labels' if self.labels else 'targets' if self.regression else 'classes'}"
        words = [f"{self.features} features, {what}"]
        if method := getattr(self, "parameters", {}).get("method"):
            words.append(f"trained by {method}")
        words += ["calibrated"] if self.calibration is not None else []
        words += [f"{len(self.schema.columns)} named columns"] if self.schema and self.schema.columns else []
        words += ["one client's own"] if self.private else []
        words += [f"{len(self.history)} exchanges"] if self.history else []
        return f"{type(self).__name__}({'; '.join(words)})"

    def _repr_html_(self) -> str:
        """For notebooks: what the model is, and what travelled in every exchange that made it."""
        heads = ("exchange", "kind", "clients", "MB up", "MB down")
        rows = [
            (
                one.exchange,
                one.kind,
                len(one.cohort),
                f"{one.bytes_up / 1e6:.3g}",
                f"{one.bytes_down / 1e6:.3g}",
            )
            for one in self.history
        ]
        return html_table(repr(self), rows, heads if rows else ())


def load_model(path: str | os.PathLike[str], allow_methods: Iterable[str] | None = None) -> Model:
    """The model saved at `path`.

    allow_methods: methods from outside fedsolve, as "package.module:Class" or by the name of their entry
        point, whose code the file may have imported; none when None, unless `registry.allowing` says more at
        this moment. Those imported already need no leave.
    """
    arrays, note = container.from_bytes(container.read(path), what=f"model file {path}", error=ModelFileError)
    settled = allow_methods is None and restricted()
    with nullcontext() if settled else allowing(networks=None, methods=allow_methods or ()):
        return model_from_contents(arrays, note, str(path))


def model_from_contents(arrays: dict[str, Array], note: Mapping[str, Any], path: str = "this model") -> Model:
    """The model that `Model.contents` described."""
    written = note.get("model")
    if not isinstance(written, int):
        raise ModelFileError(f"{path} is not a fedsolve model (it may be a checkpoint).")
    if written != version.MODEL:
        raise ModelFileError(
            f"{path} has model version {written}; this fedsolve reads {version.MODEL}. Use the fedsolve that "
            "wrote it, or train again."
        )
    family = note.get("family")
    if family not in _FAMILIES:
        registry.enter_all()
    if isinstance(family, str) and ":" in family and family not in _FAMILIES:
        registry.import_model(family)  # its definition enters it
    if family not in _FAMILIES:
        raise ModelFileError(
            f"{path} holds a model of family {family!r}; known are {sorted(_FAMILIES)}. Upgrade fedsolve."
        )
    try:
        kept = (_PREPARING, *(f"{name}." for name in _CALIBRATIONS))
        own = {name: array for name, array in arrays.items() if not name.startswith(kept)}
        model = _FAMILIES[family].restored(own, dict(note))
        for name in _CALIBRATIONS:
            if note.get(name) is not None:
                parts = container.with_prefix(arrays, f"{name}.")
                setattr(model, name, kept_from(parts, note[name]))
        model.card, model.labels = note.get("card"), tuple(note.get("labels", ()))
        model.cuts = None if note.get("cuts") is None else np.array(note["cuts"])
        if note.get("schema") is not None:
            model.schema = Schema.from_note(note["schema"])
        if any(name.startswith(_PREPARING) for name in arrays):
            model.preparing = Preparation.from_arrays(arrays, _PREPARING)
        return model
    except (KeyError, TypeError, IndexError) as problem:
        raise ModelFileError(
            f"{path} is incomplete ({type(problem).__name__}: {problem}). Fetch or write it again."
        ) from problem
