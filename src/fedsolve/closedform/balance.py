"""Balance and ridge of a client's own stream, chosen from its own training rows, in closed form.

With the shared stream held fixed, E = Y - ΦG its errors on the client's rows, P the refinement ridge of E
on Ψ and h the diagonal of its hat matrix Ψ (ΨᵀΨ + ridge I)^-1 Ψᵀ, what the refinement of all *other* rows
would predict for row i is

    f_i = ψ_i P_{-i} = e_i - (e_i - ψ_i P) / (1 - h_i)

(`RidgeSolution.left_out`), so that the leave-one-out scores ΦG + balance f and errors E - balance f need no
second fit. Two exact functions of the balance follow:

    squared error   minimal at  <E, f> / <f, f>
    mistakes        row i is right on one interval of balances, because each rival class is overtaken
                    once: the fewest mistakes are found by sorting 2n ends, without a grid

A ridge that is to be chosen comes first: the one of `RIDGES` with the least squared error, each at its best
balance (`choose_ridge`). The balance is then chosen as if that ridge had been fixed. Mistakes do not choose
the ridge: their count is coarse, and the minimum over hundreds of pairs of ridge and balance would be luck.

The approximation: the shared stream was fitted to row i too. Leaving the row out there would divide e_i by
1 - g_i, with g_i the row's leverage in the pooled system, whose Gram matrix only the server has. The g_i of
all rows sum to at most the shared stream's width: they are about width / (all clients' rows), E is a little
too small and the balance a little too low. Where all rows are not many times the width, and `ridge` is small,
E and the balance vanish. A row is left out with all its weight: a row of weight 2 is one row, not two.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedsolve.arrays import Array

LARGEST = 2.0
"""Ridges shrink, so the best balance may exceed 1; beyond this it is noise of few rows."""

RIDGES = tuple(10.0 ** (step / 2) for step in range(-8, 7))
"""Ridges that a client chooses from, smallest first, as multiples of the mean squared length of its ψ.

An absolute grid would miss where features have other units or widths, and the diagonal of ΨᵀΨ grows with the
rows while the best ridge, noise over signal, does not. The smallest is far above the rounding of eigenvalues;
beyond the largest a thousand rows leave little that a balance could bring back.
"""

UNINFORMED = 1.0
"""The multiple where rows tell nothing about each other: a row is trusted by half."""

_TIE = 1e-9
"""Share of the squared error of the shared stream within which two ridges are equally good."""

_TOLERANCE = 0.5
"""Standard errors of the number of mistakes within which balances count as equally good."""

_NOTHING = 1e-9
"""Size of answers, relative to the errors, below which rows tell nothing about each other."""


def choose_balance(
    scores: Array, residuals: Array, answers: Array, codes: Array | None = None, weights: Array | None = None
) -> float:
    """The balance in [0, LARGEST] for the client that owns these rows; 0 where nothing can be learned.

    scores: ΦG. residuals: E. answers: f. codes: positions of the true classes, None for
    regression. weights: of the rows.

    Regression: the least squared error. Classes: of all balances whose leave-one-out mistakes are
    within half a standard error of the fewest, the one nearest to the least squared error, so that few
    rows, whose counts are coarse, are balanced by the smoother of the two.
    """
    counted = np.ones(len(scores)) if weights is None else weights
    power = float(np.sum(counted[:, None] * answers**2))
    scale = float(np.sum(counted[:, None] * residuals**2))
    if power <= _NOTHING**2 * scale or power == 0.0:
        # One row, or rows that tell nothing about each other: no evidence that personalising helps.
        return 0.0
    smooth = float(np.sum(counted[:, None] * residuals * answers)) / power
    smooth = min(max(smooth, 0.0), LARGEST)
    if codes is None:
        return smooth
    return _fewest_mistakes(*right_between(scores, answers, codes), counted, smooth)


def choose_ridge(
    inner: Array, power: Array, scale: float, balance: float | Literal["auto"] = "auto"
) -> int | None:
    """Position of the ridge with the least leave-one-out error; the last of equals, None without evidence.

        |E - balance f|² = scale - 2 balance inner + balance² power

    inner: <E, f> of each ridge. power: <f, f>. scale: <E, E>, rows weighted. balance: the one that the
    ridge is chosen for; "auto": each ridge's best in [0, LARGEST].
    """
    heard = power > _NOTHING**2 * scale
    if balance == 0 or not np.any(heard):
        return None
    if balance == "auto":
        best = np.divide(inner, power, out=np.zeros_like(inner), where=heard)
        balances = np.clip(best, 0.0, LARGEST)
    else:
        balances = np.full_like(inner, balance)
    gain = balances * (2.0 * inner - balances * power)
    return int(np.flatnonzero(gain >= gain.max() - _TIE * scale)[-1])


def right_between(scores: Array, answers: Array, codes: Array) -> tuple[Array, Array]:
    """The open interval of balances >= 0 at which each row's largest score is that of its class.

    Class c is behind while (s_y - s_c) + balance (f_y - f_c) > 0. Empty intervals come out with
    first >= last.
    """
    rows = np.arange(len(codes))
    ahead = scores[rows, codes][:, None] - scores
    slope = answers[rows, codes][:, None] - answers
    ahead[rows, codes] = 1.0
    slope[rows, codes] = 0.0
    crossing = np.divide(-ahead, slope, out=np.zeros_like(ahead), where=slope != 0)
    first = np.where(slope > 0, crossing, np.where((slope == 0) & (ahead <= 0), np.inf, -np.inf))
    last = np.where(slope < 0, crossing, np.inf)
    return np.maximum(first.max(axis=1), 0.0), last.min(axis=1)


def _fewest_mistakes(first: Array, last: Array, weights: Array, near: float) -> float:
    """The balance nearest to `near` whose weight of mistakes is within the tolerance of the least."""
    possible = (first < last) & (first < LARGEST) & (weights > 0)
    ends = np.unique(np.clip(np.concatenate([first[possible], last[possible], [0.0, LARGEST]]), 0, LARGEST))
    # Between two neighbouring ends nothing changes, so one point of each gap stands for it.
    points = (ends[1:] + ends[:-1]) / 2.0
    begun = _weight_below(first[possible], weights[possible], points)
    over = _weight_below(last[possible], weights[possible], points)
    right = begun - over
    mean = float(np.mean(weights[weights > 0])) if np.any(weights > 0) else 1.0
    mistakes = (float(np.sum(weights)) - right) / mean
    fewest = float(mistakes.min())
    good = mistakes <= fewest + _TOLERANCE * np.sqrt(fewest + 1.0)
    # The nearest good gap: `near` itself if it lies in it, else its middle, away from where a row flips.
    inside = np.clip(near, ends[:-1], ends[1:])
    gap = int(np.argmin(np.where(good, np.abs(inside - near), np.inf)))
    return near if inside[gap] == near else float(points[gap])


def _weight_below(values: Array, weights: Array, points: Array) -> Array:
    order = np.argsort(values, kind="stable")
    summed = np.concatenate([[0.0], np.cumsum(weights[order])])
    return np.asarray(summed[np.searchsorted(values[order], points, side="left")])
