"""fedsolve: federated learning by solving, not by descending.

>>> import fedsolve as fs
>>> owners = fs.partition.dirichlet(y, clients=100, alpha=0.1, seed=0)      # doctest: +SKIP
>>> federation = fs.LocalFederation.from_arrays(X, y, owners)               # doctest: +SKIP
>>> model = fs.DeepAFL(layers=20).fit(federation)                           # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsolve import gradient, privacy
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.apfl import APFL
from fedsolve.closedform.auto import Auto
from fedsolve.closedform.cascade import Cascade
from fedsolve.closedform.deepafl import DeepAFL
from fedsolve.closedform.kernel_afl import KernelAFL
from fedsolve.closedform.kernel_softmax import KernelSoftmax
from fedsolve.closedform.softmax import Softmax
from fedsolve.data import partitions as partition
from fedsolve.data.proposal import propose as propose_schema
from fedsolve.data.schema_file import read_schema, write_schema
from fedsolve.data.table_files import read_described
from fedsolve.data.text_tables import Dialect
from fedsolve.errors import (
    CalibrationWarning,
    CohortError,
    ConditionWarning,
    DataError,
    FedsolveError,
    ModelFileError,
    TermError,
)
from fedsolve.federation.calibrated import Calibrated
from fedsolve.federation.described import Described
from fedsolve.federation.evaluation import evaluate, evaluation
from fedsolve.federation.importance import Importance, importances
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.local_scores import LocalScores, local_scores
from fedsolve.federation.on_part import OnPart
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.federation.parts import Part
from fedsolve.federation.quality import Evaluation
from fedsolve.model import Model, load_model
from fedsolve.schema import Column, Schema
from fedsolve.version import __version__

if TYPE_CHECKING:
    from fedsolve.cluster.ray_federation import RayFederation
    from fedsolve.cluster.row_file import RowFile
    from fedsolve.data.parquet_rows import ParquetRows
    from fedsolve.estimators import (
        AFLClassifier,
        AFLRegressor,
        DeepAFLClassifier,
        DeepAFLRegressor,
        KernelAFLClassifier,
        SoftmaxClassifier,
    )
    from fedsolve.network.flower import FlowerFederation

__all__ = [
    "AFL",
    "APFL",
    "AFLClassifier",
    "AFLRegressor",
    "Auto",
    "Calibrated",
    "CalibrationWarning",
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
    "Dialect",
    "Evaluation",
    "FedsolveError",
    "FlowerFederation",
    "Importance",
    "KernelAFL",
    "KernelAFLClassifier",
    "KernelSoftmax",
    "LocalFederation",
    "LocalScores",
    "Model",
    "ModelFileError",
    "OnPart",
    "ParquetRows",
    "Part",
    "Participant",
    "RayFederation",
    "RowFile",
    "Schema",
    "Softmax",
    "SoftmaxClassifier",
    "TermError",
    "__version__",
    "evaluate",
    "evaluation",
    "gradient",
    "importances",
    "load_model",
    "local_scores",
    "partition",
    "privacy",
    "propose_schema",
    "read_described",
    "read_schema",
    "write_schema",
]

_LATER = {
    "FlowerFederation": "fedsolve.network.flower",
    "ParquetRows": "fedsolve.data.parquet_rows",
    "RayFederation": "fedsolve.cluster.ray_federation",
    "RowFile": "fedsolve.cluster.row_file",
}
"""Names that are imported when they are asked for, and where from."""

_ESTIMATORS = {
    "AFLClassifier",
    "AFLRegressor",
    "DeepAFLClassifier",
    "DeepAFLRegressor",
    "KernelAFLClassifier",
    "SoftmaxClassifier",
}


def __getattr__(name: str) -> Any:
    # scikit-learn takes longer to import than everything else together: only when asked for.
    if name in _ESTIMATORS:
        from fedsolve import estimators

        return getattr(estimators, name)
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'fedsolve' has no attribute {name!r}")
