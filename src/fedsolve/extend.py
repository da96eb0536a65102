"""All that the author of a method needs, in one place. `docs/how-to-own-method.md` shows two methods.

A method is a frozen dataclass of parameters. In the fewest lines it is

* a `OneExchange`: `answer(rows)` gives a client's sums, `solve(total, spec)` the model; or
* a `GradientMethod`: override the hooks in which it differs from FedAvg (`losses`, `edit`, `contribute`,
  `state`, `prepare` at the client; `outgoing`, `extras`, `update` at the server); or
* a `PersonalMethod`, which gives every client a `PersonalGradientModel` of its own.

Anything else derives from `Method` and gives a `Run`: `request` says what to ask next, `absorb` takes the
total, `model` is the end. The client's side is a function under `@step(kind)`. A run and a `Model` store
their attributes by themselves.

`register` gives a method a title and a paper; a package makes it known by an entry point in the group
`fedsolve.methods`, and everybody else names it "package.module:Class". `fedsolve.testing.check_method`
holds it to the laws that it declares.
"""

from fedsolve.closedform.predictors import LinearModel as LinearModel
from fedsolve.closedform.solvers import ridge_solve as ridge_solve
from fedsolve.closedform.sums import Accumulator as Accumulator
from fedsolve.closedform.sums import OneExchange as OneExchange
from fedsolve.closedform.sums import Rows as Rows
from fedsolve.closedform.sums import cached_rows as cached_rows
from fedsolve.closedform.sums import check_opening as check_opening
from fedsolve.closedform.sums import chunks as chunks
from fedsolve.errors import CohortError as CohortError
from fedsolve.errors import DataError as DataError
from fedsolve.errors import FedsolveError as FedsolveError
from fedsolve.errors import ModelFileError as ModelFileError
from fedsolve.errors import TermError as TermError
from fedsolve.federation.engine import Spec as Spec
from fedsolve.federation.messages import Block as Block
from fedsolve.federation.messages import Chain as Chain
from fedsolve.federation.messages import Request as Request
from fedsolve.federation.messages import Term as Term
from fedsolve.federation.messages import Total as Total
from fedsolve.federation.method import Laws as Laws
from fedsolve.federation.method import Method as Method
from fedsolve.federation.method import Record as Record
from fedsolve.federation.method import Run as Run
from fedsolve.federation.participant import ClientData as ClientData
from fedsolve.federation.participant import Memory as Memory
from fedsolve.federation.participant import group_step as group_step
from fedsolve.federation.participant import step as step
from fedsolve.federation.states import State as State
from fedsolve.gradient.gradient_method import GradientMethod as GradientMethod
from fedsolve.gradient.group import ClientGroup as ClientGroup
from fedsolve.gradient.network_model import PersonalGradientModel as PersonalGradientModel
from fedsolve.gradient.personalised import PersonalMethod as PersonalMethod
from fedsolve.gradient.personalised import alone as alone
from fedsolve.gradient.personalised import arrays_of as arrays_of
from fedsolve.gradient.prototypes import head_names as head_names
from fedsolve.gradient.server_state import ServerState as ServerState
from fedsolve.gradient.server_state import Weights as Weights
from fedsolve.gradient.steps import Step as Step
from fedsolve.model import Model as Model
from fedsolve.parameters import parameter as parameter
from fedsolve.registry import register as register

__all__ = sorted(name for name in vars() if not name.startswith("_"))
