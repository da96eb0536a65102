"""A cell measured client by client: every client's model on test rows of that client's own distribution."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fedsolve.closedform.predictors import StagedModel
from fedsolve.experiments.outcomes import Clock, Outcome
from fedsolve.experiments.trials import LocalParts, Trial
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.local_scores import LocalScores
from fedsolve.federation.method import Method
from fedsolve.federation.participant import Participant
from fedsolve.model import Model


def run_locally(method: Method[Any], trial: Trial) -> Outcome:
    """Scores and costs of a method whose accuracy is the mean of its clients' local accuracies."""
    parts = trial.parts
    total = sum(map(len, parts.train))
    participants = [
        Participant(name, data, memory_budget=LOCAL_MEMORY * len(data) // max(1, total))
        for name, data in zip(parts.names, parts.train, strict=True)
    ]
    federation = LocalFederation(
        participants, classes=trial.classes.tolist(), workers=trial.workers, device=trial.cell.device
    )
    clock = Clock(trial.tick, trial.follow)
    model = method.fit(federation, follow=(clock, trial.follow))
    trained = clock.now()
    trial.tick("personalising and scoring")
    outcome = Outcome(model)
    if not model.personalises:
        outcome.enter_costs(model, clock.ends, trained)
        if isinstance(model, StagedModel):
            layers = _by_layer(model, parts)
            outcome.enter_local(layers[-1])
            outcome.values["accuracy_per_layer"] = [layer.mean for layer in layers]
        else:
            outcome.enter_local(parts.score(model))
        return outcome
    balances: list[float | None] = []
    started = time.perf_counter()
    scores = parts.score(_noted(model, participants, balances))
    outcome.enter_costs(model, clock.ends, trained + time.perf_counter() - started)
    compared = {}
    if model.predicts:
        compared["shared"] = parts.score(model)
    if hasattr(model, "alone"):
        compared["alone"] = parts.score(_noted(model.alone(), participants, []))
    outcome.enter_local(scores, compared, balances)
    return outcome


def _noted(model: Model, participants: list[Participant], balances: list[float | None]) -> Any:
    """Each client's own model, one at a time; its balance, where it has one, is kept."""
    for participant in participants:
        personal = participant.personalise(model)
        balances.append(getattr(personal, "balance", None))
        yield personal


def _by_layer(model: StagedModel, parts: LocalParts) -> list[LocalScores]:
    """Local scores after every layer."""
    rows = np.array([len(data) for data in parts.test])
    correct = np.zeros((model.layers + 1, len(rows)), dtype=np.int64)
    for client, data in enumerate(parts.test):
        if len(data):
            hits = model.staged_predict(data.features(slice(None))) == data.own_labels()
            correct[:, client] = hits.sum(axis=1)
    return [LocalScores(parts.names, layer, rows) for layer in correct]
