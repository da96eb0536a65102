"""How large the totals of a run are: what the exponents of the next sum and its accuracy follow from.

One limb needs the size of a sum before the sum is known, so it serves only arrays whose terms are no larger
than their total (Gram and cross matrices, as their method declares), and only once a total of that name and
shape has been seen. A gradient's total vanishes while its terms do not: it stays in two limbs. Which arrays
an answer has is found by answering for rows that nobody owns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsolve.errors import DataError, TermError
from fedsolve.federation.client_data import run_schema
from fedsolve.federation.cohort import TermLayout
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Chain, Request, Term
from fedsolve.federation.participant import ClientData, Participant, ask
from fedsolve.privacy.ring import HEADROOM_BITS, LARGEST_EXPONENT, LEAST_EXPONENT, Layout

SPARE_BITS = 2
"""A term in one limb may be 4 times as large as the largest number of the total before it.

Every spare bit costs a bit of accuracy. DeepAFL (5 layers, width 256) on digits over 20 clients: scores
differ from plain sums by 290 to 490 times what the order of clients changes with ten spare bits, 1.3 to 2.2
times with two. A total that grows faster travels in two limbs.
"""

MOST_CLIENTS = 64
"""With more, everything travels in two limbs: over 100 clients one limb changes scores by 9 to 13 times what
the order of clients does.
"""

FINEST = 2.0**-40
"""Largest error of a total, relative to its largest number, with which a run may go on."""


def exponent_for(largest: float, clients: int, spare: int | None = None) -> int | None:
    """The exponent for one limb when the total before had `largest` as its largest number; None: two limbs.

    A term may be 4 times as large, and all of them at once. spare: bits for that, 0 where none can be larger.
    """
    if not 0 < largest < math.inf or clients > MOST_CLIENTS:
        return None
    doublings = math.ceil(math.log2(clients)) if clients > 1 else 0
    exponent = HEADROOM_BITS - (SPARE_BITS if spare is None else spare) - doublings - math.frexp(largest)[1]
    return exponent if LEAST_EXPONENT <= exponent <= LARGEST_EXPONENT else None


_SQUARES = {
    "feature": ("gram", "feature_square"),
    "target": ("label_square",),
    "outcome": ("moments",),
    "with_outcome": ("moments",),
    "gradient": ("curvature",),
}
"""Sums of squares beside whose root a sum is measured that may vanish from the first: of centred numbers, or
a gradient where the first coefficients are the last. The root of a curvature is one over a standard error.
"""


@dataclass(eq=False)
class KnownTotals:
    """The sizes of a run's totals, from which exponents and the required accuracy follow.

    additive, recurring: names of arrays that may travel in one limb, declared by the method. An array of a
        run among others has the name of that run before its own.
    describe: what made-up rows look like, by whose answers the shapes of arrays are found.
    given_up: names of those that travel in two from now on, since one has not done for them.
    """

    additive: Collection[str] = ()
    recurring: Collection[str] = ()
    describe: Callable[[], Spec] | None = None
    given_up: set[str] = field(default_factory=set, init=False)
    # By name and shape, the latest size and the largest.
    _sizes: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = field(default_factory=dict, init=False)
    _participant: Participant | None = field(default=None, init=False)

    def note(self) -> list[list[Any]]:
        """The sizes as JSON values."""
        return [[name, list(shape), *sizes] for (name, shape), sizes in self._sizes.items()]

    def recall(self, note: list[list[Any]]) -> None:
        """Take back the sizes of `note`."""
        self._sizes |= {(name, tuple(shape)): (latest, peak) for name, shape, latest, peak in note}

    def exponents(self, clients: int) -> dict[tuple[str, tuple[int, ...]], int]:
        """The exponents for the next request to so many clients."""
        found = {}
        for (name, shape), (latest, _) in self._sizes.items():
            own, exponent = name.rpartition(".")[2], exponent_for(latest, clients)
            begins = any(name.startswith(each) for each in self.recurring if each.endswith("."))
            named = begins or own in self.recurring or name in self.additive or own in self.additive
            if named and name not in self.given_up and exponent is not None:
                found[name, shape] = exponent
        return found

    def bounded(self, sizes: Mapping[str, float], clients: int) -> dict[str, int]:
        """The exponents that follow from bounds on the numbers of every term."""
        # A little more, since clients round, too.
        found = {name: exponent_for(1.001 * size, clients, spare=0) for name, size in sizes.items()}
        return {n: e for n, e in found.items() if e is not None and n not in self.given_up}

    def too_coarse(self, total: Term, layout: Layout, clients: int) -> set[str]:
        """The arrays in one limb whose total has become so small that it must be asked for in two."""
        bounds = layout.error_bounds(clients)
        narrow = {each.name: total.arrays[each.name] for each in layout.fields if each.exponent is not None}
        sizes = {name: np.abs(array).max(initial=0.0) for name, array in narrow.items()}
        return {name for name, size in sizes.items() if 0 < size < bounds[name] / FINEST}

    def check_accuracy(self, total: Term, layout: Layout, clients: int) -> dict[str, float]:
        """The error bounds of a decoded total by array; refused, by name, where one exceeds 2^-40 of its
        size. The sizes of a total that passes are remembered.

        The size is the total's largest number. An array that is not additive may vanish, as a gradient
        does, and is measured by the largest it has been in this run, and beside sums of squares (`_SQUARES`).
        Zeros throughout always pass.
        """
        bounds = layout.error_bounds(clients)
        sizes = {name: float(np.abs(array).max(initial=0.0)) for name, array in total.arrays.items()}
        for name, bound in bounds.items():
            size = sizes[name]
            before, _, own = name.rpartition(".")
            if size and name not in self.additive and own not in self.additive:
                peaks = [  # of any total of this name and shape, of whichever member
                    peak
                    for (known, shape), (_, peak) in self._sizes.items()
                    if shape == total.arrays[name].shape and known.rpartition(".")[2] == own
                ]
                squares = (sizes.get(f"{before}.{s}" if before else s, 0.0) for s in _SQUARES.get(own, ()))
                size = max(0.0, size, *peaks, *(square**0.5 for square in squares))
            if size and bound > FINEST * size:
                raise TermError(
                    f"the total of '{name}' has numbers up to {size:.3g} and is known to {bound:.3g} only, "
                    f"which is more than {FINEST:.1g} of them. Scale the features up, or sum in the open."
                )
        for name, size in sizes.items():
            key = name, total.arrays[name].shape
            self._sizes[key] = size, max(size, self._sizes.get(key, (0.0, 0.0))[1])
        return bounds

    def layout(self, request: Request, chain: Chain) -> Layout:
        """Where each array of an answer to a request stands, in as few limbs as the totals before allow."""
        if self._participant is None:  # with a few rows of every class
            assert self.describe is not None
            spec = self.describe()
            rows = 2 * max(2, spec.outputs)
            features = np.random.default_rng(0).standard_normal((rows, spec.features)).astype(np.float32)
            labels = np.zeros(rows if spec.outputs == 1 else (rows, spec.outputs))
            labels = labels if spec.classes is None else np.resize(spec.classes, rows)
            data = ClientData(features, labels, schema=run_schema(chain))
            self._participant = Participant("made-up rows", data)
        try:
            term, _ = ask(self._participant, request, chain)
        except DataError:  # rows like these cannot be: counts below zero, say. No rows have the same shapes.
            data = self._participant.data
            self._participant = Participant("no rows", data.taking(np.zeros(len(data), dtype=bool)))
            term, _ = ask(self._participant, request, chain)
        own = [name for name in term.arrays if "@" in name]
        if own:
            raise DataError(f"the answers have {own[0]!r}, which is no addend of a sum.")
        clients = len(request.cohort)
        exponents = self.exponents(clients)
        if sizes := request.sizes():
            shapes = TermLayout.of(term).forms
            for name, exponent in self.bounded(sizes, clients).items():
                if name in shapes:
                    exponents[name, shapes[name][0]] = exponent
        return Layout.of(term, exponents)
