"""What all backbones share: optional packages, checked features, digests of weights, the cache folder."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError

# Images that go through a network at a time, so that memory is bounded however many there are.
PIECE = 64


def require(module: str, extra: str, what: str) -> Any:
    """The module `module`, or an error that says what needs it and which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise DataError(
            f"{what} needs {module.partition('.')[0]}, which cannot be imported ({problem}). "
            f"Install it: pip install 'fedsolve[{extra}]'."
        ) from problem


def require_installed(module: str, address: str) -> Any:
    """The module `module` if it is there and works; fedsolve does not install it by itself."""
    try:
        return importlib.import_module(module)
    # A torchvision that was built for another torch fails with a RuntimeError.
    except (ImportError, RuntimeError, AttributeError) as problem:
        raise DataError(
            f"{address} needs {module.partition('.')[0]}, which cannot be imported "
            f"({type(problem).__name__}: {first_line(problem)}). Install the version that belongs to your "
            "torch, or use efficientnet-lite0, onnx:FILE or hf:NAME instead."
        ) from problem


def first_line(problem: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def checked_features(output: Any, rows: int, what: str, remedy: str) -> Array:
    """The output of a network as float32 features (rows, width), all finite.

    Trailing dimensions of length 1, as average pooling leaves them, are dropped.
    """
    features: Array = np.asarray(output)
    while features.ndim > 2 and features.shape[-1] == 1:
        features = features[..., 0]
    if features.ndim != 2 or len(features) != rows or features.shape[1] == 0:
        raise DataError(
            f"{what} gives an output of shape {np.shape(output)} for {rows} image(s); features must have "
            f"shape (images, width). {remedy}"
        )
    features = np.ascontiguousarray(features, dtype=np.float32)
    if not np.isfinite(features).all():
        row, column = (int(place) for place in np.argwhere(~np.isfinite(features))[0])
        raise DataError(
            f"{what} gives {features[row, column]} in feature {column} of image {row} of the batch. "
            "Check scale, mean and std of its preprocessing, and the weights."
        )
    return features


def digest_of(parts: Iterable[bytes | memoryview]) -> str:
    """SHA-256 over parts, each preceded by its length, so that their borders count."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Where exported backbones are kept: `cache`, or FEDSOLVE_CACHE, or ~/.cache/fedsolve."""
    chosen = cache or os.environ.get("FEDSOLVE_CACHE") or Path.home() / ".cache" / "fedsolve"
    return Path(chosen).expanduser() / "backbones"
