"""A term as elements of a ring, so that masks can hide it and sums lose nothing.

A number x is sent in fixed point, as an integer modulo a power of two:

- two limbs: round(x 2^64) in Z_2^128, as two uint64 with carries between them;
- one limb:  round(x 2^e) in Z_2^64, where e is an exponent that the request names.

Each term is rounded once, by at most half a step (2^-65, or 2^-(e+1)); the sum of n terms is exact after
that, the same bits in any order. It stays in range because every term obeys |x| <= 2^(62 - e) / n, where
e is 0 for two limbs: their upper limb counts whole units, their lower one 64 more bits.

A `Layout` says which array travels how. It follows from the request alone, never from a client's rows, so
that it may be public. `sizes` says where exponents come from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import canonical_json
from fedsolve.errors import TermError, explained
from fedsolve.federation.messages import Term, pack_triangle, unpack_triangle

CHUNK = 16384
"""Numbers handled at a time: two limbs of them are 256 KiB and stay in the processor's cache."""

HEADROOM_BITS = 62
"""A sum uses at most this many bits of a signed limb; the one left over makes damaged sums show."""

LEAST_EXPONENT, LARGEST_EXPONENT = 0, 900
"""Of one limb. A coarser one would tell on which side of a step a sum lies."""

_WORD = np.dtype("<u8")

Exponents = Mapping[tuple[str, tuple[int, ...]], int]
"""Which arrays travel in one limb: an exponent by name and shape."""


@dataclass(frozen=True)
class Field:
    """One array of a term as it travels; exponent None means two limbs."""

    name: str
    shape: tuple[int, ...]
    symmetric: bool = False
    exponent: int | None = None


@dataclass(frozen=True)
class Layout:
    """The order in a ring vector: arrays in two limbs, counts, then arrays in one limb, by name.

    wide, narrow: numbers in two limbs, counts included, and in one. places: each array with its place among
    the numbers of its kind; of a symmetric one the upper triangle travels.
    """

    fields: tuple[Field, ...]
    counts: tuple[str, ...] = ()
    wide: int = field(default=0, init=False, repr=False, compare=False)
    narrow: int = field(default=0, init=False, repr=False, compare=False)
    places: tuple[tuple[Field, slice], ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = tuple(sorted(self.fields, key=lambda each: (each.exponent is not None, each.name)))
        start, places = {True: 0, False: 0}, []
        for each in fields:
            narrow, first = each.exponent is not None, start[each.exponent is not None]
            side = each.shape[0] if each.symmetric else 0
            start[narrow] += side * (side + 1) // 2 if each.symmetric else math.prod(each.shape)
            places.append((each, slice(first, start[narrow])))
        sizes = {"wide": start[False] + len(self.counts), "narrow": start[True], "places": tuple(places)}
        vars(self).update(fields=fields, **sizes)

    @classmethod
    def of(cls, term: Term, exponents: Exponents | None = None) -> Layout:
        """The layout of a term; arrays whose name and shape have an exponent travel in one limb."""
        known = exponents or {}
        fields = [
            Field(name, array.shape, name in term.symmetric, known.get((name, array.shape)))
            for name, array in term.arrays.items()
        ]
        return cls(tuple(fields), tuple(sorted(term.counts)))

    def widened(self) -> Layout:
        """The same arrays, all of them in two limbs."""
        return Layout(tuple(dataclasses.replace(each, exponent=None) for each in self.fields), self.counts)

    def digest(self) -> str:
        """Names this layout."""
        return hashlib.sha256(canonical_json(self.note()).encode()).hexdigest()[:32]

    def error_bounds(self, clients: int) -> dict[str, float]:
        """By array, how far a total of `clients` terms can be from the exact sum, before it is rounded to
        float64."""
        steps = {each.name: 65 if each.exponent is None else each.exponent + 1 for each in self.fields}
        return {name: clients * math.ldexp(1.0, -step) for name, step in steps.items()}

    def note(self) -> dict[str, Any]:
        """The layout as JSON values."""
        fields = [[f.name, list(f.shape), f.symmetric, f.exponent] for f in self.fields]
        return {"fields": fields, "counts": list(self.counts)}

    @classmethod
    def from_note(cls, note: Any) -> Layout:
        """The layout that `note` described; anything else is refused."""
        with explained("the layout of this sum is damaged", error=TermError):
            fields = [
                Field(str(name), tuple(map(int, shape)), bool(symmetric), None if e is None else int(e))
                for name, shape, symmetric, e in note["fields"]
            ]
            for each in fields:
                square = each.shape == 2 * each.shape[:1]
                if min(each.shape, default=0) < 0 or (each.symmetric and not square):
                    raise ValueError(f"an array of shape {each.shape}")
                if not LEAST_EXPONENT <= (each.exponent or 0) <= LARGEST_EXPONENT:
                    raise ValueError(f"an exponent of {each.exponent}")
            if len({each.name for each in fields}) != len(fields):
                raise ValueError("an array twice")
            layout = cls(tuple(fields), tuple(sorted({str(name) for name in note["counts"]})))
            if canonical_json(layout.note()) != canonical_json(note):  # compares types and order, too
                raise ValueError("not as a layout is written")
        return layout


class OutOfRange(TermError):
    """An array of a term is too large for the sum that was asked for; `array` is its name."""

    def __init__(self, array: str, limit: float) -> None:
        # The value stays out of the message: it is data, and messages travel.
        super().__init__(
            f"'{array}' has numbers beyond ±{limit:.3g} (or NaN), too large for a secure sum of this size. "
            "If the array travels in one limb, ask for two; otherwise rescale the features."
        )
        self.array = array


class RingVector:
    """A term, or a sum of terms, in the ring.

    limbs: uint64, as they are sent: the lower limbs of all wide numbers, their upper limbs, then the
        numbers of one limb. wide: how many numbers have two limbs.
    """

    def __init__(self, limbs: Array, wide: int) -> None:
        if limbs.dtype != _WORD or limbs.ndim != 1 or not 0 <= 2 * wide <= len(limbs):
            raise TermError(
                f"a ring vector with {wide} wide numbers cannot be {limbs.dtype} of shape {limbs.shape}."
            )
        self.limbs = limbs
        self.wide = wide

    # Views, of a copy its own: lower and upper limbs of the wide numbers, and the numbers of one limb.
    low = property(lambda self: self.limbs[: self.wide])
    high = property(lambda self: self.limbs[self.wide : 2 * self.wide])
    single = property(lambda self: self.limbs[2 * self.wide :])


def encode(term: Term, layout: Layout, clients: int) -> RingVector:
    """The term in the ring, its factors multiplied in; `OutOfRange` if `clients` such terms could overflow.

    clients: how many terms the sum can have, those who might drop out included.
    """
    found = Layout.of(term, {(f.name, f.shape): f.exponent for f in layout.fields if f.exponent is not None})
    if found != layout:
        raise TermError(f"the answer is laid out as {found.note()}, the sum as {layout.note()}.")
    vector = RingVector(np.zeros(2 * layout.wide + layout.narrow, dtype=_WORD), layout.wide)
    for each, place in layout.places:
        array = term.arrays[each.name]
        # Packed as it travels: the lower triangle may hold anything while terms are being summed.
        numbers = pack_triangle(array) if each.symmetric else np.ascontiguousarray(array).reshape(-1)
        factor = term.factors.get(each.name, 1.0)
        limit = math.ldexp(1.0, HEADROOM_BITS - (each.exponent or 0)) / clients
        for start in range(0, len(numbers), CHUNK):
            part = np.multiply(numbers[start : start + CHUNK], factor, dtype=np.float64)
            if not max(part.max(), -part.min()) <= limit:  # NaN fails every comparison
                raise OutOfRange(each.name, limit)
            to = slice(place.start + start, place.start + start + len(part))
            if each.exponent is None:
                # Magnitude first: whole part and fraction of a float64 are both exact, also of -2^-60, whose
                # floor is -1.
                whole, negative = np.trunc(part), part < 0
                fraction = np.abs(part - whole)
                lower = np.rint(np.multiply(fraction, 2.0**64, out=fraction), out=fraction).astype(np.uint64)
                vector.low[to] = np.where(negative, np.negative(lower), lower)
                vector.high[to] = (whole.astype(np.int64) - (negative & (lower != 0))).view(np.uint64)
            else:
                np.rint(np.multiply(part, math.ldexp(1.0, each.exponent), out=part), out=part)
                vector.single[to] = part.astype(np.int64).view(np.uint64)
    for place_of, name in enumerate(layout.counts, layout.wide - len(layout.counts)):
        count = int(term.counts[name])
        if abs(count) > (1 << HEADROOM_BITS) // clients:
            raise OutOfRange(name, (1 << HEADROOM_BITS) / clients)
        vector.high[place_of] = count % (1 << 64)
    return vector


def decode(total: RingVector, layout: Layout) -> Term:
    """The term of a total: arrays in float64, correctly rounded, symmetric ones mirrored; counts exact."""
    if total.wide != layout.wide or len(total.single) != layout.narrow:
        raise TermError(
            f"a total of {total.wide} wide and {len(total.single)} narrow numbers does not have the layout "
            f"of this exchange ({layout.wide} and {layout.narrow})."
        )
    arrays = {}
    for each, place in layout.places:
        numbers = np.empty(place.stop - place.start)
        for start in range(0, len(numbers), CHUNK):
            part = slice(place.start + start, min(place.start + start + CHUNK, place.stop))
            if each.exponent is not None:
                steps = _in_range(total.single[part], each.name)
                numbers[start : start + CHUNK] = steps.astype(np.float64) * math.ldexp(1.0, -each.exponent)
                continue
            low, high = total.low[part], total.high[part]
            negative = _in_range(high, each.name) < 0
            lower = np.where(negative, np.negative(low), low)
            upper = np.where(negative, np.invert(high) + (low == 0), high)
            # The float64 nearest to each: the leading 64 bits, with a last bit that says whether anything
            # follows, rounded once, by the conversion. (float64 may name one bit too many for `upper`; 53
            # bits and a sticky one are left.)
            shift = (64 - np.frexp(upper.astype(np.float64))[1]).astype(np.uint64)
            leading = (upper << shift) | (lower >> (np.uint64(64) - shift)) | ((lower << shift) != 0)
            found = np.ldexp(leading.astype(np.float64), -shift.astype(np.int64))
            numbers[start : start + CHUNK] = np.where(negative, -found, found)
        arrays[each.name] = unpack_triangle(numbers) if each.symmetric else numbers.reshape(each.shape)
    counts = {}
    for place_of, name in enumerate(layout.counts, layout.wide - len(layout.counts)):
        place = slice(place_of, place_of + 1)
        counts[name] = int(_in_range(total.high[place], name, total.low[place])[0])
    return Term(arrays, counts, frozenset(f.name for f in layout.fields if f.symmetric))


def _in_range(limbs: Array, name: str, fraction: Any = 0) -> Array:
    """Signed limbs; refused if they are not whole, or beyond any sum of terms in range."""
    steps: Array = limbs.view(np.int64)
    # Rounding adds at most one half per term to the bound that each term obeys.
    most = (1 << HEADROOM_BITS) + (1 << 32)
    if np.any(fraction) or (steps.size and not (-most <= int(steps.min()) and int(steps.max()) <= most)):
        raise TermError(
            f"the total of '{name}' is out of range: a message was damaged, or masks did not cancel. "
            "Ask again with a new slot."
        )
    return steps
