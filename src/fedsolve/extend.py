"""All that the author of a method needs, in one place. `docs/how-to-own-method.md` shows two methods.

A method is a frozen dataclass of parameters. In the fewest lines it is

* a `OneExchange`: `answer(rows)` gives a client's sums, `solve(total, spec)` the model; or
* a `GradientMethod`: override the hooks in which it differs from FedAvg (`losses`, `edit`, `contribute`,
  `state`, `prepare` at the client; `outgoing`, `extras`, `update` at the server).

Anything else derives from `Method` and gives a `Run`: `request` says what to ask next, `absorb` takes the
total, `model` is the end. The client's side is a function under `@step(kind)`. A run and a `Model` store
their attributes by themselves.

`register` gives a method a title and a paper; a package makes it known by an entry point in the group
`fedsolve.methods`, and everybody else names it "package.module:Class". `fedsolve.testing.check_method`
holds it to the laws that it declares.
"""

from fedsolve.closedform.one_exchange import OneExchange
from fedsolve.closedform.predictors import LinearModel
from fedsolve.closedform.solvers import ridge_solve
from fedsolve.closedform.sums import Accumulator, Rows, cached_rows, check_opening, chunks
from fedsolve.errors import CohortError, DataError, FedsolveError, ModelFileError, TermError
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Block, Chain, Request, Term, Total
from fedsolve.federation.method import Laws, Method, Record, Run
from fedsolve.federation.participant import ClientData, Memory, group_step, step
from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.server_state import ServerState
from fedsolve.gradient.steps import Step
from fedsolve.model import Model
from fedsolve.parameters import parameter
from fedsolve.registry import Info, register

__all__ = [
    "Accumulator",
    "Block",
    "Chain",
    "ClientData",
    "ClientGroup",
    "CohortError",
    "DataError",
    "FedsolveError",
    "GradientMethod",
    "Info",
    "Laws",
    "LinearModel",
    "Memory",
    "Method",
    "Model",
    "ModelFileError",
    "OneExchange",
    "Record",
    "Request",
    "Rows",
    "Run",
    "ServerState",
    "Spec",
    "Step",
    "Term",
    "TermError",
    "Total",
    "cached_rows",
    "check_opening",
    "chunks",
    "group_step",
    "parameter",
    "register",
    "ridge_solve",
    "step",
]
