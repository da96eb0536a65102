"""Addresses of datasets and backbones: `scheme`, `scheme:rest` or `scheme:rest?option=value&option=value`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsolve.errors import DataError, did_you_mean
from fedsolve.labels import number

PIXELS = "a number of pixels, such as 224"


@dataclass(frozen=True)
class Address:
    """An address, taken apart."""

    text: str
    scheme: str
    rest: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, strict: bool = False) -> Address:
        """Take an address apart. A '?' without name=value pairs after it belongs to a path, or is refused."""
        place, mark, query = text.rpartition("?")
        pairs = [part.partition("=") for part in query.split("&")] if mark else []
        wrong = next(("".join(pair) for pair in pairs if not (pair[0] and pair[1])), None)
        if wrong is not None and strict:
            raise DataError(f"{text}: '{wrong}' is not of the form option=value.")
        if not mark or wrong is not None:
            place, pairs = text, []
        options: dict[str, str] = {}
        for name, _, value in pairs:
            if name in options:
                raise DataError(f"{text}: the option '{name}' is given twice.")
            options[name] = value
        scheme, _, rest = place.partition(":")
        return cls(text, scheme.strip(), rest, options)

    def allow(self, *names: str) -> None:
        """Refuse all other options."""
        for name in self.options:
            if name not in names:
                takes = f"It takes {', '.join(names) or 'none'}."
                raise DataError(f"{self.text}: unknown option '{name}'.{did_you_mean(name, names)} {takes}")

    def adding(self, **changed: str) -> str:
        """The address with these options, too; those of the same names are replaced."""
        place = f"{self.scheme}:{self.rest}" if self.rest else self.scheme
        query = "&".join(f"{name}={value}" for name, value in (self.options | changed).items())
        return f"{place}?{query}" if query else place

    def word(self, name: str, choices: Sequence[str] = ()) -> str | None:
        """An option, one of `choices` where there are any; None when it is not given."""
        value = self.options.get(name)
        if value is not None and choices and value not in choices:
            raise DataError(f"{self.text}: {name} is one of {', '.join(choices)}; got '{value}'.")
        return value

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """Finite numbers separated by commas."""
        value = self.options.get(name)
        if value is None:
            return None
        found = [number(part) for part in value.split(",")]
        if any(each is None or not math.isfinite(each) for each in found):
            raise DataError(
                f"{self.text}: {name} takes numbers separated by commas, such as {name}=0.485,0.456,0.406; "
                f"got '{value}'."
            )
        return tuple(each for each in found if each is not None)

    def number(self, name: str) -> float | None:
        """One finite number."""
        value = self.options.get(name)
        found = None if value is None else number(value)
        if value is not None and (found is None or not math.isfinite(found)):
            raise DataError(f"{self.text}: '{name}' must be a number; got '{value}'.")
        return found

    def whole(self, name: str, wanted: str = PIXELS, least: int = 1, most: int = 65536) -> int | None:
        """A whole number."""
        value = self.options.get(name)
        return None if value is None else parse_whole(value, f"{self.text}: {name}", wanted, least, most)

    def path(self, root: Path | None) -> Path:
        """The path of the address: from the working folder or, where that has none, from `root`."""
        if not self.rest:
            raise DataError(f"'{self.text}' names no file; write {self.scheme}:PATH.")
        path = Path(self.rest).expanduser()
        if path.exists() or path.is_absolute() or root is None:
            return path
        return root / path if (root / path).exists() else path


def parse_whole(text: str, what: str, wanted: str = PIXELS, least: int = 1, most: int = 65536) -> int:
    """A whole number, or an error that opens with `what`."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise DataError(f"{what} is {wanted}; got '{text}'.")
    return int(text)
