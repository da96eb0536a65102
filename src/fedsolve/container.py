"""One container for everything that is stored or sent: safetensors with one metadata key.

The key `fedsolve` holds canonical JSON (sorted keys, no spaces), so equal contents are equal bytes.

What is stored is sealed: its note says so ("sealed") and holds the SHA-256 of everything else ("sha256").
There are two entries, so that no single fault makes a sealed file look like an unsealed one.

Values become named arrays and a JSON note (`to_parts`) and come back (`from_parts`): what runs and models
store. What cannot be stored is refused by name. A `Shelf` is a folder of sealed files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from safetensors.numpy import save as _save_tensors

from fedsolve.arrays import Array
from fedsolve.errors import DataError, FedsolveError, ModelFileError, TermError, unreadable

Held = TypeVar("Held")
Made = TypeVar("Made")

PREVIOUS = ".previous"
"""How the name of a file ends that was replaced and is kept."""

_KEY = "fedsolve"
_SEALED = "sealed"
_DIGEST = "sha256"
_MARK = "="
_PLAIN = (".json", ".entries")
"""How names of files end that are text, for people."""
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?"}
_DTYPES |= {f"{sign}{8 * size}": f"<{sign.lower()}{size}" for sign in "IU" for size in (1, 2, 4, 8)}


@contextmanager
def locked(path: Path, what: str, wait: float = 0) -> Iterator[None]:
    """Hold a lock file for the length of a block; a `ModelFileError` where another process has it, also after
    `wait` seconds.

    The system releases the lock when a process ends, however it ends.
    """
    lock = FileLock(path, timeout=wait)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as problem:
        raise ModelFileError(
            f"{what} by another process. Wait until it is done, or end it. (Lock: {path})"
        ) from problem
    except OSError as problem:
        raise ModelFileError(f"cannot write {path}: {problem.strerror or problem}.") from problem
    try:
        yield
    finally:
        lock.release()


@contextmanager
def undamaged(what: Any, remedy: str) -> Iterator[None]:
    """A block that reads a file's contents; damage becomes an error that says what to do."""
    try:
        yield
    except (LookupError, TypeError, ValueError, TermError) as problem:
        kind = type(problem).__name__
        raise ModelFileError(f"{what} is damaged ({kind}: {problem}). {remedy}") from problem


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def to_bytes(arrays: Mapping[str, Array], note: Mapping[str, Any], *, sealed: bool = False) -> bytes:
    """Named arrays and a JSON note as one exact, self-describing string of bytes.

    sealed: for a file, whose damage is found when it is read; a message is protected on its way.
    """
    tensors = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    if sealed:
        note = {**note, _SEALED: True}
        note[_DIGEST] = digest(note, tensors)
    return _save_tensors(tensors, metadata={_KEY: canonical_json(note)})


def from_bytes(
    data: bytes | Array,
    *,
    what: str,
    error: type[FedsolveError],
    remedy: str = "Fetch or write it again.",
    copied: bool = True,
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and the note of `to_bytes`; anything else raises `error` with a sentence about `what`.

    copied: arrays of their own; otherwise they are views of `data`.
    """
    arrays: dict[str, Array] = {}
    try:
        content = np.frombuffer(data, dtype=np.uint8)
        length = int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8 : 8 + length].tobytes())
        note = json.loads(header.pop("__metadata__")[_KEY])
        body = content[8 + length :]
        for name, entry in header.items():
            if entry.keys() != {"dtype", "shape", "data_offsets"}:
                raise ValueError(f"'{name}' is described by {sorted(entry)}")
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= len(body):
                raise ValueError(f"an array from byte {first} to {last}, of {len(body)}")
            arrays[name] = body[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        if (announced := sum(array.nbytes for array in arrays.values())) != len(body):
            raise ValueError(f"{len(body)} bytes of arrays, {announced} announced")
        if isinstance(note, dict) and (_SEALED in note or _DIGEST in note):
            _open_seal(note, arrays)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as problem:
        raise error(_damaged(what, len(data), problem, remedy)) from problem
    if not isinstance(note, dict):
        raise error(f"{what} has no readable description; it was not written by fedsolve.")
    return ({name: array.copy() for name, array in arrays.items()} if copied else arrays), note


def sealed_json(note: Mapping[str, Any]) -> bytes:
    """A JSON object as a file for people, with its seal."""
    note = {**note, _SEALED: True}
    return (json.dumps({**note, _DIGEST: digest(note, {})}, indent=2) + "\n").encode()


def from_sealed_json(data: bytes, *, what: str, error: type[FedsolveError], remedy: str) -> dict[str, Any]:
    """The object of `sealed_json`."""
    try:
        note = json.loads(data)
        if not isinstance(note, dict):
            raise ValueError(f"a table is expected, not {type(note).__name__}")
        if _DIGEST not in note:
            raise ValueError("its checksum is missing")
        _open_seal(note, {})
    except (ValueError, TypeError, RecursionError) as problem:
        raise error(_damaged(what, len(data), problem, remedy)) from problem
    return note


def _open_seal(note: dict[str, Any], arrays: Mapping[str, Array]) -> None:
    """Check a note's seal and remove it; a file that was changed is refused."""
    sealed = note.pop(_DIGEST, None)
    if sealed != digest(note, arrays):
        raise ValueError("its contents are not what its checksum was made of")
    if note.pop(_SEALED, None) is not True:
        raise ValueError("its seal is damaged")


def digest(note: Mapping[str, Any], arrays: Mapping[str, Array], before: str = "") -> str:
    """SHA-256 over a text, a note and everything in the arrays."""
    state = hashlib.sha256(f"{before}{canonical_json(note)}".encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"|{name}|{array.dtype.str}|{array.shape}|".encode())
        state.update(array.data)
    return state.hexdigest()


def _damaged(what: str, size: int, problem: Exception, remedy: str) -> str:
    return (
        f"{what} is damaged, truncated or was not written by fedsolve "
        f"({size} bytes; {type(problem).__name__}: {problem}). {remedy}"
    )


def with_prefix(arrays: Mapping[str, Held], prefix: str) -> dict[str, Held]:
    """The arrays whose names start with `prefix`, without it."""
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def write_atomically(
    path: str | os.PathLike[str],
    data: bytes,
    *,
    durable: bool = True,
    private: bool = False,
    previous_kept: bool = False,
) -> None:
    """Replace `path` by `data` in one step: a reader sees the old file or the new one, never a part.

    A symbolic link stays, and the file that it names is replaced. What is no regular file, such as a device,
    is refused.

    durable: forced to the disk, so that it survives a loss of power too.
    private: readable by its owner alone (mode 0600), from the first byte on.
    previous_kept: the file that is replaced stays beside it, under its name and `PREVIOUS`.
    """
    mode = 0o600 if private else 0o666
    target = Path(os.path.realpath(path))
    partial: Path | None = None
    if target.exists() and not target.is_file():
        raise ModelFileError(f"cannot write {path}: it is no regular file. Name a file.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        if previous_kept:
            keep_previous(target)
        partial.replace(target)
    except BaseException as problem:
        if partial is not None:
            partial.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            raise ModelFileError(f"cannot write {target}: {problem.strerror or problem}.") from problem
        raise


def keep_previous(path: str | os.PathLike[str]) -> None:
    """Keep the file that is about to be replaced, if there is one, under its name and `PREVIOUS`."""
    target, kept = Path(path), Path(f"{os.fspath(path)}{PREVIOUS}")
    if not target.exists():
        return
    beside = kept.with_name(f".{kept.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        try:
            os.link(target, beside)  # a second name: nothing is copied
        except OSError:
            shutil.copy2(target, beside)
        beside.replace(kept)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file, or a `ModelFileError` that says why not."""
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise unreadable(path, problem) from problem


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's contents, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(eq=False)
class Shelf:
    """A folder of files that only their owner reads; without one nothing is kept. remedy: for damage.

    A file is whole and on the disk before `keep` or `write` returns.
    """

    folder: Path | None
    remedy: str = "Put a copy of it back."

    def write(self, name: str, data: bytes) -> None:
        if self.folder is not None:
            write_atomically(self.folder / name, data, private=True)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None where there is none."""
        path = None if self.folder is None else self.folder / name
        return read(path) if path is not None and path.exists() else None

    def keep(self, name: str, note: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
        """Write a note, and arrays, with their seal."""
        if self.folder is not None:
            plain = name.endswith(_PLAIN)
            self.write(name, sealed_json(note) if plain else to_bytes(arrays or {}, note, sealed=True))

    def kept(self, name: str, make: Callable[[dict[str, Array], dict[str, Any]], Made]) -> Made | None:
        """What `make` gives of the arrays and the note of a file; None where there is none."""
        if self.folder is None or (data := self.read(name)) is None:
            return None
        what, remedy = str(self.folder / name), self.remedy
        if name.endswith(_PLAIN):
            note = from_sealed_json(data, what=what, error=ModelFileError, remedy=remedy)
            arrays: dict[str, Array] = {}
        else:
            arrays, note = from_bytes(data, what=what, error=ModelFileError, remedy=remedy)
        with undamaged(what, remedy):
            return make(arrays, note)


def to_parts(values: Mapping[str, Any], owner: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Values by name as arrays and a JSON note. owner: whose they are, for error messages.

    Arrays may be anywhere in lists, tuples and dictionaries. The note says what JSON lacks by an entry "=".
    """
    arrays: dict[str, Array] = {}

    def noted(value: Any, place: str) -> Any:
        if isinstance(value, np.ndarray):
            assert place not in arrays, place
            arrays[place] = value
            return {_MARK: "array"}
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            return {_MARK: repr(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            parts = [noted(part, f"{place}.{number}") for number, part in enumerate(value)]
            return parts if isinstance(value, list) else {_MARK: "tuple", "of": parts}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            named = {key: noted(part, f"{place}.{key}") for key, part in value.items()}
            kept = _MARK not in named and sorted(named) == list(named)  # JSON is written in that order
            return named if kept else {_MARK: "dict", "of": [*map(list, named.items())]}
        raise DataError(
            f"{owner} cannot store its attribute '{place}', a {type(value).__name__}: by default arrays, "
            "numbers, text and lists and dictionaries of them are stored. Say how it is stored and taken "
            "back."
        )

    return arrays, {name: noted(value, name) for name, value in values.items()}


def from_parts(arrays: Mapping[str, Array], note: Mapping[str, Any]) -> dict[str, Any]:
    """The values that `to_parts` described."""

    def value(noted: Any, place: str) -> Any:
        if isinstance(noted, list):
            return [value(part, f"{place}.{number}") for number, part in enumerate(noted)]
        if not isinstance(noted, dict):
            return noted
        match noted.get(_MARK):
            case "array":
                return arrays[place]
            case "tuple":
                return tuple(value(noted["of"], place))
            case None | "dict" as kind:
                named = dict(noted["of"]) if kind else noted
                return {key: value(part, f"{place}.{key}") for key, part in named.items()}
            case number:
                return float(number)

    return {name: value(noted, name) for name, noted in note.items()}
