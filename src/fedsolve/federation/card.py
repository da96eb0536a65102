"""The card of a model: how it came about, what it reached, and how to read it.

`training_card` gives what a model does not know by itself, to be kept as `model.card`; `card` joins it with
what the model holds, for `fedsolve info`. `traffic` tells what a training took.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scipy

from fedsolve import version
from fedsolve.federation.method import Record
from fedsolve.federation.recipe import Recipe
from fedsolve.model import Model
from fedsolve.version import __version__

MOST_NAMES = 50
"""Clients that a card names; of more it tells the number."""

_SENT = ("bytes_up", "bytes_down")

LICENCE = (
    "fedsolve is under the Apache License 2.0, which says nothing about the model: whoever owns the rows "
    "decides what may be done with it."
)


def training_card(model: Model, recipe: Recipe[Any], **more: Any) -> dict[str, Any]:
    """How a model came about, as JSON values; no times, nor what clients had to catch up with, so that a run
    that was interrupted gives the same file.

    more: what else is known, such as rows and accuracies.
    """
    cohort = sorted({client for record in model.history for client in record.cohort})
    parts: dict[tuple[str, str], list[Record]] = {}
    for record in model.history:
        parts.setdefault((record.stage, record.kind), []).append(record)
    private = recipe.method.agreement().get("privacy")
    # Exact counts, and mistakes on the rows themselves, would say more than the noise.
    if private is not None:
        accuracy = {name: one for name, one in (more.pop("accuracy", None) or {}).items() if name == "test"}
        noise = getattr(model, "parameters", {}).get("noise")
        more = {"accuracy": accuracy, "privacy": {**private, "noise": noise}}
    if digests := [record.digest for record in model.history if record.digest]:
        more["totals"] = hashlib.sha256("".join(digests).encode()).hexdigest()
    risks = [record.risk for record in model.history if record.risk is not None]
    return {
        "method": recipe.method.key,
        "parameters": recipe.method.parameters(),
        "clients": len(cohort),
        "cohort": cohort[:MOST_NAMES],
        **totals(model.history, _SENT),
        "history": [{"stage": s, "kind": kind, **totals(part, _SENT)} for (s, kind), part in parts.items()],
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
    trained_with, asked = getattr(model, "parameters", None) or {}, told.get("parameters") or {}
    chosen = {name: value for name, value in trained_with.items() if asked.get(name, "auto") != value}
    arrays, _ = model.contents()
    return {
        "model": repr(model),
        "family": model.family,
        "format": version.MODEL,
        "private": model.private,
        "features": model.features,
        "classes": None if model.classes is None else model.classes.tolist(),
        "targets": model.outputs if model.regression else None,
        "labels": list(model.labels) or None,
        "numbers": int(sum(array.size for array in arrays.values())),
        "method": told.get("method"),
        "parameters": told.get("parameters") or trained_with or None,
        "settings": chosen if asked and chosen else None,  # those that a choice came to
        "schema": None
        if model.schema is None
        else model.schema.to_note() | {"classes": list(model.schema.classes)},
        "prepared": model.preparing is not None,
        **held_out_card(model),
        "training": {k: v for k, v in told.items() if k not in ("method", "parameters")} or None,
        "licence": _licence(model),
    }


def held_out_card(model: Model) -> dict[str, Any]:
    """What rows held out showed: a model's calibration, or the intervals of a regression."""
    told: dict[str, Any] = {"calibration": None, "intervals": None}
    for name, known in (("calibration", model.calibration), ("intervals", model.spread)):
        if known is not None:
            told[name] = {"held_out_rows": known.rows, "metrics": dict(known.metrics)}
    if (calibration := model.calibration) is not None:
        biases = None if calibration.biases is None else calibration.biases.tolist()
        told["calibration"] |= {"slope": np.asarray(calibration.slope).tolist(), "biases": biases}
    if model.spread is not None:
        told["intervals"] |= {"level": 0.95, "reach": model.spread.reach().tolist()}
    return told


def _licence(model: Model) -> str:
    extractor = None if model.schema is None else model.schema.extractor
    backbone = getattr(model, "parameters", {}).get("backbone") if extractor is None else extractor.address
    if model.schema is not None and model.schema.backbones:
        backbone = ", ".join(sorted({text.address for text in model.schema.backbones.values()}))
    return f"{LICENCE} The backbone {backbone} has a licence of its own." if backbone else LICENCE


def totals(history: Sequence[Record], names: Sequence[str] = (*_SENT, "catch_up_bytes")) -> dict[str, int]:
    """Exchanges, and bytes up, down and for catching up, over all clients together."""
    sums = {name: sum(getattr(record, name) for record in history) for name in names}
    return {"exchanges": len(history), **sums}


_TOLD = (
    *("exchange", "kind", "step", "bytes_up", "bytes_down", "seconds"),
    *("risk", "accuracy", "solved", "metrics", "error_bounds"),
)


def traffic(history: Sequence[Record]) -> dict[str, Any]:
    """The totals, the last risk, and what each exchange took, as JSON can hold it."""
    risks = [record.risk for record in history if record.risk is not None]
    each = [
        {name: getattr(record, name) for name in _TOLD} | {"clients": len(record.cohort)}
        for record in history
    ]
    return {**totals(history), "risk": risks[-1] if risks else None, "history": each}
