"""Any classifier with probabilities that mean what they say: calibrated on rows that were held out.

1. The method is trained on all rows but those held out (about `share`, by their content, whoever owns them).
2. Clients answer, for the rows held out, with sums of log losses at a list of slopes: one exchange gives a
   temperature; with biases (`calibration`) two or four exchanges more. Where clients make models of their own
   of the shared one, they do so of their other rows, and the same exchanges calibrate those.
3. One exchange evaluates the calibrated model on the rows held out.
4. The method is trained again, on all rows, and keeps the calibration. Those exchanges count as well.
   A method that chooses its settings does so in 1, and is trained again with that choice.

Where too few rows are held out, or the others lack a class, the model is left as it is, with a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from fedsolve import container, formats
from fedsolve.calibration import LEAST_ROWS, Calibration, Search, calibration_sums
from fedsolve.container import Array
from fedsolve.errors import CalibrationWarning, DataError, ModelFileError
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.evaluation import about, evaluation_from
from fedsolve.federation.messages import Request, Term, Total
from fedsolve.federation.method import Method, Run, checkpoint_contents, record_from
from fedsolve.federation.on_part import OnPart
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.parts import Part
from fedsolve.labels import encode_labels
from fedsolve.model import Model, model_from_contents

M = TypeVar("M", bound=Model)

LOSSES = "calibrate"
EVALUATION = "tally"
TRAINING, SEARCHING, MEASURING, REFITTING = "training", "searching", "measuring", "refitting"

_ROWS = 16384


@dataclass(frozen=True)
class Calibrated(Method[M]):
    """A method whose models give calibrated probabilities.

    share, seed: how many rows are held out for it, and which.
    biases:      fit a bias for every class besides the temperature. None: for two classes, and where classes
                 are weighted; otherwise the order of the classes stays that of the scores.
    """

    key: ClassVar[str] = "calibrated"

    method: Method[M]
    share: float = 0.2
    seed: str = "calibration"
    biases: bool | None = None

    def __post_init__(self) -> None:
        _ = self.parts  # checks the share

    @property
    def parts(self) -> tuple[Part, Part]:
        """The rows to train on first, and those held out."""
        return Part("training", self.share, self.seed), Part("held out", self.share, self.seed)

    def parameters(self) -> dict[str, Any]:
        return self.method.parameters()

    def agreement(self) -> dict[str, Any]:
        return self.method.agreement()

    def largest_side(self, spec: Spec) -> int:
        return self.method.largest_side(spec)

    def start(self, spec: Spec) -> CalibratedRun[M]:
        if spec.classes is None:
            raise DataError("probabilities are of classes; a regression cannot be calibrated.")
        return CalibratedRun(self, spec)

    def finished(self, model: M, federation: Federation) -> M:
        return self.method.finished(model, federation)

    def with_biases(self, spec: Spec) -> bool:
        """Whether biases are fitted in a federation like this."""
        weighted = getattr(self.method, "class_weight", None) is not None
        return (weighted or spec.outputs == 2) if self.biases is None else self.biases


class CalibratedRun(Run[M]):
    """Training on a part, a search for the calibration on the rest, and training on everything.

    inner: the run of the moment; chain and requests are its own. first: the model of the first training.
    """

    method: Calibrated[M]
    unlike: ClassVar[frozenset[str]] = frozenset({"calibrating.model"})

    def __init__(self, method: Calibrated[M], spec: Spec) -> None:
        super().__init__(method, spec)
        self.phase = TRAINING
        self.searches: dict[str, Search] = {}
        self.found: dict[str, Calibration] = {}
        self._first: M | None = None
        self._mark = ""
        first = OnPart(method.method, method.parts[0]).start(spec)
        first.expect(2, self._besides)
        self._begin(first)

    def within(self) -> Mapping[str, Run[Any]]:
        return {"": self.inner}

    def _begin(self, inner: Run[M]) -> None:
        self.inner = inner
        self.chain = inner.chain

    @property
    def exchanges(self) -> int:
        if self.phase == REFITTING:
            return len(self.history) - len(self.inner.history) + self.inner.exchanges
        return 2 * self.inner.exchanges + self._besides

    @property
    def _besides(self) -> int:
        """The exchanges between the two trainings."""
        return Search(self.method.with_biases(self.spec), self.spec.outputs).exchanges + 1

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self.phase == TRAINING:
            try:
                asked = self.inner.request(clients)
                if asked is not None:
                    return asked
                self._search()
            except DataError as problem:
                self._leave_off(problem)
        if self.phase == SEARCHING:
            return self._about_the_first(LOSSES, clients)
        if self.phase == MEASURING:
            return self._about_the_first(EVALUATION, clients)
        return self.inner.request(clients)

    def absorb(self, total: Total) -> None:
        if self.phase == SEARCHING:
            self._advance(total)
            self.record(total, LOSSES)
        elif self.phase == MEASURING:
            self._measure(total)
            self.record(total, "held-out evaluation")
        else:
            done = len(self.inner.history)
            try:
                self.inner.absorb(total)
            except DataError as problem:
                if self.phase != TRAINING:
                    raise
                self.record(total)
                self._leave_off(problem)
                return
            for record in self.inner.history[done:]:
                self.history.append(dataclasses.replace(record, exchange=len(self.history)))

    # -- what the phases do --------------------------------------------------------------------------

    @property
    def first(self) -> M:
        """The model of the rows that were not held out."""
        if self._first is None:
            self._first = self.inner.model()
            # By which clients know that they have its scores already, in the exchanges after the first.
            self._mark = hashlib.sha256(container.to_bytes(*self._first.contents())).hexdigest()
        return self._first

    def _search(self) -> None:
        self.phase = SEARCHING
        biases = self.method.with_biases(self.spec)
        wanted = {"shared": self.first.predicts, "own": self.first.personalises}
        self.searches = {name: Search(biases, self.spec.outputs) for name, there in wanted.items() if there}
        if not self.searches:
            self._leave_off("the model is not one to predict with")

    def _about_the_first(self, kind: str, clients: tuple[str, ...]) -> Request:
        self._asked = (kind, 0, 0)
        held, first = self.method.parts[1], self.first
        if kind == EVALUATION:
            return about(kind, first, clients, held, len(self.history))
        more = {"held": dataclasses.asdict(held), "model": self._mark}
        request = about(kind, first, clients, None, len(self.history), calibrating=more)
        lists = {f"candidates.{name}": search.candidates for name, search in self.searches.items()}
        return dataclasses.replace(request, arrays={**request.arrays, **lists})

    def _advance(self, total: Total) -> None:
        if total.count("rows") < LEAST_ROWS:
            rows = total.count("rows")
            self._leave_off(f"{rows} rows are held out, and {LEAST_ROWS} are the fewest that say something")
            return
        for name, search in self.searches.items():
            search.absorb(container.with_prefix(total.term.arrays, f"{name}."))
        if not all(search.done for search in self.searches.values()):
            return
        for name, search in self.searches.items():
            slope, biases = search.result()
            self.found[name] = Calibration(
                slope, biases, self.method.share, self.method.seed, total.count("rows")
            )
        if "shared" in self.found:
            self.phase, self.first.calibration = MEASURING, self.found["shared"]
        else:
            self._refit()

    def _measure(self, total: Total) -> None:
        seen = evaluation_from(self.first, total)
        histogram = seen.sums["histogram"][0].astype(np.int32) if self.spec.outputs == 2 else None
        metrics = {name: value if np.isfinite(value) else None for name, value in seen.measures().items()}
        self.found["shared"] = dataclasses.replace(
            self.found["shared"], metrics=metrics, thresholds=histogram
        )
        self._refit()

    def _leave_off(self, why: object) -> None:
        warnings.warn(
            f"the probabilities are not calibrated: {str(why).rstrip('.')}. More rows, or another share held "
            "out, would do.",
            CalibrationWarning,
            stacklevel=2,
        )
        self.found = {}
        self._refit()

    def _refit(self) -> None:
        # Without a calibration the model is the one that the method gives by itself.
        choice = self.inner.choice() if self.found else None
        self.phase, self._first = REFITTING, None
        again = self.method.method.start(self.spec)
        again.expect(1, len(self.history))
        if choice is not None:
            again.take_choice(choice)
        self._begin(again)

    def model(self) -> M:
        model = self.inner.model()
        model.history = tuple(self.history)
        model.calibration = self.found.get("shared")
        model.own_calibration = self.found.get("own")
        return model

    # -- saving and resuming -------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        arrays: dict[str, Array] = {"inner": np.frombuffer(self.inner.to_bytes(), dtype=np.uint8)}
        found: dict[str, Any] = {}
        for name, calibration in self.found.items():
            parts, found[name] = calibration.parts()
            arrays |= {f"found.{name}.{part}": array for part, array in parts.items()}
        for name, search in self.searches.items():
            kept = {"best": search.best, "trial": search.trial}
            arrays |= {f"search.{name}.{part}": a for part, a in kept.items() if a is not None}
        note = {
            "calibrated": formats.CALIBRATION.version,
            "phase": self.phase,
            "found": found,
            "steps": {name: search.steps for name, search in self.searches.items()},
            "history": [record.as_dict() for record in self.history],
        }
        return container.to_bytes(arrays, note | self.held_note(), sealed=True)

    def restore(self, data: bytes, path: str) -> None:
        arrays, note = checkpoint_contents(data, path)
        if note.get("calibrated") != formats.CALIBRATION.version:
            raise ModelFileError(
                f"{path} is not a checkpoint of a run that calibrates. Resume as it was started "
                "(--no-calibrate, or the method by itself), or choose another checkpoint path."
            )
        if note["phase"] == REFITTING:
            self._begin(self.method.method.start(self.spec))
        self.inner.restore(arrays["inner"].tobytes(), path)
        self._begin(self.inner)
        self.phase = note["phase"]
        self.history = [record_from(entry) for entry in note["history"]]
        for name, entry in note["found"].items():
            self.found[name] = Calibration.from_parts(container.with_prefix(arrays, f"found.{name}."), entry)
        biases = self.method.with_biases(self.spec)
        for name, steps in note["steps"].items():
            kept = container.with_prefix(arrays, f"search.{name}.")
            self.searches[name] = Search(
                biases, self.spec.outputs, steps, kept.get("best"), kept.get("trial")
            )
        if self.phase == MEASURING:
            self.first.calibration = self.found["shared"]


@step(LOSSES, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """Sums of the log losses of the rows held out, at every candidate; of this client's own model too."""
    about_it = request.note["calibrating"]
    held, rest = (Part(**{**about_it["held"], "side": side}) for side in ("held out", "training"))
    kept = memory.cache.get("calibrating")
    if kept is None or kept[0] != about_it["model"]:
        model = model_from_contents(dict(request.arrays), dict(request.note))
        assert model.classes is not None
        rows = held.of(data)
        scores: dict[str, Array] = {}
        if "candidates.shared" in request.arrays:
            scores["shared"] = _scores(model, rows)
        if "candidates.own" in request.arrays:
            scores["own"] = _scores(model.personalised(rest.of(data), memory.states), rows)
        codes = encode_labels(rows.own_labels(), model.classes)
        kept = memory.cache["calibrating"] = (about_it["model"], scores, codes, rows.own_weights())
    _, scores, codes, weights = kept
    term = Term(counts={"rows": len(codes)})
    for name, found in scores.items():
        with np.errstate(over="ignore", invalid="ignore"):  # refused by name where the term is checked
            sums = calibration_sums(found, codes, request.arrays[f"candidates.{name}"], weights)
        term.arrays |= {f"{name}.{part}": array for part, array in sums.items()}
    return term


def _scores(model: Model, data: ClientData) -> Array:
    found = [np.zeros((0, model.outputs))]
    for start in range(0, len(data), _ROWS):
        found.append(model.decision_function(data.features(slice(start, start + _ROWS), data.source.dtype)))
    return np.concatenate(found)
