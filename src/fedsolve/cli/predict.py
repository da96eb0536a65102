"""`fedsolve predict` and `fedsolve evaluate`: what a model file says about a data file."""

from __future__ import annotations

import csv
import io
from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve.backends.devices import find_device
from fedsolve.cli import pixel_rows
from fedsolve.cli.command import Choice, Command, option
from fedsolve.cli.confusion import Report
from fedsolve.cli.doubts import check_finite, majority_doubt
from fedsolve.cli.inputs import Reader, row_options
from fedsolve.cli.options import READING, allow_options, output_options
from fedsolve.cli.output import Output, check_target, percent, table, write_text
from fedsolve.closedform.predictors import StagedModel
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.gradient.network_model import GradientModel
from fedsolve.model import Model, load_model
from fedsolve.permissions import allowing

_part = option(
    "--part",
    type=Choice(["train", "test"]),
    group=READING,
    help="npz with x_train and x_test: which rows.  [default: test]",
)
_layers = option(
    "--layers", type=int, group="Model", help="Stop after this many blocks of a deep model.  [default: all]"
)
device_option = option(
    "--device",
    metavar="NAME",
    group="Model",
    help="Gradient models: cpu, cuda, or auto for a GPU where there is one.  [default: cpu]",
)
_allow = allow_options("Model")


@click.command(
    cls=Command,
    examples=(
        (
            "a csv with the columns row and label",
            "fedsolve predict model.safetensors data.npz --out labels.csv",
        ),
        (
            "the scores of every class too, on stdout",
            "fedsolve predict model.safetensors patients.csv --scores",
        ),
    ),
)
@click.argument("model")
@click.argument("data")
@option("--out", metavar="FILE", group="Predictions", help="Where to write the csv.  [default: stdout]")
@option("--scores", is_flag=True, group="Predictions", help="Add one score column per class.")
@_layers
@device_option
@_allow
@_part
@row_options
@output_options
@click.pass_context
def predict(ctx: click.Context, /, **given: Any) -> None:
    """Predict the class of every row of DATA with the model file MODEL.

    DATA is an npz, csv or parquet file, with or without labels, or a dataset as for train. Scores are
    least-squares estimates of the one-hot label, or the logits of a gradient model: the largest one wins,
    but they are not probabilities.
    """
    output = Output(given["as_json"], given["quiet"])
    check_target(given["out"], given["model"], given["data"], root=given["root"])
    ctx.with_resource(allowing(networks=given["networks"], methods=given["methods"]))
    model, classes = classifier(given["model"])
    depth = _depth(ctx, model, given["layers"])
    prepare(ctx, model, given)
    data = Reader(given, output).rows(
        given["data"],
        given["part"],
        labelled=False,
        width=model.features,
        schema=model.schema,
        extra="ignore",
        whole=True,
    )
    scores = _scores(model, data.features, depth)
    labels = classes[np.argmax(scores, axis=1)]
    document: dict[str, Any] = {"model": given["model"], "data": given["data"], "rows": len(data)}
    if given["out"] is not None:
        write_text(given["out"], _csv(labels, scores if given["scores"] else None, classes))
        document["out"] = given["out"]
        output.result(document, lambda page: None)
        output.note(f"{len(data):,} predictions written to {given['out']}")
    elif output.as_json:
        document |= {"labels": labels, "classes": classes} | ({"scores": scores} if given["scores"] else {})
        output.result(document, lambda page: None)
    else:
        click.echo(_csv(labels, scores if given["scores"] else None, classes), nl=False)


@click.command(
    cls=Command,
    examples=(
        ("accuracy, per-class report and confusion", "fedsolve evaluate model.safetensors data.npz"),
        (
            "accuracy after every block of a deep model",
            "fedsolve evaluate model.safetensors data.npz --staged",
        ),
    ),
)
@click.argument("model")
@click.argument("data")
@_layers
@option("--staged", is_flag=True, group="Model", help="Accuracy after 0, 1, ..., T blocks instead.")
@device_option
@_allow
@_part
@row_options
@output_options
@click.pass_context
def evaluate(ctx: click.Context, /, **given: Any) -> None:
    """Compare the predictions of the model file MODEL with the labels of DATA.

    Prints accuracy, precision, recall and F1 per class, and the confusion matrix (with more than 20 classes:
    the most frequent mistakes). DATA is an npz, csv or parquet file, or a dataset as for train.
    """
    output = Output(given["as_json"], given["quiet"])
    if given["staged"] and given["layers"] is not None:
        raise click.UsageError("--staged shows every depth; leave out --layers", ctx)
    ctx.with_resource(allowing(networks=given["networks"], methods=given["methods"]))
    model, classes = classifier(given["model"])
    depth = _depth(ctx, model, given["layers"])
    if given["staged"] and not isinstance(model, StagedModel):
        raise click.UsageError(f"--staged needs a model with layers; this one is {model.family}", ctx)
    prepare(ctx, model, given)
    data = Reader(given, output).rows(
        given["data"], given["part"], classes=classes, width=model.features, schema=model.schema
    )
    assert data.labels is not None
    named = {"model": given["model"], "data": given["data"]}
    if isinstance(model, StagedModel) and given["staged"]:
        stages = model.staged_score(data.features, data.labels)
        document = named | {"rows": len(data), "staged_accuracy": stages}
        output.result(document, lambda page: _show_stages(page, stages, len(data)))
        return
    predicted = classes[np.argmax(_scores(model, data.features, depth), axis=1)]
    report = Report.of(data.labels, predicted, classes)
    doubts = majority_doubt(float(np.mean(predicted == data.labels)), data.labels, "these rows")
    document = named | {"layers": depth.get("layers")} | report.as_dict() | {"warnings": doubts}
    output.result(document, report.show)
    for doubt in doubts:
        output.warn(doubt)


def classifier(path: str) -> tuple[Model, Array]:
    """The model of a file, and its classes."""
    model = load_model(path)
    if model.classes is None:
        raise DataError(
            f"{path} is a regression model; this command is for classifiers. "
            "In Python: fedsolve.load_model(path).predict(features)."
        )
    check_finite(model, path)
    return model, model.classes


def prepare(ctx: click.Context, model: Model, given: dict[str, Any]) -> None:
    """Set the device of a gradient model, and the backbone by which images reach its network."""
    if not isinstance(model, GradientModel):
        if given["device"] is not None:
            raise click.UsageError(f"--device is for gradient models; this one is {model.family}", ctx)
        return
    pixel_rows.check_torch(model.parameters["network"], f"the model {given['model']}")
    if given["device"] is not None:
        model.device = str(find_device(given["device"]))
    given["backbone"] = pixel_rows.for_model(model, given["data"], given)


def _depth(ctx: click.Context, model: Model, layers: int | None) -> dict[str, Any]:
    if layers is None:
        return {}
    if not isinstance(model, StagedModel):
        raise click.UsageError(f"--layers needs a model with layers; this one is {model.family}", ctx)
    return {"layers": layers}


def _scores(model: Model, features: Array, depth: dict[str, Any]) -> Array:
    if isinstance(model, GradientModel):
        return pixel_rows.scores(model, features)
    return model.decision_function(features, **depth)


def _csv(labels: Array, scores: Array | None, classes: Array) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [] if scores is None else [f"score_{label}" for label in classes.tolist()]
    writer.writerow(["row", "label", *names])
    for row, label in enumerate(labels.tolist()):
        writer.writerow([row, label, *([] if scores is None else scores[row].tolist())])
    return text.getvalue()


def _show_stages(page: Console, stages: Array, rows: int) -> None:
    best = int(np.argmax(stages))
    page.print(table(("blocks", "accuracy"), [(str(t), percent(s)) for t, s in enumerate(stages)]))
    page.print(f"{rows:,} rows; most accurate after {best} blocks.")
