"""The figures that the cells of a run can give, each described by data (`pages.plots` draws them)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve import container
from fedsolve.arrays import Array
from fedsolve.experiments.charts import MOST_SERIES, chart_plots
from fedsolve.experiments.metrics import axis_label
from fedsolve.experiments.observations import by_dataset, distinct, scored
from fedsolve.experiments.run_charts import SETTINGS, curves, method_plots, sensitivity_plots
from fedsolve.experiments.run_folder import RunFolder, load_run
from fedsolve.pages.plots import Axis, Format, Panel, Plot, Series, render
from fedsolve.pages.words import short
from fedsolve.scoring.client_scores import ClientScores

MOST_PARTITIONS, MOST_DOTS = 6, 40
GAINS = {"shared": "over the shared model", "alone": "over its own rows alone"}
"""What a client's accuracy is compared with."""


def write_figures(runs: Sequence[Path], folder: Path, form: Format = "png") -> list[Path]:
    """Draw every figure of these runs into `folder` and give the files, RUN-DATASET-FIGURE.FORM."""
    written = []
    for run in map(load_run, runs):
        for dataset, drawn in plots(run).items():
            for plot in drawn:
                path = folder / f"{slug(f'{run.name}-{dataset}-{plot.name}')}.{form}"
                container.write_atomically(path, render(plot.figure, form))
                written.append(path)
    return written


def plots(run: RunFolder) -> dict[str, list[Plot]]:
    """The figures that each dataset of a run can have."""
    figures = {}
    for dataset, cells in by_dataset(run).items():
        drawn = list(_owners(run, cells[0]["dataset"]["name"]))
        if items := scored(cells):
            over = [plot for chart in SETTINGS for plot in chart_plots(chart, items)]
            drawn += over
            # Where partitions differ, lines over them show the methods already.
            if not {plot.name for plot in over} - {"noise"}:
                drawn += method_plots(items)
            drawn += sensitivity_plots(items)
            drawn += [plot for chart in curves(items) for plot in chart_plots(chart, items)]
            drawn += gain_plots(cells)
        figures[dataset] = drawn
    return figures


def slug(text: str) -> str:
    """The text as a name for files and addresses."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"


def gain_plots(cells: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """What each client gains by a personal model, for every partition and the first seed.

    Of several personalised methods, or values of a grid, the last is shown where all would be too many.
    """

    def name(cell: Mapping[str, Any]) -> str:
        return ", ".join([cell["method"], *(axis_label(key, value) for key, value in cell["grid"].items())])

    found = []
    for kind, words in GAINS.items():
        local = [cell for cell in cells if kind in (cell.get("local") or {})]
        seen = [cell for cell in local if any(balance != 0 for balance in cell["local"]["balances"])]
        seen = [cell for cell in seen if cell["seed"] == seen[0]["seed"]]
        if len(seen) > MOST_SERIES:
            seen = [cell for cell in seen if name(cell) == name(seen[-1])][:MOST_SERIES]
        if seen:
            gains = {f"{name(c)}, {c['partition']['name']}": client_gains(c["local"], kind) for c in seen}
            title = f"What each client gains {words}."
            found.append(gain_plot(f"gains-{kind}", title, gains))
    return found


def gain_plot(name: str, title: str, gains: Mapping[str, Array]) -> Plot:
    """Clients in order of what they gain: a line for every comparison.

    gains: by name, of each client in points; NaN where a client has no test rows.
    """
    series, phrases = [], []
    for look, (label, values) in enumerate(gains.items()):
        known = np.sort(np.asarray(values)[~np.isnan(values)])
        places = 100 * (np.arange(len(known)) + 0.5) / max(1, len(known))
        series.append(Series(label, look, tuple(places.tolist()), tuple(known.tolist())))
        worse = 100 * float(np.mean(known < 0)) if len(known) else 0.0
        phrases.append(f"{label}: mean {np.mean(known):+.1f} points, worse for {worse:.0f} % of the clients")
    axes = Axis("clients, those that gain least first (%)"), Axis("gain in local accuracy (points)")
    caption = "Local test accuracy, clients sorted by gain; one seed shown."
    return Plot(name, title, caption, f"{'; '.join(phrases)}.", [Panel(series, *axes, reference="zero")])


def client_gains(local: Mapping[str, Any], kind: str) -> Array:
    """What each client's own model gains over another, in points; NaN where it has no test rows."""
    own, other = (
        ClientScores((), np.array(local[name]), np.array(local["rows"])) for name in ("correct", kind)
    )
    return 100 * own.gains(other)


def owners_panel(name: str, counts: Array, classes: Sequence[str] = ()) -> Panel:
    """Who owns which class: at most as many clients and classes as can be told apart, evenly spaced.

    counts: (clients, classes) rows owned.
    """
    kept = [np.linspace(0, many - 1, min(many, MOST_DOTS)).round().astype(int) for many in counts.shape]
    remarks = [
        f"{len(some)} of {many:,} {what}"
        for some, many, what in zip(kept, counts.shape, ("clients", "classes"), strict=True)
        if len(some) < many
    ]
    title = name + (f" ({', '.join(remarks)})" if remarks else "")
    clients, labels = kept
    places, few = range(1, len(clients) + 1), len(labels) <= 12
    ticked = distinct([1, *(place for place in places if len(clients) <= 10 or place % 5 == 0)])
    ticks = [(place - 1.0, str(clients[place - 1] + 1)) for place in ticked]
    told = [short(label, 14) for label in classes] if classes and few else [*map(str, labels)]
    names = tuple((float(at), told[at]) for at in range(0, len(told), 1 if few else len(told) // 10))
    axes = Axis("client", named=tuple(ticks)), Axis("class", named=names)
    return Panel((), *axes, title, "dots", table=counts[np.ix_(*kept)].T)


def _owners(run: RunFolder, dataset: str) -> Iterator[Plot]:
    """Who owns which class, unless all shares are even."""
    dealt = run.dealt(dataset)
    tables = [table for table in dealt if len(table["class_counts"]) > 1][:MOST_PARTITIONS]
    if not tables or all(table["kind"] == "iid" for table in dealt):
        return
    phrases, panels = [], []
    for table in tables:
        counts = np.asarray(table["class_counts"])
        held = float((counts > 0).sum(axis=1).mean())
        phrases.append(f"{table['name']}: {held:.1f} of {counts.shape[1]} classes")
        panels.append(owners_panel(table["name"], counts, list(map(str, table["classes"]))))
    yield Plot(
        "partition",
        "Who owns which class.",
        "A dot for every client and class, its area the number of rows; one seed shown.",
        f"Classes that a client holds on average: {'; '.join(phrases)}.",
        panels,
    )
