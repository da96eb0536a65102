"""`fedsolve personalise`: a site's own model, from a shared model file and the site's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fedsolve.cli.inputs import READING, RowOptions
from fedsolve.cli.options import command, option, required
from fedsolve.cli.output import Output, check_target
from fedsolve.cli.predict import UseOptions
from fedsolve.closedform.dual_stream import PersonalModel
from fedsolve.errors import DataError
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.pages.words import known, percent
from fedsolve.tables.table_file import TrainOrTest

_SITE = "The site"


class PersonaliseOptions(UseOptions):
    data: str = required(argument=True)
    out: str = required("The site's own model; mode 0600.", "FILE", group=_SITE)
    name: str | None = option(None, "The site's name in the run.", "NAME", none="it joins now", group=_SITE)
    state: str | None = option(
        None, "State folder of 'fedsolve client', with its part of the run.", "DIR", group=_SITE
    )
    growing: bool = option(
        False, "apfl: keep the sums in the file, so that rows can be added to it in Python.", group=_SITE
    )
    part: TrainOrTest | None = option(None, "Data with both parts: which rows.", none="train", group=READING)


@command()
def personalise(options: PersonaliseOptions, reading: RowOptions, output: Output) -> None:
    """Make a site's own model where its rows are, from the shared MODEL and the rows of DATA.

    MODEL was trained by a personalised method: apfl, ditto and the like ('fedsolve methods'). Nothing is
    sent, so a site that had no part in the training has its own model too. Treat the file as you treat
    the rows: it may give them away.

    # a site's own model, from the shared one and the site's rows
    fedsolve personalise shared.safetensors north.csv --out north.safetensors
    # after a run with a method whose sites keep something, such as ditto
    fedsolve personalise shared.safetensors north.npz --name north --state fedsolve-client-north \\
        --out north.safetensors
    """
    check_target(options.out, options.model, options.data, options.state, root=reading.root)
    model = options.predictor()
    if model.classes is None:
        raise DataError(f"{options.model} is a regression model; this command is for classifiers.")
    reader = options.reading_for(model, options.data, reading).reader(output)
    name, states, part = options.name, None, options.part
    if options.state is None:
        name = name or "a site that joins"
    elif name is None:
        raise click.UsageError("--state holds what a site kept under its name; give --name too")
    elif not (states := Path(options.state) / "states").is_dir():
        raise DataError(f"{options.state} is no state folder of 'fedsolve client': it holds no states.")
    if part is None and "train" in reader.parts(options.data):
        part = "train"
    rows = reader.rows(options.data, part, classes=model.classes, width=model.features, schema=model.schema)
    assert rows.labels is not None
    participant = Participant(
        name, ClientData(rows.features, rows.labels, schema=model.schema), states=states
    )
    own = participant.personalise(model)
    if options.growing and not isinstance(own, PersonalModel):
        raise click.UsageError("--growing is for models of apfl, whose sums take further rows")
    own.save(options.out, **({"growing": True} if options.growing else {}))
    document: dict[str, Any] = {
        "model": options.model,
        "data": options.data,
        "rows": len(rows),
        "balance": own.balance if isinstance(own, PersonalModel) else None,
        "refinement_ridge": own.refinement_ridge if isinstance(own, PersonalModel) else None,
        "accuracy": {
            "personal": own.score(rows.features, rows.labels),
            "shared": model.score(rows.features, rows.labels) if model.predicts else None,
        },
        "out": options.out,
    }
    accuracy, ridge = document["accuracy"], known(document["refinement_ridge"], ", ridge {:.3g}")
    shared = known(accuracy["shared"], lambda share: f", shared model {percent(share)}")
    lines = [
        ("rows", f"{len(rows):,} of {options.data}"),
        ("balance", known(document["balance"], "{:.2f}" + ridge)),
        ("accuracy", f"{percent(accuracy['personal'])} on these rows{shared}; measure it on other rows"),
        ("model", f"{options.out} (for this site only)"),
    ]
    output.result(document, lines)
