"""`fedsolve predict` and `fedsolve evaluate`: what a model file says about a data file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from scipy.special import softmax

from fedsolve.backends.devices import find_device
from fedsolve.calibration import project_to_simplex
from fedsolve.cli import pixel_rows
from fedsolve.cli.command import Choice, Command, option
from fedsolve.cli.confusion import Report
from fedsolve.cli.doubts import caveats, check_finite, majority_doubt
from fedsolve.cli.evaluation_page import html_page, show
from fedsolve.cli.inputs import Reader, row_options
from fedsolve.cli.new_rows import beside_predictions, image_path, new_rows
from fedsolve.cli.options import READING, allow_options, output_options
from fedsolve.cli.output import Output, check_target, percent, table, write_text
from fedsolve.closedform.predictors import StagedModel
from fedsolve.container import Array
from fedsolve.data.tables import Table
from fedsolve.errors import DataError
from fedsolve.federation.importance import Importance, importances
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.federation.quality import Evaluation
from fedsolve.federation.tallies import tally
from fedsolve.gradient.network_model import GradientModel
from fedsolve.labels import encode_labels
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
    help="Gradient models: cpu, cuda, cuda:1, or auto for a GPU where there is one.  [default: cpu]",
)
_allow = allow_options("Model")
_ASKED = "Also"
_ROWS = 65536


@click.command(
    cls=Command,
    examples=(
        (
            "a csv with the columns row and label",
            "fedsolve predict model.safetensors data.npz --out labels.csv",
        ),
        (
            "the probability of every class too, on stdout",
            "fedsolve predict model.safetensors patients.csv --probabilities",
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
@option("--probabilities", is_flag=True, group="Predictions", help="Add one probability column per class.")
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
    but they are not probabilities. --probabilities gives those, calibrated where the model was trained so.
    """
    output = Output(given["as_json"], given["quiet"])
    sources: tuple[str, ...] = given["data"]
    check_target(given["out"], given["model"], *sources, root=given["root"])
    ctx.with_resource(allowing(networks=given["networks"], methods=given["methods"]))
    model, classes = classifier(given["model"])
    depth = _depth(ctx, model, given["layers"])
    given["data"] = next((source for source in sources if image_path(source, given)), sources[0])
    prepare(ctx, model, given)
    rows = list(new_rows(sources, model, given, output))
    answers, scores, probabilities = _in_parts(model, [part.features for part in rows], depth)
    added = {"score": scores} if given["scores"] else {}
    added |= {"probability": probabilities} if given["probabilities"] else {}
    document: dict[str, Any] = {
        "model": given["model"],
        "data": sources[0] if len(sources) == 1 else list(sources),
        "rows": sum(map(len, rows)),
        "warnings": caveats(model),
    }
    for doubt in document["warnings"]:
        output.warn(doubt)
    beside = beside_predictions(rows)
    if output.as_json and given["out"] is None:
        named = {"score": "scores", "probability": "probabilities"}
        document |= {"labels": classes[answers], "classes": classes}
        document |= {"beside": beside} if len(beside) > 1 else {}
        document |= {named[name]: columns for name, columns in added.items()}
        output.result(document, lambda page: None)
        return
    text = _csv(beside, answers, added, classes)
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
            "a page with figures, and a threshold that finds 95 % of the second class",
            "fedsolve evaluate model.safetensors data.npz --html page.html --sensitivity 0.95",
        ),
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
@option("--html", metavar="FILE", group=_ASKED, help="Write a page with figures too.")
@option(
    "--sensitivity",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    group=_ASKED,
    help="Two classes: the threshold that finds this share of the second, chosen on rows held out.",
)
@option("--importance", is_flag=True, group=_ASKED, help="What is lost without each column.")
@option(
    "--column",
    metavar="NAME",
    multiple=True,
    show_default=False,
    group=_ASKED,
    help="With --importance: only this column. May be repeated.",
)
@device_option
@_allow
@_part
@row_options
@output_options
@click.pass_context
def evaluate(ctx: click.Context, /, **given: Any) -> None:
    """Compare the predictions of the model file MODEL with the labels of DATA.

    Prints accuracy, AUC, log loss and calibration with intervals, precision, recall and F1 per class, and the
    confusion matrix (with more than 20 classes: the most frequent mistakes). DATA is an npz, csv or parquet
    file, or a dataset as for train.
    """
    output = Output(given["as_json"], given["quiet"])
    check_target(given["html"], given["model"], given["data"], root=given["root"])
    _check_asked(ctx, given)
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
    answers, _, probabilities = _told(model, data.features, depth)
    sums = tally(probabilities, answers, encode_labels(data.labels, classes))
    found = Evaluation(classes, sums, model.calibration is not None and not depth)
    report = Report(classes, found.confusion)
    limit = None
    if given["sensitivity"] is not None:
        limit = found.threshold(model.threshold(given["sensitivity"]), given["sensitivity"])
    important = _importance(model, data, given) if given["importance"] else None
    doubts = caveats(model) or majority_doubt(
        found.accuracy, data.labels, "these rows", found.balanced_accuracy
    )
    document = named | {"layers": depth.get("layers")} | found.as_dict() | report.as_dict()
    document["threshold"] = None if limit is None else asdict(limit)
    document["importance"] = None if important is None else [asdict(one) for one in important]
    document |= {"html": given["html"], "warnings": doubts}
    if given["html"] is not None:
        names = Path(given["model"]).name, Path(given["data"]).name
        write_text(given["html"], html_page(*names, repr(model), found, limit, important, doubts))

    def page(drawn: Console) -> None:
        report.show(drawn)
        show(drawn, found, limit, important)

    output.result(document, page)
    for doubt in doubts:
        output.warn(doubt)


def _check_asked(ctx: click.Context, given: dict[str, Any]) -> None:
    """Refuse what does not go together."""
    if given["column"] and not given["importance"]:
        raise click.UsageError("--column says whose --importance; add that", ctx)
    for name in ("html", "sensitivity", "importance"):
        if given["staged"] and given[name]:
            raise click.UsageError(f"--staged shows accuracies only; leave out --{name}", ctx)
    for name in ("sensitivity", "importance"):
        if given["layers"] is not None and given[name]:
            raise click.UsageError(f"--{name} is of the whole model; leave out --layers", ctx)


def _importance(model: Model, data: Table, given: dict[str, Any]) -> list[Importance]:
    rows = ClientData(
        data.features, data.labels, schema=model.schema if model.preparing is not None else None
    )
    assert model.classes is not None
    silo = LocalFederation([Participant("these rows", rows)], classes=model.classes.tolist())
    return importances(silo, model, columns=given["column"] or None)


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


def _told(model: Model, features: Array, depth: dict[str, Any]) -> tuple[Array, Array, Array]:
    """Positions of the answers, scores and probabilities of rows; a stage's are not calibrated."""
    if isinstance(model, GradientModel):
        scores = pixel_rows.scores(model, features)
        calibration = model.calibration
        found = softmax(scores, axis=1) if calibration is None else calibration.probabilities(scores)
    elif depth:
        scores = model.decision_function(features, **depth)
        found = project_to_simplex(scores)
    else:
        scores, found = model.decision_function(features), model.predict_proba(features)
    return np.argmax(scores, axis=1), scores, found


def _in_parts(model: Model, features: Sequence[Array], depth: dict[str, Any]) -> tuple[Array, Array, Array]:
    """The same of many rows, some thousand at a time, so that what layers give is never held whole."""
    parts = [
        _told(model, part[start : start + _ROWS], depth)
        for part in features
        for start in range(0, max(1, len(part)), _ROWS)
    ]
    answers, scores, probabilities = (np.concatenate(each) for each in zip(*parts, strict=True))
    return answers, scores, probabilities


def _csv(beside: dict[str, list[Any]], answers: Array, added: dict[str, Array], classes: Array) -> str:
    """A line for each row: what tells it apart, its label and, by the beginning of their names, columns of
    every class.
    """
    named = classes.tolist()
    columns = [*beside.values(), [named[code] for code in answers.tolist()]]
    columns += [column for values in added.values() for column in values.T.tolist()]
    heads = [*beside, "label", *(f"{name}_{label}" for name in added for label in named)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _show_stages(page: Console, stages: Array, rows: int) -> None:
    best = int(np.argmax(stages))
    page.print(table(("blocks", "accuracy"), [(str(t), percent(s)) for t, s in enumerate(stages)]))
    page.print(f"{rows:,} rows; most accurate after {best} blocks.")
