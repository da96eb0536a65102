"""Which rows are held out: by a keyed hash of a row's values and label, never by its place.

Equal rows are always on one side, and a row is on the same side whoever owns it, in whatever order and among
however many clients. The hash is a mix of 64-bit words, the same on every machine:

    h = key;  for every word w of the row:  h = mix(h ^ w) * ODD + column

with the finaliser of SplitMix64 as `mix`. A number is the bits of its float64, all NaN alike and -0.0 as 0.0;
so is a label that is a number, and another label is BLAKE2b of its text. It decides a split and protects
nothing: who knows the key and a row knows its side.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.labels import plain_labels

_BLOCK = 65536
_NAN = np.uint64(0x7FF8000000000000)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def row_marks(features: Any, labels: Any = None, key: int | str = 0) -> Array:
    """A number from 0 to 2**64 - 1 for every row (rows,), uniform over keys.

    features: (rows, width) real numbers as they were parsed or encoded, NaN where missing; float32 and
              float64 of the same value count as equal. labels: (rows,) classes, or targets (…, outputs).
    """
    values = np.asarray(features)
    if values.ndim != 2 or values.dtype.kind not in "fiub":
        raise DataError(f"rows of real numbers are expected; got shape {values.shape}, dtype {values.dtype}.")
    seed = int.from_bytes(hashlib.blake2b(f"held out|{key}".encode(), digest_size=8).digest(), "little")
    marks = np.full(len(values), seed, dtype=np.uint64)
    for start in range(0, len(values), _BLOCK):
        part = np.ascontiguousarray(values[start : start + _BLOCK].T, dtype=np.float64)
        words = (part + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
        words = np.where(np.isnan(part), _NAN, words)
        for number, column in enumerate(words):
            _enter(marks[start : start + _BLOCK], column, number)
    if labels is not None:
        given = plain_labels(labels)
        if len(given) != len(values):
            raise DataError(f"{len(values)} rows but {len(given)} labels.")
        for number, column in enumerate(np.atleast_2d(given.T)):
            _enter(marks, _label_words(column), -1 - number)
    return _mixed(marks)


def held_out(features: Any, labels: Any = None, share: float = 0.2, key: int | str = 0) -> Array:
    """Which rows are held out, (rows,) booleans; about `share` of different rows."""
    return chosen(row_marks(features, labels, key), share)


def folds(features: Any, labels: Any = None, count: int = 5, key: int | str = 0) -> Array:
    """The fold of every row, (rows,) whole numbers from 0 to count - 1, of about equal size."""
    return fold_numbers(row_marks(features, labels, key), count)


def chosen(marks: Array, share: float, first: float = 0.0) -> Array:
    """Which rows are held out: those whose mark is from `first` to `first + share` of the range of marks."""
    if not 0 <= share < 1:
        raise DataError(f"the share held out must lie in [0, 1); got {share!r}.")
    begin, end = (np.uint64(round(bound * 2.0**53)) for bound in (first, first + share))
    places = marks >> np.uint64(11)
    return np.asarray((places >= begin) & (places < end))


def fold_numbers(marks: Array, count: int) -> Array:
    """The fold of every row, by its mark."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 2:
        raise DataError(f"the number of folds must be a whole number, at least 2; got {count!r}.")
    shares = (marks >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray((shares * count).astype(np.int64))


def _label_words(labels: Array) -> Array:
    if labels.dtype.kind in "fiub":
        return (labels.astype(np.float64) + 0.0).view(np.uint64)
    distinct, codes = np.unique(labels, return_inverse=True)
    words = [
        int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")
        for label in distinct.tolist()
    ]
    return np.array(words, dtype=np.uint64)[codes]


def _enter(marks: Array, words: Array, number: int) -> None:
    """Mix one word into the mark of every row, in place."""
    np.bitwise_xor(marks, words, out=marks)
    marks[...] = _mixed(marks)
    marks *= _ODD
    marks += np.uint64(number % 2**64)


def _mixed(words: Array) -> Array:
    """SplitMix64's finaliser: every bit of a word changes every bit of the result half of the time."""
    mixed: Array = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
