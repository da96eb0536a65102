"""FedNova: clients with many local steps do not pull the mean towards themselves.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
2020, Eq. 9 and 10. Client i makes tau_i steps; with a_i the sum of the factors that its gradients get (tau_i
for plain SGD, [tau_i - m (1 - m^tau_i) / (1 - m)] / (1 - m) with momentum m) and p_i its share of the rows,

    W <- W - tau_eff sum_i p_i (W - w_i) / a_i,     tau_eff = sum_i p_i a_i

The clients send w_i / a_i, 1 / a_i and a_i, each times their rows: sums. With equal a_i it is FedAvg.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Term, Total, parameter, register
from fedsolve.gradient.scaffold import effective_steps
from fedsolve.gradient.server_state import ServerState, Weights


@register(paper="Wang et al., NeurIPS 2020", up="rows / a * weights, rows / a, rows and rows * a")
class FedNova(GradientMethod):
    """FedNova: every client's update divided by its number of local steps."""

    averages = False

    optimiser: Literal["sgd"] = parameter("sgd", "Only sgd: Adam's steps do not tell what a gradient counts.")

    def weight(self, group: ClientGroup, client: int) -> float:
        return super().weight(group, client) / self._steps(group, client)

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        rows = super().weight(group, client)
        term.arrays |= {"rows": np.array([rows]), "steps": np.array([rows * self._steps(group, client)])}

    def _steps(self, group: ClientGroup, client: int) -> float:
        """a_i"""
        return effective_steps(int(group.steps[client]), self.momentum, self.nesterov)

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        rows = float(total["rows"][0])
        factor = float(total["weight"][0]) / rows * (float(total["steps"][0]) / rows)
        sent = server.sent()
        server.weights = {name: sent[name] + factor * (mean[name] - sent[name]) for name in sent}
