"""Log lines in one format for every process, as text or JSON, in files of limited size.

    text    2026-11-16T05:00:00.123Z gate WARNING refused 10.0.0.7 POST /v1/control/start-run: ...
    json    {"time": "...", "level": "WARNING", "process": "gate", "message": "refused ...", "fields": {...}}

Lines contain no control characters, so text from others cannot control a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from fedsolve.errors import ModelFileError, explained

Style = Literal["text", "json"]

MOST = 16 << 20
"""A log of more bytes than this is copied to NAME.1, replacing an earlier copy, and emptied."""

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
    at = time.time() if at is None else at
    clock = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}Z"
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
            return  # a full disk must not stop a run
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
        """Write a line; start the file again if it is too large."""
        data = (text + "\n").encode("utf-8", "replace")
        while data:
            data = data[os.write(self._descriptor, data) :]
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
    """Environment for a child process that logs in this style to the file `path`."""
    return {_ENVIRONMENT: f"{style}:{path.absolute()}"}


def begin(process: str, level: int = logging.INFO) -> None:
    """Send everything this process logs or prints to stderr as lines, in the style its parent chose."""
    style, _, path = os.environ.pop(_ENVIRONMENT, "text:").partition(":")
    handler = Lines(2, "json" if style == "json" else "text", process, Path(path) if path else None)
    handler.setLevel(level)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    sys.stdout = sys.stderr = _Stray()


_STRAY = "fedsolve.printed"


class _Stray:
    """A stream that logs what is printed, line by line."""

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


# -- the lines of a command ------------------------------------------------------------------------

_LOG = logging.getLogger("fedsolve")


@contextmanager
def logging_lines() -> Iterator[None]:
    """A block in which a command may start a log; the log ends with the block."""
    try:
        yield
    finally:
        for handler in [each for each in _LOG.handlers if isinstance(each, Lines)]:
            _LOG.removeHandler(handler)
            handler.close()
        _LOG.propagate = True


def begin_lines(process: str, style: Style) -> None:
    """Write what a command says on stderr as JSON, if that is the style."""
    if style == "json":
        _LOG.addHandler(_StderrLines(style, process))
        _LOG.setLevel(logging.INFO)
        _LOG.propagate = False


def keep_lines(path: Path, process: str, style: Style) -> None:
    """Also write what a command says to a file, whether it is shown or not."""
    with explained(f"cannot write {path}", "", ModelFileError, OSError):
        _LOG.addHandler(LogFile(path, style, process))
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False


class _StderrLines(Lines):
    """Lines on stderr, except those that are hidden (--quiet)."""

    def __init__(self, style: Style, process: str) -> None:
        super().__init__(2, style, process)
        self.addFilter(lambda record: getattr(record, "shown", True))

    def put(self, text: str) -> None:
        print(text, file=sys.stderr)


def say(text: str, level: str = "info", /, *, shown: bool = True, **fields: Any) -> None:
    """A line on stderr, in the style of the log where one was begun; also in its file."""
    if _LOG.handlers:
        _LOG.log(_LEVELS[level], "%s", text, extra={"fields": fields, "shown": shown})
    if shown and not any(isinstance(each, _StderrLines) for each in _LOG.handlers):
        print(text if level == "info" else f"{level}: {text}", file=sys.stderr)


_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
