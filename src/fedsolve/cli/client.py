"""`fedsolve client`: take part in a federation with the data of this site."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fedsolve import registry
from fedsolve.backends.devices import resolve
from fedsolve.cli.command import TwoPages
from fedsolve.cli.model_options import DeviceOptions
from fedsolve.cli.options import command, option, required
from fedsolve.cli.output import LoggedOutput, Output
from fedsolve.cli.run_options import named_classes
from fedsolve.cli.site_side import SITE, SiteDataOptions, SiteOptions, answerer, site_rows
from fedsolve.container import locked
from fedsolve.errors import DataError
from fedsolve.network.calls import address
from fedsolve.network.keyfolder import private_folder
from fedsolve.pages.words import known, megabytes
from fedsolve.watching.log_lines import begin_lines, keep_lines

if TYPE_CHECKING:
    from fedsolve.network.certificates import Validity

_DAY = 24 * 3600.0
_NET = "The server"
_PLAIN = "PLAIN: the server sees this site's own"
_USUAL = ("afl", "softmax", "deepafl")
"""Methods of a dry run where the policy names none, each with its defaults."""


class ClientSiteOptions(DeviceOptions, SiteOptions):
    title = SITE
    server: str = required("The server's address.", "HOST:PORT", group=_NET)
    insecure: bool = option(False, "No TLS and no authentication: for trials on one machine.", group=_NET)
    once: bool = option(False, "End when a run is complete, instead of waiting for more.")
    dry_run: bool = option(False, "Send nothing: say what would be sent and told, and which rows wait.")


@command(cls=TwoPages, config=True)
def client(site: ClientSiteOptions, rows: SiteDataOptions, output: LoggedOutput) -> None:
    """Take part in a federation with the data of this site.

    Features are extracted once and stay in the local store; rows never leave. What is sent are sums over
    rows, masked so that the server sees totals over all sites only, listed as they go and kept in sent.jsonl.
    Nothing is run but the fedsolve installed here, and no port is opened. Stop with Ctrl-C; start again at
    any time: a site that was away is brought up to date. A site whose columns, schema or backbone are not
    those of the run ends at once, with exit code 2.

    # take part with images in one folder per class, as features of a pre-trained backbone
    fedsolve client --server fed.example.org:9092 --keys keys --name north \\
        --data folder:./images --backbone efficientnet-lite0
    # with a csv file, all settings in a file
    fedsolve client --config site.toml --data patients.csv --label diagnosis
    # before that: what would be sent, which rows wait and how much would have been told; nothing is sent
    fedsolve client --config site.toml --data patients.csv --label diagnosis --dry-run
    # by the schema that all sites were given: categories, dates, missing values; or images
    fedsolve client --config site.toml --data patients.csv --schema schema.toml
    """
    begin_lines("client", output.log)
    state = site.folder
    address(site.server)
    resolve(site.device)
    if site.dry_run:
        _rehearse(site, rows, output)
        return
    private_folder(state)
    with locked(state / "lock", f"the state folder {state} is used"):
        keep_lines(state / "client.log", "client", output.log)
        document = _take_part(site, rows, output)
    sent = f"{megabytes(document['bytes_sent'])} MB: {', '.join(document['sent']) or 'nothing'}"
    lines = [
        ("site", f"{document['name']} ({document['rows']:,} rows)"),
        ("answers", str(document["answers"])),
        ("sent", sent),
        ("received", f"{megabytes(document['bytes_received'])} MB"),
        ("log", document["log"]),
    ]
    output.result(document, lines)


def _rehearse(site: ClientSiteOptions, rows: SiteDataOptions, output: Output) -> None:
    """Say what a run would take from this site."""
    from fedsolve.privacy.notes import LEAST_COHORT
    from fedsolve.privacy.policy import SitePolicy
    from fedsolve.privacy.rehearsal import Rehearsal

    policy = SitePolicy() if site.policy is None else SitePolicy.from_file(site.policy)
    data, columns = site_rows(site.name, rows, output)
    sites = 1 if site.plain else max(LEAST_COHORT, len({site.name, *site.key_folder.roster.sites()}))
    trial = Rehearsal(
        site.name, data, policy, site.folder / "ledger", sites, not site.plain, named_classes(site.classes)
    )
    counted = trial.count()
    tried = [trial.tried(registry.method_class(key)()) for key in policy.methods or _USUAL]
    described = f"{data.width:,} features" + (" and the names of its columns" if columns else "")
    document = {"site": site.name, "rows": len(data), "sites": sites, "described": described}
    document |= {"secure": not site.plain, "census": counted, "methods": [vars(each) for each in tried]}
    lines = [
        ("site", f"{site.name} ({len(data):,} rows)"),
        ("sums", _PLAIN if site.plain else f"masked; as if each of {sites} sites had rows like these"),
        ("described", described),
        ("rows", counted),
    ]
    for each in tried:
        told = known(each.told, "; told then: {:.0%}")
        sent = f"{each.exchanges} exchange(s), {megabytes(each.bytes_up)} MB ({', '.join(each.arrays)}){told}"
        lines.append((each.method, f"{sent}; REFUSED: {each.refused}" if each.refused else sent))
    output.result(document, [*lines, ("", "Nothing was sent, and nothing counts as told.")])


def _take_part(site: ClientSiteOptions, data: SiteDataOptions, output: Output) -> dict[str, Any]:
    from fedsolve.network import require_network

    require_network()
    connection = _connection(site)
    made, diary = answerer(site, data, output, device=site.device)
    from fedsolve.network.node import SiteNode

    expiry = _expiry(site, output)
    node = SiteNode(made, connection, tell=output.note, connected=expiry)
    diary.on_over = node.stop if site.once else None
    diary.on_barred = node.stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    node.serve()
    if diary.barred is not None:
        raise DataError(f"'{site.name}' cannot take part: {diary.barred}")
    return {"name": site.name, "rows": len(made), **diary.summary()}


def _connection(site: ClientSiteOptions) -> Any:
    from fedsolve.network.node import Connection

    if site.insecure:
        if site.keys is not None:
            raise click.UsageError("--insecure uses no keys; leave out one of --keys and --insecure")
        if not site.plain:
            raise click.UsageError(
                "secure sums need keys, by which sites know each other; with --insecure give --plain too"
            )
        return Connection(site.server, insecure=True)
    from fedsolve.network import diagnosis

    keys = site.key_folder
    diagnosis.verify(diagnosis.site_keys(keys, site.name))
    return Connection(site.server, keys.authority, keys.client_key(site.name))


def _expiry(site: ClientSiteOptions, output: Output) -> Callable[[Validity | None], None]:
    """What tells people at a site, once a day at most, which certificate is about to expire."""
    from fedsolve.network.certificates import ASK_FOR_AUTHORITY, of_authority

    told = -math.inf

    def announce(shown: Validity | None) -> None:
        nonlocal told
        if shown is None or time.monotonic() - told < _DAY:
            return
        told = time.monotonic()
        for one in (of_authority(site.key_folder, ASK_FOR_AUTHORITY), shown):
            if text := one.announced:
                output.warn(text, certificate=one.name, days=one.days)

    return announce
