"""Recorded work of a GPU, with a recorder that needs none."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fedsolve.backends import torch_replays  # noqa: E402
from fedsolve.backends.torch_replays import MOST, Replays  # noqa: E402


@pytest.fixture
def recorded(monkeypatch):
    """Names of what was recorded: work is replayed by being done again on the recording's own tensors."""
    names: list[str] = []

    def record(work, inputs):
        places = tuple(tensor.clone() for tensor in inputs)
        results = tuple(torch.empty_like(tensor) for tensor in work(*places))
        names.append(work.__name__)

        def replay():
            for result, value in zip(results, work(*places), strict=True):
                result.copy_(value)

        return torch_replays._Recording(replay, places, results)

    monkeypatch.setattr(Replays, "_record", staticmethod(record))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    return names


def double(tensor):
    return (2 * tensor,)


def test_the_second_time_it_is_recorded_and_results_stay_what_they_were(recorded):
    replays, found = Replays(), []
    for number in range(4):
        found.append(replays.run("double", double, torch.full((3,), float(number)))[0])
    assert recorded == ["double"]
    assert [float(tensor[0]) for tensor in found] == [0.0, 2.0, 4.0, 6.0]


def test_another_shape_or_name_is_other_work_and_the_oldest_is_forgotten(recorded):
    replays = Replays()
    for _ in range(2):
        for size in range(1, MOST + 2):
            replays.run("double", double, torch.ones(size))
    assert not recorded  # each was forgotten before it came again
    for size in (1, 1, 2, 2):
        replays.run("other", double, torch.ones(size))
    assert len(recorded) == 2


def test_what_cannot_be_recorded_is_done_as_it_is(monkeypatch, recorded):
    def fail(work, inputs):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(Replays, "_record", staticmethod(fail))
    replays = Replays()
    replays.run("double", double, torch.zeros(()))
    with pytest.warns(RuntimeWarning, match="no room"):
        replays.run("double", double, torch.zeros(()))
    for number in range(3):
        assert float(replays.run("double", double, torch.full((), float(number)))[0]) == 2.0 * number


def test_on_another_stream_nothing_is_replayed(monkeypatch, recorded):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "another")
    replays = Replays()
    for _ in range(3):
        replays.run("double", double, torch.ones(2))
    assert not recorded
