"""One container for everything that is stored or sent: safetensors with one metadata key.

The key `fedsolve` holds canonical JSON (sorted keys, no spaces), so equal contents are equal bytes.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as _load_tensors
from safetensors.numpy import save as _save_tensors

from fedsolve.errors import FedsolveError, ModelFileError

Array = NDArray[Any]

_KEY = "fedsolve"
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def to_bytes(arrays: Mapping[str, Array], note: Mapping[str, Any]) -> bytes:
    """Named arrays and a JSON note as one exact, self-describing string of bytes."""
    tensors = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return _save_tensors(tensors, metadata={_KEY: canonical_json(note)})


def from_bytes(
    data: bytes, *, what: str, error: type[FedsolveError]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and the note of `to_bytes`; anything else raises `error` with a sentence about `what`."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        note = json.loads(header["__metadata__"][_KEY])
        arrays = _load_tensors(data)
    except (ValueError, KeyError, TypeError, SafetensorError) as problem:
        raise error(_damaged(what, len(data), problem)) from problem
    if not isinstance(note, dict):
        raise error(f"{what} {_NO_NOTE}")
    return arrays, note


def views(data: Array, *, what: str, error: type[FedsolveError]) -> tuple[dict[str, Array], dict[str, Any]]:
    """As `from_bytes`, but arrays are views of `data` (bytes as uint8) and nothing is copied."""
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        note = json.loads(header.pop("__metadata__")[_KEY])
        body = data[8 + length :]
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != len(body):
            raise ValueError(f"{len(body)} bytes of arrays, {end} announced")
        arrays = {name: _view(body, **entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as problem:
        raise error(_damaged(what, len(data), problem)) from problem
    if not isinstance(note, dict):
        raise error(f"{what} {_NO_NOTE}")
    return arrays, note


_NO_NOTE = "has no readable description; it was not written by fedsolve."


def _damaged(what: str, size: int, problem: Exception) -> str:
    return (
        f"{what} is damaged, truncated or was not written by fedsolve "
        f"({size} bytes; {type(problem).__name__}: {problem}). Fetch or write it again."
    )


def _view(body: Array, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
    first, last = data_offsets
    if not 0 <= first <= last <= len(body):
        raise ValueError(f"an array from byte {first} to {last}, of {len(body)}")
    array: Array = body[first:last].view(_DTYPES[dtype]).reshape(shape)
    return array


def with_prefix(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """The arrays whose names start with `prefix`, without it."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def write_atomically(
    path: str | os.PathLike[str], data: bytes, *, durable: bool = True, private: bool = False
) -> None:
    """Replace `path` by `data` in one step: a reader sees the old file or the new one, never a part.

    durable: forced to the disk, so that it survives a loss of power too.
    private: readable by its owner alone (mode 0600), from the first byte on.
    """
    mode = 0o600 if private else 0o666
    target = Path(path)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        partial.replace(target)
    except BaseException as problem:
        if partial is not None:
            partial.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            raise ModelFileError(f"cannot write {target}: {problem.strerror or problem}.") from problem
        raise


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file, or a `ModelFileError` that says why not."""
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise ModelFileError(f"cannot read {path}: {problem.strerror or problem}.") from problem
