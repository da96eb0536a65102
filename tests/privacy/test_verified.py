"""Questions that a server cannot choose: sites check every one against the totals that were opened."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.datasets import load_digits

import fedsolve as fs
from fedsolve.closedform.deepafl import DeepAFLRun
from fedsolve.closedform.projections import projection
from fedsolve.closedform.solvers import Sandwich, ridge_solve, solves
from fedsolve.federation import meaning
from fedsolve.federation.messages import Block, Chain, Request
from fedsolve.federation.method import Method, Run
from fedsolve.privacy import SecureFederation, verifying
from fedsolve.privacy.census import OFF
from fedsolve.privacy.policy import SitePolicy
from fedsolve.privacy.ring import Layout
from fedsolve.privacy.unmasking import PRIME, Evidence, fingerprint
from fedsolve.privacy.verifying import QuestionTrips, SignedQuestions

from .setups import plus, sign_as, verify, zeros
from .test_secure import CONSENT, METHODS, Listening, federation, rows


def checked(clients: int = 4, **options: Any) -> SecureFederation:
    return SecureFederation(federation(clients), verify=True, limits=CONSENT, **options)


MORE: dict[str, Callable[[], Method[Any]]] = {
    "minimum-norm": lambda: fs.DeepAFL(layers=2, width=16, ridge=0.0, residual_ridge=0.0, exchange="lean"),
    "chosen": lambda: fs.DeepAFL(layers="auto", width=16, exchange="lean", ridge="auto"),
    "softmax": fs.Softmax,
    "kernel-steps": lambda: fs.KernelAFL(landmarks=20, solver="steps", steps=4, ridge=0.1),
    "kernel-direct": lambda: fs.KernelAFL(landmarks=20, ridge=0.1),
    "calibrated": lambda: fs.Recipe(fs.DeepAFL(layers=2, width=16), calibrate=True),
    "auto": lambda: fs.Auto(methods="afl,softmax"),
    "fedavg": lambda: fs.gradient.FedAvg(network="mlp:8", rounds=3),
    "scaffold": lambda: fs.gradient.Scaffold(network="mlp:8", rounds=2),
}

LONG, SLOW = ("chosen", "auto", "fedavg"), pytest.mark.slow


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedsolve.errors.ConditionWarning")
@pytest.mark.parametrize(
    "name", [*METHODS, *(pytest.param(n, marks=SLOW if n in LONG else ()) for n in MORE)]
)
def test_every_method_is_checked_and_gives_the_same_bits(name: str) -> None:
    if name in ("fedavg", "scaffold"):
        pytest.importorskip("torch")
    method = (METHODS | MORE)[name]()
    trips: list[str] = []
    secure = SecureFederation(Listening(federation(4), {}, trips), verify=True, limits=CONSENT)
    model, plain = method.fit(secure), method.fit(SecureFederation(federation(4), limits=CONSENT))
    features = rows()[0]
    assert np.array_equal(model.decision_function(features), plain.decision_function(features))
    assert trips.count("check") == len(model.history)
    if name.startswith("deepafl"):
        begun = ["begin", "members", "check", *["ask", "open"] * 2, "ask", "open"]
        assert trips == [*begun, *["check", "ask", "open"] * (len(model.history) - 1)]
    assert secure.evaluate(model) == federation(4).evaluate(plain)


def another_machine(monkeypatch: pytest.MonkeyPatch, change: Callable[[Block], Block]) -> None:
    """Let the server's blocks, and nobody else's, be what `change` makes of them."""
    honest = Run.add

    def add(self: Run[Any], block: Block) -> Block:
        here = meaning.JUDGE.get() is None
        return honest(self, change(block) if here and "left" in block.arrays else block)

    monkeypatch.setattr(Run, "add", add)


@pytest.mark.parametrize("plan", ["lean", "single", "textbook"])
def test_other_signs_and_last_bits_mean_the_same(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(block: Block) -> Block:
        left, right = block.arrays["left"], block.arrays["right"]
        signs = np.where(np.arange(left.shape[1]) % 2, -1.0, 1.0)
        return Block(block.note, {"left": left * signs * (1 + 1e-9), "right": right * signs})

    method = fs.DeepAFL(layers=3, width=16, exchange=plan)
    plain = method.fit(federation(4)).decision_function(rows()[0])
    another_machine(monkeypatch, turned)
    secure = checked()
    model = method.fit(secure)
    assert np.allclose(model.decision_function(rows()[0]), plain, rtol=0, atol=1e-6)
    secure.evaluate(model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda left, right: (left + 1e-4 * np.abs(left).max(), right), "the product of 'left' and 'right'"),
        (lambda left, right: (2 * left, right / 2), "the product of 'left' and 'right'"),
        (lambda left, right: (left[:, :1], right[:, :1]), "have shapes that this network"),
    ],
)
def test_blocks_that_mean_something_else_are_refused(
    change: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crafted(block: Block) -> Block:
        left, right = change(block.arrays["left"], block.arrays["right"])
        return Block(block.note, {"left": left, "right": right})

    another_machine(monkeypatch, crafted)
    with pytest.raises(
        fs.CohortError, match=r"agree to this question, 3 must.*the block \{'layer': 1\}.*" + why
    ):
        fs.DeepAFL(layers=2, width=16, exchange="textbook").fit(checked())


def test_a_solution_is_one_by_its_residual_and_without_a_ridge_by_itself() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((50, 80))  # fewer rows than columns: nothing but a ridge determines W
    gram, cross = features.T @ features, rng.standard_normal((80, 3))
    weight = ridge_solve(gram, cross, 1.0)
    open_ = np.linalg.svd(features)[2][-1:].T @ np.ones((1, 3))
    assert solves(gram, cross, 1.0, weight * (1 + 1e-14))
    assert not solves(gram, cross, 1.0, weight + 1e-6 * open_)
    assert not solves(gram, cross, 0.0, weight)
    left, right = rng.standard_normal((9, 2)), np.linalg.qr(rng.standard_normal((7, 2)))[0]
    turn = np.linalg.qr(rng.standard_normal((2, 2)))[0]
    one = Sandwich(left, right)
    assert one.gap(Sandwich(left @ turn, right @ turn)) < 1e-14
    other = Sandwich(left, np.linalg.qr(rng.standard_normal((7, 2)))[0])
    direct = np.linalg.norm(one.omega - other.omega) / np.linalg.norm(one.omega)
    assert one.gap(other) == pytest.approx(direct, rel=1e-12)


# -- the attack of a server that chooses blocks ---------------------------------------------------------


WIDE = 256
ATTACKED = fs.DeepAFL(
    layers=2, width=WIDE, activation="relu", zero_activation="none", skip=False, exchange="textbook"
)


def digits_federation(sites: int) -> tuple[fs.LocalFederation, Any]:
    images, digits = (array[:120] for array in load_digits(return_X_y=True))
    return fs.LocalFederation.from_arrays(images, digits, np.arange(120) % sites), images


def half_spaces(run: DeepAFLRun, total: Any) -> tuple[Block, Any, Any]:
    """A block whose hidden features are half-spaces that each hold about one row, from honest totals."""
    gram, sums, count = total["hidden_gram"], total["hidden_cross"].sum(axis=1), total.count("rows")
    values, vectors = np.linalg.eigh(gram)
    keep = values > values.max() * 1e-10
    ones = np.linalg.pinv(gram, rcond=1e-12) @ sums  # gives 1 on nearly every row
    rng = np.random.default_rng(0)
    towards = vectors[:, keep] @ (rng.normal(size=(keep.sum(), WIDE)) / np.sqrt(values[keep])[:, None])
    mean = towards.T @ sums / count
    spread = np.sqrt(np.maximum(np.einsum("ij,ik,kj->j", towards, gram, towards) / count - mean**2, 1e-300))
    cut = towards - np.outer(ones, mean + norm.ppf(1 - 1.0 / count) * spread)
    second = projection(run.method.seed, "hidden", 1, WIDE, WIDE, 1.0, "float64")
    left = 1e5 * cut @ np.linalg.inv(second.weight)
    return Block({"layer": 1}, {"left": left, "right": np.eye(WIDE)}), ones, vectors[:, keep]


def recovered(answer: Any, block: Block, ones: Any, basis: Any, images: Any, seed: int) -> int:
    """How many rows of these images come out of the total to the last pixel."""
    first = projection(seed, "zero", 0, 64, WIDE, 1.0, "float64")
    second = projection(seed, "hidden", 0, WIDE, WIDE, 1.0, "float64")
    hidden = answer["hidden_feature"] @ np.linalg.pinv(block.arrays["left"]) @ basis @ basis.T
    found = set()
    for row in hidden:
        size = row @ ones
        if not np.isfinite(size) or abs(size) < 1e-300:
            continue
        row = row / size
        there = row > 1e-6
        if there.sum() < 70:
            continue
        inner, shift = first.weight @ second.weight[:, there], first.bias @ second.weight[:, there]
        image = np.linalg.lstsq(inner.T, row[there] - shift - second.bias[there], rcond=None)[0]
        gaps = np.abs(images - np.round(image)).max(axis=1)
        if gaps.min() == 0:
            found.add(int(np.argmin(gaps)))
    return len(found)


def attack(secure: SecureFederation, images: Any) -> int:
    """Honest exchanges, then a crafted block; what is asked for besides is crafted as well."""
    run = ATTACKED.start(secure.describe())
    for _ in range(2):
        request = run.request(secure.clients)
        assert request is not None
        total = secure.exchange(request, run.chain)
        run.absorb(total)
    assert isinstance(run, DeepAFLRun)
    block, ones, basis = half_spaces(run, total)
    chain = Chain([run.chain.blocks[0], block])
    note = {"phase": "block", "ask": ["hidden_feature", "hidden_gram"], "track": False}
    crafted = Request("deepafl", 2, 1, secure.clients, note, position=2, digest=chain.digest, blocks=(block,))
    return recovered(secure.exchange(crafted, chain), block, ones, basis, images, ATTACKED.seed)


@pytest.mark.filterwarnings("ignore::fedsolve.errors.ConditionWarning")
@pytest.mark.parametrize("sites", [3, pytest.param(4, marks=SLOW), pytest.param(6, marks=SLOW)])
def test_crafted_blocks_single_out_rows_unless_sites_check_them(sites: int) -> None:
    inner, images = digits_federation(sites)
    assert attack(SecureFederation(inner, limits=OFF), images) > 50
    inner, images = digits_federation(sites)
    with pytest.raises(
        fs.CohortError, match=rf"0 of {sites} sites agree .*the block \{{'layer': 1\}} of the model is not"
    ):
        attack(SecureFederation(inner, verify=True, limits=OFF), images)


@pytest.mark.parametrize("sites", [3, 4, 6])
def test_steps_at_coefficients_that_the_server_made_up_are_refused(sites: int) -> None:
    """A softmax step tells a gradient; at large coefficients it would be about the rows of a half-space."""

    def step(verify: bool) -> Any:
        secure = SecureFederation(federation(sites), verify=verify, limits=CONSENT)
        run, request = begun(secure, fs.Softmax(ridge=1.0))
        name = next(name for name, array in request.arrays.items() if array.ndim == 2)
        made_up = 1e3 * np.random.default_rng(0).standard_normal(request.arrays[name].shape)
        asked = dataclasses.replace(request, arrays={**request.arrays, name: made_up})
        return secure.exchange(asked, run.chain)

    assert step(verify=False).cohort
    with pytest.raises(fs.CohortError, match=f"0 of {sites} sites agree.*that were opened"):
        step(verify=True)


# -- what else a server may try ----------------------------------------------------------------------


def begun(secure: SecureFederation, method: Method[Any]) -> tuple[Run[Any], Request]:
    """A run after its first exchange, and its next request."""
    run = method.start(secure.describe())
    request = run.request(secure.clients)
    assert request is not None
    run.absorb(secure.exchange(request, run.chain))
    following = run.request(secure.clients)
    assert following is not None
    return run, following


PLAIN_RUN = fs.DeepAFL(layers=2, width=16, exchange="textbook")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"note": {"phase": "block", "ask": ["hidden_gram", "hidden_feature"], "track": False}},
            "'ask.1' is",
        ),
        ({"step": 1}, "its step is 1, not 0"),
        ({"arrays": {"weight": np.ones((16, 3))}}, "'weight' differs by"),
        ({"arrays": {}}, "it has the arrays"),
        ({"kind": "moments"}, "is not the one that follows"),
    ],
)
def test_requests_that_do_not_follow_are_refused(change: dict[str, Any], why: str) -> None:
    secure = checked()
    run, request = begun(secure, PLAIN_RUN)
    with pytest.raises(fs.CohortError, match=why):
        secure.exchange(dataclasses.replace(request, **change), run.chain)
    secure.exchange(request, run.chain)  # the honest one is still answered


def test_a_first_question_is_the_methods_own() -> None:
    secure = checked()
    run = PLAIN_RUN.start(secure.describe())
    request = run.request(secure.clients)
    assert request is not None
    crafted = Chain([*run.chain.blocks, Block({"layer": 1}, {"left": np.eye(16, 3), "right": np.eye(16, 3)})])
    asked = dataclasses.replace(request, position=2, digest=crafted.digest, blocks=tuple(crafted.blocks))
    with pytest.raises(fs.CohortError, match="its position is 2, not 1"):
        secure.exchange(asked, crafted)


def test_after_a_total_sites_agree_to_one_question() -> None:
    """Two machines that are both honest: whoever has agreed to one block agrees to no other."""
    secure = checked()
    run, request = begun(secure, PLAIN_RUN)
    asked = (secure._course.run, Layout(()))
    secure._trips.agreed(
        request, "other", run.chain, secure._keys().setup, *asked
    )  # under a digest that no client will see: nobody answers it
    with pytest.raises(fs.CohortError, match="has agreed to another question"):
        secure.exchange(
            dataclasses.replace(request, arrays={"weight": request.arrays["weight"] * (1 + 1e-9)}), run.chain
        )


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda e: _other_words(e, 1), "was not opened: it is not the sum of the terms"),
        (lambda e: _other_words(e, 1 << 63), "was not opened: it is not the sum of the terms"),
        (lambda e: dataclasses.replace(e, signed={}), "was not opened: it is not the sum of the terms"),
        (
            lambda e: dataclasses.replace(e, secrets={**e.secrets, e.survivors[0]: bytes(32)}),
            "do not give the seed",
        ),
        (lambda e: dataclasses.replace(e, request="0" * 64), "does not answer the question"),
        (lambda e: dataclasses.replace(e, slot=e.slot + 1), "has not been used|does not answer"),
    ],
)
def test_a_total_that_was_not_opened_is_refused(
    lie: Callable[[Evidence], Evidence], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = QuestionTrips.show

    def show(self: QuestionTrips, evidence: Evidence) -> None:
        honest(self, evidence)
        self._evidence = lie(evidence)

    monkeypatch.setattr(QuestionTrips, "show", show)
    with pytest.raises(fs.CohortError, match=why):
        PLAIN_RUN.fit(checked())


def _other_words(evidence: Evidence, more: int) -> Evidence:
    masked = copy.deepcopy(evidence.masked)
    masked.limbs[7:8] += np.uint64(more)
    return dataclasses.replace(evidence, masked=masked)


def test_fingerprints_are_linear_and_notice_every_bit() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 64, size=(3, 70_000), dtype=np.uint64)
    key = "6b" * 32
    found = [fingerprint(each, key) for each in words]
    from fedsolve.privacy.ring import RingVector
    from fedsolve.privacy.unmasking import WordSum

    total, ring = WordSum(zeros(10_000, 50_000).limbs, 10_000), zeros(10_000, 50_000)
    for each in words:
        total.add(RingVector(each, 10_000))
        plus(ring, RingVector(each, 10_000))
    low, carried = (fingerprint(each, key) for each in (total.limbs, total.carries))
    assert (low + (carried << 64) - sum(found)) % PRIME == 0
    total.high[...] += total.carries[: total.wide]
    assert np.array_equal(total.limbs, ring.limbs)
    for bit in range(64):
        changed = words[0].copy()
        changed[12_345] ^= np.uint64(1) << np.uint64(bit)
        assert fingerprint(changed, key) != found[0]


def test_a_model_that_the_totals_do_not_give_is_not_evaluated() -> None:
    secure = checked()
    method = fs.AFL(ridge=1.0)
    model = method.fit(secure)
    assert secure.evaluate(model) == federation(4).evaluate(model)
    crafted = method.fit(federation(4))
    crafted.weight = crafted.weight + 0.01
    with pytest.raises(fs.CohortError, match=r"the model of 'evaluate' is not the one.*'weight' differs by"):
        secure.evaluate(crafted)
    other = fs.AFL(ridge=2.0).fit(federation(4))
    with pytest.raises(fs.CohortError, match=r"the model of 'evaluate' is not the one"):
        secure.evaluate(other)
    with pytest.raises(fs.DataError, match="no training has begun whose model sites could know"):
        checked().evaluate(model)


# -- who checks, and who asks for it -----------------------------------------------------------------


def test_sites_answer_nothing_that_too_few_have_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = QuestionTrips.agreed
    method = fs.AFL(ridge=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("fedsolve.privacy.secure.least_verified", lambda colluders: 99)
        with pytest.raises(fs.CohortError, match="nobody has checked that this question follows"):
            method.fit(checked())

    def fewer(self: QuestionTrips, *given: Any) -> dict[str, Any]:
        told = honest(self, *given)
        return {**told, "signatures": dict([*told["signatures"].items()][:2])}

    with monkeypatch.context() as patch:
        patch.setattr(QuestionTrips, "agreed", fewer)
        with pytest.raises(fs.CohortError, match=r"2 of 4 sites have checked this question; .* asks for 3"):
            method.fit(checked())

    def invented(self: QuestionTrips, *given: Any) -> dict[str, Any]:
        told = honest(self, *given)
        return {**told, "signatures": {**told["signatures"], "nobody": "00"}}

    with monkeypatch.context() as patch:
        patch.setattr(QuestionTrips, "agreed", invented)
        with pytest.raises(fs.CohortError, match="the agreement of 'nobody' to this question is not signed"):
            method.fit(checked())


@pytest.mark.parametrize(("clients", "colluders", "checks"), [(3, 0, True), (3, 1, False), (4, 1, True)])
def test_too_few_sites_to_check_answer_nothing(clients: int, colluders: int, checks: bool) -> None:
    trips: list[str] = []
    secure = SecureFederation(Listening(federation(clients), {}, trips), verify=True, colluders=colluders)
    if checks:
        fs.AFL(ridge=1.0).fit(secure)
    else:
        with pytest.raises(fs.CohortError, match=r"a sum over 3 of 3 sites cannot be checked, which takes 4"):
            fs.AFL(ridge=1.0).fit(secure)
    assert ("check" in trips) == secure.verifies == checks


def test_one_process_checks_only_where_it_is_asked_to() -> None:
    trips: list[str] = []
    fs.AFL().fit(SecureFederation(Listening(federation(4), {}, trips)))
    assert "check" not in trips


def test_methods_that_start_from_a_given_model_cannot_be_checked() -> None:
    base = fs.DeepAFL(layers=1, width=16).fit(federation(4))
    with pytest.raises(fs.DataError, match="sites cannot check the questions of 'softmax-over'"):
        fs.Softmax().over(base).fit(checked())


def test_described_tables_are_checked() -> None:
    features, labels = rows()
    schema = fs.Schema(tuple(fs.Column(f"c{n}") for n in range(features.shape[1])))
    inner = fs.LocalFederation.from_arrays(features, labels, np.arange(len(labels)) % 4, schema=schema)
    method = fs.Recipe(fs.AFL(ridge=1.0), schema, class_weight="balanced", calibrate=True)
    secure = SecureFederation(inner, verify=True)
    model = method.fit(secure)
    secure.evaluate(model)
    plain = method.fit(SecureFederation(inner))
    assert np.array_equal(model.decision_function(features), plain.decision_function(features))


@pytest.mark.slow
def test_a_checked_run_resumes_from_its_folders(tmp_path: Path) -> None:
    method = fs.Recipe(fs.DeepAFL(layers=2, width=16), calibrate=True)
    whole = method.fit(federation(4)).decision_function(rows()[0])
    done = -1
    while True:
        done += 1

        def stop(record: Any, expected: int, last: int = done) -> None:
            if record.exchange == last:
                raise KeyboardInterrupt

        folders = {"ledgers": tmp_path / f"ledgers-{done}", "store": tmp_path / f"store-{done}"}
        path = tmp_path / f"run-{done}"
        try:
            model = method.fit(checked(**folders), path, follow=stop)
            break
        except KeyboardInterrupt:
            secure = checked(**folders)
            model = method.fit(secure, path, resume=True)
            assert np.allclose(model.decision_function(rows()[0]), whole, rtol=0, atol=1e-10)
            secure.evaluate(model)
    assert done == len(model.history)


def test_a_run_cannot_be_resumed_with_sites_that_know_nothing_of_it(tmp_path: Path) -> None:
    def stop(record: Any, expected: int) -> None:
        if record.exchange == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PLAIN_RUN.fit(checked(), tmp_path / "run", follow=stop)
    with pytest.raises(fs.CohortError, match=r"its step is 1, not 0|position is 2, not 1"):
        PLAIN_RUN.fit(checked(), tmp_path / "run", resume=True)


def test_policies_name_their_signatures(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("verified = true\nsignatures = 4\n")
    policy = SitePolicy.from_file(path)
    assert (policy.verified, policy.signatures) == (True, 4)


def test_a_small_cohort_of_a_larger_run_is_no_way_around_checks() -> None:
    asked = SignedQuestions(lambda name, message, signature: True, 0, True, 0)
    members = ["a", "b", "c", "d", "e", "f"]
    for few in (members[:3], members[:4]):
        with pytest.raises(fs.TermError, match="nobody has checked that this question follows"):
            asked.check("digest", few, few, {}, "run", "wide", False)
    with pytest.raises(fs.TermError, match="a sum over 2 of 6 sites cannot be checked"):
        asked.check("digest", members, members[:2], {}, "run", "wide", False)
    told = {"training": "t", "cohort": members[:4], "signatures": {"e": "00", "f": "00", "a": "00"}}
    told["layouts"] = ["narrow", "wide"]
    strict = SignedQuestions(lambda name, message, signature: True, 0, True, 3)
    strict.check(
        "digest", members, members[:4], {"agreed": told}, "run", "wide", False
    )  # who checks need not be asked
    with pytest.raises(fs.TermError, match=r"3 of 6 sites have checked this question; .* asks for 4"):
        asked.check("digest", members, members[:4], {"agreed": told}, "run", "wide", False)
    with pytest.raises(fs.TermError, match="agreed to this question for another cohort"):
        strict.check("digest", members, members[:3], {"agreed": told}, "run", "wide", False)
    strict.check("digest", members, members[:3], {"agreed": told}, "run", "wide", True)
    with pytest.raises(fs.TermError, match="agreed to this question in another layout"):
        strict.check("digest", members, members[:4], {"agreed": told}, "run", "coarse", False)


@pytest.mark.parametrize("sites", [3, 4, 6])
def test_an_agreement_is_about_one_run_and_layout(sites: int, monkeypatch: pytest.MonkeyPatch) -> None:
    members, layouts = [f"site {n}" for n in range(sites)], ["narrow", "wide"]
    asked = SignedQuestions(verify, 0, True, 0)

    def answered(run: str, layout: str) -> None:
        message = verifying.agreed_message("t", "digest", members, "this run", layouts)
        told = {"training": "t", "cohort": members, "layouts": sorted({*layouts, layout})}
        told["signatures"] = {name: sign_as(name)(message).hex() for name in members}
        asked.check("digest", members, members, {"agreed": told}, run, layout, False)

    answered("this run", "wide")
    for run, layout in (("another run", "wide"), ("this run", "coarse")):
        with pytest.raises(fs.TermError, match="is not signed by that site, or belongs to another question"):
            answered(run, layout)
    real = verifying.agreed_message  # as it was before: without run and layouts
    monkeypatch.setattr(verifying, "agreed_message", lambda *given: real(*given[:3], "", []))
    answered("another run", "coarse")
