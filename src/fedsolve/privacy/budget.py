"""What a site's rows have cost so far: mu² of every noisy answer, row by row, over all runs ever answered.

A row that took part in two answers has paid for both, whatever other rows were beside it. An answer is paid
for before it is computed, once: whoever asks again in the same slot gets the same bytes. Noise stands in for
the disclosure rules only while all noisy answers about a row stay within `epsilon_most`: the server chooses
epsilon, and noise of epsilon 10^7 hides nothing. Where the policy sets `epsilon_total`, nothing leaves
without noise, and nothing at all once the budget is used up.

The account is one sealed file in the ledger's folder. A second file beside that folder counts its entries: an
account with fewer entries than were counted comes from an old backup, and the site sits out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.errors import ModelFileError, TermError
from fedsolve.federation.accounting import epsilon_of, mu_of
from fedsolve.federation.client_data import ClientData
from fedsolve.federation.fingerprints import row_digests
from fedsolve.federation.messages import Chain, Request
from fedsolve.federation.noisy_sums import privacy_of
from fedsolve.privacy.shelf import Shelf

EPSILON_MOST = 8.0
"""Epsilon beyond which noise hides no row."""


class Budget:
    """A site's account. folder: of its ledger; in memory when None. key: with which rows are hashed.

    epsilon: the budget, at `delta`; 0: none. most: what all answers together may cost without a budget too.
    """

    def __init__(
        self,
        folder: Path | None,
        key: bytes,
        epsilon: float = 0.0,
        delta: float = 1e-5,
        most: float = EPSILON_MOST,
    ) -> None:
        self.epsilon, self.delta, self.most, self._key = epsilon, delta, most, key
        self._digests, self._spent = np.zeros(0, dtype=np.uint64), np.zeros(0)
        self._paid: set[str] = set()
        self._entries = 0
        remedy = "Without it this site cannot know what its rows have cost; it must sit out."
        self._shelf = Shelf(folder, remedy)
        self._beside = Shelf(None if folder is None else folder.parent, remedy)
        self._counter = "" if folder is None else f"{folder.name}.entries"
        self._rows: tuple[ClientData, Array] | None = None
        self._load()

    @property
    def spent(self) -> float:
        """Epsilon of the row that has paid most."""
        return epsilon_of(math.sqrt(float(self._spent.max(initial=0.0))), self.delta)

    @property
    def limited(self) -> bool:
        return self.epsilon > 0

    def said(self) -> str:
        """The account in words."""
        of = f" of {self.epsilon:g}" if self.limited else ""
        return f"epsilon spent on these rows: {self.spent:.3g}{of} (delta {self.delta:g})"

    def check(self, request: Request, chain: Chain) -> None:
        """Refuse questions without noise where there is a budget."""
        if self.limited and (not request.position or privacy_of(chain) is None):
            raise TermError(
                f"this site's policy has a budget (epsilon_total = {self.epsilon:g}), so it answers private "
                f"runs only, and '{request.kind}' has no noise. Train with epsilon, or evaluate elsewhere."
            )

    def check_run(self, chain: Chain) -> None:
        """Refuse a private run whose epsilon is beyond what noise may stand in for the rules with."""
        privacy = privacy_of(chain)
        if privacy is None or self.most == math.inf:
            return
        epsilon, delta = privacy["epsilon"], privacy["delta"]
        if mu_of(epsilon, delta) > 1.000001 * mu_of(self.most, self.delta):
            raise TermError(
                f"the noise of this run is for epsilon {epsilon:g} and delta {delta:g}; beyond epsilon "
                f"{self.most:g} and delta {self.delta:g} noise hides no row (epsilon_most). Ask with less. "
                "Nothing is sent."
            )

    def pay(self, data: ClientData, answer: str, mu: float) -> None:
        """Enter what an answer costs all rows of `data`; refused where a row has too little left.

        answer: names it, so that it is paid for once; "" where nothing does.
        """
        if answer in self._paid:
            return
        if self._rows is None or self._rows[0] is not data:
            self._rows = (data, np.unique(row_digests(data, self._key)))
        own = self._rows[1]
        digests = np.union1d(self._digests, own)
        spent = np.zeros(len(digests))
        spent[np.searchsorted(digests, self._digests)] = self._spent
        places = np.searchsorted(digests, own)
        before = float(spent[places].max(initial=0.0))
        name, limit = ("epsilon_most", self.most)
        if self.limited and self.epsilon <= limit:
            name, limit = ("epsilon_total", self.epsilon)
        # A little more than the limit, since costs of a run add up to it only but for rounding.
        if limit < math.inf and before + mu * mu > mu_of(limit, self.delta) ** 2 * (1 + 1e-9):
            was, costs = (epsilon_of(each, self.delta) for each in (math.sqrt(before), mu))
            raise TermError(
                f"the budget of these rows is used up: epsilon {was:.3g} of {limit:g} is spent ({name}), and "
                f"this answer costs {costs:.2g} by itself. Nothing is sent."
            )
        spent[places] += mu * mu
        self._digests, self._spent = digests, spent
        self._paid |= {answer} - {""}
        self._entries += 1
        self._save()

    # -- the files ---------------------------------------------------------------------------------

    def _save(self) -> None:
        # The count first: stopped in between, the site sits out rather than forget.
        self._beside.keep(self._counter, {"entries": self._entries})
        arrays = {"digests": self._digests, "spent": self._spent}
        self._shelf.keep("budget", {"entries": self._entries, "paid": sorted(self._paid)}, arrays)

    def _load(self) -> None:
        def take(arrays: dict[str, Array], note: dict[str, Any]) -> None:
            self._digests, self._spent = arrays["digests"], arrays["spent"]
            self._entries, self._paid = note["entries"], set(note["paid"])

        counted = self._beside.kept(self._counter, lambda _, note: int(note["entries"])) or 0
        self._shelf.kept("budget", take)
        if self._entries < counted:
            raise ModelFileError(
                f"{self._shelf.folder}/budget has {self._entries} entries, and {counted} were written: it is "
                "an old backup or was removed. Put the newest one back; until then this site answers nothing."
            )
