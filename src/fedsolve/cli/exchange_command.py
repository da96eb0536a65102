"""`fedsolve exchange`: a federation whose messages are files that people carry."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from fedsolve.cli.keys import key_folder
from fedsolve.cli.method_options import MethodCommand, chosen_method, weighed
from fedsolve.cli.options import output_options
from fedsolve.cli.options_file import config_option
from fedsolve.cli.output import Output, check_target, facts
from fedsolve.cli.run_options import cohort_options, sums_options, training_options
from fedsolve.cli.server import (
    ExchangeNotes,
    check_secure,
    class_names,
    run_document,
    secured,
    show_run,
    take_schema,
)
from fedsolve.data.lock import locked
from fedsolve.network.keyfolder import Keys, private_folder, require_ciphers

if TYPE_CHECKING:
    from fedsolve.federation.engine import Spec
    from fedsolve.federation.method import Method
    from fedsolve.network.flower import CohortReport, FlowerFederation

_SITES = "The sites"
_RUN = "The run"


@click.command(
    "exchange",
    cls=MethodCommand,
    details="A run is for the sites that are registered when it begins. Sums are secure: a run of AFL takes "
    "five rounds of files, one for what the sites have and four for the sum (keys, shares, masked sums, "
    "opening), and two for every sum more. With --plain each sum takes one round, and the server sees every "
    "site's. The same words begin a run and go on with it.",
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
@sums_options(_SITES)
@cohort_options(_SITES)
@training_options(_RUN, "fedsolve-exchange")
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
    given |= {"insecure": False, "missing": "wait"}
    given["classes"] = class_names(given["classes"])
    if given["schema"] is not None:
        take_schema(given)
    method = weighed(method, given["schema"], given["class_weight"])
    check_target(given["out"], *given["answers"])
    require_ciphers()
    folder, keys = Path(given["state"]), Keys(key_folder(given["keys"]))
    given["clients"] = _sites(keys)
    check_secure(ctx, given, method)
    started = time.perf_counter()
    private_folder(folder)
    with locked(folder / "lock", f"the state folder {folder} is used"):
        document = _go_on(given, output, method, folder, keys)
    document["seconds"] = time.perf_counter() - started
    show = show_run if document["status"] == "complete" else _show_waiting
    output.result(document, lambda page: show(page, document))
    for doubt in document.get("warnings", ()):
        output.warn(doubt)


def _go_on(
    given: dict[str, Any], output: Output, method: Method[Any], folder: Path, keys: Keys
) -> dict[str, Any]:
    from fedsolve.network.file_link import Awaited, FileLink
    from fedsolve.network.running import State, finished, run_method
    from fedsolve.network.security import verify_server

    verify_server(keys)
    link, state = FileLink(folder, keys, secure=not given["plain"]), State(folder)
    for path in map(Path, given["answers"]):
        remark = link.take(path, state.checkpoint.exists())
        output.note(f"{path}: {remark or 'taken'}")
    sites = len(link.nodes())
    model = finished(method, state, given["classes"], given["task"], sites, given["schema"])
    try:
        if model is None:
            federate = _federate(given, output, link, sites)
            around = None if given["plain"] else secured(given, state, lasting=True)
            model, _ = run_method(method, federate, state, [ExchangeNotes(output)], around)
    except Awaited as waiting:
        return {
            "status": "waiting",
            "requests": [
                {"file": str(path), "bytes": path.stat().st_size, "waiting_for": list(names)}
                for path, names in waiting.requests.items()
            ],
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
            secure=not given["plain"],
            spec=spec,
            report=report,
            tell=output.note,
        )
        federation.run = link.run
        return federation

    return federate


def _sites(keys: Keys) -> int:
    from fedsolve.network.security import registered

    return len(registered(keys))


def _show_waiting(page: Console, document: dict[str, Any]) -> None:
    lines = [
        ("request", f"{one['file']} ({one['bytes']:,} bytes), for {', '.join(one['waiting_for'])}")
        for one in document["requests"]
    ]
    lines += [
        ("at each site", "fedsolve answer REQUEST.fsq --name NAME --data ..."),
        ("then here", "the same command with the answers: fedsolve exchange NAME.fst ..."),
    ]
    facts(page, lines)
