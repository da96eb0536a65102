"""KernelAFL: a Gaussian kernel machine by landmarks that are nobody's rows, from sums.

FALKON (Rudi, Carratino and Rosasco, NeurIPS 2017) with landmarks from the Gaussians of the classes:

    minimise  sum_i w_i |y_i - k(x_i, Z) a|² + ridge aᵀ K_MM a         k(x, z) = exp(-|x - z|² / h)

Exchange 1 brings AFL's sums: the class means and the covariance within classes, from which everybody draws
the same landmarks Z (`landmarks`), and the bandwidth h = bandwidth * 2 tr Cov. Few landmarks: exchange 2
brings ΦᵀΦ and ΦᵀY of Φ = K T^-1, TᵀT = K_MM, and the system is solved. Many: exchange 2 brings KᵀY, and each
further one a product Kᵀ(K u), M x C down and up, for a step of conjugate gradients, preconditioned by the
landmarks alone (`rbf`). Few steps regularise: they are a setting like the ridge.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from fedsolve.arrays import Array
from fedsolve.backends import NUMPY, host, kernels_of, kernels_on
from fedsolve.closedform import afl
from fedsolve.closedform.landmarks import (
    KernelModel,
    Landmarks,
    landmark_agreement,
    landmarks_in,
    shared_kernel,
)
from fedsolve.closedform.projections import check_agreement
from fedsolve.closedform.rbf import (
    LandmarkFactors,
    LandmarkKernel,
    available_memory,
    check_memory,
    factor_bytes,
)
from fedsolve.closedform.solvers import gcv_ridge, ridge_solve, score_moments
from fedsolve.closedform.sums import (
    Accumulator,
    Rows,
    cached_rows,
    check_sums,
    preparation_block,
    preparation_in,
)
from fedsolve.errors import DataError, TermError
from fedsolve.federation.method import SCORES, Method, Request, Run, Spec, Term, Total
from fedsolve.federation.participant import ClientData, Memory, Workspace, step
from fedsolve.parameters import parameter
from fedsolve.registry import register
from fedsolve.tables.preparation import Preparation

if TYPE_CHECKING:
    from fedsolve.closedform.kernel_softmax import KernelSoftmax

DIRECT_LANDMARKS = 1024
"""Up to so many landmarks, clients send one Gram matrix (4.2 MB) and the system is solved at once."""

LEAST_TRIAL, MOST_TRIAL = 16, 128
"""Candidates that are compared on all rows have half of their landmarks, within these bounds."""

_ROUNDED = 1e-7  # K_MM has 1e-8 of its trace added: digits below that are lost

FEWEST, MOST = 256, 32768
"""The default number of landmarks: a power of two, at least a quarter of the rows, within these bounds."""


@register(
    paper="Rudi et al., FALKON, NeurIPS 2017",
    exchanges="2 (up to 1,024 landmarks) or 2 + steps",
    up="Gram and cross matrix once (as afl), then kernel sums: M x C, or an M x M triangle",
    down="class means and a d x d triangle once; then M x C",
)
@dataclass(frozen=True)
class KernelAFL(Method[KernelModel]):
    """KernelAFL: a Gaussian kernel machine by landmarks that are nobody's rows.

    least_rows: a class with fewer rows has no landmarks of its own: its mean would reveal its rows.
    """

    multilabel: ClassVar[bool] = True

    landmarks: int | None = parameter(
        None, "M, the number of landmarks.", least=1, none="a quarter of the rows, rounded up to a power of 2"
    )
    steps: int = parameter(12, "Steps of conjugate gradients.", least=1)
    ridge: float | Literal["auto"] = parameter(
        0.01, "Penalty on the weights; auto: the best by cross-validation, of a direct solve.", above=0
    )
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

    def traffic(self, spec: Spec, rows: int) -> tuple[int, int]:
        count, outputs, width = self.count(rows), spec.outputs, spec.features
        drawn = width * (width + 1) // 2 + width * outputs
        if self.direct(count):
            return count * (count + 1) // 2 + count * outputs, drawn
        return (self.steps + 1) * count * outputs, drawn + self.steps * count * outputs

    def scaled(self, share: float) -> KernelAFL:
        """This machine for a share of the rows, with the same penalty.

        Of a kernel the best penalty, beside a sum over rows, does not grow with their number.
        """
        return replace(self, landmarks=trial_landmarks(self.landmarks, share))

    def direct(self, landmarks: int) -> bool:
        """Whether so many landmarks are solved at once."""
        return self.solver == "direct" or (self.solver == "auto" and landmarks <= DIRECT_LANDMARKS)


def trial_landmarks(landmarks: int | None, share: float) -> int | None:
    """How many a machine has that is tried on a share of the rows: as many rows for each landmark.

    On all rows few tell bandwidths apart.
    """
    if landmarks is None:
        return None
    if share == 1.0:
        return min(landmarks, max(LEAST_TRIAL, min(MOST_TRIAL, landmarks // 2)))
    return min(landmarks, max(FEWEST, int(landmarks * share)))


class KernelRun(Run[KernelModel]):
    """Moments, then either one solve or conjugate gradients, a column per output, all at once.

    coordinates: v of the system in `rbf`; residual and search are the other two vectors of the iteration.
    """

    method: KernelAFL
    transient: ClassVar[frozenset[str]] = frozenset({"kernels", "_factors", "_found", "_inner"})

    def __init__(self, method: KernelAFL, spec: Spec) -> None:
        super().__init__(method, spec)
        self.kernels = kernels_on(spec.device)
        self.rows = self.square = 0.0
        self.ridge = method.ridge
        self.taken = 0
        self.coordinates: Array | None = None
        self.residual = self.search = np.zeros((0, 0))
        self.start_size = np.zeros(0)
        self.weights: Array | None = None
        self._factors: LandmarkFactors | None = None
        self._found: tuple[str, Landmarks] | None = None
        self._inner: Array | None = None

    @property
    def landmarks(self) -> Landmarks | None:
        """None before the first answer, which they follow from."""
        self._found = self._found or landmarks_in(self.chain)
        return None if self._found is None else self._found[1]

    @property
    def exchanges(self) -> int:
        known = self.method.landmarks if (drawn := self.landmarks) is None else drawn.count
        return 2 if known is not None and self.method.direct(known) else 2 + self.method.steps

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self.weights is not None:
            return None
        if (landmarks := self.landmarks) is None:
            classes = self.spec.classes is not None
            return self.ask(afl.KIND, 0, clients, {"intercept": True, "class_rows": classes})
        if self.coordinates is None:
            ask = "features" if self.method.direct(landmarks.count) else "cross"
            return self.ask(KIND, 0, clients, {"ask": [ask]})
        arrays = {"weights": host(self.factors.from_features(self.inner))}
        return self.ask(KIND, self.taken + 1, clients, {"ask": ["product"]}, arrays)

    def absorb(self, total: Total) -> None:
        if (landmarks := self.landmarks) is None:
            landmarks, preparation = drawn_from(total, self.method, self.spec)
            target, self.rows = total["target"], float(total["weight"][0])
            self.square = float(total["label_square"].sum()) - float(target @ target) / self.rows
            if self.ridge == "auto" and not self.method.direct(landmarks.count):
                raise DataError(f"ridge='auto' is for up to {DIRECT_LANDMARKS} landmarks; give one for more.")
            self.add(preparation_block(preparation))
            self.add(landmarks.block())
            self.record(total, "moments")
        elif self.coordinates is not None:
            self._step(total)
        elif self.method.direct(landmarks.count):
            self._solve(total)
        else:
            residual = self.factors.outer(self.factors.to_features(total.on(self.kernels, "kernel_cross")))
            self.residual = self.search = host(residual)
            self.coordinates = 0.0 * self.residual
            self.start_size = host((residual**2).sum(axis=0))
            self.record(total, "kernels")

    def _solve(self, total: Total) -> None:
        """The weights from ΦᵀΦ and ΦᵀY."""
        gram, cross = (total.on(self.kernels, f"feature_{name}") for name in ("gram", "cross"))
        if self.ridge == "auto":
            self.ridge = gcv_ridge(gram, cross, self.square, self.rows, 1, _ROUNDED)[0]
        solution = ridge_solve(gram, cross, self.ridge)
        self.weights = host(self.factors.from_features(solution))
        self._factors = None
        # Targets are counted from their means, so what is added to these is zero on average.
        moments = np.zeros(len(gram)), host(gram) / self.rows
        preparation = preparation_in(self.chain)
        assert preparation is not None
        scores = score_moments(*moments, host(solution), preparation.target_mean)
        self.record(total, "kernels", solved=("weights",), metrics={SCORES: scores})

    def _step(self, total: Total) -> None:
        """One step of conjugate gradients for every column."""
        factors, here = self.factors, self.kernels
        assert self.ridge != "auto"
        coordinates, residual, search = map(here.array, (self.coordinates, self.residual, self.search))
        product = factors.to_features(total.on(here, "kernel_product"))
        image = factors.outer(product + self.ridge * self.inner)
        before = (residual**2).sum(axis=0)
        reach = _ratio(before, (search * image).sum(axis=0))
        coordinates = coordinates + reach * search
        residual = residual - reach * image
        after = (residual**2).sum(axis=0)
        search = residual + _ratio(after, before) * search
        self.coordinates, self.residual, self.search = map(host, (coordinates, residual, search))
        self._inner = None
        self.taken += 1
        left = float(np.sqrt(np.max(_ratio(host(after), self.start_size))))
        self.record(total, "step", metrics={"residual": left})
        if self.taken == self.method.steps:
            self.weights = host(factors.weights(coordinates))
            self._factors = None

    @property
    def factors(self) -> LandmarkFactors:
        """The preconditioner, made when it is first needed and again after a resume."""
        if self._factors is None:
            assert self.landmarks is not None
            assert self._found is not None
            assert self.ridge != "auto"
            kernel = shared_kernel(*self._found, self.kernels)  # that of clients in this process, if any
            self._factors = LandmarkFactors(kernel, self.ridge, self.rows)
        return self._factors

    @property
    def inner(self) -> Array:
        """A^-1 search, which the question and what is made of its answer need."""
        if self._inner is None:
            self._inner = self.factors.inner(self.kernels.array(self.search))
        return self._inner

    def model(self) -> KernelModel:
        """The model; before the last step, that of the steps so far."""
        weights, landmarks, preparation = self.weights, self.landmarks, preparation_in(self.chain)
        if weights is None:
            weights = host(self.factors.weights(self.kernels.array(self.coordinates)))
        assert landmarks is not None
        assert preparation is not None
        told = replace(self.method, ridge=self.ridge).parameters()
        return KernelModel(landmarks, weights, self.spec.classes, preparation, told)


def drawn_from(total: Total, method: KernelAFL | KernelSoftmax, spec: Spec) -> tuple[Landmarks, Preparation]:
    """Landmarks, and how rows are prepared, from AFL's sums; what does not fit is refused.

    Classes of fewer rows than `least_rows` have no mean here. Where no class has enough, and for regression,
    one Gaussian stands for all rows.
    """
    check_sums(total, spec)
    rows, counts = float(total["weight"][0]), total["label_square"]
    landmarks = method.count(total.count("rows"))
    check_memory(landmarks, spec.features, spec.outputs, available_memory())
    mean = total["feature"] / rows
    gram = total["gram"] - rows * np.outer(mean, mean)
    deviation = np.ones_like(mean)
    if method.scale == "standard":
        variance = np.clip(np.diag(gram) / rows, 0.0, None)
        # Columns whose variance is lost in rounding count as constant and are only centred.
        lost = variance <= 1e-12 * np.diag(total["gram"]) / rows
        deviation = np.where(lost, 1.0, np.sqrt(variance))
    gram /= np.outer(deviation, deviation)
    means, within = np.zeros((1, len(mean))), gram / rows
    if spec.classes is not None:
        seen = counts > 0
        cross = (total["cross"][:, seen] - np.outer(mean, counts[seen])) / deviation[:, None]
        centres = (cross / counts[seen]).T
        enough = total["class_rows"][seen] >= method.least_rows
        if np.any(enough):
            means = np.ascontiguousarray(centres[enough])
            within = (gram - cross @ centres) / rows
    bandwidth = method.bandwidth * 2.0 * float(np.trace(gram)) / rows
    drawn = Landmarks.drawn(means, (within + within.T) / 2, landmarks, method.seed, bandwidth)
    return drawn, Preparation(mean, deviation, total["target"] / rows)


def _ratio(above: Array, below: Array) -> Array:
    """above / below, and 0 for columns that are solved."""
    here = kernels_of(above)
    return here.where(below > 0, above / here.where(below > 0, below, 1.0), 0.0)


KIND = "kernel"


@step(KIND, over_rows=True)
def answer_kernels(data: ClientData, request: Request, memory: Memory) -> Term:
    """KᵀY ("cross") or Kᵀ(K u) ("product"), rows counted by their weight; or ΦᵀΦ and ΦᵀY ("features").

    Φ = K T^-1 is made here: T^-T (KᵀK) T^-1 would lose the digits that K_MM, nearly singular, has none of.
    """
    here = memory.kernels
    rows = cached_rows(data, memory, np.float64, here)
    found, ask, opening = landmarks_in(memory.chain), set(request.note["ask"]), memory.chain.opening
    assert found is not None
    cached = memory.cache.get(KIND)
    if cached is None or cached[0] != found[0] or cached[1].rows is not rows:
        check_agreement(landmark_agreement(opening["parameters"]["seed"]), opening, "landmarks")
        kernel = shared_kernel(*found, here)
        precision, budget = np.dtype(opening["parameters"]["precision"]), here.budget(memory.budget)
        aside = factor_bytes(len(kernel.points), opening["features"], opening["outputs"])
        made = KernelBlocks(rows, kernel, precision, budget, aside)
        cached = memory.cache[KIND] = (found[0], made)
    near: KernelBlocks = cached[1]
    if ask - {"cross", "product", "features"}:
        raise TermError(f"unknown sums {sorted(ask)}. Install the server's fedsolve version.")
    sums = Accumulator(memory.workspace, np.float64, here)
    weights = here.array(request.arrays["weights"]) if "product" in ask else None
    for span in rows.spans(len(near.kernel.points)):
        block = rows.weighted(span, near.block(span, memory.workspace))
        if "cross" in ask:
            sums.add_product("kernel_cross", block, rows.weighted(span, rows.targets(span)))
        if weights is not None:
            sums.add_product("kernel_product", block, block @ weights)
        if "features" in ask:
            features = near.kernel.features(block)
            sums.add_product("feature_cross", features, rows.weighted(span, rows.targets(span)))
            sums.add_product("feature_gram", features)
    return sums.finish(rows=len(rows))


@dataclass
class KernelBlocks:
    """K of a client's rows, span by span, where the rows' kernels compute; kept while the budget lasts."""

    rows: Rows
    kernel: LandmarkKernel
    precision: np.dtype[Any]
    budget: int
    aside: int
    kept: dict[int, Array] = field(default_factory=dict)

    def block(self, span: slice, workspace: Workspace) -> Array:
        """K (span, landmarks) in float64; of precision float32, its values as float32 has them."""
        here, kept = self.rows.kernels, self.kept.get(span.start)
        if kept is not None:
            return here.array(kept, np.float64)
        shape = span.stop - span.start, len(self.kernel.points)
        size = shape[0] * shape[1] * self.precision.itemsize
        # On a device others keep theirs too, and the server its factors: what is free there now, less the
        # block itself, decides.
        aside = self.aside + 8 * shape[0] * shape[1]
        keeps = size <= min(self.budget, here.budget(self.budget, aside))
        rounds = self.precision == np.float32
        passing = here is NUMPY and (rounds or not keeps)
        room = workspace.array("kernel", shape) if passing else here.empty(shape)
        made = self.kernel.of(self.rows.features(span), room)
        stored = here.array(made, self.precision)
        if rounds:
            made[...] = stored
        if keeps:
            self.budget -= size
            self.kept[span.start] = stored
        return made
