"""FedAWA: the server learns how much each client counts, from the directions in which clients moved.

Shi et al., "FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using Client
Vectors", CVPR 2025.

    a = softmax(T),   v_i = w_i - W,
    minimise over T   sum_i a_i (1 - cos(W, w_i)) + sum_i a_i |v_i - sum_j a_j v_j|,
    W <- sum_i a_i w_i

T belongs to a client, not to a place in a list, and stays from round to round. server_start="log" begins
with T_i = log p_i, that is with FedAvg; "raw" with T_i = p_i as in the authors' code, which is close to a
plain mean. The weights used are those after the last server step; the authors' code uses those before it.
The server's Adam starts anew each round. Weights of all clients are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import with_prefix
from fedsolve.gradient import server_state
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Term, Total, parameter, register
from fedsolve.gradient.server_state import ServerState, Weights

BETAS = (0.5, 0.999)
EPSILON = 1e-8


@register(paper="Shi et al., CVPR 2025", up="weights of each client")
class FedAWA(GradientMethod):
    """FedAWA: aggregation weights learned from the clients' directions."""

    gathers = True

    server_rate: float = parameter(0.001, "Learning rate of the aggregation weights.", least=0)
    server_steps: int = parameter(1, "Steps on the aggregation weights in every round.", least=0)
    server_start: Literal["log", "raw"] = parameter(
        "log", "Begin with the shares of FedAvg (log) or with nearly equal ones (raw)."
    )

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        apart = [name for name in term.arrays if name.startswith(("w.", "b."))]
        server_state.set_apart(term, group.clients[client], apart)

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        clients = server_state.trained(total)
        parts = server_state.gathered(total)
        base, moved = self._logits(server, total, clients)
        if self.server_rate > 0:
            moved = learned(base, moved, mean, parts, self.server_rate, self.server_steps)
        server.memory |= {f"T@{client}": np.array(t) for client, t in zip(clients, moved, strict=True)}
        # With T as it began this is n_i * 1 exactly: FedAvg to the last bit.
        shares = dict(zip(clients, (base * np.exp(moved)).tolist(), strict=True))
        average = server_state.weighted_mean(parts, shares)
        server.aggregated = with_prefix(average, "w.")
        server.weights = mean | server.aggregated
        server.buffers |= with_prefix(average, "b.")

    def _logits(self, server: ServerState, total: Total, clients: list[str]) -> tuple[Array, Array]:
        """exp of each T as it began, up to a factor that softmax ignores, and how far T has moved since."""
        sizes = np.array([server_state.weight_of(total, client) for client in clients])
        moved = np.array([float(server.memory.get(f"T@{client}", np.zeros(()))) for client in clients])
        if self.server_start == "log":
            return sizes, moved
        for client, share in zip(clients, sizes / sizes.sum(), strict=True):
            server.memory.setdefault(f"start@{client}", np.array(share))
        return np.exp([float(server.memory[f"start@{client}"]) for client in clients]), moved


def learned(
    base: Array, moved: Array, sent: Weights, parts: Mapping[str, Weights], rate: float, steps: int
) -> Array:
    """`moved` (clients,) after so many Adam steps on the objective of the header; a ∝ base * exp(moved)."""
    names = [name for name in sent if any(f"w.{name}" in part for part in parts.values())]
    origin = np.concatenate([sent[name].ravel() for name in names])
    local = np.stack([np.concatenate([p[f"w.{name}"].ravel() for name in names]) for p in parts.values()])
    lengths = np.linalg.norm(local, axis=1) * np.linalg.norm(origin)
    # A zero vector has no direction: its cosine is 0, as in torch.
    away = 1.0 - np.divide(local @ origin, lengths, out=np.zeros(len(local)), where=lengths > 0)
    vectors = local - origin
    moved = moved.copy()
    first, second = np.zeros_like(moved), np.zeros_like(moved)
    for number in range(1, steps + 1):
        shares = base * np.exp(moved - moved.max())
        gradient = _gradient(shares / shares.sum(), away, vectors)
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        scale = np.sqrt(second / (1 - BETAS[1] ** number)) + EPSILON
        moved -= rate * (first / (1 - BETAS[0] ** number)) / scale
    return moved


def _gradient(shares: Array, away: Array, vectors: Array) -> Array:
    """The objective's gradient with respect to T.

    With r_i = v_i - sum_j a_j v_j and s = sum_i a_i r_i / |r_i|, the derivative by a_k is
    1 - cos_k + |r_k| - <r_k, s> up to a constant, which softmax ignores.
    """
    rest = vectors - shares @ vectors
    lengths = np.linalg.norm(rest, axis=1)
    units = np.divide(rest, lengths[:, None], out=np.zeros_like(rest), where=lengths[:, None] > 0)
    slope = away + lengths - rest @ (shares @ units)
    # By differences, so that equal clients get exactly no gradient: Adam would blow up a rounding error.
    return np.asarray(shares * ((slope[:, None] - slope[None, :]) @ shares))
