"""A backbone's address in parts: `kind:target?option=value&option=value`."""

from __future__ import annotations

from collections.abc import Sequence

from fedsolve.errors import DataError, did_you_mean


def split_address(address: str) -> tuple[str, str, AddressOptions]:
    """Kind, target (empty when there is none) and options of an address."""
    place, _, query = address.partition("?")
    kind, _, target = place.partition(":")
    return kind.strip(), target.strip(), AddressOptions(address, query)


class AddressOptions:
    """The options of an address. Each is taken once; `finish` refuses the rest."""

    def __init__(self, address: str, query: str = "") -> None:
        self.address = address
        self._known: list[str] = []
        self._values: dict[str, str] = {}
        for part in filter(None, query.split("&")):
            name, sign, value = part.partition("=")
            if not (name and sign and value):
                raise DataError(f"{address}: '{part}' is not of the form option=value.")
            if name in self._values:
                raise DataError(f"{address}: the option '{name}' is given twice.")
            self._values[name] = value

    def has(self, name: str) -> bool:
        """Whether the option is given and not taken yet."""
        return name in self._values

    def text(self, name: str, choices: Sequence[str] = ()) -> str | None:
        """The option's value, one of `choices` where there are any; None when it is not given."""
        self._known.append(name)
        value = self._values.pop(name, None)
        if value is not None and choices and value not in choices:
            raise DataError(f"{self.address}: {name} is one of {', '.join(choices)}; got '{value}'.")
        return value

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """Finite numbers separated by commas."""
        value = self.text(name)
        if value is None:
            return None
        try:
            numbers = tuple(float(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(abs(number) < float("inf") for number in numbers):
            raise DataError(
                f"{self.address}: {name} takes numbers separated by commas, such as "
                f"{name}=0.485,0.456,0.406; got '{value}'."
            )
        return numbers

    def number(self, name: str) -> float | None:
        """One finite number."""
        numbers = self.numbers(name)
        if numbers is None:
            return None
        if len(numbers) != 1:
            raise DataError(f"{self.address}: {name} takes one number; got {len(numbers)}.")
        return numbers[0]

    def pixels(self, name: str) -> int | None:
        """A positive number of pixels."""
        value = self.text(name)
        return None if value is None else parse_pixels(value, f"{self.address}: {name}")

    def tokens(self, name: str) -> int | None:
        """A positive number of tokens."""
        value = self.text(name)
        return (
            None if value is None else parse_pixels(value, f"{self.address}: {name}", "tokens, such as 256")
        )

    def finish(self) -> None:
        """Refuse unknown options and suggest the closest known one."""
        for name in self._values:
            guess = did_you_mean(name, self._known)
            known = ", ".join(sorted(self._known)) or "none"
            raise DataError(f"{self.address}: unknown option '{name}'.{guess} Options here: {known}.")


def parse_pixels(text: str, what: str, unit: str = "pixels, such as 224") -> int:
    """A positive whole number, or an error that opens with `what`."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65536):
        raise DataError(f"{what} is a number of {unit}; got '{text}'.")
    return int(text)
