"""A site leaves: the others sum again without it, and a certificate says so."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.card import training_card
from fedsolve.privacy import SecureFederation
from fedsolve.privacy.leaving import Paper, withdrawal
from fedsolve.privacy.ledger import Ledger
from tests.command import fedsolve

NAMES = ("east", "north", "south", "west", "centre")


def federation(names):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 500)
    rows = rng.standard_normal((500, 5)) + labels[:, None]
    owners = np.array(NAMES)[np.arange(500) % 5]
    kept = np.isin(owners, names)
    return fs.LocalFederation.from_arrays(rows[kept], labels[kept], owners[kept])


def trained(names, ledgers, path=None, method=None):
    recipe = fs.Recipe(method or fs.AFL(ridge=1.0))
    model = recipe.fit(SecureFederation(federation(names), ledgers=ledgers))
    model.card = training_card(model, recipe)
    if path is not None:
        model.save(path)
    return model


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    """Keys of everybody, models with and without north, and a certificate that all have signed."""
    folder = tmp_path_factory.mktemp("leaving")
    keys = ("--keys", folder / "keys")
    assert fedsolve("keys", "init", "--host", "localhost", *keys).exit_code == 0
    for name in NAMES:
        assert fedsolve("keys", "client", name, *keys).exit_code == 0
    ledgers, stays = folder / "ledgers", [name for name in NAMES if name != "north"]
    trained(NAMES, ledgers, folder / "old")
    with pytest.raises(fs.FedsolveError, match=r"5 sites|north"):
        trained(stays, ledgers)
    words = [word for name in stays for word in ("--cohort", name)]
    paper = folder / "north.withdrawal"
    made = fedsolve("certificate", "withdraw", "north", *words, "--out", paper, *keys)
    assert made.exit_code == 0, made.stderr
    forged = json.loads(paper.read_text())
    forged["facts"]["site"] = "south"
    (folder / "forged").write_text(json.dumps(forged))
    refused = fedsolve("certificate", "accept", folder / "forged", "--ledger", ledgers / "east", *keys)
    assert "the signature of 'south' is missing" in refused.stderr
    fedsolve("certificate", "withdraw", "north", *words[2:], "--out", folder / "of-others", *keys)
    refused = fedsolve("certificate", "accept", folder / "of-others", "--ledger", ledgers / "east", *keys)
    assert "knows of no total over them" in refused.stderr
    for name in [*stays, stays[0]]:
        said = fedsolve("certificate", "accept", paper, "--ledger", ledgers / name, *keys)
        assert said.exit_code == 0, said.stderr
    trained(stays, ledgers, folder / "new")
    out = folder / "certificate"
    models = ("--before", folder / "old", "--after", folder / "new")
    made = fedsolve("certificate", "make", *models, "--withdrawal", paper, "--out", out, *keys)
    assert made.exit_code == 0, made.stderr
    for name in stays:
        signed = fedsolve("certificate", "sign", out, "--name", name, "--model", folder / "new", *keys)
        assert signed.exit_code == 0, signed.stderr
    return folder, keys, stays


def test_those_who_stay_have_the_model_without_the_leaver(papers, tmp_path):
    folder, _, stays = papers
    trained(stays, tmp_path / "fresh", tmp_path / "m")
    assert (folder / "new").read_bytes() == (tmp_path / "m").read_bytes()
    assert Ledger(folder / "ledgers" / "east").withdrawn == {"north"}


def test_the_certificate_names_the_totals(papers, tmp_path):
    folder, _, stays = papers
    facts = json.loads((folder / "certificate").read_text())["facts"]
    again = trained(stays, tmp_path / "fresh").card["totals"]  # the same rows have the same totals
    assert facts["after"]["totals"] == again != facts["before"]["totals"]
    assert len(again) == 64


def test_the_certificate_is_checked(papers):
    folder, keys, _ = papers
    good = fedsolve("certificate", "verify", folder / "certificate", "--model", folder / "new", *keys)
    assert good.exit_code == 0, good.stderr
    assert good.stdout.startswith("left: north; joined: nobody; signed by centre, east, south, west and")


@pytest.mark.parametrize("case", ["byte", "signature", "model", "withdrawal"])
def test_what_does_not_hold_is_refused(papers, case, tmp_path):
    folder, keys, _ = papers
    note, model = json.loads((folder / "certificate").read_text()), folder / "new"
    if case == "byte":
        note["facts"]["after"]["epsilon"] = 3.0
        said = "did not sign this"
    elif case == "signature":
        del note["signatures"]["west"]
        said = "the signature of 'west' is missing"
    elif case == "model":
        model, said = folder / "old", "of another model"
    else:
        note["facts"]["withdrawal"]["signatures"] = {"north": "00"}
        said = "'north' did not sign this"
    (tmp_path / "c").write_text(json.dumps(note))
    refused = fedsolve("certificate", "verify", tmp_path / "c", "--model", model, *keys)
    assert refused.exit_code == 4
    assert said in refused.stderr


# -- in one process --------------------------------------------------------------------------------

METHODS = {
    "afl": fs.AFL(ridge=1.0),
    "softmax": fs.Softmax(ridge=1.0),
    "glm": fs.GLM("x0 ~ x1 + x2"),
    "apfl": fs.APFL(width=16, refinement_width=8, activation="gelu"),
    "deepafl": fs.DeepAFL(layers=2, width=16),
}


@pytest.mark.parametrize("key", sorted(METHODS))
def test_forget_and_add_are_trainings_of_those_who_are_there(key):
    """Layered methods train again; the shared stream of APFL is one of the models that are compared."""
    method, stays, rows = METHODS[key], [name for name in NAMES if name != "north"], federation(NAMES)
    north = next(one for one in rows.participants if one.name == "north")
    whole, without = method.fit(federation(NAMES)), method.fit(federation(stays))
    assert fs.forget(method, rows, "north").to_bytes() == without.to_bytes()
    assert rows.clients == tuple(sorted(stays))
    assert fs.add(method, rows, north).to_bytes() == whole.to_bytes()
    if key == "apfl":
        own = [one.personal("east").decision_function(np.ones((1, 5))) for one in (whole, without)]
        assert not np.array_equal(*own)


@pytest.mark.parametrize("key", ["afl", "softmax", "glm", "apfl"])
def test_secure_sums_forget_with_a_signed_withdrawal_only(key):
    method, stays = METHODS[key], [name for name in NAMES if name != "north"]
    secure = SecureFederation(federation(NAMES))
    method.fit(secure)
    paper = withdrawal("north", NAMES).signed("north", lambda message: b"north" + message)

    def verify(name, message, signature):
        return signature == name.encode() + message

    with pytest.raises(fs.ModelFileError, match="signed withdrawal only"):
        fs.forget(method, secure, "north")
    with pytest.raises(fs.ModelFileError, match="no withdrawal of 'south'"):
        fs.forget(method, secure, "south", paper, verify)
    with pytest.raises(fs.ModelFileError, match="'north' did not sign this"):
        fs.forget(method, secure, "north", paper, lambda *_: False)
    assert "north" in secure.federation.clients
    found = fs.forget(method, secure, "north", paper, verify)
    assert found.to_bytes() == method.fit(SecureFederation(federation(stays))).to_bytes()
    one = next(one for one in federation(NAMES).participants if one.name == "north")
    with pytest.raises(fs.FedsolveError, match="north"):
        fs.add(method, secure, one)


def test_a_site_that_asks_for_noise_is_left_out_of_private_runs_only(tmp_path):
    """Also after a restart of those who stay, and by the command."""
    ledgers, stays = tmp_path / "ledgers", [name for name in NAMES if name != "north"]
    trained(NAMES, ledgers)
    keys = ("--keys", tmp_path / "keys")
    fedsolve("keys", "init", "--host", "localhost", *keys)
    fedsolve("keys", "client", "north", *keys)
    words, paper = [word for name in stays for word in ("--cohort", name)], tmp_path / "paper"
    signed = fedsolve("certificate", "withdraw", "north", *words, "--noise", "--out", paper, *keys)
    assert signed.exit_code == 0, signed.stderr
    with pytest.raises(fs.FedsolveError, match="north"):  # nobody has accepted it yet
        trained(stays, ledgers, method=fs.Private(fs.AFL(), epsilon=1.0))
    for name in stays:
        said = fedsolve("certificate", "accept", paper, "--ledger", ledgers / name, *keys)
        assert said.stdout.strip() == "north may leave, and only private runs (--epsilon) go on without it"
    with pytest.raises(fs.FedsolveError, match="noise"):
        trained(stays, ledgers)
    model = trained(stays, ledgers, method=fs.Private(fs.AFL(), epsilon=1.0))
    assert model.card["cohort"] == sorted(stays)
    with pytest.raises(fs.FedsolveError, match="noise"):
        trained(stays, ledgers)


def test_a_paper_is_a_paper(tmp_path):
    (tmp_path / "x").write_text("[]")
    with pytest.raises(fs.ModelFileError, match="is no paper"):
        Paper.from_file(tmp_path / "x")
