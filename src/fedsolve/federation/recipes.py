"""A method as JSON values, with what is around it: enough for somebody else to start the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedsolve import registry
from fedsolve.errors import DataError, TermError
from fedsolve.federation.calibrated import Calibrated
from fedsolve.federation.described import Described
from fedsolve.federation.method import Method
from fedsolve.federation.on_part import OnPart
from fedsolve.federation.parts import Part
from fedsolve.schema import Schema

AROUND: dict[str, type[Method[Any]]] = {kind.key: kind for kind in (Calibrated, Described, OnPart)}
"""Methods around others, by key."""


def recipe(method: Method[Any]) -> dict[str, Any]:
    """What `method_from` makes this method of; refused, by name, where it holds more than parameters."""
    if type(method) in AROUND.values():
        fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name != "method"}  # type: ignore[arg-type]
        notes = {name: _note(value) for name, value in fields.items()}
        return {"around": method.key, "fields": notes, "method": recipe(method.method)}  # type: ignore[attr-defined]
    if isinstance(getattr(method, "method", None), Method):
        raise DataError(
            f"sites cannot check the questions of '{method.key}': it starts from a model or from totals that "
            "are given, not from the totals of its own run. Run it unchecked, which every site must allow."
        )
    return {"method": method.key, "parameters": method.parameters()}


def method_from(note: Mapping[str, Any]) -> Method[Any]:
    """The method of a recipe; anything that is none is refused."""
    try:
        if "around" not in note:
            made: Method[Any] = registry.method_of(note)
            return made
        fields = {name: _value(value) for name, value in note["fields"].items()}
        return AROUND[note["around"]](method=method_from(note["method"]), **fields)  # type: ignore[call-arg]
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise TermError(
            f"the description of the method is damaged ({type(problem).__name__}: {problem})."
        ) from problem


def innermost(note: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe that others are around."""
    while "around" in note and isinstance(note.get("method"), Mapping):
        note = note["method"]
    return note


def _note(value: Any) -> Any:
    if isinstance(value, Schema):
        return {"schema": value.to_note()}
    return {"part": dataclasses.asdict(value)} if isinstance(value, Part) else value


def _value(note: Any) -> Any:
    if isinstance(note, dict) and "schema" in note:
        return Schema.from_note(note["schema"])
    return Part(**note["part"]) if isinstance(note, dict) and "part" in note else note
