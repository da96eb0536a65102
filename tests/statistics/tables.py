"""Public tables that ship with scikit-learn, statsmodels and lifelines, and federations of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import lifelines.datasets
import numpy as np
import pandas as pd
import statsmodels.api as sm
from sklearn.datasets import load_diabetes

from fedsolve import LocalFederation
from fedsolve.tables.encoder import category_text, encode
from fedsolve.tables.schema import Column, Schema


@cache
def table(name: str) -> Any:
    """A table by name, as pandas has it; columns that are categories are text."""
    if name == "fair":
        found = sm.datasets.fair.load_pandas().data
        found["had"] = (found.affairs > 0).astype(float)
        found["weight"] = 1 + found.age / 20
        return found.assign(religious=found.religious.map(category_text))
    if name == "affairs":
        fair = table("fair")
        return fair[fair.affairs > 0].reset_index(drop=True)
    if name == "randhie":
        return sm.datasets.randhie.load_pandas().data.head(5000)
    if name == "scotland":
        return sm.datasets.scotland.load_pandas().data.rename(columns=str.lower)
    if name == "star98":
        found = sm.datasets.star98.load_pandas().data.rename(columns=str.lower)
        return found.assign(
            tested=found.nabove + found.nbelow, share=found.nabove / (found.nabove + found.nbelow)
        )
    if name == "grunfeld":
        found = sm.datasets.grunfeld.load_pandas().data
        return found.assign(firm=found.firm.astype(str))
    if name == "diabetes":
        return load_diabetes(as_frame=True, scaled=False).frame.rename(columns={"target": "progression"})
    loaders = {"rossi": "load_rossi", "lung": "load_lung", "gbsg2": "load_gbsg2", "larynx": "load_larynx"}
    return getattr(lifelines.datasets, loaders[name])()


def schema_of(frame: Any, **kinds: Any) -> Schema:
    """A schema of all columns: text is a category, everything else a number."""
    columns = []
    for name in frame:
        numeric = pd.api.types.is_numeric_dtype(frame[name]) and kinds.get(name) != "category"
        levels = () if numeric else tuple(sorted({category_text(value) for value in frame[name].dropna()}))
        columns.append(Column(name) if numeric else Column(name, "category", categories=levels))
    return Schema(tuple(columns))


def federation(frame: Any, owners: Any = 5, schema: Schema | None = None, **settings: Any) -> LocalFederation:
    """The rows of a table among clients; owners: an array, or how many clients to deal them to at random."""
    schema = schema or schema_of(frame)
    if isinstance(owners, int):
        dealt = np.random.default_rng(owners).integers(0, owners, len(frame))
        dealt[:owners] = np.arange(owners)
        owners = dealt
    features = encode(schema, frame, extra="ignore")
    return LocalFederation.from_arrays(
        features, np.zeros(len(features)), owners, task="regression", schema=schema, **settings
    )


def near(found: Any, expected: Any, within: float) -> None:
    """Fail where numbers differ by more than this share of the largest of their kind."""
    found, expected = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    apart = np.max(np.abs(found - expected) / np.abs(expected))
    assert apart <= within, f"{apart:.2e} apart: {found} and {expected}"
