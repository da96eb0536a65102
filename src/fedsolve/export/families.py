"""How each family of models computes its scores, as nodes.

A writer is found by the very class of a model: a class that derives from another may compute something else.
Models of one's own become exportable by a writer of their own (`writes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import NUMPY
from fedsolve.backends.activations import ACTIVATIONS, activate, known
from fedsolve.closedform.apfl import APFLModel
from fedsolve.closedform.cascade import CascadeModel
from fedsolve.closedform.dual_stream import PersonalModel
from fedsolve.closedform.landmarks import KernelModel
from fedsolve.closedform.predictors import DeepModel, LinearModel, SoftmaxModel
from fedsolve.closedform.projections import Projection, projection
from fedsolve.errors import DataError
from fedsolve.export.onnx_graph import OnnxGraph, Value
from fedsolve.export.raw_rows import prepared
from fedsolve.model import Model
from fedsolve.tables.preparation import Preparation

Writer = Callable[[OnnxGraph, Any, Value], Any]
"""Of a graph, a model and prepared rows, the scores; both are values in float64."""

Layers = Callable[[OnnxGraph, Any, Value, Array], Any]
"""Of a graph, a model, prepared rows and what their features are multiplied with, the features."""

W = TypeVar("W", bound=Callable[..., Any])

_SCORES: dict[type[Model], Writer] = {}
_ESTIMATES: dict[type[Model], Writer] = {}
_REPRESENTATIONS: dict[type[Model], Layers] = {}


def _entering(writers: dict[type[Model], Any]) -> Callable[..., Callable[[W], W]]:
    """A decorator of a function that writes something of models of these very classes."""

    def of(*kinds: type[Model]) -> Callable[[W], W]:
        def enter(writer: W) -> W:
            writers.update(dict.fromkeys(kinds, writer))
            return writer

        return enter

    return of


writes = _entering(_SCORES)
"""Decorator: the function writes the scores of models of these very classes."""
writes_estimates = _entering(_ESTIMATES)
"""The same for `Model.estimates`, of scores, where they are not the scores."""
writes_representation = _entering(_REPRESENTATIONS)
"""The same for `transform` of prepared rows."""


def scores(graph: OnnxGraph, model: Model, rows: Value) -> Any:
    """The scores (rows, outputs) of rows that `model._checked` would give."""
    writer = _SCORES.get(type(model))
    if writer is None:
        raise DataError(
            f"a model of family '{model.family}' ({type(model).__name__}) cannot be exported; known are "
            f"{', '.join(sorted(kind.family for kind in _SCORES))}. Say how its scores are written "
            "(fedsolve.export.writes), or train by another method."
        )
    return writer(graph, model, rows)


def estimates(graph: OnnxGraph, model: Model, found: Value) -> Any:
    """The estimates of a model whose scores are `found`."""
    writer = _ESTIMATES.get(type(model))
    if writer is not None:
        return writer(graph, model, found)
    if any(getattr(type(model), name) is not getattr(Model, name) for name in ("estimates", "estimated")):
        raise DataError(
            f"a model of family '{model.family}' ({type(model).__name__}) has estimates of its own, and "
            "nothing says how to write them (fedsolve.export.writes_estimates)."
        )
    return found


# -- the closed forms ------------------------------------------------------------------------------


@writes(LinearModel)
def linear(graph: OnnxGraph, model: LinearModel, rows: Value) -> Any:
    rows = rows.astype("float64")
    return graph.head(_centred(rows, model.preparation), model.weight, model.intercept)


@writes(SoftmaxModel)
def softmax_scores(graph: OnnxGraph, model: SoftmaxModel, rows: Value) -> Any:
    if model.base is not None:
        rows = prepared(graph, rows, model.base.preparing)
        rows = representation(graph, model.base, rows, model.weight)
    return linear(graph, model, rows)


@writes_estimates(SoftmaxModel)
def softmax_estimates(graph: OnnxGraph, model: Model, found: Value) -> Any:
    return graph.op("Softmax", found, axis=1)


def representation(graph: OnnxGraph, model: Model, rows: Value, head: Array) -> Any:
    """The features of a staged model's last layer, which `head` is to be multiplied with."""
    writer = _REPRESENTATIONS.get(type(model))
    if writer is None:
        raise DataError(
            f"the last layer of a model of family '{model.family}' cannot be exported; that of a DeepAFL can."
        )
    return writer(graph, model, rows, head)


@writes_representation(DeepModel)
def deep_features(graph: OnnxGraph, model: DeepModel, rows: Value, head: Array) -> Any:
    network = model.network
    double: frozenset[int] = frozenset()
    if graph.precision == "float32":
        double = double_layers(model, head, graph.steepness)
    # What all layers are added to, and what each adds, stay float64: no error of theirs is lost in a sum.
    with graph.computing("float64"):
        phi = _projected(graph, network.first(), network.zero_activation, _centred(rows, model.preparation))
    initial = phi
    for layer, block in enumerate(model.blocks):
        source = initial if network.block_input == "initial" else phi
        with graph.computing("float64" if layer in double else graph.precision):
            if network.projection == "identity":
                update = activation(network.activation, source.astype(graph.precision))
            else:
                update = _projected(graph, network.draw(layer, NUMPY), network.activation, source)
        update = update.astype("float64")
        if block is not None:
            update = graph.head(graph.head(update, block.left), block.right.T)
        phi = phi + update if network.skip else update
    return phi


@writes_representation(CascadeModel)
def cascade_features(graph: OnnxGraph, model: CascadeModel, rows: Value, head: Array) -> Any:
    method, outputs = model.method, model.outputs
    first = projection(method.seed, "zero", 0, model.features, method.width, bias=method.bias)
    phi = _projected(graph, first, method.zero_activation, rows)
    for layer, weight in enumerate(model.classifiers[:-1]):
        phi = graph.affine(phi, weight)
        if method.strategy in (2, 4):
            phi = graph.affine(phi, projection(method.seed, "encoding", layer, outputs, outputs).weight)
        back = projection(method.seed, "cascade", layer, outputs, method.width, method.gain)
        phi = graph.affine(phi, back.weight)
        if method.strategy in (3, 4):
            phi = activation(method.activation, phi)
    return phi


@writes(DeepModel, CascadeModel)
def staged(graph: OnnxGraph, model: DeepModel | CascadeModel, rows: Value) -> Any:
    shift = None if model.preparation is None else model.preparation.target_mean
    head = model.classifiers[-1]
    return graph.head(representation(graph, model, rows, head), head, shift)


@writes(KernelModel)
def kernel(graph: OnnxGraph, model: KernelModel, rows: Value) -> Any:
    return graph.head(_near(graph, model, rows), model.weights, model.preparation.target_mean)


@writes_representation(KernelModel)
def kernel_features(graph: OnnxGraph, model: KernelModel, rows: Value, head: Array) -> Any:
    return graph.head(_near(graph, model, rows), model.whitening())


def _near(graph: OnnxGraph, model: KernelModel, rows: Value) -> Any:
    """exp(-|x - z|² / h) of rows x and landmarks z: (rows, landmarks)."""
    rows, points = _centred(rows, model.preparation), model.landmarks.points()
    scale = -1.0 / model.landmarks.bandwidth
    squares = graph.op("ReduceSumSquare", rows, [1], keepdims=1) * scale
    far = rows @ (points.T * (-2.0 * scale)) + np.einsum("ij,ij->i", points, points) * scale
    return np.exp(far + squares)


# -- a shared stream, and a client's own -----------------------------------------------------------


@writes(APFLModel)
def shared_stream(graph: OnnxGraph, model: APFLModel, rows: Value) -> Any:
    return scores(graph, model.primary, prepared(graph, rows, model.primary.preparing))


@writes_estimates(APFLModel)
def shared_estimates(graph: OnnxGraph, model: APFLModel, found: Value) -> Any:
    return estimates(graph, model.primary, found)


@writes(PersonalModel)
def own_stream(graph: OnnxGraph, model: PersonalModel, rows: Value) -> Any:
    shared, refinement = model.shared, model.refinement
    found = scores(graph, shared, prepared(graph, rows, shared.preparing))
    found = estimates(graph, shared, found)
    if model.balance == 0:
        return found
    inputs = _centred(rows, getattr(shared, "preparation", None))
    psi = _projected(graph, refinement.random(model.features), refinement.activation, inputs)
    return found + graph.head(psi, model.balance * model.weight)


def _centred(rows: Value, preparation: Preparation | None) -> Any:
    """Float64 rows centred and scaled."""
    return rows if preparation is None else (rows - preparation.mean) / preparation.scale


def _projected(graph: OnnxGraph, random: Projection, name: str, rows: Value) -> Value:
    return activation(name, graph.affine(rows, random.weight, random.bias))


def activation(name: str, value: Value) -> Value:
    """The activation of this name, by the same kernel that computes it on arrays."""
    made, scratch = (Value(value.graph, value.edge, value.dtype) for _ in range(2))
    known(name, ACTIVATIONS)(made, scratch)
    return made


PROMISE = 1e-5
"""The largest error of the probabilities of a float32 file."""

_CAUTION = 1.5
"""The estimate was 1.9 to 20 times the difference that onnxruntime showed, for eleven models."""
_DEVIATIONS = 4.5
"""The largest of many normal errors, in standard deviations: one in 150,000 is beyond."""
_ROWS, _STEP = 32, 1e-3


def double_layers(model: DeepModel, head: Array, steepness: float) -> frozenset[int]:
    """The blocks whose projection is to be float64 so that a float32 file keeps its promise; mostly none.

    Rounding a weight or a feature to float32 costs little; summing `width` products in float32 costs 25 times
    as much, and the classifier and the blocks enlarge it. How much, their weights tell, for features of about
    unit size, as standardised ones and those of networks are; of others the file does not know how they lie.

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
    initial = phi = activate(network.zero_activation, _product(rows, network.first()))
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
