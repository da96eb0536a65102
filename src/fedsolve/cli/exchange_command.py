"""`fedsolve exchange`: a federation whose messages are files that people carry."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from fedsolve.cli.command import Choice, option
from fedsolve.cli.keys import key_folder
from fedsolve.cli.method_options import (
    MethodCommand,
    chosen_method,
    class_weight_option,
    method_option,
    weighed,
)
from fedsolve.cli.options import output_options
from fedsolve.cli.options_file import config_option
from fedsolve.cli.output import Output, check_target, facts
from fedsolve.cli.server import ExchangeNotes, class_names, run_document, show_run, take_schema
from fedsolve.cli.site_table import schema_option
from fedsolve.data.lock import locked
from fedsolve.network.keyfolder import Keys, private_folder

if TYPE_CHECKING:
    from fedsolve.federation.engine import Spec
    from fedsolve.federation.method import Method
    from fedsolve.network.flower import CohortReport, FlowerFederation

_SITES = "The sites"
_RUN = "The run"


@click.command(
    "exchange",
    cls=MethodCommand,
    details="Every request is for all registered sites. A run of AFL takes two rounds of files: what the "
    "sites have, and their sums; with a schema whose columns are standardised, three. The same words begin a "
    "run and go on with it.",
    examples=(
        (
            "begin: the first request, for the sites that are registered",
            "fedsolve exchange --keys keys --schema schema.toml --method afl --state run",
        ),
        (
            "go on with the answers that came; at the end, the model",
            "fedsolve exchange north.fst south.fst west.fst \\\n"
            "    --keys keys --schema schema.toml --method afl --state run --out model.safetensors",
        ),
        ("what each site does with a request", "fedsolve answer request-1-3fa41c02.fsq --name north ..."),
    ),
)
@click.argument("answers", nargs=-1, metavar="[ANSWER.fst]...")
@option(
    "--keys",
    metavar="DIR",
    group=_SITES,
    help="Folder made by 'fedsolve keys', with the sites' public keys.  [default: FEDSOLVE_KEYS, else keys]",
)
@option(
    "--classes",
    metavar="A,B,...",
    group=_SITES,
    help="The class list.  [default: the union of what sites agree to send]",
)
@schema_option(
    _SITES, "What a row of the sites' tables is; all of them must have the same.  [default: plain numbers]"
)
@method_option(_RUN)
@class_weight_option(_RUN)
@option(
    "--task",
    more=True,
    type=Choice(["classification", "regression"]),
    default="classification",
    group=_RUN,
    help="What the labels are.",
)
@option(
    "--state",
    metavar="DIR",
    default="fedsolve-exchange",
    group=_RUN,
    help="Requests, answers, checkpoint, report and model; the same folder continues the run.",
)
@option("--out", metavar="FILE", group=_RUN, help="Where to save the model too.")
@config_option
@output_options
@click.pass_context
def exchange(ctx: click.Context, /, **given: Any) -> None:
    """Train over sites without a network: messages are files, carried by mail, a shared folder or a stick.

    Takes the answers that sites gave, and writes the next request or the model. Requests and answers are
    signed; what is stale, foreign, altered or answered twice is refused, and nothing is lost. Results are
    those of every other engine.
    """
    output = Output(given["as_json"], given["quiet"])
    method = chosen_method(ctx)
    given["classes"] = class_names(given["classes"])
    if given["schema"] is not None:
        take_schema(given)
    method = weighed(method, given["schema"], given["class_weight"])
    check_target(given["out"], *given["answers"])
    folder, keys = Path(given["state"]), Keys(key_folder(given["keys"]))
    started = time.perf_counter()
    private_folder(folder)
    with locked(folder / "lock", f"the state folder {folder} is used"):
        document = _go_on(given, output, method, folder, keys)
    document["seconds"] = time.perf_counter() - started
    show = show_run if document["status"] == "complete" else _show_waiting
    output.result(document, lambda page: show(page, document))


def _go_on(
    given: dict[str, Any], output: Output, method: Method[Any], folder: Path, keys: Keys
) -> dict[str, Any]:
    from fedsolve.network.file_link import Awaited, FileLink
    from fedsolve.network.running import State, finished, run_method
    from fedsolve.network.security import verify_server

    verify_server(keys)
    link, state = FileLink(folder, keys), State(folder)
    for path in map(Path, given["answers"]):
        remark = link.take(path, state.checkpoint.exists())
        output.note(f"{path}: {remark or 'taken'}")
    sites = len(link.registered() or ())
    model = finished(method, state, given["classes"], given["task"], sites, given["schema"])
    try:
        if model is None:
            model, _ = run_method(
                method, _federate(given, output, link, sites), state, [ExchangeNotes(output)]
            )
    except Awaited as waiting:
        return {
            "status": "waiting",
            "request": str(waiting.request),
            "bytes": waiting.request.stat().st_size,
            "waiting_for": list(waiting.sites),
            "state": str(folder),
        }
    if given["out"] is not None:
        model.save(given["out"])
    return {"status": "complete", **run_document(method, model, state, None, given["out"])}


def _federate(given: dict[str, Any], output: Output, link: Any, sites: int) -> Any:
    """The federation over files: whoever has not answered is waited for by people, not here."""
    from fedsolve.network.flower import FlowerFederation

    def federate(spec: Spec | None, report: Callable[[CohortReport], None]) -> FlowerFederation:
        federation = FlowerFederation(
            link,
            clients=sites,
            classes=given["classes"],
            task=given["task"],
            patience=0.0,
            schema=given["schema"],
            spec=spec,
            report=report,
            tell=output.note,
        )
        federation.run = link.run
        return federation

    return federate


def _show_waiting(page: Console, document: dict[str, Any]) -> None:
    facts(
        page,
        [
            ("request", f"{document['request']} ({document['bytes']:,} bytes)"),
            ("waiting for", ", ".join(document["waiting_for"])),
            ("at each site", f"fedsolve answer {Path(document['request']).name} --name NAME --data ... "),
            ("then here", "the same command with the answers: fedsolve exchange NAME.fst ..."),
        ],
    )
