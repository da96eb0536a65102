"""`fedsolve files`: a federation whose messages are files that people carry."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from fedsolve import container
from fedsolve.cli.method_options import MethodCommand
from fedsolve.cli.options import ExamplesGroup, command, option, required
from fedsolve.cli.output import Output, check_target
from fedsolve.cli.run_options import RunOptions
from fedsolve.cli.server import exchange_notes, federated, run_document, run_lines, secured
from fedsolve.cli.site_side import SiteDataOptions, SiteOptions, answerer
from fedsolve.errors import DataError
from fedsolve.network.keyfolder import Keys, state_folder

if TYPE_CHECKING:
    from fedsolve.federation.recipe import Recipe


@click.group(cls=ExamplesGroup)
def files() -> None:
    """Train without a network: messages are signed files, carried by mail, a shared folder or a stick."""


class AskOptions(RunOptions):
    answers: tuple[str, ...] = option((), argument=True, metavar="[ANSWER.fst]...")
    state: str = option("fedsolve-files")


@command(group=files, cls=MethodCommand, config=True)
def ask(options: AskOptions, output: Output) -> None:
    """Train over sites without a network: messages are files, carried by mail, a shared folder or a stick.

    Takes the answers that sites gave, and writes the next request or the model. Requests and answers are
    signed; what is stale, foreign, altered or answered twice is refused, and nothing is lost. Results are
    those of every other engine.

    Details:
    A run is for the sites that are registered when it begins. Sums are secure: a run of AFL takes five rounds
    of files, one for what the sites have and four for the sum (keys, shares, masked sums, opening), and two
    for every sum more. With --plain each sum takes one round, and the server sees every site's. The same
    words begin a run and go on with it.

    # begin: the first request, for the sites that are registered
    fedsolve files ask --keys keys --schema schema.toml --method afl --state run
    # go on with the answers that came; at the end, the model
    fedsolve files ask north.fst south.fst west.fst \\
        --keys keys --schema schema.toml --method afl --state run --out model.safetensors
    # what each site does with a request
    fedsolve files answer request-1-3fa41c02.fsq --name north ...
    """
    recipe = options.recipe(options.chosen(output), options.rows)
    for written in (options.out, options.schema_out):
        check_target(written, *options.answers)
    folder, keys = Path(options.state), options.open_keys
    options.check(recipe, len(keys.registered.sites()))
    started = time.perf_counter()
    with state_folder(folder):
        document = _go_on(options, output, recipe, folder, keys)
    document["seconds"] = time.perf_counter() - started
    shown = run_lines if document["status"] == "complete" else _waiting_lines
    output.result(document, shown(document))


def _go_on(
    options: AskOptions, output: Output, recipe: Recipe[Any], folder: Path, keys: Keys
) -> dict[str, Any]:
    from fedsolve.network import diagnosis
    from fedsolve.network.file_link import Awaited, FileLink
    from fedsolve.network.running import State, finished, run_method

    diagnosis.verify(diagnosis.server_keys(keys))
    link, state = FileLink(folder, keys, secure=not options.plain), State(folder)
    for path in map(Path, options.answers):
        remark = link.take(path, state.checkpoint.exists())
        output.note(f"{path}: {remark or 'taken'}")
    sites = len(link.nodes())
    model = finished(recipe, state, options.class_names(), options.kind, sites, options.rows)
    try:
        if model is None:
            # Whoever has not answered is waited for by people, not here.
            federation = federated(options, output, link, sites, state, patience=0.0)
            federation.agreement.run = link.run
            engine = federation if options.plain else secured(options, federation, state, lasting=True)
            model = run_method(recipe, engine, state, exchange_notes(output))
    except Awaited as waiting:
        requests = [
            {"file": str(path), "bytes": path.stat().st_size, "waiting_for": list(names)}
            for path, names in waiting.requests.items()
        ]
        told = {"requests": requests, "waiting_for": list(waiting.sites), "state": str(folder)}
        return {"status": "waiting", **told}
    return {"status": "complete", **run_document(options, recipe, model, state)}


def _waiting_lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for one in document["requests"]:
        told = f"{one['file']} ({one['bytes']:,} bytes), for {', '.join(one['waiting_for'])}"
        lines.append(("request", told))
    lines.append(("at each site", "fedsolve files answer REQUEST.fsq --name NAME --data ..."))
    return [*lines, ("then here", "the same command with the answers: fedsolve files ask NAME.fst ...")]


class AnswerOptions(SiteOptions):
    request_file: str = required(argument=True, metavar="REQUEST.fsq")
    out: str | None = option(None, "The answer.", "FILE", none="NAME.fst")


@command(group=files, config=True)
def answer(site: AnswerOptions, rows: SiteDataOptions, output: Output) -> None:
    """Answer a request of `fedsolve files ask` with the data of this site.

    The request must be signed by the server whose authority is in ca.crt, and be for this site. The answer is
    sums over rows, masked so that the server sees totals over all sites only, and signed with this site's
    key: one file, to be carried back. The same request gets the same answer, as often as it is asked.

    # answer a request with a table, by the schema that all sites were given
    fedsolve files answer request-1-3fa41c02.fsq --keys keys --name north \\
        --data patients.csv --schema schema.toml --out north.fst
    """
    out = site.out or f"{site.name}.fst"
    check_target(out, site.request_file, rows.data, root=rows.root)
    with state_folder(site.folder):
        document = _answer(site, rows, output, Path(out))
    lines = [
        ("site", document["name"]),
        ("request", f"{document['request']}: {document['asks']}"),
        ("answer", f"{document['answer']} ({document['bytes']:,} bytes), to be carried to the server"),
        ("log", document["log"]),
    ]
    output.result(document, lines)


def _answer(site: AnswerOptions, rows: SiteDataOptions, output: Output, out: Path) -> dict[str, Any]:
    from fedsolve.network import diagnosis
    from fedsolve.network.file_link import Envelope, open_request
    from fedsolve.network.security import load_client_key

    name, keys, state = site.name, site.open_keys, site.folder
    diagnosis.verify(diagnosis.site_keys(keys, name))
    path = Path(site.request_file)
    request = open_request(path, keys.authority)
    if name not in request.to:
        raise DataError(f"{path} is for {', '.join(request.to)}, not for '{name}'.")
    kept = state / "answered" / f"{request.message}.fst"
    if request.note.get("ask") == "describe" or not kept.exists():
        made, _ = answerer(site, rows, output, state=state)
        note, payload = made.reply(request.note, request.payload)
        if not note["ok"]:
            # What is wrong was shown, and may not be for others' eyes: nothing is left to be carried.
            raise DataError(f"{path} is not answered: {note['message']}")
        reply = Envelope("answer", request.run, request.message, name, note, np.frombuffer(payload, np.uint8))
        container.write_atomically(kept, reply.seal(load_client_key(keys, name)), private=True)
    answered = container.read(kept)
    container.write_atomically(out, answered)
    return {
        "name": name,
        "request": str(path),
        "asks": _asks(request.note),
        "answer": str(out),
        "bytes": len(answered),
        "log": str(state / "sent.jsonl"),
    }


def _asks(note: dict[str, Any]) -> str:
    if note.get("ask") == "describe":
        return "what this site has"
    if note.get("ask") == "letter":
        return str(note.get("channel"))
    return f"exchange {note.get('exchange', 0) + 1}"
