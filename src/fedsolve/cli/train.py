"""`fedsolve train`: from a data file to a model file, over simulated clients."""

from __future__ import annotations

import os
import time
from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve.cli.clients import Split, client_options, federate, split_from
from fedsolve.cli.command import Command, option
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Interrupted, Output, check_target, facts, megabytes, percent
from fedsolve.cli.parameters import build_method, method_keys, method_options, parameter_names
from fedsolve.cli.personal import personal_folder, personal_lines, personalise
from fedsolve.cli.rows import Reader, row_options
from fedsolve.data.partitions import heterogeneity
from fedsolve.data.tables import Table
from fedsolve.errors import ModelFileError
from fedsolve.federation.engine import Spec
from fedsolve.federation.local import LocalFederation
from fedsolve.model import Model

_GROUP = "Training"


@click.command(
    cls=Command,
    examples=(
        (
            "DeepAFL over 20 clients with very uneven classes",
            "fedsolve train data.npz --partition dirichlet --alpha 0.1 --layers 10 --out model.safetensors",
        ),
        (
            "AFL, in one exchange, on a csv whose column 'hospital' says who owns each row",
            "fedsolve train patients.csv --method afl --ridge 0.1 --label diagnosis \\\n"
            "    --client-column hospital --out model.safetensors",
        ),
        (
            "a model of its own for every client, balanced by the client itself",
            "fedsolve train data.npz --method apfl --balance auto --partition dirichlet \\\n"
            "    --out shared.safetensors --personal clients",
        ),
        (
            "your own images, in one folder per class, as features of a pre-trained backbone",
            "fedsolve train folder:./images --clients 5 --out model.safetensors",
        ),
        (
            "a long run that can be stopped and continued with the same line",
            "fedsolve train data.npz --layers 50 --checkpoint run.ckpt --resume --out model.safetensors",
        ),
    ),
)
@click.argument("data")
@option(
    "--method",
    type=click.Choice(method_keys()),
    default="deepafl",
    group=_GROUP,
    help="What to train; see 'fedsolve methods'.",
)
@option("--out", metavar="FILE", group=_GROUP, help="Where to save the model (.safetensors).")
@option(
    "--test",
    metavar="DATA",
    group=_GROUP,
    help="File to evaluate on after training.  [default: x_test of an npz that has it]",
)
@option(
    "--personal",
    metavar="DIR",
    group=_GROUP,
    help="Folder for each client's own model (apfl), CLIENT.safetensors; stands for the clients' own disks.",
)
@option("--workers", type=int, group=_GROUP, help="Clients computed at the same time.  [default: all cores]")
@option("--checkpoint", metavar="FILE", group=_GROUP, help="Save the state after every exchange.")
@option("--resume", is_flag=True, group=_GROUP, help="Continue from --checkpoint if that file exists.")
@client_options
@method_options
@row_options
@output_options
@click.pass_context
def train(ctx: click.Context, /, **given: Any) -> None:
    """Train a classifier over simulated clients, exactly and without gradients.

    DATA holds features and labels: npz (arrays x and y, or x_train, y_train, x_test and y_test; features are
    decoded as offset + scale * x where it has these arrays), csv, or parquet (needs fedsolve[parquet]). Or it
    is the address of a dataset, such as digits or folder:PATH for images in class folders, which --backbone
    turns into features once ('fedsolve datasets' lists them).

    Rows are dealt to clients by a partition, or by a column that names their owner. Only sums leave a client,
    and the model does not depend on the partition.
    """
    output = Output(given["as_json"], given["quiet"])
    split, reader = split_from(ctx, given), Reader(given, output)
    method = build_method(given["method"], {name: given[name] for name in parameter_names()}, ctx)
    checkpoint = _checkpoint(ctx, given, output)
    check_target(given["out"])
    personal = personal_folder(ctx, given["personal"], method)

    data = reader.rows(given["data"], "train", owned=split.kind is None)
    federation = federate(data, split, given["workers"])
    spec = federation.describe()
    test = _test_rows(given, reader, spec)

    started = time.perf_counter()
    try:
        with output.progress(given["method"]) as progress:
            model = method.fit(federation, checkpoint, resume=given["resume"], progress=progress)
    except KeyboardInterrupt as stop:
        raise Interrupted(_stopped(checkpoint)) from stop
    seconds = time.perf_counter() - started
    if given["out"] is not None:
        model.save(given["out"])
    accuracy: dict[str, Any] = {"train": federation.evaluate(model), "test": None}
    if test is not None:
        accuracy["test"] = model.score(test.features, test.labels)
    document = {
        "method": method.key,
        "parameters": method.parameters(),
        **_counts(data, federation, split, spec),
        **_traffic(model),
        "seconds": seconds,
        "accuracy": accuracy,
        "test_rows": None if test is None else len(test),
        "personal": personalise(model, federation, test, personal, output),
        "model": given["out"],
        "checkpoint": checkpoint,
    }
    output.result(document, lambda page: _show(page, document))


def _checkpoint(ctx: click.Context, given: dict[str, Any], output: Output) -> str | None:
    path: str | None = given["checkpoint"]
    if path is None:
        if given["resume"]:
            raise click.UsageError("--resume needs --checkpoint FILE to resume from", ctx)
        return None
    check_target(path)
    if given["out"] is not None and os.path.abspath(path) == os.path.abspath(given["out"]):
        raise click.UsageError("--checkpoint and --out name the same file; choose two", ctx)
    if os.path.exists(path) and not given["resume"]:
        raise ModelFileError(f"checkpoint {path} exists. Pass --resume to continue from it, or remove it.")
    if given["resume"] and not os.path.exists(path):
        output.note(f"{path} does not exist yet: starting from the beginning.")
    return path


def _test_rows(given: dict[str, Any], reader: Reader, spec: Spec) -> Table | None:
    """The rows to evaluate on, read and checked before any training is done."""
    known: dict[str, Any] = {"classes": spec.classes, "width": spec.features}
    if given["test"] is not None:
        return reader.rows(given["test"], **known)
    if given["features_key"] is None and "test" in reader.parts(given["data"]):
        return reader.rows(given["data"], "test", **known)
    return None


def _stopped(checkpoint: str | None) -> str:
    if checkpoint is not None and os.path.exists(checkpoint):
        return (
            f"interrupted; {checkpoint} holds the last exchange. Run the same command with --resume to go on."
        )
    return "interrupted; nothing was saved. With --checkpoint FILE a run can be continued."


def _counts(data: Table, federation: LocalFederation, split: Split, spec: Spec) -> dict[str, Any]:
    assert spec.classes is not None
    assert data.labels is not None
    owners = np.empty(len(data), dtype=np.int64)
    for index, participant in enumerate(federation.participants):
        owners[participant.data.rows] = index
    return {
        "data": data.source,
        "rows": len(data),
        "features": spec.features,
        "classes": spec.classes.tolist(),
        "clients": len(federation.clients),
        "empty_clients": sum(len(participant) == 0 for participant in federation.participants),
        "partition": split.as_dict() | {"heterogeneity": heterogeneity(data.labels, owners)},
    }


def _traffic(model: Model) -> dict[str, Any]:
    told = ("exchange", "kind", "layer", "bytes_up", "bytes_down", "seconds", "risk", "accuracy", "solved")
    risks = [record.risk for record in model.history if record.risk is not None]
    return {
        "exchanges": len(model.history),
        "bytes_up": sum(record.bytes_up for record in model.history),
        "bytes_down": sum(record.bytes_down for record in model.history),
        "catch_up_bytes": sum(record.catch_up_bytes for record in model.history),
        "risk": risks[-1] if risks else None,
        "history": [
            {name: getattr(record, name) for name in told} | {"clients": len(record.cohort)}
            for record in model.history
        ],
    }


def _show(page: Console, told: dict[str, Any]) -> None:
    accuracy, split = told["accuracy"], told["partition"]
    empty = f", {told['empty_clients']} of them empty" if told["empty_clients"] else ""
    dealt = "named by the data" if split["kind"] == "named" else split["kind"]
    lines = [
        ("method", f"{told['method']} ({_changed(told)})"),
        ("clients", f"{told['clients']}{empty} ({dealt}; heterogeneity {split['heterogeneity']:.2f} of 1)"),
        ("rows", f"{told['rows']:,} of {told['features']:,} features, {len(told['classes'])} classes"),
        ("exchanges", f"{told['exchanges']}"),
        ("traffic", f"{megabytes(told['bytes_up'])} MB up, {megabytes(told['bytes_down'])} MB down"),
        ("seconds", f"{told['seconds']:.2f}"),
        ("accuracy", f"{percent(accuracy['train'])} on the clients' training rows"),
    ]
    if accuracy["test"] is not None:
        lines.append(("", f"{percent(accuracy['test'])} on {told['test_rows']:,} test rows"))
    lines += personal_lines(told["personal"])
    if told["model"] is not None:
        lines.append(("model", told["model"]))
    facts(page, lines)


def _changed(told: dict[str, Any]) -> str:
    return ", ".join(f"{n} {v}" for n, v in told["parameters"].items() if n in ("layers", "width", "ridge"))
