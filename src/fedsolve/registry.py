"""The methods fedsolve knows: paper, exchanges, what travels, sums or gathers; and those of other people.

A method from outside is found under the name of its entry point (group `fedsolve.methods`) or under its
address, "package.module:Class". Its `key` is whichever of the two another process can find it by.

Where a request or a file names a function or a class, importing it runs code that somebody else chose.
Whoever reads one says beforehand, by name, what may be imported; by default everything may, for this is the
user's own process:

    with allowing(networks=["package.module:function"]):
        ...
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal, TypeGuard, TypeVar, dataclass_transform

from fedsolve.errors import DataError, did_you_mean, explained

ENTRY_POINTS = "fedsolve.methods"
TRAVELS = ("exchanges", "up", "down")
_OURS = __name__.removesuffix("registry")

T = TypeVar("T", bound=type[Any])


@dataclass(frozen=True)
class Info:
    """What a user wants to know of a method before choosing it."""

    key: str
    title: str
    paper: str = "unpublished"
    exchanges: str = "1"
    up: str = "sums"
    down: str = "the request"
    gathers: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "sums": not self.gathers}


ENTERING: list[str] = []
"""Modules that enter something when they are imported, which they are when one of those is looked for."""

_METHODS: dict[str, tuple[Info, type]] = {}
_DEFINED: dict[str, type] = {}
"""Every method class defined in this process, by its address."""


def enter_all() -> None:
    """Have everything entered that enters itself when it is imported."""
    for place in ENTERING:
        importlib.import_module(place)
    ENTERING.clear()


@dataclass_transform(frozen_default=True, kw_only_default=True)
def register(
    key: str | None = None,
    *,
    title: str | None = None,
    paper: str = "unpublished",
    exchanges: str | None = None,
    up: str | None = None,
    down: str | None = None,
) -> Callable[[T], T]:
    """Enter a method class: under its name in small letters, unless another key is given.

    A class that is no dataclass of its own becomes one, frozen and with arguments by keyword.
    title: the first line of its docstring unless given. exchanges, up, down: how often and what travels; what
    is not given comes from the class's `travels`. A class from outside fedsolve that has no entry point is
    entered under its address.
    """

    def enter(method: T) -> T:
        if "__dataclass_fields__" not in vars(method):
            dataclass(frozen=True, kw_only=True)(method)
        name = key or method.__name__.lower()
        first = (method.__doc__ or method.__name__).strip().partition("\n")[0].removesuffix(".")
        known = method.__module__.startswith(_OURS) or name in _entry_points()
        method.key = name if known else address_of(method)
        about = dict(method.travels) | {
            part: words for part, words in zip(TRAVELS, (exchanges, up, down), strict=True) if words
        }
        _METHODS[method.key] = (
            Info(method.key, title or first, paper, **about, gathers=method.gathers),
            method,
        )
        return method

    return enter


def define(method: type) -> str:
    """Note a method class as soon as it is defined, so that this process finds it again; its address."""
    address = address_of(method)
    _DEFINED[address] = method
    return address


def methods() -> list[Info]:
    """The methods of fedsolve and of installed packages, by key."""
    enter_all()
    for name in _entry_points():
        method_class(name)
    ours = {key for key, (_, method) in _METHODS.items() if method.__module__.startswith(_OURS)}
    return [_METHODS[key][0] for key in sorted(ours | _entry_points().keys())]


def info(key: str) -> Info:
    """What is known of the method `key`."""
    method_class(key)
    return _METHODS[key][0]


def method_class(key: str) -> type:
    """The class of a method, by its key, by the name of its entry point or by its address.

    A class from outside is imported, where it is not yet, if whoever named it may choose what is run here.
    """
    if key not in _METHODS:
        enter_all()
    if key not in _METHODS:
        if ":" not in key and key not in _entry_points():
            known = sorted({*_METHODS, *_entry_points()})
            guess = did_you_mean(key, known)
            raise DataError(f"unknown method '{key}'.{guess} Known are {', '.join(known)}.")
        address = _entry_points().get(key, key)
        if address not in _DEFINED:
            check_allowed("method", key)
        method = _DEFINED.get(address) or _imported(address)
        if not hasattr(method, "start"):
            raise DataError(f"'{key}' is no method: {method!r} does not derive from fedsolve.extend.Method.")
        if key not in _METHODS:
            register(key)(method)
    return _METHODS[key][1]


def method_of(opening: Mapping[str, Any]) -> Any:
    """The method that an opening, or a file, names, with its parameters."""
    kind: Any = method_class(opening["method"])
    return kind(**opening["parameters"])


def is_foreign(key: Any) -> TypeGuard[str]:
    """Whether a request that names this method would run code from outside fedsolve."""
    if not isinstance(key, str):
        return False
    if key not in _METHODS:
        enter_all()
    if key in _METHODS:
        return not _METHODS[key][1].__module__.startswith(_OURS)
    return ":" in key or key in _entry_points()


def address_of(kind: type) -> str:
    """Where a class can be imported from, as "package.module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def import_model(address: str) -> type:
    """The model class at "package.module:Class"; whoever allowed a method of that module allowed it too."""
    place = address.partition(":")[0]
    check_allowed("method", address, lambda name: _entry_points().get(name, name).startswith(f"{place}:"))
    return _imported(address)


def _imported(address: str) -> type:
    place, _, name = address.partition(":")
    module = imported(place, f"'{address}'")
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise DataError(f"'{address}': {place} has no class '{name}'.{did_you_mean(name, classes)}")
    return kind


def imported(place: str, what: str, near: str = "", others: str = "") -> ModuleType:
    """A module of other people's code.

    what: for errors, that which needs it. near, others: what a missing module may stand for.
    """
    with explained(f"{what}: importing {place} failed"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as problem:
            if problem.name is None or not f"{place}.".startswith(f"{problem.name}."):
                raise
            raise DataError(
                f"{what}: there is no module '{place}'.{near} Install it, or put its folder on "
                f"PYTHONPATH{others}."
            ) from problem


@cache
def _entry_points() -> dict[str, str]:
    """Addresses of the methods of installed packages, by name."""
    from importlib import metadata  # takes as long as all of this module's other imports

    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)}


Kind = Literal["network", "method"]

_USES: dict[Kind, str] = {"network": "import and call a function", "method": "import and run a class"}

_allowed: ContextVar[Mapping[Kind, frozenset[str] | None] | None] = ContextVar("allowed", default=None)


class NotAllowed(DataError):
    """Code was named by somebody who may not choose what runs here."""


@contextmanager
def allowing(*, networks: Iterable[str] | None = (), methods: Iterable[str] | None = ()) -> Iterator[None]:
    """Within, only the named code is imported, as "package.module:name"; None allows all of a kind."""
    named: dict[Kind, Iterable[str] | None] = {"network": networks, "method": methods}
    token = _allowed.set({kind: None if each is None else frozenset(each) for kind, each in named.items()})
    try:
        yield
    finally:
        _allowed.reset(token)


def restricted() -> bool:
    """Whether somebody said what may be imported at this moment."""
    return _allowed.get() is not None


def check_allowed(kind: Kind, address: str, covers: Callable[[str], bool] | None = None) -> None:
    """Refuse code that may not be imported here: it is not named, nor covered by anything that is."""
    allowed = _allowed.get()
    agreed = None if allowed is None else allowed[kind]
    if agreed is not None and address not in agreed and not (covers and any(map(covers, agreed))):
        raise NotAllowed(
            f"{kind} '{address}' would {_USES[kind]} of this machine, and nobody here allowed that "
            f"(allowed: {', '.join(sorted(agreed)) or 'none'}). If you know it and trust it, start again "
            f"with --allow-{kind} {address}."
        )
