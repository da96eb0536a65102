"""An evaluation as tables for terminal and page, and as an HTML page with figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.calibration import REACH
from fedsolve.pages.templates import render
from fedsolve.pages.words import percent, short
from fedsolve.scoring.evaluation import Found
from fedsolve.scoring.groups import Grouped, measures_of
from fedsolve.scoring.importance import Importance, LabelsImportance
from fedsolve.scoring.quality import Confusion, Evaluation, LabelsEvaluation, Threshold, wilson
from fedsolve.scoring.residuals import FEWEST, RegressionEvaluation

if TYPE_CHECKING:
    from fedsolve.pages.plots import Plot

_NAMES = {
    "accuracy": ("accuracy", "accuracy"),
    "balanced_accuracy": ("balanced accuracy", ""),
    "auc": ("AUC", "AUC"),
    "log_loss": ("log loss", ""),
    "brier": ("Brier score", ""),
    "ece": ("calibration error (ECE)", "ECE"),
    "r2": ("R²", "R²"),
    "mae": ("mean absolute error", "MAE"),
    "rmse": ("root mean squared error", "RMSE"),
    "bias": ("mean residual", ""),
    "false_positive_rate": ("", "false positives"),
    "false_negative_rate": ("", "false negatives"),
    "observed_share": ("", "predicted : observed"),
}
_SHORT = {name: of_group for name, (_, of_group) in _NAMES.items() if of_group}
SHOWN_CLASSES, SHOWN_CURVES, SHOWN_COLUMNS = 20, 5, 20
_SHOWN_LOGITS = 9.0
_SHOWN_PROBABILITIES = tuple(
    (float(np.log(p / (1 - p))), f"{p:g}") for p in (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
)
_IMPORTANCE = "Columns by importance: what is lost when a column is replaced by draws from all its values."


@dataclass(frozen=True)
class TextTable:
    """A table with a sentence over it; all columns but `left` are flush right.

    fold: words under which a page folds it away. shares: how dark a page shows the cells after the first.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[int] = (0,)
    fold: str = ""
    shares: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class EvaluationReport:
    """What is shown of an evaluation: its measures, thresholds, importances and groups where asked for.

    limits: the threshold of two classes under no name, or that of each of several labels a row.
    """

    found: Found
    important: Sequence[Importance] | None = None
    groups: Grouped | None = None
    limits: Mapping[str, Threshold] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The first line in a terminal."""
        found = self.found
        if isinstance(found, RegressionEvaluation):
            return f"[bold]R² {found.r2:.4f}[/bold]  ({found.rows:,} rows, RMSE {found.rmse:.6g})"
        if isinstance(found, LabelsEvaluation):
            right = f"{percent(found.exact)} with every label right, mean AUC {found.auc:.4f}"
            return f"[bold]accuracy {percent(found.accuracy)}[/bold]  ({found.rows:,} rows, {right})"
        confusion = Confusion(found.classes, found.confusion)
        counts = f"{confusion.rows:,} rows, {confusion.rows - confusion.correct:,} wrong"
        counts += f", macro F1 {confusion.as_dict()['macro_f1']:.4f}"
        return f"[bold]accuracy {percent(found.accuracy)}[/bold]  ({counts})"

    @property
    def lede(self) -> str:
        """The first sentence of the page."""
        found = self.found
        if isinstance(found, RegressionEvaluation):
            low, high = found.intervals["r2"]
            return (
                f"R² {found.r2:.4f} ({low:.4f} to {high:.4f}) on {found.rows:,} rows; mean absolute error "
                f"{found.mae:.4g}, root mean squared error {found.rmse:.4g}."
            )
        uncalibrated = "" if found.calibrated else " Its probabilities are not calibrated."
        if isinstance(found, LabelsEvaluation):
            return (
                f"Right in {percent(found.accuracy)} of {len(found.labels)} labels of {found.rows:,} rows, "
                f"in all labels of {percent(found.exact)} of them; mean AUC {found.auc:.4f}.{uncalibrated}"
            )
        low, high = found.intervals["accuracy"]
        return (
            f"Right in {percent(found.accuracy)} of {found.rows:,} rows ({percent(low)} to "
            f"{percent(high)}); AUC {found.auc:.4f}, calibration error {percent(found.ece)}."
            f"{uncalibrated}"
        )

    @property
    def _labels(self) -> dict[str, Evaluation]:
        """Of several labels a row, the evaluation of each, with classes that can be read."""
        each = self.found.by_label if isinstance(self.found, LabelsEvaluation) else {}
        return {name: replace(one, classes=np.array([f"no {name}", name])) for name, one in each.items()}

    def tables(self) -> dict[str, TextTable]:
        """All tables by name, in order."""
        if isinstance(self.found, RegressionEvaluation):
            tables = error_tables(self.found)
        elif isinstance(self.found, LabelsEvaluation):
            tables = label_tables(self.found, self.limits)
        else:
            tables = evaluation_tables(self.found, self.limits.get(""))
        for label, important in _important(self.important or ()).items():
            tables[f"importance {label}".strip()] = _importance_table(important, self.found, label)
        for label, groups in {} if self.groups is None else self.groups.by_label().items():
            tables[f"groups {label}".strip()] = group_table(groups, label)
        return tables

    def details(self) -> list[TextTable]:
        """The tables of each label by itself, for a page."""
        return [
            replace(one, fold=f"{label}: {one.fold or name}")
            for label, found in self._labels.items()
            for name, one in evaluation_tables(found, self.limits.get(label)).items()
        ]

    def plots(self) -> Iterator[Plot]:
        """All figures."""
        found = self.found
        if isinstance(found, RegressionEvaluation):
            yield from _error_plots(found)
        elif not isinstance(found, LabelsEvaluation):
            yield from _plots(found)
        for place, (label, one) in enumerate(self._labels.items()):
            yield from (_of_label(plot, label, place) for plot in _plots(one))
        for place, (label, important) in enumerate(_important(self.important or ()).items()):
            yield _of_label(_importance_plot(important, found), label, place)
        labels = {} if self.groups is None else self.groups.by_label()
        for place, (label, groups) in enumerate(labels.items()):
            yield _of_label(_group_plot(groups), label, place)


def _important(found: Sequence[Importance]) -> dict[str, Sequence[Importance]]:
    """All importances under no name, and those of each label under its own, the most important first."""
    labels = [one.labels for one in found if isinstance(one, LabelsImportance)]
    named = {name: [each[name] for each in labels] for name in (labels[0] if labels else ())}
    of_label = {name: sorted(each, key=lambda one: -one.loss) for name, each in named.items()}
    return {"": found, **of_label} if found else {}


def _of_label(plot: Plot, label: str, place: int) -> Plot:
    """A figure of one label, called after it."""
    title, name = f"{plot.title}: {_name(label)}", f"{plot.name}-{place}"
    return replace(plot, name=name, title=title) if label else plot


def _importance_table(important: Sequence[Importance], found: Found, label: str = "") -> TextTable:
    numbers = isinstance(found, RegressionEvaluation)
    heads = ("squared error", "absolute error") if numbers else ("log loss", "accuracy")
    rows = [
        (
            one.column,
            f"{one.loss:+.4f} ± {1.96 * one.error:.4f}",
            f"{one.accuracy:+.4f}" if numbers else f"{-100 * one.accuracy:+.2f} points",
        )
        for one in important[:SHOWN_COLUMNS]
    ]
    fold = f"The numbers of the importance figure: {label}".removesuffix(": ")
    return TextTable(f"{label}: {_IMPORTANCE}" if label else _IMPORTANCE, ("column", *heads), rows, fold=fold)


def label_tables(found: LabelsEvaluation, limits: Mapping[str, Threshold]) -> dict[str, TextTable]:
    """Share, accuracy and AUC of every label, and what is reached where thresholds were chosen."""
    rows = []
    for name, one in found.by_label.items():
        right = " to ".join(map(percent, one.intervals["accuracy"]))
        area = " to ".join(map("{:.4f}".format, one.intervals["auc"]))
        share = percent(one.confusion[1].sum() / max(1, one.rows))
        rows.append((name, share, percent(one.accuracy), right, f"{one.auc:.4f}", area))
    heads = ("label", "share", "accuracy", "95 % interval", "AUC", "95 % interval")
    tables = {"measures": TextTable("", heads, rows)}
    if limits:
        at = [
            (name, f"{one.probability:.4f}", percent(one.sensitivity), percent(one.specificity))
            for name, one in limits.items()
        ]
        called = ("label", "called from", "sensitivity", "specificity")
        tables["thresholds"] = TextTable("Thresholds that were chosen on rows held out.", called, at)
    return tables


def error_tables(found: RegressionEvaluation) -> dict[str, TextTable]:
    """Measures of a regression, and its residuals by the prediction."""
    tables = {"measures": _measures(found)}
    if found.residuals:
        cells = ("{from:.6g} to {to:.6g}", "{rows:,}", "{mean:+.4g}", "{deviation:.4g}")
        lines = [[cell.format(**one) for cell in cells] for one in found.residuals]
        heads = ("prediction", "rows", "mean", "deviation")
        title = "Residuals (truth less prediction) by the prediction, in bins of at least ten rows."
        tables["residuals"] = TextTable(title, heads, lines, fold="The numbers of the residual figure")
    return tables


def group_table(groups: Grouped, label: str = "") -> TextTable:
    """A line for every group, each measure with its interval."""
    first = next(iter(groups.found.values()))
    numbers = isinstance(first, RegressionEvaluation)
    names = {name: shown for name, shown in _SHORT.items() if name in measures_of(first)[1]}
    rows = []
    for group, one in groups.found.items():
        values, pairs = measures_of(one)
        cells = [group, f"{one.rows:,}"]
        for name in names:
            text = "{:.3g}".format if numbers else "{:.2f}".format
            value, low, high = (text(number) for number in (values[name], *pairs[name]))
            cells.append("-" if np.isnan(values[name]) else f"{value} ({low}–{high})")
        if "observed_share" in names:
            cells[-1] = f"{values['predicted_share']:.2f} : {cells[-1]}"
        rows.append(tuple(cells))
    title = f"{label}: by" if label else "By"
    title += f" {groups.by}, with 95 % intervals."
    if groups.joined:
        few = ", ".join(short(value, 22) for value in groups.joined[:6]) + ", ..." * (len(groups.joined) > 6)
        title += f" Groups of fewer than {FEWEST} rows are put together: {few}."
    return TextTable(title, (groups.by, "rows", *names.values()), rows)


def evaluation_tables(found: Evaluation, limit: Threshold | None = None) -> dict[str, TextTable]:
    """Measures, classes, confusion (or the most frequent mistakes) and calibration, in order."""
    confusion = Confusion(found.classes, found.confusion)
    cells = ("{from:.2f} to {to:.2f}", "{rows:,}", "{told:.3f}", "{true:.3f}")
    return {
        "classes": class_table(confusion),
        "confusion": confusion_table(confusion),
        "measures": _measures(found, limit),
        "calibration": TextTable(
            f"Calibration: the predicted {_of_what(found)}, and the observed share.",
            ("probability", "rows", "predicted", "observed"),
            [[cell.format(**one) for cell in cells] for one in found.calibration_table],
            fold="The numbers of the calibration figure",
        ),
    }


def class_table(confusion: Confusion) -> TextTable:
    """Precision, recall and F1 of every class, or of those with the lowest F1."""
    order, title = np.arange(len(confusion.classes)), ""
    if len(order) > SHOWN_CLASSES:
        title = f"The {SHOWN_CLASSES} classes of {len(order)} with the lowest F1:"
        order = np.argsort(np.nan_to_num(confusion.f1, nan=2.0), kind="stable")[:SHOWN_CLASSES]
    shares = (confusion.precision, confusion.recall, confusion.f1)
    rows = [
        (
            str(confusion.classes[i]),
            *("-" if np.isnan(values[i]) else f"{values[i]:.3f}" for values in shares),
            f"{confusion.support[i]:,}",
        )
        for i in order
    ]
    heads = ("class", "precision", "recall", "F1", "rows")
    return TextTable(title, heads, rows, fold="Precision, recall and F1")


def confusion_table(confusion: Confusion) -> TextTable:
    """True class down and predicted class across, or the most frequent mistakes of many classes."""
    names = [str(label) for label in confusion.classes]
    if len(names) > SHOWN_CLASSES:
        rows = [
            (names[true], names[answer], f"{count:,}", percent(count / confusion.support[true]))
            for true, answer, count in confusion.mistakes(SHOWN_CLASSES)
        ]
        columns = ("true", "predicted", "rows", "of that class")
        return TextTable("The most frequent mistakes:", columns, rows, (0, 1))
    heads = names
    if max(map(len, names)) > 4:
        # Long names would not fit across the page; their positions do.
        heads = [str(index) for index in range(len(names))]
        names = [f"{index} {name}" for index, name in enumerate(names)]
    cells = [[f"{count}" if count else "·" for count in line] for line in confusion.counts]
    title = "Confusion: true class down, predicted class across; a dot is zero."
    lines = [(name, *line) for name, line in zip(names, cells, strict=True)]
    shares = confusion.counts / np.maximum(1, confusion.support)[:, None]
    return TextTable(title, ("", *heads), lines, shares=shares.tolist())


def html_page(model: str, data: str, about: str, shown: EvaluationReport, doubts: Iterable[str]) -> str:
    """The page as the text of an HTML file; equal evaluations give equal bytes."""
    from fedsolve.pages.svg import inline_svg  # drawing takes a second to load

    tables = shown.tables()
    measures = tables.pop("measures")
    return render(
        "evaluation.html",
        kind="evaluation",
        title=f"Evaluation of {model}",
        model=model,
        data=data,
        about=about,
        lede=shown.lede,
        doubts=list(doubts),
        measures=measures,
        tables=sorted([*tables.values(), *shown.details()], key=lambda table: bool(table.fold)),
        numbers=isinstance(shown.found, RegressionEvaluation),
        figures=[
            {
                "title": plot.title,
                "caption": plot.caption,
                "svg": inline_svg(plot.figure, plot.name, f"{plot.title}. {plot.description}"),
            }
            for plot in shown.plots()
        ],
    )


def _measures(found: Found, limit: Threshold | None = None) -> TextTable:
    """Every measure: name, value, and its interval or another remark."""
    rows, values = [], found.measures()
    for name, (words, _) in _NAMES.items():
        if name not in found.intervals:
            continue
        plain = "{:.6g}".format if isinstance(found, RegressionEvaluation) else "{:.4f}".format
        shown = percent if name.endswith("accuracy") else plain
        interval = " to ".join(map(shown, found.intervals[name]))
        if name == "auc" and isinstance(found, Evaluation):
            interval += f" (from a histogram, known to ± {found.auc_bound:.1g})"
            words += "" if len(found.classes) == 2 else ", mean over classes"
        rows.append((words, shown(values[name]), interval))
    if isinstance(found, RegressionEvaluation) and (covered := found.coverage()) is not None:
        inside = wilson(covered * found.rows, found.rows)
        rows.append(("in 95 % intervals", percent(covered), " to ".join(map(percent, inside))))
    if limit is not None:
        remark = f"chosen on held-out rows, to find {percent(limit.wanted)} of them"
        rows.append((f"threshold for {limit.positive}", f"{limit.probability:.4f}", remark))
        for name in ("sensitivity", "specificity"):
            remark = f"{' to '.join(map(percent, limit.intervals[name]))}, on these rows"
            rows.append((f"{name} there", percent(getattr(limit, name)), remark))
    return TextTable("", ("measure", "value", "95 % interval"), rows, (0, 2))


def _of_what(found: Evaluation) -> str:
    return f"probability of {found.classes[1]}" if len(found.classes) == 2 else "probability of the answer"


def _plot(name: str, title: str, caption: str, *series: Any, x: Any, y: str, **panel: Any) -> Plot:
    """A figure of one panel. series: what a `Series` is made of. x: the axis, its label, or named places."""
    from fedsolve.pages.plots import Axis, Panel, Plot, Series

    across = Axis.of("", x) if isinstance(x, list) else Axis(**x) if isinstance(x, dict) else Axis(x)
    return Plot(
        name, title, caption, caption, [Panel([Series(*one) for one in series], across, Axis(y), **panel)]
    )


def _plots(found: Evaluation) -> Iterator[Plot]:
    """Calibration, ROC, and probabilities by class of two classes."""
    table, names = found.calibration_table, found.classes.tolist()
    true, rows = (np.array([row[key] for row in table]) for key in ("true", "rows"))
    low, high = wilson(true * rows, rows)
    predicted, observed = (tuple(row[key] for row in table) for key in ("told", "true"))
    bars = (tuple(np.maximum(0, reach).tolist()) for reach in (true - low, high - true))
    yield _plot(
        "calibration",
        "Calibration",
        f"The predicted {_of_what(found)} against the observed share; on the broken line they agree. Bars "
        "are 95 % intervals.",
        ("", 0, predicted, observed, *bars),
        x="predicted",
        y="observed",
        kind="points",
        reference="diagonal",
    )
    order, which = [1], f"Of {names[1]}, from a histogram: its area is known to ± {found.auc_bound:.1g}."
    if len(names) > 2:
        order = np.argsort(np.nan_to_num(found.class_aucs, nan=2.0)).tolist()[:SHOWN_CURVES]
        some = f"the {SHOWN_CURVES} classes with the smallest area"
        some = some if len(names) > SHOWN_CURVES else "each class"
        which = f"Of {some}, against the others."
    curves = []
    for look, place in enumerate(order):
        auc = found.auc if len(names) == 2 else found.class_aucs[place]
        x, y = (tuple(values.tolist()) for values in found.roc(names[place]))
        curves.append((f"{_name(names[place])}: AUC {auc:.4f}", look, x, y))
    axes = {"x": "false positive rate", "y": "true positive rate"}
    yield _plot("roc", "ROC", which, *curves, **axes, reference="diagonal")
    if len(names) == 2:
        yield _plot(
            "probabilities",
            "Probabilities",
            "How the rows of each true class are spread over the predicted probabilities.",
            *((_name(name), look, *_spread(found, look)) for look, name in enumerate(names)),
            x={"label": f"probability of {_name(names[1])}, log-odds scale", "named": _SHOWN_PROBABILITIES},
            y="% of the class",
            kind="steps",
        )


def _importance_plot(important: Sequence[Importance], found: Found) -> Plot:
    shown = important[:SHOWN_COLUMNS]
    places = tuple(map(float, range(len(shown))))
    errors = tuple(1.96 * one.error for one in shown)
    loss = "squared error" if isinstance(found, RegressionEvaluation) else "log loss"
    return _plot(
        "importance",
        "Importance",
        f"Rise of the {loss} when a column is replaced by draws from all its values.",
        ("", 0, places, tuple(one.loss for one in shown), errors),
        x=[_name(one.column) for one in shown],
        y=f"rise of the {loss}",
        kind="bars",
        reference="zero",
    )


def _error_plots(found: RegressionEvaluation) -> Iterator[Plot]:
    """Residuals by the prediction, of every target."""
    lines = []
    for target in sorted({one["target"] for one in found.residuals}):
        own = [one for one in found.residuals if one["target"] == target]
        x = tuple((one["from"] + one["to"]) / 2 for one in own)
        name = "" if found.origin.size == 1 else f"target {target}"
        reach = tuple(one["deviation"] for one in own)
        lines.append((name, target, x, tuple(one["mean"] for one in own), reach))
    if lines:
        yield _plot(
            "residuals",
            "Residuals",
            "Truth less prediction, by the prediction: means in bins of at least ten rows; bars are standard "
            "deviations. On the broken line predictions are right on average.",
            *lines,
            x="prediction",
            y="truth less prediction",
            kind="points",
            reference="zero",
        )


def _group_plot(groups: Grouped) -> Plot:
    """The measures of every group side by side."""
    each = [measures_of(one) for one in groups.found.values()]
    wanted = [name for name in _SHORT if name in each[0][1] and name not in ("ece", "observed_share")]
    wanted = [name for name in wanted if name != "auc" or len(wanted) < 3]  # three panels can be read
    labels, places = [_name(group) for group in groups.found], tuple(map(float, range(len(groups.found))))
    caption, plots = f"Measures by {groups.by}; bars are 95 % intervals.", []
    for name in wanted:
        values, pairs = (np.array([one[kind][name] for one in each]) for kind in (0, 1))
        bars = (tuple(np.maximum(0, np.abs(values - side)).tolist()) for side in pairs.T)
        line = ("", 0, places, tuple(values.tolist()), *bars)
        plots.append(_plot("groups", f"By {groups.by}", caption, line, x=labels, y=_SHORT[name], kind="rows"))
    return replace(plots[0], panels=[plot.panels[0] for plot in plots])


def _spread(found: Evaluation, place: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Logits of the second class's probability, and per cent of a class's rows there."""
    histogram = found.sums["histogram"][0][place]
    fine = 2 * REACH / (len(histogram) - 2)
    logits = -REACH + fine * (np.arange(len(histogram)) - 0.5)
    edges = np.linspace(-_SHOWN_LOGITS, _SHOWN_LOGITS, 37)
    # What lies further out is shown at the ends.
    inner = np.histogram(np.clip(logits, edges[0], edges[-1]), edges, weights=histogram)[0]
    shares = 100 * inner / max(1, inner.sum())
    return tuple(((edges[:-1] + edges[1:]) / 2).tolist()), tuple(shares.tolist())


def _name(value: Any) -> str:
    return short(str(value), 22)
