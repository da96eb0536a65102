"""A training from raw rows to a model: the stages that a run walks through, one after the other.

    preparation   means and scales of the columns of a schema; rows in all, and of each class       1 exchange
    choice        candidates on all rows but a fold, for every fold, compared on that fold    of the longest
    trial         the method on all rows but a fold, where a calibration needs one and nothing was chosen
    calibration   scores on the rows that a model was not trained on become probabilities       2 to 6
    training      the method, with what was chosen, on all rows                                 its own

A recipe says which of them there are. Each stage is a run of its own, with its exchanges and its state; what
it finds is kept for those after it. One fold of a row, by its content, serves choice and calibration.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from fedsolve import container, registry
from fedsolve.arrays import check_choice
from fedsolve.calibration import Calibration, Spread, kept_from
from fedsolve.errors import CalibrationWarning, DataError, ModelFileError, TermError
from fedsolve.federation.client_data import TABLE_BLOCK
from fedsolve.federation.engine import Federation, Follow, Followers, Spec, Training
from fedsolve.federation.folds import PART, Part
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.messages import Block, Request, Total
from fedsolve.federation.method import SCORES, Method, Record, Run
from fedsolve.federation.preparing import PreparationRun, public_preparation
from fedsolve.labels import encode_labels
from fedsolve.model import Model, model_from_contents
from fedsolve.tables.preparation import Preparation
from fedsolve.tables.schema import Schema
from fedsolve.threads import blas_threads

M = TypeVar("M", bound=Model)

_FEW_ROWS, _FEW_FEATURES = 4_000, 2_048

_PLAIN = ("standardise", "class_weight", "calibrate", "biases", "told")
"""The fields of a recipe that are JSON values."""


@dataclass(frozen=True)
class Recipe(Generic[M]):
    """A method, and what comes before and after its training.

    schema:       what the rows are that it is trained on; None where they are plain numbers.
    standardise:  numbers and dates of the schema to mean 0 and deviation 1 over all sites; else only filled.
    class_weight: "balanced" lets every class count alike, whatever its rows; None counts rows.
    calibrate:    fit probabilities, or the intervals of a regression, to rows that were not trained on.
    biases:       fit a bias for every class besides a slope. None: for two classes, and where classes are
                  weighted; otherwise the order of the classes stays that of the scores.
    part:         the rows to train on; all when None.
    told:         where sums are secure, the most numbers told in all for each number that the rows hold: what
                  does not fit is not tried, and nothing is calibrated by it. None: no limit.
    """

    method: Method[M]
    schema: Schema | None = None
    standardise: bool = True
    class_weight: Literal["balanced"] | None = None
    calibrate: bool = False
    biases: bool | None = None
    part: Part | None = None
    told: float | None = None

    def __post_init__(self) -> None:
        check_choice("class_weight", self.class_weight, (None, "balanced"))
        if self.part is not None and (self.calibrate or self.method.chooses):
            raise DataError("a choice or a calibration holds out rows by itself: leave out part=.")
        if (self.calibrate or self.class_weight) and "privacy" in self.method.agreement():
            raise DataError(
                "a private run releases what its method declares and nothing else; calibration and class "
                "weights need exact counts. Leave them out."
            )

    @property
    def scales(self) -> bool:
        """Whether columns are standardised."""
        return self.standardise and self.method.preparation == "standardise"

    def start(self, spec: Spec) -> StagedRun[M]:
        """The run of this recipe over a federation like `spec`."""
        schema = self.schema
        if schema is not None and spec.features != schema.width:
            raise DataError(
                f"the schema makes {schema.width} features of a row; the federation has {spec.features}."
            )
        if schema is not None and schema.extractor is None:
            spec = dataclasses.replace(spec, standardised=self.scales)
        classes = None if schema is None else schema.class_array
        if classes is not None and spec.classes is not None:
            encode_labels(spec.classes, classes)
            spec = dataclasses.replace(spec, classes=classes, outputs=len(classes))
        if labels := spec.labels or (() if schema is None else schema.labels):
            if not self.method.multilabel:
                raise DataError(
                    f"the method '{self.method.key}' learns one label a row, and these have {len(labels)} "
                    f"({', '.join(labels)}). Use afl, kernelafl, deepafl or auto."
                )
            spec = dataclasses.replace(spec, labels=labels)
        if self.class_weight is not None and spec.classes is None:
            raise DataError("class_weight is for classification; these are targets of a regression.")
        run = StagedRun(self, spec, self.method, stages(self))
        run.go_on()
        return run

    def fit(
        self,
        federation: Federation,
        checkpoint: str | os.PathLike[str] | None = None,
        resume: bool = False,
        follow: Follow = (),
    ) -> M:
        """Train over a federation: see `Method.fit`."""
        spec = federation.describe()
        told = federation.told if self.told is None and math.isfinite(federation.told) else self.told
        method = self.method.afforded(spec) if self.method.chooses else self.method
        recipe = dataclasses.replace(self, method=method, told=told)
        heard, run = Followers(follow if isinstance(follow, Sequence) else [follow]), recipe.start(spec)
        within = federation if federation.within is None else federation.within
        # Always told: a run without a checkpoint may not touch the states of one that has one.
        within.keep_states(None if checkpoint is None else Path(f"{os.fspath(checkpoint)}.clients"))
        if checkpoint is not None and os.path.exists(checkpoint):
            if not resume:
                raise ModelFileError(
                    f"checkpoint {checkpoint} exists. Pass resume=True to continue from it, or remove it."
                )
            run.restore(container.read(checkpoint), str(checkpoint))
            if run.whose_rows and (held := within.holdings()):
                held.check(run.whose_rows, str(checkpoint))
        elif resume and checkpoint is None:
            raise DataError("resume=True needs a checkpoint path to resume from.")
        federation.plan(max(1, run.exchanges - len(run.history)), recipe, len(run.history))
        heard.tell(
            "started",
            Training(
                method=recipe.method.key,
                parameters=recipe.method.parameters(),
                spec=run.spec,
                clients=federation.clients,
                expected=run.expected,
                history=tuple(run.history),
                checkpoint=None if checkpoint is None else os.fspath(checkpoint),
            ),
        )
        try:
            for record in exchanges(run, federation, heard):
                if found := heard.tell("look", run):
                    run.history[-1] = dataclasses.replace(record, metrics={**record.metrics, **found})
                if checkpoint is not None:
                    if holdings := within.holdings():
                        run.whose_rows = holdings.note()
                    container.write_atomically(checkpoint, run.to_bytes(), previous_kept=True)
                heard.tell("advanced", run.history[-1], run.expected)
            model = run.model()
            if model.personalises and isinstance(within, LocalFederation):
                model.federation = within
            # Of a DataFrame the columns are found by name.
            if model.schema is None and (names := getattr(within, "column_names", ())):
                model.schema = Schema.of_numbers(names, model.classes, labels=model.labels)
        except BaseException as problem:
            heard.tell("stopped", problem)
            raise
        heard.tell("finished", model)
        return model

    def note(self) -> dict[str, Any]:
        """The recipe as JSON values. A method that needs more than parameters is refused by name."""
        method = self.method
        if isinstance(getattr(method, "method", None), Method):
            raise DataError(
                f"sites cannot check the questions of '{method.key}': it starts from a model or from totals "
                "that are given, not from the totals of its own run. Run it unchecked, which every site must "
                "allow."
            )
        return {
            "method": method.key,
            "parameters": method.parameters(),
            "schema": None if self.schema is None else self.schema.to_note(),
            **{name: getattr(self, name) for name in _PLAIN},
            "part": None if self.part is None else dataclasses.asdict(self.part),
        }

    @classmethod
    def from_note(cls, note: Mapping[str, Any]) -> Recipe[Any]:
        """The recipe that a note describes; anything else is refused."""
        try:
            given = {name: note[name] for name in _PLAIN if name in note}
            described = note.get("schema")
            schema = None if described is None else Schema.from_note(described)
            method: Method[Any] = registry.method_of(note)
            part = None if note.get("part") is None else Part(**note["part"])
            return cls(method, schema, **given, part=part)
        except (KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise TermError(
                f"the description of the method is damaged ({type(problem).__name__}: {problem})."
            ) from problem


@dataclass(frozen=True)
class Tried:
    """A candidate, and its result on the rows held out.

    layers: of a candidate with layers, the best number; trained: how many it was tried with. errors: share of
    mistakes, None for targets. loss: mean squared error. rows: held out in all. exchanges, numbers: what its
    training takes and tells. left_out: why it was not tried.
    """

    method: str
    settings: Mapping[str, Any]
    layers: int | None = None
    errors: float | None = None
    loss: float | None = None
    rows: int = 0
    chosen: bool = False
    left_out: str = ""
    trained: int | None = None
    exchanges: int | None = None
    numbers: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Stage:
    """A part of a run: how it starts, how many exchanges it takes, and what is kept of it at its end.

    start: its run, or None where there is nothing to do. expected: exchanges, before it has started.
    optional: whether the run goes on without it, with a warning, where the rows do not do.
    """

    name: str
    start: Callable[[StagedRun[Any]], Run[Any] | None]
    end: Callable[[StagedRun[Any], Any], None] = lambda whole, run: None
    expected: Callable[[StagedRun[Any]], int] = lambda whole: 0
    optional: bool = False


@dataclass(eq=False, repr=False)
class StagedRun(Run[M]):
    """One run over the stages of a recipe.

    run: that of the stage under way; requests, chain and state are its own. stage: the name of that stage.
    history: of all stages. place: of the stage under way among `stages`.
    What stages found: prepared, the block of the preparation; rows, how many there are; method, the one to
    train; tried, the candidates; folded, models by name with the rows that they were not trained on, and
    folded_by, the runs that made them, where they are still known; held_out, the rows that a trial leaves
    out; scores, centre and scale of those of the folded models; calibrations, by whose scores.
    """

    recipe: Recipe[M]
    spec: Spec
    method: Method[M]
    stages: Sequence[Stage]
    history: list[Record] = field(default_factory=list)
    whose_rows: dict[str, list[Any]] | None = None
    prepared: Block | None = None
    rows: int = 0
    tried: tuple[Tried, ...] = ()
    folded: dict[str, tuple[Model, Part]] = field(default_factory=dict)
    folded_by: dict[str, Run[Any]] = field(default_factory=dict)
    held_out: Part = field(default=Part((0,)))
    calibrations: dict[str, Calibration | Spread] = field(default_factory=dict)
    scores: list[list[Any] | None] = field(default_factory=list)
    place: int = -1

    @property
    def exchanges(self) -> int:
        return len(self.history) - len(self.run.history) + self.run.exchanges + self._later

    @property
    def expected(self) -> int:
        return len(self.history) - len(self.run.history) + self.run.expected + self._later

    def request(self, clients: tuple[str, ...]) -> Request | None:
        while True:
            try:
                asked = self.run.request(clients)
            except DataError as problem:
                if not self.stages[self.place].optional:
                    raise
                self._leave_off(problem)
                continue
            last = self.place == len(self.stages) - 1
            if asked is not None or last:
                return asked
            self.stages[self.place].end(self, self.run)
            self.go_on()

    def absorb(self, total: Total) -> None:
        done, failed = len(self.run.history), None
        try:
            self.run.absorb(total)
        except DataError as problem:
            if not self.stages[self.place].optional:
                raise
            self.run.record(total)
            failed = problem
        self.history += [dataclasses.replace(one, stage=self.stage) for one in self.run.history[done:]]
        if failed is not None:
            self._leave_off(failed)

    def model(self) -> M:
        model: M = self.described(self.run.model())
        model.history, model.tried = tuple(self.history), self.tried
        found: dict[str, Any] = {**self.calibrations}
        known = [one for one in self.scores if one]
        shared = found.get("shared")
        now = self.run.history[-1].metrics.get(SCORES) if self.run.history else None
        if known and now and isinstance(shared, Calibration):
            centres, scales = (np.array([one[place] for one in known]) for place in (0, 1))
            fitted = centres.mean(axis=0), float(np.sqrt(np.mean(scales**2)))
            found["shared"] = shared.moved(fitted, (np.array(now[0]), now[1]))
        model.calibration, model.own_calibration = found.get("shared"), found.get("own")
        model.spread = found.get("spread")
        return model

    def described(self, model: Any) -> Any:
        """A model of this stage, made to take raw rows where a schema describes them."""
        model.labels = self.spec.labels
        if self.recipe.schema is not None:
            arrays = {} if self.prepared is None else self.prepared.arrays
            preparing = Preparation.from_arrays(arrays) if "centre" in arrays else None
            model.describe(self.recipe.schema, preparing)
        return model

    # -- from stage to stage -----------------------------------------------------------------------

    def go_on(self) -> None:
        """Start the next stage that has something to do."""
        run = None
        while run is None:
            self.place += 1
            run = self.stages[self.place].start(self)
        self.run: Run[Any] = run
        self.chain, run.offset = run.chain, len(self.history)
        self.stage = self.stages[self.place].name
        self._later = sum(stage.expected(self) for stage in self.stages[self.place + 1 :])
        # Where rows are known to be few, several threads take ten times as long.
        few = 0 < self.rows < _FEW_ROWS and self.spec.features <= _FEW_FEATURES
        self.threads = 1 if few else None

    def opened(self, run: Run[M], part: Part | None = None) -> Run[M]:
        """The run, told about its rows: schema and part in its opening, then the preparation as a block."""
        recipe = self.recipe
        more: dict[str, Any] = {} if recipe.schema is None else {"schema": recipe.schema.to_note()}
        if (chosen := part or recipe.part) is not None:
            more |= chosen.note()
        if run.method is not recipe.method and recipe.method.chooses:
            more["chosen_by"] = {"method": recipe.method.key, "parameters": recipe.method.parameters()}
        if more:
            run.agree(more)
        if self.prepared is not None:
            run.chain.append(self.prepared)
        return run

    def _leave_off(self, why: object) -> None:
        """Go on without a calibration."""
        numbers = self.spec.classes is None and not self.spec.labels
        lost = "there are no intervals" if numbers else "the probabilities are not calibrated"
        warnings.warn(
            f"{lost}: {str(why).rstrip('.')}. More rows would do.",
            CalibrationWarning,
            stacklevel=3,
        )
        self.folded, self.calibrations = {}, {}
        self.place = len(self.stages) - 2
        self.go_on()

    # -- saving and resuming -----------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "settings": {name: getattr(self.recipe, name) for name in _PLAIN},  # not part of the opening
            "run": self.run.parts(),
            "method": [self.method.key, self.method.parameters()],
            "rows": self.rows,
            "prepared": None if self.prepared is None else dict(self.prepared.arrays),
            "tried": [one.as_dict() for one in self.tried],
            "calibrations": {name: one.parts() for name, one in self.calibrations.items()},
            "folded": {name: [*model.contents(), part.note()] for name, (model, part) in self.folded.items()},
            "held_out": dataclasses.asdict(self.held_out),
            "history": [record.as_dict() for record in self.history],
            "held": self.whose_rows,
            "scores": self.scores,
        }

    def take_parts(self, kept: dict[str, Any], path: str) -> None:
        names = [stage.name for stage in self.stages]
        pairs = {name: (kept["settings"][name], getattr(self.recipe, name)) for name in _PLAIN}
        if differing := [f"{name}={was!r}, not {now!r}" for name, (was, now) in pairs.items() if was != now]:
            told = ", ".join(differing)
            raise ModelFileError(
                f"checkpoint {path} is of a run with {told}. Resume it as it was started, or choose another "
                "checkpoint path."
            )
        key, parameters = kept["method"]
        if self.recipe.method.chooses:
            self.method = registry.method_of({"method": key, "parameters": parameters})
        if kept["prepared"] is not None:
            self.prepared = Block({TABLE_BLOCK: True}, kept["prepared"])
        self.rows, self.whose_rows, self.scores = kept["rows"], kept["held"], kept["scores"]
        self.tried = tuple(Tried(**entry) for entry in kept["tried"])
        for name, (arrays, note, part) in kept["folded"].items():
            self.folded[name] = model_from_contents(arrays, note), Part(**part[PART])
        self.held_out = Part(**kept["held_out"])
        self.calibrations = {name: kept_from(*parts) for name, parts in kept["calibrations"].items()}
        self.history = [Record(**entry) for entry in kept["history"]]
        self.place = names.index(kept["stage"]) - 1
        self.go_on()
        if self.stage != kept["stage"]:
            raise ValueError(f"the stage '{kept['stage']}' has nothing to do")
        self.run.take_parts(kept["run"], path)
        self.chain = self.run.chain
        self.run.offset = len(self.history) - len(self.run.history)


def stages(recipe: Recipe[Any]) -> list[Stage]:
    """The stages of a recipe, in their order; the last one trains."""
    from fedsolve.scoring.calibrating import CALIBRATION, TRIAL
    from fedsolve.scoring.choice import CHOICE

    method, found = recipe.method, []
    numbers = [] if recipe.schema is None else recipe.schema.places("number", "date")
    fills = method.preparation in ("standardise", "fill") and any(c.missing != "refuse" for _, c in numbers)
    limited = recipe.calibrate and recipe.told is not None
    # Not for features of images, unless a choice counts the rows.
    if fills or (numbers and recipe.scales) or recipe.class_weight or method.chooses or limited:
        found.append(Stage("preparation", _prepare, _prepared, lambda whole: 1))
    if method.chooses:
        found.append(CHOICE)
    if recipe.calibrate:
        found += [TRIAL, CALIBRATION]
    return [*found, Stage("training", _train, expected=expected_training)]


def _prepare(whole: StagedRun[Any]) -> Run[Any]:
    return whole.opened(PreparationRun(whole.recipe, whole.spec))


def _prepared(whole: StagedRun[Any], run: PreparationRun) -> None:
    whole.prepared = next((block for block in run.chain.blocks if TABLE_BLOCK in block.note), None)
    whole.rows = run.rows or 0


def _train(whole: StagedRun[Any]) -> Run[Any]:
    whole.folded, whole.folded_by = {}, {}
    schema = whole.recipe.schema
    if schema is not None and whole.method.preparation == "public" and schema.places("number", "date"):
        whole.prepared = Block({TABLE_BLOCK: True}, public_preparation(schema).arrays())
    return whole.opened(whole.method.start(whole.spec))


def expected_training(whole: StagedRun[Any]) -> int:
    candidates = whole.method.candidates(whole.spec, whole.rows) if whole.method.chooses else (whole.method,)
    counts = [method.start(whole.spec).expected for method in candidates]
    return round(sum(counts) / len(counts))  # of candidates that may all win


def exchanges(run: Run[Any], federation: Federation, heard: Followers | None = None) -> Iterator[Record]:
    """Train step by step: one record after every exchange, until the model is complete.

    heard: told of every request before it goes out.
    """
    heard = Followers() if heard is None else heard
    while True:
        with blas_threads(run.threads):
            request = run.request(federation.clients)
        if request is None:
            return
        if run.outlook:
            heard.tell("planned", run.outlook)
            run.outlook = ""
        heard.tell("asked", request, run.expected)
        with blas_threads(run.threads):
            run.absorb(federation.exchange(request, run.chain))
        yield run.history[-1]
