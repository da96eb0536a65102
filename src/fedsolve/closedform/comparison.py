"""How candidates do on the rows they were not trained on: one exchange with all their models so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedsolve.closedform.lockstep import known_members
from fedsolve.closedform.predictors import StagedModel
from fedsolve.container import Array
from fedsolve.federation.messages import Request, Term
from fedsolve.federation.method import opening_classes
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.federation.parts import Part
from fedsolve.labels import encode_labels, regression_targets
from fedsolve.model import Model, model_from_contents

KIND = "choosing-comparison"

_ROWS_AT_ONCE = 16384


def question(models: Mapping[str, tuple[Model, Part]]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Note and arrays that ask for the marks of models, each on its part."""
    notes: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, (model, part) in models.items():
        contents, note = model.contents()
        notes[name] = {"model": note, **part.note()}
        arrays |= {f"{name}.{key}": array for key, array in contents.items()}
    return {"models": notes}, arrays


@step(KIND, over_rows=True)
def answer(data: ClientData, request: Request, memory: Memory) -> Term:
    """Of every model, on the rows it was not trained on: weight, mistakes and squared error, by stage."""
    known, classes = known_members(memory), opening_classes(memory.chain)
    contents: dict[str, dict[str, Array]] = defaultdict(dict)
    for key, array in request.arrays.items():
        name, _, own = key.partition(".")
        contents[name][own] = array
    term = Term()
    for name, one in request.note["models"].items():
        rows = known.part(data, one["part"])
        model = model_from_contents(contents[name], one["model"])
        term.arrays[f"{name}.marks"] = _marks(model, rows, classes)
        term.counts[f"{name}.rows"] = len(rows)
    return term


def _marks(model: Model, rows: ClientData, classes: Array | None) -> Array:
    stages: Callable[[Array], Array] = (
        model.staged_decision_function
        if isinstance(model, StagedModel)
        else lambda features: model.estimates(features)[None]
    )
    labels, weights = rows.own_labels(), rows.own_weights()
    codes = None if classes is None else encode_labels(labels, classes)
    count = model.layers + 1 if isinstance(model, StagedModel) else 1
    marks = np.zeros((3, count))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        span = slice(start, start + _ROWS_AT_ONCE)
        scores = stages(rows.features(span))
        counted = np.ones(scores.shape[1]) if weights is None else weights[span]
        if codes is None:
            targets = regression_targets(labels[span], model.outputs).astype(np.float64)
            wrong = np.zeros(scores.shape[:2])
        else:
            targets = np.eye(model.outputs)[codes[span]]
            wrong = np.argmax(scores, axis=2) != codes[span]
        marks[0] += counted.sum()
        marks[1] += wrong @ counted
        marks[2] += np.sum((scores - targets) ** 2, axis=2) @ counted
    return marks
