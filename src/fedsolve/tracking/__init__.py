"""Trainings recorded in TensorBoard, MLflow, or Weights & Biases.

Each is a `Follower` of what happens anyway; the packages are imported when a tracker is made.
"""

from __future__ import annotations

from collections.abc import Callable

from fedsolve.errors import DataError, did_you_mean
from fedsolve.tracking.mlflow_runs import MLflowTracker
from fedsolve.tracking.tensorboard_events import TensorBoardTracker
from fedsolve.tracking.tracked_runs import Tracker
from fedsolve.tracking.wandb_runs import WandbTracker

KINDS: dict[str, tuple[str, Callable[[str], Tracker]]] = {
    "tensorboard": ("DIR", TensorBoardTracker),
    "mlflow": ("URI", MLflowTracker),
    "wandb": ("PROJECT", WandbTracker),
}
"""The trackers: what stands for a place in their addresses, and what opens the store there."""

ADDRESSES = ", ".join(f"{kind}:{place}" for kind, (place, _) in KINDS.items())


def tracker(address: str) -> Tracker:
    """A follower (`fit(follow=...)`) that writes to tensorboard:DIR, mlflow:URI or wandb:PROJECT.

    The store is opened now, so that errors appear before anything is trained. If it fails later, a warning is
    given and the training continues.

    >>> with fs.tracker("mlflow:sqlite:///runs.db") as tracked:              # doctest: +SKIP
    ...     model = fs.DeepAFL(layers=5).fit(federation, follow=tracked)
    ...     tracked.scored({"test_accuracy": model.score(X_test, y_test)})
    """
    kind, colon, place = address.partition(":")
    if kind not in KINDS:
        raise DataError(f"'{address}' names no tracker; known are {ADDRESSES}.{did_you_mean(kind, KINDS)}")
    wanted, opened = KINDS[kind]
    if not (colon and place.strip()):
        raise DataError(f"'{address}' does not say where to; write {kind}:{wanted}.")
    return opened(place)
