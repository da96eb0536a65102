"""FedDisco: clients whose labels are far from balanced count less in the mean.

Ye et al., "FedDisco: Federated Learning with Discrepancy-Aware Collaboration", ICML 2023.

    d_i = KL(labels of client i || uniform),   D = sum_j d_j
    a_i ∝ max(p_i - discrepancy d_i / D + offset, 0),   W <- sum_i a_i w_i

It stays a sum. Before a cohort trains it is asked for the sums of n_i, d_i and 1; N, D and K travel with
the weights, and every client works out its own a_i. The question is put again only when the cohort
changed. What is inside max() sums to 1 - discrepancy + K offset, so all clients can end at zero only where
that is not positive; then, and only then, they are also asked for the sum of their a_i, and where it is
zero all count by p_i, as in FedAvg. Where all labels are balanced, D = 0 and d_i / D is taken as 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.backends.devices import find_device
from fedsolve.federation.method import Request, Term, Total, opening_classes
from fedsolve.federation.participant import ClientData, Memory, step
from fedsolve.gradient import networks
from fedsolve.gradient.batches import steps_per_epoch
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, ServerState, parameter, register
from fedsolve.gradient.slots import borrowed
from fedsolve.labels import encode_labels

KIND = "feddisco"


@register(
    paper="Ye et al., ICML 2023",
    exchanges="rounds, and one more whenever the cohort changes",
    up="a * weights and a; before: rows and label discrepancy",
    down="weights and three numbers",
)
class FedDisco(GradientMethod):
    """FedDisco: the mean of the local models, less of those with unbalanced labels."""

    discrepancy: float = parameter(0.5, "How much unbalanced labels cost a client (a of the paper).", least=0)
    offset: float = parameter(0.1, "What every client is given (b of the paper).", least=0)

    @property
    def _plain(self) -> bool:
        return self.discrepancy == 0 and self.offset == 0

    def share(self, size: float, away: float, sums: Array) -> float:
        """a_i before it is normalised, from n_i, d_i and the cohort's (N, D, K)."""
        total, distance, _ = sums
        penalty = self.discrepancy * away / distance if distance > 0 else 0.0
        return float(max(size / total - penalty + self.offset, 0.0))

    def weight(self, group: ClientGroup, client: int) -> float:
        size = super().weight(group, client)
        if self._plain or not bool(group.received["shares"]):
            return size
        counts = group.class_counts[client].double().cpu().numpy()
        sums = group.received["sums"].double().cpu().numpy()
        return self.share(size, label_discrepancy(counts), sums)

    def prelude(self, server: ServerState) -> tuple[str, dict[str, Any]] | None:
        if self._plain:
            return None
        if server.note.get("heard") != list(server.cohort):
            return KIND, {}
        if "shares" not in server.memory:
            return KIND, {"sums": [float(value) for value in server.memory["sums"]]}
        return None

    def heard(self, server: ServerState, total: Total) -> None:
        if server.note.get("heard") == list(server.cohort):
            server.memory["shares"] = np.array(float(total["share"][0] > 0))
            return
        # Those who did not answer are not in the sums, so they are not asked to train either.
        server.cohort = total.cohort
        server.note["heard"] = list(total.cohort)
        server.memory.pop("shares", None)
        sums = np.array([total["size"][0], total["distance"][0], total.count("trains")])
        server.memory["sums"] = sums
        if sums[1] == 0 or 1 - self.discrepancy + sums[2] * self.offset > 0:
            server.memory["shares"] = np.array(1.0)

    def preludes(self, server: ServerState) -> int:
        if self._plain:
            return 0
        return int("heard" not in server.note) if self.participation == 1 else self.rounds - server.round

    def extras(self, server: ServerState) -> dict[str, Array]:
        return {} if self._plain else {name: server.memory[name] for name in ("sums", "shares")}


def label_discrepancy(counts: Array) -> float:
    """KL(labels || uniform) of class counts (classes,), with 0 log 0 = 0; exactly 0 for balanced ones."""
    present = counts[counts > 0]
    if not len(present):
        return 0.0
    total = float(counts.sum())
    return max(0.0, float(np.sum(present / total * np.log(present * len(counts) / total))))


@step(KIND)
def answer_discrepancy(client: ClientData, request: Request, memory: Memory) -> Term:
    """Rows by weight (or 1, in a uniform mean) and label discrepancy; or a_i, if the request has the sums."""
    opening = memory.chain.opening
    method = registry.method_of(opening)
    assert isinstance(method, FedDisco)
    classes = opening_classes(memory.chain)
    assert classes is not None
    features, outputs, least = opening["features"], opening["outputs"], 1
    if not method.trains_together(features, outputs):
        with borrowed(method, features, outputs, find_device(memory.kernels.device)) as slot:
            least = 2 if networks.batch_norms(slot.lend()) else 1
    # Whether it has a batch to train on.
    trains = bool(steps_per_epoch(method, np.array([len(client)]), least)[0] > 0)
    given = client.own_weights
    rows = float(len(client)) if given is None else float(given.sum())
    size = (rows if method.weighting == "size" else 1.0) if trains else 0.0
    counts = np.bincount(encode_labels(client.own_labels, classes), minlength=len(classes))
    away = label_discrepancy(counts) if trains else 0.0
    if "sums" in request.note:
        share = method.share(size, away, np.array(request.note["sums"])) if trains else 0.0
        return Term({"share": np.array([share])}, {"rows": len(client)})
    return Term(
        {"size": np.array([size]), "distance": np.array([away])},
        {"rows": len(client), "trains": int(trains)},
    )
