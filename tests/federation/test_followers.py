"""Everybody who hears of a training hears the same events, in the same order."""

from __future__ import annotations

import time

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.engine import Followers, Within, hears

METHOD = fs.DeepAFL(layers=2, width=8, exchange="lean")


class Heard(fs.Follower):
    """Notes every event with what matters of it."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def started(self, training):
        self.events.append(("started", training))

    def asked(self, request, expected):
        self.events.append(("asked", request.exchange, request.cohort))

    def look(self, run):
        self.events.append(("look", len(run.history)))
        return {"seen": len(run.history)}

    def advanced(self, record, expected):
        self.events.append(("advanced", record, expected))

    def finished(self, model):
        self.events.append(("finished", model))

    def scored(self, scores):
        self.events.append(("scored", scores))

    def stopped(self, problem):
        self.events.append(("stopped", problem))

    def close(self):
        self.events.append(("close",))

    @property
    def names(self) -> list[str]:
        return [event[0] for event in self.events]


def federation() -> fs.LocalFederation:
    random = np.random.default_rng(0)
    labels = np.arange(60) % 3
    features = random.normal(size=(60, 5)) + labels[:, None]
    return fs.LocalFederation.from_arrays(features, labels, np.arange(60) % 4)


def test_a_training_is_heard_from_its_beginning_to_its_end():
    heard, functions = Heard(), []
    model = METHOD.fit(
        federation(),
        follow=[
            hears("look", lambda run: {"watched": run.history[-1].exchange}),
            lambda record, expected: functions.append((record, expected)),
            heard,
        ],
    )
    count = len(model.history)
    assert heard.names == ["started", *["asked", "look", "advanced"] * count, "finished"]
    training = heard.events[0][1]
    assert (training.method, training.expected, training.history) == ("deepafl", count, ())
    assert training.parameters == METHOD.parameters()
    assert (len(training.clients), training.spec.features, training.checkpoint) == (4, 5, None)
    asked = [event[1:] for event in heard.events if event[0] == "asked"]
    assert asked == [(number, training.clients) for number in range(count)]
    advanced = [event[1:] for event in heard.events if event[0] == "advanced"]
    assert advanced == functions == [(record, count) for record in model.history]
    # What any of them measures is in the record that all of them get, and in the model's history.
    told = [(record.metrics["watched"], record.metrics["seen"]) for record in model.history]
    assert told == [(number, number + 1) for number in range(count)]
    assert heard.events[-1][1] is model
    rows = np.random.default_rng(1).normal(size=(9, 5))
    unheard = METHOD.fit(federation())
    np.testing.assert_array_equal(model.decision_function(rows), unheard.decision_function(rows))


def test_what_stops_a_training_is_heard_and_what_was_done_is_told_again(tmp_path):
    class Stop(BaseException): ...

    def stop(record, expected):
        if record.exchange == 1:
            raise Stop

    heard, path = Heard(), tmp_path / "run"
    with pytest.raises(Stop):
        METHOD.fit(federation(), path, follow=[stop, heard])
    assert heard.names[-2:] == ["look", "stopped"]
    assert isinstance(heard.events[-1][1], Stop)
    again = Heard()
    model = METHOD.fit(federation(), path, resume=True, follow=again)
    training = again.events[0][1]
    assert training.checkpoint == str(path)
    assert training.history == model.history[:2]
    assert [record.metrics["seen"] for record in model.history] == [*range(1, len(model.history) + 1)]


def test_followers_of_a_whole_are_told_of_its_parts_and_stay_open():
    heard = Heard()
    with Within([heard], "AFL, seed 1", {"seed": 1}) as one:
        fs.AFL(ridge=1.0).fit(federation(), follow=one)
        one.tell("scored", {"accuracy": 0.5})
    assert heard.names == ["started", "asked", "look", "advanced", "finished", "scored"]
    training = heard.events[0][1]
    assert (training.name, training.about) == ("AFL, seed 1", {"seed": 1})


def test_the_time_that_followers_take_is_counted():
    class Slow(fs.Follower):
        def advanced(self, record, expected):
            time.sleep(0.02)

        def look(self, run):
            time.sleep(0.02)
            return {}

    others, began = Followers([Slow(), Heard()]), time.perf_counter()
    fs.AFL(ridge=1.0).fit(federation(), follow=others)
    assert 0.04 <= others.seconds <= time.perf_counter() - began
