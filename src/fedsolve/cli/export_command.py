"""`fedsolve export`: a model as a file for other programs."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from fedsolve.cli.command import Choice, Command, option
from fedsolve.cli.doubts import caveats
from fedsolve.cli.options import allow_options, output_options
from fedsolve.cli.output import Output, check_target, facts, megabytes
from fedsolve.export import OPSET, PRECISIONS, write_onnx
from fedsolve.model import load_model
from fedsolve.permissions import allowing


@click.command(
    "export",
    cls=Command,
    examples=(
        (
            "raw rows to labels and probabilities, for any ONNX runtime",
            "fedsolve export model.safetensors --onnx model.onnx",
        ),
        (
            "wide layers at half the size",
            "fedsolve export model.safetensors --onnx model.onnx --precision float32",
        ),
    ),
)
@click.argument("model")
@option("--onnx", "target", metavar="FILE", required=True, group="Export", help="The ONNX file to write.")
@option(
    "--precision",
    type=Choice(PRECISIONS),
    default=PRECISIONS[0],
    group="Export",
    help="Of the matrix of features, of wide layers and of what comes out.",
)
@option(
    "--images",
    is_flag=True,
    group="Export",
    help="Join the model's backbone (onnx:FILE, efficientnet-lite0, pixels:SIZE): pixels go in.",
)
@option(
    "--backbone",
    metavar="ADDRESS",
    group="Export",
    help="With --images, the backbone where its files lie elsewhere now.  [default: the model's]",
)
@allow_options("Export")
@output_options
@click.pass_context
def export(ctx: click.Context, /, **given: Any) -> None:
    """Write the model file MODEL as one ONNX graph.

    It takes raw rows: an input for each column of the model's schema, or a matrix 'features'. It gives the
    label, calibrated probabilities where the model has them, and scores.
    """
    output = Output(given["as_json"], given["quiet"])
    if given["backbone"] is not None and not given["images"]:
        raise click.UsageError("--backbone is for --images", ctx)
    check_target(given["target"], given["model"])
    ctx.with_resource(allowing(networks=given["networks"], methods=given["methods"]))
    model = load_model(given["model"])
    images = (given["backbone"] or True) if given["images"] else False
    written = write_onnx(model, given["target"], given["precision"], images)
    told = {
        "file": given["target"],
        "model": given["model"],
        "precision": given["precision"],
        "opset": OPSET,
        "bytes": written.size,
        "inputs": list(written.inputs),
        "outputs": list(written.outputs),
        "warnings": caveats(model),
    }
    if model.private:
        output.warn(
            f"{given['target']} is one client's own model and as confidential as its rows; only its owner "
            "may read it."
        )
    for doubt in told["warnings"]:
        output.warn(doubt)
    output.result(told, lambda page: _show(page, told))


def _show(page: Console, told: dict[str, Any]) -> None:
    lines = [
        ("file", f"{told['file']} ({megabytes(told['bytes'])} MB, opset {told['opset']})"),
        ("takes", ", ".join(told["inputs"])),
        ("gives", ", ".join(told["outputs"])),
    ]
    facts(page, lines)
