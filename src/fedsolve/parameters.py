"""One description of a parameter, beside its field.

A method states each parameter once, and checks, command line, TOML and help pages follow from it:

    @dataclass(frozen=True)
    class Prox(Method[Model]):
        pull: float = parameter(0.1, "Strength of the pull towards the weights received.", least=0)
        form: Literal["plain", "squared"] = parameter("plain", "How it grows with the distance.")

The type says what a value may be: a whole number, a number, text, true or false, one of a few words
(`Literal`), a number or a word (`float | Literal["auto"]`), or nothing (`| None`). A field without
`parameter` is a parameter too, only without words; a subclass that changes a default keeps the rest.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np

from fedsolve.errors import DataError, did_you_mean

T = TypeVar("T")

_KEY = "fedsolve.parameter"
_KINDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Bound:
    """The end of a range, which belongs to it or not."""

    value: float
    included: bool


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What `parameter` states of a field; what it leaves out is taken from the base class."""

    help: str = ""
    lower: Bound | None = None
    upper: Bound | None = None
    choices: tuple[Any, ...] = ()
    flag: str = ""
    also: str = ""
    metavar: str = ""
    group: str = ""
    none: str = ""


def parameter(
    default: T,
    help: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] = (),
    flag: str = "",
    also: str = "",
    metavar: str = "",
    group: str = "",
    none: str = "",
) -> T:
    """A dataclass field with the description of a parameter.

    help:         a sentence for help pages. group: the title it stands under there.
    least, above: the smallest number allowed, or one that it must exceed; most, below: the same upwards.
    choices:      the words allowed, where the type cannot list them.
    flag:         its option, if not --NAME (for true or false: --ON/--OFF). also: another spelling of it.
    metavar:      what stands for the value on help pages. none: what None means there.
    """
    stated = Parameter(
        help=help,
        lower=_bound(least, above),
        upper=_bound(most, below),
        choices=choices,
        flag=flag,
        also=also,
        metavar=metavar,
        group=group,
        none=none,
    )
    made: T = field(default=default, metadata={_KEY: stated})
    return made


def _bound(included: float | None, excluded: float | None) -> Bound | None:
    if excluded is not None:
        return Bound(excluded, included=False)
    return None if included is None else Bound(included, included=True)


def _equal(bound: Bound) -> str:
    return "=" if bound.included else ""


@dataclass(frozen=True, kw_only=True)
class Description(Parameter):
    """All there is to know of one parameter of a class.

    kinds:   int, float, bool, str, or object where anything goes; none where `choices` are all there is.
    default: `dataclasses.MISSING` where it must be given. owner: the class that introduced it.
    """

    name: str
    kinds: tuple[type, ...]
    optional: bool
    default: Any
    owner: type

    @property
    def option(self) -> str:
        """Its option on the command line; of true or false both, with a slash between."""
        plain = f"--{self.name.replace('_', '-')}"
        return self.flag or (f"{plain}/--no-{plain[2:]}" if self.kinds == (bool,) else plain)

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
        within = self.lower is not None and self.upper is not None
        for kind in self.kinds:
            named = "a number" if kind is float and within else _KINDS.get(kind, "anything")
            words.append(named + self.range(kind))
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

    def range(self, kind: type = float) -> str:
        """The bounds as they follow a kind: " in (0, 1]", " >= 0", ", at least 1"; nothing without bounds."""
        lower, upper = self.lower, self.upper
        if kind not in (int, float):
            return ""
        if lower is not None and upper is not None:
            ends = f"{'[' if lower.included else '('}{lower.value:g}, {upper.value:g}"
            return f" in {ends}{']' if upper.included else ')'}"
        if lower is not None:
            at_least = kind is int and lower.included
            return f", at least {lower.value:g}" if at_least else f" >{_equal(lower)} {lower.value:g}"
        return "" if upper is None else f" <{_equal(upper)} {upper.value:g}"

    def check(self, value: Any) -> None:
        """Refuse a value of another kind or out of range, by name."""
        if not self._fits(value):
            guess = did_you_mean(value, self.choices) if isinstance(value, str) else ""
            raise DataError(f"{self.name} must be {self.rule}; got {value!r}.{guess}")

    def read(self, value: Any) -> Any:
        """A value of a TOML file as Python takes it: 1 for a real number is 1.0, "none" is None."""
        if value == "none" and self.optional and value not in self.choices:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if whole and float in self.kinds and int not in self.kinds else value

    def parse(self, text: str) -> Any:
        """A value written as text; what cannot be a number stays text, for `check` to refuse."""
        for choice in self.choices:
            if text == str(choice):
                return choice
        for kind in (int, float):
            if kind in self.kinds:
                try:
                    return kind(text)
                except ValueError:
                    continue
        return self.read(text)

    def _fits(self, value: Any) -> bool:
        if value is None:
            return self.optional or object in self.kinds
        if isinstance(value, bool | np.bool_):
            return bool in self.kinds or object in self.kinds
        if isinstance(value, str | int | float) and value in self.choices:
            return True
        if isinstance(value, int | np.integer):
            fits = int in self.kinds or float in self.kinds
        elif isinstance(value, float | np.floating):
            fits = float in self.kinds and bool(np.isfinite(value))
        else:
            return object in self.kinds or (isinstance(value, str) and str in self.kinds)
        return object in self.kinds or (fits and self._in_range(value))

    def _in_range(self, value: Any) -> bool:
        lower, upper = self.lower, self.upper
        enough = lower is None or value > lower.value or (lower.included and value == lower.value)
        return enough and (upper is None or value < upper.value or (upper.included and value == upper.value))


def described(cls: type) -> dict[str, Description]:
    """The parameters of a dataclass by name, in the order of its fields."""
    return _described(cls)


@cache
def _described(cls: type) -> dict[str, Description]:
    hints = typing.get_type_hints(cls)
    return {
        part.name: _describe(cls, part, hints[part.name]) for part in dataclasses.fields(cls) if part.init
    }


def check(instance: Any) -> None:
    """Refuse an instance with a parameter of the wrong type or out of range."""
    for name, description in described(type(instance)).items():
        description.check(getattr(instance, name))


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance from values of a file or a command line; the others keep their defaults."""
    known = described(cls)
    for name in values:
        if name not in known:
            raise DataError(
                f"unknown parameter '{name}'.{did_you_mean(name, known)} Known are {', '.join(known)}."
            )
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
    merged = {
        each.name: next(filter(None, (getattr(one, each.name) for one in stated)), each.default)
        for each in dataclasses.fields(Parameter)
    }
    kinds, literals, optional = _types(hint)
    if merged["choices"]:
        kinds = ()
    return Description(
        **merged | {"choices": merged["choices"] or literals},
        name=part.name,
        kinds=kinds,
        optional=optional,
        default=part.default if part.default_factory is MISSING else part.default_factory(),
        owner=bases[-1],
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
