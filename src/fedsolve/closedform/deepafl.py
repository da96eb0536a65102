"""DeepAFL: a deep residual network trained layer by layer in closed form.

Tang et al., "DeepAFL", ICLR 2026. Symbols as in the paper: Phi_t features, W_t classifier,
F_t hidden random features, Omega_{t+1} the block's transformation, lambda = `ridge`,
gamma = `residual_ridge`.

    Phi_0 = tanh(X A + a)                      W_t = (G_t + lambda I)^-1 H_t            (Eq. 13)
    F_t = gelu(Phi_t B_t + b_t)                Omega_{t+1}: thin sandwich               (Eq. 17)
    Phi_{t+1} = Phi_t + F_t Omega_{t+1}                                                 (Eq. 19)

This is the server's side: it asks for sums, by one of three plans (`PLANS`). The clients' side, which answers
from their rows, is in `deepafl_client`. Whatever the partition, the result is that of the pooled data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from fedsolve.arrays import Array, check_rows
from fedsolve.backends import host, kernels_on
from fedsolve.backends.activations import ACTIVATIONS
from fedsolve.closedform.deepafl_client import KIND, block_of
from fedsolve.closedform.predictors import DeepModel, Network
from fedsolve.closedform.projections import projection_agreement
from fedsolve.closedform.solvers import Decomposition, Sandwich, regularised_risk, ridge_solve, sandwich_solve
from fedsolve.closedform.sums import LEVEL, MOMENTS, blocks_with, moments_block, preparation_in
from fedsolve.errors import DataError
from fedsolve.federation.method import Block, Method, Request, Run, Spec, Total
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.scoring.candidates import ONE_FOLD


class Plan(NamedTuple):
    """Which statistics a plan asks for.

    block: to solve the next block. step: to advance (G, H) once the block is known; empty when
    the plan asks for G and H themselves (textbook) or needs nothing more (single).
    """

    block: tuple[str, ...]
    step: tuple[str, ...] = ()

    @property
    def merges(self) -> bool:
        """Whether classifier and block statistics can travel in one exchange."""
        return "hidden_feature" in self.block


PLANS = {
    "textbook": Plan(("hidden_gram", "hidden_residual")),
    "lean": Plan(("hidden_gram", "hidden_residual"), ("step_feature", "step_cross", "step_gram")),
    "single": Plan(("hidden_gram", "hidden_feature", "hidden_cross")),
}

CHOSEN = ("layers", "width", "ridge", "residual_ridge", "gain", "scale")
"""Parameters that may be "auto": chosen on rows held out."""

CANDIDATES: tuple[dict[str, Any], ...] = (
    {"scale": "standard", "gain": 4.0, "ridge": 10.0, "residual_ridge": 10.0},
    {"scale": "standard", "gain": 4.0, "ridge": 10.0, "residual_ridge": 1.0},
    {"scale": "standard", "gain": 4.0, "ridge": 100.0, "residual_ridge": 100.0},
    {"scale": "standard", "gain": 1.0, "ridge": 10.0, "residual_ridge": 10.0},
    {"scale": None, "gain": 4.0, "ridge": 10.0, "residual_ridge": 10.0},
    {"scale": None, "gain": 1.0, "ridge": 1.0, "residual_ridge": 0.01},
)
"""Settings that are tried. The first is taken where rows are too few to try anything."""

MOST_LAYERS = 8
MORE_LAYERS = 16
"""Layers that are tried, and those where rows are many: there every candidate was best with all of eight."""
WIDEST = 1024


def _power(number: float) -> int:
    """The power of two nearest to a number, by their ratio."""
    return 1 << max(0, round(math.log2(max(number, 1.0))))


@register(
    paper="Tang et al., DeepAFL, ICLR 2026",
    exchanges="2T+1 (textbook, lean) or max(T, 1) (single)",
    up="Gram and cross matrices of features and hidden features; thin step sums (lean)",
    down="classifier and block factors, d x C each; projections travel as a seed",
)
@dataclass(frozen=True)
class DeepAFL(Method[DeepModel]):
    """DeepAFL: deep residual network, layer by layer in closed form.

    Every block adds random features of the layer before, moved by a matrix that is solved so that the errors
    of the classifier shrink most, all from sums. T layers give T + 1 classifiers.
    skip=False, projection="identity", activation="none" and transformation="identity" are the paper's
    ablations 1 to 4; reconstruction is 1 - rho of Eq. 88. Those that change the block run on the textbook
    plan. `consistent` is that of Appendix M.
    """

    recommended: ClassVar[Mapping[str, Any]] = {**dict.fromkeys(CHOSEN, "auto"), "intercept": True}
    multilabel: ClassVar[bool] = True

    layers: int | Literal["auto"] = parameter(20, "T, the number of residual blocks.", least=0)
    width: int | Literal["auto"] = parameter(1024, "Features per layer.", least=1)
    hidden_width: int | None = parameter(None, "Hidden features per block.", least=1, none="as --width")
    ridge: float | Literal["auto"] = parameter(1.0, "Penalty on every classifier.", least=0)
    residual_ridge: float | Literal["auto"] = parameter(0.01, "Penalty on each block.", least=0)
    activation: str = parameter("gelu", "Of the blocks.", choices=tuple(ACTIVATIONS))
    zero_activation: str = parameter("tanh", "Of the first projection.", choices=tuple(ACTIVATIONS))
    gain: float | Literal["auto"] = parameter(1.0, "Factor on the blocks' random projections.", least=0)
    bias: bool = parameter(True, "Biases of random projections.")
    block_input: Literal["previous", "initial"] = parameter("previous", "Features a block starts from.")
    exchange: str = parameter(
        "auto",
        "Few bytes: lean; few exchanges: single.",
        choices=("auto", *PLANS),
        flag="--plan",
        metavar="PLAN",
    )
    skip: bool = parameter(True, "Keep each layer's features in the next.")
    projection: Literal["random", "identity"] = parameter("random", "Projections of the blocks.")
    transformation: Literal["solved", "identity"] = parameter(
        "solved", "Blocks are solved, or added as they are."
    )
    reconstruction: float = parameter(0.0, "Weight of recovering layer 0.", least=0, below=1)
    participation: float = parameter(1.0, "Share of clients asked per layer.", above=0, most=1)
    consistent: bool = parameter(
        True, "Classifier and block: same clients.", flag="--consistent/--inconsistent"
    )
    scale: Literal["standard", "centred", "auto"] | None = parameter(
        None, "standard, centred, auto; an exchange more.", metavar="HOW"
    )
    intercept: bool = parameter(False, "Fit an intercept from sums.")
    track: Literal["accuracy"] | None = parameter(None, "Count correct training rows on the way.")
    precision: Literal["float64", "float32"] = parameter("float64", "float32 is faster, but not exact.")
    seed: int = parameter(0, "Seed of projections and participation.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant and self.exchange not in ("auto", "textbook"):
            raise DataError(f"this variant runs on the textbook plan; got exchange={self.exchange!r}.")
        fixed = "identity" in (self.projection, self.transformation)
        if fixed and self.hidden_width not in (None, self.width):
            raise DataError(
                f"an identity needs hidden_width = width ({self.width}); got {self.hidden_width}."
            )
        if self.reconstruction and not (self.skip and self.transformation == "solved"):
            raise DataError("reconstruction needs skip=True and transformation='solved'.")

    @classmethod
    def trial(cls) -> Self:
        return cls(layers=2, width=12)

    def start(self, spec: Spec) -> DeepAFLRun:
        return DeepAFLRun(self, spec)

    @property
    def chooses(self) -> bool:  # type: ignore[override]
        return any(getattr(self, name) == "auto" for name in CHOSEN)

    @property
    def any_layers(self) -> bool:
        return self.layers == "auto"

    def numbers(self) -> tuple[int, float, float]:
        """Layers, ridge and residual ridge of a run that has nothing left to choose."""
        layers, ridge, residual_ridge = self.layers, self.ridge, self.residual_ridge
        if layers == "auto" or ridge == "auto" or residual_ridge == "auto":
            raise DataError("parameters that are 'auto' are chosen by a run over all candidates.")
        return layers, ridge, residual_ridge

    def traffic(self, spec: Spec, rows: int) -> tuple[int, int]:
        layers, width = self.numbers()[0], WIDEST if self.width == "auto" else self.width
        hidden, outputs, plan = self.hidden_width or width, spec.outputs, self.plan(spec)
        level, step = width * (width + 1) // 2 + width * outputs, hidden * (hidden + 1) // 2
        rank = min(width, outputs)
        step += hidden * outputs + (hidden * width if plan.merges else (width + outputs) * rank)
        again = 0 if plan.step or plan.merges else level
        return level + layers * (step + again), layers * 3 * width * rank

    def scaled(self, share: float) -> DeepAFL:
        """This network for a share of the rows: as many rows for each feature, penalties as strong."""
        if share == 1.0:
            return self
        _, ridge, residual_ridge = self.numbers()
        assert self.width != "auto"
        width = min(self.width, max(64, _power(self.width * share)))
        return replace(self, width=width, ridge=ridge * share, residual_ridge=residual_ridge * share)

    def candidates(self, spec: Spec, rows: int) -> list[DeepAFL]:
        """What is tried where a parameter is "auto": `CANDIDATES`, as far as settings are not given."""
        layers = MOST_LAYERS if rows < ONE_FOLD else MORE_LAYERS
        width = min(WIDEST, max(64, _power(rows / 4)))  # a power of two, about a quarter of the rows
        open_ = [name for name in CHOSEN if getattr(self, name) == "auto"]
        tried = [{**settings, "layers": layers, "width": width} for settings in CANDIDATES]
        made = [replace(self, **{name: values[name] for name in open_}) for values in tried]
        return list(dict.fromkeys(made))

    @property
    def variant(self) -> bool:
        """Whether the block differs from the paper's; the recurrences of lean and single then do not hold."""
        solved = self.transformation == "solved"
        return not (self.skip and solved and self.projection == "random" and self.reconstruction == 0.0)

    def plan(self, spec: Spec) -> Plan:
        """The plan asked for; "auto" follows what the federation prefers to save, where there is a choice."""
        found = "textbook" if self.variant else "lean" if spec.prefers == "bytes" else "single"
        return PLANS[found if self.exchange == "auto" else self.exchange]

    def agreement(self) -> dict[str, Any]:
        return projection_agreement(self.seed)

    def largest_side(self, spec: Spec) -> int:
        width = WIDEST if self.width == "auto" else self.width
        return max(spec.features, width, self.hidden_width or 0)


@dataclass(frozen=True)
class LayerSums:
    """G_t, H_t and sum of y² per output, valid for the cohort they were summed over.

    anchor is Phi_tᵀPhi_0, for reconstruction only. `rows` tells other data under the same names apart.
    """

    gram: Array
    cross: Array
    label_square: Array
    cohort: tuple[str, ...]
    rows: int
    layer: int
    anchor: Array | None = None

    def describe(self, total: Total) -> bool:
        """Whether these sums are over the clients, and the rows, that answered this exchange."""
        return self.cohort == total.cohort and self.rows == total.count("rows")


class DeepAFLRun(Run[DeepModel]):
    """The sequence W_0 -> Omega_1 -> W_1 -> ... -> W_T (Algorithm 1) over any exchange plan.

    When the cohort changes between exchanges, (G, H) no longer describe the clients present and
    are asked for again; each W_t and Omega_{t+1} is exact for the cohort of its own exchange.
    """

    method: DeepAFL

    def __init__(self, method: DeepAFL, spec: Spec) -> None:
        super().__init__(method, spec)
        self._layers, self.ridge, self._residual_ridge = method.numbers()
        self.plan = method.plan(spec)
        self._partial = method.participation < 1.0
        self._prepares = method.scale is not None or method.intercept
        self.classifiers: list[Array] = []
        self.blocks: list[Sandwich | None] = []
        self.risks: list[float] = []
        self.sums: LayerSums | None = None
        self._phase = ""
        self._solved: list[str] = []
        self._kernels = kernels_on(spec.device)
        self._decomposed: Callable[[], Decomposition] | None = None
        self.hidden_gram: Array | None = None
        self.hidden_square: Any = 0.0

    @property
    def exchanges(self) -> int:
        layers = self._layers
        if self.method.transformation == "identity":
            count = layers + 1
        elif not self.plan.merges or (self._partial and not self.method.consistent):
            count = 2 * layers + 1
        else:
            count = layers + 1 if self._partial else max(layers, 1)
        return count + self._prepares

    @property
    def depth(self) -> int:
        return len(self.classifiers)

    @property
    def weight(self) -> Array:
        """The newest classifier, where the server solves."""
        return self._kernels.array(self.classifiers[-1])

    @property
    def block(self) -> Sandwich:
        """The newest block as the clients have it, where the server solves."""
        block = self.blocks[-1]
        assert block is not None
        return block.on(self._kernels)

    def request(self, clients: tuple[str, ...]) -> Request | None:
        layer, last = len(self.blocks), self._layers
        if self._prepares and preparation_in(self.chain) is None:
            # A block's penalty is weighed against squared weights: targets get a scale of their own.
            squares = {"squares": True} if self.spec.classes is None else {}
            self._phase = "moments"
            return self.ask(MOMENTS, 0, clients, {"phase": self._phase, **squares})
        if len(self.classifiers) > last:
            return None
        arrays: dict[str, Array] = {}
        phase = "block" if len(self.classifiers) > layer else "classifier"
        cohort = self._cohort(clients, layer, phase)
        if phase == "block":
            ask = self._block_statistics
            if "hidden_residual" in ask or self.method.track:
                arrays["weight"] = self._send(self.classifiers[layer])
        else:
            ask = LEVEL + (("anchor",) if self.method.reconstruction else ())
            if self.plan.merges and layer < last and (self.method.consistent or not self._partial):
                phase, ask = "classifier+block", LEVEL + self.plan.block
            elif self.plan.step and self.sums is not None and self.sums.cohort == cohort:
                phase, ask = "step", self.plan.step
        self._phase = phase
        note = {"phase": phase, "ask": list(ask), "track": self.method.track is not None}
        return self.ask(KIND, layer, cohort, note, arrays)

    @property
    def _block_statistics(self) -> tuple[str, ...]:
        if not self.method.skip:
            return ("hidden_gram", "hidden_cross")
        if self.method.reconstruction:
            return ("hidden_gram", "hidden_residual", "hidden_feature", "hidden_initial")
        return self.plan.block

    def absorb(self, total: Total) -> None:
        self.hidden_gram = None
        self._solved = []
        if self._phase == "moments":
            self.add(moments_block(total, self.method.scale, self.method.intercept))
        if self._phase == "step" and self.sums is not None and self.sums.describe(total):
            self._advance(*(total.on(self._kernels, name) for name in self.plan.step))
        elif self._phase == "step":
            self.sums = None  # the cohort changed meanwhile: they are asked for
        if "classifier" in self._phase:
            self._take_level(total)
        if "block" in self._phase:
            self._take_block(total)
        rows = total.count("tracked")
        self.record(
            total,
            self._phase,
            risk=self.risks[-1] if any(name.startswith("W") for name in self._solved) else None,
            accuracy=total.count("correct") / rows if rows else None,
            solved=tuple(self._solved),
        )

    def model(self) -> DeepModel:
        classifiers, preparation = self.classifiers, preparation_in(self.chain)
        if preparation is not None and preparation.target_scale is not None:
            classifiers = [weight * preparation.target_scale for weight in classifiers]
            preparation = replace(preparation, target_scale=None)
        spec, parameters, risk = self.spec, self.method.parameters(), np.array(self.risks)
        network, known = Network.from_parameters(spec.features, parameters), (spec.classes, spec.outputs)
        return DeepModel(network, *known, classifiers, self.blocks, preparation, parameters, risk)

    def _take_level(self, total: Total) -> None:
        """Eq. 12-13: sums of the cohort, then its classifier."""
        gram, cross, label_square = (total.on(self._kernels, name) for name in LEVEL)
        if not self._partial:
            check_rows(total.count("rows"))
            # Centred targets of a single class are zero; one-hot ones leave the other columns zero.
            present = int((label_square > 0).sum()) + self.method.intercept
            if self.spec.classes is not None:
                check_rows(None, present)
        anchor = total.on(self._kernels, "anchor") if self.method.reconstruction else None
        rows = total.count("rows")
        layer = len(self.blocks)
        self._solve(LayerSums(gram, cross, label_square, total.cohort, rows, layer, anchor))
        if self.method.transformation == "identity" and len(self.blocks) < self._layers:
            self._append(None)

    def _take_block(self, total: Total) -> None:
        """Eq. 16-17: the block that best corrects the residual, for this exchange's cohort."""
        layer, sums, weight = len(self.blocks), self.sums, self.weight
        total_of = partial(total.on, self._kernels)
        if self.plan.merges:
            residual = total_of("hidden_cross") - total_of("hidden_feature") @ weight
        elif self.method.skip:
            residual = total_of("hidden_residual")
        else:
            residual = total_of("hidden_cross")  # without Phi_t the block must give all of Y
        if self.method.reconstruction:
            residual, weight = self._with_reconstruction(residual, weight, total)
        hidden_gram = total_of("hidden_gram")
        known = None if self._decomposed is None or self.method.reconstruction else self._decomposed()
        self._append(sandwich_solve(hidden_gram, residual, weight, self._residual_ridge, known))
        self._solved.append(f"Omega{layer + 1}")
        if not self.plan.merges:
            self.hidden_square = hidden_gram.diagonal().max()
        whole = sums is not None and sums.layer == layer and sums.describe(total) and not self._partial
        if self.plan.step:
            self.hidden_gram = hidden_gram
        elif self.plan.merges and whole:
            left, cross = self.block.left, total_of("hidden_cross")
            feature = total_of("hidden_feature").T @ left
            self._advance(feature, left.T @ cross, left.T @ (hidden_gram @ left))
        else:
            self.sums = None

    def _with_reconstruction(self, residual: Array, weight: Array, total: Total) -> tuple[Array, Array]:
        """Eq. 88 as the same sandwich: the decoder Q_t = (G_t + lambda I)^-1 Phi_tᵀPhi_0 beside W_t."""
        assert self.sums is not None
        assert self.sums.anchor is not None
        decoder = ridge_solve(self.sums.gram, self.sums.anchor, self.ridge)
        kernels = self._kernels
        lost = total.on(kernels, "hidden_initial") - total.on(kernels, "hidden_feature") @ decoder
        labels, recovery = np.sqrt(1.0 - self.method.reconstruction), np.sqrt(self.method.reconstruction)
        residual = kernels.beside(labels * residual, recovery * lost)
        return residual, kernels.beside(labels * weight, recovery * decoder)

    def _append(self, exact: Sandwich | None) -> None:
        """Add a block to the model; what counts from here on is the block as the clients have it."""
        sides = {} if exact is None else {"left": exact.left, "right": exact.right}
        sent = {side: self._send(host(array)) for side, array in sides.items()}
        added = self.add(Block({"layer": len(self.blocks) + 1}, sent))
        self.blocks.append(block_of(added, "float64"))

    def _advance(self, feature: Array, step_cross: Array, step_gram: Array) -> None:
        """The sums of the next layer from those of this one, by the block's output P = F A before Uᵀ:

            G' = G + Z Uᵀ + U Zᵀ + U (PᵀP) Uᵀ,   H' = H + U (PᵀY),   Z = Phiᵀ P

        The lean plan asks clients for Z, PᵀY and PᵀP, which are thin; the single plan makes them of FᵀPhi,
        FᵀY and FᵀF.
        """
        sums, right = self.sums, self.block.right
        assert sums is not None
        half = (feature + 0.5 * (right @ step_gram)) @ right.T
        gram, cross = sums.gram + half + half.T, sums.cross + right @ step_cross
        self._solve(replace(sums, gram=gram, cross=cross, layer=len(self.blocks), anchor=None))

    def _solve(self, sums: LayerSums) -> None:
        """W_t and the regularised risk that Theorem 3 speaks of, both from the sums of the layer."""
        self.sums = sums
        weight = ridge_solve(sums.gram, sums.cross, self.ridge)
        blocks = self._residual_ridge * sum(b.square for b in self.blocks if b is not None)
        self.risks.append(
            regularised_risk(weight, sums.gram, sums.cross, sums.label_square, self.ridge, blocks)
        )
        self.classifiers.append(self._kernels.host(weight))
        if len(self.blocks) < self._layers:
            # Last: a device decomposes while the next question is made.
            self._decomposed = self._kernels.begin_svd(weight)
        self._solved.append(f"W{len(self.classifiers) - 1}")

    def _send(self, array: Array) -> Array:
        return array.astype(self.method.precision, copy=False)

    def _cohort(self, clients: tuple[str, ...], layer: int, phase: str) -> tuple[str, ...]:
        """Who is asked: all, or the share with the smallest hashes of (seed, layer, client)."""
        if not self._partial:
            return clients
        count = max(1, round(self.method.participation * len(clients)))
        draw = f"{self.method.seed}|cohort|{layer}" + ("" if self.method.consistent else f"|{phase}")
        ranks = {client: hashlib.sha256(f"{draw}|{client}".encode()).digest() for client in clients}
        return tuple(sorted(sorted(clients, key=ranks.__getitem__)[:count]))

    def stored(self) -> dict[str, Any]:
        known = {} if self.sums is None else vars(self.sums)
        sums = {name: host(one) if hasattr(one, "shape") else one for name, one in known.items()}
        return {"classifiers": self.classifiers, "risks": self.risks, "sums": sums or None}

    def take_stored(self, kept: dict[str, Any]) -> None:
        self.risks, self.classifiers = kept["risks"], kept["classifiers"]
        self.blocks = [block_of(block, "float64") for block in blocks_with(self.chain, "layer")]
        if (sums := kept["sums"]) is not None:
            there = self._kernels.array
            placed: dict[str, Any] = {
                n: there(a) if isinstance(a, np.ndarray) else a for n, a in sums.items()
            }
            self.sums = LayerSums(**placed)
