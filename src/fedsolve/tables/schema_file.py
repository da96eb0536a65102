"""Schemas as TOML files, written for people to review."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from functools import partial
from typing import Any, get_type_hints

from fedsolve import container
from fedsolve.errors import DataError, naming
from fedsolve.parameters import known_are, parse_toml, typed
from fedsolve.tables.schema import KEYS, LEFT_OUT, RULES, Column, Extractor, Schema

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
# bounds:    the least and the greatest number, as in [0, 120]; what lies beyond counts as the bound. Without
#            them, sums over all sites show a number that is far larger than all others.
# absent:    what else stands for an empty cell in this column, such as "?" or "-999". signs: what may stand
#            around a number and is left out, such as "<" or "%".
# task:      "regression" where the labels are numbers to predict; classes are listed under classes.
# labels:    instead of label, the columns of several labels a row, each 0 or 1: ["edema", "effusion"].
# backbone:  what turns a text into features, by address and digest of its weights; without one, its words are
#            hashed into so many buckets.
# unit:      for people; sites must agree on it. A remark after # says what was noticed in the file.
"""


def to_toml(schema: Schema) -> str:
    """The schema as a file, remarks as comments."""
    lines = [_HEAD]
    for key in ("label", "client", "weight", "task"):
        if getattr(schema, key) is not None and not (key == "task" and schema.labels):
            lines.append(f"{key} = {_text(getattr(schema, key))}")
    for key in ("classes", "labels"):
        if getattr(schema, key):
            lines.append(f"{key} = {_value(list(getattr(schema, key)))}")
    if schema.extractor is not None:
        lines += ["", "[extractor]", *_described(schema.extractor)]
    for column in schema.columns:
        remark = f"  # {' '.join(column.remark.split())}" if column.remark else ""
        lines += ["", f"[columns.{_key(column.name)}]{remark}", f"kind = {_text(column.kind)}"]
        for key in KEYS[column.kind]:
            value = getattr(column, key)
            if isinstance(value, Extractor):
                lines += ["", f"[columns.{_key(column.name)}.backbone]", *_described(value)]
            elif key == "buckets" and column.backbone is not None:
                continue
            elif key == "reference" and column.kind == "date" and value.is_integer():
                lines.append(f"reference = {(_EPOCH + timedelta(days=value)).isoformat()}")
            elif value is not None and not (key in ("absent", "signs", "bounds") and not value):
                lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _described(extractor: Extractor) -> list[str]:
    lines = [f"{key} = {_value(getattr(extractor, key))}" for key in ("address", "weights", "width")]
    packed = {key: container.canonical_json(getattr(extractor, key)) for key in ("recipe", "preprocessing")}
    return lines + [f"{key} = {_text(value)}" for key, value in packed.items()]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: Any) -> str:
    # JSON's escapes are TOML's, except that TOML also wants this one escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    if isinstance(value, list | tuple):
        parts = [repr(part) if isinstance(part, float) else _value(part) for part in value]
        line = f"[{', '.join(parts)}]"
        return line if len(line) <= _WIDTH else "[\n" + "".join(f"  {part},\n" for part in parts) + "]"
    return _text(value)


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """The schema in a file."""
    text = container.read(path)
    with naming(path):
        return from_toml(text)


def write_schema(schema: Schema, path: str | os.PathLike[str]) -> None:
    """Write the schema to a file; one that is there stays as FILE.previous."""
    container.write_atomically(path, to_toml(schema).encode(), previous_kept=True)


_TOP = dict.fromkeys(("label", "client", "weight", "task"), str) | {
    "classes": tuple[Any, ...],
    "labels": tuple[str, ...],
}


def from_toml(text: str | bytes) -> Schema:
    """The schema in a TOML text. All mistakes are reported at once."""
    note = parse_toml(text.encode() if isinstance(text, str) else text, "the schema")
    columns, problems = [], []

    def look(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except DataError as problem:
            problems.append(str(problem))

    known = {**_TOP, "columns": Mapping[str, Any], "extractor": dict}
    top = look(lambda: typed(note, "the schema", known))
    listed = note.get("columns")
    for name, keys in (listed if isinstance(listed, dict) else {}).items():
        columns.append(look(partial(_column, name, keys)))
    if problems:
        raise DataError(" ".join(problems))
    extractor = _extractor(top["extractor"]) if "extractor" in top else None
    return Schema(tuple(columns), extractor=extractor, **{name: top[name] for name in _TOP if name in top})


def _column(name: str, keys: Any) -> Column:
    where = f"column '{name}'"
    if not isinstance(keys, dict):
        raise DataError(f"{where} must be a table: [columns.{_key(name)}].")
    kind = keys.get("kind", "number")
    if not isinstance(kind, str) or kind not in RULES:
        raise DataError(f"{where}: unknown kind {kind!r}.{known_are(str(kind), RULES)}")
    # A column left out may keep what it had, so that one word leaves it out and takes it back.
    left_out = kind in LEFT_OUT
    known = {key for keys in KEYS.values() for key in keys} if left_out else KEYS[kind]
    hints = get_type_hints(Column)
    if isinstance(keys.get("reference"), date):
        since = keys["reference"]
        since = since.date() if hasattr(since, "date") else since
        keys = keys | {"reference": (since - _EPOCH).days}
    backbone = keys.get("backbone")
    if isinstance(backbone, str):
        raise DataError(
            f"{where}: the schema must say which weights {backbone} has. Write it with 'fedsolve schema DATA "
            f"--text-column {name} --backbone {backbone}'."
        )
    hints |= {"backbone": dict}
    given = typed(keys, where, {key: hints[key] for key in ("kind", *known)})
    if backbone is not None:
        given["backbone"] = _extractor(backbone, f"{where}, backbone")
    return Column(name, kind) if left_out else Column(name, **given)  # type: ignore[arg-type]


def _extractor(keys: Mapping[str, Any], where: str = "[extractor]") -> Extractor:
    parts = {"address": str, "preprocessing": str, "recipe": str, "weights": str, "width": int}
    given = typed(keys, where, parts, parts)
    try:
        packed = {name: json.loads(given[name]) for name in ("preprocessing", "recipe")}
    except ValueError as problem:
        raise DataError(f"{where}: preprocessing and recipe must be JSON ({problem}).") from problem
    return Extractor(**given | packed)
