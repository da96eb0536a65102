"""Floating-point operations of the participants, counted product by product.

A product (n, a)ᵀ(n, b) or (n, a)(a, b) counts 2 n a b; a symmetric rank-n update, of which only one
triangle is computed, n a². Activations, sums and copies count nothing.
"""

from __future__ import annotations


def afl_operations(rows: int, features: int, outputs: int) -> int:
    """XᵀX and XᵀY."""
    return rows * (features**2 + 2 * features * outputs)


def lean_operations(
    rows: int, features: int, width: int, outputs: int, layers: int, hidden_width: int | None = None
) -> dict[str, int]:
    """Operations of a whole lean run by kind of exchange, with F kept between a block and its step."""
    hidden, rank = hidden_width or width, min(width, outputs)
    classifier = 2 * features * width + width**2 + 2 * width * outputs
    block = 2 * width * hidden + hidden**2 + 2 * width * outputs + 2 * hidden * outputs
    # P = F A, then PhiᵀP, PᵀY, PᵀP and the update P Uᵀ.
    step = 2 * hidden * rank + 2 * width * rank + 2 * rank * outputs + rank**2 + 2 * rank * width
    return {"classifier": rows * classifier, "block": layers * rows * block, "step": layers * rows * step}


def lean_symmetric(rows: int, width: int, outputs: int, layers: int, hidden_width: int | None = None) -> int:
    """Those of `lean_operations` that are symmetric rank-n updates."""
    hidden, rank = hidden_width or width, min(width, outputs)
    return rows * (width**2 + layers * (hidden**2 + rank**2))
