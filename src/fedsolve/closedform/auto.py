"""Auto: the best of several methods by rows held out, trained on all rows, with a table of what was tried.

Every kind of candidate is a line of `CANDIDATES`. All of them are tried in the same exchanges (`lockstep`),
compared in one more, and the best is trained again on all rows (`choosing`); a budget counts all of that
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from fedsolve.closedform.afl import AFL
from fedsolve.closedform.candidates import MANY
from fedsolve.closedform.choosing import ChoosingRun
from fedsolve.closedform.deepafl import WIDEST, DeepAFL
from fedsolve.closedform.kernel_afl import DIRECT_LANDMARKS, KernelAFL
from fedsolve.closedform.kernel_softmax import KernelSoftmax
from fedsolve.closedform.projections import projection_agreement
from fedsolve.closedform.softmax import Softmax
from fedsolve.errors import DataError, did_you_mean
from fedsolve.federation.engine import Spec
from fedsolve.federation.method import Method
from fedsolve.model import Model
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register

Candidates = Callable[[Spec, int, int], "list[Method[Any]]"]
"""The candidates of a kind, from what is known of the federation, the number of all rows and the seed."""


def _linear(spec: Spec, rows: int, seed: int) -> list[Method[Any]]:
    return [AFL(ridge="auto", intercept=True, scale="standard")]


def _deep(spec: Spec, rows: int, seed: int) -> list[Method[Any]]:
    open_ = DeepAFL(
        layers="auto",
        width="auto",
        ridge="auto",
        residual_ridge="auto",
        gain="auto",
        scale="auto",
        intercept=True,
        seed=seed,
    )
    return [*open_.candidates(spec, rows)]


def _softmax(spec: Spec, rows: int, seed: int) -> list[Method[Any]]:
    if spec.classes is None:
        return []
    # Columns of unit variance have a square sum of one for each row: penalties in proportion to the rows.
    ridges = (0.001 * rows, 0.01 * rows) if rows < MANY else (None,)
    made = [Softmax(scale="standard", ridge=ridge) for ridge in ridges]
    return [*made, *([Softmax()] if rows >= MANY else [])]


def _kernel(spec: Spec, rows: int, seed: int) -> list[Method[Any]]:
    if rows >= MANY:
        many = min(MOST_LANDMARKS, KernelAFL().count(rows))
        plain = [KernelAFL(landmarks=many, ridge=ridge, seed=seed) for ridge in (0.03, 0.3)]
        return [*plain, KernelAFL(landmarks=many, scale="standard", ridge=0.03, seed=seed)]
    return [
        KernelAFL(landmarks=_half(rows), scale=scale, bandwidth=bandwidth, ridge=ridge, seed=seed)
        for scale, bandwidth, ridge in KERNELS
    ]


def _kernel_softmax(spec: Spec, rows: int, seed: int) -> list[Method[Any]]:
    if spec.classes is None or spec.features > FEW_FEATURES:
        return []
    count = min(512, _half(rows))
    return [
        KernelSoftmax(landmarks=count, scale=scale, bandwidth=bandwidth, ridge=ridge, seed=seed)
        for scale, bandwidth, ridge in KERNEL_SOFTMAXES
    ]


def _half(rows: int) -> int:
    """Half as many landmarks as rows: few enough to be solved at once."""
    return min(DIRECT_LANDMARKS, max(256, 1 << (max(rows, 2) // 2 - 1).bit_length()))


FEW_FEATURES = 128
"""Features up to which the likelihood of kernels is tried: tables, where classes may lie about each other."""

MOST_LANDMARKS = 16_384
"""Landmarks of a kernel machine that nobody asked for: the server needs two triangles of them, 2.1 GB."""

KERNELS: tuple[tuple[Literal["standard"] | None, float, float], ...] = (
    ("standard", 0.1, 0.03),
    ("standard", 0.3, 0.03),
    ("standard", 0.3, 0.3),
    ("standard", 1.0, 0.03),
    ("standard", 1.0, 0.3),
    ("standard", 3.0, 0.03),
    (None, 1.0, 0.03),
    (None, 1.0, 0.3),
)
"""Scale, bandwidth and ridge of the kernel machines that are tried where rows are few."""

KERNEL_SOFTMAXES: tuple[tuple[Literal["standard"] | None, float, float], ...] = (
    ("standard", 0.3, 0.1),
    ("standard", 1.0, 0.01),
    ("standard", 3.0, 0.01),
    (None, 1.0, 0.01),
)
"""The same of logistic regression on kernels."""

CANDIDATES: dict[str, Candidates] = {
    "afl": _linear,
    "softmax": _softmax,
    "kernelafl": _kernel,
    "kernelsoftmax": _kernel_softmax,
    "deepafl": _deep,
}
"""What is tried, the cheapest first."""


@register(
    Info(
        key="auto",
        title="Auto: the best of the closed forms on rows held out, trained again on all rows",
        paper="fedsolve",
        exchanges="2, those of the longest candidate, and those of the best",
        up="the sums of all candidates together; mistakes and squared errors on the rows held out",
        down="the blocks of all candidates together; their models once, to be compared",
    )
)
@dataclass(frozen=True)
class Auto(Method[Model]):
    """What may be tried, and at which cost in all."""

    key: ClassVar[str] = "auto"
    any_layers: ClassVar[bool] = True
    additive: ClassVar[frozenset[str]] = AFL.additive | DeepAFL.additive | KernelAFL.additive

    max_exchanges: int | None = parameter(
        None, "Exchanges in all, for trying and training.", least=4, none="no limit"
    )
    max_bytes: int | None = parameter(
        None, "Bytes up and down in all, for trying and training.", least=1, none="no limit"
    )
    methods: str = parameter("all", f"Tried: {', '.join(CANDIDATES)}.", metavar="A,B")
    seed: int = parameter(0, "Seed of the random projections.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.names:
            if name not in CANDIDATES:
                hint = did_you_mean(name, CANDIDATES)
                raise DataError(f"Auto does not try '{name}'.{hint} It knows {', '.join(CANDIDATES)}.")

    @classmethod
    def trial(cls) -> Self:
        return cls(methods="afl")

    @property
    def names(self) -> list[str]:
        """The kinds of methods that are tried."""
        chosen = [name.strip() for name in self.methods.split(",") if name.strip()]
        return list(CANDIDATES) if chosen == ["all"] else chosen

    def start(self, spec: Spec) -> ChoosingRun[Model]:
        return ChoosingRun(self, spec)

    def candidates(self, spec: Spec, rows: int) -> list[Method[Any]]:
        """All candidates for so many rows."""
        return [method for name in self.names for method in CANDIDATES[name](spec, rows, self.seed)]

    def agreement(self) -> dict[str, Any]:
        return projection_agreement(self.seed)

    def largest_side(self, spec: Spec) -> int:
        return max(spec.features, WIDEST)
