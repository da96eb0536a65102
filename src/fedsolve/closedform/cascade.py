"""The four other ways to deepen an analytic network that DeepAFL is compared with.

DeepAFL paper, Appendix E.3.7 (our reading, the paper gives no formulas). Each layer's classifier
output is projected back to the features' width and becomes the next layer:

    Phi_0 = tanh(X A + a),   W_t = (G_t + ridge I)^-1 H_t,   Phi_{t+1} = s(Phi_t V_t R_t)

with R_t random and
    strategy 1: V_t = W_t,      s the identity       (cascade of random features)
    strategy 2: V_t = W_t E_t,  s the identity       (with a random label encoding E_t)
    strategy 3: V_t = W_t,      s the activation
    strategy 4: V_t = W_t E_t,  s the activation
A classifier fitted to encoded labels Y E_t is W_t E_t, so one exchange of (G_t, H_t) per layer
serves all four: T + 1 exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import kernels_of, kernels_on
from fedsolve.backends.activations import ACTIVATIONS
from fedsolve.closedform.predictors import StagedModel
from fedsolve.closedform.projections import check_model, check_projections, projection, projection_agreement
from fedsolve.closedform.solvers import regularised_risk, ridge_solve
from fedsolve.closedform.sums import LEVEL, Accumulator, blocks_with, cached_rows, check_sums
from fedsolve.federation.method import Block, Method, Request, Run, Spec, Term, Total
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.labels import labels_from_note
from fedsolve.parameters import parameter
from fedsolve.registry import register

KIND = "cascade"


@register(
    paper="Tang et al., DeepAFL, ICLR 2026, Appendix E.3.7",
    exchanges="T+1",
    up="Gram and cross matrices of the layer's features",
    down="the layer's classifier, d x C; projections travel as a seed",
)
@dataclass(frozen=True)
class Cascade(Method["CascadeModel"]):
    """Cascades: the four deepening strategies DeepAFL is compared with.

    The strategy as above, the rest as for DeepAFL.
    """

    strategy: int = parameter(3, "Which of the four deepening strategies.", least=1, most=4)
    layers: int = parameter(20, "T, the number of layers after the first.", least=0)
    width: int = parameter(1024, "Features per layer.", least=1)
    ridge: float = parameter(1.0, "Penalty on the classifier of every layer.", least=0)
    activation: str = parameter("gelu", "Of strategies 3 and 4.", choices=tuple(ACTIVATIONS))
    zero_activation: str = parameter("tanh", "Of the first projection.", choices=tuple(ACTIVATIONS))
    gain: float = parameter(1.0, "Factor on the random projections of the layers.", least=0)
    bias: bool = parameter(True, "Bias of the first projection.")
    seed: int = parameter(0, "Seed of the random projections.", least=0)

    @classmethod
    def trial(cls) -> Self:
        return cls(layers=2, width=12)

    def start(self, spec: Spec) -> CascadeRun:
        return CascadeRun(self, spec)

    def agreement(self) -> dict[str, Any]:
        return projection_agreement(self.seed)

    def largest_side(self, spec: Spec) -> int:
        return max(spec.features, self.width)


def stages(method: Cascade, features: Array, classifiers: Sequence[Array], outputs: int) -> Iterator[Array]:
    """Phi_0, Phi_1, ... of these rows: one more than there are classifiers to pass through."""
    kernels = kernels_of(features)
    shape = features.shape[1], method.width
    first = projection(method.seed, "zero", 0, *shape, kernels=kernels, bias=method.bias)
    phi = kernels.activate(method.zero_activation, first.apply(features))
    yield phi
    for layer, weight in enumerate(classifiers):
        scores = phi @ weight
        if method.strategy in (2, 4):
            encoding = projection(method.seed, "encoding", layer, outputs, outputs, kernels=kernels)
            scores = scores @ encoding.weight
        back = projection(method.seed, "cascade", layer, outputs, method.width, method.gain, kernels=kernels)
        phi = scores @ back.weight
        if method.strategy in (3, 4):
            kernels.activate(method.activation, phi)
        yield phi


@dataclass(eq=False, repr=False)
class CascadeModel(StagedModel):
    """T + 1 classifiers, each over the features that the ones before it made."""

    family: ClassVar[str] = "cascade"
    preparation = None

    method: Cascade
    features: int
    classes: Array | None
    outputs: int
    classifiers: Sequence[Array]

    def __post_init__(self) -> None:
        self.width, self.parameters = self.method.width, self.method.parameters()
        self.classifiers = tuple(self.classifiers)

    def _stages(self, features: Array, last: int) -> Iterator[Array]:
        inputs = np.asarray(features, dtype=np.float64)
        return stages(self.method, inputs, self.classifiers[:last], self.outputs)

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> CascadeModel:
        check_model(note)
        classifiers = [arrays[f"classifier.{t}"] for t in range(note["layers"] + 1)]
        classes = labels_from_note(note["classes"])
        return cls(Cascade(**note["parameters"]), note["features"], classes, note["outputs"], classifiers)


class CascadeRun(Run[CascadeModel]):
    """One exchange of (G_t, H_t) per layer."""

    method: Cascade

    def __init__(self, method: Cascade, spec: Spec) -> None:
        super().__init__(method, spec)
        self.classifiers: list[Array] = []

    @property
    def exchanges(self) -> int:
        return self.method.layers + 1

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if len(self.classifiers) > self.method.layers:
            return None
        return self.ask(KIND, len(self.classifiers), clients)

    def absorb(self, total: Total) -> None:
        layer = len(self.classifiers)
        check_sums(total, self.spec)
        kernels, ridge = kernels_on(self.spec.device), self.method.ridge
        gram, cross, label_square = (total.on(kernels, name) for name in LEVEL)
        solution = ridge_solve(gram, cross, ridge)
        risk = regularised_risk(solution, gram, cross, label_square, ridge)
        weight = kernels.host(solution)
        block = self.add(Block({"layer": layer}, {"weight": weight}))
        self.classifiers.append(block.arrays["weight"])
        self.record(total, "classifier", risk=risk, solved=(f"W{layer}",))

    def model(self) -> CascadeModel:
        spec = self.spec
        return CascadeModel(self.method, spec.features, spec.classes, spec.outputs, self.classifiers)


@step(KIND, over_rows=True)
def answer_cascade(data: ClientData, request: Request, memory: Memory) -> Term:
    """G_t and H_t of the client's rows; features are made anew, which costs little beside G_t."""
    check_projections(memory.chain)
    method = Cascade(**memory.chain.opening["parameters"])
    kernels = memory.kernels
    rows = cached_rows(data, memory, np.float64, kernels)
    classifiers = [kernels.array(b.arrays["weight"]) for b in blocks_with(memory.chain, "layer")]
    sums = Accumulator(memory.workspace, np.float64, kernels)
    for span in rows.spans(method.width):
        *_, phi = stages(method, rows.features(span), classifiers, rows.outputs)
        sums.add_level(rows.weighted(span, phi), rows.weighted(span, rows.targets(span)))
    return sums.finish(rows=len(rows))
