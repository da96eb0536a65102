"""A site whose raw table waits for a schema: it proposes one, and reads its rows by what the server makes of
all proposals. The server's schema may use no column that this site dropped or takes for an identifier.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsolve import container, version
from fedsolve.arrays import Array
from fedsolve.errors import DataError, FedsolveError
from fedsolve.federation.cohort import error_kind, plain
from fedsolve.labels import labels_note
from fedsolve.network.answering import Answerer, Event, check_peer
from fedsolve.network.parcels import Note
from fedsolve.tables.proposal import summary
from fedsolve.tables.schema import LEFT_OUT, Column, Schema
from fedsolve.version import __version__

_AGREED = "agreed-schema.json"
_FAR = 1e4
"""Spreads, at most, between the places of two sites' numbers; and the ratio of their spreads."""


@dataclass
class Proposing:
    """Answers for such a site.

    proposal: what it sends of its table. folder: where the schema that was agreed is kept, for a site that
    starts anew. read: what answers once there is a schema. show: tells people.
    """

    name: str
    proposal: Schema
    folder: Path
    read: Callable[[Schema], Answerer]
    show: Callable[[Event], None]
    _inner: tuple[str, Answerer] | None = None

    def __len__(self) -> int:
        return 0 if self._inner is None else len(self._inner[1])

    def reply(self, note: Note, payload: Array) -> tuple[Note, bytes]:
        """The answer to a message: see `Answerer.reply`."""
        ask, said = note.get("ask"), {"fedsolve": version.PROTOCOL, "run": str(note.get("run"))}
        try:
            if ask == "describe" and note.get("schema") is None:
                check_peer(note)
                kept = "".join(f"; '{one.name}': {one.remark}" for one in self.proposal.columns if one.remark)
                sent = f"asked by run {said['run']}: sent is what its columns are{kept}"
                self.show(Event("described", sent))
                return {**said, "ok": True, **self._describe()}, b""
            if ask == "describe":
                self._take(Schema.from_note(note["schema"]), dict(note.get("remarks") or {}))
            elif self._inner is None and (self.folder / _AGREED).exists():
                self._take(Schema.from_note(json.loads(container.read(self.folder / _AGREED))))
            if self._inner is None:
                raise DataError("there is no schema yet by which this site could read its rows.")
        except (FedsolveError, KeyError, TypeError, ValueError) as problem:
            self.show(Event("refused", f"{error_kind(problem)}: {problem}", barred=True))
            told = f"'{self.name}' cannot read its rows by the schema; its own output says why."
            return {**said, "ok": False, "error": error_kind(problem), "message": told}, b""
        return self._inner[1].reply(note, payload)

    def _describe(self) -> dict[str, Any]:
        """What is sent: the proposal, and nothing of the rows."""
        return {
            "name": self.name,
            "version": __version__,
            "features": 1,
            "targets": len(self.proposal.labels) or 1,
            "classes": labels_note(self.proposal.class_array),
            "columns": None,
            "schema": None,
            "proposal": self.proposal.to_note() | {"classes": None},
        }

    def _take(self, agreed: Schema, remarks: Mapping[str, Any] | None = None) -> None:
        """Read the rows by the schema, unless they are. remarks: why columns are left out, by the server."""
        if self._inner is not None and self._inner[0] == agreed.digest:
            return
        known = {column.name: column for column in self.proposal.columns if column.kind != "identifier"}
        strange = [column.name for column in agreed.used if column.name not in known]
        labels = agreed.label_columns
        if strange or labels != self.proposal.label_columns or agreed.weight is not None:
            what = f"{'columns' if strange else 'label'} {', '.join(map(repr, strange or labels))}"
            raise DataError(f"the server's schema uses {what}, which this site does not propose to use.")
        for name in agreed.backbones:
            raise DataError(
                f"the server's schema names a backbone for column '{name}', which would be loaded here. If "
                "you trust it, start this site with the same schema (--schema)."
            )
        for column in agreed.used:
            if why := _not_proposed(column, known[column.name]):
                raise DataError(f"the server's schema has column '{column.name}' {why}; nobody proposed it.")
        self._inner = agreed.digest, self.read(agreed)
        note = json.dumps(agreed.to_note()).encode()
        container.write_atomically(self.folder / _AGREED, note, private=True)
        lost = [
            c.name for c in agreed.columns if c.kind in LEFT_OUT and known.get(c.name, c).kind != "unused"
        ]
        told = {**dict.fromkeys(lost, "the sites' schema leaves it out"), **(remarks or {})}
        columns = tuple(replace(c, remark=plain(told.get(c.name, ""))) for c in agreed.columns)
        text = "; ".join(summary(replace(agreed, columns=columns), levels=True))
        self.show(Event("told", f"rows are read by the sites' schema. {text}"))


def _not_proposed(asked: Column, own: Column) -> str:
    """What a site that proposes `own` cannot get of other sites' proposals; "" where all is as it may be.

    Bounds would cut numbers where the server likes, and so would a place so far away that numbers round to
    it: other sites' numbers lie near, and spread alike. A column that is unused here may be used elsewhere.
    """
    if own.kind not in (asked.kind, "unused"):
        return f"as a {asked.kind}, here it is a {own.kind}"
    if asked.bounds != own.bounds:
        return f"with bounds {list(asked.bounds)}"
    if own.kind != "unused" and (asked.format, asked.buckets) != (own.format, own.buckets):
        return f"with format {asked.format} and {asked.buckets} buckets"
    far, ratio = abs(asked.reference) / asked.scale, 1.0
    if (own.reference, own.scale) != (0.0, 1.0) and own.kind != "unused":
        far, ratio = abs(asked.reference - own.reference) / own.scale, asked.scale / own.scale
    if far > _FAR or not 1 / _FAR <= ratio <= _FAR:
        return f"about {asked.reference:g} with a scale of {asked.scale:g}"
    return ""
