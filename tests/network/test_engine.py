"""The engine's rules, without a network: order, refusals by name, policies, catching up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import numpy as np
import pytest

import fedsolve as fs
from fedsolve import registry, version
from fedsolve.container import canonical_json
from fedsolve.errors import CohortError, DataError, ModelFileError, TermError
from fedsolve.federation.encoding import encode_term
from fedsolve.federation.engine import Spec, hears
from fedsolve.federation.messages import Term
from fedsolve.gradient.fedbn import FedBN
from fedsolve.network.answering import Answerer
from fedsolve.network.expected import expected_layout
from fedsolve.network.link import Reply
from fedsolve.network.network_federation import NetworkFederation
from fedsolve.network.running import State, finished, run_method, say_over_late
from fedsolve.scoring.importance import feature_importances

from .pretended import PretendedLink
from .sites import CLASSES, NAMES, Sites, relative_difference, same_bits, small

METHOD = fs.DeepAFL(layers=3, width=40)


@pytest.fixture(scope="module")
def sites(digits) -> Sites:
    return Sites.of(digits.head(500), min_size=5)


def answerers(sites: Sites, **options) -> list[Answerer]:
    return [Answerer(name, sites.client_data(name), **options) for name in sites.names]


def federate(link: PretendedLink, **options) -> NetworkFederation:
    settings = {"clients": len(link.sites), "classes": CLASSES, "interval": 0.001, "grace": 0.0, **options}
    return NetworkFederation(link, **settings)


def federated(link: PretendedLink, state: State, **options) -> NetworkFederation:
    """A federation that goes on from what this folder says, and reports to it."""
    return federate(link, begun=state.begun(), report=state.enter, **options)


KEYS = [
    pytest.param(info.key, marks=[pytest.mark.slow] if info.key == "auto" else [])
    for info in registry.methods()
    if "statistics" not in registry.method_class(info.key).__module__  # they need a schema
    and info.key != "private"  # its noise is never the same
]


# -- equality --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [METHOD, fs.AFL(ridge=0.1), fs.DeepAFL(layers=2, width=24, scale="standard")]
)
def test_same_bits_as_in_one_process(sites, method):
    link = PretendedLink(answerers(sites))
    federation = federate(link)
    model = method.fit(federation)
    parameters = {**method.parameters(), "exchange": "single"} if "layers" in method.parameters() else None
    local = type(method)(**parameters) if parameters else method
    expected = local.fit(sites.local())
    assert same_bits(model, expected)
    for mine, theirs in zip(model.history, expected.history, strict=True):
        for part in ("cohort", "bytes_up", "bytes_down", "catch_up_bytes", "empty", "kind"):
            assert getattr(mine, part) == getattr(theirs, part)
    assert federation.evaluate(model) == sites.local().evaluate(expected)


@pytest.mark.parametrize("key", KEYS)
def test_every_method_gives_what_it_gives_in_one_process(sites, key):
    method = small(key)
    federation = federate(PretendedLink(answerers(sites, networks=[FedBN.trial().network])))
    model, expected = method.fit(federation), method.fit(sites.local())
    # Clients of one process may be trained together, which rounds float32 differently.
    assert relative_difference(model, expected) <= 1e-6
    if key == "auto":  # its candidates take the plan that an engine prefers: fewer bytes, or fewer exchanges
        assert {record.cohort for record in model.history} == {record.cohort for record in expected.history}
        return
    assert [record.cohort for record in model.history] == [record.cohort for record in expected.history]
    assert [record.bytes_up for record in model.history] == [record.bytes_up for record in expected.history]


def test_calibrated_probabilities_are_those_of_one_process(sites):
    method = fs.Recipe(fs.DeepAFL(layers=1, width=24, exchange="single"), calibrate=True)
    federation = federate(PretendedLink(answerers(sites)))
    model, expected = method.fit(federation), method.fit(sites.local())
    assert same_bits(model, expected)
    assert model.calibration.slope == expected.calibration.slope
    assert [record.kind for record in model.history] == [record.kind for record in expected.history]
    found, local = (
        fs.evaluate(federation, model, detailed=True),
        fs.evaluate(sites.local(), expected, detailed=True),
    )
    assert found.measures() == local.measures()
    assert feature_importances(federation, model, columns=["feature 20"]) == feature_importances(
        sites.local(), expected, columns=["feature 20"]
    )


def test_few_exchanges_are_preferred(sites):
    assert federate(PretendedLink(answerers(sites))).describe().prefers == "exchanges"
    assert len(METHOD.fit(federate(PretendedLink(answerers(sites)))).history) == METHOD.layers


def test_terms_are_taken_in_the_order_of_names(sites):
    link = PretendedLink(answerers(sites)[::-1])
    federation = federate(link)
    federation.describe()
    link.taken.clear()
    fs.AFL(ridge=1.0).fit(federation)
    assert link.taken == sorted(NAMES)


# -- what a site must not send ---------------------------------------------------------------------


def by_hand(note: dict) -> bytes:
    """A term without arrays whose note holds anything."""
    head = json.dumps({"__metadata__": {"fedsolve": json.dumps({"wire": 2, **note})}}).encode()
    return len(head).to_bytes(8, "little") + head


ENDLESS = float("inf")
RAW = {
    "have endless": {"message": "needs", "have": ENDLESS},
    "have negative": {"message": "needs", "have": -5},
    "counts endless": {"message": "term", "counts": {"rows": ENDLESS}, "symmetric": [], "factors": {}},
    "nothing": {"message": "term", "counts": {}, "symmetric": [], "factors": {}},
}


def spoiled(answer: str, site: str = "south"):
    """Answers of a site that cannot be used."""

    def meddle(name, note, payload):
        if name != site:
            return note, payload
        if answer == "truncated":
            return note, payload[: len(payload) // 2]
        if answer == "corrupted":
            return note, b"\xff" * 200 + payload[200:]
        if answer == "exchange":
            return {**note, "exchange": 7}, payload
        if answer == "run":
            return {**note, "run": "another"}, payload
        if answer == "digest":
            return {**note, "digest": "0" * 64}, payload
        if answer == "name":
            return {**note, "name": "another"}, payload
        if answer in RAW:
            return note, by_hand(RAW[answer])
        gram = np.eye(64 if answer in ("nan", "infinite") else 9)
        if answer in ("nan", "infinite"):
            gram[0, 0] = np.nan if answer == "nan" else np.inf
        term = Term({"gram": gram, "cross": np.zeros((64, 10)), "label_square": np.zeros(10)}, {"rows": 1})
        if answer == "names":
            term = Term({"gram": np.eye(64)}, {"rows": 1})
        term.symmetric = frozenset({"gram"})
        return note, encode_term(term)

    return meddle


SPOILED = {
    "truncated": "truncated",
    "corrupted": "damaged",
    "exchange": "exchange 7",
    "run": "'another'",
    "digest": "digest",
    "shape": "'gram' of 'SITE' has shape",
    "names": "'SITE' sent",
    "nan": "'SITE': 'gram' contains NaN",
    "name": "'another'",
    "have endless": "incomplete",
    "have negative": "from -5 on",
    "counts endless": "incomplete",
    "nothing": "'SITE' sent []",
    "infinite": "'SITE': 'gram' contains NaN or infinite",
}


@pytest.mark.parametrize("site", ["east", "south"])  # the first of the order, and another
@pytest.mark.parametrize(("kind", "words"), SPOILED.items())
def test_a_term_that_cannot_be_used_is_refused_by_name(sites, kind, words, site):
    link = PretendedLink(answerers(sites), spoiled(kind, site))
    federation = federate(link, missing="continue", min_clients=3)
    model = fs.AFL(ridge=0.1).fit(federation)
    others = tuple(name for name in NAMES if name != site)
    (record,) = model.history
    assert record.cohort == others
    assert words.replace("SITE", site) in record.missing[site]
    assert "TermError" in record.missing[site]
    assert federation.reports[-1].failed == dict(record.missing)
    assert federation.reports[-1].coverage == 0.75
    assert same_bits(model, fs.AFL(ridge=0.1).fit(sites.local(others)))


def test_where_terms_are_unknown_two_that_contradict_each_other_stop_the_run(sites, monkeypatch):
    monkeypatch.setattr("fedsolve.network.network_federation.expected_layout", lambda *_: None)
    link = PretendedLink(answerers(sites), spoiled("shape", "east"))
    with pytest.raises(CohortError, match="'east' and 'north' contradict each other"):
        fs.AFL(ridge=0.1).fit(federate(link, missing="continue"))


@pytest.mark.parametrize("key", KEYS)
def test_the_server_knows_what_terms_look_like(sites, key):
    told = []
    link = PretendedLink(answerers(sites, networks=[FedBN.trial().network]))
    small(key).fit(federate(link, tell=told.append))
    assert not any("the first one only" in text for text in told)


@pytest.mark.parametrize(
    ("method", "small"),
    [
        (fs.AFL(), True),
        (fs.DeepAFL(width=100), True),
        (fs.DeepAFL(width=101), False),
        (fs.DeepAFL(width=40, hidden_width=101), False),
        (fs.APFL(width=40, refinement_width=101), True),  # a refinement never leaves its client
        (fs.APFL(width=101), False),
        (fs.Cascade(width=101), False),
    ],
)
def test_the_server_answers_itself_only_where_matrices_are_small(method, small, monkeypatch):
    monkeypatch.setattr("fedsolve.network.expected._LARGE", 8 * 100**2)
    spec = Spec(64, np.arange(10), 10, "exchanges")
    run = method.start(spec)
    layout = expected_layout(run.request(("east",)), run.chain, spec)
    assert (layout is not None) == small
    if layout is not None:
        assert max(max(shape) for shape, _ in layout.forms.values()) <= method.largest_side(spec)


def test_a_site_without_rows_takes_part_in_training(sites):
    members = answerers(sites)
    members[1] = Answerer("north", fs.ClientData(np.zeros((0, 64)), np.zeros(0, dtype=int)))
    model = small("fedavg").fit(federate(PretendedLink(members)))
    assert model.history[0].empty == ("north",)
    expected = small("fedavg").fit(sites.local(("east", "south", "west")))
    assert relative_difference(model, expected) <= 1e-6


def test_a_site_without_a_full_batch_takes_part_as_in_one_process(sites):
    rows = {name: slice(None) for name in NAMES} | {"north": slice(3)}

    def data(name):
        return fs.ClientData(sites.data.features, sites.data.labels, sites.rows(name)[rows[name]])

    method = dataclasses.replace(small("fedavg"), batch=4, last_batch="drop")
    model = method.fit(federate(PretendedLink([Answerer(name, data(name)) for name in NAMES])))
    members = [fs.Participant(name, data(name)) for name in NAMES]
    expected = method.fit(fs.LocalFederation(members, classes=CLASSES, workers=1))
    assert all(record.cohort == NAMES for record in model.history)
    assert relative_difference(model, expected) <= 1e-6


def test_a_site_called_like_an_array_takes_part(sites):
    names = ("cross", "square", "gram", "weight")
    members = [Answerer(new, sites.client_data(old)) for new, old in zip(names, NAMES, strict=True)]
    federation = federate(PretendedLink(members), missing="continue")
    model = fs.DeepAFL(layers=2, width=24).fit(federation)
    assert all(record.cohort == tuple(sorted(names)) for record in model.history)


class Describing(PretendedLink):
    """Links whose site "north" describes itself in another way."""

    change: Mapping[str, object] = MappingProxyType({})
    damaged = None

    def receive(self, message):
        reply = super().receive(message)
        number, _, note, _ = self.open[message]
        if reply is None or self.sites[number].name != "north":
            return reply
        if note["ask"] == "describe":
            return Reply({**reply.note, **self.change}, reply.payload)
        return self.damaged or reply


@pytest.mark.parametrize(
    "change",
    [
        {"features": "many"},
        {"features": None},
        {"features": 10**400},
        {"features": True},
        {"targets": None},
        {"targets": -1},
        {"fedsolve": 9},
        {"name": "a\x1b[2J"},
        {"classes": {"kind": "zz"}},
        {"classes": None},
        {"classes": [["a"], 3]},
        {"columns": 7},
        {"columns": {"digest": "a", "names": [["a"]], "label": None}},
        {"columns": {"digest": "a", "names": ["a"] * 64, "label": None}},
        {"columns": {"digest": "a", "names": ["a"], "label": None}},
        {"columns": {"digest": "a", "names": None, "label": {}}},
    ],
)
def test_a_site_that_describes_itself_with_rubbish_is_not_taken_in(sites, change):
    told = []
    link = Describing(answerers(sites, share_classes=True))
    link.change = change
    classes = None if "classes" in change else CLASSES
    federation = federate(link, classes=classes, clients=3, tell=told.append)
    assert federation.describe().outputs > 1
    assert federation.clients == ("east", "south", "west")
    (why,) = [text for text in told if "not taken in" in text]
    assert why.startswith("'north'")
    assert why.isprintable()


def test_an_answer_that_cannot_be_put_together_is_refused_by_name(sites):
    link = Describing(answerers(sites))
    link.damaged = Reply({}, failure="its chunks are not there", damaged=True)
    model = fs.AFL(ridge=0.1).fit(federate(link, missing="continue", min_clients=3))
    assert "its chunks are not there" in model.history[0].missing["north"]


def test_a_site_whose_answers_never_come_is_given_up(sites, monkeypatch):
    monkeypatch.setattr("fedsolve.network.questions._LOST", 2)
    link = Describing(answerers(sites))
    link.damaged = Reply({}, failure="it stopped in the middle of its answer", absent=True)
    model = fs.AFL(ridge=0.1).fit(federate(link, missing="continue", min_clients=3, grace=60.0))
    assert "lost 3 times" in model.history[0].missing["north"]


def test_what_a_site_says_is_shown_as_one_plain_line(sites):
    def refuse(name, note, payload):
        if name != "south":
            return note, payload
        return {**note, "ok": False, "error": "x", "message": "\x1b[2J\nall is well"}, b""

    model = fs.AFL(ridge=0.1).fit(federate(PretendedLink(answerers(sites), refuse), missing="continue"))
    assert model.history[0].missing["south"].isprintable()


def test_a_key_registered_under_another_name_is_refused(sites):
    class Renamed(PretendedLink):
        def nodes(self):
            return {
                number: dataclasses.replace(node, name="clinic" if node.name == "west" else node.name)
                for number, node in super().nodes().items()
            }

    with pytest.raises(
        CohortError, match=r"calls itself 'west', but its key is registered as 'clinic'.*--name"
    ):
        federate(Renamed(answerers(sites)), patience=0.05).describe()


@pytest.mark.parametrize("missing", ["wait", "error"])
def test_a_term_that_cannot_be_used_stops_the_run(sites, missing, tmp_path):
    link = PretendedLink(answerers(sites), spoiled("nan"))
    with pytest.raises(CohortError, match=r"'south' failed in exchange 0 .*NaN"):
        fs.AFL(ridge=0.1).fit(federate(link, missing=missing))


def test_damage_on_the_way_is_asked_for_again(sites):
    damaged = []

    def once(name, note, payload):
        if name == "north" and not damaged:
            damaged.append(name)
            return note, payload[:-8]
        return note, payload

    federation = federate(PretendedLink(answerers(sites), once))
    model = fs.AFL(ridge=0.1).fit(federation)
    assert same_bits(model, fs.AFL(ridge=0.1).fit(sites.local()))
    assert federation.reports[-1].again == {"north": 1}


# -- sites that refuse -----------------------------------------------------------------------------


def test_unknown_label_is_refused_at_the_start_and_told_on_both_sides(sites):
    told, shown = [], []
    members = answerers(sites, show=shown.append)
    federation = federate(PretendedLink(members), classes=[0, 1, 2], tell=told.append, patience=0.05)
    with pytest.raises(CohortError, match=r"Not taken in: .*a label that is not one of the 3 classes"):
        federation.describe()
    assert any("is not one of the" in text for text in told)
    assert any(event.what == "refused" and "is not one of the" in event.text for event in shown)


def test_a_site_that_refuses_and_leaves_is_named(sites):
    class Leaving(PretendedLink):
        def nodes(self):
            return {n: node for n, node in super().nodes().items() if node.name != "south" or not self.sent}

    told = []
    federation = federate(Leaving(answerers(sites)), classes=[0, 1, 2], tell=told.append, patience=0.05)
    with pytest.raises(CohortError):
        federation.describe()
    assert any(text.startswith("'south' is not taken in") for text in told)


def test_classes_are_collected_only_with_consent(sites):
    refusing = federate(PretendedLink(answerers(sites)), classes=None, patience=0.05)
    with pytest.raises(CohortError, match="--share-classes"):
        refusing.describe()
    agreed = federate(PretendedLink(answerers(sites, share_classes=True)), classes=None).describe()
    assert agreed.classes is not None
    assert agreed.classes.tolist() == np.unique(sites.data.labels).tolist()


def test_numbers_are_no_classes_by_mistake_and_a_regression_is_that_of_pooled_rows(sites):
    def members(targets):
        rows = (sites.rows(name) for name in NAMES)
        held = [fs.ClientData(sites.data.features[own], targets[own]) for own in rows]
        pairs = zip(NAMES, held, strict=True)
        return PretendedLink([Answerer(name, data, share_classes=True) for name, data in pairs])

    targets = sites.data.features @ np.linspace(-1, 1, sites.data.features.shape[1]) / 7
    with pytest.raises(CohortError, match="are numbers, and the server wants classes"):
        federate(members(targets), classes=None, patience=0.05).describe()
    with pytest.raises(fs.DataError, match=r"numbers as labels .* classes or a quantity"):
        federate(members(np.rint(100 * targets)), classes=None, patience=0.05).describe()
    method = fs.AFL(ridge=0.1, intercept=True)
    over = method.fit(federate(members(targets), classes=None, task="regression"), calibrate=True)
    owners = np.zeros(len(targets), dtype=int)
    pooled = method.fit(fs.LocalFederation.from_arrays(sites.data.features, targets, owners), calibrate=True)
    shown = sites.data.features[sites.rows(NAMES[0])]
    np.testing.assert_allclose(over.predict(shown), pooled.predict(shown), atol=1e-9)
    assert np.array_equal(over.spread.counts, pooled.spread.counts)


def test_a_class_list_that_a_site_did_not_agree_to_is_refused(sites):
    link = PretendedLink(answerers(sites, classes=[*CLASSES, 10]))
    with pytest.raises(CohortError, match="not the one 'east' agreed to"):
        federate(link, patience=0.05).describe()


def test_text_and_numbers_that_spell_the_same_classes_agree(sites):
    members = answerers(sites)
    text = [
        Answerer(
            name,
            fs.ClientData(
                sites.data.features[sites.rows(name)], sites.data.labels[sites.rows(name)].astype(str)
            ),
        )
        for name in NAMES
    ]
    numbers = fs.AFL(ridge=0.1).fit(federate(PretendedLink(members)))
    spelt = fs.AFL(ridge=0.1).fit(federate(PretendedLink([*members[:2], *text[2:]])))
    assert same_bits(numbers, spelt)


def test_another_width_is_refused_on_both_sides(sites):
    shown = []
    narrow = Answerer("west", fs.ClientData(np.zeros((3, 5)), np.array([0, 1, 2])), show=shown.append)
    link = PretendedLink([*answerers(sites)[:3], narrow])
    federation = federate(link, patience=0.05)
    with pytest.raises(CohortError, match="'west' has 5 features per row, the others"):
        federation.describe()
    note = next(note for name, note in link.sent if note["ask"] == "tell")
    narrow.reply(note, np.empty(0, np.uint8))
    assert "refused: 'west' has 5 features" in shown[-1].text


@pytest.mark.parametrize(
    ("change", "words"),
    [({"fedsolve": 99}, "protocol 99"), ({"version": "9.9"}, "fedsolve 9.9"), ({"ask": "dance"}, "dance")],
)
def test_a_server_of_another_version_is_refused(sites, change, words):
    shown = []
    site = Answerer("east", sites.client_data("east"), show=shown.append)
    note = {
        "fedsolve": version.PROTOCOL,
        "version": fs.__version__,
        "ask": "describe",
        "classes": None,
        **change,
    }
    answer, payload = site.reply(note, np.empty(0, np.uint8))
    assert (answer["ok"], payload) == (False, b"")
    assert words in answer["message"]
    assert words in shown[-1].text


def test_other_projections_are_refused_on_both_sides(sites, monkeypatch):
    shown = []
    link = PretendedLink(answerers(sites, show=shown.append))
    monkeypatch.setattr("fedsolve.closedform.deepafl.projection_agreement", lambda seed: {"projection": "x"})
    with pytest.raises(CohortError, match="random projections differ"):
        METHOD.fit(federate(link))
    assert any("random projections differ" in event.text for event in shown)


def test_an_error_of_the_data_is_an_error_of_the_data(sites):
    def refuse(name, note, payload):
        return {**note, "ok": False, "error": "DataError", "message": "label 3"}, b""

    with pytest.raises(DataError, match="participant 'east': label 3"):
        fs.AFL().fit(federate(PretendedLink(answerers(sites), refuse)))


# -- sites that are away ---------------------------------------------------------------------------


def test_too_late_is_reported_and_the_rest_is_exact(sites):
    def lose(name, note, payload):
        return None if name == "north" else (note, payload)

    link = PretendedLink(answerers(sites), lose)
    federation = federate(link, missing="continue", min_clients=3, patience=0.2)
    model = fs.AFL(ridge=0.1).fit(federation)
    assert "too late" in model.history[0].missing["north"]
    assert list(federation.reports[-1].late) == ["north"]
    assert same_bits(model, fs.AFL(ridge=0.1).fit(sites.local(("east", "south", "west"))))


def test_too_few_answers_stop_with_a_checkpoint_that_goes_on(sites, tmp_path):
    silent: set[str] = set()

    def lose(name, note, payload):
        return None if name in silent else (note, payload)

    def train(*follow):
        state, settings = State(tmp_path), {"missing": "continue", "min_clients": 4, "patience": 0.2}
        return run_method(fs.Recipe(METHOD), federated(link, state, **settings), state, follow)

    def silence(record, expected):
        if record.exchange == 0:
            silent.add("north")

    link = PretendedLink(answerers(sites), lose)
    with pytest.raises(CohortError, match=r"exchange 1 .*3 of 4 participants answered, at least 4"):
        train(hears("advanced", silence))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == "stopped"
    assert "at least 4" in report["why"]
    told = [note for _, note in link.sent if note["ask"] == "tell"]
    assert {(note["over"], note["failed"]) for note in told} == {(True, True)}
    silent.clear()
    link = PretendedLink(answerers(sites), lose)  # every site started anew, too
    model = train()
    assert same_bits(model, fs.DeepAFL(layers=3, width=40, exchange="single").fit(sites.local()))
    assert [record.exchange for record in model.history] == [0, 1, 2]
    assert model.history[1].catch_up_bytes > 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == "complete"
    assert (report["calibrate"], report["calibrated"]) == (False, False)
    assert [cohort["exchange"] for cohort in report["cohorts"]] == [0, 1, 1, 2]


def test_a_site_that_started_anew_is_asked_again_and_brought_up_to_date(sites):
    members = answerers(sites)
    lost = []

    def lose(name, note, payload):
        if name == "south" and note["exchange"] == 2 and not lost:
            lost.append(name)
            number = link.number(name)
            link.sites[number] = Answerer(name, sites.client_data(name))
            link.activations[number] = "second"
            return None
        return note, payload

    link = PretendedLink(members, lose)
    federation = federate(link)
    model = METHOD.fit(federation)
    assert lost == ["south"]
    assert federation.reports[-1].again == {"south": 1}
    assert [record.catch_up_bytes > 0 for record in model.history] == [False, False, True]
    assert same_bits(model, fs.DeepAFL(layers=3, width=40, exchange="single").fit(sites.local()))


def test_a_site_that_joins_later_takes_part_from_then_on(sites):
    link = PretendedLink(answerers(sites))
    link.present.discard(link.number("west"))
    federation = federate(link, clients=3)

    def join(record, expected):
        if record.exchange == 0:
            link.present.add(link.number("west"))

    model = METHOD.fit(federation, follow=join)
    assert "west" not in model.history[0].cohort
    assert "west" in model.history[-1].cohort
    assert model.history[1].catch_up_bytes > 0
    assert sites.difference_from_textbook(model) <= 1e-9


def test_a_site_that_leaves_is_not_asked_any_more(sites):
    link = PretendedLink(answerers(sites))
    federation = federate(link, missing="continue", min_clients=2)

    def leave(record, expected):
        if record.exchange == 0:
            link.present.discard(link.number("east"))

    model = METHOD.fit(federation, follow=leave)
    assert "east" not in model.history[-1].cohort
    assert sites.difference_from_textbook(model) <= 1e-9


def test_a_refused_site_that_was_mended_is_taken_in(sites):
    link = PretendedLink(
        [*answerers(sites)[:3], Answerer("west", fs.ClientData(np.zeros((3, 5)), [0, 1, 2]))]
    )

    def mend(text):
        if "not taken in" in text:
            link.sites[4] = Answerer("west", sites.client_data("west"))
            link.activations[4] = "second"

    federation = federate(link, tell=mend)
    assert same_bits(fs.AFL(ridge=0.1).fit(federation), fs.AFL(ridge=0.1).fit(sites.local()))


def test_two_sites_of_one_name_are_told_apart(sites):
    members = [Answerer("east", sites.client_data("east")), Answerer("east", sites.client_data("west"))]
    federation = federate(PretendedLink(members, named=False), patience=0.05)
    with pytest.raises(CohortError, match="two sites are called 'east'"):
        federation.describe()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_site_that_comes_back_as_another_node_is_asked_in_the_same_exchange(sites, overlap):
    lost, told = [], []

    def lose(name, note, payload):
        if name != "north" or note["exchange"] != 1 or (9 in link.present and 2 not in link.present):
            return note, payload
        if not lost:
            lost.append(name)
            link.sites[9], link.activations[9] = Answerer("north", sites.client_data("north")), "second"
            link.present.add(9)
            if not overlap:
                link.present.discard(2)
        return None

    def seen(text):
        told.append(text)
        if "two sites are called" in text:  # the network has noticed only now that the first is gone
            link.present.discard(2)

    link = PretendedLink(answerers(sites), lose, named=False)
    model = METHOD.fit(federate(link, tell=seen))
    assert same_bits(model, fs.DeepAFL(layers=3, width=40, exchange="single").fit(sites.local()))
    assert overlap == any("two sites are called" in text for text in told)


def test_who_is_waited_for_is_told_once(sites):
    told = []

    def leave(record, expected):
        if record.exchange == 0:
            link.present.discard(2)

    def seen(text):
        told.append(text)
        if "waiting for 'north'" in text:
            link.present.add(2)

    link = PretendedLink(answerers(sites))
    METHOD.fit(federate(link, tell=seen), follow=leave)
    (text,) = [text for text in told if "not connected" in text]
    assert text == "exchange 2: waiting for 'north': it is not connected"


def test_who_of_the_registered_is_awaited_is_named(sites):
    told = []
    link = PretendedLink(answerers(sites))
    link.listed = frozenset(NAMES)
    link.present.discard(link.number("south"))
    with pytest.raises(CohortError, match="3 of 4 clients came"):
        federate(link, tell=told.append, patience=0.3).describe()
    assert "3 of 4 clients are there; waiting for south" in told
    link.listed |= {"zoo"}
    with pytest.raises(CohortError, match="3 of 4 clients came"):
        federate(link, tell=told.append, patience=0.3).describe()
    assert told[-1] == "3 of 4 clients are there; waiting for 1 of south and zoo"


def test_a_site_taken_off_the_list_is_not_waited_for(sites):
    def remove(record, expected):
        if record.exchange == 0:
            link.present.discard(2)

    def seen(text):
        if "waiting for 'north'" in text:
            link.listed = frozenset(NAMES) - {"north"}

    link = PretendedLink(answerers(sites))
    link.listed = frozenset(NAMES)
    model = METHOD.fit(federate(link, tell=seen), follow=remove)
    assert model.history[1].missing == {"north": "not registered any more"}
    assert model.history[2].cohort == ("east", "south", "west")
    assert sites.difference_from_textbook(model) <= 1e-9


def test_more_answers_than_sites_cannot_be_asked_for(sites):
    with pytest.raises(DataError, match="min_clients is 5, but only 4"):
        federate(PretendedLink(answerers(sites)), min_clients=5)


# -- a run in a state folder -----------------------------------------------------------------------


class Killed(BaseException):
    """The end of the server's process."""


def kill(record, expected):
    raise Killed


@pytest.mark.parametrize(
    ("options", "words"),
    [({"classes": range(12)}, "whose classes is"), ({"task": "regression"}, "whose task is classification")],
)
def test_a_run_goes_on_only_with_what_it_was_started_with(sites, tmp_path, options, words):
    def train(*follow, **options):
        state = State(tmp_path)
        federation = federated(PretendedLink(answerers(sites)), state, **options)
        return run_method(fs.Recipe(METHOD), federation, state, follow)

    with pytest.raises(Killed):
        train(hears("advanced", kill))
    with pytest.raises(ModelFileError, match=words):
        train(**options)
    train()
    assert finished(fs.Recipe(METHOD), State(tmp_path), CLASSES, clients=4) is not None
    with pytest.raises(ModelFileError, match=words):
        finished(fs.Recipe(METHOD), State(tmp_path), **{"classes": CLASSES, **options})
    with pytest.raises(ModelFileError, match="whose clients is 4, asked is 3"):
        finished(fs.Recipe(METHOD), State(tmp_path), CLASSES, clients=3)


def test_a_run_that_goes_on_is_the_same_one_for_the_sites(sites, tmp_path):
    runs = []
    for progress in (kill, lambda record, expected: None):
        link, state = PretendedLink(answerers(sites)), State(tmp_path)
        with suppress(Killed):
            run_method(fs.Recipe(METHOD), federated(link, state), state, [progress])
        runs.append({note["run"] for _, note in link.sent})
    assert len(runs[0] | runs[1]) == 1


def test_sites_are_told_that_a_run_is_over_after_a_server_that_could_not(sites, tmp_path):
    shown, state = [], State(tmp_path)
    link = PretendedLink(answerers(sites, show=shown.append))

    run_method(fs.Recipe(METHOD), federated(link, state), state)
    assert not state.over.exists()
    link.present.discard(1)  # heard it, and left
    say_over_late(federated(link, state), state, patience=0.05)
    assert sum(event.over for event in shown) == 3
    assert state.over.exists()


def test_rows_that_change_in_the_middle_of_a_run_are_refused(sites, tmp_path):
    def member(name, share=1.0):
        rows = sites.rows(name)
        data = fs.ClientData(sites.data.features[rows] * share, sites.data.labels[rows])
        return Answerer(name, data, rows=tmp_path / f"{name}.json")

    def change(share):
        def changed(record, expected):
            if record.exchange == 0:
                link.sites[2], link.activations[2] = member("north", share), "second"

        return changed

    link = PretendedLink([member(name) for name in NAMES])
    METHOD.fit(federate(link), follow=change(1.0))  # started anew with the same rows
    with pytest.raises(DataError, match="rows of 'north' are not those"):
        METHOD.fit(federate(link), follow=change(2.0))
    METHOD.fit(federate(link))  # another run may have other rows


# -- a node that keeps the model so far on disk ----------------------------------------------------


def test_the_model_so_far_survives_a_fresh_process(sites, tmp_path):
    class Fresh(Answerer):
        """Started anew for every message, as Flower's own nodes do."""

        def reply(self, note, payload):
            return Answerer(self.name, self.data, state=tmp_path / self.name).reply(note, payload)

    link = PretendedLink([Fresh(name, sites.client_data(name)) for name in NAMES])
    model = METHOD.fit(federate(link))
    assert [record.catch_up_bytes for record in model.history] == [0, 0, 0]
    assert same_bits(model, fs.DeepAFL(layers=3, width=40, exchange="single").fit(sites.local()))


def test_a_damaged_file_of_the_model_so_far_is_as_good_as_none(sites, tmp_path):
    (tmp_path / "model-so-far.safetensors").write_bytes(b"nothing")
    members = [*answerers(sites)[:3], Answerer("west", sites.client_data("west"), state=tmp_path)]
    model = METHOD.fit(federate(PretendedLink(members)))
    assert same_bits(model, fs.DeepAFL(layers=3, width=40, exchange="single").fit(sites.local()))


def test_the_same_request_gives_the_same_bytes(sites):
    link = PretendedLink(answerers(sites))
    seen: dict[tuple, bytes] = {}

    def twice(name, note, payload):
        *_, request = link.open[f"message-{len(link.sent) - 1}"]
        again = link.sites[link.number(name)].reply(
            next(n for who, n in reversed(link.sent) if who == name),
            np.frombuffer(request, dtype=np.uint8),
        )
        assert again == (note, payload)
        seen[name, note["exchange"]] = payload
        return note, payload

    link.meddle = twice
    METHOD.fit(federate(link))
    assert len(seen) == len(NAMES) * METHOD.layers


def test_an_unreadable_request_is_refused(sites):
    site = Answerer("east", sites.client_data("east"))
    note = {
        "fedsolve": version.PROTOCOL,
        "version": fs.__version__,
        "ask": "answer",
        "exchange": 0,
        "classes": None,
    }
    answer, _ = site.reply(note, np.frombuffer(b"rubbish", dtype=np.uint8))
    assert (answer["ok"], answer["error"]) == (False, TermError.__name__)


@pytest.mark.parametrize("strange", [float("nan"), [[]], {"a": float("inf")}])
def test_a_server_cannot_have_a_site_send_what_cannot_be_sent(sites, strange):
    site = Answerer("east", sites.client_data("east"))
    note = {
        "fedsolve": version.PROTOCOL,
        "version": fs.__version__,
        "ask": "describe",
        "classes": None,
    }
    answer, _ = site.reply({**note, "run": strange, "exchange": strange}, np.empty(0, np.uint8))
    assert json.loads(canonical_json(answer))["ok"] is False


def test_a_site_answers_where_its_events_cannot_be_shown(sites):
    def full(event):
        raise OSError(28, "No space left on device")

    link = PretendedLink(answerers(sites, show=full))
    assert same_bits(fs.AFL(ridge=0.1).fit(federate(link)), fs.AFL(ridge=0.1).fit(sites.local()))


def test_an_answer_that_no_message_carries_is_refused_before_anybody_computes_it(sites):
    link = PretendedLink(answerers(sites))
    federation = federate(link)
    with pytest.raises(DataError, match=r"up to 9\.0 GiB; a message carries 8"):
        next(federation.carry("secure sums", {sites.names[0]: b""}, 9 << 30))
    method = fs.DeepAFL(layers=1, width=50_000)
    with pytest.raises(DataError, match=r"9\.3 GiB"):
        method.fit(federation)
    assert not any(note["ask"] == "answer" for _, note in link.sent)
