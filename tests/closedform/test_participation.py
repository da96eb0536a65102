"""Cohorts that change: every W_t and Omega_{t+1} equals the textbook's over its own cohort."""

from __future__ import annotations

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.messages import Needs
from fedsolve.federation.recipe import exchanges
from tests.conftest import Dataset
from tests.oracle import DeepOracle

TOLERANCE = 1e-9
PLANS = ("textbook", "lean", "single")
CLIENTS, LAYERS, WIDTH = 10, 6, 48


@pytest.fixture(scope="module")
def data(digits) -> Dataset:
    return digits.head(600)


@pytest.fixture(scope="module")
def owners(data) -> np.ndarray:
    return fs.partition.dirichlet(data.labels, CLIENTS, alpha=0.3, seed=1, min_size=5)


class Flaky(fs.Participant):
    """A participant that fails in some exchanges."""

    fails_in: tuple[int, ...] = ()

    def answer(self, request, workspace=None):
        if request.exchange in self.fails_in:
            raise OSError("the disk is away")
        return super().answer(request, workspace)


def participants(data: Dataset, owners: np.ndarray) -> list[Flaky]:
    return [
        Flaky(f"silo-{client}", fs.ClientData(data.features, data.labels, np.flatnonzero(owners == client)))
        for client in range(CLIENTS)
    ]


def federate(members: list[Flaky], **options) -> fs.LocalFederation:
    return fs.LocalFederation(members, classes=list(range(10)), **options)


def method(exchange: str, **options) -> fs.DeepAFL:
    return fs.DeepAFL(**{"layers": LAYERS, "width": WIDTH, "exchange": exchange, **options})


def cohorts_of(model) -> dict[str, tuple[str, ...]]:
    """Which cohort each W_t and Omega_t was solved over; each is solved exactly once."""
    found = {}
    for record in model.history:
        for name in record.solved:
            assert name not in found
            found[name] = record.cohort
    wanted = {f"W{t}" for t in range(LAYERS + 1)} | {f"Omega{t}" for t in range(1, LAYERS + 1)}
    assert found.keys() == wanted
    return found


def assert_textbook(model, data: Dataset, owners: np.ndarray, **options) -> None:
    """Equal to the textbook in which every quantity is computed over the rows of its cohort."""
    cohorts = cohorts_of(model)

    def rows(name: str) -> np.ndarray:
        return np.isin(owners, [int(client.removeprefix("silo-")) for client in cohorts[name]])

    expected = DeepOracle(LAYERS, WIDTH, **options).fit(
        data.features,
        data.targets,
        classifier_rows=[rows(f"W{t}") for t in range(LAYERS + 1)],
        block_rows=[rows(f"Omega{t + 1}") for t in range(LAYERS)],
    )
    assert expected.largest_difference(model.classifiers, [b.omega for b in model.blocks]) <= TOLERANCE


def same_bits(first, second) -> bool:
    mine, theirs = first.contents()[0], second.contents()[0]
    return mine.keys() == theirs.keys() and all(mine[n].tobytes() == theirs[n].tobytes() for n in mine)


# -- everybody, and a share of everybody -----------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "layers", "count"),
    [
        ("textbook", 6, 13),
        ("lean", 6, 13),
        ("single", 6, 6),
        ("textbook", 0, 1),
        ("lean", 0, 1),
        ("single", 0, 1),
        ("single", 1, 1),
        ("auto", 6, 13),
    ],
)
def test_number_of_exchanges(data, owners, exchange, layers, count):
    run = method(exchange, layers=layers).start(federate(participants(data, owners)).describe())
    model = method(exchange, layers=layers).fit(federate(participants(data, owners)))
    assert len(model.history) == run.exchanges == count
    assert [record.exchange for record in model.history] == list(range(count))


@pytest.mark.parametrize("consistent", [True, False])
@pytest.mark.parametrize("exchange", PLANS)
def test_partial_participation(data, owners, exchange, consistent):
    federation = federate(participants(data, owners))
    model = method(exchange, participation=0.4, consistent=consistent).fit(federation)
    assert_textbook(model, data, owners)
    cohorts = cohorts_of(model)
    assert all(len(cohort) == 4 for cohort in cohorts.values())
    together = [cohorts[f"W{t}"] == cohorts[f"Omega{t + 1}"] for t in range(LAYERS)]
    assert all(together) if consistent else not any(together)
    assert len({cohorts[f"W{t}"] for t in range(LAYERS + 1)}) > LAYERS // 2


@pytest.mark.parametrize("consistent", [True, False])
def test_the_seed_draws_the_same_cohorts_for_every_plan(data, owners, consistent):
    drawn = [
        cohorts_of(
            method(exchange, participation=0.5, consistent=consistent, seed=seed).fit(
                federate(participants(data, owners))
            )
        )
        for exchange, seed in [("textbook", 0), ("lean", 0), ("single", 0), ("lean", 1)]
    ]
    assert drawn[0] == drawn[1] == drawn[2] != drawn[3]


@pytest.mark.parametrize(
    ("exchange", "consistent", "count"),
    [
        ("textbook", True, 2 * LAYERS + 1),
        ("lean", True, 2 * LAYERS + 1),
        ("single", True, LAYERS + 1),
        ("textbook", False, 2 * LAYERS + 1),
        ("lean", False, 2 * LAYERS + 1),
        ("single", False, 2 * LAYERS + 1),
    ],
)
def test_number_of_exchanges_with_partial_participation(data, owners, exchange, consistent, count):
    federation = federate(participants(data, owners))
    partial = method(exchange, participation=0.4, consistent=consistent)
    assert len(partial.fit(federation).history) == partial.start(federation.describe()).exchanges == count


def test_partial_participation_with_initial_block_input(data, owners):
    for exchange in PLANS:
        partial = method(exchange, participation=0.6, block_input="initial", consistent=False)
        model = partial.fit(federate(participants(data, owners)))
        assert_textbook(model, data, owners, block_input="initial")


# -- one participant fails -------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", PLANS)
@pytest.mark.parametrize("failing", [(0,), (1,), (2,), (3,), (4,), (5,), (2, 3), (1, 4)], ids=str)
def test_a_participant_that_fails_for_a_while(data, owners, exchange, failing):
    members = participants(data, owners)
    members[4].fails_in = failing
    model = method(exchange).fit(federate(members, missing="continue"))
    for record in model.history:
        away = record.exchange in failing
        assert ("silo-4" in record.cohort) != away
        assert record.missing == ({"silo-4": "OSError: the disk is away"} if away else {})
    assert_textbook(model, data, owners)


@pytest.mark.parametrize("exchange", PLANS)
def test_several_participants_fail_at_different_times(data, owners, exchange):
    members = participants(data, owners)
    for index in range(1, CLIENTS):
        members[index].fails_in = tuple(e for e in range(40) if (e * 7 + index * 3) % 5 == 0)
    model = method(exchange).fit(federate(members, missing="continue", workers=3))
    assert len({record.cohort for record in model.history}) > 2
    assert_textbook(model, data, owners)


@pytest.mark.parametrize("failing", [(1,), (2,), (3,)], ids=str)
def test_what_a_failure_costs_the_lean_plan(data, owners, failing):
    """A failed step is asked again as G and H; a block needs nothing more than those present.

    Exchange 1 and 3 ask for blocks, 2 for a step. A step solves nothing when someone is missing.
    """
    members = participants(data, owners)
    members[0].fails_in = failing
    model = method("lean").fit(federate(members, missing="continue"))
    assert len(model.history) == 2 * LAYERS + 1 + (failing == (2,))


@pytest.mark.parametrize("exchange", PLANS)
def test_a_failure_stops_the_run_by_default(data, owners, exchange):
    members = participants(data, owners)
    members[7].fails_in = (2,)
    with pytest.raises(fs.CohortError, match=r"'silo-7' failed in exchange 2.*the disk is away"):
        method(exchange).fit(federate(members))


def test_too_few_answers_stop_the_run(data, owners):
    members = participants(data, owners)
    for member in members[:3]:
        member.fails_in = (1,)
    enough = federate(members, missing="continue", min_clients=7)
    assert len(method("lean").fit(enough).history[1].cohort) == 7
    members = participants(data, owners)
    for member in members[:3]:
        member.fails_in = (1,)
    with pytest.raises(fs.CohortError, match=r"exchange 1.*7 of 10 participants answered, at least 8 needed"):
        method("lean").fit(federate(members, missing="continue", min_clients=8))


def test_nobody_answers(data, owners):
    members = participants(data, owners)
    for member in members:
        member.fails_in = (1,)
    with pytest.raises(fs.CohortError, match="0 of 10 participants answered"):
        method("single").fit(federate(members, missing="continue"))


# -- joining and leaving ---------------------------------------------------------------------------


def train(exchange: str, federation: fs.LocalFederation, changes) -> fs.Model:
    """Exchange by exchange; `changes` maps what an exchange has just solved to a function to call."""
    run = fs.Recipe(method(exchange)).start(federation.describe())
    for record in exchanges(run, federation):
        for solved, change in changes.items():
            if solved in record.solved:
                change(federation)
    return run.model()


@pytest.mark.parametrize("moment", ["W2", "Omega3", "W3", "Omega4", f"Omega{LAYERS}"])
@pytest.mark.parametrize("exchange", PLANS)
def test_a_participant_joins(data, owners, exchange, moment):
    members = participants(data, owners)
    federation = federate(members[:-1])
    model = train(exchange, federation, {moment: lambda f: f.add(members[-1])})
    last = next(record.exchange for record in model.history if moment in record.solved)
    for record in model.history:
        assert ("silo-9" in record.cohort) == (record.exchange > last)
    assert_textbook(model, data, owners)


@pytest.mark.parametrize("exchange", PLANS)
def test_what_a_late_participant_is_sent_is_counted_apart(data, owners, exchange):
    members = participants(data, owners)
    federation = federate(members[:-1])
    model = train(exchange, federation, {"W3": lambda f: f.add(members[-1])})
    late = next(record for record in model.history if "silo-9" in record.cohort)
    assert late.step == 3
    # Each block is two factors (WIDTH, 10). The late participant is sent the whole request again, with
    # all three blocks and, but for the single plan, the classifier.
    block = 2 * 8 * WIDTH * 10
    assert late.catch_up_bytes == 3 * block + (0 if exchange == "single" else 8 * WIDTH * 10)
    assert [record.catch_up_bytes for record in model.history if record is not late] == [
        0 for record in model.history if record is not late
    ]
    classifier = 0 if exchange == "single" else 8 * WIDTH * 10
    carried = block if exchange == "single" else 0
    assert late.bytes_down == CLIENTS * (classifier + carried)


@pytest.mark.parametrize("moment", ["W0", "Omega2", "W3", f"Omega{LAYERS}"])
@pytest.mark.parametrize("exchange", PLANS)
def test_a_participant_leaves(data, owners, exchange, moment):
    federation = federate(participants(data, owners))
    model = train(exchange, federation, {moment: lambda f: f.remove("silo-2")})
    last = next(record.exchange for record in model.history if moment in record.solved)
    for record in model.history:
        assert ("silo-2" in record.cohort) == (record.exchange <= last)
    assert_textbook(model, data, owners)


@pytest.mark.parametrize("exchange", PLANS)
def test_joining_leaving_and_failing_in_one_run(data, owners, exchange):
    members = participants(data, owners)
    members[6].fails_in = (3, 6)
    federation = federate(members[:8], missing="continue")
    changes = {
        "W1": lambda f: f.add(members[8]),
        "Omega3": lambda f: f.remove("silo-0"),
        "W4": lambda f: f.add(members[9]),
        "Omega5": lambda f: f.remove("silo-8"),
    }
    model = train(exchange, federation, changes)
    assert_textbook(model, data, owners)


# -- answers are repeatable ------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", PLANS)
@pytest.mark.parametrize("block_input", ["previous", "initial"])
def test_restarts_do_not_change_a_bit(data, owners, exchange, block_input):
    plain = method(exchange, block_input=block_input).fit(federate(participants(data, owners)))
    federation = federate(participants(data, owners))
    run = fs.Recipe(method(exchange, block_input=block_input)).start(federation.describe())
    rng = np.random.default_rng(2)
    for _ in exchanges(run, federation):
        for participant in federation.participants:
            if rng.random() < 0.4:
                participant.forget()
    restarted = run.model()
    assert same_bits(plain, restarted)
    assert sum(record.catch_up_bytes for record in restarted.history) > 0
    assert sum(record.catch_up_bytes for record in plain.history) == 0


def bits_of(term) -> dict[str, bytes]:
    """What counts of a term: the upper triangle of symmetric arrays, all of the others."""
    arrays = {n: np.triu(a) if n in term.symmetric else a for n, a in term.arrays.items()}
    return {name: array.tobytes() for name, array in arrays.items()} | {"counts": repr(term.counts).encode()}


def ask(participant, request, chain) -> dict[str, bytes]:
    answer = participant.answer(request)
    if isinstance(answer, Needs):
        answer = participant.answer(request.starting_at(answer.have, chain))
    return bits_of(answer)


@pytest.mark.parametrize("exchange", PLANS)
@pytest.mark.parametrize("budget", [1 << 30, 0])
def test_the_same_request_gives_the_same_term(data, exchange, budget, tmp_path):
    participant = fs.Participant(
        "one", fs.ClientData(data.features, data.labels), memory_budget=budget, scratch=tmp_path
    )
    federation = federate([participant])
    run = method(exchange, track="accuracy").start(federation.describe())
    requests, first = [], []
    while (request := run.request(federation.clients)) is not None:
        requests.append(request)
        first.append(ask(participant, request, run.chain))
        assert ask(participant, request, run.chain) == first[-1]
        run.absorb(federation.exchange(request, run.chain))
    for index in [*range(len(requests)), *np.random.default_rng(0).permutation(len(requests))]:
        assert ask(participant, requests[index], run.chain) == first[index]


@pytest.mark.parametrize("exchange", PLANS)
def test_a_pass_that_fails_is_done_again(data, owners, exchange, monkeypatch):
    """Features of a pass that did not end must not be taken for finished ones."""
    plain = method(exchange).fit(federate(participants(data, owners)))
    federation = federate(participants(data, owners), missing="error")
    run = method(exchange).start(federation.describe())
    broken = federation.participants[3]
    while (request := run.request(federation.clients)) is not None:
        with monkeypatch.context() as patch:
            patch.setattr("fedsolve.closedform.deepafl_client.LayerFeatures.commit", out_of_memory)
            with pytest.raises(MemoryError):
                ask(broken, request, run.chain)
        run.absorb(federation.exchange(request, run.chain))
    assert same_bits(run.model(), plain)


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_a_participant_that_served_another_run_answers_as_if_new(data, owners):
    federation = federate(participants(data, owners))
    other = method("single", seed=5, layers=2).fit(federation)
    linear = fs.AFL(ridge=1.0).fit(federation)
    model = method("lean").fit(federation)
    assert same_bits(model, method("lean").fit(federate(participants(data, owners))))
    again = method("single", seed=5, layers=2).fit(federation)
    assert same_bits(again, other)
    assert same_bits(fs.AFL(ridge=1.0).fit(federation), linear)


@pytest.mark.parametrize("exchange", PLANS)
def test_features_of_an_abandoned_run_are_not_taken_for_those_of_the_next(data, owners, exchange):
    """Both runs open alike, but the second has other blocks; the late participant knows only the first's."""
    members = participants(data, owners)
    abandoned = federate(members)
    run = method(exchange).start(abandoned.describe())
    for record in exchanges(run, abandoned):
        if "Omega2" in record.solved:
            break
    federation = federate(members[:5])
    model = train(exchange, federation, {"W4": lambda f: f.add(members[9])})
    assert "silo-9" in model.history[-1].cohort
    assert_textbook(model, data, owners)
