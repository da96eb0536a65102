"""fedsolve: federated learning by solving, not by descending.

>>> import fedsolve as fs
>>> owners = fs.partition.dirichlet(y, clients=100, alpha=0.1, seed=0)      # doctest: +SKIP
>>> federation = fs.LocalFederation.from_arrays(X, y, owners)               # doctest: +SKIP
>>> model = fs.DeepAFL(layers=20).fit(federation)                           # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedsolve import gradient, privacy
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.apfl import APFL
from fedsolve.closedform.cascade import Cascade
from fedsolve.closedform.deepafl import DeepAFL
from fedsolve.data import partitions as partition
from fedsolve.errors import (
    CohortError,
    ConditionWarning,
    DataError,
    FedsolveError,
    ModelFileError,
    TermError,
)
from fedsolve.federation.described import Described
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.local_scores import LocalScores, local_scores
from fedsolve.federation.on_part import OnPart
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.federation.parts import Part
from fedsolve.model import Model, load_model
from fedsolve.schema import Column, Schema
from fedsolve.version import __version__

if TYPE_CHECKING:
    from fedsolve.estimators import AFLClassifier, AFLRegressor, DeepAFLClassifier, DeepAFLRegressor
    from fedsolve.network.flower import FlowerFederation

__all__ = [
    "AFL",
    "APFL",
    "AFLClassifier",
    "AFLRegressor",
    "Cascade",
    "ClientData",
    "CohortError",
    "Column",
    "ConditionWarning",
    "DataError",
    "DeepAFL",
    "DeepAFLClassifier",
    "DeepAFLRegressor",
    "Described",
    "FedsolveError",
    "FlowerFederation",
    "LocalFederation",
    "LocalScores",
    "Model",
    "ModelFileError",
    "OnPart",
    "Part",
    "Participant",
    "Schema",
    "TermError",
    "__version__",
    "gradient",
    "load_model",
    "local_scores",
    "partition",
    "privacy",
]

_ESTIMATORS = {"AFLClassifier", "AFLRegressor", "DeepAFLClassifier", "DeepAFLRegressor"}


def __getattr__(name: str) -> Any:
    # scikit-learn takes longer to import than everything else together: only when asked for.
    if name in _ESTIMATORS:
        from fedsolve import estimators

        return getattr(estimators, name)
    if name == "FlowerFederation":
        from fedsolve.network.flower import FlowerFederation

        return FlowerFederation
    raise AttributeError(f"module 'fedsolve' has no attribute {name!r}")
