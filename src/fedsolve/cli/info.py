"""`fedsolve info` and `fedsolve export`: the card of a model, and the model as a file for other programs."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from fedsolve.cli.model_options import ModelOptions
from fedsolve.cli.options import LAST, command, option, required
from fedsolve.cli.output import Output, check_target, fact_grid, write_text
from fedsolve.export import OPSET, PRECISIONS, write_onnx
from fedsolve.federation.card import card
from fedsolve.pages.model_card import markdown, sections
from fedsolve.pages.words import megabytes
from fedsolve.scoring.evaluation import caveats
from fedsolve.statistics.results import StatisticModel


class InfoOptions(ModelOptions):
    markdown: bool = option(False, "Print Markdown: the model card.", group=LAST)
    out: str | None = option(None, "Write the Markdown to a file.", "FILE", none="stdout", group=LAST)


@command()
def info(options: InfoOptions, output: Output) -> None:
    """Tell what the model file MODEL is: schema, training, calibration, metrics, versions, licence.

    How it was trained is known of models that 'fedsolve train' and 'fedsolve server' wrote.

    # what a model is, where it comes from and what it reached
    fedsolve info model.safetensors
    # its card as a file to hand on with it
    fedsolve info model.safetensors --markdown --out MODEL.md
    """
    if output.as_json and options.markdown:
        raise click.UsageError("--json and --markdown are two forms of the same; choose one")
    if options.out is not None and not options.markdown:
        raise click.UsageError("--out is for --markdown")
    check_target(options.out, options.model)
    model = options.load()
    told = {"file": options.model, **card(model)}
    result = model if isinstance(model, StatisticModel) else None
    if result is not None:
        told["result"] = result.document()
    if not options.markdown:
        output.result(told, lambda page: _show(page, told) if result is None else click.echo(str(result)))
        return
    text = markdown(told) if result is None else result.to_markdown() + "\n"
    if options.out is None:
        click.echo(text, nl=False)
    else:
        write_text(options.out, text)
        output.note(f"card written to {options.out}")


def _show(page: Console, told: dict[str, Any]) -> None:
    for number, (title, told_of) in enumerate(sections(told)):
        if number:
            page.print()
        page.print(title, style="bold underline")
        page.print(fact_grid(told_of))


class ExportOptions(ModelOptions):
    title = "Export"
    target: str = required("The ONNX file to write.", "FILE", flag="--onnx")
    precision: str = option(
        PRECISIONS[0], "Of the matrix of features, of wide layers and of what comes out.", choices=PRECISIONS
    )
    images: bool = option(
        False, "Join the model's backbone (onnx:FILE, efficientnet-lite0, pixels:SIZE): pixels go in."
    )
    backbone: str | None = option(
        None, "With --images, the backbone if its files have moved.", "ADDRESS", none="the model's"
    )


@command()
def export(options: ExportOptions, output: Output) -> None:
    """Write the model file MODEL as one ONNX graph.

    It takes raw rows: an input for each column of the model's schema, or a matrix 'features'. It gives the
    label, calibrated probabilities where the model has them, and scores; of a regression the prediction.

    # raw rows to labels and probabilities, for any ONNX runtime
    fedsolve export model.safetensors --onnx model.onnx
    # wide layers at half the size
    fedsolve export model.safetensors --onnx model.onnx --precision float32
    """
    if options.backbone is not None and not options.images:
        raise click.UsageError("--backbone is for --images")
    check_target(options.target, options.model)
    model = options.load()
    images = (options.backbone or True) if options.images else False
    written = write_onnx(model, options.target, options.precision, images)
    told: dict[str, Any] = {
        "file": options.target,
        "model": options.model,
        "precision": options.precision,
        "opset": OPSET,
        "bytes": written.size,
        "inputs": list(written.inputs),
        "outputs": list(written.outputs),
        "warnings": caveats(model),
    }
    if model.private:
        output.warn(
            f"{options.target} is one client's own model and as confidential as its rows; only its owner "
            "may read it."
        )
    lines = [
        ("file", f"{told['file']} ({megabytes(told['bytes'])} MB, opset {told['opset']})"),
        ("takes", ", ".join(told["inputs"])),
        ("gives", ", ".join(told["outputs"])),
    ]
    output.result(told, lines)
