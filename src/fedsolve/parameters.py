"""One description of a parameter, beside its field.

A method states each parameter once, and checks, command line, TOML and help pages follow from it:

    @dataclass(frozen=True)
    class Prox(Method[Model]):
        pull: float = parameter(0.1, "Strength of the pull towards the weights received.", least=0)
        form: Literal["plain", "squared"] = parameter("plain", "How it grows with the distance.")

The type says what a value may be: a whole number, a number, text, true or false, one of a few words
(`Literal`), a number or a word (`float | Literal["auto"]`), or nothing (`| None`). A field without
`parameter` is a parameter too, only without words; a subclass that changes a default keeps the rest.

The tables of TOML files are read by the same types: `typed` and `from_table` refuse an unknown key, a missing
one and a value of another type by name and place.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from operator import ge, gt, le, lt
from typing import Annotated, Any, Literal, TypeVar

from fedsolve.errors import DataError, did_you_mean

T = TypeVar("T")

_KEY = "fedsolve.parameter"
_KINDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What `parameter` states of a field; what it leaves out is taken from the base class."""

    help: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    flag: str = ""
    also: str = ""
    metavar: str = ""
    group: str = ""
    none: str = ""


def parameter(default: T, help: str = "", **stated: Any) -> T:
    """A dataclass field with the description of a parameter.

    help:         a sentence for help pages. group: the title it stands under there.
    least, above: the smallest number allowed, or one that it must exceed; most, below: the same upwards.
    choices:      the words allowed, where the type cannot list them.
    flag:         its option, if not --NAME (for true or false: --ON/--OFF). also: another spelling of it.
    metavar:      what stands for the value on help pages. none: what None means there.
    """
    made: T = field(default=default, metadata={_KEY: Parameter(help=help, **stated)})
    return made


@dataclass(frozen=True, kw_only=True)
class Description(Parameter):
    """All there is to know of one parameter of a class.

    kinds:   int, float, bool, str, or object where anything goes; none where `choices` are all there is.
    default: `dataclasses.MISSING` where it must be given. owner: the class that introduced it.
    option:  its option on the command line; for booleans both options, separated by a slash.
    """

    name: str
    kinds: tuple[type, ...]
    optional: bool
    default: Any
    owner: type
    option: str = ""

    @property
    def default_text(self) -> str:
        """The default as a help page shows it."""
        if self.default is MISSING:
            return "required"
        if self.default is None:
            return self.none or "none"
        if self.kinds == (bool,):
            return (self.flag.replace("--", "") or "yes/no").split("/")[not self.default]
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def rule(self) -> str:
        """What a value must be."""
        words = [*(["None"] if self.optional else []), *map(repr, self.choices)]
        for kind in self.kinds:
            named = "a number" if kind is float and self.within else _KINDS.get(kind, "anything")
            words.append(named + self.range(kind))
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

    @property
    def within(self) -> bool:
        """Whether numbers are bounded from both sides."""
        low = self.least if self.above is None else self.above
        high = self.most if self.below is None else self.below
        return low is not None and high is not None

    def range(self, kind: type = float) -> str:
        """The bounds as they follow a kind: " in (0, 1]", " >= 0", ", at least 1"; nothing without bounds."""
        if kind not in (int, float):
            return ""
        if self.within:
            low = f"[{self.least:g}" if self.above is None else f"({self.above:g}"
            return f" in {low}, " + (f"{self.most:g}]" if self.below is None else f"{self.below:g})")
        if self.least is not None:
            return f", at least {self.least:g}" if kind is int else f" >= {self.least:g}"
        ends = ((" >", self.above), (" <=", self.most), (" <", self.below))
        return next((f"{sign} {end:g}" for sign, end in ends if end is not None), "")

    def check(self, value: Any) -> None:
        """Refuse a value of another kind or out of range, by name."""
        import numpy as np  # not above: commands describe their options before anything is computed

        if value is None:
            fits = self.optional
        elif isinstance(value, bool | np.bool_):
            fits = bool in self.kinds
        elif isinstance(value, str | int | float) and value in self.choices:
            fits = True
        elif isinstance(value, int | float | np.integer | np.floating):
            real = isinstance(value, float | np.floating)
            fits = float in self.kinds or (int in self.kinds and not real)
            ends = ((self.least, ge), (self.above, gt), (self.most, le), (self.below, lt))
            fits = fits and (not real or math.isfinite(value))
            fits = fits and all(end is None or holds(value, end) for end, holds in ends)
        else:
            fits = isinstance(value, str) and str in self.kinds
        if not fits and object not in self.kinds:
            guess = did_you_mean(value, self.choices) if isinstance(value, str) else ""
            if self.choices and not guess:
                guess = f" {self.help}" * bool(self.help)
            raise DataError(f"{self.name} must be {self.rule}; got {value!r}.{guess}")

    def read(self, value: Any, spelled: bool = False) -> Any:
        """A value of a file as Python takes it: 1 for a real number is 1.0, "none" is None.

        spelled: numbers are given as text. Text that is not a number stays text, for `check` to refuse.
        """
        if spelled:
            for choice in self.choices:
                if value == str(choice):
                    return choice
            for kind in (int, float):
                if kind in self.kinds:
                    try:
                        return kind(value)
                    except ValueError:
                        continue
        if value == "none" and self.optional and value not in self.choices:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if whole and float in self.kinds and int not in self.kinds else value


def _described(cls: type) -> dict[str, Description]:
    """The parameters of a dataclass by name, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    return {
        part.name: _describe(cls, part, hints[part.name]) for part in dataclasses.fields(cls) if part.init
    }


described: Callable[[type], dict[str, Description]] = cache(_described)


def check(instance: Any) -> None:
    """Refuse an instance with a parameter of the wrong type or out of range."""
    for name, description in described(type(instance)).items():
        description.check(getattr(instance, name))


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance from values of a file or a command line; the others keep their defaults."""
    known = described(cls)
    for name in values:
        if name not in known:
            raise DataError(f"unknown parameter '{name}'.{known_are(name, known)}")
    for name, description in known.items():
        if description.default is MISSING and name not in values:
            raise DataError(f"parameter '{name}' has no default and must be given.")
    read = {name: known[name].read(value) for name, value in values.items()}
    for name, value in read.items():
        known[name].check(value)
    return cls(**read)


def _describe(cls: type, part: dataclasses.Field[Any], hint: Any) -> Description:
    bases = [base for base in cls.__mro__ if part.name in vars(base).get("__dataclass_fields__", {})]
    stated = [vars(base)["__dataclass_fields__"][part.name].metadata.get(_KEY, Parameter()) for base in bases]
    merged: dict[str, Any] = {
        each.name: next((v for one in stated if (v := getattr(one, each.name)) != each.default), each.default)
        for each in dataclasses.fields(Parameter)
    }
    kinds, literals, optional = _types(hint)
    if merged["choices"]:
        kinds = ()
    spelt = part.name.replace("_", "-")
    plain = f"--{spelt}/--no-{spelt}" if kinds == (bool,) else f"--{spelt}"
    return Description(
        **merged | {"choices": merged["choices"] or literals},
        name=part.name,
        kinds=kinds,
        optional=optional,
        default=part.default if part.default_factory is MISSING else part.default_factory(),
        owner=bases[-1],
        option=str(merged["flag"] or plain),
    )


def _types(hint: Any) -> tuple[tuple[type, ...], tuple[Any, ...], bool]:
    """The kinds, the words and whether None is among what a type allows."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds: list[type] = []
    literals: list[Any] = []
    for one in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(one) is Literal:
            literals += typing.get_args(one)
        elif one is not type(None):
            kinds.append(one if one in _KINDS else object)
    return tuple(kinds), tuple(literals), type(None) in typing.get_args(hint) or hint is type(None)


# -- TOML ------------------------------------------------------------------------------------------


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    from fedsolve import container

    return parse_toml(container.read(path), str(path))


def parse_toml(text: bytes, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise DataError(f"{what} is not valid TOML: {problem}.") from problem


def from_table(cls: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass from a table of a TOML file; other fields keep their defaults."""
    hints = typing.get_type_hints(cls)
    known = {part.name: hints[part.name] for part in dataclasses.fields(cls) if part.init}  # type: ignore[arg-type]
    needed = [name for name, description in described(cls).items() if description.default is MISSING]
    return cls(**typed(values, where, known, needed))


def typed(values: Any, where: str, known: Mapping[str, Any], needed: Iterable[str] = ()) -> dict[str, Any]:
    """The given keys of a TOML table, converted to the types in `known`.

    Types: those of parameters, tuple[X, ...] (a list, or a single X), tuple[X, Y], Mapping[str, X], a
    dataclass, unions of them, and Annotated[int, 1] for a number of at least 1.
    """
    if not isinstance(values, Mapping):
        raise DataError(f"{where} must be a table of keys; got {values!r}.")
    for name in needed:
        if name not in values:
            others = ", ".join(values) or "none"
            raise DataError(f"{where} needs the key '{name}'; its other keys are {others}.")
    for name in values:
        if name not in known:
            raise DataError(f"unknown key '{name}' in {where}.{known_are(name, known)}")
    return {name: _value(known[name], value, f"'{name}' in {where}") for name, value in values.items()}


def known_are(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: " Did you mean X? Known are ..."."""
    listed = list(known)
    return f"{did_you_mean(name, listed)} Known are {', '.join(listed)}."


class _Misfit(Exception):
    """A value of another type; its text says which is wanted."""


def _value(hint: Any, value: Any, where: str) -> Any:
    try:
        return _fitted(hint, value, where)
    except _Misfit as problem:
        raise DataError(f"{where} must be {problem}; got {value!r}.") from None


def _fitted(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        wanted = []
        for one in arguments:
            try:
                if one is not type(None):
                    return _fitted(one, value, where)
            except _Misfit as problem:
                wanted.append(str(problem))
        raise _Misfit(" or ".join(wanted))
    if dataclasses.is_dataclass(hint):
        return from_table(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        many, each = arguments[1:] == (...,), value if isinstance(value, list) else [value]
        if not many and (len(each) != len(arguments) or each is not value):
            raise _Misfit(f"a list of {len(arguments)}")
        try:
            hints = arguments[:1] * len(each) if many else arguments
            return tuple(_fitted(hint, one, where) for hint, one in zip(hints, each, strict=True))
        except _Misfit as problem:
            raise _Misfit(f"a list, each {problem}") from None
    if origin not in (None, Annotated, Literal) or hint in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _Misfit("a table of keys")
        inner = arguments[1] if arguments else Any
        return {name: _value(inner, one, f"'{name}' of {where}") for name, one in value.items()}
    hint, least = arguments if origin is Annotated else (hint, None)
    kinds, choices, _ = _types(hint)
    about: dict[str, Any] = {"kinds": kinds, "choices": choices, "least": least}
    fits = Description(name="", optional=False, default=None, owner=object, **about)
    value = fits.read(value)
    try:
        fits.check(value)
    except DataError:
        raise _Misfit(fits.rule) from None
    return value
