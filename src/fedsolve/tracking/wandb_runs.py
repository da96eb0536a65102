"""Weights & Biases: a run for every training, kept on this machine until `wandb sync` sends it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from fedsolve.errors import DataError, require
from fedsolve.tracking.tracked_runs import COMPLETE, Facts, Tracker


class WandbTracker(Tracker):
    """Writes runs of a project below ./wandb, or WANDB_DIR; offline unless WANDB_MODE says otherwise.

    A resumed training is written again into a new run, since offline runs cannot be read back.
    """

    def __init__(self, project: str) -> None:
        super().__init__(f"wandb:{project}")
        if found := re.search(r"[/\\#?%:]", project):
            told = f"{self.address}: the name of a project must not have '{found[0]}'."
            raise DataError(f"{told} Write wandb:PROJECT, with letters, digits, '-' and '_'.")
        self._wandb, self._project = require("wandb", "wandb", "wandb:PROJECT"), project
        self._run: Any = None
        self._how = COMPLETE

    def begin(self, name: str, identity: str | None, resumed: bool, facts: Facts) -> Collection[int]:
        self.close()
        self._run = self._wandb.init(
            project=self._project,
            name=name,
            group=facts.get("experiment"),
            config=dict(facts),
            mode=os.environ.get("WANDB_MODE", "offline"),
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        return ()

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def end(self, how: str) -> None:
        self._how = how  # scores may follow

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._how == COMPLETE else 1)
            self._run, self._how = None, COMPLETE
