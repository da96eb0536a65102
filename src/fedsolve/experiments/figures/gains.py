"""What personalising gains each client: sorted gains over the shared model and over being alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedsolve.container import Array
from fedsolve.experiments.figures.lines import Series
from fedsolve.experiments.figures.plots import MOST_SERIES, Plot
from fedsolve.experiments.figures.style import SOFT, blank, legend_above, series_style, styled
from fedsolve.experiments.wording import axis_label
from fedsolve.federation.local_scores import LocalScores

OVER = {"shared": "over the shared model", "alone": "over its own rows alone"}
"""What a client's accuracy is compared with."""


def sorted_gains(gains: Mapping[str, Array], label: str = "gain in local accuracy (points)") -> Figure:
    """A line for every comparison: the clients in order of what they gain, against a level line at zero.

    gains: by name, of each client in points; NaN where a client has no test rows.
    """
    series: list[Series] = []
    for name, values in gains.items():
        ordered = np.sort(np.asarray(values)[~np.isnan(values)])
        places = (np.arange(len(ordered)) + 0.5) / max(1, len(ordered))
        look = len(series)
        series.append(Series(name, look, tuple((100 * places).tolist()), tuple(ordered.tolist())))

    def draw() -> Figure:
        figure = blank()
        axes = figure.subplots()
        axes.axhline(0.0, color=SOFT, linewidth=1.0)
        for line in series:
            every = max(1, len(line.x) // 10)
            style = series_style(line.look) | {"markevery": (line.look % every, every)}
            axes.plot(line.x, line.y, label=line.name, **style)
        axes.set_xlabel("clients, those that gain least first (%)")
        axes.set_ylabel(label)
        axes.margins(x=0.02)
        legend_above(figure, [axes], series)
        return figure

    return styled(draw)


def gain_plots(cells: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Sorted gains under every partition, of the first seed.

    Of several personalised methods, or values of a grid, the last is shown where all would be too many.
    """
    plots = []
    for kind, words in OVER.items():
        shown = [
            cell
            for cell in cells
            if kind in (cell.get("local") or {})
            and any(balance != 0 for balance in cell["local"]["balances"])
        ]
        shown = [cell for cell in shown if cell["seed"] == shown[0]["seed"]]
        if len(shown) > MOST_SERIES:
            last = _name(shown[-1])
            shown = [cell for cell in shown if _name(cell) == last]
        gains = {
            f"{_name(cell)}, {cell['partition']['name']}": 100 * client_gains(cell["local"], kind)
            for cell in shown[:MOST_SERIES]
        }
        if gains:
            summary = "; ".join(_summary(name, values) for name, values in gains.items())
            plots.append(
                Plot(
                    f"gains-{kind}",
                    f"What each client gains {words}.",
                    "Local test accuracy, clients sorted by gain; one seed shown.",
                    f"{summary}.",
                    sorted_gains(gains),
                )
            )
    return plots


def _name(cell: Mapping[str, Any]) -> str:
    """The method and its point of the grid."""
    return ", ".join([cell["method"], *(axis_label(name, value) for name, value in cell["grid"].items())])


def client_gains(local: Mapping[str, Any], kind: str) -> Array:
    """What each client's own model gains over another; NaN where a client has no test rows."""
    own, other = (
        LocalScores((), np.array(local[name]), np.array(local["rows"])) for name in ("correct", kind)
    )
    return own.gains(other)


def _summary(name: str, gains: Array) -> str:
    known = gains[~np.isnan(gains)]
    worse = float(np.mean(known < 0)) if len(known) else 0.0
    return f"{name}: mean {np.mean(known):+.1f} points, worse for {100 * worse:.0f} % of the clients"
