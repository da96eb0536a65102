"""The fold of a row: by a keyed hash of its values and label, never by its place.

Equal rows are always in one fold, and a row is in the same fold whoever owns it, in whatever order and among
however many clients. The folds of 3 are each divided in two by those of 6, and so on. The hash is a mix of
64-bit words, the same on every machine:

    h = key;  for every word w of the row:  h = mix(h ^ w) * ODD + column

with the finaliser of SplitMix64 as `mix`. A number is the bits of its float64, all NaN alike and -0.0 as 0.0;
so is a label that is a number, and another label is BLAKE2b of its text. It decides a split and protects
nothing: who knows the key and a row knows its fold.

A part is a union of folds: what a run is trained on, or what a question is about. A run on a part says so in
its opening, a question of its own in its note; a participant then shows its steps those rows alone, and keeps
what they derive from them apart.

Under secure sums a site's rows live in cells, class by fold. A step that takes some of the rows
(`ClientData.taking`) gets whole cells or a refusal, and the marks by which rows are divided are the same for
every row of a cell, whatever key the question names: no number of folds divides the rows finer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError, TermError
from fedsolve.federation.messages import Chain, Request
from fedsolve.labels import number, plain_labels

if TYPE_CHECKING:
    from fedsolve.federation.client_data import ClientData

FOLDS = 3
"""Folds that rows are dealt into: those of a choice and of a calibration alike."""

_BLOCK, _DIGESTED = 65536, 4096
"""Rows that are hashed, and digested, at a time."""
_NAN = np.uint64(0x7FF8000000000000)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def row_hashes(features: Any, labels: Any = None, key: int | str = 0) -> Array:
    """A number from 0 to 2**64 - 1 for every row (rows,), uniform over keys.

    features: (rows, width) real numbers as they were parsed or encoded, NaN where missing; float32 and
              float64 of the same value count as equal. labels: (rows,) classes, or targets (…, outputs).
    """
    values = np.asarray(features)
    if values.ndim != 2 or values.dtype.kind not in "fiub":
        raise DataError(f"rows of real numbers are expected; got shape {values.shape}, dtype {values.dtype}.")
    seed = int.from_bytes(hashlib.blake2b(f"held out|{key}".encode(), digest_size=8).digest(), "little")
    hashes = np.full(len(values), seed, dtype=np.uint64)
    for start in range(0, len(values), _BLOCK):
        part = np.ascontiguousarray(values[start : start + _BLOCK].T, dtype=np.float64)
        words = (part + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
        words = np.where(np.isnan(part), _NAN, words)
        some = hashes[start : start + _BLOCK]
        for place, column in enumerate(words):
            some[...] = mixed_words(some ^ column) * _ODD + np.uint64(place)
    if labels is not None:
        given = plain_labels(labels)
        if len(given) != len(values):
            raise DataError(f"{len(values)} rows but {len(given)} labels.")
        for place, column in enumerate(np.atleast_2d(given.T), 1):
            if column.dtype.kind in "fiub":
                entered = (column.astype(np.float64) + 0.0).view(np.uint64)
            else:
                distinct, codes = np.unique(column, return_inverse=True)
                texts = [hashlib.blake2b(label.encode(), digest_size=8) for label in distinct.tolist()]
                words = np.array([int.from_bytes(text.digest(), "little") for text in texts], dtype=np.uint64)
                entered = words[codes]
            hashes = mixed_words(hashes ^ entered) * _ODD + np.uint64(2**64 - place)
    return mixed_words(hashes)


def fold_numbers(hashes: Array, count: int = FOLDS) -> Array:
    """The fold of every row, by its hash: (rows,) whole numbers below `count`, of about equal size."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 2:
        raise DataError(f"the number of folds must be a whole number, at least 2; got {count!r}.")
    shares = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray((shares * count).astype(np.int64))


def mixed_words(words: Array) -> Array:
    """SplitMix64's finaliser: every bit of a word changes every bit of the result half of the time."""
    mixed: Array = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def row_digests(data: ClientData, key: bytes) -> Array:
    """One number of 64 bits for each row with its label and weight; repeats of a row have different ones.

    A label that a server's class list spells as text counts as the number that it is: otherwise a server
    could make all rows look new.
    """
    labels, weights = data.own_labels, data.own_weights
    digests = np.empty(len(data), dtype=np.uint64)
    for start in range(0, len(data), _DIGESTED):
        for place, row in enumerate(data.features(slice(start, start + _DIGESTED)), start):
            label = np.atleast_1d(labels[place]).tolist()
            spelled = [str(each) if (value := number(each)) is None else repr(value) for each in label]
            about = [spelled, None if weights is None else float(weights[place])]
            state = hashlib.blake2b(repr(about).encode(), digest_size=8, key=key)
            state.update(row.tobytes())
            digests[place] = int.from_bytes(state.digest(), "little")
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(order) else order
    repeats = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    digests[order] += repeats.astype(np.uint64) * _ODD
    return digests


@dataclass(frozen=True)
class RowCells:
    """Where each row lies: (rows,) its class, its fold, and of how many folds.

    left_out: (features,) columns that are left out where a part of the cells is taken.
    few:      (features,) columns that are left out of all questions, set in too few rows.
    batches:  (rows,) the batch of arrival. book: what steps note of their questions, for the next ones, under
              these limits. Of a part of the rows there is none.
    """

    codes: Array
    folds: Array
    counts: Array
    left_out: Array | None = None
    batches: Array | None = None
    book: dict[str, Any] | None = None
    limits: Any = None
    few: Array | None = None

    def taking(self, chosen: Array) -> RowCells:
        """The cells of some rows; refused where a cell would be split."""
        cell = (self.codes.astype(np.int64) * 256 + self.counts) * 256 + self.folds
        split = np.intersect1d(cell[chosen], cell[~chosen])
        if len(split):
            raise TermError(
                f"this question would split {len(split)} cells of rows (class by fold) that all other "
                "questions keep whole. Ask about whole folds."
            )
        return RowCells(self.codes[chosen], self.folds[chosen], self.counts[chosen], self.left_out)


PART = "part"
"""The name of a part in an opening and in the note of a request."""


@dataclass(frozen=True)
class Part:
    """The rows of some folds.

    folds: their numbers, from 0 to count - 1. count: how many folds there are in all: three, or six, twelve
           and so on, which divide each of the three further.
    """

    folds: tuple[int, ...]
    count: int = FOLDS

    def __post_init__(self) -> None:
        halvings, rest = divmod(self.count, FOLDS)
        if rest or halvings < 1 or halvings & (halvings - 1):
            raise DataError(
                f"rows are in {FOLDS} folds, or in {FOLDS} times a power of 2; got {self.count!r}."
            )
        object.__setattr__(self, "folds", tuple(sorted(set(self.folds))))
        if not self.folds or not all(fold in range(self.count) for fold in self.folds):
            raise DataError(f"folds are numbers from 0 to {self.count - 1}; got {list(self.folds)}.")

    @property
    def rest(self) -> Part:
        """All other rows."""
        return Part(tuple(set(range(self.count)) - set(self.folds)), self.count)

    def of(self, data: ClientData) -> ClientData:
        """A client's rows of this part."""
        return data.taking(np.isin(fold_numbers(data.row_hashes(), self.count), self.folds))

    def note(self) -> dict[str, Any]:
        """This part as it stands in an opening or in a request: `{**note, **part.note()}`."""
        return {PART: asdict(self)}


def part_of(request: Request, chain: Chain) -> Part | None:
    """The part that a request is about: its own, or that of the run it belongs to; None: all rows."""
    note: Mapping[str, Any] | None = request.note.get(PART)
    if note is None and request.position:
        note = chain.opening.get(PART)
    return None if note is None else Part(**note)


def speaks_of_parts(note: Any) -> bool:
    """Whether a note names a part of the rows anywhere in it."""
    if isinstance(note, Mapping):
        return note.get(PART) is not None or any(map(speaks_of_parts, note.values()))
    return isinstance(note, list | tuple) and any(map(speaks_of_parts, note))
