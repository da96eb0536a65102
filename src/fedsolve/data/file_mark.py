"""Whether a file is still the one that was opened."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedsolve.data.layout import unreadable
from fedsolve.errors import DataError


@dataclass(frozen=True)
class FileMark:
    """What tells a file from others under its path: its size and, on one machine, its time of modification.

    modified: in nanoseconds. Copies of a file on several machines may differ in it.
    """

    path: str
    size: int
    modified: int
    machine: str

    @classmethod
    def of(cls, path: str | Path) -> FileMark:
        try:
            found = os.stat(path)
        except OSError as problem:
            raise unreadable(path, problem) from problem
        return cls(str(path), found.st_size, found.st_mtime_ns, platform.node())

    def check(self) -> FileMark:
        """Refuse a file that is another one by now; the mark that it has on this machine."""
        now = FileMark.of(self.path)
        if now.size != self.size or (now.machine == self.machine and now.modified != self.modified):
            raise DataError(
                f"{self.path} is no longer the file that was opened: {self._told()} then, {now._told()} now. "
                "Put that one back as it was (cp -p), or begin again."
            )
        return now

    def _told(self) -> str:
        return f"{self.size} bytes of {datetime.fromtimestamp(self.modified / 1e9):%Y-%m-%d %H:%M:%S.%f}"
