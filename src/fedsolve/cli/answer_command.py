"""`fedsolve answer`: a site's answer to a request that came as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve import container
from fedsolve.cli.command import Command, option
from fedsolve.cli.keys import key_folder
from fedsolve.cli.options import output_options
from fedsolve.cli.options_file import config_option
from fedsolve.cli.output import Output, check_target, facts
from fedsolve.cli.site_side import (
    SITE,
    answerer,
    site_data_options,
    site_options,
    state_folder,
    trust_options,
)
from fedsolve.data.lock import locked
from fedsolve.errors import DataError
from fedsolve.network.keyfolder import Keys, private_folder, require_ciphers


@click.command(
    "answer",
    cls=Command,
    examples=(
        (
            "answer a request with a table, by the schema that all sites were given",
            "fedsolve answer request-1-3fa41c02.fsq --keys keys --name north \\\n"
            "    --data patients.csv --schema schema.toml --out north.fst",
        ),
    ),
)
@click.argument("request_file", metavar="REQUEST.fsq")
@trust_options(SITE)
@site_options
@option("--out", metavar="FILE", group=SITE, help="The answer.  [default: NAME.fst]")
@site_data_options
@config_option
@output_options
def answer(**given: Any) -> None:
    """Answer a request of `fedsolve exchange` with the data of this site.

    The request must be signed by the server whose authority is in ca.crt, and be for this site. The answer is
    sums over rows, masked so that the server sees totals over all sites only, and signed with this site's
    key: one file, to be carried back. The same request gets the same answer, as often as it is asked.
    """
    output = Output(given["as_json"], given["quiet"])
    out = given["out"] or f"{given['name']}.fst"
    check_target(out, given["request_file"], given["data"], root=given["root"])
    require_ciphers()
    state = state_folder(given)
    private_folder(state)
    with locked(state / "lock", f"the state folder {state} is used"):
        document = _answer(given, output, state, Path(out))
    output.result(document, lambda page: _show(page, document))


def _answer(given: dict[str, Any], output: Output, state: Path, out: Path) -> dict[str, Any]:
    from fedsolve.network.envelopes import Envelope, signing
    from fedsolve.network.file_link import open_request
    from fedsolve.network.security import load_client_key, verify_client

    name, keys = given["name"], Keys(key_folder(given["keys"]))
    verify_client(keys, name)
    path = Path(given["request_file"])
    request = open_request(path, keys.authority)
    if name not in request.to:
        raise DataError(f"{path} is for {', '.join(request.to)}, not for '{name}'.")
    kept = state / "answered" / f"{request.message}.fst"
    if request.note.get("ask") == "describe" or not kept.exists():
        made, _, _ = answerer(given, output, state, state=state)
        note, payload = made.reply(request.note, request.payload)
        if not note["ok"]:
            # What is wrong was shown, and may not be for others' eyes: nothing is left to be carried.
            raise DataError(f"{path} is not answered: {note['message']}")
        reply = Envelope("answer", request.run, request.message, name, note, np.frombuffer(payload, np.uint8))
        container.write_atomically(kept, reply.seal(signing(load_client_key(keys, name))), private=True)
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
    """What a request is about, in words."""
    if note.get("ask") == "describe":
        return "what this site has"
    if note.get("ask") == "letter":
        return str(note.get("channel"))
    return f"exchange {note.get('exchange', 0) + 1}"


def _show(page: Console, document: dict[str, Any]) -> None:
    facts(
        page,
        [
            ("site", document["name"]),
            ("request", f"{document['request']}: {document['asks']}"),
            ("answer", f"{document['answer']} ({document['bytes']:,} bytes), to be carried to the server"),
            ("log", document["log"]),
        ],
    )
