"""The figures of an evaluation: ROC, calibration, probabilities by class, importance of columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedsolve.experiments.figures.style import INK, SERIES, SOFT, blank, series_style, styled
from fedsolve.federation.importance import Importance
from fedsolve.federation.quality import Evaluation
from fedsolve.histograms import REACH, wilson

SHOWN_CURVES = 5
SHOWN_COLUMNS = 20
_SIDE = 3.9
_SHOWN_LOGITS = 9.0


def roc(found: Evaluation) -> Figure:
    """True against false positives: of two classes, of the second; of more, the classes that fare worst."""
    names = found.classes.tolist()
    order = [1] if len(names) == 2 else np.argsort(np.nan_to_num(found.class_aucs, nan=2.0)).tolist()

    def draw() -> Figure:
        figure = blank(_SIDE, _SIDE)
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=0.9, linestyle=(0, (3, 3)))
        for look, place in enumerate(order[:SHOWN_CURVES]):
            false, true = found.roc(names[place])
            auc = found.auc if len(names) == 2 else found.class_aucs[place]
            style = series_style(look) | {"marker": ""}
            axes.plot(false, true, label=f"{_short(names[place])}: {auc:.4f}", **style)
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        axes.set_aspect("equal")
        axes.grid(True, axis="both")
        axes.legend(loc="lower right", title="AUC", title_fontsize=9, fontsize=9, borderaxespad=0.8)
        return figure

    return styled(draw)


def calibration(found: Evaluation) -> Figure:
    """What came true against what was told, with the number of rows below."""
    table = found.calibration_table
    told = [row["told"] for row in table]
    true = np.array([row["true"] for row in table])
    rows = np.array([row["rows"] for row in table])
    low, high = wilson(np.array([row["true"] * row["rows"] for row in table]), rows)

    def draw() -> Figure:
        figure = blank(_SIDE, _SIDE)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        above.plot([0, 1], [0, 1], color=SOFT, linewidth=0.9, linestyle=(0, (3, 3)))
        bars = np.maximum([true - low, high - true], 0)
        above.errorbar(told, true, bars, color=SERIES[0], marker="o", linestyle="", elinewidth=1.1)
        above.set_ylabel("came true")
        above.set_ylim(-0.04, 1.04)
        middles = [(row["from"] + row["to"]) / 2 for row in table]
        below.bar(middles, rows, width=0.055, color=SERIES[5])
        below.set_ylabel("rows")
        below.set_xlabel("probability told")
        below.set_xlim(-0.02, 1.02)
        return figure

    return styled(draw)


def spread(found: Evaluation) -> Figure:
    """Rows of both classes by the logit of the second's probability; of two classes only."""
    histogram = found.sums["histogram"][0]
    fine = 2 * REACH / (histogram.shape[1] - 2)
    logits = -REACH + fine * (np.arange(histogram.shape[1]) - 0.5)
    # All that is further out is shown at the ends.
    edges = np.linspace(-_SHOWN_LOGITS, _SHOWN_LOGITS, 37)
    inside = np.clip(logits, edges[0], edges[-1])
    inner = np.stack([np.histogram(inside, edges, weights=rows)[0] for rows in histogram])
    middles = (edges[:-1] + edges[1:]) / 2
    shares = inner / np.maximum(1, inner.sum(axis=1, keepdims=True))

    def draw() -> Figure:
        figure = blank(_SIDE, 3.2)
        axes = figure.subplots()
        for place, name in enumerate(found.classes.tolist()):
            axes.step(
                middles,
                100 * shares[place],
                where="mid",
                label=_short(name),
                color=SERIES[place],
                linestyle=("-", (0, (5, 2)))[place],
            )
        ticks = np.array([0.001, 0.03, 0.5, 0.97, 0.999])
        axes.set_xticks(np.log(ticks / (1 - ticks)), [f"{tick:g}" for tick in ticks])
        axes.set_xlim(-_SHOWN_LOGITS, _SHOWN_LOGITS)
        axes.set_xlabel(f"probability of {_short(found.classes[1].item())}")
        axes.set_ylabel("% of the class")
        figure.legend(title="true class", title_fontsize=9, fontsize=9, loc="outside upper left", ncols=2)
        return figure

    return styled(draw)


def importance(found: Sequence[Importance]) -> Figure:
    """Rise of the log loss without each of the most important columns."""
    shown = list(found[:SHOWN_COLUMNS])[::-1]

    def draw() -> Figure:
        figure = blank(_SIDE, 0.9 + 0.2 * len(shown))
        axes = figure.subplots()
        axes.barh(
            [_short(one.column) for one in shown],
            [one.loss for one in shown],
            xerr=[1.96 * one.error for one in shown],
            color=SERIES[0],
            height=0.62,
            error_kw={"ecolor": INK, "elinewidth": 0.9},
        )
        axes.axvline(0.0, color=SOFT, linewidth=0.9)
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", labelsize=8)
        axes.set_xlabel("rise of the log loss")
        return figure

    return styled(draw)


def _short(name: object) -> str:
    text = str(name).replace("$", "\\$")  # not mathematics
    return text if len(text) <= 24 else f"{text[:23]}…"
