"""Personalised evaluation: every client's predictor on that client's own test rows.

The predictor may be anything that predicts: a shared model, a client's own, a plain function. Test rows
come as `ClientData`, which points into arrays that all clients share, so that nothing is stored twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat, zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedsolve.arrays import Array, owned_rows
from fedsolve.data import partitions
from fedsolve.errors import DataError, ModelFileError
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.participant import ClientData
from fedsolve.model import Model
from fedsolve.tables.table_file import Table


class Predicts(Protocol):
    """Anything that predicts labels from rows of features, as a trained model does."""

    def predict(self, features: Any) -> Array: ...


Predictor = Predicts | Callable[[Array], Array]


@dataclass(frozen=True)
class ClientScores:
    """Correct predictions and test rows of every client, and summaries over all of them.

    clients: names. correct, rows: (clients,) counts. Clients without test rows have no accuracy (NaN) and
    count nowhere.
    """

    clients: tuple[str, ...]
    correct: Array
    rows: Array

    @property
    def accuracies(self) -> Array:
        """Local accuracy of each client."""
        empty = np.full(len(self.rows), np.nan)
        return np.asarray(np.divide(self.correct, self.rows, out=empty, where=np.asarray(self.rows) > 0))

    @property
    def held(self) -> Array:
        """Accuracies of the clients that have test rows."""
        return self.accuracies[np.asarray(self.rows) > 0]

    @property
    def mean(self) -> float:
        """Mean over clients, each counting the same: the measure of the papers."""
        return float(np.mean(self.held)) if len(self.held) else float("nan")

    @property
    def pooled(self) -> float:
        """Mean over rows: large clients count more."""
        return float(np.sum(self.correct)) / max(1, int(np.sum(self.rows)))

    @property
    def worst_decile(self) -> float:
        """Mean of the tenth of the clients (at least one) that fare worst."""
        ordered = np.sort(self.held)
        return float(np.mean(ordered[: max(1, round(len(ordered) / 10))])) if len(ordered) else float("nan")

    def quantiles(self, shares: Sequence[float] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)) -> Array:
        """Quantiles of the local accuracies."""
        return np.asarray(np.quantile(self.held, shares)) if len(self.held) else np.full(len(shares), np.nan)

    def gains(self, reference: ClientScores) -> Array:
        """How much each client's accuracy exceeds that in `reference`; NaN without test rows."""
        if self.clients != reference.clients or not np.array_equal(self.rows, reference.rows):
            raise DataError("gains compare the same clients on the same test rows; these scores differ.")
        return self.accuracies - reference.accuracies

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "clients": list(self.clients),
            "correct": np.asarray(self.correct).tolist(),
            "rows": np.asarray(self.rows).tolist(),
            "mean": self.mean,
            "pooled": self.pooled,
            "worst_decile": self.worst_decile,
            "quantiles": self.quantiles().tolist(),
        }


def client_scores(
    predictors: Predictor | Iterable[Predictor], tests: Sequence[ClientData], clients: Sequence[str] = ()
) -> ClientScores:
    """Local accuracy of each client.

    predictors: one for all, or one for each client, taken as they are needed: a generator need not keep
        more than one model at a time.
    tests:      each client's own test rows. clients: their names; positions when not given.

    A class that the predictor does not know counts as wrong. Accuracy is for classes: a regression model is
    refused.
    """
    names = tuple(clients) or tuple(f"{number}" for number in range(len(tests)))
    if len(names) != len(tests):
        raise DataError(f"{len(names)} names for {len(tests)} clients; give one each.")
    several = isinstance(predictors, Iterable) and not callable(getattr(predictors, "predict", None))
    each: Any = predictors if several else repeat(predictors, len(tests))
    correct = np.zeros(len(tests), dtype=np.int64)
    for number, (predictor, data) in enumerate(zip_longest(each, tests)):
        if predictor is None or data is None:
            count = f"{number}" if predictor is None else f"more than {number}"
            raise DataError(f"{count} predictors for {len(tests)} clients; give one each, or one for all.")
        correct[number] = _correct(predictor, data)
    return ClientScores(names, correct, np.array([len(data) for data in tests], dtype=np.int64))


def _correct(predictor: Any, data: ClientData) -> int:
    if getattr(predictor, "classes", ()) is None:
        raise DataError(
            "client_scores counts correct classes, and this is a regression model. Score it client by "
            "client, by R²: model.score(features, targets)."
        )
    predict = predictor.predict if hasattr(predictor, "predict") else predictor
    labels = data.own_labels
    correct = 0
    for span in data.spans():
        predicted = np.asarray(predict(data.features(span, data.source.dtype)))
        if predicted.shape != labels[span].shape:
            raise DataError(
                f"a predictor gave an array of shape {predicted.shape} for {len(labels[span])} rows; "
                "one label per row is needed."
            )
        correct += int(np.sum(predicted == labels[span]))
    return correct


def client_rows(
    features: Array, labels: Any, owners: Array, clients: int, rows: Array | None = None
) -> list[ClientData]:
    """The rows of each client, as views into `features`; `rows`: which of them, all when None."""
    chosen = np.arange(len(owners)) if rows is None else np.flatnonzero(rows)
    labels = np.asarray(labels)
    parts = owned_rows(owners[chosen], clients)
    return [ClientData(features, labels, chosen[part], checked=True) for part in parts]


def personal_files(clients: Sequence[str], folder: Path, out: str | None) -> dict[str, Path]:
    """A file for every client; refused where files of others lie there.

    Characters that a file name cannot have become underscores. out: where the shared model goes, which may be
    the same folder.
    """
    files = {client: folder / (re.sub(r"[^\w.-]+", "_", client) + ".safetensors") for client in clients}
    if len(set(files.values())) < len(files):
        raise DataError(
            "two clients' names are the same as file names; rename them in the column that names owners."
        )
    shared = None if out is None else Path(out).absolute()
    if shared in {file.absolute() for file in files.values()}:
        raise DataError(f"--out {out} is also the file of a client in --personal {folder}; choose another.")
    known = {shared, *(file.absolute() for file in files.values())}
    others = sorted(file.name for file in folder.glob("*.safetensors") if file.absolute() not in known)
    if others:
        named = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise ModelFileError(
            f"--personal {folder} holds {len(others)} models that are not of this run's clients ({named}). "
            "Remove them, or name another folder."
        )
    return files


def own_models(
    model: Model,
    federation: LocalFederation,
    test: Table | None,
    files: Mapping[str, Path],
    advance: Callable[[int, int, str], None],
) -> dict[str, Any]:
    """Make every client's model, save it in its file, and score it on test rows like the client's own.

    advance: told how many of all are done, and whose the last one was.
    """
    tests = None
    if test is not None:  # in the class shares of each client's training rows
        assert test.labels is not None
        labels = [participant.data.own_labels for participant in federation.participants]
        owners = np.repeat(np.arange(len(labels)), [len(own) for own in labels])
        tested = partitions.alike(test.labels, np.concatenate(labels), owners, len(labels))
        tests = client_rows(np.asarray(test.features), test.labels, tested, len(labels))
    balances: dict[str, float] = {}
    ridges: dict[str, float] = {}
    correct: list[int] = []
    for number, participant in enumerate(federation.participants):
        own: Any = participant.personalise(model)
        if hasattr(own, "balance"):  # a client of APFL chooses these itself
            balances[participant.name] = float(own.balance)
            ridges[participant.name] = float(own.refinement_ridge)
        if participant.name in files:
            own.save(files[participant.name])
        if tests is not None:
            correct += client_scores(own, tests[number : number + 1]).correct.tolist()
        advance(number + 1, len(federation.clients), participant.name)
    accuracy = None
    if tests is not None:
        shared = client_scores(model, tests, federation.clients)
        personal = ClientScores(federation.clients, np.array(correct), shared.rows).as_dict()
        accuracy = {"shared": shared.as_dict() if model.predicts else None, "personal": personal}
    return {"balances": balances or None, "refinement_ridges": ridges or None, "local_accuracy": accuracy}
