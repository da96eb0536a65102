"""The version of every format that fedsolve stores or sends, and which versions it reads: all in one place.

A number grows when a fedsolve that knows only the number before would misread what is written.
`docs/compatibility.md` is this table for people.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A format's name, the version that is written, and older ones that are read as well."""

    name: str
    version: int
    older: tuple[int, ...] = ()

    @property
    def read(self) -> tuple[int, ...]:
        """All versions that are read, the oldest first."""
        return (*self.older, self.version)


MODEL = Format("model file", 2, older=(1,))
CHECKPOINT = Format("checkpoint", 2, older=(1,))
CALIBRATION = Format("checkpoint of a run that calibrates", 1)
MESSAGE = Format("message", 2)
PROTOCOL = Format("network protocol", 2)
WIRE = Format("calls of sites at the gate", 2)
ENVELOPE = Format("message as a signed file", 1)
STORE = Format("feature store", 1)
PROJECTIONS = Format("random projections", 1)
LANDMARKS = Format("landmarks", 1)
SKETCHES = Format("sketches of feedback alignment", 2)
CELLS = Format("cell of an experiment", 2)
STATUS = Format("status of a run", 1)

ALL = (
    *(MODEL, CHECKPOINT, CALIBRATION, MESSAGE, PROTOCOL, WIRE, ENVELOPE, STORE),
    *(PROJECTIONS, LANDMARKS, SKETCHES, CELLS, STATUS),
)
