"""A dishonest server that asks small sites whatever it may, at random, for as long as it likes.

`python -m benchmarks.adversary --runs 2000`: each run has three to five sites of a few rows each, in secure
sums, and a server that composes methods, statistics with formulas of its own (thresholds too), noise of any
epsilon, parts of rows, evaluations, importances, cohorts, seeds, new runs, rows that arrive or go, and trips
that reach some sites only. Every other server is at sites with the default limits; at the others, more may be
told (rule 3 would end most of them soon).

Which rows a total is about is not taken from the accounts of the sites: the steps of methods are watched. A
total is a sum over rows, and a combination of totals weighs every row by whether it was in each of them. So
the matrix (totals, rows) is reduced, and the fewest rows that a combination is about are counted, by class
and with a flag set; and of every column of two values that a formula makes, the rows with the rarer one. All
noisy answers about a row must cost `epsilon_most` at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import numpy as np

import fedsolve as fs
from benchmarks.machine import progress
from fedsolve.federation import participant
from fedsolve.federation.client_data import ClientData
from fedsolve.federation.folds import Part
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.census import OFF, Limits
from fedsolve.privacy.joint_seed import about_opening, draw_seed
from fedsolve.statistics import design

FLAGS = (3, 4)


class Watcher:
    """Which rows the steps of methods see: every set that a step is given or takes.

    answers: of each answer its sets: the first numbers of their rows, which no other row has, and the flags.
    """

    def __init__(self) -> None:
        self.answers: list[list[tuple[Any, Any]]] = []
        self.made: list[Any] = []  # of each answer the columns that a formula makes of its rows
        self._here = threading.local()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        kind_of, taking, designed = participant.kind_of, ClientData.taking, design._read

        def watched(kind: str) -> Any:
            def answer(data: ClientData, request: Any, memory: Any) -> Any:
                self._here.sets = []
                self._note(data)
                try:
                    return kind_of(kind).step(data, request, memory)
                finally:
                    self.answers.append(self._here.sets)
                    self._here.sets = None

            return dataclasses.replace(kind_of(kind), step=answer)

        def taken(data: ClientData, chosen: Any) -> ClientData:
            found = taking(data, chosen)
            self._note(found)
            return found

        def made(data: ClientData, chain: Any) -> Any:
            rows = designed(data, chain)
            if len(rows.x) and getattr(self._here, "sets", None) is not None:
                self.made.append(np.column_stack([rows.x, *rows.outcome, rows.weight]))
            return rows

        participant.kind_of, ClientData.taking = watched, taken  # type: ignore[assignment,method-assign]
        design._read = made
        try:
            yield
        finally:
            participant.kind_of, ClientData.taking = kind_of, taking  # type: ignore[method-assign]
            design._read = designed

    def _note(self, data: ClientData) -> None:
        if getattr(self._here, "sets", None) is not None:
            values = data.features(slice(None))
            self._here.sets.append((values[:, 0], values[:, FLAGS]))


class Lossy:
    """An engine that carries letters to some clients only. after: in which trip from now on."""

    def __init__(self, inner: fs.LocalFederation) -> None:
        self.inner, self.lost, self.after = inner, frozenset[str](), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def carry(
        self, channel: str, letters: Mapping[str, bytes], largest: int
    ) -> Iterator[tuple[str, bytes | Exception]]:
        lost, self.after = self.lost if self.after == 0 else frozenset[str](), self.after - 1
        reached = {name: letter for name, letter in letters.items() if name not in lost}
        yield from self.inner.carry(channel, reached, largest)
        yield from ((name, TimeoutError("no answer")) for name in letters.keys() & lost)


class Adversary:
    """One server and its sites. sums, flags: which rows every answered total is about, and their flags."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.rng = rng = np.random.default_rng(seed)
        count, self.classes = int(rng.integers(3, 6)), np.arange(int(rng.integers(2, 4)))
        self.features, labels, owners = [], [], []
        for site, share in enumerate(rng.dirichlet(np.full(len(self.classes), 0.7), count)):
            rows = int(rng.integers(5, 80))
            flags = rng.random((rows, 2)) < rng.choice([0.03, 0.2, 0.5], 2)
            numbers = rng.standard_normal((rows, 3))
            numbers[:, 1] = np.exp(numbers[:, 1])  # which may be times
            self.features.append(np.column_stack([numbers, flags]))
            labels.append(rng.choice(self.classes, rows, p=share))
            owners.append(np.full(rows, site))
        self.rows, self.labels = np.concatenate(self.features), np.concatenate(labels)
        self.place = {value: row for row, value in enumerate(self.rows[:, 0].tolist())}
        inner = fs.LocalFederation.from_arrays(
            self.rows, self.labels, np.concatenate(owners), classes=self.classes, workers=1
        )
        self.inner, self.engine, self.watcher = inner, Lossy(inner), Watcher()
        self.wholes = [one.data for one in inner.participants]
        for one, whole in zip(inner.participants, self.wholes, strict=True):
            one.data = whole.taking(rng.random(len(whole)) < 0.7)  # others arrive later
        engine: Any = self.engine
        self.secure = SecureFederation(engine, limits=limits, verify=bool(rng.random() < 0.3))
        self.secure._attend = self._attend  # type: ignore[method-assign]
        self.secure._open, self.opened = self._opens, False  # type: ignore[method-assign]
        self.models: list[Any] = []
        self.sums: list[Any] = []
        self.flags: list[Any] = []
        self.seeds: dict[str, set[int]] = {}
        self.refusals: Counter[str] = Counter()
        self.rarest, self.kinds = 10**6, Counter[str]()
        self._exchange, self.secure.exchange = self.secure.exchange, self._heard  # type: ignore[method-assign]

    def _attend(self) -> None:
        """As for a federation of this process, which the engine around it hides."""
        engine, self.secure.federation = self.secure.federation, self.inner
        SecureFederation._attend(self.secure)
        self.secure.federation = engine

    def _heard(self, request: Any, chain: Any) -> Any:
        """Carry a question, and keep what its total is about, if it can be opened: by whomever."""
        self.watcher.answers, self.watcher.made, self.opened = [], [], False
        try:
            total = self._exchange(request, chain)
            self.kinds[request.kind.partition("-")[0]] += 1
            return total
        finally:
            if self.opened and participant.kind_of(request.kind).releases is None:
                self._keep()

    def _opens(self, pending: Any, asked: Any, witnessed: bool) -> Any:
        try:
            return SecureFederation._open(self.secure, pending, asked, witnessed)
        finally:
            answered = any(side_by_side(self.watcher.answers, set(self.place)))  # this is not a census
            self.opened = self.opened or (answered and len(pending.secrets) == len(pending.question.cohort))

    @property
    def epsilon(self) -> float:
        """What the rows have cost that have cost most."""
        return max((client.budget.spent for client in self.secure._attending.values()), default=0.0)

    def _keep(self) -> None:
        made = [columns for columns in self.watcher.made if len(columns)]
        if len({columns.shape[1] for columns in made}) == 1:
            for column in np.concatenate(made).T:
                counts = np.unique(column, return_counts=True)[1]
                self.rarest = min(self.rarest, int(counts.min()) if len(counts) == 2 else 10**6)
        for sets in side_by_side(self.watcher.answers, set(self.place)):
            counted, flags = np.zeros(len(self.rows)), np.zeros((len(self.rows), len(FLAGS)))
            for values, shown in sets:
                there = [self.place[value] for value in values.tolist()]
                counted[there], flags[there] = 1, shown
            self.sums.append(counted)
            self.flags.append(flags)

    # -- what a server may do ----------------------------------------------------------------------

    def part(self) -> Part:
        count = int(3 * 2 ** self.rng.integers(0, 7))
        some = self.rng.random(count) < self.rng.random()
        some[self.rng.integers(count)] = True
        return Part(tuple(np.flatnonzero(some).tolist()), count)

    def train(self) -> None:
        """A method of ours, of all rows or of a part, with a ridge of its own."""
        ridge = float(self.rng.choice([0.5, 1.0, 2.0]))
        methods: list[Callable[[], Any]] = [
            lambda: fs.AFL(ridge=ridge),
            lambda: fs.AFL(ridge="auto"),
            lambda: fs.Softmax(ridge=ridge),
            lambda: fs.DeepAFL(layers=1, width=5, ridge=ridge, seed=int(self.rng.integers(3))),
            lambda: fs.KernelAFL(landmarks=4, ridge=ridge),
        ]
        method = methods[int(self.rng.choice(5, p=[0.4, 0.2, 0.15, 0.15, 0.1]))]()
        part = self.part() if self.rng.random() < 0.6 else None
        self.models.append(fs.Recipe(method, part=part).fit(self.secure))

    def formula(self) -> None:
        """A statistic of columns, flags, their products, and numbers that the server chooses."""
        cut = float(self.rng.normal())
        words = ["x0", "x2", "x3", "x4", "x3:x4", "x0:x3", f"I(x0 > {cut:.6f})", f"I(x2 * (x0 < {cut:.6f}))"]
        chances = np.array([4, 4, 3, 3, 1, 1, 1, 1]) / 18
        some = " + ".join(self.rng.choice(words, int(self.rng.integers(1, 4)), replace=False, p=chances))
        weights = f"I(x0 > {cut:.6f})" if self.rng.random() < 0.2 else None
        event = str(self.rng.choice(["x3", "x4", f"I(x0 > {cut:.6f})"]))
        statistics: list[Callable[[], Any]] = [
            lambda: fs.GLM(f"x1 ~ {some}", family="gaussian", weights=weights),
            lambda: fs.GLM(f"x3 ~ {some}", family="binomial"),
            lambda: fs.Cox(f"Surv(x1, {event}) ~ {some}"),
            lambda: fs.KaplanMeier(time="x1", event=event),
            fs.Describe,
        ]
        statistics[int(self.rng.integers(len(statistics)))]().fit(self.secure)

    def noise(self) -> None:
        """A private method, with whatever epsilon and delta the server likes."""
        epsilon, delta = float(self.rng.choice([0.5, 4.0, 1e3, 1e7])), float(self.rng.choice([1e-5, 0.5]))
        fs.Private(str(self.rng.choice(["afl", "softmax"])), epsilon=epsilon, delta=delta).fit(self.secure)

    def craft(self) -> None:
        """AFL's own question with a note that is not its own, or to some of the sites."""
        run = fs.AFL(ridge=float(self.rng.choice([0.5, 1.0]))).start(self.secure.describe())
        request = run.request(self.secure.clients)
        assert request is not None
        asked = dataclasses.replace(request, note={**request.note, **self.part().note()})
        if self.rng.random() < 0.4:
            some = tuple(name for name in asked.cohort if self.rng.random() < 0.7)
            asked = dataclasses.replace(asked, cohort=some or asked.cohort)
        self.secure.exchange(asked, run.chain)

    def evaluate(self) -> None:
        if self.models:
            model = self.models[int(self.rng.integers(len(self.models)))]
            fs.evaluate(self.secure, model, detailed=bool(self.rng.random() < 0.5))

    def importances(self) -> None:
        if self.models:
            fs.feature_importances(self.secure, self.models[-1])

    def draw(self) -> None:
        """A seed for a run, which sites draw once."""
        method = fs.DeepAFL(layers=1, width=int(self.rng.integers(3, 5)))
        about = about_opening(method.start(self.secure.describe()).chain.opening)
        self.secure._attend()
        seed = draw_seed(self.secure.engine, self.secure.clients, about)
        self.seeds.setdefault(f"{about}{self.secure.clients}", set()).add(seed)

    def change(self) -> None:
        """Rows arrive at a site, or go; where they may not go, the people there put them back."""
        site = int(self.rng.integers(len(self.wholes)))
        one, whole = self.inner.participants[site], self.wholes[site]
        before, here = (
            one.data,
            np.isin(whole.features(slice(None))[:, 0], one.data.features(slice(None))[:, 0]),
        )
        more = self.rng.random() < 0.7
        new = (
            here | (self.rng.random(len(here)) < self.rng.random())
            if more
            else here & (self.rng.random(len(here)) < 0.9)
        )
        one.data = whole.taking(new)
        one.forget()
        self.secure.plan(1)
        try:
            fs.AFL(ridge=1.0).fit(self.secure)
        except fs.FedsolveError as problem:
            self._refused(problem)
            one.data = before if not more else one.data
            one.forget()
            self.secure.plan(1)

    def lose(self) -> None:
        """One of the next trips reaches some sites only; the run breaks off, and another begins."""
        self.engine.lost = frozenset(name for name in self.inner.clients if self.rng.random() < 0.5)
        self.engine.after = int(self.rng.integers(0, 9))
        try:
            fs.AFL(ridge=3.0).fit(self.secure)
        finally:
            self.engine.lost = frozenset()
            self.secure.plan(1)

    def _refused(self, problem: Exception) -> None:
        self.refusals[str(problem)[:60]] += 1

    def act(self, times: int) -> None:
        acts = [self.train, self.craft, self.evaluate, self.importances, self.draw, self.change, self.lose]
        acts += [self.formula, self.noise]
        with self.watcher.watching():
            for _ in range(times):
                try:
                    acts[int(self.rng.choice(9, p=[0.2, 0.2, 0.08, 0.04, 0.04, 0.14, 0.06, 0.18, 0.06]))]()
                except fs.FedsolveError as problem:
                    self._refused(problem)

    def smallest(self) -> int:
        """The fewest rows that a combination of all answered totals is about: of a class, or with a flag."""
        if not self.sums:
            return 10**6
        sums, flags = np.array(self.sums), np.array(self.flags)
        told = [sums * (self.labels == label) for label in self.classes]
        told += [flags[:, :, flag] for flag in range(len(FLAGS))]
        return min(self.rarest, *(fewest_rows_of(each) for each in told))


def side_by_side(answers: list[Any], known: set[float]) -> Iterator[list[Any]]:
    """The first sets of all sites, the second sets and so on; those of rows that nobody owns are left out."""
    own = [sets for sets in answers if sets and all(value in known for value in sets[0][0].tolist())]
    for place in range(max((len(sets) for sets in own), default=0)):
        yield [sets[place] for sets in own if place < len(sets)]


def fewest_rows_of(totals: Any) -> int:
    """The fewest rows that a combination of these totals (totals, rows) is about, other than none.

    Rows with equal columns are always weighed alike; the reduced matrix shows a combination for each pivot.
    """
    columns, sizes = np.unique(totals, axis=1, return_counts=True)
    matrix, fewest, row = columns.astype(float), 10**6, 0
    for place in range(matrix.shape[1]):
        pivot = row + int(np.argmax(np.abs(matrix[row:, place]))) if row < len(matrix) else row
        if row == len(matrix) or abs(matrix[pivot, place]) < 1e-9:
            continue
        matrix[[row, pivot]] = matrix[[pivot, row]]
        matrix[row] /= matrix[row, place]
        others = np.arange(len(matrix)) != row
        matrix[others] -= np.outer(matrix[others, place], matrix[row])
        row += 1
    for combination in matrix[:row]:
        fewest = min(fewest, int(sizes[np.abs(combination) > 1e-9].sum()))
    there = np.any(columns != 0, axis=0)
    return min(fewest, int(sizes[there].min())) if there.any() else 10**6


def limits_of(seed: int) -> Limits:
    """The limits of the sites that a server of this seed asks."""
    return Limits() if seed % 2 else Limits(told=50.0)


def composed(seed: int, limits: Limits) -> Adversary:
    """What a server of this seed has heard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = Adversary(seed, limits)
        server.act(int(server.rng.integers(4, 12)))
    return server


@click.command()
@click.option("--runs", default=2000, help="Servers to try, each with sites of its own.")
@click.option("--first", default=0, help="Seed of the first one.")
@click.option("--off", is_flag=True, help="Without the disclosure rules.")
def main(runs: int, first: int, off: bool) -> None:
    """The fewest rows that any combination of answered totals is about."""
    started, epsilon = time.perf_counter(), 0.0
    fewest, totals, refusals, seeds = 10**6, 0, Counter[str](), 0
    for seed in range(first, first + runs):
        server = composed(seed, OFF if off else limits_of(seed))
        epsilon = max(epsilon, server.epsilon)
        smallest = server.smallest()
        if smallest < min(fewest, Limits().fewest_rows):
            progress(f"seed {seed}: {smallest} rows")
        fewest, totals = min(fewest, smallest), totals + len(server.sums)
        refusals += server.refusals
        seeds = max([seeds, *map(len, server.seeds.values())])
    click.echo(
        f"{runs:,} servers, {totals:,} totals answered, {sum(refusals.values()):,} questions refused, "
        f"{time.perf_counter() - started:.0f} s: no combination is about fewer than {fewest} rows; at most "
        f"{seeds} seed for each method and cohort; epsilon {epsilon:.2f} at most"
    )
    for why, times in refusals.most_common(12):
        click.echo(f"  {times:6,} {why}")


if __name__ == "__main__":
    main()
