"""A client's share of a method's state, by run and exchange: control variates, duals, personal models.

A request names the exchange whose state a client starts from, and the client files what it ends with under
the request's own exchange. So a request that is sent again finds the same start and gives the same answer,
and an exchange that never counted leaves nothing behind: the next request names an earlier one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.errors import ModelFileError, TermError

State = dict[str, Array]

_RUNS = 4
"""Runs whose states are kept in memory, the newest ones."""

_REMEDY = (
    "The run cannot continue exactly without it: put a copy back, resume from the checkpoint before the last "
    "(its name ends in .previous), or start afresh."
)


def ticket(run: str, client: str) -> str:
    """The name under which a request, which everybody reads, tells this client where to start."""
    return hashlib.sha256(f"{run}|{client}".encode()).hexdigest()[:16]


@dataclass(eq=False)
class StateStore:
    """States of one client, in memory or in a folder.

    folder: shared by all clients of a process; each has a folder of its own in it.
    """

    folder: Path | None = None
    client: str = ""
    _states: dict[tuple[str, int], State] = field(default_factory=dict, init=False)

    def read(self, run: str, exchange: int) -> State:
        """The state filed under this run and exchange; an error names what is missing."""
        _check_place(run, exchange)
        if self.folder is None:
            if (run, exchange) in self._states:
                return self._states[run, exchange]
        else:
            path = self._path(run, exchange)
            if path.exists():
                return container.from_bytes(
                    container.read(path), what=f"client state {path}", error=ModelFileError, remedy=_REMEDY
                )[0]
        raise TermError(
            f"the state that '{self.client}' ended exchange {exchange} with is gone, and the run cannot "
            "continue exactly without it. Keep states in a folder (a checkpoint does), or start afresh."
        )

    def write(self, run: str, exchange: int, state: State, before: int | None) -> None:
        """File the state of an exchange; of the earlier ones only `before` is still needed."""
        _check_place(run, exchange)
        if self.folder is None:
            self._states[run, exchange] = state
            runs = list(dict.fromkeys(filed for filed, _ in reversed(self._states)))[:_RUNS]
            for filed, number in list(self._states):
                if filed not in runs or (filed == run and number not in (exchange, before)):
                    del self._states[filed, number]
            return
        path = self._path(run, exchange)
        # Not forced to the disk: a killed process leaves them whole, and a forced write for each client
        # would take longer than its training.
        data = container.to_bytes(state, {"exchange": exchange}, sealed=True)
        container.write_atomically(path, data, durable=False, private=True)
        for other in path.parent.glob("*.safetensors"):
            if other.stem not in (str(exchange), str(before)):
                other.unlink()

    def _path(self, run: str, exchange: int) -> Path:
        assert self.folder is not None
        # A client's name may be anything; as a folder's it must stay inside.
        return self.folder / f"of-{quote(self.client, safe='')}" / run[:16] / f"{exchange}.safetensors"


def _check_place(run: str, exchange: int) -> None:
    """Refuse what a request may not name: both become parts of a path."""
    if type(exchange) is not int or exchange < 0:
        raise TermError(f"states are filed by the number of an exchange; got {ascii(exchange)[:80]}.")
    if not run.isalnum():
        raise TermError(f"states are filed by the digest of a run; got {ascii(run)[:80]}.")
