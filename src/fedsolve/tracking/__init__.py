"""Trainings in the tools that people compare runs with: TensorBoard, MLflow, Weights & Biases.

Each is a `Follower` of what happens anyway; the packages are imported when a tracker is made.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from fedsolve.errors import DataError, did_you_mean
from fedsolve.tracking.tracked_runs import Tracker

KINDS = {
    "tensorboard": ("DIR", "fedsolve.tracking.tensorboard_events"),
    "mlflow": ("URI", "fedsolve.tracking.mlflow_runs"),
    "wandb": ("PROJECT", "fedsolve.tracking.wandb_runs"),
}
"""The trackers: what stands for a place in their addresses, and the module whose `open_store` makes one."""

ADDRESSES = ", ".join(f"{kind}:{place}" for kind, (place, _) in KINDS.items())


def tracker(address: str) -> Tracker:
    """Who writes trainings to tensorboard:DIR, mlflow:URI or wandb:PROJECT; hand it to `fit(follow=...)`.

    The store is opened now, so that what is wrong with it is said before anything is trained. A store that
    fails later is left, with a warning: no training is lost for a chart.

    >>> with fs.tracker("mlflow:sqlite:///runs.db") as tracked:              # doctest: +SKIP
    ...     model = fs.DeepAFL(layers=5).fit(federation, follow=tracked)
    ...     tracked.scored({"test_accuracy": model.score(X_test, y_test)})
    """
    kind, colon, place = address.partition(":")
    if kind not in KINDS:
        raise DataError(f"'{address}' names no tracker; known are {ADDRESSES}.{did_you_mean(kind, KINDS)}")
    wanted, module = KINDS[kind]
    if not (colon and place.strip()):
        raise DataError(f"'{address}' does not say where to; write {kind}:{wanted}.")
    open_store: Callable[[str], Tracker] = import_module(module).open_store
    return open_store(place)
