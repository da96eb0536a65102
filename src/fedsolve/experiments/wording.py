"""How coordinates and numbers are written for people, in Markdown and in LaTeX."""

from __future__ import annotations

import math
from typing import Any

METRIC_NAMES = {
    "test": "test accuracy (%)",
    "train": "training accuracy (%)",
    "seconds": "seconds",
    "exchanges": "exchanges",
    "megabytes_up": "MB up",
    "megabytes_down": "MB down",
    "risk": "risk",
    "train_csr": "training CSR",
    "test_csr": "test CSR",
    "train_ifs": "training IFS",
    "test_ifs": "test IFS",
    "train_dm": "training DM",
    "test_dm": "test DM",
    "deviation": "deviation",
    "drift": "drift H",
    "best_round": "best round (%)",
    "tail_rounds": "last tenth of the rounds (%)",
    "intra": "distance within classes",
    "inter": "distance between classes",
    "ratio": "between / within classes",
    "selected": "share of the choices (%)",
    "relative_seconds": "seconds, baseline = 1",
    "worst_decile": "accuracy of the worst tenth of the clients (%)",
    "gain_shared": "gain over the shared model (points)",
    "gain_alone": "gain over each client alone (points)",
}

_SIGNS = {
    "depth": "T",
    "clients": "K",
    "ridge": "λ",
    "residual_ridge": "γ",
    "regulariser": "γ",
    "width": "d",
    "hidden_width": "d_F",
    "reconstruction": "1 - ρ",
    "refinement_ridge": "β",
    "refinement_width": "d_R",
}
"""The papers' signs, where they have one."""

_SHARES = {"noise": "τ", "participation": "η"}
_WORDS = {
    "consistent": {True: "consistent", False: "inconsistent"},
    "remove": {True: "removed (RI)", False: "left in"},
}
_PLAIN = (
    "dataset",
    "backbone",
    "partition",
    "stage",
    "network",
    "feedback",
    "activation",
    "zero_activation",
    "refinement_activation",
)
_PERCENT = (
    "test",
    "train",
    "worst_decile",
    "gain_shared",
    "gain_alone",
    "best_round",
    "tail_rounds",
    "selected",
)
_NAMES = {"remove": "regulariser", "noise": "flipped labels", "regulariser": "regulariser"}
_MORE_DECIMALS = 3
_COUNTS = ("exchanges", "megabytes_up", "megabytes_down")


def axis_name(axis: str) -> str:
    """What an axis is called at the head of a table."""
    return _NAMES.get(axis, axis.replace("_", " "))


def axis_label(axis: str, value: Any) -> str:
    """A value along an axis; empty where a model has none."""
    if axis == "method":
        name, depth = value if isinstance(value, tuple) else (value, None)
        return str(name) if depth is None else f"{name} ({axis_label('depth', depth)})"
    if value is None:
        return ""
    if axis == "metric":
        return METRIC_NAMES[value]
    if axis in _WORDS:
        return _WORDS[axis][value]
    if axis in _SHARES:
        return f"{_SHARES[axis]} = {100 * value:g} %"
    told = f"{value:g}" if isinstance(value, float) else str(value)
    return told if axis in _PLAIN else f"{_SIGNS.get(axis, axis.replace('_', ' '))} = {told}"


def number(metric: str, value: float | None, error: float | None = None, printed: bool = False) -> str:
    """A value and its error with the digits that mean something, the same for both.

    An error is never rounded away: the value gets more decimals, or the error an exponent where it is tiny.
    printed: a paper's number, which keeps the digits it has.
    """
    if value is None:
        return "–"
    if printed and metric not in (*_PERCENT, "deviation"):
        return f"{value:g}" + ("" if error is None else f" ± {error:g}")
    if metric == "deviation":
        return f"{value:.2e}" + ("" if error is None else f" ± {error:.1e}")
    if metric in _COUNTS and error is not None and error <= 1e-9 * abs(value):
        # Traffic is the same for every seed; an error of zero would only be noise to read.
        error = None
    decimals = 2
    if metric not in _PERCENT and value != 0:
        digits = 3 if metric in (*_COUNTS, "seconds", "relative_seconds") else 4
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    if metric in _COUNTS and value == round(value):
        decimals = 0
    if metric not in _PERCENT and error and round(error, decimals) == 0:
        needed = -math.floor(math.log10(error))
        if needed > decimals + _MORE_DECIMALS:
            return f"{value:.{decimals}f} ± {error:.0e}"
        decimals = needed
    return f"{value:.{decimals}f}" + ("" if error is None else f" ± {error:.{decimals}f}")
