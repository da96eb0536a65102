"""What a site's answers give away, measured on its own rows before anything is sent.

    rows        rank of the Gram matrix, classes with few rows, numbers told for each number held
    leverage    x' G^-1 x of every row: near 1, the sums are about that row alone
    members     how well rows in the sums are told from rows that were held out (area under the curve)
    canaries    rows made up here, each put in or left out by a coin; who knows all other rows guesses which.
                How many of the surest guesses are right bounds epsilon from below (Steinke, Nasr and
                Jagielski, "Privacy auditing with one (1) training run", 2023)
    noise       the noise that was added, as a share of what the account says

Three views: "plain", a server that sees this site's sums; "secure", one that sees the total over all sites,
the others made up by drawing from these rows; "private", the total with noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom
from sklearn.metrics import roc_auc_score

from fedsolve.arrays import Array
from fedsolve.errors import DataError
from fedsolve.federation import participant
from fedsolve.federation.client_data import ClientData
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Request, Term, Total
from fedsolve.federation.method import Method, Run
from fedsolve.federation.noisy_sums import NoisyAnswer, flat_numbers, release_of
from fedsolve.federation.participant import Participant, kind_of

FEW, HIGH, CONFIDENCE = 10, 0.5, 0.95
_MEMBERS, _CANARIES, _NUMBERS = 200, 400, 300
_WEAK = 0.8  # share of the stated noise below which it is called too little

Mechanism = Callable[[NoisyAnswer, Term], Term]
"""Adds noise to a term: gives it in steps of its grid."""

Ask = Callable[[ClientData], Term]
"""The answer that these rows give to a question."""


@dataclass(frozen=True)
class Leak:
    """One line of an audit. harm: why it matters; empty where it does not."""

    view: str
    name: str
    value: Any
    text: str
    harm: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def audit(
    data: ClientData,
    spec: Spec,
    plain: Method[Any],
    private: Method[Any] | None = None,
    *,
    sites: int = 3,
    seed: int = 0,
    mechanism: Mechanism = NoisyAnswer.noised,
) -> list[Leak]:
    """All findings. plain, private: what would be trained without and with noise. sites: in a secure sum."""
    rng = np.random.default_rng(seed)
    data = _filled(data)
    found = _about_rows(data, spec, plain)
    views = {"plain": (plain, 1), "secure": (plain, sites)}
    if private is not None:
        views["private"] = private, sites
    for view, (method, many) in views.items():
        found += _Attack(view, data, spec, method, many, rng, mechanism).findings()
    return found


def lower_bound(guesses: int, right: int, canaries: int, delta: float) -> float:
    """Epsilon that must be exceeded, with 95 % confidence, by what so many right guesses came from."""

    def chance(epsilon: float) -> float:
        p = 1 / (1 + math.exp(-epsilon))
        tail = binom.sf(np.arange(right, -1, -1) - 1, guesses, p)  # of `right` and more
        slack = max(((tail[i] - tail[0]) / i for i in range(1, right + 1)), default=0.0)
        return float(tail[0] + 2 * canaries * delta * slack)

    if chance(0.0) > 1 - CONFIDENCE:
        return 0.0
    return float(brentq(lambda epsilon: chance(epsilon) - (1 - CONFIDENCE), 0.0, 64.0))


def _filled(data: ClientData) -> ClientData:
    """The rows with the means of columns for what is missing, as a run fills them."""
    rows = data.features(slice(None))
    missing = np.isnan(rows)
    if not missing.any():
        return data
    if data.schema is None:
        raise DataError(
            "rows with missing values cannot be audited without a schema. Fill them, or leave those rows out."
        )
    if (empty := missing.all(axis=0)).any():
        raise DataError(f"features {np.flatnonzero(empty).tolist()} have no value at all. Leave them out.")
    rows[missing] = np.broadcast_to(np.nanmean(rows, axis=0), rows.shape)[missing]
    return ClientData(rows, data.own_labels, weights=data.own_weights, schema=data.schema)


def _about_rows(data: ClientData, spec: Spec, method: Method[Any]) -> list[Leak]:
    rows = data.features(slice(None))
    rank = int(np.linalg.matrix_rank(rows))
    few = rows.shape[0] < 2 * rows.shape[1]
    said = f"{len(rows):,} rows of {rows.shape[1]} columns, rank {rank}"
    found = [Leak("rows", "rank", rank, said, "rows can be computed from these sums" if few else "")]
    if spec.classes is not None:
        labels, counts = np.unique(data.own_labels, return_counts=True)
        small = [str(label) for label, count in zip(labels, counts, strict=True) if count < FEW]
        said = f"{len(small)} of {len(labels)} classes have fewer than {FEW} rows"
        harm = f"sums of class {', '.join(small[:5])} are about few rows" if small else ""
        found.append(Leak("rows", "small cells", small, said, harm))
    run = method.start(spec)
    term = _answer(run, run.request(("site",)), data)
    told = sum(flat_numbers(a, n in term.symmetric).size for n, a in term.arrays.items()) / max(1, rows.size)
    harm = "more than half as many numbers as the rows hold" if told > 0.5 else ""
    found.append(Leak("rows", "told", told, f"the first answer tells {told:.1%} of the numbers held", harm))
    return found


def _answer(run: Run[Any], request: Request | None, data: ClientData) -> Term:
    assert request is not None
    term, _ = participant.ask(Participant("site", data), request, run.chain)
    term = Term({n: np.array(a) for n, a in term.on_host().arrays.items()}, term.counts, term.symmetric)
    term.mirror()
    return term


@dataclass
class _Attack:
    """A server's guesses about rows, in one view."""

    view: str
    data: ClientData
    spec: Spec
    method: Method[Any]
    sites: int
    rng: np.random.Generator
    mechanism: Mechanism

    def __post_init__(self) -> None:
        rows, labels = self.data.features(slice(None)), self.data.own_labels
        order = self.rng.permutation(len(rows))
        half = max(1, len(rows) // 2)
        others = self.rng.integers(0, len(rows), (self.sites - 1) * half)
        spread = rows.std(axis=0, keepdims=True)
        drawn = rows[others] + 0.3 * spread * self.rng.standard_normal((len(others), rows.shape[1]))
        self.inside, self.outside = order[:half], order[half:]
        self.base = (np.vstack([rows[self.inside], drawn]), np.append(labels[self.inside], labels[others]))
        self.rows, self.labels = rows, labels

    def findings(self) -> list[Leak]:
        found = self._leverage_and_members() + self._canaries()
        return found + (self._noise() if self.view == "private" else [])

    def _data(self, rows: Array, labels: Array) -> ClientData:
        return ClientData(rows, labels, schema=self.data.schema)

    def _walk(self, data: ClientData) -> Iterator[tuple[Ask, NoisyAnswer | None, Term, Mapping[str, float]]]:
        """Each question of a run, its noise, what a server sees of the answer, in the units of the method,
        and the deviation of the noise; the run goes on with what is seen.
        """
        run = self.method.start(self.spec)
        while (request := run.request(("site",))) is not None:
            ask = partial(_answer, run, request)
            release, term = release_of(request, run.chain, kind_of(request.kind).releases), ask(data)
            if release is None:  # without noise the first answer is enough
                yield ask, None, term, dict.fromkeys(term.arrays, 0.0)
                return
            sizes = {n: flat_numbers(a, n in term.symmetric).size for n, a in term.arrays.items()}
            seen = release.measured(self.mechanism(release, term))
            yield ask, release, seen, {name: release.deviation(name, size) for name, size in sizes.items()}
            try:
                run.absorb(Total(release.in_steps(seen), ("site",), noised=1))
            except DataError:  # too few rows for so much noise: then nothing more is asked
                return

    def _leverage_and_members(self) -> list[Leak]:
        for ask, _, seen, noise in self._walk(self._data(*self.base)):
            if "gram" not in seen.arrays:
                continue
            gram = seen.arrays["gram"]
            values, vectors = np.linalg.eigh(gram)
            ridge = noise["gram"] * math.sqrt(2 * len(gram)) / 2 + 1e-9 * float(values[-1])
            inverse = (vectors / (np.maximum(values, 0.0) + ridge)) @ vectors.T
            scores = [
                np.array([np.sum(inverse * ask(self._one(row)).arrays["gram"]) for row in some[:_MEMBERS]])
                for some in (self.inside, self.outside)
            ]
            high = int((scores[0] > HIGH).sum())
            said = f"highest leverage {scores[0].max():.2f}; {high} of {len(scores[0])} rows above {HIGH}"
            harm = "some rows are nearly alone in the sums" if high and self.view != "private" else ""
            found = [Leak(self.view, "leverage", float(scores[0].max()), said, harm)]
            outside = np.repeat([0, 1], [len(some) for some in scores])  # with the larger leverage
            auc = float(roc_auc_score(outside, np.concatenate(scores)))
            said = f"members told from rows held out: AUC {auc:.2f} (0.5 is guessing)"
            harm = "who is in the rows can be told" if auc > 0.65 else ""
            return [*found, Leak(self.view, "membership AUC", auc, said, harm)]
        return []

    def _one(self, place: int) -> ClientData:
        return self._data(self.rows[place : place + 1], self.labels[place : place + 1])

    def _canaries(self) -> list[Leak]:
        """Guess which canaries are in, by how far the sums moved towards each."""
        # At right angles to each other, and as long as other rows are.
        width, size = self.rows.shape[1], float(np.sqrt((self.rows**2).sum(axis=1).mean()))
        rows = size * np.linalg.qr(self.rng.standard_normal((width, width)))[0].T[:_CANARIES]
        labels = self.rng.choice(self.labels, len(rows))
        inside = self.rng.random(len(rows)) < 0.5
        base = self._data(*self.base)
        taken = self._data(np.vstack([self.base[0], rows[inside]]), np.append(self.base[1], labels[inside]))
        scores = np.zeros(len(rows))
        for ask, _, seen, noise in self._walk(taken):
            known = ask(base)
            alone = [ask(self._data(rows[k : k + 1], labels[k : k + 1])) for k in range(len(rows))]
            for name in seen.arrays:
                symmetric = name in seen.symmetric
                own = np.array([flat_numbers(term.arrays[name], symmetric) for term in alone])
                moved = flat_numbers(seen.arrays[name] - known.arrays[name], symmetric) - own.sum(axis=0) / 2
                scores += (own @ moved) / (noise[name] ** 2 or 1.0)
        surest = np.argsort(scores)
        count = max(1, len(rows) // 4)
        right = int((~inside[surest[:count]]).sum() + inside[surest[-count:]].sum())
        delta = getattr(self.method, "delta", 0.0)
        bound = lower_bound(2 * count, right, len(rows), delta)
        said = f"{right} of {2 * count} canaries guessed rightly: epsilon is above {bound:.2f}"
        stated = getattr(self.method, "epsilon", math.inf)
        harm = f"more than the {stated:g} that is stated" if bound > stated else ""
        if self.view != "private" and bound > 1:
            harm = "no noise hides a row in these sums"
        return [Leak(self.view, "epsilon above", bound, said, harm)]

    def _noise(self) -> list[Leak]:
        """Measure the noise of every array that leaves, against what the account says."""
        shares: dict[str, float] = {}
        base = self._data(*self.base)
        for ask, release, _, noise in self._walk(base):
            assert release is not None
            exact = ask(base)
            moved: dict[str, Array] = {name: np.zeros(0) for name in exact.arrays}
            while min(map(len, moved.values())) < _NUMBERS:
                seen = release.measured(self.mechanism(release, deepcopy(exact))).arrays
                for name, array in exact.arrays.items():
                    more = flat_numbers(seen[name] - array, name in exact.symmetric)
                    moved[name] = np.append(moved[name], more)
            for name, numbers in moved.items():
                share = float(np.sqrt(np.mean(numbers**2)) / noise[name])
                shares[name] = min(share, shares.get(name, math.inf))
        weak = {name: share for name, share in shares.items() if share < _WEAK}
        said = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        harm = f"too little noise on {', '.join(weak)}" if weak else ""
        return [Leak("private", "noise", shares, f"noise as a share of what is stated: {said}", harm)]


def told(findings: Sequence[Leak]) -> str:
    """The findings as text, what does harm marked."""
    return "\n".join(f"{one.view:<8} {one.text}{one.harm and f'  ! {one.harm}'}" for one in findings)
