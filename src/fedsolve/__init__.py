"""fedsolve: federated learning by solving, not by descending.

>>> import fedsolve as fs
>>> owners = fs.partition.dirichlet(y, clients=100, alpha=0.1, seed=0)      # doctest: +SKIP
>>> federation = fs.LocalFederation.from_arrays(X, y, owners)               # doctest: +SKIP
>>> model = fs.DeepAFL(layers=20).fit(federation)                           # doctest: +SKIP
"""

from __future__ import annotations

from fedsolve.closedform.afl import AFL
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
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.model import Model, load_model

__version__ = "0.1.0"

__all__ = [
    "AFL",
    "ClientData",
    "CohortError",
    "ConditionWarning",
    "DataError",
    "DeepAFL",
    "FedsolveError",
    "LocalFederation",
    "Model",
    "ModelFileError",
    "Participant",
    "TermError",
    "load_model",
    "partition",
]
