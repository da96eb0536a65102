"""`fedsolve client` and `fedsolve audit`: take part with the data of this site; measure what that tells."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fedsolve import registry
from fedsolve.backends.devices import resolve
from fedsolve.cli.model_options import DeviceOptions
from fedsolve.cli.options import Options, command, option, required
from fedsolve.cli.output import Interrupted, LoggedOutput, Output, check_target, write_text
from fedsolve.cli.run_options import named_classes
from fedsolve.cli.site_side import SiteDataOptions, SiteOptions, answerer, proposed, site_rows
from fedsolve.errors import CohortError, DataError
from fedsolve.network.calls import address
from fedsolve.network.keyfolder import state_folder
from fedsolve.pages.words import known, megabytes
from fedsolve.tables.proposal import alone, summary
from fedsolve.watching.log_lines import begin_lines, keep_lines

if TYPE_CHECKING:
    from fedsolve.network.answering import Event
    from fedsolve.network.certificates import Validity

_DAY = 24 * 3600.0
_NET = "The server"
_PLAIN = "PLAIN: the server sees this site's own"
_USUAL = ("afl", "softmax", "deepafl")
"""Methods of a dry run where the policy names none, each with its defaults."""


class ClientSiteOptions(DeviceOptions, SiteOptions):
    server: str = required("The server's address.", "HOST:PORT", group=_NET)
    insecure: bool = option(False, "No TLS and no authentication: for trials on one machine.", group=_NET)
    once: bool = option(False, "End when a run is complete or has failed, instead of waiting for more.")
    dry_run: bool = option(False, "Send nothing: say what would be sent and told, and which rows wait.")


@command(config=True, every="Show every option.")
def client(site: ClientSiteOptions, rows: SiteDataOptions, output: LoggedOutput) -> None:
    """Take part in a federation with the data of this site.

    Features are extracted once and stay in the local store; rows never leave. What is sent are sums over
    rows, masked so that the server sees totals over all sites only, listed as they go and kept in sent.jsonl.
    Nothing is run but the fedsolve installed here, and no port is opened. Stop with Ctrl-C; start again at
    any time: a site that was away is brought up to date. A site whose columns, schema or backbone are not
    those of the run ends at once, with exit code 2. With --once it ends with the run: with 0 where there is
    a model, with 3 where the run failed.

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
    with state_folder(state):
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
    proposal = proposed(rows, policy)
    data, columns = site_rows(site.name, rows, output, None if proposal is None else alone(proposal))
    sites = 1 if site.plain else max(LEAST_COHORT, len({site.name, *site.key_folder.roster.sites()}))
    trial = Rehearsal(
        site.name, data, policy, site.folder / "ledger", sites, not site.plain, named_classes(site.classes)
    )
    counted = trial.count()
    tried = [trial.tried(registry.method_class(key)()) for key in policy.methods or _USUAL]
    described = f"{data.width:,} features" + (" and the names of its columns" if columns else "")
    if proposal is not None:
        told = "; ".join(summary(proposal, levels=True))
        described = f"what its columns are: {told}. Below, as if all sites proposed the same"
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
    from fedsolve.network import diagnosis
    from fedsolve.network.node import Connection, SiteNode

    site.check_keys()
    keys, connection = site.key_folder, Connection(site.server, insecure=True)
    if not site.insecure:
        diagnosis.verify(diagnosis.site_keys(keys, site.name))
        connection = Connection(site.server, keys.authority, keys.client_key(site.name))
    made, diary = answerer(site, data, output, device=site.device)
    node = SiteNode(made, connection, tell=output.note, connected=_expiry(site, output))
    ended: list[Event] = []

    def end(event: Event) -> None:
        if event.barred or site.once:
            ended.append(event)
            node.stop()

    diary.on_end = end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    node.serve()
    for event in ended[:1]:
        if event.barred:
            why = event.text.removeprefix("DataError: ").removeprefix("refused: ")
            raise DataError(f"'{site.name}' cannot take part: {why}")
        if event.failed:
            raise CohortError(event.text)
    if site.once and not ended:
        raise Interrupted("stopped before a run was over. Start this again to go on.")
    return {"name": site.name, "rows": len(made), **diary.summary()}


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


class AuditOptions(Options):
    title = "Audit"
    epsilon: float | None = option(None, "Also with noise: a private run of this epsilon.", none="no noise")
    of: str = option("afl", "The private method: afl or softmax.", "NAME")
    sites: int = option(3, "Sites of a secure sum, all of this one's size.", least=1)
    seed: int = option(0, "Of canaries and of rows held out.")
    page: str | None = option(None, "Write a page for people: .html.", "FILE")


@command()
def audit(rows: SiteDataOptions, options: AuditOptions, output: Output) -> None:
    """Measure what sums over this site's rows would give away, before anything is sent.

    Rank, small classes, leverage, membership by an attack on rows held out, and canaries that bound epsilon
    from below; for a server that sees this site's sums, the total over sites, or a total with noise.

    # what secure sums hide, and what an epsilon of 1 adds to it
    fedsolve audit --data rows.npz --epsilon 1 --page audit.html
    """
    from fedsolve.closedform.afl import AFL
    from fedsolve.closedform.private import Private
    from fedsolve.federation.local import LocalFederation
    from fedsolve.federation.participant import Participant
    from fedsolve.pages.templates import render
    from fedsolve.privacy.attacks import audit as audited
    from fedsolve.privacy.attacks import told

    check_target(options.page)
    data, _ = site_rows("site", rows, output)
    spec = LocalFederation([Participant("site", data)]).describe()
    private = None if options.epsilon is None else Private(options.of, epsilon=options.epsilon)
    findings = audited(data, spec, AFL(), private, sites=options.sites, seed=options.seed)
    if options.page is not None:
        write_text(options.page, render("audit.html", title="Audit", kind="evaluation", findings=findings))
    output.result({"findings": [one.as_dict() for one in findings]}, lambda page: click.echo(told(findings)))
