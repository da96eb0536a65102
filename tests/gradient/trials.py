"""How the methods' files try them: settings, methods made with these, and runs that are taken up again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedsolve import registry
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import (
    MOON,
    FedACG,
    FedAvg,
    FedAvgM,
    FedAWA,
    FedDisco,
    FedDyn,
    FedFisher,
    FedFisherKFAC,
    FedGen,
    FedLC,
    FedLPA,
    FedNTD,
    FedProx,
    FedRS,
    FedSOL,
    Scaffold,
)
from tests.gradient import plain
from tests.gradient.plain import network

ONE_SHOT = (FedLPA, FedFisher, FedFisherKFAC)
HOSTS = [FedAvg, FedProx, MOON, FedAvgM, FedSOL, FedRS, FedLC, FedACG, FedDyn, Scaffold, FedNTD, FedDisco]
HOSTS += [FedGen, FedAWA, *ONE_SHOT]
"""Methods that feedback alignment plugs into, those with personal models aside."""

each_network = pytest.mark.parametrize("name", plain.NETWORKS)
each_host = pytest.mark.parametrize("name", [*plain.NETWORKS, plain.ALIGNED])
"""Where feedback alignment must change what it should, and nothing else."""

SHORT: dict[str, Any] = {"precision": "float64", "rate": 0.2, "rounds": 3, "batch": 4, "epochs": 2}
"""Several local steps a round; clients of 4, 8, 12 and 16 rows have different numbers of them."""

PADDED: dict[str, Any] = SHORT | {"rounds": 4, "batch": 5}
"""Last batches are short, so that stacks are padded."""

HARD: dict[str, Any] = {
    "participation": 0.5,
    "rounds": 6,
    "momentum": 0.6,
    "weight_decay": 0.01,
    "rate_decay": 0.9,
}
"""To be added to a setting: changing cohorts, momentum, decay of weights and of the rate, all at once."""


def short(kind: Any, name: str = "linear", **parameters: Any) -> Any:
    feedback = plain.LAYER if name == plain.ALIGNED else None
    return kind(network=network(name), feedback=feedback, **SHORT | parameters)


def padded(kind: Any, name: str = "mlp:5", **parameters: Any) -> Any:
    return kind(network=network(name), **PADDED | parameters)


def register(monkeypatch: pytest.MonkeyPatch, kind: Any, like: str) -> None:
    """Make a test's own method known, with all that is said of the method `like`."""
    info = replace(next(info for info in registry.methods() if info.key == like), key=kind.key)
    monkeypatch.setitem(registry._METHODS, kind.key, (info, kind))


def resumed(method: Any, federation: Any, stop: int) -> Any:
    """A run that stopped after so many exchanges and went on from its bytes, with new clients each time."""
    run = method.start(federation().describe())
    for number, _ in enumerate(exchanges(run, federation()), 1):
        if number == stop:
            break
    again = method.start(federation().describe())
    again.restore(run.to_bytes(), "checkpoint")
    list(exchanges(again, federation()))
    return again
