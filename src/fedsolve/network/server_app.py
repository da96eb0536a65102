"""The ServerApp for `flwr run`: the method that the run's configuration names, over all nodes.

`fedsolve server` does the same without Flower's vocabulary, and resumes by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flwr.serverapp import ServerApp

from fedsolve import registry
from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.network.flower import FlowerFederation
from fedsolve.network.link import link_for
from fedsolve.network.running import State, run_method

app = ServerApp()


@app.main()  # type: ignore[misc, untyped-decorator, unused-ignore]
def main(grid: Any, context: Any) -> None:
    """Train and leave model, checkpoint and report in the state folder."""
    config = context.run_config
    method = registry.method_of({"method": config["method"], "parameters": _json(config, "parameters")})
    classes = _json(config, "classes") if config["classes"] else None
    patience = float(config["patience"]) or None

    def federate(spec: Spec | None, report: Any) -> FlowerFederation:
        return FlowerFederation(
            link_for(grid),
            clients=config["clients"],
            classes=classes,
            missing=config["missing"],
            min_clients=config["min-clients"],
            patience=patience,
            spec=spec,
            report=report,
            tell=print,
        )

    run_method(method, federate, State(Path(config["state"])))


def _json(config: Any, name: str) -> Any:
    try:
        return json.loads(config[name])
    except ValueError as problem:
        raise DataError(f"the run's '{name}' is not JSON ({problem}): {config[name]!r}.") from problem
