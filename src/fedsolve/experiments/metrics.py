"""Every metric in one table: what it is called, its unit and direction, how it is written.

Also the labels of axes, their values and parameters.

Tables, figures, findings, the report and the terminal look here, so that a new metric is one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["hundredths", "count", "time", "power", "number"]
"""Two decimals; three digits, whole numbers as such; three digits; as a power of ten; four digits."""

_DIGITS = {"count": 3, "time": 3, "number": 4}
_MORE_DECIMALS = 3
_FACTORS = {"%": 100.0, "points": 100.0, "MB": 1e-6}
"""Cells hold shares of one, and bytes."""

Read = Callable[[Mapping[str, Any], int | None], Any]
"""Reads a value of a cell after a number of layers (None without layers); None if not measured."""


@dataclass(frozen=True)
class Metric:
    """What a table can show of a cell."""

    key: str  # its name in experiment files and in the papers' tables
    label: str  # what heads a column and stands along an axis, with the unit
    unit: str  # what stands behind the number in a sentence
    better: Literal["up", "down"] | None  # None where neither more nor less is better
    form: Form
    read: Read | None = None  # where a cell keeps it; among its `measures` under the same name unless given
    ranked: bool = False  # whether the report marks the best one in bold

    def of(self, cell: Mapping[str, Any], depth: int | None) -> float | None:
        """The value of a cell after `depth` layers; None where it was not measured."""
        value = cell["measures"].get(self.key) if self.read is None else self.read(cell, depth)
        return None if value is None else value * _FACTORS.get(self.unit, 1.0)

    def number(self, value: float | None, error: float | None = None, printed: bool = False) -> str:
        """A value and its error with the digits that mean something, the same for both.

        An error is never rounded away: the value gets more decimals, or the error an exponent where it is
        tiny. printed: a paper's number, which keeps the digits it has.
        """
        if value is None:
            return "–"
        if self.form == "power":
            return f"{value:.2e}" + ("" if error is None else f" ± {error:.1e}")
        if printed and self.form != "hundredths":
            return f"{value:g}" + ("" if error is None else f" ± {error:g}")
        if self.form == "count" and error is not None and error <= 1e-9 * abs(value):
            # Traffic is the same for every seed; an error of zero would only be noise to read.
            error = None
        decimals = 2
        if self.form in _DIGITS and value != 0:
            decimals = max(0, _DIGITS[self.form] - 1 - math.floor(math.log10(abs(value))))
        if self.form == "count" and value == round(value):
            decimals = 0
        if self.form in _DIGITS and error and round(error, decimals) == 0:
            needed = -math.floor(math.log10(error))
            if needed > decimals + _MORE_DECIMALS:
                return f"{value:.{decimals}f} ± {error:.0e}"
            decimals = needed
        return f"{value:.{decimals}f}" + ("" if error is None else f" ± {error:.{decimals}f}")


def per_layer(name: str) -> Read:
    """Reads `name` of a cell, or its value after a layer."""

    def read(cell: Mapping[str, Any], depth: int | None) -> Any:
        if depth is None:
            return cell[name]
        layers = cell[f"{name}_per_layer"]
        return layers[depth] if layers else None

    return read


def _traffic(cell: Mapping[str, Any], depth: int | None) -> Any:
    ways = [per_layer(name)(cell, depth) for name in ("bytes_up", "bytes_down")]
    return None if None in ways else sum(ways)


def _separability(part: str, ratio: str) -> Read:
    def read(cell: Mapping[str, Any], depth: int | None) -> Any:
        layers = (cell["separability"] or {}).get(part)
        return layers[depth][ratio] if layers else None

    return read


_METRICS = (
    Metric("test", "test accuracy (%)", "%", "up", "hundredths", per_layer("accuracy"), True),
    Metric("train", "training accuracy (%)", "%", "up", "hundredths", per_layer("train_accuracy"), True),
    Metric("seconds", "seconds", "s", "down", "time", per_layer("seconds")),
    Metric("relative_seconds", "seconds, baseline = 1", "", "down", "time"),
    Metric("exchanges", "exchanges", "", "down", "count", per_layer("exchanges")),
    Metric("megabytes", "MB", "MB", "down", "count", _traffic),
    Metric("megabytes_up", "MB up", "MB", "down", "count", per_layer("bytes_up")),
    Metric("megabytes_down", "MB down", "MB", "down", "count", per_layer("bytes_down")),
    Metric(
        "risk", "risk", "", "down", "number", lambda cell, t: cell["risk"][t or 0] if cell["risk"] else None
    ),
    *(
        Metric(f"{part}_{ratio}", f"{rows} {ratio.upper()}", "", "down", "number", _separability(part, ratio))
        for part, rows in (("train", "training"), ("test", "test"))
        for ratio in ("csr", "ifs", "dm")
    ),
    Metric("deviation", "deviation", "", "down", "power"),
    Metric("drift", "drift H", "", "down", "number"),
    Metric("best_round", "best round (%)", "%", "up", "hundredths"),
    Metric("tail_rounds", "last tenth of the rounds (%)", "%", "up", "hundredths"),
    Metric("intra", "distance within classes", "", "down", "number"),
    Metric("inter", "distance between classes", "", "up", "number"),
    Metric("ratio", "between / within classes", "", "up", "number"),
    Metric("selected", "share of the choices (%)", "%", None, "hundredths"),
    Metric("worst_decile", "accuracy of the worst tenth of the clients (%)", "%", "up", "hundredths"),
    Metric("gain_shared", "gain over the shared model (points)", "points", "up", "hundredths"),
    Metric("gain_alone", "gain over each client alone (points)", "points", "up", "hundredths"),
)
METRICS = {metric.key: metric for metric in _METRICS}


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
_PLAIN = frozenset({"dataset", "backbone", "partition", "stage", "network", "feedback"})
_PLAIN |= {"activation", "zero_activation", "refinement_activation"}
_NAMES = {"remove": "regulariser", "noise": "flipped labels"}


def axis_name(axis: str) -> str:
    """The name of an axis in the head of a table."""
    return _NAMES.get(axis, axis.replace("_", " "))


def axis_label(axis: str, value: Any) -> str:
    """A value along an axis; empty where a model has none."""
    if axis == "method":
        name, depth = value if isinstance(value, tuple) else (value, None)
        return str(name) if depth is None else f"{name} ({axis_label('depth', depth)})"
    if value is None:
        return ""
    if axis == "metric":
        return METRICS[value].label
    if axis in _WORDS:
        return _WORDS[axis][value]
    if axis in _SHARES:
        return f"{_SHARES[axis]} = {100 * value:g} %"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if axis in _PLAIN else f"{_SIGNS.get(axis, axis.replace('_', ' '))} = {text}"


def spoken(parameter: str) -> str:
    """A parameter's name as an axis shows it: in words, with the papers' sign where there is one."""
    words = parameter.replace("_", " ")
    sign, equals, _ = axis_label(parameter, 0).partition(" = ")
    return f"{words} {sign}" if equals and sign != words else words


def tell(parameter: str, value: Any) -> str:
    """A parameter's value without its name."""
    label = axis_label(parameter, value)
    return label.partition(" = ")[2] or label
