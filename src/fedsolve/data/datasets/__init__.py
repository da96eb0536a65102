"""Datasets by name or address, in their official training and test part.

`load_dataset("cifar10", root="data")`, `load_dataset("folder:./images")`; `datasets()` lists what there is.
Files are looked for in the folder `root`, or in that of the variable FEDSOLVE_DATA; nothing is downloaded,
but for `hf:`.
"""

from __future__ import annotations

import os

from fedsolve.data.address import Address
from fedsolve.data.datasets import folder, huggingface, published, tabular
from fedsolve.data.datasets.dataset import Dataset, Known, Split, data_root, unknown
from fedsolve.errors import DataError
from fedsolve.tables.table_file import SUFFIXES

__all__ = ["Dataset", "Known", "Split", "datasets", "load_dataset"]

_FAMILIES = (published, folder, tabular, huggingface)
ADDRESSES = {(known.scheme, ":" in known.name) for family in _FAMILIES for known in family.KNOWN}
"""Schemes of addresses, and whether something follows them."""


def datasets() -> list[Known]:
    """All kinds of datasets, with the files they need and where to get them."""
    return [known for family in _FAMILIES for known in family.KNOWN]


def load_dataset(address: str, root: str | os.PathLike[str] | None = None) -> Dataset:
    """The dataset of this address; its files are looked for in `root` or, if None, in FEDSOLVE_DATA."""
    parsed = Address.parse(address)
    for known in datasets():
        if parsed.scheme == known.scheme:
            if bool(parsed.rest) != (":" in known.name):
                raise DataError(f"'{address}' is not an address; write {known.name}.")
            return known.load(parsed, data_root(root))
    if os.path.isdir(address):
        raise DataError(f"'{address}' is a folder; write folder:{address} for images in class folders.")
    for kind, suffixes in SUFFIXES.items():
        if address.lower().endswith(suffixes):
            raise DataError(f"'{address}' looks like a file; write {kind}:{address}.")
    raise unknown("dataset", address, [known.name for known in datasets()])
