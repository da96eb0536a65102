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
from fedsolve.federation.engine import Federation, Follower, Followers
from fedsolve.federation.method import Record
from fedsolve.federation.recipe import Recipe
from fedsolve.labels import class_list, labels_from_note
from fedsolve.model import Model, load_model
from fedsolve.network.agreement import begun_spec
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.parcels import Note
from fedsolve.network.site_columns import numbers_schema
from fedsolve.tables.schema import Schema

_MEASURED = "measured"
_AFRESH = "Put a copy of it back, or start afresh with another state folder."


class State:
    """The folder of a run.

    reports, history: who took part in each exchange, and its record. about: what else its report says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.measured: dict[str, float] = {}
        self.about: dict[str, Any] = {}
        self.checkpoint, self.model = folder / "checkpoint.safetensors", folder / "model.safetensors"
        self.report, self.secure, self.over = folder / "report.json", folder / "secure", folder / "over"
        self._agreement = folder / "agreement.json"

    def begun(self) -> Note | None:
        """What an earlier part of this run agreed on; None at its beginning."""
        if not self._agreement.exists():
            return None
        data, what = container.read(self._agreement), str(self._agreement)
        note = container.from_sealed_json(data, what=what, error=ModelFileError, remedy=_AFRESH)
        # A secure run begins before its first total.
        if not (self.checkpoint.exists() or self.secure.exists()):
            return None
        with container.undamaged(what, _AFRESH):
            begun_spec(note)
        return note

    def check(
        self, classes: Array | None, task: str, clients: int | None = None, schema: Schema | None = None
    ) -> None:
        """Refuse to go on with other classes, task or schema or, where given, another number of clients."""
        note = self.begun()
        if note is None:
            return
        known = labels_from_note(note["classes"])
        compared: dict[str, tuple[Any, Any]] = {
            "task": ("regression" if known is None else "classification", task),
            "schema": (note["schema"], None if schema is None else schema.digest),
        }
        if classes is not None and known is not None:
            compared["classes"] = known.tolist(), classes.tolist()
        if clients is not None:
            compared["clients"] = note["clients"], clients
        for name, (was, now) in compared.items():
            if was != now:
                raise ModelFileError(
                    f"{self.folder} holds a run whose {name} is {was}, asked is {now}. "
                    "Give what it was started with, or choose another state folder."
                )

    def agree(self, federation: NetworkFederation) -> None:
        note = federation.agreement.saved() | {"clients": federation.expected}
        container.write_atomically(self._agreement, container.sealed_json(note))

    def enter(self, report: CohortReport) -> None:
        """Note who took part in an exchange."""
        entry = dataclasses.asdict(report) | {"coverage": report.coverage, "at": _clock(time.time())}
        self.reports.append(entry)
        self.write_report()

    def write_report(self, **more: Any) -> None:
        """Replace the report; earlier parts of a resumed run stay in it."""
        self.about |= more
        document = {**self.about, "cohorts": self.reports, "history": self.history}
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
    engine: Federation,
    state: State,
    follow: Sequence[Follower] = (),
    score: Callable[[Federation, Model], dict[str, float]] | None = None,
) -> Model:
    """Train from the state folder's checkpoint on, or from the beginning; writes model and report.

    engine: a `NetworkFederation`, which goes on from what the state says of the run's beginning; or another
            engine around one, such as secure sums. Both report to the state.
    follow: who hears of it besides the report. score: measures the model; the report has what it found.
    """
    federation = engine.within or engine
    assert isinstance(federation, NetworkFederation)
    state.folder.mkdir(parents=True, exist_ok=True)
    state.recall()
    state.about = {
        "method": recipe.method.key,
        "parameters": recipe.method.parameters(),
        "calibrate": recipe.calibrate,
        "started": _clock(time.time()),
        "status": "running",
    }

    def advanced(record: Record, expected: int) -> None:
        state.history[record.exchange :] = [record.as_dict()]

    try:
        state.check(federation.given, federation.agreement.task, schema=federation.schema)
        spec = federation.describe()
        if recipe.schema is None and federation.schema is not None:  # that the sites have proposed
            recipe = dataclasses.replace(recipe, schema=federation.schema)
        rows = federation.schema or numbers_schema(federation.agreement.columns, spec.classes)
        recipe.method.check_source(None if rows is None else rows.extractor)
        state.agree(federation)
        if engine is not federation:
            recipe = engine.seeded(recipe, spec)
            state.about["seed"] = recipe.method.parameters().get("seed")
        model: Model = recipe.fit(engine, state.checkpoint, resume=True, follow=[advanced, *follow])
        model.check_finite("the model, which was not saved,")
        if model.schema is None:
            model.schema = numbers_schema(federation.agreement.columns, spec.classes)
        model.card = training_card(model, recipe)
        state.over.unlink(missing_ok=True)
        model.save(state.model)
        state.history = [record.as_dict() for record in model.history]
        calibrated = model.calibration is not None or model.spread is not None
        state.write_report(status="complete", model=str(state.model), calibrated=calibrated)
        if score is not None:
            state.measured = score(engine, model)
            state.write_report(**{_MEASURED: state.measured})
            Followers(follow).tell("scored", state.measured)
    except FedsolveError as problem:
        if state.about["status"] == "running":
            state.write_report(status="stopped", why=str(problem))
        with suppress(FedsolveError):
            federation.tell_over(f"the run stopped: {problem}", failed=True)
        raise
    return model


def say_over(federation: NetworkFederation, state: State) -> None:
    """Tell the sites that the run is over, and remember that they were told."""
    federation.tell_over("the run is complete")
    container.write_atomically(state.over, b"")


def say_over_late(federation: NetworkFederation, state: State, patience: float = 20.0) -> None:
    """The same for a server that was killed before it could: sites have `patience` to connect again."""
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
    calibrate = report.get("calibrate", report.get("calibrated", False))  # in 0.2, the one word said both
    if (report.get("method"), report.get("parameters"), calibrate) != same:
        other = f"{state.folder} holds a complete run of {report.get('method')} with other parameters."
        raise ModelFileError(f"{other} Choose another state folder.")
    state.check(None if classes is None else class_list(classes), task, clients, schema)
    model = load_model(state.model)
    lists = ("cohort", "empty", "solved")  # tuples before they were JSON
    model.history = tuple(Record(**{**one, **{n: tuple(one[n]) for n in lists}}) for one in state.history)
    return model


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
