"""fedsolve: federated learning by solving, not by descending.

>>> import fedsolve as fs
>>> owners = fs.partition.dirichlet(y, clients=100, alpha=0.1, seed=0)      # doctest: +SKIP
>>> federation = fs.LocalFederation.from_arrays(X, y, owners)               # doctest: +SKIP
>>> model = fs.DeepAFL(layers=20).fit(federation)                           # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fedsolve import registry
from fedsolve.errors import (
    CalibrationWarning,
    CategoryWarning,
    CohortError,
    ConditionWarning,
    DataError,
    FedsolveError,
    ModelFileError,
    TermError,
    TrackingWarning,
)
from fedsolve.version import __version__

if TYPE_CHECKING:
    from fedsolve import gradient, privacy
    from fedsolve.closedform.afl import AFL
    from fedsolve.closedform.apfl import APFL
    from fedsolve.closedform.auto import Auto
    from fedsolve.closedform.cascade import Cascade
    from fedsolve.closedform.deepafl import DeepAFL
    from fedsolve.closedform.kernel_afl import KernelAFL
    from fedsolve.closedform.kernel_softmax import KernelSoftmax
    from fedsolve.closedform.softmax import Softmax
    from fedsolve.cluster.ray_federation import RayFederation
    from fedsolve.cluster.row_file import RowFile
    from fedsolve.data import partitions as partition
    from fedsolve.data.parquet_rows import ParquetRows
    from fedsolve.data.proposal import propose as propose_schema
    from fedsolve.data.schema_file import read_schema, write_schema
    from fedsolve.data.table_files import read_described
    from fedsolve.data.text_tables import Dialect
    from fedsolve.estimators import (
        AFLClassifier,
        AFLRegressor,
        AutoClassifier,
        DeepAFLClassifier,
        DeepAFLRegressor,
        KernelAFLClassifier,
        SoftmaxClassifier,
    )
    from fedsolve.federation.calibrated import Calibrated
    from fedsolve.federation.described import Described
    from fedsolve.federation.evaluation import evaluate, evaluation
    from fedsolve.federation.followers import Follower
    from fedsolve.federation.importance import Importance, importances
    from fedsolve.federation.local import LocalFederation
    from fedsolve.federation.local_scores import LocalScores, local_scores
    from fedsolve.federation.on_part import OnPart
    from fedsolve.federation.participant import ClientData, Participant
    from fedsolve.federation.parts import Part
    from fedsolve.federation.quality import Evaluation
    from fedsolve.model import Model, load_model
    from fedsolve.network.flower import FlowerFederation
    from fedsolve.schema import Column, Schema
    from fedsolve.tracking import tracker
    from fedsolve.watching.loopback import StatusPage

__all__ = [
    "AFL",
    "APFL",
    "AFLClassifier",
    "AFLRegressor",
    "Auto",
    "AutoClassifier",
    "Calibrated",
    "CalibrationWarning",
    "Cascade",
    "CategoryWarning",
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
    "Follower",
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
    "StatusPage",
    "TermError",
    "TrackingWarning",
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
    "tracker",
    "write_schema",
]

_EVERYDAY = {
    "AFL": "fedsolve.closedform.afl:AFL",
    "APFL": "fedsolve.closedform.apfl:APFL",
    "Auto": "fedsolve.closedform.auto:Auto",
    "Calibrated": "fedsolve.federation.calibrated:Calibrated",
    "Cascade": "fedsolve.closedform.cascade:Cascade",
    "ClientData": "fedsolve.federation.participant:ClientData",
    "Column": "fedsolve.schema:Column",
    "DeepAFL": "fedsolve.closedform.deepafl:DeepAFL",
    "Described": "fedsolve.federation.described:Described",
    "Dialect": "fedsolve.data.text_tables:Dialect",
    "Evaluation": "fedsolve.federation.quality:Evaluation",
    "Follower": "fedsolve.federation.followers:Follower",
    "Importance": "fedsolve.federation.importance:Importance",
    "KernelAFL": "fedsolve.closedform.kernel_afl:KernelAFL",
    "KernelSoftmax": "fedsolve.closedform.kernel_softmax:KernelSoftmax",
    "LocalFederation": "fedsolve.federation.local:LocalFederation",
    "LocalScores": "fedsolve.federation.local_scores:LocalScores",
    "Model": "fedsolve.model:Model",
    "OnPart": "fedsolve.federation.on_part:OnPart",
    "Part": "fedsolve.federation.parts:Part",
    "Participant": "fedsolve.federation.participant:Participant",
    "Schema": "fedsolve.schema:Schema",
    "Softmax": "fedsolve.closedform.softmax:Softmax",
    "evaluate": "fedsolve.federation.evaluation:evaluate",
    "evaluation": "fedsolve.federation.evaluation:evaluation",
    "gradient": "fedsolve.gradient",
    "importances": "fedsolve.federation.importance:importances",
    "load_model": "fedsolve.model:load_model",
    "local_scores": "fedsolve.federation.local_scores:local_scores",
    "partition": "fedsolve.data.partitions",
    "privacy": "fedsolve.privacy",
    "propose_schema": "fedsolve.data.proposal:propose",
    "read_described": "fedsolve.data.table_files:read_described",
    "read_schema": "fedsolve.data.schema_file:read_schema",
    "write_schema": "fedsolve.data.schema_file:write_schema",
}
"""Where a name is, as "module:name" or "module": imported when it is asked for; and all of them, since they
enter methods, client steps and kinds of models, as soon as one of those is looked for by its name."""

_OPTIONAL = {
    "AFLClassifier": "fedsolve.estimators:AFLClassifier",
    "AFLRegressor": "fedsolve.estimators:AFLRegressor",
    "AutoClassifier": "fedsolve.estimators:AutoClassifier",
    "DeepAFLClassifier": "fedsolve.estimators:DeepAFLClassifier",
    "DeepAFLRegressor": "fedsolve.estimators:DeepAFLRegressor",
    "FlowerFederation": "fedsolve.network.flower:FlowerFederation",
    "KernelAFLClassifier": "fedsolve.estimators:KernelAFLClassifier",
    "ParquetRows": "fedsolve.data.parquet_rows:ParquetRows",
    "RayFederation": "fedsolve.cluster.ray_federation:RayFederation",
    "RowFile": "fedsolve.cluster.row_file:RowFile",
    "SoftmaxClassifier": "fedsolve.estimators:SoftmaxClassifier",
    "StatusPage": "fedsolve.watching.loopback:StatusPage",
    "tracker": "fedsolve.tracking:tracker",
}
"""The same for names that need more than the core of fedsolve, or longer to import than all of it."""


@registry.entering
def _enter() -> None:
    for place in dict.fromkeys(place.partition(":")[0] for place in _EVERYDAY.values()):
        import_module(place)


def __getattr__(name: str) -> Any:
    place = _EVERYDAY.get(name) or _OPTIONAL.get(name)
    if place is not None:
        module, _, inside = place.partition(":")
        found = import_module(module)
        globals()[name] = value = getattr(found, inside) if inside else found
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'fedsolve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
