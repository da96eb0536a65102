"""`fedsolve predict` and `fedsolve evaluate`: what a model file says about a data file."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve.arrays import Array
from fedsolve.backends.devices import find_device, resolve
from fedsolve.cli.inputs import READING, RowOptions
from fedsolve.cli.model_options import ModelOptions
from fedsolve.cli.options import command, option, rare, required
from fedsolve.cli.output import Output, check_target, table, write_text
from fedsolve.closedform.predictors import StagedModel
from fedsolve.data.row_reader import beside_predictions, image_path, new_rows
from fedsolve.errors import DataError
from fedsolve.gradient import pixel_form
from fedsolve.gradient.network_model import GradientModel
from fedsolve.model import Model
from fedsolve.pages.words import percent
from fedsolve.scoring.evaluation import caveats, evaluation_of, majority_doubt, mean_doubt, scores_of
from fedsolve.scoring.evaluation_page import EvaluationReport, html_page
from fedsolve.scoring.groups import by_column
from fedsolve.scoring.importance import importance_on
from fedsolve.scoring.quality import Confusion, Evaluation, LabelsEvaluation, Threshold, truth_of
from fedsolve.scoring.residuals import RegressionEvaluation
from fedsolve.tables.table_file import TrainOrTest


class UseOptions(ModelOptions):
    device: str | None = option(None, "Where to compute: cpu, cuda, cuda:1, or auto.", "NAME", none="cpu")
    part: TrainOrTest | None = option(
        None, "npz with x_train and x_test: which rows.", none="test", group=READING
    )

    def load(self) -> Model:
        """The model of the file, where it is to compute."""
        model = super().load()
        if not isinstance(model, GradientModel):
            model.device = resolve(self.device or "cpu")
            return model
        pixel_form.check_torch(model.parameters["network"], f"the model {self.model}")
        if self.device is not None:
            model.device = str(find_device(self.device))
        return model

    def reading_for(self, model: Model, data: str, rows: RowOptions) -> RowOptions:
        """The options by which rows are read, with the backbone by which images reach a network."""
        if not isinstance(model, GradientModel):
            return rows
        return replace(rows, backbone=pixel_form.for_model(model, data, rows.backbone, rows.root))


class DepthOptions(UseOptions):
    layers: int | None = option(None, "Stop after this many blocks of a deep model.", none="all")

    def predictor(self) -> Model:
        """The model of the file, as far as was asked."""
        model = super().predictor()
        if self.layers is None:
            return model
        if not isinstance(model, StagedModel):
            raise click.UsageError(f"--layers needs a model with layers; this one is {model.family}")
        return model.stopped(self.layers)


_ASKED = "Also"
_PREDICTIONS = "Predictions"


class PredictOptions(DepthOptions):
    data: tuple[str, ...] = required(argument=True, metavar="DATA...")
    out: str | None = option(None, "Where to write the csv.", "FILE", none="stdout", group=_PREDICTIONS)
    scores: bool = option(False, "Add one score column per class, or linear_predictor.", group=_PREDICTIONS)
    probabilities: bool = option(False, "Add one probability column per class.", group=_PREDICTIONS)
    keep: tuple[str, ...] = option((), "Column to write too.", "NAME", none="identifiers", group=_PREDICTIONS)
    level: float | None = option(
        None,
        "Regression: share of truths within low and high.",
        above=0,
        most=0.999,
        none="0.95",
        group=_PREDICTIONS,
    )
    strict: bool = rare(False, "Refuse numbers far from those of training, and gaps.", group=READING)


@command()
def predict(options: PredictOptions, reading: RowOptions, output: Output) -> None:
    """Predict the class, or the number, of every row of DATA with the model file MODEL.

    DATA is a csv (also .gz, .tsv), parquet or npz file, with or without labels, - for standard input, an
    image, a folder of images, or a dataset as for train; several are predicted one after the other. Scores
    are least-squares estimates of the one-hot label, or the logits of a gradient model: the largest one wins,
    but they are not probabilities. --probabilities gives those, calibrated where the model was trained so. Of
    a regression the columns are prediction, low and high: an interval by the errors on rows held out. Of
    several labels a row there is a column of 0 and 1 for each, label_NAME. Models of a formula (glm, mixed)
    give the mean of the outcome, cox the relative_hazard against a row of zeros, and --scores the
    linear_predictor; a row that lacks a value which the formula needs has an empty prediction.

    # a csv with the columns row and label
    fedsolve predict model.safetensors data.npz --out labels.csv
    # the probability of every class too, on stdout
    fedsolve predict model.safetensors patients.csv --probabilities
    # new images, by the backbone that the model knows; what a query gives; several files
    fedsolve predict model.safetensors ./new-images
    query | fedsolve predict model.safetensors -
    fedsolve predict model.safetensors monday.csv.gz tuesday.parquet
    """
    sources = options.data
    check_target(options.out, options.model, *sources, root=reading.root)
    model = options.predictor()
    if model.regression and (flags := options.given("probabilities", *[] if model.scored else ["scores"])):
        event = getattr(model, "facts", {}).get("event", "1")
        chances = f"; the prediction is the probability of {event}" if model.judged is not None else ""
        raise click.UsageError(f"{flags[0]} is of classes, and this model predicts numbers{chances}")
    if options.level is not None and (model.classes is not None or model.spread is None):
        raise click.UsageError("--level needs a regression that was trained with rows held out, whole")
    pictures = (source for source in sources if image_path(source, reading.root, options.part))
    reading = options.reading_for(model, next(pictures, sources[0]), reading)
    rows = list(
        new_rows(sources, reading.reader(output), model.schema, model.features, options.part, options.keep)
    )
    strange = []
    for part in rows:
        strange += model.strange(part.features, part.source)
    if strange and options.strict:
        raise DataError(" ".join(strange))
    scores = scores_of(model, [part.features for part in rows])
    answers = model.decided(scores)
    columns = {model.predicted if model.regression else "label": answers}
    if model.regression and model.spread is not None:
        reach = model.spread.reach(options.level or 0.95)
        columns |= {"low": answers - reach, "high": answers + reach}
    if options.scores:
        columns |= {model.scored: scores[:, 0]} if model.regression else {"score": scores}
    columns |= {"probability": model.shares(scores)} if options.probabilities else {}
    document: dict[str, Any] = {
        "model": options.model,
        "data": sources[0] if len(sources) == 1 else list(sources),
        "rows": sum(map(len, rows)),
        "warnings": caveats(model) + strange,
    }
    beside = beside_predictions(rows)
    if output.as_json and options.out is None:
        named = {"label": "labels", "score": "scores", "probability": "probabilities"}
        document |= {} if model.classes is None else {"classes": model.classes}
        document |= {"names": model.labels} if model.labels else {}
        document |= {"beside": beside} if len(beside) > 1 else {}
        document |= {named.get(name, name): values for name, values in columns.items()}
        output.result(document)
        return
    text = _csv(beside, columns, np.array(model.labels) if model.labels else model.classes)
    if options.out is None:
        click.echo(text, nl=False)
    else:
        write_text(options.out, text)
        document["out"] = options.out
        output.note(f"{document['rows']:,} predictions written to {options.out}")
    output.result(document)


class EvaluateOptions(DepthOptions):
    data: str = required(argument=True)
    staged: bool = option(False, "Accuracy after 0, 1, ..., T blocks instead.")
    by: str | None = option(None, "Also for each group of this column, such as sex.", "NAME", group=_ASKED)
    html: str | None = option(None, "Write a page with figures too.", "FILE", group=_ASKED)
    sensitivity: float | None = option(
        None, "Two classes: threshold that finds this share of the second.", above=0, most=1, group=_ASKED
    )
    importance: bool = option(False, "What is lost without each column.", group=_ASKED)
    column: tuple[str, ...] = option((), "With --importance: only this column.", "NAME", group=_ASKED)

    def check(self) -> None:
        if self.column and not self.importance:
            raise click.UsageError("--column says whose --importance; add that")
        if self.staged and self.layers is not None:
            raise click.UsageError("--staged shows every depth; leave out --layers")
        for flag in self.given("html", "by", "sensitivity", "importance"):
            if self.staged:
                raise click.UsageError(f"--staged shows accuracies only; leave out {flag}")
            if self.layers is not None and flag != "--html":
                raise click.UsageError(f"{flag} is of the whole model; leave out --layers")


@command()
def evaluate(options: EvaluateOptions, reading: RowOptions, output: Output) -> None:
    """Compare the predictions of the model file MODEL with the labels of DATA.

    Prints accuracy, AUC, log loss and calibration with intervals, precision, recall and F1 per class, and the
    confusion matrix (with more than 20 classes: the most frequent mistakes). Of a regression: R², mean
    absolute and root mean squared error. A model of a formula is compared with the formula's outcome; one of
    0 and 1 by its probabilities. DATA is an npz, csv or parquet file, or a dataset as for train.

    # accuracy, per-class report and confusion
    fedsolve evaluate model.safetensors data.npz
    # a page with figures, and a threshold that finds 95 % of the second class
    fedsolve evaluate model.safetensors data.npz --html page.html --sensitivity 0.95
    # the same for each group of a column, which need not be one that the model uses
    fedsolve evaluate model.safetensors patients.csv --by sex --html page.html
    # accuracy after every block of a deep model
    fedsolve evaluate model.safetensors data.npz --staged
    """
    check_target(options.html, options.model, options.data, root=reading.root)
    options.check()
    model = options.predictor()
    if model.regression and options.sensitivity is not None:
        raise click.UsageError("--sensitivity is of classes, and this model predicts numbers")
    if options.staged and not isinstance(model, StagedModel):
        raise click.UsageError(f"--staged needs a model with layers; this one is {model.family}")
    if model.labels and model.schema is None:
        reading = replace(reading, labels=",".join(model.labels))
    model = model.scored_by(reading.label)
    reader = options.reading_for(model, options.data, reading).reader(output)
    data = reader.rows(
        options.data,
        options.part,
        classes=model.classes,
        width=model.features,
        schema=model.schema,
        extra="ignore",
        keep=None if options.by is None else [options.by],
    )
    strange, there = model.strange(data.features, data.source), model.complete(data.features)
    if not there.any():
        raise DataError(" ".join(strange))
    assert data.labels is not None
    truth_of(model, data.labels)  # names the row of a label that is none
    some = slice(None) if there.all() else there
    labels, kept = data.labels[some], {name: cells[some] for name, cells in data.kept.items()}
    data = replace(data, features=data.features[some], labels=labels, kept=kept)
    named = {"model": options.model, "data": options.data}
    if isinstance(model, StagedModel) and options.staged:
        stages = model.staged_score(data.features, data.labels)
        of_what = "r2" if model.regression else "accuracy"
        document = named | {"rows": len(data), f"staged_{of_what}": stages}
        output.result(document, lambda page: _show_stages(page, stages, len(data), of_what))
        return
    limits: dict[str, Threshold] = {}
    important = importance_on(model, data, options.column) if options.importance else None
    found = evaluation_of(model, data.features, data.labels)
    doubts, more = caveats(model), {}
    if isinstance(found, RegressionEvaluation):
        doubts = doubts or mean_doubt(found.r2)
    elif isinstance(found, LabelsEvaluation):
        if options.sensitivity is not None:
            limits = found.thresholds(model.threshold(options.sensitivity), options.sensitivity)
    else:
        assert model.judged is not None
        more = Confusion(found.classes, found.confusion).as_dict()
        if options.sensitivity is not None:
            limits[""] = found.threshold(model.threshold(options.sensitivity), options.sensitivity)
        balanced = found.balanced_accuracy
        if not model.regression:
            doubts = doubts or majority_doubt(found.accuracy, labels, "these rows", balanced)
        elif (spread := float(np.var(model.truths(labels)))) > 0:
            doubts = mean_doubt(1 - found.brier / spread)
    groups = None if options.by is None else by_column(model, data, options.by)
    doubts = strange + doubts
    document = named | {"layers": options.layers} | found.as_dict() | more
    chosen = {name: asdict(one) for name, one in limits.items()}
    document |= {"thresholds": chosen or None} if model.labels else {"threshold": chosen.get("")}
    document["importance"] = None if important is None else [asdict(one) for one in important]
    document["by"] = None if groups is None else groups.as_dict()
    document |= {"html": options.html, "warnings": doubts}
    shown = EvaluationReport(found, important, groups, limits)
    if options.html is not None:
        names = Path(options.model).name, Path(options.data).name
        write_text(options.html, html_page(*names, repr(model), shown, doubts))

    def page(drawn: Console) -> None:
        drawn.print(shown.headline, highlight=False)
        for each in shown.tables().values():
            drawn.print(each.title)
            drawn.print(table(each.heads, each.rows, left=each.left))
        if isinstance(found, Evaluation) and not found.calibrated:
            drawn.print("The probabilities are not calibrated ('fedsolve train --calibrate').")

    output.result(document, page)


def _csv(beside: dict[str, list[Any]], added: dict[str, Array], classes: Array | None) -> str:
    """A line for each row: what tells it apart, and what is predicted, of every class or target."""
    columns, heads = [*beside.values()], [*beside]
    for name, values in added.items():
        if values.dtype.kind == "f" and np.isnan(values).any():
            values = np.where(np.isnan(values), "", values.astype(object))  # no prediction
        columns += values.T.tolist() if values.ndim > 1 else [values.tolist()]
        labels = range(values.shape[-1]) if classes is None else classes.tolist()
        heads += [f"{name}_{label}" for label in labels] if values.ndim > 1 else [name]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _show_stages(page: Console, stages: Array, rows: int, of_what: str) -> None:
    best, shown = int(np.argmax(stages)), "{:.4f}".format if of_what == "r2" else percent
    page.print(table(("blocks", of_what), [(str(t), shown(s)) for t, s in enumerate(stages)]))
    page.print(f"{rows:,} rows; most accurate after {best} blocks.")
