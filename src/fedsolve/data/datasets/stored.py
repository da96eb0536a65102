"""`features:KEY`: features that `fedsolve features build` left in the store, and their backbone."""

from __future__ import annotations

from pathlib import Path

from fedsolve.data.datasets.dataset import Dataset, Split
from fedsolve.data.datasets.dataset_address import Address, Known
from fedsolve.errors import DataError
from fedsolve.schema import Schema


def load(address: Address, root: Path | None) -> Dataset:
    """The stored features whose key begins with KEY."""
    from fedsolve.data.feature_store import FeatureStore

    address.allow("store")
    if not address.rest:
        raise DataError(f"'{address.text}' names no key; see 'fedsolve features list'.")
    found = FeatureStore(address.options.get("store")).get(address.rest)
    test = None
    if found.x_test is not None and found.y_test is not None:
        test = Split(found.x_test, found.y_test)
    train = Split(found.x_train, found.y_train)
    schema = None if found.extractor is None else Schema(extractor=found.extractor)
    return Dataset(address.text, train, test, found.class_names, found.classes, schema)


KNOWN = (
    Known(
        "features:KEY",
        "features in the store, and the backbone they came from",
        "what 'fedsolve features build' made; ?store=DIR for another store than FEDSOLVE_STORE",
        "fedsolve features list",
        load,
    ),
)
