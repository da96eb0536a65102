"""Auto: the best of several methods by rows held out, trained on all rows, with a table of what was tried.

Every kind of candidate is a line of `CANDIDATES`. All of them are tried in the same exchanges and
compared in one more, and the best is trained again on all rows (`scoring.choice`); a budget counts all of
that together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from fedsolve.backends import kernels_on
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.deepafl import WIDEST, DeepAFL
from fedsolve.closedform.kernel_afl import DIRECT_LANDMARKS, FEWEST, KernelAFL
from fedsolve.closedform.kernel_softmax import KernelSoftmax
from fedsolve.closedform.projections import projection_agreement
from fedsolve.closedform.rbf import factor_bytes, factor_operations
from fedsolve.closedform.softmax import Softmax
from fedsolve.errors import DataError, did_you_mean
from fedsolve.federation.method import Method, Run, Spec
from fedsolve.model import Model
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.scoring.candidates import ONE_FOLD
from fedsolve.threads import usable_cores

Candidates = Callable[[Spec, int, "Auto"], "Sequence[Method[Any]]"]
"""The candidates of a kind, from what is known of the federation, the number of all rows, and Auto itself."""


def _softmax(spec: Spec, rows: int, auto: Auto) -> list[Method[Any]]:
    if spec.classes is None:
        return []
    # Columns of unit variance have a square sum of one for each row: penalties in proportion to the rows.
    # Columns to unit variance, once: a schema does so to numbers, and rare indicators stay small.
    scale: Literal["standard"] | None = None if spec.standardised else "standard"
    ridges = [share * rows for share in PENALTIES] if rows < ONE_FOLD else [None]
    made = [Softmax(scale=scale, ridge=ridge) for ridge in ridges]
    return [*made, *([Softmax()] if rows >= ONE_FOLD and not spec.standardised else [])]


def _kernel(spec: Spec, rows: int, auto: Auto) -> list[Method[Any]]:
    if rows >= ONE_FOLD:
        many = min(auto.landmarks or KernelAFL().count(rows), 1 << (2 * rows - 1).bit_length())
        plain = [KernelAFL(landmarks=many, ridge=ridge, seed=auto.seed) for ridge in (0.03, 0.3)]
        return [*plain, KernelAFL(landmarks=many, scale="standard", ridge=0.03, seed=auto.seed)]
    return [
        KernelAFL(landmarks=_half(rows), scale=scale, bandwidth=bandwidth, ridge="auto", seed=auto.seed)
        for scale, bandwidth in itertools.product(SCALES, BANDWIDTHS)
    ]


def _kernel_softmax(spec: Spec, rows: int, auto: Auto) -> list[Method[Any]]:
    if spec.classes is None or spec.features > FEW_FEATURES:
        return []
    count = min(512, _half(rows))
    return [
        KernelSoftmax(count, ridge, bandwidth, curvature="bound", seed=auto.seed)
        for bandwidth, ridge in KERNEL_SOFTMAXES
    ]


def _half(rows: int) -> int:
    """Half as many landmarks as rows: few enough to be solved at once."""
    return min(DIRECT_LANDMARKS, max(16, rows // 2))


FEW_FEATURES = 128
"""Kernel softmax is tried up to this many features: in tables, one class may surround another."""

MOST_LANDMARKS = 131_072
"""Most landmarks that seconds and memory are turned into."""

RATES = {"cuda": 2e13, "cpu": 2e10}
"""Operations a second that are counted on: of a device, and of each core of the host."""

DEVICE_SECONDS = 8.0
"""What a device may take where nothing is set: its memory is the other bound."""

PENALTIES = (0.001, 0.003, 0.01)
"""Of logistic regression where rows are few, for each row. A decade apart the best one is missed."""

SCALES: tuple[Literal["standard"] | None, ...] = ("standard", None)
BANDWIDTHS = (0.05, 0.25, 1.0, 5.0)
"""Of the kernel machines that are tried where rows are few; their ridges follow from the same sums."""

KERNEL_SOFTMAXES = ((0.25, 0.1), (1.0, 0.01), (5.0, 0.01))
"""Bandwidth and ridge of logistic regression on kernels."""

CANDIDATES: dict[str, Candidates] = {
    "afl": lambda spec, rows, auto: [
        AFL(ridge="auto", intercept=True, scale=None if spec.standardised else "standard")
    ],
    "softmax": _softmax,
    "kernelafl": _kernel,
    "kernelsoftmax": _kernel_softmax,
    "deepafl": lambda spec, rows, auto: DeepAFL(**DeepAFL.recommended, seed=auto.seed).candidates(spec, rows),
}
"""What is tried, the cheapest first."""


@register(
    paper="fedsolve",
    exchanges="2, those of the longest candidate, and those of the best",
    up="the sums of all candidates together; mistakes and squared errors on the rows held out",
    down="the blocks of all candidates together; their models once, to be compared",
)
@dataclass(frozen=True)
class Auto(Method[Model]):
    """Auto: the best of the closed forms on rows held out, trained again on all rows.

    What may be tried, and at which cost in all. Seconds and memory of the server are turned into landmarks of
    kernel machines, by counted operations and bytes; without them there are as many as KernelAFL has itself,
    and on a GPU what eight seconds and its memory allow.
    """

    any_layers: ClassVar[bool] = True
    chooses: ClassVar[bool] = True
    multilabel: ClassVar[bool] = True

    max_exchanges: int | None = parameter(
        None, "Exchanges in all, for trying and training.", least=4, none="no limit"
    )
    budget: float | None = parameter(
        None,
        "Megabytes up and down in all, for trying and training.",
        above=0,
        metavar="MB",
        none="256, and 200 times as many as the rows have",
    )
    seconds: float | None = parameter(
        None, "Of the server for a kernel machine.", above=0, metavar="S", none="no limit, 8 on a GPU"
    )
    memory: float | None = parameter(
        None, "Gigabytes of the server for it.", above=0, metavar="GB", none="what it has"
    )
    landmarks: int | None = parameter(None, "Of a kernel machine.", least=1, none="by these, or kernelafl's")
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

    def start(self, spec: Spec) -> Run[Model]:
        raise DataError("Auto trains what it chooses: call fit, or start a Recipe.")

    def candidates(self, spec: Spec, rows: int) -> list[Method[Any]]:
        """All candidates for so many rows."""
        few = self.methods == "all" and rows < ONE_FOLD  # on which deep networks win nothing
        names = [name for name in self.names if not (few and name == "deepafl")]
        return [method for name in names for method in CANDIDATES[name](spec, rows, self)]

    def afforded(self, spec: Spec) -> Auto:
        """This with as many landmarks, a power of two, as seconds and memory allow at the server."""
        seconds, memory, cuda = self.seconds, self.memory, spec.device.startswith("cuda")
        if seconds is None and memory is None:
            if self.landmarks is not None or not cuda:
                return self
            seconds, memory = DEVICE_SECONDS, 1e-9 * kernels_on(spec.device).budget(0)
        operations = (seconds or math.inf) * (RATES["cuda"] if cuda else RATES["cpu"] * usable_cores())
        count = FEWEST
        while (
            count < MOST_LANDMARKS
            and factor_operations(2 * count, spec.features, spec.outputs) <= operations
            and factor_bytes(2 * count, spec.features, spec.outputs) <= 1e9 * (memory or math.inf)
        ):
            count *= 2
        return replace(self, landmarks=count, seconds=None, memory=None)

    def agreement(self) -> dict[str, Any]:
        return projection_agreement(self.seed)

    def largest_side(self, spec: Spec) -> int:
        return max(spec.features, WIDEST)
