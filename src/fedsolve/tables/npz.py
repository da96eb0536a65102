"""Features, labels and owners from an npz file, by array name."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import DataError, did_you_mean, reading

TrainOrTest = Literal["train", "test"]
PARTS: tuple[TrainOrTest, ...] = ("test", "train")

FEATURE_KEYS = ("x", "X", "features", "data")
LABEL_KEYS = ("y", "Y", "labels", "label", "target")


def open_npz(path: str | Path) -> Any:
    """The arrays of an npz file by name, each read on access."""
    arrays = _loaded(path, "an npz file")
    if isinstance(arrays, np.ndarray):
        raise DataError(f"{path} holds a single array; write one with np.savez(path, x=features, y=labels).")
    return arrays


def read_npy(path: str | Path, *, mapped: bool = False) -> Array:
    """The array of an npy file, read or mapped."""
    array = _loaded(path, "an npy file", "r" if mapped else None)
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path} holds several arrays; write one with np.save, or name the file .npz.")
    return array


def _loaded(path: str | Path, what: str, mapped: Literal["r"] | None = None) -> Any:
    with _sound(path, what, str(path)):
        return np.load(path, mmap_mode=mapped, allow_pickle=False)


@contextmanager
def _sound(path: str | Path, what: str, array: str) -> Iterator[None]:
    """A block that reads an array: damage, and arrays of Python objects, are named."""
    with reading(path, what, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        try:
            yield
        except ValueError as problem:
            if "Object arrays" not in str(problem):
                raise
            raise DataError(
                f"{array} holds Python objects, which are not read from files. Save numbers or text, e.g. "
                "np.asarray(values, dtype=str)."
            ) from problem


def read_npz(
    path: Path,
    part: TrainOrTest | None,
    labelled: bool = True,
    features_key: str | None = None,
    labels_key: str | None = None,
    owners_key: str | None = None,
    remedy: str | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Features, decoded by `scale` and `offset` where the file has them, labels and owners.

    remedy: what to do where an array is not there; options of the command line when None.
    """
    with open_npz(path) as arrays:
        keys: list[str] = arrays.files
        x_names, y_names = _names(keys, part, features_key)
        x_key = _present(keys, x_names, "features", remedy or _option("--features-key"))
        features = _array(arrays, x_key, path)
        for name, combine in (("scale", np.multiply), ("offset", np.add)):
            if name in keys:
                features = combine(features, _per_column(_array(arrays, name, path), name, features))
        labels = owners = None
        if labelled:
            y_names = y_names if labels_key is None else [labels_key]
            y_key = _present(keys, y_names, "labels", remedy or _option("--labels-key"))
            labels = _array(arrays, y_key, path)
        if owners_key is not None:
            owners = _array(arrays, _present(keys, [owners_key], "owners"), path)
    return features, labels, owners


def _names(
    keys: Sequence[str], part: TrainOrTest | None, features_key: str | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Possible names of features and labels: as given, x_part and y_part, or the usual ones."""
    if features_key is not None:
        return [features_key], LABEL_KEYS
    named = part or next((p for p in PARTS if {f"x_{p}", f"X_{p}"} & set(keys)), None)
    pairs: list[tuple[Sequence[str], Sequence[str]]] = []
    if named is not None:
        pairs.append(((f"x_{named}", f"X_{named}"), (f"y_{named}", f"Y_{named}")))
    if part != "test":
        pairs.append((FEATURE_KEYS, LABEL_KEYS))
    return next((pair for pair in pairs if set(pair[0]) & set(keys)), pairs[0])


def _option(option: str) -> str:
    return f"Name it with {option} (?{option.removeprefix('--').replace('-', '_')}= in an address)."


def _present(keys: Sequence[str], names: Sequence[str], what: str, remedy: str = "") -> str:
    key = next((name for name in names if name in keys), None)
    if key is None:
        guess = did_you_mean(names[0], keys)
        listed = ", ".join(keys) or "none"
        raise DataError(f"no array '{names[0]}' with {what}.{guess} The file has {listed}. {remedy}".rstrip())
    return key


def _array(arrays: Mapping[str, Array], key: str, path: Path) -> Array:
    with _sound(path, "an npz file", f"'{key}'"):
        return np.asarray(arrays[key])


def _per_column(values: Array, name: str, features: Array) -> Array:
    """The checked numbers of `scale` or `offset`, with which columns are decoded as offset + scale * x."""
    if features.ndim != 2 or features.dtype.kind not in "fiub":
        raise DataError(
            f"features must be real numbers in rows and columns; got shape {features.shape}, "
            f"dtype {features.dtype}."
        )
    if values.shape not in ((), (1,), (features.shape[1],)) or values.dtype.kind not in "fiu":
        raise DataError(
            f"'{name}' must hold one number per column ({features.shape[1]}); "
            f"got shape {values.shape}, dtype {values.dtype}."
        )
    return values
