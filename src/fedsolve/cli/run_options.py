"""The options that say what is trained and over whom, whatever carries the messages to the sites."""

from __future__ import annotations

from collections.abc import Callable

import click

from fedsolve.cli.command import Choice, F, option, options
from fedsolve.cli.method_options import class_weight_option, method_option
from fedsolve.cli.site_table import schema_option


def sums_options(group: str) -> Callable[[F], F]:
    """Decorator: --keys and --plain, by whom sites are known and what of them is seen."""
    return options(
        option(
            "--keys",
            metavar="DIR",
            group=group,
            help="Folder made by 'fedsolve keys'.  [default: FEDSOLVE_KEYS, else keys]",
        ),
        option(
            "--plain",
            is_flag=True,
            group=group,
            help="No secure sums: this server sees each site's own. Sites must allow it.",
        ),
    )


def cohort_options(group: str) -> Callable[[F], F]:
    """Decorator: what the sites have in common, and who among them might side with the server."""
    return options(
        option(
            "--colluders",
            more=True,
            type=click.IntRange(0),
            default=0,
            group=group,
            help="Sites that might side with this server: more must then help to open a secure sum.",
        ),
        option(
            "--unverified",
            is_flag=True,
            more=True,
            group=group,
            help="Sites do not check questions against opened totals; each must allow it (verified = false).",
        ),
        option(
            "--signatures",
            more=True,
            type=click.IntRange(1),
            group=group,
            help="Sites that must have checked a question.  [default: more than half]",
        ),
        option(
            "--classes",
            metavar="A,B,...",
            group=group,
            help="The class list.  [default: the union of what sites agree to send]",
        ),
        schema_option(group, "What a row of the sites is, the same for all.  [default: plain numbers]"),
    )


def training_options(group: str, state: str) -> Callable[[F], F]:
    """Decorator: the method, and where the run keeps what it knows; `state` is that folder's name."""
    return options(
        method_option(group),
        option(
            "--task",
            more=True,
            type=Choice(["classification", "regression"]),
            default="classification",
            group=group,
            help="What the labels are.",
        ),
        class_weight_option(group),
        option(
            "--state",
            metavar="DIR",
            default=state,
            group=group,
            help="Checkpoint, report, model and the like; the same folder continues the run.",
        ),
        option("--out", metavar="FILE", group=group, help="Where to save the model too."),
    )
