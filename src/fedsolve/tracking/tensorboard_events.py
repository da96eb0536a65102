"""TensorBoard: one event file for each training, in its own folder inside the one that is given.

Written by the package `tensorboard` alone: neither torch nor TensorFlow is needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedsolve.errors import explained, require
from fedsolve.tracking.tracked_runs import Facts, Tracker

_NEEDS = "tensorboard", "tensorboard:DIR"


class TensorBoardTracker(Tracker):
    """Writes below the folder `place`, made if needed; look at it with `tensorboard --logdir FOLDER`."""

    def __init__(self, place: str) -> None:
        super().__init__(f"tensorboard:{place}")
        self.folder = Path(place).expanduser()
        with explained(self.address, "Name a folder that can be written to.", kinds=OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (trial := self.folder / ".fedsolve").touch()
            trial.unlink()
        self._writers = require("tensorboard.summary.writer.event_file_writer", *_NEEDS)
        self._events = require("tensorboard.compat.proto.event_pb2", *_NEEDS)
        self._summaries = require("tensorboard.compat.proto.summary_pb2", *_NEEDS)
        self._writer: Any = None

    def begin(self, name: str, identity: str | None, resumed: bool, facts: Facts) -> Collection[int]:
        self.close()
        mark = identity or time.strftime("%Y%m%d-%H%M%S")
        folder = self.folder / f"{re.sub(r'[^A-Za-z0-9.=]+', '-', name).strip('-')}-{mark}"
        number = 1
        while identity is None and folder.exists():
            number += 1
            folder = folder.with_name(f"{folder.name.partition('_')[0]}_{number}")
        self._writer = self._writers.EventFileWriter(str(folder))
        if identity is not None:
            # What an earlier start of this training wrote is told anew: a session begins at step 0.
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(session_log=log, step=0)
        self._add(summary=self._text(facts), step=0)
        return ()

    def write(self, values: Mapping[str, float], step: int) -> None:
        kind = self._summaries.Summary.Value
        told = [kind(tag=name, simple_value=value) for name, value in values.items()]
        self._add(summary=self._summaries.Summary(value=told), step=step)
        self._writer.flush()

    def end(self, how: str) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, **event: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), **event))

    def _text(self, facts: Facts) -> Any:
        """A table for TensorBoard's page of texts."""
        tensors = require("tensorboard.util.tensor_util", *_NEEDS)
        texts = require("tensorboard.plugins.text.metadata", *_NEEDS)
        lines = ["| parameter | value |", "|---|---|", *(f"| {name} | {facts[name]} |" for name in facts)]
        value = self._summaries.Summary.Value(
            tag="parameters",
            metadata=texts.create_summary_metadata("parameters", ""),
            tensor=tensors.make_tensor_proto("\n".join(lines).encode()),
        )
        return self._summaries.Summary(value=[value])
