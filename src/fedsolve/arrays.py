"""Arrays: their type, checks that refuse bad ones by name, rows read when used, whose rows they are, and
random numbers by name.

Random numbers are seeds, not messages: the same bits on every platform. Scheme 1 is numpy's Philox bit
generator, keyed by the first 16 bytes (little endian) of SHA-256("fedsolve projection
1|seed|role|layer|inputs|outputs"); the upper 53 bits of each raw 64-bit integer are a uniform in [0, 1).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsolve import version
from fedsolve.errors import DataError

Array = NDArray[Any]


_CHECK_ROWS = 65536


def check_whole(least: int, **values: Any) -> None:
    """Refuse parameters that are not whole numbers of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise DataError(f"{name} must be a whole number, at least {least}; got {value!r}.")


def check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Refuse a value that is not one of the known ones."""
    if value not in known:
        raise DataError(f"{name} must be {' or '.join(map(repr, known))}; got {value!r}.")


def check_rows(rows: int | None, classes: int | None = None, listed: str = "") -> None:
    """Refuse a total over no rows, where every client that answered is empty, and to classify a single class.

    classes: how many occur; listed: which they are, where that is known.
    """
    if rows == 0:
        raise DataError("no rows at all: every client that answered is empty.")
    if classes is not None and classes < 2:
        raise DataError(f"only one class in the whole federation{listed}; a classifier needs at least two.")


def check_arrays(
    features: Array, labels: Array, weights: Array | None = None, *, missing: bool = False
) -> None:
    """Refuse what no method can use: wrong shapes, non-numbers, NaN and infinity, negative weights.

    missing: whether NaN stands for a missing value that will be filled.
    """
    if features.ndim != 2:
        raise DataError(
            f"features must be two-dimensional (rows, width); got shape {features.shape}. "
            "Reshape your data, one row per sample."
        )
    if features.shape[1] == 0:
        raise DataError("features have 0 columns; at least one is needed.")
    if features.dtype.kind not in "fiub":
        raise DataError(
            f"features must be real numbers; got dtype {features.dtype}. Encode text or categories first."
        )
    if len(labels) != len(features) or labels.ndim not in (1, 2):
        raise DataError(
            f"{len(features)} rows of features but labels of shape {labels.shape}; give one label per row."
        )
    if weights is not None:
        if weights.shape != (len(features),):
            raise DataError(f"sample weights must have shape ({len(features)},); got {weights.shape}.")
        wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(wrong):
            raise DataError(
                f"sample weights must be finite and not negative; got {weights[wrong[0]]} in row {wrong[0]}."
            )
    if labels.dtype.kind == "f" and not np.all(np.isfinite(labels)):
        bad = int(np.flatnonzero(~np.isfinite(labels).reshape(len(labels), -1).all(axis=1))[0])
        raise DataError(f"labels contain NaN or infinite values (first in row {bad}). Remove those rows.")
    if features.dtype.kind == "f":
        for start in range(0, len(features), _CHECK_ROWS):
            part = features[start : start + _CHECK_ROWS]
            # The sum is finite only where all values are: one pass, no temporary. An overflow gives no for
            # values that are fine; they are looked at one by one then.
            with np.errstate(invalid="ignore", over="ignore"):
                if not missing and np.isfinite(np.add.reduce(part, axis=None)):
                    continue
            finite = ~np.isinf(part) if missing else np.isfinite(part)
            if not finite.all():
                row, column = (int(i) for i in np.argwhere(~finite)[0])
                value = part[row, column]
                raise DataError(
                    f"features contain NaN or infinite values ({value} in row {start + row}, column "
                    f"{column}). "
                    "Remove or impute them before training."
                )


class StreamedRows(ABC):
    """Features (rows, width) that lie elsewhere; a span or a list of rows is read when it is asked for.

    It stands where an array of features does. Several threads may read at a time.
    """

    ndim = 2
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: slice | Array) -> Array:
        """These rows, as an array in memory."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """All of them, for what cannot do with less."""
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)


# -- which rows belong to each client --------------------------------------------------------------


def owned_rows(owners: Any, clients: int) -> list[Array]:
    """The rows of each client, in their order."""
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.searchsorted(np.asarray(owners)[order], np.arange(1, clients)))


def rows_by_client(
    owners: Any, rows: int, clients: int | None
) -> tuple[tuple[str, ...] | None, Array, Array]:
    """Names of clients, sorted, where owners are names; all rows, those of the first client first; and where
    each client's begin, up to the end of the last.

    Owners out of range are refused.
    """
    numbers, names = np.asarray(owners), None
    if numbers.shape == (rows,) and numbers.dtype.kind in "USO":
        # An array of text drops NULs at the end and makes text of bytes: a list is taken as it is.
        told = owners if isinstance(owners, list | tuple) else numbers.tolist()
        if not all(isinstance(owner, str | bytes) and owner for owner in told):
            raise DataError("owners that are names must all be text; one is empty or of another type.")
        some, text = (next((one for one in told if isinstance(one, kind)), None) for kind in (bytes, str))
        if some is not None and text is not None:
            raise DataError(
                f"owners are text, such as {text!r}, and bytes, such as {some!r}. Decode the bytes."
            )
        try:
            told = told if some is None else [owner.decode() for owner in told]
        except UnicodeDecodeError as problem:
            raise DataError(f"owner {problem.object!r} is not UTF-8. Give the names as text.") from problem
        found = sorted(set(told))
        padded = next((name for name in found if name.endswith("\0")), None)
        if padded is not None:
            raise DataError(f"owner {padded!r} ends with a NUL, which arrays of text drop. Strip it.")
        if clients is not None and clients != len(found):
            raise DataError(f"owners name {len(found)} clients, and clients is {clients}. Leave clients out.")
        places = {name: place for place, name in enumerate(found)}
        names = tuple(map(str, found))
        numbers = np.fromiter(map(places.__getitem__, told), np.intp, len(told))
    if numbers.shape != (rows,) or numbers.dtype.kind not in "iu":
        raise DataError(
            f"owners must be {rows} integers or names, one client per row; got shape {numbers.shape}, "
            f"dtype {numbers.dtype}."
        )
    count = int(numbers.max()) + 1 if clients is None else clients
    if numbers.min() < 0 or numbers.max() >= count:
        raise DataError(
            f"owners must lie between 0 and {count - 1}; got {numbers.min()} to {numbers.max()}. "
            "Raise clients= or fix the partition."
        )
    order = np.argsort(numbers, kind="stable")
    return names, order, np.searchsorted(numbers[order], np.arange(count + 1))


# -- random numbers --------------------------------------------------------------------------------


def uniform_key(seed: int, role: str, layer: int, inputs: int, outputs: int) -> int:
    """The 128 bits by which the numbers of this name are drawn."""
    text = f"fedsolve projection {version.PROJECTIONS}|{seed}|{role}|{layer}|{inputs}|{outputs}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator of this seed and these names, such as stream(seed, "batches", client, round).

    Switching one part of a method off leaves every other part's numbers alone.
    """
    digest = hashlib.sha256("|".join(["fedsolve-gradient", str(seed), *map(str, names)]).encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


def philox_uniforms(key: int, count: int) -> Array:
    """`count` uniforms in [0, 1) of 53 bits each."""
    raw = np.random.Philox(key=key).random_raw(count)
    raw >>= np.uint64(11)
    return raw.astype(np.float64) * 2.0**-53


HALVES = 12
"""16-bit numbers that are added to make one that is nearly normal; three words of the generator hold them."""


def philox_normals(generator: np.random.Philox, count: int) -> Array:
    """The next `count` numbers, nearly normal with mean 0 and variance 1: whole numbers times 2**-16.

    Each is the sum of twelve uniform 16-bit numbers less its mean, so that all machines have the same bits.
    """
    words = generator.random_raw(count * HALVES // 4).reshape(count, HALVES // 4)
    sums = np.zeros(count, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        sums += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64).sum(axis=1)
    return (sums - HALVES * 0xFFFF // 2) * 2.0**-16
