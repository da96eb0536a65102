"""What the sites of a run say they have, and the features and classes that they agree on."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.cohort import plain
from fedsolve.federation.engine import Spec
from fedsolve.labels import class_list, labels_from_note, labels_note
from fedsolve.network.wire import PROTOCOL, Note
from fedsolve.version import __version__

Task = Literal["classification", "regression"]

_LONGEST_NAME = 200


class Agreement:
    """One run: its mark, its task, what its sites have, and the spec that all of them fit.

    classes: the class list; when None it is the union of what the sites agree to send.
    spec:    what was agreed in an earlier part of the run.
    """

    def __init__(self, task: Task, classes: Array | None = None, spec: Spec | None = None) -> None:
        self.run = secrets.token_hex(8)
        self.task = task
        self.spec = spec
        self._declared = spec.classes if classes is None and spec is not None else classes
        self._described: dict[str, Note] = {}

    def note(self, ask: str) -> Note:
        """What the note of every message of this run says, whatever it asks."""
        return {"fedsolve": PROTOCOL, "version": __version__, "ask": ask, "run": self.run}

    def classes_note(self) -> Any:
        """The class list as it is sent to sites; None while it is not known."""
        return labels_note(self._declared)

    def take(self, name: str, note: Note) -> None:
        """Keep how a site describes itself."""
        self._described[name] = note

    def forget(self, name: str) -> None:
        self._described.pop(name, None)

    def settle(self, names: Sequence[str], prefers: Literal["bytes", "exchanges"]) -> Spec:
        """The spec: made from these sites' descriptions the first time, the same ever after."""
        if self.spec is None:
            self.spec = self._made_of([self._described[name] for name in names], prefers)
        return self.spec

    def _made_of(self, notes: Sequence[Note], prefers: Literal["bytes", "exchanges"]) -> Spec:
        features = int(notes[0]["features"])
        if self.task == "regression":
            return Spec(features, None, int(notes[0]["targets"]), prefers)
        if self._declared is None:
            lists = [labels_from_note(note["classes"]) for note in notes]
            self._declared = class_list(None, [labels for labels in lists if labels is not None])
        return Spec(features, self._declared, len(self._declared), prefers)

    def misfit(self, name: str, note: Note) -> str | None:
        """Why a site with this description does not fit in with the others; None if it does."""
        widths = {int(other["features"]) for other in self._described.values()}
        if self.spec is not None:
            widths = {self.spec.features}
        if widths and int(note["features"]) not in widths:
            return (
                f"'{name}' has {note['features']} features per row, the others {sorted(widths)}. "
                "All must use the same backbone."
            )
        targets = {int(other["targets"]) for other in self._described.values()}
        if self.task == "regression" and targets and int(note["targets"]) not in targets:
            return f"'{name}' has {note['targets']} targets, the others {sorted(targets)}."
        if self.task == "classification" and self._declared is None:
            notes = [*self._described.values(), note]
            try:
                lists = [labels_from_note(other.get("classes")) for other in notes]
                known = [labels for labels in lists if labels is not None]
                if lists[-1] is None:
                    raise DataError("it names none")
                kinds = [_label_kind(labels) for labels in known]
                if kinds[-1] != kinds[0]:
                    raise DataError(f"they are {kinds[-1]}, those of the others {kinds[0]}")
                np.unique(np.concatenate(known))
            except Exception as problem:  # it may have sent anything
                return f"the classes that '{name}' sent cannot be used ({plain(problem)})."
        return None


def _label_kind(labels: Array) -> str:
    return {"U": "text", "S": "text", "b": "booleans"}.get(labels.dtype.kind, "numbers")


def unfit(name: str, note: Note) -> str | None:
    """Why a site with this name and description cannot be a member of any run; None if it can."""
    if note.get("fedsolve") != PROTOCOL:
        return f"it speaks protocol {plain(note.get('fedsolve'))}, the server {PROTOCOL}"
    if note.get("name") != name:
        return (
            f"it calls itself '{plain(note.get('name'))}', but its key is registered as '{name}'. "
            f"Start it with --name {name}, or register its key under the other name."
        )
    if not 0 < len(name) <= _LONGEST_NAME or "@" in name:
        return f"its name has {len(name)} characters or an @ in it. Start it with a short --name."
    for part in ("features", "targets"):
        if type(note.get(part)) is not int or not 0 < note[part] < 2**31:
            return f"it describes its {part} as {plain(note.get(part))}, which is not a number of columns."
    return None
