"""A lock between processes: a file that holds the id of the process at work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedsolve.errors import ModelFileError


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file for the length of a block; a `ModelFileError` says who holds it already.

    The system lets go of the lock when a process ends, however it ends: a file left behind by a crash
    stops nobody.
    """
    descriptor = _acquired(path, what)
    try:
        yield
    finally:
        _release(path, descriptor)


def _acquired(path: Path, what: str) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as problem:
            raise ModelFileError(f"cannot write {path}: {problem.strerror or problem}.") from problem
        if not _try_lock(descriptor):
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ModelFileError(
                f"{what} by another process{f' ({holder})' if holder else ''}. "
                f"Wait until it is done, or end it. (Lock: {path})"
            )
        # Between opening and locking, the holder before us may have removed the file we opened.
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        except FileNotFoundError:
            pass
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()}\n".encode())
    return descriptor


if sys.platform == "win32":
    import msvcrt

    def _holder(descriptor: int) -> str:
        return ""  # what is locked cannot be read here

    def _release(path: Path, descriptor: int) -> None:
        os.close(descriptor)
        with suppress(OSError):  # open files cannot be removed here
            path.unlink(missing_ok=True)

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _holder(descriptor: int) -> str:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()

    def _release(path: Path, descriptor: int) -> None:
        path.unlink(missing_ok=True)
        os.close(descriptor)

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
