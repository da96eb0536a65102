"""KernelAFL: a Gaussian kernel machine by landmarks that are nobody's rows, from sums.

FALKON (Rudi, Carratino and Rosasco, NeurIPS 2017) with landmarks from the Gaussians of the classes:

    minimise  sum_i w_i |y_i - k(x_i, Z) a|² + ridge aᵀ K_MM a         k(x, z) = exp(-|x - z|² / h)

Exchange 1 brings AFL's sums: the class means and the covariance within classes, from which everybody draws
the same landmarks Z (`landmarks`), and the bandwidth h = bandwidth * 2 tr Cov. Few landmarks: exchange 2
brings KᵀK and KᵀY, and the system is solved. Many: exchange 2 brings KᵀY, and each further one a product
Kᵀ(K u), M x C down and up, for a step of conjugate gradients, preconditioned by the landmarks alone (`rbf`).
Few steps regularise: they are a setting like the ridge.

This is the server's side; what clients answer is in `kernel_client`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
from scipy.linalg import LinAlgError, cho_solve

from fedsolve.backends.factorisation import cholesky_factor
from fedsolve.checks import check_classes, check_rows
from fedsolve.closedform import afl
from fedsolve.closedform.kernel_client import KIND
from fedsolve.closedform.kernel_model import KernelModel
from fedsolve.closedform.landmarks import Landmarks, landmark_agreement, landmark_block
from fedsolve.closedform.moments import Preparation
from fedsolve.closedform.rbf import LandmarkFactors, available_memory, check_memory
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Request, Total
from fedsolve.federation.method import Method, Run
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register

DIRECT_LANDMARKS = 1024
"""Up to so many landmarks their Gram matrix, 4.2 MB, is asked for at once."""

_REFINEMENTS = 2

FEWEST, MOST = 256, 32768
"""Landmarks where none are asked for: a power of two, at least a quarter of the rows, within these bounds."""


@register(
    Info(
        key="kernelafl",
        title="KernelAFL: a Gaussian kernel machine by landmarks that are nobody's rows",
        paper="Rudi et al., FALKON, NeurIPS 2017",
        exchanges="2 (up to 1,024 landmarks) or 2 + steps",
        up="Gram and cross matrix once (as afl), then kernel sums: M x C, or an M x M triangle",
        down="class means and a d x d triangle once; then M x C",
    )
)
@dataclass(frozen=True)
class KernelAFL(Method[KernelModel]):
    """Parameters of KernelAFL.

    least_rows: a class with fewer rows has no landmarks of its own, since its mean would tell of its rows.
    """

    key: ClassVar[str] = "kernelafl"
    additive: ClassVar[frozenset[str]] = frozenset({*afl.AFL.additive, "class_rows", "kernel_gram"})

    landmarks: int | None = parameter(
        None, "M, the number of landmarks.", least=1, none="a quarter of the rows, rounded up to a power of 2"
    )
    steps: int = parameter(12, "Steps of conjugate gradients.", least=1)
    ridge: float = parameter(0.01, "Penalty on the weights.", above=0)
    bandwidth: float = parameter(1.0, "h as a multiple of twice the trace of the covariance.", above=0)
    scale: Literal["standard"] | None = parameter(None, "Standardise features; no exchange more.")
    solver: Literal["auto", "direct", "steps"] = parameter(
        "auto", f"One Gram matrix of kernels, or steps; auto: direct up to {DIRECT_LANDMARKS} landmarks."
    )
    least_rows: int = parameter(10, "Rows a class needs for landmarks of its own.", least=1)
    precision: Literal["float64", "float32"] = parameter("float64", "In which clients keep kernels.")
    seed: int = parameter(0, "Seed of the landmarks.", least=0)

    @classmethod
    def trial(cls) -> Self:
        return cls(landmarks=20, solver="steps", steps=4, ridge=0.1)

    def start(self, spec: Spec) -> KernelRun:
        if self.landmarks is not None:
            check_memory(self.landmarks, spec.features, spec.outputs, available_memory())
        return KernelRun(self, spec)

    def agreement(self) -> dict[str, Any]:
        return landmark_agreement(self.seed)

    def largest_side(self, spec: Spec) -> int:
        direct = self.landmarks is not None and self.solver != "steps"
        return max(spec.features, min(self.landmarks or 0, DIRECT_LANDMARKS) if direct else 0)

    def count(self, rows: int) -> int:
        """How many landmarks there are for so many rows: a function of the rows alone."""
        if self.landmarks is not None:
            return self.landmarks
        power = 1 << max(0, (max(rows, 1) + 3) // 4 - 1).bit_length()
        return min(max(power, FEWEST), MOST)

    def scaled(self, share: float) -> KernelAFL:
        """This machine for a share of the rows: as many rows for each landmark, and the same penalty.

        Of a kernel the best penalty, beside a sum over rows, does not grow with their number.
        """
        if self.landmarks is None:
            return self
        return replace(self, landmarks=min(self.landmarks, max(FEWEST, int(self.landmarks * share))))

    def direct(self, landmarks: int) -> bool:
        """Whether so many landmarks are solved at once."""
        return self.solver == "direct" or (self.solver == "auto" and landmarks <= DIRECT_LANDMARKS)


class KernelRun(Run[KernelModel]):
    """Moments, then either one solve or conjugate gradients, a column per output, all at once.

    coordinates: v of the system in `rbf`; residual and search are the other two vectors of the iteration.
    """

    method: KernelAFL
    transient: ClassVar[frozenset[str]] = frozenset({"_factors"})

    def __init__(self, method: KernelAFL, spec: Spec) -> None:
        super().__init__(method, spec)
        self.rows = 0.0
        self.taken = 0
        self.coordinates: Array | None = None
        self.residual = self.search = np.zeros((0, 0))
        self.start_size = np.zeros(0)
        self.weights: Array | None = None
        self._factors: LandmarkFactors | None = None

    @property
    def exchanges(self) -> int:
        known = self.method.landmarks
        if len(self.chain) > 1:
            known = self._landmarks.count
        return 2 if known is not None and self.method.direct(known) else 2 + self.method.steps

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self.weights is not None:
            return None
        if len(self.chain) == 1 or not any("landmarks" in block.note for block in self.chain.blocks):
            classes = self.spec.classes is not None
            return self.ask(afl.KIND, 0, clients, {"intercept": True, "class_rows": classes})
        if self.coordinates is None:
            ask = ["cross", "gram"] if self.method.direct(self._landmarks.count) else ["cross"]
            return self.ask(KIND, 0, clients, {"ask": ask})
        arrays = {"weights": self.factors.weights(self.search)}
        return self.ask(KIND, self.taken + 1, clients, {"ask": ["product"]}, arrays)

    def absorb(self, total: Total) -> None:
        if not any("landmarks" in block.note for block in self.chain.blocks):
            self._draw(total)
            self.record(total, "moments")
        elif self.coordinates is None and self.method.direct(self._landmarks.count):
            self.weights = solve_direct(
                self.factors, total["kernel_gram"], total["kernel_cross"], self.method.ridge
            )
            self.record(total, "kernels", solved=("weights",))
        elif self.coordinates is None:
            self.residual = self.factors.outer(self.factors.to_features(total["kernel_cross"]))
            self.search = self.residual.copy()
            self.coordinates = np.zeros_like(self.residual)
            self.start_size = np.sum(self.residual**2, axis=0)
            self.record(total, "kernels")
        else:
            self._step(total)

    def _draw(self, total: Total) -> None:
        """Means, scales and landmarks, from AFL's sums."""
        drawn, bandwidth, preparation = drawn_from(total, self.method, self.spec)
        self.rows = float(total["weight"][0])
        self.add(preparation.block())
        self.add(drawn.block({"bandwidth": bandwidth}))

    def _step(self, total: Total) -> None:
        """One step of conjugate gradients for every column."""
        assert self.coordinates is not None
        factors, search = self.factors, self.search
        inside = factors.to_features(total["kernel_product"]) + self.method.ridge * factors.inner(search)
        image = factors.outer(inside)
        before = np.sum(self.residual**2, axis=0)
        reach = _ratio(before, np.sum(search * image, axis=0))
        self.coordinates = self.coordinates + reach * search
        self.residual = self.residual - reach * image
        after = np.sum(self.residual**2, axis=0)
        self.search = self.residual + _ratio(after, before) * search
        self.taken += 1
        left = float(np.sqrt(np.max(_ratio(after, self.start_size))))
        self.record(total, "step", metrics={"residual": left})
        if self.taken == self.method.steps:
            self.weights = factors.weights(self.coordinates)
            self._factors = None

    @property
    def _landmarks(self) -> Landmarks:
        return Landmarks.from_block(self.chain.blocks[landmark_block(self.chain)])

    @property
    def _bandwidth(self) -> float:
        return float(self.chain.blocks[landmark_block(self.chain)].note["landmarks"]["bandwidth"])

    @property
    def factors(self) -> LandmarkFactors:
        """The preconditioner, made when it is first needed and again after a resume."""
        if self._factors is None:
            points = self._landmarks.points()
            self._factors = LandmarkFactors(points, self._bandwidth, self.method.ridge, self.rows)
        return self._factors

    def model(self) -> KernelModel:
        """The model; before the last step, that of the steps so far."""
        weights = self.weights
        if weights is None:
            assert self.coordinates is not None
            weights = self.factors.weights(self.coordinates)
        blocks = [block for block in self.chain.blocks if "preparation" in block.note]
        model = KernelModel(
            self._landmarks,
            self._bandwidth,
            weights,
            self.spec.classes,
            Preparation.from_arrays(blocks[0].arrays),
            self.method.parameters(),
        )
        model.history = tuple(self.history)
        return model


class Drawing(Protocol):
    """What a method says of its landmarks."""

    @property
    def bandwidth(self) -> float: ...
    @property
    def scale(self) -> Literal["standard"] | None: ...
    @property
    def least_rows(self) -> int: ...
    @property
    def seed(self) -> int: ...

    def count(self, rows: int) -> int: ...


def drawn_from(total: Total, method: Drawing, spec: Spec) -> tuple[Landmarks, float, Preparation]:
    """Landmarks, bandwidth h, and how rows are prepared, from AFL's sums; what does not fit is refused."""
    check_rows(total.count("rows"))
    if total["weight"][0] <= 0:
        raise DataError("all sample weights are zero; at least one row must count.")
    if spec.classes is not None:
        check_classes(int(np.sum(total["label_square"] > 0)))
    count = method.count(total.count("rows"))
    check_memory(count, spec.features, spec.outputs, available_memory())
    preparation, means, within, spread = gaussians(
        total, method.scale, method.least_rows, spec.classes is not None
    )
    drawn = Landmarks.drawn(means, within, count, method.seed)
    return drawn, method.bandwidth * 2.0 * spread, preparation


def gaussians(
    total: Total, scale: str | None, least_rows: int, classes: bool
) -> tuple[Preparation, Array, Array, float]:
    """From AFL's sums: how rows are prepared, means (Gaussians, d), covariance within, trace of all of it.

    Classes of fewer rows than `least_rows` have no mean here. Where no class has enough, and for regression,
    one Gaussian stands for all rows.
    """
    rows, counts = float(total["weight"][0]), total["label_square"]
    mean = total["feature"] / rows
    gram = total["gram"] - rows * np.outer(mean, mean)
    deviation = np.ones_like(mean)
    if scale == "standard":
        variance = np.clip(np.diag(gram) / rows, 0.0, None)
        # Columns whose variance is lost in rounding count as constant and are only centred.
        lost = variance <= 1e-12 * np.diag(total["gram"]) / rows
        deviation = np.where(lost, 1.0, np.sqrt(variance))
    gram /= np.outer(deviation, deviation)
    preparation = Preparation(mean, deviation, total["target"] / rows)
    means, within = np.zeros((1, len(mean))), gram / rows
    if classes:
        seen = counts > 0
        cross = (total["cross"][:, seen] - np.outer(mean, counts[seen])) / deviation[:, None]
        centres = (cross / counts[seen]).T
        enough = total["class_rows"][seen] >= least_rows
        if np.any(enough):
            means = np.ascontiguousarray(centres[enough])
            within = (gram - cross @ centres) / rows
    return preparation, means, (within + within.T) / 2, float(np.trace(gram)) / rows


def solve_direct(factors: LandmarkFactors, gram: Array, cross: Array, ridge: float) -> Array:
    """a minimising |Y - K a|² + ridge aᵀ TᵀT a, from gram = KᵀK and cross = KᵀY, in coordinates b = T a.

    T^-T gram T^-1 loses digits where K_MM is nearly singular; the residual of a itself brings them back.
    """
    half = factors.to_features(gram)
    system = factors.to_features(np.ascontiguousarray(half.T))
    system = (system + system.T) / 2
    system.flat[:: len(system) + 1] += ridge
    try:
        factor = cholesky_factor(system)
    except LinAlgError:
        raise DataError(f"the ridge of {ridge:g} is lost in rounding beside the kernels; raise it.") from None
    solution = cho_solve(factor, factors.to_features(cross))
    for _ in range(_REFINEMENTS):
        left = factors.to_features(cross - gram @ factors.from_features(solution)) - ridge * solution
        solution += cho_solve(factor, left)
    return factors.from_features(solution)


def _ratio(above: Array, below: Array) -> Array:
    """above / below, and 0 for columns that are solved."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)
