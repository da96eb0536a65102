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
from fedsolve.cli.new_rows import beside_predictions, image_path, new_rows
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
_ROWS = 65536


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
        (
            "new images, by the backbone that the model knows; what a query gives; several files",
            "fedsolve predict model.safetensors ./new-images\n"
            "query | fedsolve predict model.safetensors -\n"
            "fedsolve predict model.safetensors monday.csv.gz tuesday.parquet",
        ),
    ),
)
@click.argument("model")
@click.argument("data", nargs=-1, required=True, metavar="DATA...")
@option("--out", metavar="FILE", group="Predictions", help="Where to write the csv.  [default: stdout]")
@option("--scores", is_flag=True, group="Predictions", help="Add one score column per class.")
@option(
    "--keep",
    metavar="NAME",
    multiple=True,
    show_default=False,
    group="Predictions",
    help="Column to write beside the label. May be repeated.  [default: the schema's identifiers]",
)
@_layers
@device_option
@_allow
@_part
@row_options
@output_options
@click.pass_context
def predict(ctx: click.Context, /, **given: Any) -> None:
    """Predict the class of every row of DATA with the model file MODEL.

    DATA is a csv (also .gz, .tsv), parquet or npz file, with or without labels, - for standard input, an
    image, a folder of images, or a dataset as for train; several are predicted one after the other. Scores
    are least-squares estimates of the one-hot label, or the logits of a gradient model: the largest one wins,
    but they are not probabilities.
    """
    output = Output(given["as_json"], given["quiet"])
    sources: tuple[str, ...] = given["data"]
    check_target(given["out"], given["model"], *sources, root=given["root"])
    ctx.with_resource(allowing(networks=given["networks"], methods=given["methods"]))
    model, classes = classifier(given["model"])
    depth = _depth(ctx, model, given["layers"])
    given["data"] = next((source for source in sources if image_path(source, given)), sources[0])
    prepare(ctx, model, given)
    found = list(new_rows(sources, model, given, output))
    scores = [_in_parts(model, rows.features, depth) for rows in found]
    codes = [np.argmax(part, axis=1) for part in scores]
    document: dict[str, Any] = {
        "model": given["model"],
        "data": sources[0] if len(sources) == 1 else list(sources),
        "rows": sum(map(len, found)),
    }
    if output.as_json and given["out"] is None:
        beside = beside_predictions(found)
        document |= {"labels": classes[np.concatenate(codes)], "classes": classes}
        document |= {"beside": beside} if len(beside) > 1 else {}
        document |= {"scores": np.concatenate(scores)} if given["scores"] else {}
        output.result(document, lambda page: None)
        return
    text = _csv(beside_predictions(found), codes, scores if given["scores"] else None, classes)
    if given["out"] is None:
        click.echo(text, nl=False)
        return
    write_text(given["out"], text)
    document["out"] = given["out"]
    output.result(document, lambda page: None)
    output.note(f"{document['rows']:,} predictions written to {given['out']}")


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


def _in_parts(model: Model, features: Array, depth: dict[str, Any]) -> Array:
    """Scores of many rows, some thousand at a time, so that what layers give is never held whole."""
    parts = [
        _scores(model, features[start : start + _ROWS], depth) for start in range(0, len(features), _ROWS)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _csv(beside: dict[str, list[Any]], codes: list[Array], scores: list[Array] | None, classes: Array) -> str:
    """A line for each row: what tells it apart, its label and, where they are wanted, its scores."""
    named = classes.tolist()
    columns = [*beside.values(), [named[code] for code in np.concatenate(codes).tolist()]]
    heads = [*beside, "label"]
    if scores is not None:
        heads += [f"score_{label}" for label in named]
        columns += np.concatenate(scores).T.tolist()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _show_stages(page: Console, stages: Array, rows: int) -> None:
    best = int(np.argmax(stages))
    page.print(table(("blocks", "accuracy"), [(str(t), percent(s)) for t, s in enumerate(stages)]))
    page.print(f"{rows:,} rows; most accurate after {best} blocks.")
