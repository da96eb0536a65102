"""MLflow: a run for every training, in a database of one's own or on a server.

Runs of an experiment file are in the MLflow experiment of its name, others in the one called "fedsolve".
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from fedsolve.errors import DataError, explained, require
from fedsolve.tracking.tracked_runs import COMPLETE, FAILED, INTERRUPTED, Facts, Tracker

EXPERIMENT = "fedsolve"
IDENTITY = "fedsolve.identity"
"""The tag by which a training that is resumed finds its run."""

_ADDRESS = "Write mlflow:sqlite:///FILE.db for a file, or mlflow:http://HOST:PORT for a server."
_STATUS = {COMPLETE: "FINISHED", INTERRUPTED: "KILLED", FAILED: "FAILED"}
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Defaults for the environment: no telemetry, and short waits for a server."""


class MLflowTracker(Tracker):
    """Writes to the tracking store of an address, once the store has answered."""

    def __init__(self, place: str) -> None:
        super().__init__(f"mlflow:{place}")
        if "://" not in place:
            raise DataError(f"{self.address}: '{place}' is no address of a tracking store. {_ADDRESS}")
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        mlflow = require("mlflow", "mlflow", "mlflow:URI")
        with explained(f"{self.address} cannot be used", _ADDRESS), _quiet():
            self._client = mlflow.MlflowClient(place)
            self._client.search_experiments(max_results=1)
        self._entities = require("mlflow.entities", "mlflow", "mlflow:URI")
        self._run = ""

    def begin(self, name: str, identity: str | None, resumed: bool, facts: Facts) -> Collection[int]:
        with _quiet():
            named = facts.get("experiment", EXPERIMENT)
            known = self._client.get_experiment_by_name(named)
            experiment = str(self._client.create_experiment(named) if known is None else known.experiment_id)
            wanted, order = f"tags.`{IDENTITY}` = '{identity}'", ["attributes.start_time DESC"]
            found = [] if identity is None else self._client.search_runs([experiment], wanted, order_by=order)
            if found and resumed:
                self._run = found[0].info.run_id
                self._client.update_run(self._run, status="RUNNING")
                return {one.step for one in self._client.get_metric_history(self._run, "seconds")}
            for run in found:
                if run.info.status == "RUNNING":  # killed before it could say so
                    self._client.set_terminated(run.info.run_id, "KILLED")
            tags = {} if identity is None else {IDENTITY: identity}
            self._run = self._client.create_run(experiment, run_name=name, tags=tags).info.run_id
            told = [self._entities.Param(key, value) for key, value in facts.items()]
            self._client.log_batch(self._run, params=told)
        return ()

    def write(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        told = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=told)

    def end(self, how: str) -> None:
        self._client.set_terminated(self._run, _STATUS[how])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what MLflow and its database log while they work."""
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
