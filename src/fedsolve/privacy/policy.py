"""What a site answers at all, and what that may cost its rows: limits that hold before anything is computed.

A file policy.toml; what it does not name keeps its strict default:

    methods = ["afl", "deepafl"]
    width = 2048

    [parameters]
    layers = [1, 20]

Of noisy answers a site keeps account: mu² of each, row by row, over all runs ever answered. A row that took
part in two has paid for both, whatever other rows were beside it. An answer is paid for before it is
computed, once: whoever asks again in the same slot gets the same bytes. Noise stands in for the disclosure
rules only while all noisy answers about a row stay within `epsilon_most`: the server chooses epsilon, and
noise of epsilon 10^7 hides nothing. With `epsilon_total`, nothing leaves without noise, and nothing at all
once that is used up.

The account is one sealed file in the ledger's folder. A second file beside that folder counts its entries: an
account with fewer entries than were counted comes from an old backup, and the site sits out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.container import Shelf
from fedsolve.errors import DataError, ModelFileError, TermError
from fedsolve.federation.client_data import TABLE_BLOCK, ClientData
from fedsolve.federation.encoding import request_digest
from fedsolve.federation.engine import Spec
from fedsolve.federation.folds import row_digests
from fedsolve.federation.messages import Chain, Request
from fedsolve.federation.noisy_sums import epsilon_of, mu_of, privacy_of, release_of
from fedsolve.federation.participant import kind_of
from fedsolve.labels import labels_from_note
from fedsolve.parameters import from_table, read_toml
from fedsolve.privacy.census import EPSILON_MOST, Limits

_MATRICES = 4  # square ones of a method's largest side that a client may have in memory at once


@dataclass(frozen=True)
class SitePolicy:
    """What a site answers. Sizes are in bytes.

    methods, statistics: names of methods, and of arrays in answers; all of them when None.
    parameters:  by name of a method's parameter, the smallest and the largest value.
    width:       longest side of a matrix that is made, sent or received.
    memory:      for the matrices of a request. bytes_up, exchanges: in one run.
    fewest_rows: of all sites in every cell of rows (class by fold) that a total is about.
    rows_per_width: rows of all sites for each column of a product, such as a Gram matrix.
    told:        numbers told for each number that the rows hold, at most, over all answers ever given.
    largest_number: in blocks of the model and in requests.
    epsilon_most: what all noisy answers about a row may cost together, with delta_total. Noise stands in for
                 the three rules, and beyond this it hides no row.
    epsilon_total: what all noisy answers about a row may cost together, with delta_total; 0: no budget. With
                 one, nothing is answered without noise.
    changing:    whether sums are opened that lack a site, and a run's cohort may change.
    colluders:   sites that might side with the server.
    joint_seed:  whether a method's seed must have been drawn by all sites together.
    verified:    whether sites must have checked a question against the totals that were opened; runs of
                 too few sites for that are refused. signatures: how many must have; 0: more than half.
    """

    methods: tuple[str, ...] | None = None
    parameters: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    statistics: tuple[str, ...] | None = None
    width: int = 4096
    memory: int = 2 << 30
    bytes_up: int = 4 << 30
    exchanges: int = 200
    fewest_rows: int = 10
    rows_per_width: float = 2.0
    told: float = 0.5
    largest_number: float = 1e9
    epsilon_most: float = EPSILON_MOST
    epsilon_total: float = 0.0
    delta_total: float = 1e-5
    changing: bool = False
    colluders: int = 0
    joint_seed: bool = True
    verified: bool = True
    signatures: int = 0

    @classmethod
    def from_file(cls, path: str | Path) -> SitePolicy:
        """The policy in a TOML file; unknown names, wrong types and negative numbers are refused."""
        policy = from_table(cls, read_toml(path), f"the policy {path}")
        for name, value in vars(policy).items():
            if isinstance(value, int | float) and value < 0:
                raise DataError(f"'{name}' in the policy {path} must be at least 0; got {value!r}.")
        return policy

    @property
    def limits(self) -> Limits:
        """What the disclosure rules ask for."""
        colluders = max(1, self.colluders)
        return Limits(self.fewest_rows, colluders, self.rows_per_width, self.told, self.epsilon_most)

    # -- what is refused ---------------------------------------------------------------------------

    def check_opening(self, opening: Mapping[str, Any]) -> None:
        """Refuse a method, its parameters, or a width that this site does not agree to."""
        key, parameters = str(opening["method"]), dict(opening["parameters"])
        asked = str(opening.get("chosen_by", opening)["method"])
        if self.methods is not None and asked not in self.methods:
            raise TermError(f"this site's policy allows the methods {list(self.methods)}, not '{asked}'.")
        for name, (least, most) in self.parameters.items():
            value = parameters.get(name)
            if isinstance(value, int | float) and not least <= value <= most:
                raise TermError(
                    f"this site's policy allows '{name}' from {least:g} to {most:g}; asked is {value:g}."
                )
        method = registry.method_class(key)(**parameters)
        classes = labels_from_note(opening["classes"])
        spec = Spec(int(opening["features"]), classes, int(opening["outputs"]), "bytes")
        side = max(int(method.largest_side(spec)), spec.features, spec.outputs)
        if side > self.width:
            raise TermError(
                f"'{key}' makes matrices of width {side:,}; this site's policy allows {self.width:,}."
            )
        needed = _MATRICES * 8 * side**2
        if needed > self.memory:
            raise TermError(
                f"'{key}' at width {side:,} takes about {needed / 1e9:.1f} GB of memory; this site's policy "
                f"allows {self.memory / 1e9:.1f} (memory)."
            )

    def check_arrays(self, arrays: Mapping[str, Array], what: str) -> None:
        """Refuse arrays whose sides or numbers are beyond what this site agrees to."""
        for name, array in arrays.items():
            if array.nbytes > self.memory or (array.ndim == 2 and max(array.shape) > self.width):
                raise TermError(
                    f"{what}: '{name}' has shape {array.shape}; this site's policy allows matrices with "
                    f"sides of {self.width:,}, and {self.memory / 1e9:.1f} GB (width, memory)."
                )
            largest = float(np.abs(array).max()) if array.size and array.dtype.kind in "fiu" else 0.0
            if not largest <= self.largest_number:  # NaN fails every comparison
                raise TermError(
                    f"{what}: '{name}' has numbers up to {largest:.3g}; this site's policy allows "
                    f"{self.largest_number:.3g} (largest_number)."
                )

    def check_statistics(self, names: Iterable[str]) -> None:
        """Refuse to answer with arrays that this site does not agree to."""
        if self.statistics is not None and (others := sorted(set(names) - set(self.statistics))):
            raise TermError(f"this site's policy allows {list(self.statistics)}; asked for are {others}.")


@dataclass(eq=False, repr=False)
class Budget:
    """A site's account of what its rows have cost.

    folder: of its ledger; in memory when None. key: with which rows are hashed.
    epsilon: the budget, at `delta`; 0: none. most: what all answers together may cost without a budget too.
    """

    folder: Path | None
    key: bytes
    epsilon: float = 0.0
    delta: float = 1e-5
    most: float = EPSILON_MOST

    def __post_init__(self) -> None:
        folder, self._digests_of = self.folder, lru_cache(maxsize=1)(partial(row_digests, key=self.key))
        self._digests, self._spent = np.zeros(0, dtype=np.uint64), np.zeros(0)
        self._entries, self._paid = 0, set[str]()
        if folder is None:
            return
        remedy = "Without it this site cannot know what its rows have cost; it must sit out."
        self._shelf, self._beside = Shelf(folder, remedy), Shelf(folder.parent, remedy)
        self._counter = f"{folder.name}.entries"
        counted = self._beside.kept(self._counter, lambda _, note: int(note["entries"])) or 0
        kept = self._shelf.kept(
            "budget", lambda a, note: (a["digests"], a["spent"], note["entries"], set(note["paid"]))
        )
        if kept is not None:
            self._digests, self._spent, self._entries, self._paid = kept
        if self._entries < counted:
            raise ModelFileError(
                f"{folder}/budget has {self._entries} entries, and {counted} were written: it is an old "
                "backup or was removed. Put the newest one back; until then this site answers nothing."
            )

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
        own = np.unique(self._digests_of(data))
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
        entries, paid = self._entries + 1, self._paid | ({answer} - {""})
        if self.folder is not None:
            # The count first: stopped in between, the site sits out rather than forget.
            self._beside.keep(self._counter, {"entries": entries})
            arrays = {"digests": digests, "spent": spent}
            self._shelf.keep("budget", {"entries": entries, "paid": sorted(paid)}, arrays)
        self._digests, self._spent, self._entries, self._paid = digests, spent, entries, paid


class PolicyGuard:
    """Holds what a participant is asked to a policy, before each of its steps."""

    def __init__(self, policy: SitePolicy, budget: Budget | None = None) -> None:
        self.policy, self.budget = policy, budget
        self._seen: set[str] = set()

    def check(self, request: Request, chain: Chain, data: ClientData) -> None:
        """Refuse a request, by name, that the policy forbids."""
        policy = self.policy
        if self.budget is not None:
            self.budget.check(request, chain)
        policy.check_arrays(request.arrays, f"the request '{request.kind}'")
        if request.position:
            for place, block in enumerate(chain.blocks):
                if chain.digests[place + 1] in self._seen:
                    continue
                if place == 0:
                    policy.check_opening(block.note["opening"])
                policy.check_arrays(block.arrays, f"block {place} of the model")
                self._seen.add(chain.digests[place + 1])

    def check_and_pay(self, request: Request, chain: Chain, data: ClientData) -> None:
        """The same at a site that sends plain terms, whose noise the server adds: paid for here too."""
        self.check(request, chain, data)
        release = release_of(request, chain, kind_of(request.kind).releases)
        if self.budget is not None and release is not None:
            # A question that rests on a noisy total is asked in one run only. The first of a run is not.
            again = request.position > 1 + int(TABLE_BLOCK in chain.blocks[-1].note)
            self.budget.pay(data, request_digest(request) if again else "", release.mu)
