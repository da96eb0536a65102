"""`fedsolve personalise`: a site's own model, from a shared model file and the site's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fedsolve.cli import pixel_rows
from fedsolve.cli.command import Choice, Command, option
from fedsolve.cli.inputs import Reader, row_options
from fedsolve.cli.options import READING, allow_options, output_options
from fedsolve.cli.output import Output, check_target, facts, percent
from fedsolve.cli.predict import classifier, device_option, prepare
from fedsolve.closedform.dual_stream import PersonalModel
from fedsolve.data.tables import Part, Table
from fedsolve.errors import DataError
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.gradient.network_model import GradientModel
from fedsolve.model import Model
from fedsolve.permissions import allowing

_SITE = "The site"


@click.command(
    cls=Command,
    examples=(
        (
            "a site's own model, from the shared one and the site's rows",
            "fedsolve personalise shared.safetensors north.csv --out north.safetensors",
        ),
        (
            "after a run with a method whose sites keep something, such as ditto",
            "fedsolve personalise shared.safetensors north.npz --name north --state fedsolve-client-north "
            "--out north.safetensors",
        ),
    ),
)
@click.argument("model")
@click.argument("data")
@option("--out", metavar="FILE", required=True, group=_SITE, help="The site's own model; mode 0600.")
@option("--name", metavar="NAME", group=_SITE, help="The site's name in the run.  [default: it joins now]")
@option(
    "--state",
    metavar="DIR",
    group=_SITE,
    help="State folder of 'fedsolve client', where the site kept its part of the run.",
)
@option(
    "--growing",
    is_flag=True,
    group=_SITE,
    help="apfl: keep the sums in the file, so that rows can be added to it in Python.",
)
@device_option
@allow_options("Model")
@option(
    "--part",
    type=Choice(["train", "test"]),
    group=READING,
    help="Data with both parts: which rows.  [default: train]",
)
@row_options
@output_options
@click.pass_context
def personalise(ctx: click.Context, /, **given: Any) -> None:
    """Make a site's own model where its rows are, from the shared MODEL and the rows of DATA.

    MODEL was trained by a personalised method: apfl, ditto and the like ('fedsolve methods'). Nothing is
    sent, so a site that had no part in the training has its own model too. Treat the file as you treat
    the rows: it may give them away.
    """
    output = Output(given["as_json"], given["quiet"])
    check_target(given["out"], given["model"], given["data"], given["state"], root=given["root"])
    ctx.with_resource(allowing(networks=given["networks"], methods=given["methods"]))
    model, classes = classifier(given["model"])
    prepare(ctx, model, given)
    participant_name, states = _site(ctx, given)
    reader = Reader(given, output)
    part: Part | None = given["part"]
    if part is None and "train" in reader.parts(given["data"]):
        part = "train"
    rows = reader.rows(given["data"], part, classes=classes, width=model.features, schema=model.schema)
    assert rows.labels is not None
    participant = Participant(
        participant_name, ClientData(rows.features, rows.labels, schema=model.schema), states=states
    )
    own = participant.personalise(model)
    if given["growing"] and not isinstance(own, PersonalModel):
        raise click.UsageError("--growing is for models of apfl, whose sums take further rows", ctx)
    own.save(given["out"], **({"growing": True} if given["growing"] else {}))
    document = {
        "model": given["model"],
        "data": given["data"],
        "rows": len(rows),
        "balance": own.balance if isinstance(own, PersonalModel) else None,
        "refinement_ridge": own.refinement_ridge if isinstance(own, PersonalModel) else None,
        "accuracy": {
            "personal": _accuracy(own, rows),
            "shared": _accuracy(model, rows) if model.predicts else None,
        },
        "out": given["out"],
    }
    output.result(document, lambda page: facts(page, _lines(document)))


def _site(ctx: click.Context, given: dict[str, Any]) -> tuple[str, Path | None]:
    """The site's name, and where it keeps its states."""
    if given["state"] is None:
        return given["name"] or "a site that joins", None
    if given["name"] is None:
        raise click.UsageError("--state holds what a site kept under its name; give --name too", ctx)
    states = Path(given["state"]) / "states"
    if not states.is_dir():
        raise DataError(f"{given['state']} is no state folder of 'fedsolve client': it holds no states.")
    return given["name"], states


def _accuracy(model: Model, rows: Table) -> float:
    if isinstance(model, GradientModel):
        return pixel_rows.accuracy(model, rows)
    return model.score(rows.features, rows.labels)


def _lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    accuracy = told["accuracy"]
    shared = "" if accuracy["shared"] is None else f", shared model {percent(accuracy['shared'])}"
    lines = [("rows", f"{told['rows']:,} of {told['data']}")]
    if told["balance"] is not None:
        lines.append(("balance", f"{told['balance']:.2f}, ridge {told['refinement_ridge']:.3g}"))
    lines.append(("accuracy", f"{percent(accuracy['personal'])} on these rows{shared}; score it on others"))
    lines.append(("model", f"{told['out']} (for this site only)"))
    return lines
