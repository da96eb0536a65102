"""`fedsolve keys`: the authority, the server's certificate, the sites' keys and the list of sites."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fedsolve.cli.command import Command, ExamplesGroup, F, option
from fedsolve.cli.options import output_options
from fedsolve.cli.output import Output, facts, table
from fedsolve.network import certificates, require_network, security
from fedsolve.network.keyfolder import Keys
from fedsolve.network.security import Site

_FILES = "The files"
_SERVER = "The server"
_FOLDER, _ENVIRONMENT = "keys", "FEDSOLVE_KEYS"

EXAMPLES = (
    (
        "at the server: an authority, and a certificate for the names that sites will use",
        "fedsolve keys init --host fedsolve.hospital.example --host 10.0.0.5",
    ),
    ("at a site: its key pair, of which north.pub goes to the server", "fedsolve keys client north"),
    ("at the server: let the site in", "fedsolve keys register north.pub"),
    ("at a site: know the other sites, for secure sums", "fedsolve keys roster south.pub west.pub"),
)


@click.group(cls=ExamplesGroup, examples=EXAMPLES)
def keys() -> None:
    """Make and manage the keys of a federation over a network.

    The server has a certificate, signed by an authority of its own, by which sites know it. Each site has a
    key pair, by which the server knows the site. Private keys (*.key) stay where they were made.
    """


class _KeysCommand(Command):
    """A command that needs the Flower extra to run, but not to show its help."""

    def invoke(self, ctx: click.Context) -> Any:
        require_network()
        return super().invoke(ctx)


def keys_option(command: F) -> F:
    """Decorator: --keys, the folder of keys."""
    return option(
        "--keys",
        "folder",
        metavar="DIR",
        default=_FOLDER,
        envvar=_ENVIRONMENT,
        group=_FILES,
        help="Folder of keys (also FEDSOLVE_KEYS).",
    )(command)


def key_folder(given: str | None) -> str:
    """The folder of keys that a command uses which may also do without any."""
    return given or os.environ.get(_ENVIRONMENT) or _FOLDER


def _days_option(command: F) -> F:
    text = "Days for which the server's certificate is valid."
    return option(
        "--days",
        type=click.IntRange(1, certificates.AUTHORITY_DAYS),
        default=certificates.SERVER_DAYS,
        group=_SERVER,
        help=text,
    )(command)


def _host_option(required: bool) -> Callable[[F], F]:
    text = "Name or address by which sites reach the server. May be repeated."
    if not required:
        text += "  [default: those of the certificate there is]"
    return option(
        "--host",
        "hosts",
        multiple=True,
        required=required,
        show_default=False,
        metavar="HOST",
        group=_SERVER,
        help=text,
    )


@keys.command(cls=_KeysCommand, examples=(EXAMPLES[0],))
@_host_option(required=True)
@_days_option
@keys_option
@output_options
def init(hosts: Sequence[str], days: int, folder: str, as_json: bool, quiet: bool) -> None:
    """Make a certificate authority and the server's certificate.

    Send ca.crt to every site, and let them compare its fingerprint with you over another channel. Keep ca.key
    to yourself: whoever has it can pretend to be the server.
    """
    held = Keys(folder)
    certificates.create_authority(held, hosts, days)
    _tell_server(
        held, Output(as_json, quiet), "Send ca.crt to every site; compare its fingerprint by telephone."
    )


@keys.command(
    cls=_KeysCommand,
    examples=(
        ("the same hosts for another year; then start the server again", "fedsolve keys renew"),
        ("the server has moved", "fedsolve keys renew --host new.hospital.example"),
    ),
)
@_host_option(required=False)
@_days_option
@keys_option
@output_options
def renew(hosts: Sequence[str], days: int, folder: str, as_json: bool, quiet: bool) -> None:
    """Make a new certificate for the server, by the same authority.

    Sites need nothing new. The server takes it up when it is started again.
    """
    held = Keys(folder)
    certificates.renew_server(held, hosts, days)
    _tell_server(held, Output(as_json, quiet), "Start the server again; sites need nothing new.")


@keys.command(cls=_KeysCommand, examples=(EXAMPLES[1],))
@click.argument("name")
@keys_option
@output_options
def client(name: str, folder: str, as_json: bool, quiet: bool) -> None:
    """Make the key pair of the site NAME.

    Run it at the site: NAME.key never has to leave the building. Send NAME.pub to the server's operator, and
    tell the fingerprint over another channel.
    """
    held = Keys(folder)
    site = security.create_client(held, name)
    public = held.client_public_key(name)
    document = {
        "site": name,
        "private_key": held.client_key(name),
        "public_key": public,
        "fingerprint": site.fingerprint,
    }

    def show(page: Console) -> None:
        facts(
            page,
            [
                ("site", name),
                ("private key", f"{held.client_key(name)} (stays here)"),
                ("public key", f"{public} (for the server: fedsolve keys register {public.name})"),
                ("fingerprint", site.fingerprint),
            ],
        )

    Output(as_json, quiet).result(document, show)


@keys.command(
    cls=_KeysCommand,
    examples=(EXAMPLES[2], ("under another name", "fedsolve keys register key.pub --name clinic-7")),
)
@click.argument("files", metavar="NAME.pub...", nargs=-1, required=True)
@option("--name", metavar="NAME", group=_FILES, help="Name of the site.  [default: as in the file]")
@keys_option
@output_options
@click.pass_context
def register(
    ctx: click.Context, files: Sequence[str], name: str | None, folder: str, as_json: bool, quiet: bool
) -> None:
    """Let sites take part, by the public keys they sent.

    A running server lets them in at once. Compare the fingerprint with the site over another channel.
    """
    if name is not None and len(files) > 1:
        raise click.UsageError("--name is for one file", ctx)
    held = Keys(folder)
    sites = [security.register(held, file, name) for file in files]
    Output(as_json, quiet).result(
        {"registered": _listed(sites)},
        lambda page: facts(page, [(site.name, site.fingerprint) for site in sites]),
    )


@keys.command(cls=_KeysCommand, examples=(("the site takes no further part", "fedsolve keys remove north"),))
@click.argument("name")
@keys_option
@output_options
def remove(name: str, folder: str, as_json: bool, quiet: bool) -> None:
    """Take a site off the list of those that may take part.

    A running server refuses its next call. What the site sent before stays in models made with it.
    """
    site = security.remove(Keys(folder), name)
    Output(as_json, quiet).result(
        {"removed": name, "fingerprint": site.fingerprint},
        lambda page: page.print(f"{name} ({site.fingerprint}) may take no further part."),
    )


@keys.command(
    cls=_KeysCommand,
    examples=(EXAMPLES[3], ("a site has a new key", "fedsolve keys roster --remove south")),
)
@click.argument("files", metavar="[NAME.pub...]", nargs=-1)
@option("--remove", "gone", metavar="NAME", multiple=True, group=_FILES, help="Take this site off.")
@keys_option
@output_options
def roster(files: Sequence[str], gone: Sequence[str], folder: str, as_json: bool, quiet: bool) -> None:
    """At a site: list the other sites that it knows, by the public keys they sent.

    In a secure sum sites make keys with each other, and each believes only those that are signed by a site of
    its own roster: a server could invent sites, or take their place. So compare each fingerprint with the
    people of that site by telephone. Without files the roster is shown.
    """
    held = Keys(folder)
    for name in gone:
        security.forget(held, name)
    for file in files:
        security.know(held, file)
    sites = list(security.known_sites(held).values())

    def show(page: Console) -> None:
        page.print(_sites_table("known site", sites) if sites else "No other site is known yet.")

    Output(as_json, quiet).result({"roster": held.roster_file, "sites": _listed(sites)}, show)


@keys.command(
    "list",
    cls=_KeysCommand,
    examples=(("certificates, registered sites and keys of this folder", "fedsolve keys list"),),
)
@keys_option
@output_options
def list_keys(folder: str, as_json: bool, quiet: bool) -> None:
    """List what the folder holds: certificates with their dates, registered sites, private keys of sites.

    At a site it shows the fingerprint of the authority that the site trusts, to be compared with the
    server's operator over another channel.
    """
    held = Keys(folder)
    certificates.load_certificate(held.authority)
    sites = list(security.registered(held).values())
    own = [security.own_site(held, path.stem) for path in sorted(held.clients.glob("*.key"))]
    known = list(security.known_sites(held).values())
    document = _server_facts(held) | {
        "sites": _listed(sites),
        "keys": _listed(own),
        "roster": _listed(known),
    }

    def show(page: Console) -> None:
        _show_server(page, held)
        if held.server_certificate.exists():
            left = certificates.days_left(certificates.load_certificate(held.server_certificate))
            if left < certificates.WARN_DAYS:
                page.print(f"The server's certificate has {left} days left: fedsolve keys renew")
            page.print()
            if sites:
                page.print(_sites_table("registered site", sites))
            else:
                page.print("No site is registered yet: fedsolve keys register NAME.pub")
        if own:
            page.print(_sites_table("private key of", own))
        if known:
            page.print(_sites_table("known site", known))

    Output(as_json, quiet).result(document, show)


def _listed(sites: Sequence[Site]) -> list[dict[str, str]]:
    return [{"site": site.name, "fingerprint": site.fingerprint} for site in sites]


def _sites_table(title: str, sites: Sequence[Site]) -> Table:
    return table((title, "fingerprint"), [(site.name, site.fingerprint) for site in sites], left=(0, 1))


def _server_facts(held: Keys) -> dict[str, Any]:
    authority = certificates.load_certificate(held.authority)
    told: dict[str, Any] = {
        "folder": held.folder,
        "authority_valid_until": f"{authority.not_valid_after_utc:%Y-%m-%d}",
        "authority_fingerprint": certificates.authority_fingerprint(held),
    }
    if held.server_certificate.exists():
        certificate = certificates.load_certificate(held.server_certificate)
        told["valid_until"] = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        told["hosts"] = certificates.certificate_hosts(certificate)
    return told


def _show_server(page: Console, held: Keys) -> None:
    told = _server_facts(held)
    lines = [
        ("authority", f"{held.authority}, valid until {told['authority_valid_until']}"),
        ("fingerprint", told["authority_fingerprint"]),
    ]
    if "hosts" in told:
        lines.append(("server", f"{held.server_certificate}, valid until {told['valid_until']}"))
        lines.append(("hosts", ", ".join(told["hosts"])))
    facts(page, lines)


def _tell_server(held: Keys, output: Output, advice: str) -> None:
    def show(page: Console) -> None:
        _show_server(page, held)
        page.print(advice)

    output.result(_server_facts(held), show)
