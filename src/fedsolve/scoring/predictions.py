"""Predictions of models of every family on many rows, a part at a time, and the truth beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.labels import encode_labels, label_matrix, regression_targets
from fedsolve.model import Model

_MANY = 65536


def truth_of(model: Model, labels: Array) -> Array:
    """Labels as a model's answers are: positions of classes (rows,), 0 and 1 (rows, labels), or targets."""
    if model.classes is not None:
        return encode_labels(labels, model.classes)
    if model.labels:
        return label_matrix(labels, model.labels).astype(np.int64)
    return regression_targets(labels, model.outputs).astype(np.float64)


def predicted(model: Model, features: Array, depth: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Positions of the answers, scores and probabilities of rows; a stage's are not calibrated.

    Of a regression, which has no classes, the scores three times.
    """
    scores = model.decision_function(features, **depth)
    if model.regression:
        return (scores,) * 3
    shares = model.shares(scores, calibrated=not depth)
    answers = model.predict(features, **depth) if model.labels else np.argmax(scores, axis=1)
    return answers, scores, shares


def predicted_in_parts(
    model: Model, features: Sequence[Array], depth: dict[str, Any]
) -> tuple[Array, Array, Array]:
    """The same of many rows, some thousand at a time, so that what layers give is never held whole."""
    parts = [
        predicted(model, part[start : start + _MANY], depth)
        for part in features
        for start in range(0, max(1, len(part)), _MANY)
    ]
    answers, scores, probabilities = (np.concatenate(each) for each in zip(*parts, strict=True))
    return answers, scores, probabilities
