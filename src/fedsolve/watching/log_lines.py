"""Log lines in one format for every process, as text or JSON, in files of limited size.

    text    2026-11-16T05:00:00.123Z gate WARNING refused 10.0.0.7 POST /v1/control/start-run: ...
    json    {"time": "...", "level": "WARNING", "process": "gate", "message": "refused ...", "fields": {...}}

Lines contain no control characters, so text from others cannot control a terminal.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from fedsolve.errors import ModelFileError, explained

Style = Literal["text", "json"]

MOST = 16 << 20
"""A log of more bytes than this is copied to NAME.1, replacing an earlier copy, and emptied."""

_ENVIRONMENT = "FEDSOLVE_PROCESS_LOG"
_HEAD = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z \S+ [A-Z]+ ")
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]")


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
    return _HEAD.sub("", text)


class LineFormat(logging.Formatter):
    def __init__(self, style: Style, process: str) -> None:
        super().__init__()
        self._form: Style = style
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        if record.name not in ("root", "fedsolve", f"fedsolve.{self._process}", _STRAY):
            fields.setdefault("logger", record.name)
        message = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            fields["traceback"] = self.formatException(record.exc_info)
            message += f": {fields['traceback'].splitlines()[-1]}"
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        clock, level = f"{second}.{int(record.created % 1 * 1000):03d}Z", record.levelname
        message = plain(message)
        if self._form == "json":
            document = {"time": clock, "level": level, "process": self._process, "message": message}
            return json.dumps({**document, "fields": fields}, default=str)
        more = f"\n{fields['traceback']}" if "traceback" in fields else ""
        return f"{clock} {self._process} {level} {message}{more}"


class LogFile(RotatingFileHandler):
    """Lines in a file that only its owner can read. Others may append to it too, such as a child by its
    stderr: so a file that is too large is copied and emptied, not renamed."""

    def __init__(self, path: Path, style: Style, process: str) -> None:
        super().__init__(path, maxBytes=MOST, backupCount=1, encoding="utf-8", errors="replace")
        self.setFormatter(LineFormat(style, process))

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def rotate(self, source: str, dest: str) -> None:
        with suppress(OSError):
            shutil.copyfile(source, dest)
        os.truncate(source, 0)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a full disk must not stop a run
            super().handleError(record)


def for_child(style: Style, path: Path) -> dict[str, str]:
    """Environment for a child process that logs in this style to the file `path`."""
    return {_ENVIRONMENT: f"{style}:{path.absolute()}"}


def begin(process: str, level: int = logging.INFO) -> None:
    """Write all that this process logs or prints as lines, to the file and in the style its parent chose."""
    told, _, path = os.environ.pop(_ENVIRONMENT, "text:").partition(":")
    style: Style = "json" if told == "json" else "text"
    handler = LogFile(Path(path), style, process) if path else logging.StreamHandler()
    handler.setFormatter(LineFormat(style, process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    sys.stdout = sys.stderr = _Stray()


_STRAY = "fedsolve.printed"


class _Stray(io.TextIOBase):
    """A stream that logs what is printed, line by line."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for each in lines:
            if each.strip():
                logging.getLogger(_STRAY).info("%s", each)
        return len(text)

    def fileno(self) -> int:
        return 2


# -- the lines of a command ------------------------------------------------------------------------

LOG = logging.getLogger("fedsolve")


def end_lines() -> None:
    """End the log that a command began."""
    for handler in [each for each in LOG.handlers if isinstance(each.formatter, LineFormat)]:
        LOG.removeHandler(handler)
        handler.close()
    LOG.propagate = True


def begin_lines(process: str, style: Style) -> None:
    """Write what a command says on stderr as JSON, if that is the style; not what is hidden (--quiet)."""
    if style == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(LineFormat(style, process))
        handler.addFilter(lambda record: getattr(record, "shown", True))
        _add(handler)


def keep_lines(path: Path, process: str, style: Style) -> None:
    """Also write what a command says to a file, whether it is shown or not."""
    with explained(f"cannot write {path}", "", ModelFileError, OSError):
        _add(LogFile(path, style, process))


def _add(handler: logging.Handler) -> None:
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


def say(text: str, level: str = "info", /, *, shown: bool = True, **fields: Any) -> None:
    """A line on stderr, in the style of the log where one was begun; also in its file."""
    if LOG.handlers:
        LOG.log(getattr(logging, level.upper()), "%s", text, extra={"fields": fields, "shown": shown})
    if shown and not any(type(each) is logging.StreamHandler for each in LOG.handlers):
        print(text if level == "info" else f"{level}: {text}", file=sys.stderr)
