"""Many Cholesky factorisations of one size at once, in few steps: a GPU should not wait for the host."""

from __future__ import annotations

from typing import Any

import torch

_BLOCK = 128
_PANEL, _SMALL = 256, 128
"""Columns that products of blocks take at a time, and columns of a block of the diagonal that the library
factors and inverts: on an H200, 100 systems of width 1024 take 5.7 ms so, and 10 take 2.5 (`python -m
benchmarks.gpu`)."""


def inverted(factors: Any) -> Any:
    """The inverses of lower triangles: of blocks of the diagonal first, then of ever larger ones."""
    count, width, _ = factors.shape
    size = _BLOCK
    while size < width:
        size *= 2
    padded = factors
    if size > width:
        padded = torch.eye(size, dtype=factors.dtype, device=factors.device).repeat(count, 1, 1)
        padded[:, :width, :width] = factors
    blocks = _diagonal_blocks(padded, _BLOCK)
    unit = torch.eye(_BLOCK, dtype=factors.dtype, device=factors.device)
    inverses = torch.linalg.solve_triangular(blocks, unit.expand_as(blocks), upper=False)
    half = _BLOCK
    while half < size:
        first, last = inverses[0::2], inverses[1::2]
        below = _diagonal_blocks(padded, 2 * half)[:, half:, :half]
        inverses, half = _joined(first, below, last), 2 * half
    return inverses[:, :width, :width]


def _joined(first: Any, below: Any, last: Any) -> Any:
    """The inverse of [A 0; B C] from those of A and C, A' and C': [A' 0; -C'BA' C']."""
    half, width = first.shape[1], first.shape[1] + last.shape[1]
    joined = torch.zeros((len(first), width, width), dtype=first.dtype, device=first.device)
    joined[:, :half, :half] = first
    joined[:, half:, half:] = last
    joined[:, half:, :half] = -(last @ (below @ first))
    return joined


def _diagonal_blocks(matrices: Any, size: int) -> Any:
    """Blocks of the diagonals, those of one matrix after those of the other: (all of them, size, size)."""
    count, width, _ = matrices.shape
    parted = matrices.reshape(count, width // size, size, width // size, size)
    return parted.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, size, size)


def _inverse_factor(systems: Any, pivots: list[Any]) -> Any:
    """The inverses of the factors of these systems, made half by half; their least pivots are added.

    The factor of [A B'; B C] is [L 0; M N] with L that of A, M = B L'^-1, and N that of C - M M'.
    """
    width = systems.shape[1]
    if width <= _SMALL:
        factor, info = torch.linalg.cholesky_ex(systems)
        least = factor.diagonal(dim1=1, dim2=2).square().amin()
        # Below zero where one of the systems has no factor.
        pivots.append(torch.where((info == 0).all(), least, -torch.ones_like(least)))
        unit = torch.eye(width, dtype=factor.dtype, device=factor.device)
        return torch.linalg.solve_triangular(factor, unit.expand_as(factor), upper=False)
    half = width // 2
    first = _inverse_factor(systems[:, :half, :half], pivots)
    below = systems[:, half:, :half] @ first.mT
    last = _inverse_factor(torch.baddbmm(systems[:, half:, half:], below, below.mT, alpha=-1.0), pivots)
    return _joined(first, below, last)


class BlockFactors:
    """The factors of symmetric systems (count, width, width), which are overwritten, made block by block.

    Blocks of the diagonal are factored and inverted, the rest is products. least_pivot: the least square of a
    diagonal entry of any factor; below zero or not a number where a system is not positive definite.
    """

    def __init__(self, systems: Any) -> None:
        self._factors = systems
        width = systems.shape[1]
        self._spans = [slice(k, min(k + _PANEL, width)) for k in range(0, width, _PANEL)]
        self._inverses = []
        pivots: list[Any] = []
        for span in self._spans:
            inverse = _inverse_factor(systems[:, span, span], pivots)
            self._inverses.append(inverse)
            below = slice(span.stop, width)
            if span.stop < width:
                panel = systems[:, below, span] @ inverse.mT
                systems[:, below, span] = panel
                systems[:, below, below].baddbmm_(panel, panel.mT, alpha=-1.0)
        self.least_pivot = torch.stack(pivots).amin()

    def solve(self, right: Any) -> Any:
        """Column j solved by system j: (width, count)."""
        # A copy also of a single column, which is contiguous as it is.
        values = right.T[:, :, None].clone(memory_format=torch.contiguous_format)
        for span, inverse in zip(self._spans, self._inverses, strict=True):
            before = slice(0, span.start)
            if span.start:
                values[:, span] -= self._factors[:, span, before] @ values[:, before]
            values[:, span] = inverse @ values[:, span]
        for span, inverse in zip(reversed(self._spans), reversed(self._inverses), strict=True):
            after = slice(span.stop, None)
            if span.stop < values.shape[1]:
                values[:, span] -= self._factors[:, after, span].mT @ values[:, after]
            values[:, span] = inverse.mT @ values[:, span]
        return values[:, :, 0].T
