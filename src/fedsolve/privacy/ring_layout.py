"""What stands where in a secure sum: which arrays a term has, and in how many limbs each of them travels.

A layout follows from the request alone, never from a client's rows, so that it may be public.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedsolve.container import canonical_json
from fedsolve.errors import TermError
from fedsolve.federation.messages import Term, packed_size

HEADROOM_BITS = 62
"""A sum uses at most this many bits of a signed limb; the one left over makes damaged sums show."""

LEAST_EXPONENT, LARGEST_EXPONENT = 0, 900
"""Of one limb. A coarser one would tell on which side of a step a sum lies."""

Exponents = Mapping[tuple[str, tuple[int, ...]], int]
"""Which arrays travel in one limb: an exponent by name and shape."""


@dataclass(frozen=True)
class Field:
    """One array of a term as it travels; exponent None means two limbs."""

    name: str
    shape: tuple[int, ...]
    symmetric: bool = False
    exponent: int | None = None

    @property
    def size(self) -> int:
        """Numbers that travel: the upper triangle where the array is symmetric."""
        return packed_size(self.shape[0]) if self.symmetric else math.prod(self.shape)

    def check(self) -> None:
        """Refuse what no array can be."""
        if min(self.shape, default=0) < 0 or (self.symmetric and self.shape != 2 * self.shape[:1]):
            raise ValueError(f"an array of shape {self.shape}")
        whole = self.exponent is None or type(self.exponent) is int
        if not whole or not LEAST_EXPONENT <= (self.exponent or 0) <= LARGEST_EXPONENT:
            raise ValueError(f"an exponent of {self.exponent}")

    def limit(self, clients: int) -> float:
        """The largest number that each of `clients` terms may hold."""
        return math.ldexp(1.0, HEADROOM_BITS - (self.exponent or 0)) / clients

    def error_bound(self, clients: int) -> float:
        """How far a total of `clients` terms can be from the exact sum, before it is rounded to float64."""
        return clients * math.ldexp(1.0, -65 if self.exponent is None else -(self.exponent + 1))


@dataclass(frozen=True)
class Layout:
    """What stands where in a ring vector: arrays in two limbs, counts, then arrays in one limb, by name."""

    fields: tuple[Field, ...]
    counts: tuple[str, ...] = ()

    @classmethod
    def of(cls, term: Term, exponents: Exponents | None = None) -> Layout:
        """The layout of a term; arrays whose name and shape have an exponent travel in one limb."""
        known = exponents or {}
        fields = [
            Field(name, array.shape, name in term.symmetric, known.get((name, array.shape)))
            for name, array in term.arrays.items()
        ]
        fields.sort(key=_place)
        return cls(tuple(fields), tuple(sorted(term.counts)))

    def widened(self) -> Layout:
        """The same arrays, all of them in two limbs."""
        fields = [dataclasses.replace(field, exponent=None) for field in self.fields]
        return Layout(tuple(sorted(fields, key=_place)), self.counts)

    @cached_property
    def wide(self) -> int:
        """Numbers in two limbs, counts included."""
        return sum(f.size for f in self.fields if f.exponent is None) + len(self.counts)

    @cached_property
    def narrow(self) -> int:
        """Numbers in one limb."""
        return sum(f.size for f in self.fields if f.exponent is not None)

    def digest(self) -> str:
        """Names this layout."""
        return hashlib.sha256(canonical_json(self.note()).encode()).hexdigest()[:32]

    def places(self) -> Iterator[tuple[Field, slice]]:
        """Each array with its place among the numbers of its kind."""
        start = {True: 0, False: 0}
        for field in self.fields:
            narrow = field.exponent is not None
            yield field, slice(start[narrow], start[narrow] + field.size)
            start[narrow] += field.size

    def error_bounds(self, clients: int) -> dict[str, float]:
        """By array, how far a total of `clients` terms can be from the exact sum."""
        return {field.name: field.error_bound(clients) for field in self.fields}

    def note(self) -> dict[str, Any]:
        """The layout as JSON values."""
        return {
            "fields": [[f.name, list(f.shape), f.symmetric, f.exponent] for f in self.fields],
            "counts": list(self.counts),
        }

    @classmethod
    def from_note(cls, note: Any) -> Layout:
        """The layout of `note`; anything that is none is refused."""
        try:
            fields = [
                Field(
                    str(name),
                    tuple(map(int, shape)),
                    bool(symmetric),
                    None if exponent is None else int(exponent),
                )
                for name, shape, symmetric, exponent in note["fields"]
            ]
            counts = sorted({str(name) for name in note["counts"]})
            layout = cls(tuple(sorted(fields, key=_place)), tuple(counts))
            if canonical_json(layout.note()) != canonical_json(note):  # compares types and order, too
                raise ValueError("not as a layout is written")
            if len({field.name for field in fields}) != len(fields):
                raise ValueError("an array twice")
            for field in fields:
                field.check()
        except (KeyError, TypeError, ValueError) as problem:
            raise TermError(f"the layout of this sum is damaged ({problem}).") from problem
        return layout


def _place(field: Field) -> tuple[bool, str]:
    return field.exponent is not None, field.name
