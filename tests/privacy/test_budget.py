"""Noise in secure sums, the honest minimum, and the account of what rows have cost."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.closedform import private
from fedsolve.federation.messages import Chain, Request
from fedsolve.federation.noisy_sums import composed, epsilon_of, mu_of, release_of
from fedsolve.federation.participant import ClientData, Participant, kind_of
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.census import Limits
from fedsolve.privacy.disclosure import Disclosure
from fedsolve.privacy.ledger import Ledger
from fedsolve.privacy.policy import Budget, PolicyGuard, SitePolicy
from fedsolve.privacy.ring import Layout

from .sites import Sites
from .test_secure import ASK, Failing


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 4000)
    return 2.0 * rng.standard_normal((3, 8))[labels] + rng.standard_normal((4000, 8)), labels


def federation(rows, clients=5):
    return fs.LocalFederation.from_arrays(*rows, np.arange(len(rows[1])) % clients)


@pytest.mark.parametrize("verify", [False, True])
def test_sites_add_the_noise_and_the_model_is_as_good(rows, verify, tmp_path):
    secure = SecureFederation(federation(rows), verify=verify, ledgers=tmp_path)
    model = fs.Private("softmax", epsilon=4.0).fit(secure)
    assert model.score(*rows) > 0.9
    assert model.parameters["noise"] == "sites"
    assert secure.verifies == verify
    assert secure._course.census is None  # which would count rows without noise
    budget = Budget(tmp_path / "client-0", Ledger(tmp_path / "client-0").row_key)
    assert budget.spent == pytest.approx(4.0, abs=1e-6)
    fs.Private("afl", epsilon=1.0).fit(secure)
    both = composed([mu_of(4.0, 1e-5), mu_of(1.0, 1e-5)])
    again = Budget(tmp_path / "client-0", Ledger(tmp_path / "client-0").row_key)
    assert again.spent == pytest.approx(epsilon_of(both, 1e-5), abs=1e-6)
    assert "epsilon spent on these rows" in again.said()


def test_the_noise_of_a_secure_total_is_the_formula_with_and_without_dropouts(rows):
    """513 numbers of one total, noise of all who answered and of nobody else."""
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((400, 512)), rng.integers(0, 2, 400)
    for gone in ([], ["8"]):
        inner = fs.LocalFederation.from_arrays(*wide, np.array([f"{n % 9}" for n in range(400)]))
        carried = Failing(inner, gone, ASK)
        carried._declared = range(2)
        secure = SecureFederation(carried, missing="continue", changing=True)
        run = fs.Private("afl", epsilon=4.0, honest=0.75).start(inner.describe())
        request = run.request(secure.clients)
        total = secure.exchange(request, run.chain)
        assert len(total.cohort) == 9 - len(gone)
        release = release_of(request, run.chain, kind_of(request.kind).releases)
        found = release.measured(total.term, total.noised).arrays["sum"]
        there = [p for p in inner.participants if p.name in total.cohort]
        exact = sum(p.answer(request.starting_at(0, run.chain)).arrays["sum"] for p in there)
        says = release.deviation("sum", 512, 7) * np.sqrt(len(total.cohort) / 7)
        assert (found - exact).std() == pytest.approx(says, rel=4 / np.sqrt(2 * 512))
        assert says >= np.sqrt(2) / release.mu


def test_too_few_honest_sites_open_nothing(rows):
    inner = federation(rows, 9)
    secure = SecureFederation(
        Failing(inner, ["client-7", "client-8"], ASK), missing="continue", changing=True
    )
    with pytest.raises(fs.CohortError, match=r"6 honest sites are in this sum, and .* from 8"):
        fs.Private("afl", epsilon=4.0, honest=1.0).fit(secure)
    colluding = SecureFederation(federation(rows, 9), colluders=3)
    with pytest.raises(fs.CohortError, match=r"6 honest sites .* from 7 on"):
        fs.Private("afl", epsilon=4.0).fit(colluding)


def test_a_slot_gives_the_same_bytes_and_is_paid_for_once(tmp_path):
    def sites():
        made = Sites(3, ledgers=[Ledger(tmp_path / str(n)) for n in range(3)])
        made.run = fs.Private("afl", epsilon=1.0).start(made.federation.describe())
        made.layout = type(made.layout).of(made.term(made.names[0]))
        return made

    first = sites()
    bytes_of = [first.masked("client-0", 0, first.names) for _ in range(2)]
    assert bytes_of[0] == bytes_of[1]
    assert first.clients["client-0"].budget.spent == pytest.approx(epsilon_of(0.1 * mu_of(1.0, 1e-5), 1e-5))
    first.masked("client-0", 1, first.names, step=1)
    assert first.clients["client-0"].budget.spent == pytest.approx(
        epsilon_of(0.1 * np.sqrt(2) * mu_of(1.0, 1e-5), 1e-5)
    )


def test_what_was_paid_for_one_question_pays_for_no_other():
    """A slot whose first question costs little and is never answered, since its layout does not hold it."""
    sites = Sites(3)
    sites.run = fs.Private("afl", epsilon=1.0).start(sites.federation.describe())
    sites.layout, whole = Layout.of(sites.term(sites.names[0])), sites.request
    budget, mu = sites.clients["client-0"].budget, whole().note["mu"]

    def asked(share, layout):
        sites.request = lambda step=0: replace(whole(step), note={"mu": share * mu})
        return sites.masked("client-0", 0, sites.names, layout=layout)

    with pytest.raises(fs.TermError, match="which the layout of this sum has not"):
        asked(1e-3, Layout(()))
    assert asked(1.0, sites.layout)
    assert budget.spent >= epsilon_of(mu, 1e-5)


def test_private_questions_are_no_way_around_the_rules():
    """A run without noise cannot ask what only noise covers."""
    sites = Sites(3)
    chain: Chain = sites.run.chain
    request = Request(private.MEAN, 0, 0, sites.names, {"mu": 0.1}, {}, 1, chain.digest, (*chain.blocks,))
    with pytest.raises(fs.TermError, match="this run is not private"):
        sites.clients["client-0"].participant.answer(request)


# -- the budget ------------------------------------------------------------------------------------


def site(folder, rows, epsilon):
    """A site that sends plain terms, with a budget."""
    made = Participant("north", ClientData(*rows))
    ledger = Ledger(folder)
    policy = SitePolicy(epsilon_total=epsilon)
    budget = Budget(folder, ledger.row_key, policy.epsilon_total, policy.delta_total)
    made.guard = PolicyGuard(policy, budget).check_and_pay
    return made, budget


def train(participant, epsilon, of="softmax"):
    others = [Participant(name, participant.data) for name in ("east", "south")]
    return fs.Private(of, epsilon=epsilon).fit(fs.LocalFederation([participant, *others]))


def test_a_budget_that_is_used_up_refuses_after_restart_and_after_a_backup(rows, tmp_path):
    folder = tmp_path / "ledger"
    north, budget = site(folder, rows, 2.0)
    train(north, 1.0, "afl")
    assert budget.spent == pytest.approx(1.0, abs=1e-6)
    shutil.copytree(folder, tmp_path / "backup")
    train(north, 1.5)
    with pytest.raises(fs.FedsolveError, match=r"rows is used up: epsilon 1.* of 2 is spent"):
        train(north, 1.5)
    spent = budget.spent
    again, kept = site(folder, rows, 2.0)
    assert kept.spent == spent
    with pytest.raises(fs.FedsolveError, match="used up"):
        train(again, 1.5)
    # Other rows beside them change nothing for the old ones; new rows alone have a budget of their own.
    more = np.vstack([rows[0], rows[0][:9] + 9.0]), np.append(rows[1], rows[1][:9])
    with pytest.raises(fs.FedsolveError, match="used up"):
        train(site(folder, more, 2.0)[0], 1.5)
    train(site(folder, (rows[0] + 5.0, rows[1]), 2.0)[0], 1.5)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with pytest.raises(fs.ModelFileError, match="it is an old backup or was removed"):
        site(folder, rows, 2.0)
    shutil.rmtree(folder)
    with pytest.raises(fs.ModelFileError, match="0 entries"):
        site(folder, rows, 2.0)


def test_accounts_in_memory_are_not_written_and_show_no_key(monkeypatch):
    monkeypatch.setattr("fedsolve.container.to_bytes", None)
    budget = Budget(None, b"secret")
    budget.pay(ClientData(np.ones((2, 2)), np.zeros(2)), "answer", 0.1)
    assert budget.spent > 0
    assert "secret" not in f"{budget!r} {Disclosure(Limits(), b'secret')!r}"


def test_with_a_budget_nothing_leaves_without_noise(rows, tmp_path):
    north, _ = site(tmp_path / "ledger", rows, 2.0)
    model = train(north, 1.0)
    alone = fs.LocalFederation([north, *(Participant(name, north.data) for name in ("a", "b"))])
    with pytest.raises(fs.FedsolveError, match="private runs only, and 'afl' has no noise"):
        fs.AFL().fit(alone)
    with pytest.raises(fs.FedsolveError, match="private runs only"):
        alone.evaluate(model)


def test_a_resumed_run_is_counted_once(rows, tmp_path):
    north, budget = site(tmp_path / "ledger", rows, 3.0)
    others = [Participant(name, north.data) for name in ("east", "south")]
    method, path = fs.Private("softmax", epsilon=2.0), tmp_path / "c"

    class Stop(Exception):
        pass

    def stop(record, expected):
        if record.exchange == 4:
            raise Stop

    with pytest.raises(Stop):
        method.fit(fs.LocalFederation([north, *others]), checkpoint=path, follow=stop)
    method.fit(fs.LocalFederation([north, *others]), checkpoint=path, resume=True)
    assert budget.spent == pytest.approx(2.0, abs=1e-6)
