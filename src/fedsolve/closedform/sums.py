"""Sums over a client's rows, chunk by chunk, into buffers that are used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedsolve.closedform.blas import add_gram
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.messages import Block, Chain, Term
from fedsolve.federation.method import opening_classes
from fedsolve.federation.participant import ClientData, Memory
from fedsolve.federation.workspace import Workspace
from fedsolve.labels import encode_labels, regression_targets
from fedsolve.model import Model, model_from_contents
from fedsolve.threads import several_threads

_CHUNK_BYTES = 16 << 20


def chunks(rows: int, width: int) -> Iterator[slice]:
    """Spans of rows whose float64 features take about 16 MB.

    The length depends on the width alone, so that sums have the same bits whatever the memory
    budget, the precision of the machine's clock or the number of workers.
    """
    length = max(256, min(8192, _CHUNK_BYTES // (8 * width)))
    for start in range(0, rows, length):
        yield slice(start, min(start + length, rows))


def check_opening(data: ClientData, chain: Chain) -> None:
    """Refuse a run this participant cannot take part in: another feature width."""
    opening = chain.blocks[0].note["opening"]
    if data.width != opening["features"]:
        raise DataError(
            f"this client has {data.width} features per row, the run uses {opening['features']}. "
            "All must use the same backbone."
        )


def base_block(base: Model) -> Block:
    """A trained model as a block: what follows works on its representation of the rows."""
    if base.private or not hasattr(base, "transform"):
        raise DataError(
            f"a model of family '{base.family}' has no representation that all clients may have. Give "
            "one that everybody shares and that has `transform`, such as a DeepAFL model."
        )
    arrays, note = base.contents()
    return Block({"base": note}, arrays)


def base_of(chain: Chain) -> Model | None:
    """The trained model that a run works on; None where it works on the rows themselves."""
    blocks = [block for block in chain.blocks if "base" in block.note]
    return model_from_contents(dict(blocks[0].arrays), blocks[0].note["base"]) if blocks else None


def base_width(base: Model) -> int:
    """Columns of a model's representation."""
    return int(base.width)  # type: ignore[attr-defined]


class Accumulator:
    """The term of one answer under construction: named sums in the worker's buffers."""

    def __init__(self, workspace: Workspace, dtype: Any) -> None:
        self.term = Term()
        self._workspace = workspace
        self._dtype = dtype
        self._empty: set[str] = set()

    def declare(self, name: str, shape: tuple[int, ...], symmetric: bool = False) -> None:
        """Announce a sum; it is zero until something is added."""
        self.term.arrays[name] = self._workspace.sums(name, shape, self._dtype)
        if symmetric:
            self.term.symmetric |= {name}
        self._empty.add(name)

    def add_gram(self, name: str, rows: Array) -> None:
        """name += rowsᵀ rows"""
        if several_threads():
            # numpy and scipy may each bring a BLAS whose idle threads spin: used in turn, they take the cores
            # from each other. numpy computes the large products, so it computes this one too.
            self.add_product(name, rows, rows)
            return
        add_gram(rows, self.term.arrays[name], accumulate=name not in self._empty)
        self._empty.discard(name)

    def add_product(self, name: str, left: Array, right: Array) -> None:
        """name += leftᵀ right"""
        out = self.term.arrays[name]
        if name in self._empty:
            np.matmul(left.T, right, out=out)
            self._empty.discard(name)
        else:
            out += np.matmul(left.T, right, out=self._workspace.array("product", out.shape, out.dtype))

    def add(self, name: str, values: Array) -> None:
        """name += values"""
        if name in self._empty:
            self.term.arrays[name][...] = values
            self._empty.discard(name)
        else:
            self.term.arrays[name] += values

    def finish(self) -> Term:
        for name in self._empty:
            self.term.arrays[name].fill(0.0)
        return self.term


class Rows:
    """A client's inputs and targets as the closed forms need them: prepared, encoded, weighted.

    Targets are one-hot rows for classes, the values themselves for regression, minus their mean
    when the run has an intercept. Of a run over a trained model, the inputs are what that model makes of the
    rows; they are kept where they fit into `budget` bytes.
    """

    def __init__(self, data: ClientData, chain: Chain, dtype: Any, budget: int = 0) -> None:
        self.data = data
        self.dtype = dtype
        self._base = base_of(chain)
        self._kept: dict[int, Array] | None = None
        if self._base is not None and len(data) * base_width(self._base) * 8 <= budget:
            self._kept = {}
        opening = chain.blocks[0].note["opening"]
        self.outputs: int = opening["outputs"]
        classes = opening_classes(chain)
        labels = data.own_labels()
        self.codes = None if classes is None else encode_labels(labels, classes)
        self._values = regression_targets(labels, self.outputs) if classes is None else None
        weights = data.own_weights()
        self._roots = None if weights is None else np.sqrt(weights)[:, None].astype(dtype)
        prepared = [block.arrays for block in chain.blocks if "preparation" in block.note]
        self._preparation = prepared[0] if prepared else None

    def __len__(self) -> int:
        return len(self.data)

    def features(self, span: slice) -> Array:
        """Input features (span, width), centred and scaled as the preparation says."""
        if self._preparation is None:
            return self._inputs(span, self.dtype)
        values = self._inputs(span, np.float64) - self._preparation["mean"]
        values /= self._preparation["scale"]
        return values.astype(self.dtype, copy=False)

    def _inputs(self, span: slice, dtype: Any) -> Array:
        if self._base is None:
            return self.data.features(span, dtype)
        known = None if self._kept is None else self._kept.get(span.start)
        if known is None or len(known) != span.stop - span.start:
            known = self._base.transform(self.data.features(span))  # type: ignore[attr-defined]
            if self._kept is not None:
                self._kept[span.start] = known
        return np.ascontiguousarray(known, dtype=dtype)

    def targets(self, span: slice) -> Array:
        """Targets (span, outputs)."""
        if self.codes is not None:
            codes = self.codes[span]
            values = np.zeros((len(codes), self.outputs), dtype=self.dtype)
            values[np.arange(len(codes)), codes] = 1.0
        else:
            assert self._values is not None
            values = self._values[span].astype(self.dtype)
        if self._preparation is not None:
            values -= self._preparation["target_mean"].astype(self.dtype)
        return values

    @property
    def width(self) -> int:
        return self.data.width if self._base is None else base_width(self._base)

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """Features and targets, some thousand rows at a time, each times the square root of the row's weight:
        a product of two of them counts a row by its weight.
        """
        for span in chunks(len(self), self.width):
            yield self.weighted(span, self.features(span)), self.weighted(span, self.targets(span))

    def uncentred(self, scores: Array) -> Array:
        """Scores with the mean that was taken off the targets."""
        return scores if self._preparation is None else scores + self._preparation["target_mean"]

    def weighted(self, span: slice, values: Array) -> Array:
        """values times the square roots of the sample weights: both factors of a sum carry one."""
        return values if self._roots is None else values * self._roots[span]


def cached_rows(data: ClientData, memory: Memory, dtype: Any) -> Rows:
    """The client's `Rows` for the model so far, kept until the opening or the preparation changes."""
    chain = memory.chain
    prepared = next((i for i, b in enumerate(chain.blocks) if "preparation" in b.note), 0)
    key = (chain.digests[prepared + 1], np.dtype(dtype).str)
    cached = memory.cache.get("rows")
    if cached is None or cached[0] != key:
        cached = memory.cache["rows"] = (key, Rows(data, chain, dtype, memory.budget))
    rows: Rows = cached[1]
    return rows
