"""Who owns which class beside what came of it: the two halves of the demo's figure."""

from __future__ import annotations

from matplotlib.figure import Figure

from fedsolve.container import Array
from fedsolve.experiments.figures.lines import Panel, draw_lines
from fedsolve.experiments.figures.maps import Ownership, draw_owners
from fedsolve.experiments.figures.style import blank, legend_above, styled


def overview(title: str, counts: Array, panel: Panel) -> Figure:
    """counts: rows that each client owns of each class (clients, classes), under `title`."""

    def draw() -> Figure:
        figure = blank(10.5, 4.4)
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
        draw_owners(left, Ownership(title, counts))
        left.set_xlabel("client")
        left.set_ylabel("class")
        draw_lines(right, panel)
        legend_above(figure, [right], panel.series)
        return figure

    return styled(draw)
