"""APFL: a shared stream in one exchange, and a stream for each client in none.

Fan et al., "APFL: Analytic Personalized Federated Learning via Dual-Stream Least Squares". Not the 2020
"Adaptive Personalized Federated Learning" that other libraries call APFL.

    Φ = activation(X R_P + r)               G = (sum_k Φ_kᵀΦ_k + ridge I)^-1 sum_k Φ_kᵀY_k        (Eq. 2, 3)
    each client, by itself:                 Ψ, P_k, scores Φ G + balance Ψ P_k                    (Eq. 11-14)

The primary stream is a DeepAFL without blocks, or with `layers` of them if asked for, and runs on the same
machinery. The paper's recursion over clients (Eq. 7-10) gives the same G; it is in `laws`.
The second stage, which runs where a client's rows are, is in `dual_stream`; how balance and ridge are chosen
is in `balance`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.backends.activations import ACTIVATIONS
from fedsolve.closedform.deepafl import PLANS, DeepAFL, DeepAFLRun
from fedsolve.closedform.dual_stream import PersonalModel, Refinement
from fedsolve.closedform.predictors import LinearModel
from fedsolve.closedform.projections import check_model, projection_agreement
from fedsolve.errors import DataError
from fedsolve.federation.method import Method, Spec
from fedsolve.federation.participant import ClientData
from fedsolve.federation.states import StateStore
from fedsolve.model import Model, model_from_contents
from fedsolve.parameters import parameter
from fedsolve.registry import register

_OF_BOTH = (
    *("layers", "width", "hidden_width", "ridge", "residual_ridge"),
    *("exchange", "scale", "intercept", "precision", "seed", "bias"),
)
"""Parameters that the shared stream has as a DeepAFL under the same names."""


@register(
    paper="Fan et al., APFL (Analytic Personalized FL)",
    exchanges="1 (with T blocks in the shared stream, as deepafl)",
    up="Gram and cross matrix of the shared features (as afl); of its own stream, nothing",
    down="the shared classifier, d x C; projections travel as a seed",
)
@dataclass(frozen=True)
class APFL(Method["APFLModel"]):
    """Analytic Personalised FL (APFL): a shared stream, and one of each client's own.

    Of the shared stream: width (d_P), ridge (gamma), activation; layers = 0 is the paper, more is DeepAFL
    with its exchanges, whose blocks take hidden_width, residual_ridge, block_activation and exchange. Of each
    client's own: refinement_width (d_R), refinement_ridge (beta), balance (lambda of Eq. 14), the last two
    chosen by leave-one-out in closed form where they are "auto" (see `closedform.balance`); it sees the same
    features, scaled and centred alike.
    """

    width: int = parameter(1024, "Features of the shared stream.", least=1)
    refinement_width: int = parameter(1024, "Features of each client's own stream.", least=1)
    ridge: float = parameter(0.01, "Penalty on the shared stream.", least=0)
    refinement_ridge: float | Literal["auto"] = parameter(
        1.0, "Penalty on each client's own; auto: it chooses itself.", least=0
    )
    balance: float | Literal["auto"] = parameter(
        0.3, "Weight of each client's own; auto: it chooses itself.", least=0
    )
    activation: str = parameter("relu", "Of the shared stream.", choices=tuple(ACTIVATIONS))
    refinement_activation: str = parameter("relu", "Of each client's own stream.", choices=tuple(ACTIVATIONS))
    layers: int = parameter(0, "T residual blocks in the shared stream; 0 is the paper.", least=0)
    hidden_width: int | None = parameter(None, "Hidden features per block.", least=1, none="as --width")
    residual_ridge: float = parameter(0.01, "Penalty on each block.", least=0)
    block_activation: str = parameter("gelu", "Of the shared stream's blocks.", choices=tuple(ACTIVATIONS))
    exchange: str = parameter(
        "auto",
        "With blocks: fewest bytes (lean), fewest exchanges (single), the paper's (textbook).",
        choices=("auto", *PLANS),
        flag="--plan",
        metavar="PLAN",
    )
    bias: bool = parameter(True, "Biases of random projections.")
    scale: Literal["standard"] | None = parameter(None, "Standardise features: one exchange more.")
    intercept: bool = parameter(False, "Fit an intercept from sums.")
    precision: Literal["float64", "float32"] = parameter("float64", "float32 is faster, but not exact.")
    seed: int = parameter(0, "Seed of the random projections.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.refinement  # checks what joins ridge and balance

    @property
    def primary(self) -> DeepAFL:
        """The primary stream's method; Φ is DeepAFL's zero layer."""
        same = {name: getattr(self, name) for name in _OF_BOTH}
        return DeepAFL(**same, activation=self.block_activation, zero_activation=self.activation)

    @property
    def refinement(self) -> Refinement:
        """How each client makes its own stream."""
        kind, chosen = self.refinement_activation, (self.balance, self.seed, self.bias)
        return Refinement(self.refinement_width, self.refinement_ridge, kind, *chosen)

    @classmethod
    def trial(cls) -> Self:
        return cls(width=12, refinement_width=12)

    def start(self, spec: Spec) -> APFLRun:  # type: ignore[override]
        return APFLRun(self, spec)

    def agreement(self) -> dict[str, Any]:
        return projection_agreement(self.seed)

    def largest_side(self, spec: Spec) -> int:
        return self.primary.largest_side(spec)

    def over(self, shared: Model) -> APFLModel:
        """Refinements over any shared model of the same features, however it was trained.

        They correct its `estimates`: of a network, the probabilities. Of an APFL model, the shared stream is
        taken; a model that belongs to one client is refused.
        """
        primary = shared.primary if isinstance(shared, APFLModel) else shared.undescribed()
        return APFLModel(primary, self).described_as(shared)


class APFLModel(Model):
    """What every client gets: the primary stream, and how to refine it.

    It predicts as the primary stream does. `personal(client)`, in a local federation, and
    `participant.personalise(model)`, where the data are, give a client's own predictor.
    """

    family: ClassVar[str] = "apfl"
    personalises = True

    def __init__(self, primary: Model, method: APFL) -> None:
        if primary.private:
            raise DataError(
                f"a model of family '{primary.family}' belongs to one client, and the shared stream goes to "
                "all of them. Put refinements over the model that it was made from."
            )
        super().__init__(primary.features, primary.classes, primary.outputs)
        self.primary, self.logits = primary, primary.logits
        self.method = method
        self.history = primary.history

    def own_model(self, data: ClientData, states: StateStore | None = None) -> PersonalModel:
        """The predictor of the client that owns `data`: Eq. 11-14, with nothing sent to anybody."""
        return self.method.refinement.fit(self.primary, data)

    def alone(self) -> APFLModel:
        """The refinement stream by itself, fitted to the labels: each client on its own.

        Nothing from other clients enters, except the means and spreads by which `scale` and `intercept`
        prepare features: those stay everybody's, so that the stream is the same as in the whole model.
        """
        shape, preparation = (self.features, self.outputs), getattr(self.primary, "preparation", None)
        nothing = LinearModel(np.zeros(shape), np.zeros(self.outputs), self.classes, preparation)
        alone = APFLModel(nothing, replace(self.method, balance=1.0)).described_as(self)
        alone.federation = self.federation
        return alone

    def scores(self, features: Array) -> Array:
        return self.primary.decision_function(features)

    def arrays(self) -> dict[str, Array]:
        return {f"primary.{name}": array for name, array in self.primary.contents()[0].items()}

    def note(self) -> dict[str, Any]:
        return {
            "primary": self.primary.contents()[1],
            "parameters": self.method.parameters(),
            **projection_agreement(self.method.seed),
        }

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> APFLModel:
        check_model(note)
        primary = model_from_contents(container.with_prefix(arrays, "primary."), note["primary"])
        return cls(primary, APFL(**note["parameters"]))


class APFLRun(DeepAFLRun):
    """The primary stream's run. Refinements take no part: nothing of them is asked for, sent or kept."""

    def __init__(self, method: APFL, spec: Spec) -> None:
        super().__init__(method.primary, spec)
        self._whole = method

    def model(self) -> APFLModel:  # type: ignore[override]
        return APFLModel(super().model(), self._whole)


def warn_of_few_rows(method: APFL, rows: int) -> None:
    """Warn if the shared stream alone can fit all rows, so that no errors are left to refine."""
    if rows < 2 * method.width:
        warnings.warn(
            f"{rows:,} rows are few for a shared stream of width {method.width:,}: it may fit them so "
            "closely that the clients' own streams have nothing left to learn from. Use a width below half "
            "of the rows, or a larger ridge.",
            stacklevel=2,
        )
