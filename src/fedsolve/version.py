"""The version of fedsolve, which peers compare, and of every format that it stores or sends.

A format's number grows when a fedsolve that knows only the number before would misread what is written; any
other number is refused. `docs/compatibility.md` is this table for people.
"""

from __future__ import annotations

__version__ = "0.2.0"

MODEL = 2
CHECKPOINT = 3
MESSAGE = 2
PROTOCOL = 2
WIRE = 3
ENVELOPE = 1
STORE = 1
PROJECTIONS = 1
LANDMARKS = 1
SKETCHES = 2
CELLS = 3
STATUS = 1
