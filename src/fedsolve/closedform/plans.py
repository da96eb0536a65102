"""The three exchange plans of DeepAFL: what to ask for, and one pure function that advances (G, H).

With P = F A (the block's output before Uᵀ), the next layer's sums follow from this layer's:
    G' = G + Z Uᵀ + U Zᵀ + U (PᵀP) Uᵀ,   H' = H + U (PᵀY),   Z = Phiᵀ P.
The lean plan asks clients for Z, PᵀY and PᵀP (thin arrays). The single plan has
M = FᵀPhi, FᵀY and Pi = FᵀF already and forms the same three on the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsolve.arrays import Array
from fedsolve.closedform.solvers import Sandwich

LEVEL = ("gram", "cross", "label_square")
"""Statistics that determine a layer's classifier: PhiᵀPhi, PhiᵀY, and sum of y² per class."""


@dataclass(frozen=True)
class Plan:
    """Which statistics a plan asks for.

    block: to solve the next block. step: to advance (G, H) once the block is known; empty when
    the plan asks for G and H themselves (textbook) or needs nothing more (single).
    """

    name: str
    block: tuple[str, ...]
    step: tuple[str, ...] = ()

    @property
    def merges(self) -> bool:
        """Whether classifier and block statistics can travel in one exchange."""
        return "hidden_feature" in self.block


PLANS = {
    "textbook": Plan("textbook", ("hidden_gram", "hidden_residual")),
    "lean": Plan("lean", ("hidden_gram", "hidden_residual"), ("step_feature", "step_cross", "step_gram")),
    "single": Plan("single", ("hidden_gram", "hidden_feature", "hidden_cross")),
}


def choose_plan(exchange: str, prefers: str) -> Plan:
    """The plan called `exchange`; "auto" follows what the federation prefers to save."""
    if exchange == "auto":
        return PLANS["lean" if prefers == "bytes" else "single"]
    return PLANS[exchange]


def step_from_hidden(
    block: Sandwich, hidden_gram: Array, hidden_feature: Array, hidden_cross: Array
) -> tuple[Array, Array, Array]:
    """Z, PᵀY and PᵀP of the single plan: MᵀA, Aᵀ(FᵀY), Aᵀ Pi A."""
    left = block.left
    return hidden_feature.T @ left, left.T @ hidden_cross, left.T @ (hidden_gram @ left)


def advance(
    gram: Array, cross: Array, block: Sandwich, feature: Array, step_cross: Array, step_gram: Array
) -> tuple[Array, Array]:
    """(G, H) of the next layer from this layer's, with Z (d, r), PᵀY (r, C), PᵀP (r, r) of the block."""
    right = block.right
    half = (feature + 0.5 * (right @ step_gram)) @ right.T
    return gram + half + half.T, cross + right @ step_cross
