"""`fedsolve client`: take part in a federation with the data of this site."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from fedsolve.backends.devices import resolve
from fedsolve.cli.command import Command, option
from fedsolve.cli.keys import key_folder
from fedsolve.cli.options import log_option, output_options
from fedsolve.cli.options_file import config_option
from fedsolve.cli.output import Output, begin_lines, facts, keep_lines, megabytes
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
from fedsolve.network.gate import address
from fedsolve.network.keyfolder import private_folder

_DAY = 24 * 3600.0
_NET = "The server"


@click.command(
    cls=Command,
    examples=(
        (
            "take part with images in one folder per class, as features of a pre-trained backbone",
            "fedsolve client --server fed.example.org:9092 --keys keys --name north \\\n"
            "    --data folder:./images --backbone efficientnet-lite0",
        ),
        (
            "with a csv file, all settings in a file",
            "fedsolve client --config site.toml --data patients.csv --label diagnosis",
        ),
        (
            "by the schema that all sites were given: categories, dates, missing values; or images",
            "fedsolve client --config site.toml --data patients.csv --schema schema.toml",
        ),
    ),
)
@option("--server", metavar="HOST:PORT", required=True, group=_NET, help="The server's address.")
@option(
    "--insecure",
    is_flag=True,
    group=_NET,
    help="Neither TLS nor authentication: for trials on one machine.",
)
@trust_options(_NET)
@site_options
@option(
    "--device",
    metavar="NAME",
    default="cpu",
    group=SITE,
    help="Where to compute: cpu, torch:cpu, cuda, cuda:1, auto.",
)
@option("--once", is_flag=True, group=SITE, help="End when a run is complete, instead of waiting for more.")
@site_data_options
@config_option
@log_option
@output_options
def client(**given: Any) -> None:
    """Take part in a federation with the data of this site.

    Features are extracted once and stay in the local store; rows never leave. What is sent are sums over
    rows, masked so that the server sees totals over all sites only, listed as they go and kept in sent.jsonl.
    Nothing is run but the fedsolve installed here, and no port is opened. Stop with Ctrl-C; start again at
    any time: a site that was away is brought up to date. A site whose columns, schema or backbone are not
    those of the run ends at once, with exit code 2.
    """
    output = Output(given["as_json"], given["quiet"], given["log"])
    begin_lines("client", given["log"])
    name = given["name"]
    state = state_folder(given)
    address(given["server"])
    resolve(given["device"])
    private_folder(state)
    with locked(state / "lock", f"the state folder {state} is used"):
        keep_lines(state / "client.log", "client", given["log"])
        document = _take_part(given, output, name, state)
    output.result(document, lambda page: _show(page, document))


def _take_part(given: dict[str, Any], output: Output, name: str, state: Path) -> dict[str, Any]:
    from fedsolve.network import require_network

    require_network()
    connection = _connection(given, name)
    made, diary, rows = answerer(given, output, state, device=given["device"])
    from fedsolve.network.node import FleetNode

    expiry = _Expiry(connection, given, output)
    node = FleetNode(made, connection, state=state, tell=output.note, connected=expiry.announce)
    diary.on_over = node.stop if given["once"] else None
    diary.on_barred = node.stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    node.serve()
    if diary.barred is not None:
        raise DataError(f"'{name}' cannot take part: {diary.barred}")
    return {"name": name, "rows": rows, **diary.summary()}


def _connection(given: dict[str, Any], name: str) -> Any:
    from fedsolve.network.node import Connection

    if given["insecure"]:
        if given["keys"] is not None:
            raise click.UsageError("--insecure uses no keys; leave out one of --keys and --insecure")
        if not given["plain"]:
            raise click.UsageError(
                "secure sums need keys, by which sites know each other; with --insecure give --plain too"
            )
        return Connection(given["server"], insecure=True)
    from fedsolve.network.keyfolder import Keys
    from fedsolve.network.security import verify_client

    keys = Keys(key_folder(given["keys"]))
    verify_client(keys, name)
    return Connection(given["server"], keys.authority, keys.client_key(name))


class _Expiry:
    """Tells people at a site, once a day at most, which certificate is about to expire."""

    def __init__(self, connection: Any, given: dict[str, Any], output: Output) -> None:
        self._authority: Path | None = connection.authority
        self._given = given
        self._output = output
        self._told: float | None = None

    def announce(self) -> None:
        from fedsolve.network import validity
        from fedsolve.network.keyfolder import Keys

        if self._authority is None or (self._told is not None and time.monotonic() - self._told < _DAY):
            return
        self._told = time.monotonic()
        shown = validity.as_served(*address(self._given["server"]), self._authority)
        for one in (validity.of_site(Keys(key_folder(self._given["keys"]))), shown):
            if one is not None and (text := one.announced):
                self._output.warn(text, certificate=one.name, days=one.days)


def _show(page: Console, told: dict[str, Any]) -> None:
    facts(
        page,
        [
            ("site", f"{told['name']} ({told['rows']:,} rows)"),
            ("answers", str(told["answers"])),
            ("sent", f"{megabytes(told['bytes_sent'])} MB: {', '.join(told['sent']) or 'nothing'}"),
            ("received", f"{megabytes(told['bytes_received'])} MB"),
            ("log", told["log"]),
        ],
    )
