"""Sums of Kronecker products: solutions against the written-out system, and what has no curvature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsolve.gradient import oneshot


def spd(width: int, rank: int, seed: int) -> Any:
    factor = np.random.default_rng(seed).standard_normal((width, rank))
    return factor @ factor.T / rank


def system(lefts: Any, rights: Any, shares: Any) -> Any:
    """The operator on M.ravel()."""
    return sum(p * np.kron(left, right) for p, left, right in zip(shares, lefts, rights, strict=True))


def case(rank: int = 6, clients: int = 3, out: int = 4, inner: int = 5) -> Any:
    rng = np.random.default_rng(7)
    lefts = [spd(out, min(rank, 2 * out), 10 + k) for k in range(clients)]
    rights = [spd(inner, rank, 20 + k) for k in range(clients)]
    shares = rng.dirichlet(np.ones(clients))
    matrices = rng.standard_normal((clients, out, inner))
    target = sum(
        p * left @ m @ right for p, left, m, right in zip(shares, lefts, matrices, rights, strict=True)
    )
    return lefts, rights, shares, matrices, target, np.tensordot(shares, matrices, 1)


def test_a_small_system_equals_its_kronecker_form() -> None:
    lefts, rights, shares, _, target, start = case(rank=8)
    found = oneshot.solve(lefts, rights, shares, target, start)
    expected = np.linalg.solve(system(lefts, rights, shares), target.ravel()).reshape(target.shape)
    assert np.abs(found.matrix - expected).max() < 1e-10
    assert found.residual < 1e-12
    # Neither the mean nor the solution with mean factors is the answer.
    left, right = (np.tensordot(shares, np.stack(f), 1) for f in (lefts, rights))
    biased = np.linalg.solve(left, np.linalg.solve(right, target.T).T)
    for other in (start, biased):
        assert np.linalg.norm(other - expected) > 0.05 * np.linalg.norm(expected)


def test_equal_factors_give_the_mean_at_once() -> None:
    lefts, rights, shares, matrices, _, start = case(rank=8)
    target = sum(p * lefts[0] @ m @ rights[0] for p, m in zip(shares, matrices, strict=True))
    for begin in (start, np.zeros_like(start)):
        found = oneshot.solve([lefts[0]] * 3, [rights[0]] * 3, shares, target, begin)
        assert np.abs(found.matrix - start).max() < 1e-10
        assert found.iterations <= 2


def test_one_client_keeps_its_matrix() -> None:
    lefts, rights, _, matrices, _, _ = case(rank=3)
    target = lefts[0] @ matrices[0] @ rights[0]
    found = oneshot.solve(lefts[:1], rights[:1], [1.0], target, matrices[0])
    assert np.abs(found.matrix - matrices[0]).max() < 1e-12


@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_without_curvature_the_start_stays(floor: float) -> None:
    """All clients see nothing of input 0, and know nothing of a common shift of the outputs."""
    lefts, rights, shares, matrices, _, start = case(rank=8)
    centre = np.eye(4) - 0.25
    lefts = [centre @ left @ centre for left in lefts]
    for right in rights:
        right[0] = right[:, 0] = 0
    target = sum(
        p * left @ m @ right for p, left, m, right in zip(shares, lefts, matrices, rights, strict=True)
    )
    found = oneshot.solve(lefts, rights, shares, target, start, floor)
    whole = system(lefts, rights, shares)
    expected = start + np.linalg.lstsq(
        whole + floor * np.eye(20), target.ravel() - whole @ start.ravel(), rcond=1e-9
    )[0].reshape(4, 5)
    assert np.abs(found.matrix - expected).max() < 1e-9
    assert np.abs(found.matrix[:, 0] - start[:, 0]).max() < 1e-9
    assert np.abs((found.matrix - start).sum(axis=0)).max() < 1e-9
    assert found.residual < 1e-11


def test_the_floor_draws_towards_the_start() -> None:
    lefts, rights, shares, _, target, start = case(rank=8)
    found = oneshot.solve(lefts, rights, shares, target, start, 0.3)
    whole = system(lefts, rights, shares) + 0.3 * np.eye(20)
    expected = np.linalg.solve(whole, (target + 0.3 * start).ravel()).reshape(4, 5)
    assert np.abs(found.matrix - expected).max() < 1e-10
    far = oneshot.solve(lefts, rights, shares, target, start, 1e9)
    assert np.abs(far.matrix - start).max() < 1e-6


def test_groups_are_systems_of_their_own() -> None:
    cases = [case(rank=8), case(rank=6)]
    together = [np.stack(pair) for pair in zip(cases[0][0], cases[1][0], strict=True)]
    rights = [np.stack(pair) for pair in zip(cases[0][1], cases[1][1], strict=True)]
    shares = cases[0][2]
    targets, starts = (np.stack([c[place] for c in cases]) for place in (4, 5))
    found = oneshot.solve(together, rights, shares, targets, starts)
    for group, (lefts, own, _, _, target, start) in enumerate(cases):
        alone = oneshot.solve(lefts, own, shares, target, start)
        assert np.abs(found.matrix[group] - alone.matrix).max() < 1e-9


def test_a_zero_target_is_solved() -> None:
    lefts, rights, shares, _, target, _ = case(rank=8)
    found = oneshot.solve(lefts, rights, shares, 0 * target, 0 * target)
    assert not found.matrix.any()
    assert found.residual == 0
