"""The rows of an experiment: features and labels of a dataset, from the feature store or drawn at random."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.data.partitions import named_rng
from fedsolve.experiments.config import DatasetSpec

Tick = Callable[[str], None]
"""Called with the progress in words."""


@dataclass(frozen=True)
class ExperimentRows:
    """Features (rows, width) and labels of the training and the test part; key names their contents."""

    x_train: Array
    y_train: Array
    x_test: Array | None
    y_test: Array | None
    key: str
    owners: Array | None = None  # (rows,) who owns each training row, as this column of the data says
    owner_column: str | None = None
    pixels: str | None = None  # the backbone, where a method that treats images took another than the named


Source = Callable[[DatasetSpec, int, Tick], ExperimentRows]
"""Gives the rows of a dataset for a seed; only random ones depend on the seed."""


class StoredRows:
    """Rows by address, through the feature store where there is a backbone; each dataset is read once.

    data:  folder in which files that an experiment names are looked for, FEDSOLVE_DATA when None.
    store: folder of the feature store, its usual one when None.
    """

    def __init__(self, data: str | Path | None = None, store: str | Path | None = None) -> None:
        self._data = data
        self._store = store
        self._dataset: DatasetSpec | None = None
        self._forms: dict[Any, ExperimentRows] = {}

    def __call__(self, spec: DatasetSpec, seed: int, tick: Tick) -> ExperimentRows:
        if spec.random is not None:
            return random_rows(spec, seed)
        # One dataset at a time, in all the forms that its methods take: two may not fit in memory.
        dataset = replace(spec, treated=None)
        if self._dataset != dataset:
            self._dataset, self._forms = dataset, {}
        if spec.treated not in self._forms:
            self._forms[spec.treated] = self._read(spec, tick)
        return self._forms[spec.treated]

    def _read(self, spec: DatasetSpec, tick: Tick) -> ExperimentRows:
        from fedsolve.data.address import Address
        from fedsolve.data.backbones import load_backbone
        from fedsolve.data.datasets import load_dataset
        from fedsolve.data.datasets.dataset import digest_of
        from fedsolve.data.feature_store import ExtractionProgress, FeatureStore

        def show(progress: ExtractionProgress) -> None:
            tick(f"{progress.done:,} of {progress.total:,} images, {progress.rate:.0f} a second")

        assert spec.address is not None
        tick(f"reading {spec.name}")
        dataset = load_dataset(spec.address, self._data).limited(spec.limit_train, spec.limit_test)
        address = spec.backbone
        if spec.treated is not None:
            from fedsolve.gradient.pixel_form import backbone_for

            address = backbone_for(dataset, address, *spec.treated)
        backbone = None if address is None else load_backbone(address)
        rows = FeatureStore(self._store).build(dataset, backbone, progress=show)
        classes = rows.classes
        if not np.all(classes[:-1] < classes[1:]):
            # Partitions and models take classes in the order of their labels; names in another order than
            # the dataset's, such as those of Fashion-MNIST, would give another result than its numbers do.
            classes = np.arange(len(classes))
        y_test = None if rows.y_test is None else classes[rows.y_test]
        owners, key, column = dataset.train.owners, rows.key, None
        if owners is not None:
            column = Address.parse(spec.address).options["client"]
            key = hashlib.sha256(f"{key} {column} {digest_of(owners)}".encode()).hexdigest()
        pixels = None if address == spec.backbone else address
        y_train = classes[rows.y_train]
        return ExperimentRows(rows.x_train, y_train, rows.x_test, y_test, key, owners, column, pixels)


def random_rows(spec: DatasetSpec, seed: int) -> ExperimentRows:
    """Standard normal features and the same number of rows in every class, in random order."""
    assert spec.random is not None
    rows, width, classes = (spec.random[name] for name in ("rows", "width", "classes"))
    rng = named_rng(seed, "random rows")
    labels = rng.permutation(np.arange(rows) % classes)
    key = hashlib.sha256(container.canonical_json(dict(spec.random)).encode()).hexdigest()
    return ExperimentRows(rng.standard_normal((rows, width)), labels, None, None, key)


def digits() -> ExperimentRows:
    """scikit-learn's embedded digits by their pixels, which need neither a store nor a backbone."""
    from fedsolve.data.datasets import load_dataset

    dataset = load_dataset("digits")
    train, test = dataset.train, dataset.test
    assert train.features is not None
    assert test is not None
    return ExperimentRows(train.features, train.labels, test.features, test.labels, dataset.name)
