"""Whether a sketch of the updates chooses the layer that the whole updates would.

FedAvg with feedback alignment on Fashion-MNIST; clients send both, and every round compares the layer that
the sketched scores pick with the exact scores. A pick counts as right when it is the same layer, or one
whose exact z lies within 0.01 of the extreme.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import fedsolve as fs
from benchmarks.fashion_mnist import ALPHA, CLIENTS, pixel_rows
from benchmarks.machine import progress
from fedsolve.container import with_prefix
from fedsolve.federation.messages import Term, Total
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import FedAvg, alignment
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.server_state import ServerState, Weights
from fedsolve.registry import register

WITHIN = 0.01


@register("fedavg-sketched", up="both")
@dataclass(frozen=True, kw_only=True)
class FedAvgSketched(FedAvg):
    """FedAvg with feedback alignment by whole updates, whose clients send sketches too."""

    key: ClassVar[str] = "fedavg-sketched"
    feedback: str | None = "lowest"
    feedback_sketch: int = 0
    beside: int = 2048

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        weights, start = group.weights_of(client), group.start
        names = {layer: f"{layer}.weight" for layer in group.note["layers"]}
        updates = {layer: weights[n].double() - start[n].double() for layer, n in names.items()}
        sums = alignment.alignment_sums(updates, self.beside, self.seed)
        term.arrays |= {f"sketch.{name}": array for name, array in sums.items()}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        layers = server.note["all_layers"]
        sizes = {layer: server.weights[f"{layer}.weight"].size for layer in layers}
        arrays = with_prefix(total.term.arrays, "sketch.")
        server.note["sketched"] = alignment.alignment_scores(arrays, sizes, self.beside)
        super().update(server, mean, total)


def measure(
    folder: Path, rounds: int, sketch: int, network: str, device: str, limit: int | None, epochs: int
) -> dict[str, Any]:
    """Shares of rounds in which the sketch picks right, for the lowest and the highest score."""
    images, labels, _, _ = pixel_rows(folder)
    images, labels = images[:limit], labels[:limit]
    owners = fs.partition.dirichlet(labels, CLIENTS, alpha=ALPHA, seed=0)
    federation = fs.LocalFederation.from_arrays(
        images, labels, owners, clients=CLIENTS, workers=1, device=device
    )
    method = FedAvgSketched(
        network=network,
        rounds=rounds,
        participation=0.1,
        epochs=epochs,
        rate=0.01,
        momentum=0.9,
        weight_decay=1e-3,
        beside=sketch,
    )
    run = method.start(federation.describe())
    run.server.note["all_layers"] = run.layers
    right: dict[str, list[bool]] = {"lowest": [], "highest": []}
    same: dict[str, list[bool]] = {"lowest": [], "highest": []}
    errors = []
    for record in exchanges(run, federation):
        exact, short = record.metrics["alignment"], run.server.note["sketched"]
        errors.append(max(abs(exact[layer] - short[layer]) for layer in exact))
        for choice, found in right.items():
            (truth,), (pick,) = (alignment.choose_layers(z, choice) for z in (exact, short))
            same[choice].append(pick == truth)
            found.append(abs(exact[pick] - exact[truth]) <= WITHIN)
        progress(f"round {record.step + 1} of {rounds}: largest error of z {errors[-1]:.4f}")
    sizes = {layer: run.server.weights[f"{layer}.weight"].size for layer in run.layers}
    return {
        "network": network,
        "rounds": rounds,
        "layers": len(run.layers),
        "sketch": sketch,
        "entries": sum(sizes.values()),
        "sent": alignment._spans(sizes, sketch)[-1].stop,
        "largest_error": max(errors),
        "same_layer": {choice: sum(found) / rounds for choice, found in same.items()},
        "right": {choice: sum(found) / rounds for choice, found in right.items()},
    }
