"""Records of a run of any length, in little memory."""

from __future__ import annotations

from collections import deque
from typing import Any

_RECORDS, _RECENT = 400, 12


class KeptRecords:
    """The last records, and some hundreds spread evenly over all of a run.

    spread: every so many, from the first on, and always the last.
    """

    def __init__(self) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.spread: list[dict[str, Any]] = []
        self._every = 1

    def enter(self, record: dict[str, Any]) -> None:
        if self.spread and (self.spread[-1]["exchange"] - 1) % self._every:
            self.spread.pop()
        self.spread.append(record)
        self.recent.append(record)
        if len(self.spread) > _RECORDS:
            self._every *= 2
            self.spread = [
                one for one in self.spread if one is record or (one["exchange"] - 1) % self._every == 0
            ]
