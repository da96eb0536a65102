"""What every personalised gradient method must pass: resume, files, odd clients, side by side or alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.errors import DataError
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.networks import build_network
from tests.gradient import plain
from tests.gradient.plain import CLASSES, WIDTH, federation, rows, same_bits, uneven


class Stop(Exception):
    """The server goes away."""


def small(count: int = 40) -> Any:
    """Clients of 4, 8, 12 and 16 rows."""
    features, labels = rows(count)
    return federation(features, labels, uneven(count))


def odd(parts: int = 4) -> Any:
    """Clients with one row, with one class, with no rows, and an ordinary one."""
    features, labels = rows(40)
    owners = np.full(40, 3)
    owners[0] = 0
    owners[np.flatnonzero(labels[1:] == 1)[:6] + 1] = 1
    return federation(features, labels, owners, clients=parts)


def personal(fed: Any, model: GradientModel) -> dict[str, Any]:
    """Every client's own model."""
    return {participant.name: participant.personalise(model) for participant in fed.participants}


def same_model(left: Any, right: Any) -> bool:
    (mine, note), (theirs, other) = left.contents(), right.contents()
    return same_bits(mine, theirs) and note == other


def twin(name: str) -> Any:
    """A head that trains in stacks as a module that trains by itself."""
    return build_network(name, WIDTH, CLASSES, dtype="float64")


def check_resume(method: Any, folder: Path, after: int = 2) -> None:
    """A run that stopped after an exchange, resumed by new clients, is the one that never stopped."""

    def stop(record: Any, exchanges: int) -> None:
        if record.exchange == after:
            raise Stop

    whole = small()
    expected = method.fit(whole)
    with pytest.raises(Stop):
        method.fit(small(), checkpoint=folder / "run", follow=stop)
    fresh = small()
    found = method.fit(fresh, checkpoint=folder / "run", resume=True)
    assert same_bits(found.weights, expected.weights)
    assert len({record.cohort for record in found.history}) > 1
    mine, theirs = personal(fresh, found), personal(whole, expected)
    assert all(same_model(mine[client], theirs[client]) for client in theirs)


def check_files(fed: Any, model: GradientModel, folder: Path) -> None:
    """Shared and personal models predict the same from a file; the personal ones stay where they are."""
    features, _ = rows(15, seed=5)
    model.save(folder / "shared")
    shared = fs.load_model(folder / "shared")
    for participant in fed.participants:
        own = participant.personalise(model)
        assert own.private
        assert type(own) is type(model.personal(participant.name))
        own.save(folder / participant.name)
        loaded = fs.load_model(folder / participant.name)
        assert type(loaded) is type(own)
        assert same_model(loaded, own)
        assert np.array_equal(loaded.decision_function(features), own.decision_function(features))
        assert same_model(participant.personalise(shared), own)
        with pytest.raises(DataError, match="one client's own already"):
            own.personalised(participant.data)


def check_odd_clients(method: Any) -> None:
    """Clients with one row, one class or none have a model, and know the classes that they have."""
    fed = odd()
    model = method.fit(fed)
    for client, own in personal(fed, model).items():
        assert np.isfinite(own.decision_function(rows(5, seed=9)[0])).all(), client
    late = fs.ClientData(*rows(9, seed=4))
    assert model.personalised(late).predict(late.source).shape == (9,)


def check_side_by_side(kind: Any, name: str = "mlp:5", **parameters: Any) -> None:
    """Heads in a stack are those that train one at a time."""
    features, _ = rows(15, seed=5)
    stacked, single = (
        (fed := small(), kind(network=network, precision="float64", **parameters).fit(fed))
        for network in (name, twin(name))
    )
    assert plain.far(stacked[1].weights, single[1].weights) < 1e-10
    mine, theirs = personal(*stacked), personal(*single)
    for client in mine:
        gap = mine[client].decision_function(features) - theirs[client].decision_function(features)
        assert np.abs(gap).max() < 1e-10
