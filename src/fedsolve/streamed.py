"""Features that are read as they are used, for more rows than memory holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from fedsolve.container import Array


class StreamedRows(ABC):
    """Features (rows, width) that lie elsewhere; a span or a list of rows is read when it is asked for.

    It stands where an array of features does. Several threads may read at a time.
    """

    ndim = 2
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: slice | Array) -> Array:
        """These rows, as an array in memory."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """All of them, for what cannot do with less."""
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)


def as_features(features: Any) -> Any:
    """Features as an array, or as they are where they are read when they are used."""
    return features if isinstance(features, np.ndarray | StreamedRows) else np.asarray(features)
