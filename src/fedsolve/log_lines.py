"""Log lines: one form for every process of a federation, as text or as JSON, in files that stay small.

    text    2026-11-16T05:00:00.123Z gate WARNING refused 10.0.0.7 POST /v1/control/start-run: ...
    json    {"time": "...", "level": "WARNING", "process": "gate", "message": "refused ...", "fields": {...}}

A line never holds a control character, so a log steers no terminal, whoever wrote what it quotes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

Style = Literal["text", "json"]
STYLES: tuple[Style, ...] = ("text", "json")

MOST = 16 << 20
"""Bytes of a log from which on it becomes NAME.1, in the place of an earlier one, and a new one begins."""

_ENVIRONMENT = "FEDSOLVE_PROCESS_LOG"
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]")


def line(
    style: Style,
    process: str,
    level: str,
    message: str,
    fields: Mapping[str, Any] | None = None,
    at: float | None = None,
) -> str:
    """One line, without its end."""
    clock = _clock(time.time() if at is None else at)
    message = plain(message)
    if style == "text":
        return f"{clock} {process} {level} {message}"
    document = {"time": clock, "level": level, "process": process, "message": message}
    return json.dumps({**document, "fields": dict(fields or {})}, default=str)


def plain(text: str) -> str:
    """The text as one line, without colours and other control characters."""
    text = " ".join(_COLOURS.sub("", text).split())
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def message_of(text: str) -> str:
    """The message of a line, in whichever style it was written."""
    if text.startswith("{"):
        with suppress(ValueError):
            document = json.loads(text)
            if isinstance(document, dict) and "message" in document:
                return str(document["message"])
    return text


class Lines(logging.Handler):
    """Writes records as lines to a file descriptor.

    path: the file behind the descriptor, which is begun anew when it is too large. The descriptor appends,
          and so may others that have the same file open: it is copied and emptied, not renamed.
    """

    def __init__(self, descriptor: int, style: Style, process: str, path: Path | None = None) -> None:
        super().__init__(logging.INFO)
        self.style = style
        self._descriptor = descriptor
        self._process = process
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.put(self._line(record))
        except OSError:
            return  # a full disk ends a log, not a run
        except Exception:
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.name not in ("root", "fedsolve", f"fedsolve.{self._process}", _STRAY):
            fields.setdefault("logger", record.name)
        message = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            told = logging.Formatter().formatException(record.exc_info)
            fields["traceback"] = told
            message += f": {told.splitlines()[-1]}"
        text = line(self.style, self._process, record.levelname, message, fields, record.created)
        if self.style == "text" and "traceback" in fields:
            text += "\n" + fields["traceback"]
        return text

    def put(self, text: str) -> None:
        """Write a line, and begin the file anew where it has become too large."""
        _write_all(self._descriptor, (text + "\n").encode("utf-8", "replace"))
        if self._path is not None and os.fstat(self._descriptor).st_size > MOST:
            with suppress(OSError):
                shutil.copyfile(self._path, self._path.with_name(f"{self._path.name}.1"))
            os.ftruncate(self._descriptor, 0)


class LogFile(Lines):
    """The same for a file of this process's own, readable by its owner alone; closed with the handler."""

    def __init__(self, path: Path, style: Style, process: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        super().__init__(os.open(path, flags, 0o600), style, process, path)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)
        super().close()


def for_child(style: Style, path: Path) -> dict[str, str]:
    """Environment in which a process whose output goes to the file `path` logs in this style."""
    return {_ENVIRONMENT: f"{style}:{path.absolute()}"}


def begin(process: str, level: int = logging.INFO) -> None:
    """Send all that this process logs or prints to its standard error, as lines, as its parent wished."""
    style, _, path = os.environ.pop(_ENVIRONMENT, "text:").partition(":")
    handler = Lines(2, "json" if style == "json" else "text", process, Path(path) if path else None)
    handler.setLevel(level)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    sys.stdout = sys.stderr = _Stray()


_STRAY = "fedsolve.printed"


class _Stray:
    """What is printed instead of logged, a line at a time."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for each in lines:
            if each.strip():
                logging.getLogger(_STRAY).info("%s", each)
        return len(text)

    def flush(self) -> None:
        """Nothing: a line is written when it is complete."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 2


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _clock(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
