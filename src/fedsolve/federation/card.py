"""The card of a model: how it came about, what it reached, and how to read it.

`training_card` gives what a model does not know by itself, to be kept as `model.card`; `card` joins it with
what the model holds, for `fedsolve info`.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy

from fedsolve import formats
from fedsolve.federation.history import totals
from fedsolve.federation.method import Method, unwrapped
from fedsolve.model import Model
from fedsolve.version import __version__

MOST_NAMES = 50
"""Clients that a card names; of more it tells the number."""

LICENCE = (
    "fedsolve is under the Apache License 2.0, which says nothing about the model: whoever owns the rows "
    "decides what may be done with it."
)


def training_card(model: Model, method: Method[Any], **more: Any) -> dict[str, Any]:
    """How a model came about, as JSON values; no times, nor what clients had to catch up with, so that a run
    that was interrupted gives the same file.

    more: what else is known, such as rows and accuracies.
    """
    cohort = sorted({client for record in model.history for client in record.cohort})
    kinds: dict[str, dict[str, int]] = {}
    for record in model.history:
        sums = kinds.setdefault(record.kind, {"exchanges": 0, "bytes_up": 0, "bytes_down": 0})
        sums["exchanges"] += 1
        sums["bytes_up"] += record.bytes_up
        sums["bytes_down"] += record.bytes_down
    risks = [record.risk for record in model.history if record.risk is not None]
    plain = unwrapped(method)
    return {
        "method": plain.key,
        "parameters": plain.parameters(),
        "clients": len(cohort),
        "cohort": cohort[:MOST_NAMES],
        **{name: count for name, count in totals(model.history).items() if name != "catch_up_bytes"},
        "history": [{"kind": kind, **sums} for kind, sums in kinds.items()],
        "risk": risks[-1] if risks else None,
        "versions": {
            "fedsolve": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
        },
        **more,
    }


def card(model: Model) -> dict[str, Any]:
    """Everything that is known of a model, as JSON values; None for what is not."""
    told: Mapping[str, Any] = model.card or {}
    trained_with = getattr(model, "parameters", None) or {}
    arrays, _ = model.contents()
    calibration = model.calibration
    return {
        "model": repr(model),
        "family": model.family,
        "format": formats.MODEL.version,
        "private": model.private,
        "features": model.features,
        "classes": None if model.classes is None else model.classes.tolist(),
        "targets": model.outputs if model.classes is None else None,
        "numbers": int(sum(array.size for array in arrays.values())),
        "method": told.get("method"),
        "parameters": told.get("parameters") or trained_with or None,
        "settings": _chosen(trained_with, told.get("parameters")),
        "schema": None if model.schema is None else _schema(model),
        "prepared": model.preparing is not None,
        "calibration": None
        if calibration is None
        else {
            "slope": calibration.slope,
            "biases": None if calibration.biases is None else calibration.biases.tolist(),
            "held_out_rows": calibration.rows,
            "held_out_share": calibration.share,
            "metrics": dict(calibration.metrics),
        },
        "training": {k: v for k, v in told.items() if k not in ("method", "parameters")} or None,
        "licence": _licence(model),
    }


def _chosen(trained_with: Mapping[str, Any], asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings that a choice came to; None where all were given."""
    if not asked:
        return None
    return {name: value for name, value in trained_with.items() if asked.get(name, "auto") != value} or None


def _schema(model: Model) -> dict[str, Any]:
    assert model.schema is not None
    note = model.schema.to_note()
    return note | {"classes": list(model.schema.classes)}


def _licence(model: Model) -> str:
    extractor = None if model.schema is None else model.schema.extractor
    backbone = getattr(model, "parameters", {}).get("backbone") if extractor is None else extractor.address
    if not backbone:
        return LICENCE
    return f"{LICENCE} The backbone {backbone} has a licence of its own."
