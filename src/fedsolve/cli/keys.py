"""`fedsolve keys`: the authority, the server's certificate, the sites' keys and the list of sites."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fedsolve.cli.options import ExamplesGroup, Options, command, option, required
from fedsolve.cli.output import Output, fact_grid, table
from fedsolve.network import certificates, security
from fedsolve.network.keyfolder import Keys, Site, require_ciphers

_SERVER = "The server"


@click.group(cls=ExamplesGroup)
def keys() -> None:
    """Make and manage the keys of a federation over a network.

    The server has a certificate, signed by an authority of its own, by which sites know it. Each site has a
    key pair, by which the server knows the site. Private keys (*.key) stay where they were made.
    """


class KeyFolderOptions(Options):
    title = "The files"
    keys: str | None = option(None, "Folder made by 'fedsolve keys'.", "DIR", none="FEDSOLVE_KEYS, else keys")

    @property
    def key_folder(self) -> Keys:
        return Keys(self.keys or os.environ.get("FEDSOLVE_KEYS") or "keys")

    @property
    def open_keys(self) -> Keys:
        """The same, where there is a library of ciphers to work with keys."""
        require_ciphers()
        return self.key_folder


class TakingPartOptions(KeyFolderOptions):
    insecure: bool = False
    plain: bool = False

    def check_keys(self) -> None:
        """Refuse what needs keys where there are none."""
        if self.insecure and self.keys is not None:
            raise click.UsageError("--insecure uses no keys; leave out one of --keys and --insecure")
        if self.insecure and not self.plain:
            raise click.UsageError(
                "secure sums need keys, by which sites know each other; with --insecure give --plain too"
            )


class ServerKeyOptions(KeyFolderOptions):
    days: int = option(
        certificates.SERVER_DAYS,
        "Days that it is valid.",
        least=1,
        most=certificates.AUTHORITY_DAYS,
        group=_SERVER,
    )
    hosts: tuple[str, ...] = option(
        (), "Its name for sites.", "HOST", flag="--host", none="as before", group=_SERVER
    )


class NewServerOptions(ServerKeyOptions):
    hosts: tuple[str, ...] = required()


class SiteNameOptions(KeyFolderOptions):
    name: str = required(argument=True)


@command(group=keys)
def init(options: NewServerOptions, output: Output) -> None:
    """Make a certificate authority and the server's certificate.

    Send ca.crt to every site, and let them compare its fingerprint with you over another channel. Keep ca.key
    to yourself: whoever has it can pretend to be the server.

    # at the server: an authority, and a certificate for the names that sites will use
    fedsolve keys init --host fedsolve.hospital.example --host 10.0.0.5
    """
    held = options.open_keys
    certificates.create_authority(held, options.hosts, options.days)
    _tell_server(output, held, "Send ca.crt to every site; compare its fingerprint by telephone.")


@command(group=keys)
def renew(options: ServerKeyOptions, output: Output) -> None:
    """Make a new certificate for the server, by the same authority.

    Sites need nothing new. The server takes it up when it is started again.

    # the same hosts for another year; then start the server again
    fedsolve keys renew
    # the server has moved
    fedsolve keys renew --host new.hospital.example
    """
    held = options.open_keys
    certificates.renew_server(held, options.hosts, options.days)
    _tell_server(output, held, "Start the server again; sites need nothing new.")


@command(group=keys)
def client(options: SiteNameOptions, output: Output) -> None:
    """Make the key pair of the site NAME.

    Run it at the site: NAME.key never has to leave the building. Send NAME.pub to the server's operator, and
    tell the fingerprint over another channel.

    # at a site: its key pair, of which north.pub goes to the server
    fedsolve keys client north
    """
    held, name = options.open_keys, options.name
    site = security.create_client(held, name)
    public = held.client_public_key(name)
    document = {"site": name, "private_key": held.client_key(name), "public_key": public}
    lines = [
        ("site", name),
        ("private key", f"{held.client_key(name)} (stays here)"),
        ("public key", f"{public} (for the server: fedsolve keys register {public.name})"),
        ("fingerprint", site.fingerprint),
    ]
    output.result(document | {"fingerprint": site.fingerprint}, lines)


class RegisterOptions(KeyFolderOptions):
    files: tuple[str, ...] = required(argument=True, metavar="NAME.pub...")
    name: str | None = option(None, "Name of the site.", "NAME", none="as in the file")


@command(group=keys)
def register(options: RegisterOptions, output: Output) -> None:
    """Let sites take part, by the public keys they sent.

    A running server lets them in at once. Compare the fingerprint with the site over another channel.

    # at the server: let the site in
    fedsolve keys register north.pub
    # under another name
    fedsolve keys register key.pub --name clinic-7
    """
    if options.name is not None and len(options.files) > 1:
        raise click.UsageError("--name is for one file")
    sites = [options.open_keys.registered.add(file, options.name) for file in options.files]
    output.result({"registered": _listed(sites)}, [(site.name, site.fingerprint) for site in sites])


@command(group=keys)
def remove(options: SiteNameOptions, output: Output) -> None:
    """Take a site off the list of those that may take part.

    A running server refuses its next call. What the site sent before stays in models made with it.

    # the site takes no further part
    fedsolve keys remove north
    """
    name, site = options.name, options.open_keys.registered.remove(options.name)
    told = f"{name} ({site.fingerprint}) may take no further part."
    output.result({"removed": name, "fingerprint": site.fingerprint}, told)


class RosterOptions(KeyFolderOptions):
    files: tuple[str, ...] = option((), argument=True, metavar="[NAME.pub...]")
    gone: tuple[str, ...] = option((), "Take this site off.", "NAME", flag="--remove")


@command(group=keys)
def roster(options: RosterOptions, output: Output) -> None:
    """At a site: list the other sites that it knows, by the public keys they sent.

    In a secure sum sites make keys with each other, and each believes only those that are signed by a site of
    its own roster: a server could invent sites, or take their place. So compare each fingerprint with the
    people of that site by telephone. Without files the roster is shown.

    # at a site: know the other sites, for secure sums
    fedsolve keys roster south.pub west.pub
    # a site has a new key
    fedsolve keys roster --remove south
    """
    held = options.open_keys
    for name in options.gone:
        held.roster.remove(name)
    for file in options.files:
        held.roster.add(file)
    sites = list(held.roster.sites().values())
    told = _sites_table("known site", sites) if sites else "No other site is known yet."
    output.result({"roster": held.roster.path, "sites": _listed(sites)}, lambda page: page.print(told))


@command("list", group=keys)
def list_keys(options: KeyFolderOptions, output: Output) -> None:
    """List what the folder holds: certificates with their dates, registered sites, private keys of sites.

    At a site it shows the fingerprint of the authority that the site trusts, to be compared with the
    server's operator over another channel.

    # certificates, registered sites and keys of this folder
    fedsolve keys list
    """
    held = options.open_keys
    certificates.load_certificate(held.authority)
    sites = list(held.registered.sites().values())
    own = [security.own_site(held, path.stem) for path in sorted(held.clients.glob("*.key"))]
    others = list(held.roster.sites().values())
    document, lines = _server_facts(held)
    document |= {"sites": _listed(sites), "keys": _listed(own), "roster": _listed(others)}

    def show(page: Console) -> None:
        page.print(fact_grid(lines))
        if held.server_certificate.exists():
            if (text := certificates.of_server(held).announced) is not None:
                page.print(text)
            page.print()
            if sites:
                page.print(_sites_table("registered site", sites))
            else:
                page.print("No site is registered yet: fedsolve keys register NAME.pub")
        if own:
            page.print(_sites_table("private key of", own))
        if others:
            page.print(_sites_table("known site", others))

    output.result(document, show)


def _tell_server(output: Output, held: Keys, advice: str) -> None:
    document, lines = _server_facts(held)
    output.result(document, [*lines, ("next", advice)])


def _listed(sites: Sequence[Site]) -> list[dict[str, str]]:
    return [{"site": site.name, "fingerprint": site.fingerprint} for site in sites]


def _sites_table(title: str, sites: Sequence[Site]) -> Table:
    return table((title, "fingerprint"), [(site.name, site.fingerprint) for site in sites], left=(0, 1))


def _server_facts(held: Keys) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What the folder holds of the server: as a document, and as lines."""
    authority, fingerprint = certificates.of_authority(held), certificates.authority_fingerprint(held)
    told: dict[str, Any] = {
        "folder": held.folder,
        "authority_valid_until": f"{authority.until:%Y-%m-%d}",
        "authority_fingerprint": fingerprint,
    }
    lines = [
        ("authority", f"{held.authority}, valid until {authority.until:%Y-%m-%d}"),
        ("fingerprint", fingerprint),
    ]
    if held.server_certificate.exists():
        hosts = certificates.certificate_hosts(certificates.load_certificate(held.server_certificate))
        until = f"{certificates.of_server(held).until:%Y-%m-%d}"
        told |= {"valid_until": until, "hosts": hosts}
        lines += [("server", f"{held.server_certificate}, valid until {until}"), ("hosts", ", ".join(hosts))]
    return told, lines
