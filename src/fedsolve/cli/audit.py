"""`fedsolve audit`: what this site's answers would give away, measured on its own rows."""

from __future__ import annotations

import click

from fedsolve.cli.options import Options, command, option
from fedsolve.cli.output import Output, write_text
from fedsolve.cli.site_side import SiteDataOptions, site_rows
from fedsolve.closedform.afl import AFL
from fedsolve.closedform.private import Private
from fedsolve.data.targets import check_target
from fedsolve.errors import DataError
from fedsolve.federation.local import LocalFederation
from fedsolve.federation.participant import Participant
from fedsolve.pages.templates import render


class AuditOptions(Options):
    title = "Audit"
    epsilon: float | None = option(None, "Also with noise: a private run of this epsilon.", none="no noise")
    of: str = option("afl", "The private method: afl or softmax.", "NAME")
    sites: int = option(3, "Sites of a secure sum, all of this one's size.")
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
    from fedsolve.privacy.attacks import audit as audited
    from fedsolve.privacy.attacks import told

    check_target(options.page)
    data, _ = site_rows("site", rows, output)
    if options.sites < 1:
        raise DataError(f"--sites must be at least 1; got {options.sites}.")
    spec = LocalFederation([Participant("site", data)]).describe()
    private = None if options.epsilon is None else Private(options.of, epsilon=options.epsilon)
    findings = audited(data, spec, AFL(), private, sites=options.sites, seed=options.seed)
    if options.page is not None:
        write_text(options.page, render("audit.html", title="Audit", kind="evaluation", findings=findings))
    output.result({"findings": [one.as_dict() for one in findings]}, lambda page: click.echo(told(findings)))
