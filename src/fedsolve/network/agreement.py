"""What the sites of a run say they have, and the features and classes that they agree on."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedsolve import version
from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation.cohort import plain
from fedsolve.federation.engine import Spec
from fedsolve.labels import (
    FEW_CLASSES,
    Task,
    are_codes,
    class_list,
    labels_from_note,
    labels_note,
    listed,
    warn_of_alike,
)
from fedsolve.network.parcels import Note
from fedsolve.network.site_columns import columns_apart, strange_columns
from fedsolve.tables.proposal import merged
from fedsolve.tables.schema import Schema
from fedsolve.version import __version__

PREFERS: Literal["bytes", "exchanges"] = "exchanges"
"""What to save over a network where a method can choose."""

_LONGEST_NAME = 200


class Agreement:
    """One run: its mark, its task, what its sites have, and the spec that all of them fit.

    Most as for `NetworkFederation`. only: in a secure run, the names of those it began with; nobody else is
    taken in. columns: what the sites' tables have in common (`columns_note`), once that is settled.
    described: by name, what the members say they have.
    """

    def __init__(
        self,
        task: Task | None,
        classes: Array | None = None,
        schema: Schema | None = None,
        secure: bool = False,
        begun: Note | None = None,
    ) -> None:
        self.secure = secure
        self.task: Task = task or "classification"
        self._task_open = task is None
        self.schema = schema
        self.run: str = secrets.token_hex(8) if begun is None else begun["run"]
        self.spec = None if begun is None else begun_spec(begun)
        self.columns: Note | None = None if begun is None else begun["columns"]
        sites = None if begun is None else begun["sites"]
        self.only: frozenset[str] | None = None if sites is None else frozenset(sites)
        self._declared = self.spec.classes if classes is None and self.spec is not None else classes
        self.described: dict[str, Note] = {}

    def note(self, ask: str) -> Note:
        """What the note of every message of this run says, whatever it asks."""
        return {"fedsolve": version.PROTOCOL, "version": __version__, "ask": ask, "run": self.run}

    def saved(self) -> Note:
        """What a run that goes on must know of its beginning (`begun`)."""
        assert self.spec is not None
        return {
            "features": self.spec.features,
            "classes": labels_note(self.spec.classes),
            "outputs": self.spec.outputs,
            "run": self.run,
            "columns": self.columns,
            "sites": None if self.only is None else sorted(self.only),
            "schema": None if self.schema is None else self.schema.digest,
            "rows": self.schema_note(),
        }

    def describing(self) -> Note:
        """The note that asks a site what it has."""
        about = {"task": self.task, "classes": labels_note(self._declared), "schema": self.schema_note()}
        columns = () if self.schema is None else self.schema.columns
        about["remarks"] = {column.name: column.remark for column in columns if column.remark}
        return {**self.note("describe"), **about, "secure": self.secure}

    def asking(self, ask: str, **about: Any) -> Note:
        """The note of a message that sites answer with their rows: the classes and columns of the run."""
        digest = None if self.columns is None else str(self.columns["digest"])
        return {**self.note(ask), **about, "classes": labels_note(self._declared), "columns": digest}

    def schema_note(self) -> Any:
        return None if self.schema is None else self.schema.to_note()

    def proposed(self, names: Sequence[str]) -> Schema | None:
        """The schema that these sites' proposals give, which is from now on that of the run; None where
        there is one already, or none of them proposes one."""
        notes = {name: note for name in names if (note := self.described[name].get("proposal"))}
        if self.schema is not None or not notes:
            return None
        made = merged({name: Schema.from_note(note) for name, note in notes.items()})
        if made.task is not None and self._task_open:
            self.task = made.task
        if self.task == "classification" and self._declared is None:
            lists = [labels_from_note(self.described[name]["classes"]) for name in names]
            self._declared = class_list(None, [labels for labels in lists if labels is not None])
        known = () if self._declared is None else tuple(self._declared.tolist())
        self.schema = replace(made, classes=known, task=None if known else made.task)
        self.described.clear()
        return self.schema

    def settle(self, names: Sequence[str]) -> Spec:
        """The spec: made from these sites' descriptions the first time, the same ever after."""
        if self.spec is None:
            self.spec = self._made_of([self.described[name] for name in names])
        notes = [self.described[name].get("columns") for name in names if name in self.described]
        if self.columns is None and (named := [note for note in notes if note is not None]):
            # They agree, but for the label column, which is known where that one agrees too.
            labels = {note["label"] for note in named}
            self.columns = {**named[0], "label": labels.pop() if len(labels) == 1 else None}
        return self.spec

    def unnamed(self) -> list[str]:
        """Sites without names of columns where others have them: nobody can compare theirs."""
        lacking = [name for name, note in self.described.items() if note.get("columns") is None]
        return [] if len(lacking) == len(self.described) else sorted(lacking)

    def _made_of(self, notes: Sequence[Note]) -> Spec:
        features = int(notes[0]["features"])
        if self.task == "regression":
            labels = () if self.schema is None else self.schema.labels
            return Spec(features, None, int(notes[0]["targets"]), PREFERS, labels=labels)
        if self._declared is None:
            lists = [labels_from_note(note["classes"]) for note in notes]
            found = class_list(None, [labels for labels in lists if labels is not None])
            if found.dtype.kind in "iuf" and len(found) > FEW_CLASSES and not are_codes(found):
                raise DataError(
                    f"the sites have {len(found)} numbers as labels ({listed(found)}): classes or a "
                    "quantity? Say which: --classes or --task regression (classes= or task=)."
                )
            self._declared = found
        warn_of_alike(self._declared)
        return Spec(features, self._declared, len(self._declared), PREFERS)

    def misfit(self, name: str, note: Note) -> str | None:
        """Why a site with this description does not fit in with the others; None if it does."""
        if self.only is not None and name not in self.only:
            return (
                f"'{name}' was not there when this secure run began, and its cohort stays as it is: totals "
                "with and without a site would show what it adds. It may take part in the next run."
            )
        others = {other: entry for other, entry in self.described.items() if other != name}
        proposing = {bool(each.get("proposal")) for each in (note, *others.values())}
        if self.schema is None and True in proposing:
            if False in proposing:
                return (
                    "some sites propose what their columns are and some do not. Start all with --propose, or "
                    "give all of them and the server a schema (--schema)."
                )
            try:
                Schema.from_note(note["proposal"])
                labels_from_note(note["classes"])
            except Exception as problem:  # it may have sent anything
                return f"the schema that '{name}' proposes cannot be used ({plain(problem)})."
            return None
        if note.get("schema") != (None if self.schema is None else self.schema.digest):
            return f"'{name}' does not use the server's schema. Start all with the same file (--schema)."
        named = [(f"'{other}'", told["columns"]) for other, told in others.items() if told.get("columns")]
        compared = named if self.columns is None else [("the run's other sites", self.columns)]
        mine = note.get("columns")
        if compared and mine is not None and (why := columns_apart(name, mine, *compared[0])):
            return why
        widths = {int(other["features"]) for other in others.values()}
        if self.spec is not None:
            widths = {self.spec.features}
        if widths and int(note["features"]) not in widths:
            return (
                f"'{name}' has {note['features']} features per row, the others {sorted(widths)}. "
                "All must use the same backbone."
            )
        targets = {int(other["targets"]) for other in others.values()}
        if self.task == "regression" and targets and int(note["targets"]) not in targets:
            return f"'{name}' has {note['targets']} targets, the others {sorted(targets)}."
        if self.task == "classification" and self._declared is None:
            notes = [*others.values(), note]
            try:
                lists = [labels_from_note(other.get("classes")) for other in notes]
                known = [labels for labels in lists if labels is not None]
                if lists[-1] is None:
                    raise DataError("it names none")
                spoken = {"U": "text", "S": "text", "b": "booleans"}
                kinds = [spoken.get(labels.dtype.kind, "numbers") for labels in known]
                if kinds[-1] != kinds[0]:
                    raise DataError(f"they are {kinds[-1]}, those of the others {kinds[0]}")
                np.unique(np.concatenate(known))
            except Exception as problem:  # it may have sent anything
                return f"the classes that '{name}' sent cannot be used ({plain(problem)})."
        return None


def begun_spec(note: Note) -> Spec:
    """The spec that a run agreed on before, from what was saved of it."""
    labels = tuple((note["rows"] or {}).get("labels", ()))
    return Spec(note["features"], labels_from_note(note["classes"]), note["outputs"], PREFERS, labels=labels)


def unfit(name: str, note: Note) -> str | None:
    """Why a site with this name and description cannot be a member of any run; None if it can."""
    if note.get("fedsolve") != version.PROTOCOL:
        return f"it speaks protocol {plain(note.get('fedsolve'))}, the server {version.PROTOCOL}"
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
    return strange_columns(note.get("columns"), note["features"])
