"""The papers' own routes to AFL and to APFL's shared stream, as pure functions for teaching and tests.

He et al., CVPR 2025, with the signs corrected: in Eq. 6 and its relatives the third term of the
aggregation weights is *plus* R_u C_v (C_u + C_v)^-1 C_v. Notation: C = XᵀX (+ regulariser),
R = C^-1, W = C^-1 XᵀY. The system itself sums C and XᵀY and solves once; everything here must
agree with that, as the tests check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from scipy.linalg import pinvh, solve

from fedsolve.arrays import Array, owned_rows
from fedsolve.errors import DataError


@dataclass(frozen=True)
class LocalSolution:
    """A client's (or an aggregate's) solution: weight W (d, C), gram C (d, d), and how many clients.

    inverse: R where it is a pseudo-inverse; None where systems with C are solved as they are.
    """

    weight: Array
    gram: Array
    clients: int = 1
    inverse: Array | None = None


def local_solution(features: Array, targets: Array, regulariser: float = 0.0) -> LocalSolution:
    """W_k minimising |Y_k - X_k W|² + regulariser |W|² (Eq. 12 and 13): C_k = X_kᵀX_k + regulariser I.

    With regulariser 0 and fewer rows than columns, the pseudo-inverse of C_k gives the
    minimum-norm solution; it then stands for R_k throughout.
    """
    gram = features.T @ features + regulariser * np.eye(features.shape[1])
    cross = features.T @ targets
    if regulariser > 0:
        return LocalSolution(np.asarray(solve(gram, cross, assume_a="pos")), gram)
    inverse = _pseudo_inverse(features, gram)
    return LocalSolution(inverse @ cross, gram, inverse=inverse)


def _pseudo_inverse(features: Array, gram: Array) -> Array:
    """The pseudo-inverse of gram = XᵀX; of few rows X by their own singular values, which is cheaper."""
    rows, width = features.shape
    if rows >= width:
        return np.asarray(pinvh(gram))
    _, values, directions = np.linalg.svd(features, full_matrices=False)
    # The rank is that of the Gram matrix in float64, as pinvh has it.
    kept = values**2 > width * np.finfo(np.float64).eps * values.max(initial=0.0) ** 2
    scaled = directions[kept] / values[kept, None]
    return np.asarray(scaled.T @ scaled)


def aggregate_pair(first: LocalSolution, second: LocalSolution) -> LocalSolution:
    """The absolute aggregation law (Eq. 7-8, with the second term, and the third with plus).

    W = A_u W_u + A_v W_v,  A_u = I - R_u C_v + R_u C_v (C_u + C_v)^-1 C_v,  A_v likewise.
    Equals the joint solution of both clients whenever C_u and C_v are invertible. The sum C_u + C_v is
    inverted as it is: while it is singular, rounding errors grow from one merger to the next. With a
    pseudo-inverse there as well they do not, and Table A.1 without RI would not explode as the paper's does.
    """
    if first.weight.shape != second.weight.shape:
        raise DataError(f"weights of shapes {first.weight.shape} and {second.weight.shape} do not fit.")
    joint = first.gram + second.gram
    weight = _share(first, second.gram, joint) + _share(second, first.gram, joint)
    return LocalSolution(weight, joint, first.clients + second.clients)


def _share(own: LocalSolution, other: Array, joint: Array) -> Array:
    """(I - R C' + R C' (C + C')^-1 C') W, with R the inverse of C = own.gram and C' = `other`.

    Applied to W from the right, so that only thin systems are solved.
    """
    inner = other @ (own.weight - solve(joint, other @ own.weight))
    back = solve(own.gram, inner) if own.inverse is None else own.inverse @ inner
    return np.asarray(own.weight - back)


def aggregate(solutions: Iterable[LocalSolution]) -> LocalSolution:
    """All solutions, merged pair by pair in order (Eq. 9-11)."""
    given = list(solutions)
    if not given:
        raise DataError("nothing to aggregate: no local solutions were given.")
    return reduce(aggregate_pair, given)


def remove_regulariser(merged: LocalSolution, regulariser: float, kept: int = 0) -> Array:
    """The RI process (Eq. 16): W = (C - K g I)^-1 C W_r, with g the regulariser each of K clients added.

    kept: how many of the K stay.
    """
    plain = merged.gram - (merged.clients - kept) * regulariser * np.eye(len(merged.gram))
    return np.asarray(solve(plain, merged.gram @ merged.weight, assume_a="sym"))


def primary_stream(solutions: Iterable[LocalSolution], regulariser: float) -> Array:
    """APFL's shared stream by its own recursion (Fan et al., Eq. 7-10), starting from F_1 = G_1.

    F_k = Λ_k F_{k-1} + Δ_k G_k is the absolute aggregation law. Every A_k = Φ_kᵀΦ_k + g I brings one
    regulariser g, so K - 1 of them are taken out and Eq. 2 with its single g remains. The text before Eq. 8
    prints F_1 = P_1, a refinement that cannot exist before G does.
    """
    return remove_regulariser(aggregate(solutions), regulariser, kept=1)


def local_only(features: Array, targets: Array, owners: Array, clients: int, ridge: float) -> list[Array]:
    """Each client's own ridge model, never aggregated (Table A.2); zeros where a client has no rows."""
    return [
        local_solution(features[rows], targets[rows], ridge).weight
        if len(rows)
        else np.zeros((features.shape[1], targets.shape[1]))
        for rows in owned_rows(owners, clients)
    ]
