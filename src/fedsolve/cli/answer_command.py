"""`fedsolve answer`: a site's answer to a request that came as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from fedsolve import container
from fedsolve.cli.command import Command, option
from fedsolve.cli.features import BACKBONE, data_root_option, store_option
from fedsolve.cli.keys import key_folder
from fedsolve.cli.options import allow_options, data_options, output_options
from fedsolve.cli.options_file import config_option
from fedsolve.cli.output import Output, check_target, facts
from fedsolve.cli.server import class_names
from fedsolve.cli.site_rows import Diary, site_rows
from fedsolve.cli.site_table import schema_option
from fedsolve.data.lock import locked
from fedsolve.errors import DataError
from fedsolve.network.keyfolder import Keys, private_folder

_DATA = "This site's data"
_SITE = "This site"


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
@option(
    "--keys",
    metavar="DIR",
    group=_SITE,
    help="Folder with ca.crt and this site's key.  [default: FEDSOLVE_KEYS, else keys]",
)
@option("--name", metavar="NAME", required=True, group=_SITE, help="This site's name, as it is registered.")
@option(
    "--classes",
    metavar="A,B,...",
    group=_SITE,
    help="Refuse a run with another class list.  [default: any that has this site's labels]",
)
@option(
    "--share-classes",
    is_flag=True,
    group=_SITE,
    help="Allow sending the names of this site's classes when the server has no list.",
)
@allow_options(_SITE)
@option(
    "--state",
    metavar="DIR",
    group=_SITE,
    help="What was sent, and the model so far.  [default: fedsolve-client-NAME]",
)
@option("--out", metavar="FILE", group=_SITE, help="The answer.  [default: NAME.fst]")
@option("--data", metavar="DATA", required=True, group=_DATA, help="File or address, as for 'train'.")
@option(
    "--backbone",
    metavar="B",
    group=_DATA,
    help=f"What turns images into features.  [default: {BACKBONE}]",
)
@schema_option(
    _DATA, "What a row is: read the file by it, and refuse a server with another.  [default: plain numbers]"
)
@data_root_option
@data_options
@store_option
@config_option
@output_options
def answer(**given: Any) -> None:
    """Answer a request of `fedsolve exchange` with the data of this site.

    The request must be signed by the server whose authority is in ca.crt, and be for this site. The answer is
    sums over rows, signed with this site's key: one file, to be carried back. The same request gets the same
    answer, as often as it is asked.
    """
    output = Output(given["as_json"], given["quiet"])
    name = given["name"]
    out = given["out"] or f"{name}.fst"
    check_target(out, given["request_file"], given["data"], root=given["root"])
    state = Path(given["state"] or f"fedsolve-client-{name}")
    private_folder(state)
    with locked(state / "lock", f"the state folder {state} is used"):
        document = _answer(given, output, state, Path(out))
    output.result(document, lambda page: _show(page, document))


def _answer(given: dict[str, Any], output: Output, state: Path, out: Path) -> dict[str, Any]:
    from fedsolve.network.answering import Answerer
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
    describes = request.note.get("ask") == "describe"
    if describes or not kept.exists():
        data, columns = site_rows(given, output)
        answerer = Answerer(
            name,
            data,
            columns=columns,
            classes=class_names(given["classes"]),
            share_classes=given["share_classes"],
            networks=given["networks"],
            methods=given["methods"],
            scratch=state,
            state=state,
            states=state / "states",
            rows=state / "rows.json",
            show=Diary(output, state / "sent.jsonl").enter,
        )
        note, payload = answerer.reply(request.note, request.payload)
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
        "asks": "what this site has" if describes else f"exchange {request.note.get('exchange', 0) + 1}",
        "answer": str(out),
        "bytes": len(answered),
        "log": str(state / "sent.jsonl"),
    }


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
