"""The methods fedsolve knows: paper, exchanges, what travels, sums or gathers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fedsolve.errors import DataError, did_you_mean

T = TypeVar("T", bound=type[Any])


@dataclass(frozen=True)
class Info:
    """What a user wants to know of a method before choosing it."""

    key: str
    title: str
    paper: str
    exchanges: str
    up: str
    down: str
    gathers: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "sums": not self.gathers}


_METHODS: dict[str, tuple[Info, type]] = {}


def register(info: Info) -> Callable[[T], T]:
    """Enter a method class under its key."""

    def enter(method: T) -> T:
        _METHODS[info.key] = (dataclasses.replace(info, gathers=method.gathers), method)
        return method

    return enter


def methods() -> list[Info]:
    """All registered methods, by key."""
    return [_METHODS[key][0] for key in sorted(_METHODS)]


def method_class(key: str) -> type:
    """The class registered under `key`."""
    if key not in _METHODS:
        guess = did_you_mean(key, _METHODS)
        raise DataError(f"unknown method '{key}'.{guess} Known are {', '.join(sorted(_METHODS))}.")
    return _METHODS[key][1]
