"""A client's rows, and how the preparation of a run shows them to the steps of methods."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fedsolve.backends import Kernels
from fedsolve.checks import check_arrays
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.messages import Chain
from fedsolve.held_out import row_marks
from fedsolve.labels import encode_labels, labels_from_note, plain_labels
from fedsolve.preparation import TablePreparation
from fedsolve.schema import Schema
from fedsolve.streamed import as_features

TABLE_MOMENTS = "table-moments"
"""The kind of request whose answer a table is prepared by."""

TABLE_BLOCK = "table preparation"
"""The note of the block that holds the preparation."""


_ROWS = 65536
"""Rows read at a time where all are looked at."""

_PLACED = tuple(map(np.dtype, (np.float16, np.float32, np.float64, np.uint8)))
"""Types in which features are copied to a device; of others float64 is made."""


class ClientData:
    """A client's rows: features, and labels (classification) or targets (regression), never copied whole.

    features: (rows of the source, width), any real dtype, may be memory-mapped or `StreamedRows`.
    labels:   (rows of the source,) labels of any sortable type, or float targets (…,) / (…, outputs).
    rows:     which rows of the source belong to this client; all when None.
    weights:  (rows of the source,) non-negative sample weights; they enter sums, never the row count.
    schema:   what the features are, where `encoder.encode` made them of a table; NaN is a missing value then.
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
    ) -> None:
        self.source = as_features(features)
        self.labels = plain_labels(labels)
        self.weights = None if weights is None else np.asarray(weights, dtype=np.float64)
        self.rows = rows
        self.schema = schema
        if not checked:
            check_arrays(self.source, self.labels, self.weights, missing=schema is not None)
        if schema is not None and schema.width != self.width:
            raise DataError(
                f"the schema makes {schema.width} features of a row; these have {self.width}. "
                "Encode the table with this schema."
            )

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    @property
    def width(self) -> int:
        return int(self.source.shape[1])

    def features(self, span: slice, dtype: Any = np.float64) -> Array:
        """The features of this client's rows `span`, as a contiguous array."""
        return np.ascontiguousarray(self._own(self.source, span), dtype=dtype)

    def placed(self, kernels: Kernels) -> Any | None:
        """This client's features where these kernels compute, as they are stored: copied once and kept.

        None where they do not fit beside what is there already.
        """
        copies: dict[str, Any] = vars(self).setdefault("_copies", {})
        if kernels.device not in copies:
            stored = self.features(slice(0, 0), None).dtype
            known = stored.newbyteorder("=") in _PLACED  # devices have no others, such as longdouble
            kind = stored.newbyteorder("=") if known else np.dtype(np.float64)
            fits = len(self) * self.width * kind.itemsize <= kernels.budget(0)
            copies[kernels.device] = kernels.array(self.features(slice(None), kind)) if fits else None
        return copies[kernels.device]

    def own_labels(self) -> Array:
        return self._own(self.labels, slice(None))

    def own_weights(self) -> Array | None:
        return None if self.weights is None else self._own(self.weights, slice(None))

    def marks(self, key: int | str = 0) -> Array:
        """A number for each of this client's rows that its content alone decides: see `held_out`."""
        labels = self.own_labels()
        spans = [slice(start, start + _ROWS) for start in range(0, max(1, len(self)), _ROWS)]
        marks = [row_marks(self._own(self.source, span), labels[span], key) for span in spans]
        return np.concatenate(marks)

    def taking(self, chosen: Array) -> ClientData:
        """The rows of this client where `chosen` is true, nothing copied."""
        rows = np.flatnonzero(chosen) if self.rows is None else self.rows[chosen]
        return ClientData(self.source, self.labels, rows, self.weights, checked=True, schema=self.schema)

    def prepared(self, preparation: TablePreparation) -> ClientData:
        """The same rows as methods see them under this preparation."""
        return PreparedData(self, preparation, self.own_weights())

    @cached_property
    def incomplete(self) -> bool:
        """Whether a value of these rows is missing."""
        # NaN anywhere makes the sum NaN; infinite values were refused.
        return self.schema is not None and bool(np.isnan(np.sum(self._own(self.source, slice(None)))))

    def _own(self, array: Array, span: slice) -> Array:
        return array[span] if self.rows is None else array[self.rows[span]]


class PreparedData(ClientData):
    """A client's rows with missing values filled and columns standardised, computed as they are read.

    Whoever wants them all at once, as `source`, gets them computed once and kept.
    """

    def __init__(self, raw: ClientData, preparation: TablePreparation, weights: Array | None) -> None:
        self._raw = raw
        self._preparation = preparation
        self.labels = raw.own_labels()
        self.weights = weights
        self.rows = None
        self.schema = None

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def width(self) -> int:
        return self._raw.width

    @cached_property
    def source(self) -> Array:
        return self._preparation.apply(self._raw.features(slice(None)))

    def marks(self, key: int | str = 0) -> Array:
        return self._raw.marks(key)

    def features(self, span: slice, dtype: Any = np.float64) -> Array:
        if "source" in vars(self):
            return super().features(span, dtype)
        return self._preparation.apply(self._raw.features(span)).astype(dtype, copy=False)


class WeightedData(ClientData):
    """A client's rows as they are, counted by weights that the run gave them: (own rows,)."""

    def __init__(self, raw: ClientData, weights: Array) -> None:
        vars(self).update(vars(raw))
        self.weights = weights

    def own_weights(self) -> Array | None:
        return self.weights

    def taking(self, chosen: Array) -> ClientData:
        assert self.weights is not None
        return WeightedData(super().taking(chosen), self.weights[chosen])


def rows_for(data: ClientData, kind: str, chain: Chain, cache: dict[str, Any]) -> ClientData:
    """A client's rows as the model so far shows them to a step that answers requests of this kind.

    The schemas of the run and of the rows must agree. What is derived from rows is dropped from the cache
    when the preparation changes.
    """
    place, mark = shown_by(chain)
    known = cache.get("table")
    if known is None or known[0] != mark:
        rows, schema = data, run_schema(chain)
        if schema is not None:
            _check_schema(data, schema)
        if place is not None:
            rows = _shown(data, chain.blocks[place].arrays, chain.blocks[0].note["opening"])
        if known is not None and known[0][1] != mark[1]:
            cache.clear()
        known = cache["table"] = (mark, rows)
    if kind != TABLE_MOMENTS and known[1].incomplete:
        raise DataError(
            "this client has missing values, and the run does not fill them. Train with the schema that the "
            "rows were encoded with (Described), or remove the rows."
        )
    shown: ClientData = known[1]
    return shown


def shown_by(chain: Chain) -> tuple[int | None, tuple[str, str]]:
    """Where in a chain the preparation of a table stands, if anywhere, and what tells it from others."""
    place = next((i for i, block in enumerate(chain.blocks) if TABLE_BLOCK in block.note), None)
    return place, (chain.digests[1], "" if place is None else chain.digests[place + 1])


def run_schema(chain: Chain) -> Schema | None:
    """The schema of the rows that a run is about; None where it describes none."""
    note = chain.blocks[0].note.get("opening", {}).get("schema") if len(chain) else None
    return None if note is None else Schema.from_note(note)


def _shown(data: ClientData, arrays: Mapping[str, Array], opening: Mapping[str, Any]) -> ClientData:
    """The rows under a preparation, and weighted by class where it has weights for classes."""
    weights = data.own_weights()
    if "class_weight" in arrays:
        classes = labels_from_note(opening["classes"])
        assert classes is not None
        by_class = arrays["class_weight"][encode_labels(data.own_labels(), classes)]
        weights = by_class if weights is None else weights * by_class
    if "centre" in arrays:
        return PreparedData(data, TablePreparation.from_arrays(arrays), weights)
    return data if weights is None else WeightedData(data, weights)


def _check_schema(data: ClientData, run: Schema) -> None:
    if data.schema is None:
        raise DataError(
            "this run describes its rows by a schema, and this client's rows came without one. Encode the "
            "table with the run's schema, and say so (ClientData(..., schema=schema))."
        )
    differences = data.schema.differences(run)
    if differences:
        raise DataError(
            f"this client's schema is not the run's: {'; '.join(differences)}. All sites must use the same."
        )
