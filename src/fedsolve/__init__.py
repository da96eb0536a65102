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
from fedsolve.errors import CalibrationWarning as CalibrationWarning
from fedsolve.errors import CategoryWarning as CategoryWarning
from fedsolve.errors import CohortError as CohortError
from fedsolve.errors import ConditionWarning as ConditionWarning
from fedsolve.errors import DataError as DataError
from fedsolve.errors import DialectWarning as DialectWarning
from fedsolve.errors import FedsolveError as FedsolveError
from fedsolve.errors import ModelFileError as ModelFileError
from fedsolve.errors import SpellingWarning as SpellingWarning
from fedsolve.errors import TermError as TermError
from fedsolve.errors import TrackingWarning as TrackingWarning
from fedsolve.version import __version__ as __version__

if TYPE_CHECKING:
    from fedsolve import gradient as gradient
    from fedsolve import privacy as privacy
    from fedsolve.closedform.afl import AFL as AFL
    from fedsolve.closedform.apfl import APFL as APFL
    from fedsolve.closedform.auto import Auto as Auto
    from fedsolve.closedform.cascade import Cascade as Cascade
    from fedsolve.closedform.deepafl import DeepAFL as DeepAFL
    from fedsolve.closedform.kernel_afl import KernelAFL as KernelAFL
    from fedsolve.closedform.kernel_softmax import KernelSoftmax as KernelSoftmax
    from fedsolve.closedform.private import Private as Private
    from fedsolve.closedform.softmax import Softmax as Softmax
    from fedsolve.cluster.ray_federation import RayFederation as RayFederation
    from fedsolve.cluster.row_file import RowFile as RowFile
    from fedsolve.data import partitions
    from fedsolve.data.parquet_rows import ParquetRows as ParquetRows
    from fedsolve.estimators import AFLClassifier as AFLClassifier
    from fedsolve.estimators import AFLRegressor as AFLRegressor
    from fedsolve.estimators import AutoClassifier as AutoClassifier
    from fedsolve.estimators import AutoRegressor as AutoRegressor
    from fedsolve.estimators import DeepAFLClassifier as DeepAFLClassifier
    from fedsolve.estimators import DeepAFLRegressor as DeepAFLRegressor
    from fedsolve.estimators import KernelAFLClassifier as KernelAFLClassifier
    from fedsolve.estimators import KernelAFLRegressor as KernelAFLRegressor
    from fedsolve.estimators import SoftmaxClassifier as SoftmaxClassifier
    from fedsolve.federation.engine import Follower as Follower
    from fedsolve.federation.folds import Part as Part
    from fedsolve.federation.local import LocalFederation as LocalFederation
    from fedsolve.federation.participant import ClientData as ClientData
    from fedsolve.federation.participant import Participant as Participant
    from fedsolve.federation.recipe import Recipe as Recipe
    from fedsolve.model import Model as Model
    from fedsolve.model import load_model as load_model
    from fedsolve.network.network_federation import NetworkFederation as NetworkFederation
    from fedsolve.privacy.leaving import add as add
    from fedsolve.privacy.leaving import forget as forget
    from fedsolve.scoring.client_scores import ClientScores as ClientScores
    from fedsolve.scoring.client_scores import client_rows as client_rows
    from fedsolve.scoring.client_scores import client_scores as client_scores
    from fedsolve.scoring.evaluation import evaluate as evaluate
    from fedsolve.scoring.groups import Grouped as Grouped
    from fedsolve.scoring.groups import evaluate_by as evaluate_by
    from fedsolve.scoring.importance import Importance as Importance
    from fedsolve.scoring.importance import feature_importances as feature_importances
    from fedsolve.scoring.quality import Evaluation as Evaluation
    from fedsolve.scoring.residuals import RegressionEvaluation as RegressionEvaluation
    from fedsolve.statistics.cox import Cox as Cox
    from fedsolve.statistics.describe import Describe as Describe
    from fedsolve.statistics.glm import GLM as GLM
    from fedsolve.statistics.mixed import MixedModel as MixedModel
    from fedsolve.statistics.release import Release as Release
    from fedsolve.statistics.release import Releasing as Releasing
    from fedsolve.statistics.survival import KaplanMeier as KaplanMeier
    from fedsolve.tables.csv_text import Dialect as Dialect
    from fedsolve.tables.proposal import propose
    from fedsolve.tables.schema import Column as Column
    from fedsolve.tables.schema import Schema as Schema
    from fedsolve.tables.schema import read_schema as read_schema
    from fedsolve.tables.schema import write_schema as write_schema
    from fedsolve.tables.table_file import read_table as read_table
    from fedsolve.tracking import tracker as tracker
    from fedsolve.watching.loopback import StatusPage as StatusPage

    partition, propose_schema = partitions, propose

_EVERYDAY = {
    "closedform.afl": "AFL",
    "closedform.apfl": "APFL",
    "closedform.auto": "Auto",
    "closedform.cascade": "Cascade",
    "closedform.deepafl": "DeepAFL",
    "closedform.kernel_afl": "KernelAFL",
    "closedform.kernel_softmax": "KernelSoftmax",
    "closedform.private": "Private",
    "closedform.softmax": "Softmax",
    "data.partitions": "partition",
    "federation.folds": "Part",
    "federation.engine": "Follower",
    "federation.local": "LocalFederation",
    "federation.participant": "ClientData Participant",
    "federation.recipe": "Recipe",
    "gradient": "gradient",
    "model": "Model load_model",
    "privacy": "privacy",
    "scoring.client_scores": "ClientScores client_rows client_scores",
    "scoring.evaluation": "evaluate",
    "scoring.groups": "Grouped evaluate_by",
    "scoring.importance": "Importance feature_importances",
    "scoring.quality": "Evaluation",
    "scoring.residuals": "RegressionEvaluation",
    "statistics.cox": "Cox",
    "statistics.describe": "Describe",
    "statistics.glm": "GLM",
    "statistics.mixed": "MixedModel",
    "statistics.release": "Release Releasing",
    "statistics.survival": "KaplanMeier",
    "tables.csv_text": "Dialect",
    "tables.proposal": "propose_schema",
    "tables.schema": "Column Schema read_schema write_schema",
    "tables.table_file": "read_table",
}
"""Names by the module that has them, which is imported when a name is asked for. All of these modules enter
methods, client steps or kinds of models; they are imported when one of those is looked for by its name."""

_OPTIONAL = {
    "cluster.ray_federation": "RayFederation",
    "cluster.row_file": "RowFile",
    "data.parquet_rows": "ParquetRows",
    "estimators": "AFLClassifier AFLRegressor AutoClassifier AutoRegressor DeepAFLClassifier "
    "DeepAFLRegressor KernelAFLClassifier KernelAFLRegressor SoftmaxClassifier",
    "network.network_federation": "NetworkFederation",
    "privacy.leaving": "add forget",
    "tracking": "tracker",
    "watching.loopback": "StatusPage",
}
"""The same for names that need more than the core of fedsolve, or longer to import than all of it."""

_RENAMED = {"partition": None, "gradient": None, "privacy": None, "propose_schema": "propose"}
"""What a name is called in its module, where that differs; None: it is the module."""

_PLACES = {name: place for place, names in (_EVERYDAY | _OPTIONAL).items() for name in names.split()}

__all__ = sorted({name for name in globals() if name.endswith(("Error", "Warning"))} | {*_PLACES})


# Whatever the method, the steps of the last calibrate and choose.
registry.ENTERING += [f"{__name__}.{place}" for place in (*_EVERYDAY, "scoring.choice")]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        module, inside = import_module(f"{__name__}.{_PLACES[name]}"), _RENAMED.get(name, name)
        globals()[name] = value = getattr(module, inside) if inside else module
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'fedsolve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
