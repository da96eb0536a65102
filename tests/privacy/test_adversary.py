"""A server that composes questions of all kinds at random: no combination of its totals is about few rows.

The test keeps which rows every answered sum was over, and in which of them each indicator was set. A total is
a sum over rows; a combination of totals weighs every row by a combination of whether it was in each of them.
So the test reduces the matrix (totals, rows) and looks at the rows that each combination is about.
"""

from __future__ import annotations

import errno
from collections import Counter
from typing import Any

import numpy as np
import pytest
from benchmarks.adversary import composed as everything
from benchmarks.adversary import fewest_rows_of, limits_of

import fedsolve as fs
from fedsolve.federation.folds import FOLDS, Part, RowCells
from fedsolve.federation.messages import Term
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.labels import labels_note
from fedsolve.privacy.census import OFF, CensusStage, Limits
from fedsolve.privacy.disclosure import Disclosure
from fedsolve.privacy.joint_seed import SeedBook
from fedsolve.privacy.policy import Budget
from fedsolve.privacy.ring import Layout

from .setups import take_census

KEY = b"a secret of this site"
FLAGS = (3, 4)


class Listener:
    """Sites in one process, whose server asks; knows which rows every answered sum was over."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.limits, self.run = limits, 0
        count, self.classes = int(rng.integers(3, 6)), np.arange(int(rng.integers(2, 4)))
        shares = rng.dirichlet(np.full(len(self.classes), 0.7), count)
        self.all: list[tuple[Any, Any]] = []
        self.there: list[Any] = []
        for share in shares:
            rows = int(rng.integers(5, 80))
            labels = rng.choice(self.classes, rows, p=share)
            flags = rng.random((rows, 2)) < rng.choice([0.03, 0.2, 0.5], 2)
            self.all.append((np.column_stack([rng.standard_normal((rows, 3)), flags]), labels))
            self.there.append(rng.random(rows) < 0.7)  # others arrive later
        self.names = [f"site {n}" for n in range(count)]
        self.accounts = [Disclosure(limits, KEY + bytes([n])) for n in range(count)]
        self.ready = False
        self.starts = np.cumsum([0, *(len(labels) for _, labels in self.all)])
        self.sums: list[Any] = []  # (rows,) by question: what each row counted
        self.flags: list[Any] = []  # (rows, 2) by question: indicators as they were told
        self.refusals: Counter[str] = Counter()

    def data(self, site: int) -> ClientData:
        features, labels = self.all[site]
        numbers = np.arange(1, len(labels) + 1)  # weights by which this test knows its rows
        return fs.ClientData(features, labels, np.flatnonzero(self.there[site]), numbers)

    def begin(self) -> None:
        """A new run, with a census of everybody: rows came, and some went.

        Some servers show what was counted to some sites only, and begin again.
        """
        self.run, self.ready = self.run + 1, False
        self.held = [self.data(site) for site in range(len(self.all))]
        try:
            if self.rng.random() < 0.3:
                self.show_some()
            take_census(self.accounts, self.held, self.classes, self.names, str(self.run))
            self.ready = True
        except fs.FedsolveError as problem:
            self.refusals[str(problem).split()[0]] += 1

    def show_some(self) -> None:
        """The first stage of a census, shown to some sites and not gone on with."""
        history = self.accounts[0].accounts()[0][0]
        stage = CensusStage(
            "cells", f"broken off {self.run}", history, self.limits, labels_note(self.classes)
        )
        terms = [a.counts(d, stage) for a, d in zip(self.accounts, self.held, strict=True)]
        total = sum(terms[1:], terms[0])
        for account, data in zip(self.accounts, self.held, strict=True):
            if self.rng.random() < 0.5:
                account.admit(data, stage, total, self.names)

    def ask(self) -> None:
        """One question: about all rows or a part of them, sums by class."""
        part = None
        if self.rng.random() < 0.8:
            count = int(3 * 2 ** self.rng.integers(0, 9))
            some = self.rng.random(count) < self.rng.random()
            some[self.rng.integers(count)] = True
            part = Part(tuple(np.flatnonzero(some).tolist()), count)
        counted, flags = np.zeros(self.starts[-1]), np.zeros((self.starts[-1], len(FLAGS)))
        layout = Layout.of(Term({"gram": np.ones((5, 5))}))
        for site, (account, data) in enumerate(zip(self.accounts, self.held, strict=True)):
            try:
                if part is not None:
                    account.check_part(part)
                rows = account.rows(data)
                rows = rows if part is None else part.of(rows)
                parts = 1 if part is None else FOLDS
                account.check_products(5, parts)
                account.tell(Term({"gram": self.rng.random((5, 5))}), layout, 5 * parts)
            except fs.FedsolveError as problem:
                self.refusals[str(problem).split()[0]] += 1
                return
            weights = rows.own_weights
            assert weights is not None
            places = self.starts[site] + weights.astype(int) - 1
            counted[places], flags[places] = 1, rows.features(slice(None))[:, FLAGS]
        for account in self.accounts:
            account.settle(str(self.run))
        self.sums.append(counted)
        self.flags.append(flags)

    def change(self) -> None:
        """Rows arrive at a site, or go; where they may not go, the people there put them back."""
        site = int(self.rng.integers(len(self.all)))
        here = self.there[site]
        if self.rng.random() < 0.7:
            here |= self.rng.random(len(here)) < self.rng.random()
            return
        before, self.there[site] = here, here & (self.rng.random(len(here)) < 0.8)
        try:
            self.accounts[site].rows(self.data(site))
        except fs.DataError:
            self.there[site] = before

    def smallest(self) -> int:
        """The fewest rows that a combination of all answered totals is about: of a class, or with a flag."""
        if not self.sums:
            return 10**6
        labels = np.concatenate([labels for _, labels in self.all])
        sums, flags = np.array(self.sums), np.array(self.flags)
        told = [sums * (labels == label) for label in self.classes]
        told += [flags[:, :, flag] for flag in range(len(FLAGS))]
        return min(fewest_rows_of(each) for each in told)


def composed(seed: int, limits: Limits) -> Listener:
    server = Listener(seed, limits)
    for _ in range(int(server.rng.integers(1, 5))):
        server.begin()
        for _ in range(int(server.rng.integers(1, 6)) if server.ready else 0):
            server.ask()
        server.change()
    return server


@pytest.mark.parametrize("runs", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_combination_of_answers_is_about_few_rows(runs: int) -> None:
    found = [composed(seed, Limits(told=50.0)) for seed in range(runs)]
    assert min(server.smallest() for server in found) >= Limits().fewest_rows
    assert sum(len(server.sums) for server in found) > runs


def test_without_the_rules_there_are_many() -> None:
    found = [composed(seed, OFF).smallest() for seed in range(40)]
    assert sum(size < 10 for size in found) > 30


@pytest.mark.slow
def test_no_combination_of_methods_evaluations_cohorts_and_seeds_is_about_few_rows() -> None:
    """The whole protocol, a few servers of `python -m benchmarks.adversary`."""
    found = [everything(seed, limits_of(seed)) for seed in range(12)]
    assert min(server.smallest() for server in found) >= Limits().fewest_rows
    assert sum(len(server.sums) for server in found) > 30
    answered = sum((server.kinds for server in found), Counter[str]())
    assert {"afl", "statistics", "private"} <= answered.keys()
    assert 0 < max(server.epsilon for server in found) < 8.001
    assert max(len(seeds) for server in found for seeds in server.seeds.values()) == 1
    assert min(everything(seed, OFF).smallest() for seed in range(3)) < 3


def test_a_step_that_takes_rows_by_itself_is_refused() -> None:
    cells = RowCells(np.arange(60) % 2, np.arange(60) // 2 % 3, np.full(60, 3))
    data = fs.ClientData(np.ones((60, 2)), np.arange(60) % 2, cells=cells)
    assert len(data.taking(np.arange(60) // 2 % 3 == 1)) == 20
    with pytest.raises(fs.TermError, match="would split 6 cells"):
        data.taking(np.arange(60) < 30)


def test_the_account_outlives_its_process(tmp_path: Any) -> None:
    server = Listener(3, Limits())
    folders = [tmp_path / name for name in server.names]
    for folder in folders:
        folder.mkdir()
    accounts = [Disclosure(Limits(), KEY, folder) for folder in folders]
    data = [server.data(site) for site in range(len(folders))]
    take_census(accounts, data, server.classes, server.names, "run")
    term = Term({"gram": np.full((2, 2), 0.5)})
    layout = Layout.of(term)
    told = accounts[0].tell(term, layout, 2)
    again = Disclosure(Limits(), KEY, folders[0])
    assert again.accounts() == accounts[0].accounts()
    assert again.tell(term, layout, 2) == told > 0  # a repeat is free
    whole = slice(None)
    assert np.array_equal(again.rows(data[0]).features(whole), accounts[0].rows(data[0]).features(whole))
    assert Participant("a", again.rows(data[0])).data.cells is not None


def test_what_a_full_disk_kept_from_being_written_is_not_known(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer was refused; asked again it would be sent as one that was told before."""
    server = Listener(3, Limits())
    folders = [tmp_path / name for name in server.names]
    accounts = [Disclosure(Limits(), KEY, folder) for folder in folders]
    data = [server.data(site) for site in range(len(folders))]
    take_census(accounts, data, server.classes, server.names, "run")
    site, term = accounts[0], Term({"gram": np.full((2, 2), 0.5)})
    layout, budget, seeds = Layout.of(term), Budget(folders[0], KEY), SeedBook(folders[0])
    refused = [
        lambda: site.tell(term, layout, 2),
        lambda: site.too_large(term.arrays["gram"]),
        lambda: budget.pay(data[0], "answer", 0.1),
        lambda: seeds.enter("drawing", {"about": "it", "number": "00"}),
    ]

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    before = site.told, site._steps
    with monkeypatch.context() as disk:
        disk.setattr("os.fsync", full)
        for ask in refused * 2:
            with pytest.raises(fs.FedsolveError, match="no space left"):
                ask()
    assert (site.told, site._steps) == before
    assert seeds.entry("drawing") is None
    told = site.tell(term, layout, 2)
    assert told > before[0]
    budget.pay(data[0], "answer", 0.1)
    assert Disclosure(Limits(), KEY, folders[0]).told == told
    assert Budget(folders[0], KEY).spent == budget.spent > 0


def test_classes_that_cannot_be_stored_do_not_keep_an_account_off_the_disk(tmp_path: Any) -> None:
    rows = ClientData(np.random.default_rng(0).standard_normal((300, 4)), np.arange(300) % 3)
    site = Disclosure(Limits(), KEY, tmp_path)
    note = {"name": "cells", "run": "r", "history": "", "limits": [10, 1, 2.0], "columns": []}
    stage = CensusStage.from_note({**note, "classes": {"dtype": "O", "values": [0, 1, 2]}}, "r")
    term = site.counts(rows, stage)
    total = Term({name: 3 * array for name, array in term.arrays.items()}, {})
    site.admit(rows, stage, total, ("a", "b", "c"))
    again = Disclosure(Limits(), KEY, tmp_path)
    assert len(again.account.rows["digest"]) == len(site.account.rows["digest"]) > 0
