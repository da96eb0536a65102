"""Which layers of a DeepAFL must stay float64 so that a float32 file keeps its promise.

Rounding a weight or a feature to float32 costs little; summing `width` products in float32 costs 25 times as
much, and the classifier and the blocks enlarge it. How much, their weights tell, for features of about unit
size, as standardised ones and those of networks are; of others the file does not know how they lie.
"""

from __future__ import annotations

import numpy as np

from fedsolve.backends import NUMPY
from fedsolve.backends.activations import activate
from fedsolve.closedform.predictors import DeepModel
from fedsolve.closedform.projections import Projection, projection
from fedsolve.container import Array

PROMISE = 1e-5
"""How near the probabilities of a float32 file are to those of the model."""

_CAUTION = 1.5
"""The estimate was 1.9 to 20 times the difference that onnxruntime showed, for eleven models."""
_DEVIATIONS = 4.5
"""The largest of many normal errors, in standard deviations: one in 150,000 is beyond."""
_ROWS, _STEP = 32, 1e-3


def double_layers(model: DeepModel, head: Array, steepness: float) -> frozenset[int]:
    """The blocks whose projection is to be float64; none for most models.

    head:      (width, outputs) what the last layer is multiplied with.
    steepness: how much probabilities move with a score.
    """
    variances = _variances(model, head * steepness)
    allowed = (_CAUTION * PROMISE / _DEVIATIONS) ** 2
    order = np.argsort(variances, kind="stable")
    kept = np.cumsum(variances[order]) <= allowed
    return frozenset(order[~kept].tolist())


def _variances(model: DeepModel, head: Array) -> Array:
    """Of the errors in the scores by each block's sums in float32, on rows of unit variance.

    With terms of random signs the j-th partial sum is about sqrt(j) r b, r and b the root mean squares of
    rows and weights; rounding each of n of them gives an error of 2⁻²⁴ n r b / sqrt(6). It goes through the
    slope of the activation, then through A Uᵀ, and the head.
    """
    network = model.network
    rows = np.sqrt(12.0) * (np.random.Generator(np.random.Philox(0)).random((_ROWS, network.features)) - 0.5)
    first = projection(network.seed, "zero", 0, network.features, network.width, 1.0, network.precision)
    initial = phi = activate(network.zero_activation, _product(rows, first))
    variances = np.zeros(len(model.blocks))
    for layer, block in enumerate(model.blocks):
        source = initial if network.block_input == "initial" else phi
        sums, error = source.copy(), 0.0
        if network.projection != "identity":
            random = network.draw(layer, NUMPY)
            sums = _product(source, random)
            error = 2.0**-24 * network.width / np.sqrt(6.0) * _size(source) * _size(random.weight)
        after = np.eye(len(head)) if block is None else np.asarray(block.left @ block.right.T)
        slope = activate(network.activation, sums + _STEP) - activate(network.activation, sums - _STEP)
        reach = (slope / (2 * _STEP)) ** 2 @ (after @ head) ** 2
        variances[layer] = error**2 * float(reach.max(axis=1).mean())
        update = activate(network.activation, sums) @ after
        phi = phi + update if network.skip else update
    return variances


def _product(rows: Array, random: Projection) -> Array:
    return np.ascontiguousarray(rows @ random.weight.astype(np.float64) + random.bias)


def _size(values: Array) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
