"""Data shared by the tests: one real set, one synthetic, and matrices that are hard in a known way."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import numpy as np
import pytest
from sklearn.datasets import load_digits

# Python leaves SIGINT ignored where its parent did, as in background jobs; the tests' processes must hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Dataset:
    """Features (rows, width) and integer labels, with one-hot targets beside them."""

    features: np.ndarray
    labels: np.ndarray

    @property
    def targets(self) -> np.ndarray:
        return np.eye(int(self.labels.max()) + 1)[self.labels]

    def head(self, rows: int) -> Dataset:
        """The first rows only."""
        return Dataset(self.features[:rows], self.labels[:rows])


@pytest.fixture(scope="session")
def digits() -> Dataset:
    """1,797 handwritten digits, 64 pixels in [0, 1]; three pixels are always blank."""
    features, labels = load_digits(return_X_y=True)
    return Dataset(features / 16.0, labels)


@pytest.fixture(scope="session")
def synthetic() -> Dataset:
    """5,000 x 64 normal features, 7 classes by a noisy non-linear rule."""
    rng = np.random.default_rng(20260101)
    features = rng.standard_normal((5000, 64))
    scores = np.tanh(features @ rng.standard_normal((64, 7)) / 4) + 0.5 * np.sin(2 * features[:, :7])
    return Dataset(features, np.argmax(scores + 0.3 * rng.standard_normal(scores.shape), axis=1))


def conditioned(rows: int, columns: int, condition: float, seed: int = 0) -> np.ndarray:
    """A matrix of unit norm whose singular values fall geometrically from 1 to 1/condition."""
    rng = np.random.default_rng(seed)
    rank = min(rows, columns)
    left = np.linalg.qr(rng.standard_normal((rows, rank)))[0]
    right = np.linalg.qr(rng.standard_normal((columns, rank)))[0]
    return (left * np.geomspace(1.0, 1.0 / condition, rank)) @ right.T
