"""Only the people at a site decide which code runs there, where files are written and what names leave."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import registry
from fedsolve.container import to_bytes
from fedsolve.errors import DataError, TermError
from fedsolve.federation.encoding import decode_request, encode_request
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Block, Chain, Request
from fedsolve.federation.states import StateStore
from fedsolve.gradient.networks import build_network
from fedsolve.labels import labels_note
from fedsolve.network.agreement import Agreement
from fedsolve.network.answering import Answerer, Event
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.registry import NotAllowed, allowing, check_allowed
from tests.command import fedsolve, refused
from tests.network.pretended import PretendedLink

NETWORK = "tests.gradient.chosen_networks:plain"
RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((60, 6)), np.arange(60) % 3


def site(**options: Any) -> Answerer:
    return Answerer("north", fs.ClientData(X, Y), **options)


def federation(only: Answerer) -> NetworkFederation:
    return NetworkFederation(
        PretendedLink([only]), clients=1, classes=[0, 1, 2], interval=0.005, grace=0.05, missing="error"
    )


def fedavg(network: str) -> Any:
    return registry.method_class("fedavg")(rounds=1, epochs=1, network=network)


def asked(site: Answerer, request: Request) -> dict[str, Any]:
    """The note of a site's reply to a request that the test made up."""
    asking = Agreement("classification").note("answer") | {"exchange": request.exchange, "classes": None}
    return site.reply(asking, np.frombuffer(encode_request(request), np.uint8))[0]


# -- code ------------------------------------------------------------------------------------------


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a function in a module that nothing has imported."""
    (tmp_path / "planted_by_a_test.py").write_text("def network(features, outputs): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "planted_by_a_test:network"


def with_network(note: Any, name: str) -> Any:
    return json.loads(json.dumps(note).replace('"linear"', json.dumps(name)))


def assert_refused(reply: dict[str, Any], name: str) -> None:
    assert (reply["ok"], reply["error"]) == (False, "DataError")
    assert f"--allow-network {name}" in reply["message"]
    assert name.partition(":")[0] not in sys.modules


@pytest.mark.torch
def test_an_opening_cannot_have_a_function_called_that_the_site_did_not_allow(planted: str) -> None:
    here = site()
    request = fedavg("linear").start(federation(here).describe()).request(("north",))
    block = Block(with_network(request.blocks[0].note, planted), request.blocks[0].arrays)
    evil = dataclasses.replace(request, blocks=(block,), digest=Chain([block]).digest)
    assert_refused(asked(here, evil), planted)


@pytest.mark.torch
def test_an_evaluation_cannot_have_a_function_called_that_the_site_did_not_allow(planted: str) -> None:
    here = site()
    arrays, note = fedavg("linear").fit(federation(here)).contents()
    assert_refused(asked(here, Request("evaluate", 0, 0, (), with_network(note, planted), arrays)), planted)


@pytest.mark.torch
def test_a_function_that_the_site_allowed_is_called() -> None:
    with pytest.raises(DataError, match="--allow-network"):
        fedavg(NETWORK).fit(federation(site()))
    allowing_site = federation(site(networks=[NETWORK]))
    model = fedavg(NETWORK).fit(allowing_site)
    assert 0 <= allowing_site.evaluate(model) <= 1


@pytest.mark.torch
def test_allowing_ends_with_its_block_and_leaves_known_networks_alone() -> None:
    with allowing():
        build_network("mlp:4", 6, 3)
        with pytest.raises(DataError, match="nobody here allowed"):
            build_network(NETWORK, 6, 3)
        with allowing(networks=[NETWORK]):
            build_network(NETWORK, 6, 3)
    build_network(NETWORK, 6, 3)


@pytest.mark.parametrize("kind", ["network", "method"])
def test_code_of_every_kind_is_allowed_by_name_and_for_its_kind_alone(kind: Any) -> None:
    check_allowed(kind, "a.b:c")  # one's own process allows everything
    with allowing(**{f"{kind}s": ["a.b:c"]}):
        check_allowed(kind, "a.b:c")
        with pytest.raises(NotAllowed, match=rf"{kind} 'a.b:d' .*allowed: a.b:c.*--allow-{kind} a.b:d"):
            check_allowed(kind, "a.b:d")
        with pytest.raises(NotAllowed, match="allowed: none"):
            check_allowed("method" if kind == "network" else "network", "a.b:c")
    with allowing(**{f"{kind}s": None}):
        check_allowed(kind, "a.b:d")
    check_allowed(kind, "a.b:d")


@pytest.mark.torch
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_model_file_cannot_have_a_function_called_unless_its_reader_allows_it(
    command: str, tmp_path: Path
) -> None:
    model, data = tmp_path / "model.safetensors", tmp_path / "data.npz"
    fedavg(NETWORK).fit(fs.LocalFederation.from_arrays(X, Y, np.arange(60) % 2)).save(model)
    np.savez(data, x=X, y=Y)
    refused(fedsolve(command, model, data), 2, f"--allow-network {NETWORK}")
    assert fedsolve(command, model, data, "--allow-network", NETWORK).exit_code == 0


# -- files -----------------------------------------------------------------------------------------

STRANGE = ["../../../../victim/planted", "0", True, -1, 1.5, None]


@pytest.mark.torch
def test_an_exchange_that_is_no_number_writes_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious.safetensors").write_bytes(b"x")
    here = site(states=tmp_path / "state" / "states")
    run = registry.method_class("scaffold")(rounds=1, epochs=1).start(federation(here).describe())
    request = run.request(("north",))
    assert asked(here, request)["ok"]
    for exchange in STRANGE:
        reply = asked(here, dataclasses.replace(request, exchange=exchange))
        assert (reply["ok"], reply["error"]) == (False, "TermError")
    assert [path.name for path in victim.iterdir()] == ["precious.safetensors"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kind", [1, None, ["x"]]),
        ("digest", [1, None]),
        ("exchange", STRANGE),
        ("step", STRANGE),
        ("position", STRANGE),
        ("note", ["text", [1], 3]),
        ("blocks", ["text", {"0": {}}, [3]]),
    ],
)
def test_a_request_with_a_field_of_the_wrong_type_is_refused_by_name(field: str, values: list[Any]) -> None:
    plain = {"kind": "x", "digest": "", "exchange": 0, "step": 0, "position": 0, "note": {}, "blocks": []}
    whole = {"wire": 2, "message": "request", **plain}
    assert decode_request(to_bytes({}, whole)).kind == "x"
    for value in values:
        with pytest.raises(TermError, match=f"'{field}'"):
            decode_request(to_bytes({}, {**whole, field: value}))


def test_states_are_filed_under_numbers_alone(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "states"):
        store = StateStore(folder, "north")
        store.write("run", 0, {"a": np.ones(1)}, None)
        for exchange in ("../../outside", "0", True, -1, 0.0):
            with pytest.raises(TermError, match="exchange"):
                store.read("run", exchange)  # type: ignore[arg-type]
            with pytest.raises(TermError, match="exchange"):
                store.write("run", exchange, {}, None)  # type: ignore[arg-type]
    with pytest.raises(TermError, match="run"):
        store.write("../..", 0, {}, None)
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


# -- names -----------------------------------------------------------------------------------------

NAMES = np.array(["angina", "asthma", "scabies"])[Y]


def named(**options: Any) -> tuple[Answerer, list[Event]]:
    shown: list[Event] = []
    return Answerer("north", fs.ClientData(X, NAMES), show=shown.append, **options), shown


def note_for(ask: str, classes: list[str]) -> dict[str, Any]:
    note = Agreement("classification").note(ask)
    return note | {"exchange": 0, "classes": labels_note(np.array(classes))}


@pytest.mark.parametrize("ask", ["describe", "answer"])
@pytest.mark.parametrize("agreed", [None, ["angina", "asthma", "scabies"]])
def test_a_refusal_names_classes_to_this_site_alone(ask: str, agreed: list[str] | None) -> None:
    for share in (False, True):
        here, shown = named(classes=agreed, share_classes=share)
        request = np.frombuffer(encode_request(Request("afl", 0, 0, ())), np.uint8)
        reply, _ = here.reply(note_for(ask, ["angina", "measles"]), request)
        assert reply["error"] == "DataError"
        assert ("asthma" in reply["message"]) == share
        assert "asthma" in shown[-1].text


@pytest.mark.parametrize("key", ["afl", "deepafl"])
def test_a_class_list_in_the_opening_draws_no_names_out(key: str) -> None:
    here, shown = named()
    spec = Spec(6, np.array(["angina", "measles", "rubella"]), 3, NetworkFederation.prefers)
    request = registry.method_class(key)().start(spec).request(("north",))
    reply = asked(here, request)
    assert reply["error"] == "DataError"
    assert "asthma" in shown[-1].text
    assert "asthma" not in json.dumps(reply)


def test_of_an_error_in_other_software_the_server_hears_the_type_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, shown = named()

    def broken(*_: Any) -> None:
        raise RuntimeError("cannot open /data/patients/asthma")

    monkeypatch.setattr(here, "_describe", broken)
    reply, _ = here.reply(note_for("describe", ["angina", "asthma", "scabies"]), np.empty(0, np.uint8))
    assert (reply["error"], "patients" in json.dumps(reply)) == ("RuntimeError", False)
    assert "patients" in shown[-1].text
    assert "Traceback" in capsys.readouterr().err
