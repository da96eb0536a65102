"""What the files about refinements share: a stream with real errors, and clients of some rows."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedsolve as fs
from tests.conftest import Dataset


def stream_with_errors(digits: Dataset) -> Any:
    """A stream whose errors on the rows after the first 900 are real ones."""
    owners = fs.partition.iid(digits.labels[:900], 5)
    federation = fs.LocalFederation.from_arrays(digits.features[:900], digits.labels[:900], owners, workers=1)
    return fs.AFL(ridge=5.0).fit(federation)


def client(data: Dataset, rows: Any, weights: Any = None) -> fs.ClientData:
    return fs.ClientData(data.features, data.labels, np.asarray(rows), weights)
