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

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from fedsolve.arrays import Array, check_weight
from fedsolve.backends import NUMPY, Kernels, host, kernels_of, kernels_on
from fedsolve.closedform import afl
from fedsolve.closedform.kernel_model import KernelModel
from fedsolve.closedform.landmarks import (
    Landmarks,
    check_landmarks,
    landmark_agreement,
    landmark_block,
    shared_side,
)
from fedsolve.closedform.rbf import (
    LandmarkFactors,
    available_memory,
    check_memory,
    kernel,
    kernel_root,
    row_side,
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
"""Up to so many landmarks their Gram matrix, 4.2 MB, is asked for at once."""

LEAST_TRIAL, MOST_TRIAL = 16, 128
"""Landmarks by which candidates are compared on all rows: half of their own, within these bounds."""

_ROUNDED = 1e-7  # K_MM has 1e-8 of its trace added: digits below that are lost

FEWEST, MOST = 256, 32768
"""Landmarks where none are asked for: a power of two, at least a quarter of the rows, within these bounds."""


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

    def sizes(self, spec: Spec, rows: int) -> tuple[int, int]:
        count, outputs, width = self.count(rows), spec.outputs, spec.features
        drawn = width * (width + 1) // 2 + width * outputs
        if self.direct(count):
            return count * (count + 1) // 2 + count * outputs, drawn
        return (self.steps + 1) * count * outputs, drawn + self.steps * count * outputs

    def scaled(self, share: float) -> KernelAFL:
        """This machine for a share of the rows: as many rows for each landmark, and the same penalty.

        Of a kernel the best penalty, beside a sum over rows, does not grow with their number. Bandwidths are
        told apart by few landmarks.
        """
        if self.landmarks is None:
            return self
        if share == 1.0:
            return replace(self, landmarks=trial_landmarks(self.landmarks))
        return replace(self, landmarks=min(self.landmarks, max(FEWEST, int(self.landmarks * share))))

    def direct(self, landmarks: int) -> bool:
        """Whether so many landmarks are solved at once."""
        return self.solver == "direct" or (self.solver == "auto" and landmarks <= DIRECT_LANDMARKS)


def trial_landmarks(landmarks: int) -> int:
    """How many tell bandwidths apart, of a machine that will have so many."""
    return min(landmarks, max(LEAST_TRIAL, min(MOST_TRIAL, landmarks // 2)))


class KernelRun(Run[KernelModel]):
    """Moments, then either one solve or conjugate gradients, a column per output, all at once.

    coordinates: v of the system in `rbf`; residual and search are the other two vectors of the iteration.
    """

    method: KernelAFL
    transient: ClassVar[frozenset[str]] = frozenset({"_factors"})

    def __init__(self, method: KernelAFL, spec: Spec) -> None:
        super().__init__(method, spec)
        self.rows = self.square = 0.0
        self.ridge = method.ridge
        self.taken = 0
        self.coordinates: Array | None = None
        self.residual = self.search = np.zeros((0, 0))
        self.start_size = np.zeros(0)
        self.weights: Array | None = None
        self._factors: LandmarkFactors | None = None

    @property
    def _drawn(self) -> bool:
        """Whether landmarks are known; a schema's preparation is a block before them."""
        return any("landmarks" in block.note for block in self.chain.blocks)

    @property
    def exchanges(self) -> int:
        known = self.method.landmarks
        if self._drawn:
            known = self._landmarks.count
        return 2 if known is not None and self.method.direct(known) else 2 + self.method.steps

    def request(self, clients: tuple[str, ...]) -> Request | None:
        if self.weights is not None:
            return None
        if not self._drawn:
            classes = self.spec.classes is not None
            return self.ask(afl.KIND, 0, clients, {"intercept": True, "class_rows": classes})
        if self.coordinates is None:
            ask = "features" if self.method.direct(self._landmarks.count) else "cross"
            return self.ask(KIND, 0, clients, {"ask": [ask]})
        arrays = {"weights": host(self.factors.weights(self.kernels.array(self.search)))}
        return self.ask(KIND, self.taken + 1, clients, {"ask": ["product"]}, arrays)

    def absorb(self, total: Total) -> None:
        if not any("landmarks" in block.note for block in self.chain.blocks):
            self._draw(total)
            self.record(total, "moments")
        elif self.coordinates is None and self.method.direct(self._landmarks.count):
            here = self.kernels
            gram, cross = (total.on(here, f"feature_{name}") for name in ("gram", "cross"))
            if self.ridge == "auto":
                self.ridge = gcv_ridge(gram, cross, self.square, self.rows, 1, _ROUNDED)[0]
            solution = ridge_solve(gram, cross, self.ridge)
            factors = LandmarkFactors(self._landmarks.points(here), self._bandwidth, 0.0, self.rows)
            self.weights = host(factors.from_features(solution))
            preparation = preparation_in(self.chain)
            assert preparation is not None
            # Targets are counted from their means, so what is added to these is zero on average.
            moments = np.zeros(len(gram)), host(gram) / self.rows
            scores = score_moments(*moments, host(solution), preparation.target_mean)
            self.record(total, "kernels", solved=("weights",), metrics={SCORES: scores})
        elif self.coordinates is None:
            cross = total.on(self.kernels, "kernel_cross")
            self.residual = self.factors.outer(self.factors.to_features(cross))
            self.search = self.kernels.copy(self.residual)
            self.coordinates = 0.0 * self.residual
            self.start_size = host((self.residual**2).sum(axis=0))
            self.record(total, "kernels")
        else:
            self._step(total)

    def _draw(self, total: Total) -> None:
        """Means, scales and landmarks, from AFL's sums."""
        drawn, bandwidth, preparation = drawn_from(total, self.method, self.spec)
        self.rows = float(total["weight"][0])
        self.square = (
            float(total["label_square"].sum()) - float(total["target"] @ total["target"]) / self.rows
        )
        if self.ridge == "auto" and not self.method.direct(drawn.count):
            raise DataError(f"ridge='auto' is for up to {DIRECT_LANDMARKS} landmarks; give one for more.")
        self.add(preparation_block(preparation))
        self.add(drawn.block({"bandwidth": bandwidth}))

    def _step(self, total: Total) -> None:
        """One step of conjugate gradients for every column."""
        factors, here = self.factors, self.kernels
        coordinates, residual, search = map(here.array, (self.coordinates, self.residual, self.search))
        product = factors.to_features(total.on(here, "kernel_product"))
        image = factors.outer(product + self.ridge * factors.inner(search))
        before = (residual**2).sum(axis=0)
        reach = _ratio(before, (search * image).sum(axis=0))
        self.coordinates = coordinates + reach * search
        self.residual = residual - reach * image
        after = (self.residual**2).sum(axis=0)
        self.search = self.residual + _ratio(after, before) * search
        self.taken += 1
        left = float(np.sqrt(np.max(_ratio(host(after), self.start_size))))
        self.record(total, "step", metrics={"residual": left})
        if self.taken == self.method.steps:
            self.weights = host(factors.weights(self.coordinates))
            self._factors = None

    def stored(self) -> dict[str, Any]:
        for name in ("coordinates", "residual", "search"):
            array = getattr(self, name)
            setattr(self, name, None if array is None else host(array))
        return super().stored()

    @property
    def kernels(self) -> Kernels:
        """Where the server solves."""
        return kernels_on(self.spec.device)

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
            points = self._landmarks.points(self.kernels)
            assert self.ridge != "auto", "of a direct solve, which needs no preconditioner"
            self._factors = LandmarkFactors(points, self._bandwidth, self.ridge, self.rows)
        return self._factors

    def model(self) -> KernelModel:
        """The model; before the last step, that of the steps so far."""
        weights = self.weights
        if weights is None:
            assert self.coordinates is not None
            weights = host(self.factors.weights(self.kernels.array(self.coordinates)))
        preparation, told = preparation_in(self.chain), replace(self.method, ridge=self.ridge).parameters()
        assert preparation is not None
        classes = self.spec.classes
        return KernelModel(self._landmarks, self._bandwidth, weights, classes, preparation, told)


def drawn_from(
    total: Total, method: KernelAFL | KernelSoftmax, spec: Spec
) -> tuple[Landmarks, float, Preparation]:
    """Landmarks, bandwidth h, and how rows are prepared, from AFL's sums; what does not fit is refused."""
    check_sums(total, spec)
    check_weight(float(total["weight"][0]))
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
    near, ask = _near(rows, memory), set(request.note["ask"])
    if ask - {"cross", "product", "features"}:
        raise TermError(f"unknown sums {sorted(ask)}. Install the server's fedsolve version.")
    sums = Accumulator(memory.workspace, np.float64, here)
    weights = here.array(request.arrays["weights"]) if "product" in ask else None
    for span in rows.spans(near.count):
        block = rows.weighted(span, near.block(span, memory.workspace))
        if "cross" in ask:
            sums.add_product("kernel_cross", block, rows.weighted(span, rows.targets(span)))
        if weights is not None:
            sums.add_product("kernel_product", block, block @ weights)
        if "features" in ask:
            features = here.contiguous(here.triangle_solve(near.root, here.contiguous(block.T)).T)
            sums.add_product("feature_cross", features, rows.weighted(span, rows.targets(span)))
            sums.add_gram("feature_gram", features)
    return sums.finish(rows=len(rows))


class KernelBlocks:
    """K of a client's rows, span by span, where the rows' kernels compute."""

    def __init__(self, rows: Rows, landmarks: Array, bandwidth: float, precision: str, budget: int) -> None:
        self.rows = rows
        self.count = len(landmarks)
        self._kernels = rows.kernels
        self._landmarks = self._kernels.array(landmarks)
        self._bandwidth = bandwidth
        self._precision = np.dtype(precision)
        self._budget = self._kernels.budget(budget)
        self._kept: dict[int, Array] = {}

    @cached_property
    def root(self) -> Array:
        """Tᵀ of the landmarks."""
        return kernel_root(self._landmarks[:, :-2], self._bandwidth)

    def block(self, span: slice, workspace: Workspace) -> Array:
        """K (span, landmarks) in float64; of precision float32, its values as float32 has them."""
        here, kept = self._kernels, self._kept.get(span.start)
        if kept is not None:
            return here.array(kept, np.float64)
        shape = span.stop - span.start, self.count
        made = workspace.array("kernel", shape) if here is NUMPY else here.empty(shape)
        kernel(row_side(self.rows.features(span), self._bandwidth), self._landmarks, made)
        if self._precision == np.float32:
            made[...] = here.array(made, np.float32)
        size = shape[0] * shape[1] * self._precision.itemsize
        # On a device others keep theirs too: what is free there now decides.
        if size <= min(self._budget, here.budget(self._budget)):
            self._budget -= size
            self._kept[span.start] = here.copy(here.array(made, self._precision))
        return made


def _near(rows: Rows, memory: Memory) -> KernelBlocks:
    """This client's kernels for the landmarks of the model so far."""
    chain = memory.chain
    place = landmark_block(chain)
    cached = memory.cache.get(KIND)
    if cached is None or cached[0] != chain.digests[place + 1] or cached[1].rows is not rows:
        opening = chain.opening
        check_landmarks(opening)
        note = chain.blocks[place].note["landmarks"]
        side = shared_side(chain, rows.kernels)
        made = KernelBlocks(rows, side, note["bandwidth"], opening["parameters"]["precision"], memory.budget)
        cached = memory.cache[KIND] = (chain.digests[place + 1], made)
    near: KernelBlocks = cached[1]
    return near
