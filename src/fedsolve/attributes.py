"""An object's attributes as named arrays and a JSON note, and back: what runs and models store by default.

Arrays, lists and tuples of arrays and dictionaries of arrays become named arrays; numbers, text, None and
lists and dictionaries of them become the note; infinity and NaN, which JSON has not, are written as text.
Anything else is refused by the attribute's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsolve.container import Array, with_prefix
from fedsolve.errors import DataError

_ARRAY, _SEQUENCE, _MAPPING, _TUPLE, _PLAIN, _NOT_FINITE = (
    "array",
    "arrays",
    "named arrays",
    "tuple",
    "plain",
    "not finite",
)


def to_parts(values: Mapping[str, Any], owner: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """The attributes of `owner` (a name for messages) as arrays and a note."""
    arrays: dict[str, Array] = {}
    note: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            arrays[name], note[name] = value, [_ARRAY, None]
        elif isinstance(value, list | tuple) and value and all(isinstance(v, np.ndarray) for v in value):
            arrays |= {f"{name}.{place}": array for place, array in enumerate(value)}
            note[name] = [_SEQUENCE, [len(value), isinstance(value, tuple)]]
        elif isinstance(value, dict) and value and all(isinstance(v, np.ndarray) for v in value.values()):
            arrays |= {f"{name}.{key}": array for key, array in value.items()}
            note[name] = [_MAPPING, list(value)]
        elif isinstance(value, tuple):
            note[name] = [_TUPLE, [_plain(part, name, owner) for part in value]]
        elif isinstance(value, float) and not math.isfinite(value):
            note[name] = [_NOT_FINITE, repr(float(value))]
        else:
            note[name] = [_PLAIN, _plain(value, name, owner)]
    return arrays, note


def from_parts(arrays: Mapping[str, Array], note: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that `to_parts` described."""
    values: dict[str, Any] = {}
    for name, (kind, detail) in note.items():
        if kind == _ARRAY:
            values[name] = arrays[name]
        elif kind == _SEQUENCE:
            parts = [arrays[f"{name}.{place}"] for place in range(detail[0])]
            values[name] = tuple(parts) if detail[1] else parts
        elif kind == _MAPPING:
            named = with_prefix(dict(arrays), f"{name}.")
            values[name] = {key: named[key] for key in detail}
        elif kind == _NOT_FINITE:
            values[name] = float(detail)
        else:
            values[name] = tuple(detail) if kind == _TUPLE else detail
    return values


def _plain(value: Any, name: str, owner: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(part, name, owner) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(part, name, owner) for key, part in value.items()}
    raise DataError(
        f"{owner} cannot store its attribute '{name}', a {type(value).__name__}: by default arrays, numbers, "
        "text and lists and dictionaries of them are stored. Say how it is stored and taken back."
    )
