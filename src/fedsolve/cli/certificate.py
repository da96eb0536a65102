"""`fedsolve certificate`: papers about who left a training, signed by sites and server, checked offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fedsolve.cli.keys import KeyFolderOptions
from fedsolve.cli.options import ExamplesGroup, command, option, required
from fedsolve.cli.output import Output, write_text
from fedsolve.container import read
from fedsolve.errors import ModelFileError
from fedsolve.model import load_model
from fedsolve.network.keyfolder import Keys


@click.group(cls=ExamplesGroup)
def certificate() -> None:
    """Leave a training with a certificate that anybody can check.

    # at the site that leaves: a signed withdrawal, for all others
    fedsolve certificate withdraw north --cohort east --cohort south --cohort west
    # at every site that stays: let the others sum without it
    fedsolve certificate accept north.withdrawal --ledger fedsolve-east/ledger
    # at the server, after training again; then every site signs it
    fedsolve certificate make --before old.st --after new.st --withdrawal north.withdrawal --out paper
    fedsolve certificate sign paper --name east --model new.st
    # anywhere
    fedsolve certificate verify paper --model new.st
    """


def _signer(keys: Keys, name: str | None) -> Any:
    from fedsolve.network.certificates import load_key
    from fedsolve.network.security import load_client_key
    from fedsolve.privacy.primitives import signer

    return signer(load_key(keys.server_key) if name is None else load_client_key(keys, name))


def _verifier(keys: Keys) -> Any:
    """Knows the sites that are registered or on the roster, this site's own key, and the server."""
    from cryptography.hazmat.primitives import serialization

    from fedsolve.network.certificates import load_certificate
    from fedsolve.privacy.leaving import SERVER
    from fedsolve.privacy.primitives import verifier

    sites = keys.registered.sites() | keys.roster.sites()
    found: dict[str, Any] = {n: serialization.load_pem_public_key(site.pem) for n, site in sites.items()}
    for path in sorted(keys.clients.glob("*.pub")) if keys.clients.exists() else []:
        found.setdefault(path.stem, serialization.load_ssh_public_key(read(path)))
    if keys.server_certificate.exists():
        found[SERVER] = load_certificate(keys.server_certificate).public_key()
    return verifier(found)


class WithdrawOptions(KeyFolderOptions):
    site: str = required(argument=True, metavar="SITE")
    cohort: tuple[str, ...] = option((), "Another site of the training.", "SITE")
    noise: bool = option(False, "Ask for noise: only private runs may go on without this site.")
    out: str | None = option(None, "Where it is written.", "FILE", none="SITE.withdrawal")


@command(group=certificate)
def withdraw(options: WithdrawOptions, output: Output) -> None:
    """Sign that this site leaves: its own sum can then be computed as a difference, or noise hides it."""
    from fedsolve.privacy.leaving import withdrawal

    paper = withdrawal(options.site, sorted({*options.cohort, options.site}), options.noise)
    paper = paper.signed(options.site, _signer(options.open_keys, options.site))
    out = options.out or f"{options.site}.withdrawal"
    write_text(out, paper.to_text())
    output.result({"written": out}, f"withdrawal of {options.site} written to {out}")


class AcceptOptions(KeyFolderOptions):
    paper: str = required(argument=True, metavar="WITHDRAWAL")
    ledger: str = required("The ledger of this site, in its folder.", "DIR")


@command(group=certificate)
def accept(options: AcceptOptions, output: Output) -> None:
    """Enter a withdrawal at a site that stays: from then on it sums with the others without the leaver."""
    from fedsolve.privacy.leaving import NOISE, Paper, check_withdrawal
    from fedsolve.privacy.ledger import Ledger

    if not (Path(options.ledger) / "ledger.jsonl").exists():
        raise ModelFileError(f"{options.ledger} holds no ledger.")
    paper = Paper.from_file(options.paper)
    site = check_withdrawal(paper, _verifier(options.open_keys))
    noise = paper.facts["accepts"] == NOISE
    Ledger(Path(options.ledger)).withdraw(site, paper.facts["cohort"], noise)
    more = ", and only private runs (--epsilon) go on without it" if noise else ""
    output.result({"left": site, "noise": noise}, f"{site} may leave{more}")


class MakeOptions(KeyFolderOptions):
    paper: str | None = option(None, "Of the site that left.", "FILE", flag="--withdrawal")
    before: str = required("The model with the site.", "MODEL")
    after: str = required("The model without it.", "MODEL")
    out: str = required("Where the certificate is written.", "FILE")


@command(group=certificate)
def make(options: MakeOptions, output: Output) -> None:
    """Write a certificate about two models, signed by the server."""
    from fedsolve.privacy.leaving import SERVER, Paper
    from fedsolve.privacy.leaving import certificate as certified

    leaving = None if options.paper is None else Paper.from_file(options.paper)
    models = [(load_model(path), read(path)) for path in (options.before, options.after)]
    paper = certified(models, leaving).signed(SERVER, _signer(options.open_keys, None))
    write_text(options.out, paper.to_text())
    output.result({"written": options.out}, f"certificate written to {options.out}")


class SignOptions(KeyFolderOptions):
    paper: str = required(argument=True, metavar="CERTIFICATE")
    name: str = required("The site that signs.", "SITE")
    model: str = required("The model that this site was given.", "MODEL")


@command(group=certificate)
def sign(options: SignOptions, output: Output) -> None:
    """Sign a certificate for a site, if it is of the model that the site has."""
    import hashlib

    from fedsolve.privacy.leaving import Paper

    paper = Paper.from_file(options.paper)
    if hashlib.sha256(read(options.model)).hexdigest() != paper.facts.get("after", {}).get("model"):
        raise ModelFileError(f"{options.paper} is of another model than {options.model}.")
    signed = paper.signed(options.name, _signer(options.open_keys, options.name))
    write_text(options.paper, signed.to_text())
    output.result({"signed": options.name}, f"signed by {options.name}")


class VerifyOptions(KeyFolderOptions):
    paper: str = required(argument=True, metavar="CERTIFICATE")
    model: str | None = option(None, "Also that it is of this model.", "MODEL", none="not looked at")


@command(group=certificate)
def verify(options: VerifyOptions, output: Output) -> None:
    """Check a certificate offline: all signatures, both cohorts, the withdrawal, the model."""
    from fedsolve.privacy.leaving import Paper, check_certificate

    paper = Paper.from_file(options.paper)
    model = None if options.model is None else read(options.model)
    told = check_certificate(paper, _verifier(options.open_keys), model)
    words = [f"{side}: {', '.join(told[side]) or 'nobody'}" for side in ("left", "joined")]
    output.result(told, "; ".join([*words, f"signed by {', '.join(told['cohort'])} and the server"]))
