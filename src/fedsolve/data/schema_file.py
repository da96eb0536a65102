"""Schemas as TOML files: written for people to review, and read back with every mistake named."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from fedsolve import container
from fedsolve.errors import DataError, did_you_mean
from fedsolve.schema import LEFT_OUT, RULES, Column, Extractor, Schema

_EPOCH = date(1970, 1, 1)
_WIDTH = 100

_HEAD = """\
# What a row is. Review it, then hand the same file to all sites; it becomes part of the model.
#
# kind:      "number", "category", "date", "text", "unused" (known, and left out), or "identifier" (left out
#            too, and written beside the predictions).
# missing:   what an empty cell becomes. "mean": the mean over all sites; "flag": the same, and a column of 0
#            and 1 says so (of a category: a column of its own); "other": as an unknown category; "empty": as
#            text without words; "refuse": the file is refused.
# reference, scale: about where the values lie and how far they spread, rounded. They only keep large numbers
#            from cancelling in sums; results do not depend on them. Of a date, its zero, and days per unit.
# unit:      for people; sites must agree on it. A remark after # says what was noticed in the file.
"""

_KEYS = {
    "number": ("unit", "missing", "reference", "scale"),
    "date": ("unit", "missing", "reference", "scale", "format"),
    "category": ("unit", "missing", "categories"),
    "text": ("unit", "missing", "buckets"),
    "identifier": (),
    "unused": (),
}


def to_toml(schema: Schema) -> str:
    """The schema as a file, remarks as comments."""
    lines = [_HEAD]
    for key in ("label", "client", "weight"):
        if getattr(schema, key) is not None:
            lines.append(f"{key} = {_text(getattr(schema, key))}")
    if schema.classes:
        lines.append(f"classes = {_value(list(schema.classes))}")
    if schema.extractor is not None:
        lines += ["", "[extractor]"]
        for key in ("address", "weights", "width"):
            lines.append(f"{key} = {_value(getattr(schema.extractor, key))}")
        for key in ("recipe", "preprocessing"):
            lines.append(f"{key} = {_text(container.canonical_json(getattr(schema.extractor, key)))}")
    for column in schema.columns:
        remark = f"  # {' '.join(column.remark.split())}" if column.remark else ""
        lines += ["", f"[columns.{_key(column.name)}]{remark}", f"kind = {_text(column.kind)}"]
        for key in _KEYS[column.kind]:
            value = getattr(column, key)
            if key == "reference" and column.kind == "date":
                lines.append(f"reference = {_day(value)}")
            elif value is not None:
                lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _day(days: float) -> str:
    if not days.is_integer():
        return repr(days)
    return (_EPOCH + timedelta(days=days)).isoformat()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants this one escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, list | tuple):
        parts = [repr(part) if isinstance(part, float) else _value(part) for part in value]
        line = f"[{', '.join(parts)}]"
        return line if len(line) <= _WIDTH else "[\n" + "".join(f"  {part},\n" for part in parts) + "]"
    return str(value)


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """The schema in a file."""
    try:
        text = container.read(path).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(f"{path}: a schema is a file in UTF-8 ({problem.reason}).") from problem
    try:
        return from_toml(text)
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from problem


def write_schema(schema: Schema, path: str | os.PathLike[str]) -> None:
    """Write the schema to a new file; one that is there is not touched."""
    if Path(path).exists():
        raise DataError(f"{path} exists already. Choose another name, or remove it.")
    container.write_atomically(path, to_toml(schema).encode())


def from_toml(text: str) -> Schema:
    """The schema that a TOML text holds; all that is wrong with it is told at once."""
    try:
        note = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise DataError(f"this is not TOML: {problem}.") from problem
    columns = note.get("columns", {})
    problems = [
        *_unknown("the schema", note, ("label", "classes", "client", "weight", "columns", "extractor"))
    ]
    made: list[Column] = []
    if not isinstance(columns, dict):
        problems.append("columns must be tables, such as [columns.age]")
    else:
        for name, keys in columns.items():
            try:
                made.append(_column(name, keys))
            except DataError as problem:
                problems.append(str(problem))
    if problems:
        raise DataError(" ".join(f"{problem.rstrip('.')}." for problem in problems))
    try:
        return Schema(
            tuple(made),
            note.get("label"),
            tuple(note.get("classes", ())),
            note.get("client"),
            _extractor(note["extractor"]) if "extractor" in note else None,
            note.get("weight"),
        )
    except TypeError as problem:
        raise DataError(f"the schema cannot be used ({problem}).") from problem


def _unknown(owner: str, keys: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        if key not in known:
            yield f"{owner} has no '{key}'.{did_you_mean(key, known)} Known are {', '.join(known)}"


def _column(name: str, keys: Any) -> Column:
    if not isinstance(keys, dict):
        raise DataError(f"column '{name}' must be a table: [columns.{_key(name)}]")
    kind = keys.get("kind", "number")
    if not isinstance(kind, str) or kind not in RULES:
        hint = did_you_mean(str(kind), RULES)
        raise DataError(f"column '{name}': unknown kind {kind!r}.{hint} Known are {', '.join(RULES)}")
    # A column left out may keep what it had, so that one word leaves it out and takes it back.
    known = _KEYS[kind] if kind not in LEFT_OUT else tuple({key for keys in _KEYS.values() for key in keys})
    for problem in _unknown(f"column '{name}'", keys, ("kind", *known)):
        raise DataError(problem)
    if kind in LEFT_OUT:
        return Column(name, "unused" if kind == "unused" else "identifier")
    settings = {key: value for key, value in keys.items() if key != "kind"}
    if isinstance(settings.get("reference"), date):
        since = settings["reference"]
        since = since.date() if hasattr(since, "date") else since
        settings["reference"] = (since - _EPOCH).days
    for key, wanted in (("reference", int | float), ("scale", int | float), ("categories", list)):
        if key in settings and (not isinstance(settings[key], wanted) or isinstance(settings[key], bool)):
            raise DataError(f"column '{name}': {key} cannot be {settings[key]!r}")
    for key in ("unit", "missing", "format"):
        if key in settings and not isinstance(settings[key], str):
            raise DataError(f"column '{name}': {key} must be text; got {settings[key]!r}")
    if "categories" in settings:
        settings["categories"] = tuple(settings["categories"])
    settings["kind"] = kind
    return Column(name, **settings)


def _extractor(keys: Any) -> Extractor:
    try:
        return Extractor(
            keys["address"],
            json.loads(keys["preprocessing"]),
            keys["weights"],
            int(keys["width"]),
            json.loads(keys["recipe"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(
            "[extractor] needs address, preprocessing, recipe, weights and width "
            f"({type(problem).__name__}: {problem})."
        ) from problem
