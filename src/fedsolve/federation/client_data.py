"""A client's rows, and how the preparation of a run shows them to the steps of methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve.arrays import Array, StreamedRows, check_arrays
from fedsolve.backends import Kernels
from fedsolve.backends.devices import torch_type
from fedsolve.errors import DataError
from fedsolve.federation.folds import RowCells, row_hashes
from fedsolve.federation.messages import Chain
from fedsolve.labels import encode_labels, labels_from_note, plain_labels
from fedsolve.tables.preparation import Preparation
from fedsolve.tables.schema import Schema

TABLE_MOMENTS = "table-moments"
"""The kind of request whose answer a table is prepared by."""

TABLE_BLOCK = "table preparation"
"""The note of the block that holds the preparation."""


_ROWS = 65536
"""Rows read at a time where all are looked at."""


class ClientData:
    """A client's rows: features, and labels (classification) or targets (regression), never copied whole.

    features: (rows of the source, width), any real dtype, may be memory-mapped or `StreamedRows`.
    labels:   (rows of the source,) labels of any sortable type, or float targets (…,) / (…, outputs).
    rows:     which rows of the source belong to this client; all when None.
    weights:  (rows of the source,) non-negative sample weights; they enter sums, never the row count.
    schema:   what the features are, where `encoder.encode` made them of a table; NaN is a missing value then.
    cells:    which rows may only be asked about together, under secure sums.
    """

    def __init__(
        self,
        features: Any,
        labels: Any,
        rows: Array | None = None,
        weights: Any = None,
        *,
        checked: bool = False,
        schema: Schema | None = None,
        cells: RowCells | None = None,
    ) -> None:
        weights = None if weights is None else np.asarray(weights, dtype=np.float64)
        if not checked:
            features = features if isinstance(features, np.ndarray | StreamedRows) else np.asarray(features)
            labels = plain_labels(labels)
            check_arrays(features, labels, weights, missing=schema is not None)
        self.source = features
        self.labels: Array = labels
        self.weights: Array | None = weights
        self.width = int(features.shape[1])
        self.rows = rows
        self.schema = schema
        self.cells = cells
        if schema is not None and schema.width != self.width:
            raise DataError(
                f"the schema makes {schema.width} features of a row; these have {self.width}. "
                "Encode the table with this schema."
            )

    @property
    def own_labels(self) -> Array:
        """The labels of this client's rows alone."""
        return self.labels if self.rows is None else self.labels[self.rows]

    @property
    def own_weights(self) -> Array | None:
        """The weights of this client's rows alone."""
        return self.weights if self.weights is None or self.rows is None else self.weights[self.rows]

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    def features(self, span: slice, dtype: Any = np.float64) -> Array:
        """The features of this client's rows `span`, as a contiguous array; None: in their stored type."""
        rows = span if self.rows is None else self.rows[span]
        return np.ascontiguousarray(self.source[rows], dtype=dtype)

    def spans(self, rows: int = 16384) -> Iterator[slice]:
        """This client's rows, some thousand at a time."""
        return (slice(start, start + rows) for start in range(0, len(self), rows))

    def placed(self, kernels: Kernels) -> Any | None:
        """This client's features, in their stored type, where these kernels compute: copied once and kept.

        None where the device has no room for them.
        """
        copies: dict[str, Any] = vars(self).setdefault("_copies", {})
        if kernels.device not in copies:
            kind = torch_type(self.features(slice(0, 0), None).dtype)
            if kind.kind != "f" and kind != np.uint8:
                kind = np.dtype(np.float64)
            fits = len(self) * self.width * kind.itemsize <= kernels.budget(0)
            copies[kernels.device] = kernels.array(self.features(slice(None), kind)) if fits else None
        return copies[kernels.device]

    def check_width(self, features: int, what: str) -> None:
        """Refuse rows of another width than the run, or the model, was made for."""
        if self.width != features:
            raise DataError(
                f"this client has {self.width} features per row, {what} uses {features}. "
                "All must use the same backbone or image size."
            )

    def row_hashes(self, key: int | str = 0) -> Array:
        """A number for each of this client's rows that its content alone decides: see `folds`.

        Rows in cells have a hash of their fold, whatever the key: folds are spread evenly over all hashes.
        Rows of one fold only have the last of them: they are always trained on.
        """
        if (cells := self.cells) is not None:
            shares = np.where(cells.counts > 1, cells.folds / np.maximum(cells.counts - 1, 1), 1.0)
            return np.minimum(shares * 2.0**53, 2.0**53 - 1).astype(np.uint64) << np.uint64(11)
        labels = self.own_labels
        spans = [slice(start, start + _ROWS) for start in range(0, max(1, len(labels)), _ROWS)]
        return np.concatenate([row_hashes(self.features(s, None), labels[s], key) for s in spans])

    def taking(self, chosen: Array) -> ClientData:
        """The rows of this client where `chosen` is true, nothing copied.

        Rows in cells: columns that few rows of a fold set are zero, in a copy.
        """
        rows = np.flatnonzero(chosen) if self.rows is None else self.rows[chosen]
        source, cells = self.source, None if self.cells is None else self.cells.taking(chosen)
        if cells is not None and np.any(cells.left_out):
            source = np.array(source[:])
            source[:, cells.left_out] = 0
        return ClientData(
            source, self.labels, rows, self.weights, checked=True, schema=self.schema, cells=cells
        )

    def within(self, cells: RowCells) -> ClientData:
        """The same rows, which may only be asked about in these cells."""
        return ClientData(
            self.source, self.labels, self.rows, self.weights, checked=True, schema=self.schema, cells=cells
        )

    def prepared(self, preparation: Preparation) -> ClientData:
        """The same rows as methods see them under this preparation."""
        return PreparedData(self, preparation, self.own_weights)

    @cached_property
    def incomplete(self) -> bool:
        """Whether a value of these rows is missing."""
        # NaN anywhere makes the sum NaN; infinite values were refused.
        return any(np.isnan(np.sum(self.features(span, None))) for span in self.spans(_ROWS))


class PreparedData(ClientData):
    """A client's rows with missing values filled and columns standardised, computed as they are read.

    `source` gives them all at once; they are then computed once and kept.
    """

    def __init__(self, raw: ClientData, preparation: Preparation, weights: Array | None) -> None:
        self._raw = raw
        self._preparation = preparation
        self.width = raw.width
        self.labels, self.weights = raw.own_labels, weights
        self.rows = None
        self.schema = None
        self.cells = raw.cells

    def __len__(self) -> int:
        return len(self._raw)

    @cached_property
    def source(self) -> Array:
        return self._preparation.apply(self._raw.features(slice(None)))

    def row_hashes(self, key: int | str = 0) -> Array:
        return self._raw.row_hashes(key)

    def features(self, span: slice, dtype: Any = np.float64) -> Array:
        if "source" in vars(self):
            return super().features(span, dtype)
        return self._preparation.apply(self._raw.features(span)).astype(dtype, copy=False)


class WeightedData(ClientData):
    """A client's rows unchanged, with weights that the run gave them: (own rows,)."""

    def __init__(self, raw: ClientData, weights: Array) -> None:
        vars(self).update(vars(raw))
        self._raw = raw
        self.weights = weights

    @property
    def own_weights(self) -> Array | None:
        return self.weights

    def taking(self, chosen: Array) -> ClientData:
        assert self.weights is not None
        return WeightedData(self._raw.taking(chosen), self.weights[chosen])


def joined(parts: Sequence[ClientData]) -> ClientData:
    """The rows of several clients of one schema, copied, one client after the other."""
    weights = None
    if any(part.weights is not None for part in parts):
        own = (np.ones(len(part)) if part.weights is None else part.own_weights for part in parts)
        weights = np.concatenate([*own])
    return ClientData(
        np.concatenate([part.features(slice(None), None) for part in parts]),
        np.concatenate([part.own_labels for part in parts]),
        weights=weights,
        checked=True,
        schema=parts[0].schema,
    )


def rows_for(data: ClientData, kind: str, chain: Chain, cache: dict[str, Any]) -> ClientData:
    """A client's rows as a step for requests of this kind sees them: as the model so far prepares them.

    The schemas of the run and of the rows must agree. What is derived from rows is dropped from the cache
    when the preparation changes.
    """
    place = next((i for i, block in enumerate(chain.blocks) if TABLE_BLOCK in block.note), None)
    blocks = chain.digests[1], "" if place is None else chain.digests[place + 1]
    known = cache.get("table")
    if known is None or known[0] != blocks:
        rows = data
        if (note := chain.opening.get("schema")) is not None:
            if data.schema is None:
                raise DataError(
                    "this run describes its rows by a schema, and this client's rows came without one. "
                    "Encode the table with the run's schema, and say so (ClientData(..., schema=schema))."
                )
            if unlike := data.schema.differences(Schema.from_note(note)):
                raise DataError(
                    f"this client's schema is not the run's: {'; '.join(unlike)}. All sites must use the "
                    "same."
                )
        if place is not None:
            rows = _shown(data, chain.blocks[place].arrays, chain.opening)
        if known is not None and known[0][1] != blocks[1]:
            cache.clear()
        known = cache["table"] = (blocks, rows)
    shown: ClientData = known[1]
    takes = kind == TABLE_MOMENTS or chain.opening.get("incomplete", False)
    if shown.schema is not None and not takes and shown.incomplete:
        raise DataError(
            "this client has missing values, and the run does not fill them. Train with the schema that the "
            "rows were encoded with (schema=), or remove the rows."
        )
    return shown


def run_schema(chain: Chain) -> Schema | None:
    """The schema of a run's rows; None if it has none."""
    note = chain.opening.get("schema")
    return None if note is None else Schema.from_note(note)


def _shown(data: ClientData, arrays: Mapping[str, Array], opening: Mapping[str, Any]) -> ClientData:
    """The prepared rows, weighted by class if the preparation has class weights."""
    weights = data.own_weights
    if "class_weight" in arrays:
        classes = labels_from_note(opening["classes"])
        assert classes is not None
        by_class = arrays["class_weight"][encode_labels(data.own_labels, classes)]
        weights = by_class if weights is None else weights * by_class
    if "centre" in arrays:
        return PreparedData(data, Preparation.from_arrays(arrays), weights)
    return data if weights is None else WeightedData(data, weights)
