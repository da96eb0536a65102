"""A part of every client's rows: what a run is trained on, or what a question is about.

Rows are chosen by their content (`fedsolve.held_out`), so a part of all rows together is the same rows
however they are divided among clients. A run on a part says so in its opening, a question of its own in its
note; a participant then shows its steps those rows alone, and keeps what they derive from them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedsolve.checks import check_choice
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.client_data import ClientData
from fedsolve.federation.messages import Chain, Request
from fedsolve.held_out import chosen

PART = "part"
"""The name of a part in an opening and in the note of a request."""


@dataclass(frozen=True)
class Part:
    """About `share` of all rows, held out, or the others, for training.

    key:   another one chooses other rows; whoever is to choose the same rows has the same.
    first: where the share begins in the range of marks, 0 to 1; parts that do not overlap there share no row,
           so that k of them with a share of 1/k each are the folds of a cross-validation.
    """

    side: Literal["training", "held out"]
    share: float = 0.2
    key: int | str = 0
    first: float = 0.0

    def __post_init__(self) -> None:
        check_choice("side", self.side, ("training", "held out"))
        if not 0 < self.share < 1:
            raise DataError(f"the share held out must lie between 0 and 1; got {self.share!r}.")
        if not 0 <= self.first <= 1 + 1e-12 - self.share:
            raise DataError(f"first must lie in [0, 1 - share]; got {self.first!r}.")

    @property
    def fraction(self) -> float:
        """Which share of all rows this part has, about."""
        return self.share if self.side == "held out" else 1 - self.share

    def of(self, data: ClientData, marks: Array | None = None) -> ClientData:
        """A client's rows of this part; marks: those of its rows under this key, where they are known."""
        apart = chosen(data.marks(self.key) if marks is None else marks, self.share, self.first)
        return data.taking(apart if self.side == "held out" else ~apart)

    def note(self) -> dict[str, Any]:
        """This part as it stands in an opening or in a request: `{**note, **part.note()}`."""
        return {PART: asdict(self)}


def part_of(request: Request, chain: Chain) -> Part | None:
    """The part that a request is about: its own, or that of the run it belongs to; None: all rows."""
    note: Mapping[str, Any] | None = request.note.get(PART)
    if note is None and request.position:
        note = chain.blocks[0].note.get("opening", {}).get(PART)
    return None if note is None else Part(**note)
