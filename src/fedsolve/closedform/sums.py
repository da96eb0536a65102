"""Sums over a client's rows, chunk by chunk, into buffers that are used again; and those of their moments.

Federated standardisation and centring takes one exchange of n, sum x, sum x² and sum y. The means and scales
become a block of the model; clients apply them to every row from then on.

A method of one exchange is such sums and what is solved from their total. The shortest way to one's own:

    @dataclass(frozen=True)
    class NearestMean(OneExchange):
        def answer(self, rows): ...        # at each client: a Term of sums over `rows.blocks()`
        def solve(self, total, spec): ...  # at the server: a Model

Rows are counted for the method, in all (`total.count("rows")`) and by class (`total["class_rows"]`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array, check_rows
from fedsolve.backends import NUMPY, Kernels
from fedsolve.errors import DataError
from fedsolve.federation.method import (
    Block,
    Chain,
    Method,
    Request,
    Run,
    Spec,
    Term,
    Total,
)
from fedsolve.federation.participant import ClientData, Memory, Workspace, step
from fedsolve.labels import encode_labels, label_matrix, labels_from_note, regression_targets
from fedsolve.model import Model, model_from_contents
from fedsolve.tables.preparation import Preparation, mean_and_deviation

M = TypeVar("M", bound=Model)


def chunks(rows: int, width: int, kernels: Kernels = NUMPY) -> Iterator[slice]:
    """Spans of rows whose float64 features take about 16 MB, on a GPU 1 GB.

    The length depends on the width and the kind of device alone, so that sums have the same bits whatever
    the memory budget, the precision of the machine's clock or the number of workers.
    """
    length = kernels.chunk_rows(width)
    for start in range(0, rows, length):
        yield slice(start, min(start + length, rows))


def check_opening(data: ClientData, chain: Chain) -> None:
    """Refuse a run whose features have another width than this participant's."""
    data.check_width(chain.opening["features"], "the run")


def blocks_with(chain: Chain, name: str) -> list[Block]:
    """The blocks of the model so far whose notes have this name."""
    return [block for block in chain.blocks if name in block.note]


def base_block(base: Model) -> Block:
    """A trained model as a block: later steps work on its representation of the rows."""
    if base.private or not hasattr(base, "transform"):
        raise DataError(
            f"a model of family '{base.family}' has no representation that all clients may have. Give "
            "one that everybody shares and that has `transform`, such as a DeepAFL model."
        )
    arrays, note = base.contents()
    return Block({"base": note}, arrays)


def base_of(chain: Chain) -> Any:
    """The trained model that a run works on; None where it works on the rows themselves."""
    found = next((block for block in chain.blocks if "base" in block.note), None)
    return None if found is None else model_from_contents(dict(found.arrays), found.note["base"])


LEVEL = ("gram", "cross", "label_square")
"""Sums that a classifier of some features Phi is solved from: PhiᵀPhi, PhiᵀY, and sum of y² per class."""


@dataclass(eq=False)
class Accumulator:
    """The term of one answer under construction: named sums in the worker's buffers, or on a device.

    A sum has the shape of what is added to it first: of no rows, an empty span of them (`Rows.spans`).
    """

    workspace: Workspace
    dtype: Any
    kernels: Kernels = NUMPY
    term: Term = field(default_factory=Term, init=False)

    def add_level(self, rows: Array, targets: Array) -> None:
        """The sums of `LEVEL`."""
        self.add_product("gram", rows)
        self.add_product("cross", rows, targets)
        self.add("label_square", (targets**2).sum(axis=0))

    def add_product(self, name: str, left: Array, right: Array | None = None) -> None:
        """name += leftᵀ right, or the symmetric leftᵀ left."""
        known = self.term.arrays
        if not (begun := name in known):
            shape = left.shape[1], (left if right is None else right).shape[1]
            if self.kernels is NUMPY:
                known[name] = self.workspace.sums(name, shape, self.dtype)
            else:
                known[name] = self.kernels.empty(shape, self.dtype)
        out = known[name]
        if right is None:
            self.kernels.gram(left, out, accumulate=begun)
            self.term.symmetric |= {name}
            return
        scratch = None
        if begun and self.kernels is NUMPY:  # devices have their own
            scratch = self.workspace.array("product", out.shape, out.dtype)
        self.kernels.cross(left, right, out, begun, scratch)

    def add(self, name: str, values: Array) -> None:
        """name += values"""
        known = self.term.arrays
        if name in known:
            known[name] += values
        else:
            known[name] = self.kernels.copy(self.kernels.array(values, self.dtype))

    def finish(self, **counts: int) -> Term:
        """The term, with these counts."""
        self.term.counts |= counts
        return self.term


class Rows:
    """A client's inputs and targets as the closed forms need them: prepared, encoded, weighted.

    Targets are one-hot rows for classes, the values themselves for regression, minus their mean
    when the run has an intercept. They are given where `kernels` compute; a device keeps its own copy. Of a
    run over a trained model, the inputs are what that model makes of the rows; they are kept where they fit
    into `budget` bytes.
    """

    def __init__(
        self, data: ClientData, chain: Chain, dtype: Any, kernels: Kernels = NUMPY, budget: int = 0
    ) -> None:
        data.check_width(chain.opening["features"], "the run")
        self.data = data
        self.dtype = dtype
        self.kernels = kernels
        self._base: Any = base_of(chain)
        self.width: int = data.width
        if self._base is not None:
            self.width = self._base.placed(kernels.device).width
        self._keeps = len(data) * self.width * 8 <= budget
        self._kept: dict[int, Array] = {}
        opening = chain.opening
        self.outputs: int = opening["outputs"]
        # Everything but the features is small: it lies where the kernels compute for all passes.
        here, classes = kernels.array, labels_from_note(opening["classes"])
        labels, weights = data.own_labels, data.own_weights
        self.codes = None if classes is None else encode_labels(labels, classes)
        self._codes = None if self.codes is None else here(self.codes.astype(np.int64, copy=False))
        values = regression_targets(labels, self.outputs) if classes is None else None
        if names := opening.get("labels"):
            values = label_matrix(labels, names)
        self._values = None if values is None else here(values, dtype)
        self._roots = None if weights is None else here(np.sqrt(weights)[:, None], dtype)
        arrays = next((block.arrays for block in chain.blocks if "preparation" in block.note), {})
        self._preparation = {name: here(array) for name, array in arrays.items()} or None

    def __len__(self) -> int:
        return len(self.data)

    def features(self, span: slice) -> Array:
        """Input features (span, width), centred and scaled as the preparation says."""
        dtype = self.dtype if self._preparation is None else np.float64
        if self._base is not None:
            known = self._kept.get(span.start)  # what the trained model makes of these rows
            if known is None or len(known) != span.stop - span.start:
                known = np.asarray(self._base.transform(self.data.features(span)))
                if self._keeps:
                    self._kept[span.start] = known
            values = self.kernels.array(known, dtype)
        elif self.kernels is NUMPY:
            values = self.data.features(span, dtype)
        else:
            placed = self.data.placed(self.kernels)
            rows = self.data.features(span, None) if placed is None else placed[span]
            values = self.kernels.array(rows, dtype)
        if self._preparation is None:
            return values
        values = values - self._preparation["mean"]
        values /= self._preparation["scale"]
        return self.kernels.array(values, self.dtype)

    def targets(self, span: slice) -> Array:
        """Targets (span, outputs)."""
        here = self.kernels
        if self._codes is not None:
            values = here.one_hot(self._codes[span], self.outputs, self.dtype)
        else:
            assert self._values is not None
            values = here.copy(here.array(self._values[span], self.dtype))
        if self._preparation is not None:
            values -= here.array(self._preparation["target_mean"], self.dtype)
            if "target_scale" in self._preparation:
                values /= here.array(self._preparation["target_scale"], self.dtype)
        return values

    def ones(self, span: slice) -> Array:
        """A column of ones for these rows, each times the square root of its row's weight."""
        count = len(range(*span.indices(len(self.data))))
        return self.weighted(span, self.kernels.array(np.ones((count, 1), dtype=self.dtype)))

    def is_right(self, span: slice, scores: Array) -> int:
        """How many of these rows have their largest score at their class."""
        assert self._codes is not None
        if self._preparation is not None:
            scores = scores + self._preparation["target_mean"]
        return int((scores.argmax(1) == self._codes[span]).sum())

    def spans(self, width: int | None = None) -> Iterator[slice]:
        """Spans of the rows, for a pass that makes rows of this width; an empty one if there are none."""
        rows, length = len(self.data), self.kernels.chunk_rows(width or self.width)
        for start in range(0, max(1, rows), length):
            yield slice(start, min(start + length, rows))

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """Features and targets, some thousand rows at a time, each times the square root of the row's weight:
        a product of two of them counts a row by its weight.
        """
        for span in chunks(len(self), self.width, self.kernels):
            yield self.weighted(span, self.features(span)), self.weighted(span, self.targets(span))

    def weighted(self, span: slice, values: Array) -> Array:
        """values times the square roots of the sample weights: both factors of a sum carry one."""
        return values if self._roots is None else values * self._roots[span]


def cached_rows(data: ClientData, memory: Memory, dtype: Any, kernels: Kernels = NUMPY) -> Rows:
    """The client's `Rows` for the model so far, kept until the opening or the preparation changes."""
    chain = memory.chain
    shown = {"opening", "preparation", "base"}  # blocks that change what rows look like
    newest = max(place for place, block in enumerate(chain.blocks) if shown & block.note.keys())
    key = (chain.digests[newest + 1], np.dtype(dtype).str, kernels.device)
    cached = memory.cache.get("rows")
    if cached is None or cached[0] != key:
        cached = memory.cache["rows"] = (key, Rows(data, chain, dtype, kernels, memory.budget))
    rows: Rows = cached[1]
    return rows


MOMENTS = "moments"


def moments_block(total: Total, scale: str | None, intercept: bool) -> Block:
    """How rows are prepared: by means and standard deviations of the union of the cohort's rows.

    Columns whose variance is lost in rounding count as constant and are only centred. Targets of a regression
    get their deviation, about zero without an intercept, as a scale.
    """
    weight = float(total["weight"][0])
    if weight <= 0:
        raise DataError("no rows at all: every client of the cohort is empty or has zero weights.")
    mean, deviation = mean_and_deviation(weight, total["feature"], total["feature_square"])
    first, spread = total["target"] if intercept else np.zeros_like(total["target"]), None
    if "target_square" in total.term.arrays:
        spread = mean_and_deviation(weight, first, total["target_square"])[1]
    scales = deviation if scale == "standard" else np.ones_like(mean)
    return preparation_block(Preparation(mean, scales, first / weight, target_scale=spread))


def check_sums(total: Total, spec: Spec) -> None:
    """Refuse sums that nothing can be solved from: no rows, no weight, or rows of one class only."""
    check_rows(total.count("rows"))
    if spec.classes is not None or "weight" in total.term.arrays:
        weights = total["weight" if spec.classes is None else "label_square"]
        if weights.sum() <= 0:
            raise DataError("all sample weights are zero; at least one row must count.")
        check_rows(None, None if spec.classes is None else int(np.sum(weights > 0)))


def preparation_in(chain: Chain) -> Preparation | None:
    """The preparation of rows in the model so far, if there is one."""
    found = next((block.arrays for block in chain.blocks if "preparation" in block.note), None)
    return None if found is None else Preparation.from_arrays(found)


def preparation_block(preparation: Preparation) -> Block:
    """The block of the model that holds it."""
    return Block({"preparation": True}, preparation.arrays())


@step(MOMENTS, over_rows=True)
def answer_moments(data: ClientData, request: Request, memory: Memory) -> Term:
    """n (as sum of weights), sum x, sum x² and sum y of the client's rows; sum y² where it is asked for."""
    rows = Rows(data, memory.chain, np.float64, memory.kernels)
    sums = Accumulator(memory.workspace, np.float64, memory.kernels)
    for span in rows.spans():
        root = rows.ones(span)
        features, targets = rows.features(span) * root, rows.targets(span) * root
        sums.add("weight", (root**2).sum(axis=0))
        sums.add("feature", (root.T @ features)[0])
        sums.add("feature_square", (features**2).sum(axis=0))
        sums.add("target", (root.T @ targets)[0])
        if request.note.get("squares", False):
            sums.add("target_square", (targets**2).sum(axis=0))
    return sums.finish(rows=len(rows))


# -- methods of one exchange ----------------------------------------------------------------------

ONCE = "one-exchange"


class OneExchange(Method[M]):
    """A method that solves for its model from one total."""

    @abstractmethod
    def answer(self, rows: Rows) -> Term:
        """The client's term: sums over its rows."""

    @abstractmethod
    def solve(self, total: Total, spec: Spec) -> M:
        """The model of the total of all terms."""

    def start(self, spec: Spec) -> Run[M]:
        return OneExchangeRun(self, spec)


class OneExchangeRun(Run[M]):
    """Asks once and solves."""

    method: OneExchange[M]
    _model: M | None = None

    def request(self, clients: tuple[str, ...]) -> Request | None:
        return self.ask(ONCE, 0, clients) if self._model is None else None

    def absorb(self, total: Total) -> None:
        known = self.spec.classes is not None
        check_rows(total.count("rows"), int(np.count_nonzero(total["class_rows"])) if known else None)
        self._model = self.method.solve(total, self.spec)
        self.record(total, "classifier")

    def model(self) -> M:
        assert self._model is not None
        return self._model

    def stored(self) -> dict[str, Any]:
        return {"model": None if self._model is None else self._model.contents()}

    def take_stored(self, kept: dict[str, Any]) -> None:
        if kept["model"] is not None:
            self._model = model_from_contents(*kept["model"])  # type: ignore[assignment]


@step(ONCE)
def answer_once(data: ClientData, request: Request, memory: Memory) -> Term:
    """The method's own answer, with the client's rows counted."""
    method: OneExchange[Any] = registry.method_of(memory.chain.opening)
    rows = cached_rows(data, memory, np.float64)
    term = method.answer(rows)
    term.counts["rows"] = len(rows)
    if rows.codes is not None:
        term.arrays["class_rows"] = np.bincount(rows.codes, minlength=rows.outputs).astype(np.float64)
    return term
