"""A run that survives its process: everything it knows is in a state folder after every exchange.

STATE/agreement.json            features, columns and classes as agreed with the sites, and the run's own mark
STATE/checkpoint.safetensors    the run after its last exchange; NAME.previous: after the one before
STATE/report.json               who took part in each exchange, what travelled, how it ended
STATE/model.safetensors         the model
STATE/secure/                   the question under way, where sums are secure
STATE/over                      there once the sites were told that the run is over
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.errors import CohortError, FedsolveError, ModelFileError
from fedsolve.federation.card import training_card
from fedsolve.federation.cohort import CohortReport
from fedsolve.federation.engine import Federation, Spec
from fedsolve.federation.followers import Follower, Followers
from fedsolve.federation.method import Record, record_from
from fedsolve.federation.recipe import Recipe
from fedsolve.labels import class_list, labels_from_note, labels_note
from fedsolve.model import Model, load_model
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.site_columns import numbers_schema
from fedsolve.tables.schema import Schema

Federate = Callable[[Spec | None, Callable[[CohortReport], None]], NetworkFederation]

Around = Callable[[NetworkFederation, Callable[[CohortReport], None]], Federation]
"""The engine that a method sees, around the one that carries its messages."""

_LATE = 20.0
"""Seconds that sites have to connect again to a server that has nothing more to ask."""


_MEASURED = "measured"
_AFRESH = "Put a copy of it back, or start afresh with another state folder."


class State:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.measured: dict[str, float] = {}
        self.checkpoint, self.model = folder / "checkpoint.safetensors", folder / "model.safetensors"
        self.report, self.secure, self.over = folder / "report.json", folder / "secure", folder / "over"
        self._agreement = folder / "agreement.json"

    def agreed(self) -> Spec | None:
        """What an earlier part of this run agreed on; None at its beginning."""
        begun = self.checkpoint.exists() or self.secure.exists()  # a secure run begins before its first total
        if not (begun and self._agreement.exists()):
            return None
        note = self._agreed_note()
        try:
            classes = labels_from_note(note["classes"])
            labels = tuple((note["rows"] or {}).get("labels", ()))
            prefers = NetworkFederation.prefers
            return Spec(note["features"], classes, note["outputs"], prefers, labels=labels)
        except (ValueError, KeyError, TypeError) as problem:
            raise ModelFileError(f"{self._agreement} is damaged ({problem}). {_AFRESH}") from problem

    def noted(self, name: str) -> Any:
        """An entry of the agreement; None where there is none."""
        return self._agreed_note().get(name) if self._agreement.exists() else None

    def _agreed_note(self) -> dict[str, Any]:
        return container.from_sealed_json(
            container.read(self._agreement), what=str(self._agreement), error=ModelFileError, remedy=_AFRESH
        )

    def check(
        self, classes: Array | None, task: str, clients: int | None = None, schema: Schema | None = None
    ) -> None:
        """Refuse to go on with other classes, task or schema or, where given, another number of clients."""
        spec = self.agreed()
        if spec is None:
            return
        was: dict[str, Any] = {"task": "regression" if spec.classes is None else "classification"}
        now: dict[str, Any] = {"task": task}
        was["schema"], now["schema"] = self.noted("schema"), None if schema is None else schema.digest
        if classes is not None and spec.classes is not None:
            was["classes"], now["classes"] = spec.classes.tolist(), classes.tolist()
        if clients is not None and (before := self.noted("clients")) is not None:
            was["clients"], now["clients"] = before, clients
        for name, value in was.items():
            if now[name] != value:
                raise ModelFileError(
                    f"{self.folder} holds a run whose {name} is {value}, asked is {now[name]}. "
                    "Give what it was started with, or choose another state folder."
                )

    def agree(self, spec: Spec, federation: NetworkFederation) -> None:
        note = {
            "features": spec.features,
            "classes": labels_note(spec.classes),
            "outputs": spec.outputs,
            "clients": federation.expected,
            "run": federation.agreement.run,
            "columns": federation.agreement.columns,
            "sites": None if (only := federation.agreement.only) is None else sorted(only),
            "schema": None if federation.schema is None else federation.schema.digest,
            "rows": federation.agreement.schema_note(),
        }
        container.write_atomically(self._agreement, container.sealed_json(note))

    def write_report(self, **more: Any) -> None:
        """Replace the report; earlier parts of a resumed run stay in it."""
        document = {**more, "cohorts": self.reports, "history": self.history}
        text = json.dumps(document, indent=2, default=str) + "\n"
        container.write_atomically(self.report, text.encode())

    def recall(self) -> dict[str, Any]:
        """The report so far, where there is a checkpoint; its cohorts and history are taken over."""
        if not (self.checkpoint.exists() and self.report.exists()):
            return {}
        try:
            report: dict[str, Any] = json.loads(container.read(self.report))
            self.reports, self.history = list(report["cohorts"]), list(report["history"])
        except (ValueError, KeyError, TypeError):
            return {}  # the report only tells people what happened; nothing depends on it
        return report


def run_method(
    recipe: Recipe[Any],
    federate: Federate,
    state: State,
    follow: Sequence[Follower] = (),
    around: Around | None = None,
    score: Callable[[Federation, Model], dict[str, float]] | None = None,
) -> tuple[Model, Federation]:
    """Train from the state folder's checkpoint on, or from the beginning; writes model and report.

    follow: who hears of it besides the report. score: measures the model; the report has what it found.
    around: the engine that the method is trained over, such as secure sums, around the one that carries its
            messages. What is given with the model is that one.
    """
    state.folder.mkdir(parents=True, exist_ok=True)
    state.recall()
    about: dict[str, Any] = {
        "method": recipe.method.key,
        "parameters": recipe.method.parameters(),
        "calibrated": recipe.calibrate,
        "started": _clock(time.time()),
        "status": "running",
    }

    def heard(report: CohortReport) -> None:
        entry = dataclasses.asdict(report) | {"coverage": report.coverage, "at": _clock(time.time())}
        del entry["coming"]  # of the moment
        state.reports.append(entry)
        state.write_report(**about)

    def advanced(record: Record, expected: int) -> None:
        state.history[record.exchange :] = [record.as_dict()]

    federation = federate(state.agreed(), heard)
    try:
        state.check(federation.given, federation.agreement.task, schema=federation.schema)
        if state.agreed() is not None and isinstance(run := state.noted("run"), str):
            agreement = federation.agreement
            agreement.run = run  # for the sites it is the same one
            agreement.columns, sites = state.noted("columns"), state.noted("sites")
            agreement.only = None if sites is None else frozenset(sites)
        spec = federation.describe()
        if recipe.schema is None and federation.schema is not None:  # that the sites have proposed
            recipe = dataclasses.replace(recipe, schema=federation.schema)
        rows = federation.schema or numbers_schema(federation.agreement.columns, spec.classes)
        recipe.method.check_source(None if rows is None else rows.extractor)
        state.agree(spec, federation)
        engine: Federation = federation if around is None else around(federation, heard)
        if around is not None:
            recipe = engine.seeded(recipe, spec)
            about["seed"] = recipe.method.parameters().get("seed")
        model: Model = recipe.fit(engine, state.checkpoint, resume=True, follow=[advanced, *follow])
        model.check_finite("the model, which was not saved,")
    except FedsolveError as problem:
        state.write_report(**about | {"status": "stopped", "why": str(problem)})
        with suppress(FedsolveError):
            federation.tell_all(f"the run stopped: {problem}")
        raise
    if model.schema is None:
        model.schema = numbers_schema(federation.agreement.columns, spec.classes)
    model.card = training_card(model, recipe)
    state.over.unlink(missing_ok=True)
    model.save(state.model)
    state.history = [record.as_dict() for record in model.history]
    about |= {"status": "complete", "model": str(state.model)}
    state.write_report(**about)
    if score is not None:
        about[_MEASURED] = state.measured = score(engine, model)
        state.write_report(**about)
        Followers(*follow).scored(state.measured)
    return model, engine


def say_over(federation: NetworkFederation, state: State) -> None:
    """Tell the sites that the run is over, and remember that they were told."""
    federation.tell_all("the run is complete", over=True)
    container.write_atomically(state.over, b"")


def say_over_late(federate: Federate, state: State, patience: float = _LATE) -> None:
    """The same for a server that was killed before it could: tells the sites that are still there."""
    federation = federate(state.agreed(), lambda report: None)
    if isinstance(run := state.noted("run"), str):
        federation.agreement.run = run
    with suppress(CohortError):  # some may have heard it and left
        federation.describe(patience)
    say_over(federation, state)


def finished(
    recipe: Recipe[Any],
    state: State,
    classes: Sequence[Any] | None = None,
    task: str = "classification",
    clients: int | None = None,
    schema: Schema | None = None,
    scored: bool = False,
) -> Model | None:
    """The model of a run that this folder holds complete; None where there is still something to do.

    scored: whether it must have been measured, too.
    A complete run of another method, or with other classes, task, schema or number of clients, is refused.
    """
    report = state.recall()
    state.measured = dict(report.get(_MEASURED) or {})
    if report.get("status") != "complete" or not state.model.exists() or scored > bool(state.measured):
        return None
    asked = json.loads(json.dumps(recipe.method.parameters()))
    same = (recipe.method.key, asked, recipe.calibrate)
    if (report.get("method"), report.get("parameters"), report.get("calibrated", False)) != same:
        other = f"{state.folder} holds a complete run of {report.get('method')} with other parameters."
        raise ModelFileError(f"{other} Choose another state folder.")
    state.check(None if classes is None else class_list(classes), task, clients, schema)
    model = load_model(state.model)
    model.history = tuple(record_from(dict(entry)) for entry in state.history)
    return model


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
