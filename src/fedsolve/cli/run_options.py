"""The options that say what is trained and over whom, whatever carries the messages to the sites."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import click

from fedsolve.cli.keys import TakingPartOptions
from fedsolve.cli.method_options import MethodOptions, given_parameters
from fedsolve.cli.options import option, rare
from fedsolve.errors import DataError
from fedsolve.federation.recipe import Recipe
from fedsolve.labels import Task, spelled_labels
from fedsolve.tables.schema import Schema, read_schema

SITES = "The sites"


class RunOptions(TakingPartOptions, MethodOptions):
    title = "The run"
    missing: Literal["wait", "continue", "error"] = "wait"
    plain: bool = option(
        False, "No secure sums: this server sees each site's sums. Sites must allow it.", group=SITES
    )
    colluders: int = rare(0, "Sites that might side with this server, at most.", least=0, group=SITES)
    unverified: bool = rare(
        False, "Sites check no question; each must allow it (verified = false).", group=SITES
    )
    signatures: int | None = rare(
        None, "Sites that must check a question.", least=1, none="more than half", group=SITES
    )
    classes: str | None = option(None, "The class list.", "A,B,...", none="all that sites send", group=SITES)
    schema: str | None = option(
        None, "What a row of all sites is.", "FILE", none="as proposed, or numbers", group=SITES
    )
    schema_out: str | None = rare(None, "Where to write the schema, at the end (.toml).", "FILE", group=SITES)
    task: Task | None = rare(None, "What the labels are.", none="as the schema says, else classification")
    state: str = option("fedsolve-run", "Folder of the run; the same one continues it.", "DIR")
    out: str | None = option(None, "Where to save the model too.", "FILE")

    @cached_property
    def rows(self) -> Schema | None:
        """What a row is, where a schema says so, or the sites of this run have agreed on one."""
        if self.schema is not None:
            return read_schema(self.schema)
        from fedsolve.network.running import State

        begun = State(Path(self.state)).begun()
        return None if begun is None or begun["rows"] is None else Schema.from_note(begun["rows"])

    def class_names(self) -> list[Any] | None:
        named = named_classes(self.classes)
        if self.kind == "regression" and named is not None:
            raise DataError("--classes are of a classification; leave them out of a regression.")
        if self.rows is None or not self.rows.classes:
            return named
        if named is not None and set(named) != set(self.rows.classes):
            raise DataError("--classes are not the classes of --schema; leave --classes out.")
        return list(self.rows.classes)

    @property
    def kind(self) -> Task:
        """The task: as --task and the schema say it, which must agree."""
        schema = None if self.rows is None else self.rows.task
        if self.rows is not None and self.rows.classes:
            schema = "classification"
        if self.task is not None and schema is not None and self.task != schema:
            raise DataError(
                f"--task is {self.task}, and the labels of --schema are of a {schema}. Leave --task out: "
                "a formula names its outcome, and of other methods the schema says it."
            )
        return self.task or schema or "classification"

    def check(self, recipe: Recipe[Any], clients: int) -> None:
        """Refuse, before anything starts, other classes than the schema's, and what secure sums cannot do."""
        self.check_keys()
        self.class_names()
        if self.plain:
            return
        from fedsolve.privacy.notes import LEAST_COHORT, least_verified

        if clients < LEAST_COHORT:
            raise click.UsageError(
                f"a secure sum takes {LEAST_COHORT} sites at least, since of two each would learn the "
                "other's part; for fewer give --plain, here and at the sites"
            )
        if not self.unverified and clients >= least_verified(self.colluders):
            recipe.note()  # refuses what sites cannot check
        if "seed" in given_parameters():
            raise click.UsageError("in secure sums the sites draw the seed together; leave --seed out")
        if recipe.method.gathers:
            raise click.UsageError(
                f"method '{recipe.method.key}' gathers: its server needs every site's answer by itself, "
                "which secure sums hide; choose another ('fedsolve methods'), or give --plain, here and at "
                "the sites"
            )


def named_classes(text: str | None) -> list[Any] | None:
    """A class list given in one word, in the types that the labels of a csv file would have."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        raise DataError(f"--classes names {len(names)} class(es): {text!r}. Give two at least: a,b,c.")
    classes: list[Any] = spelled_labels(names).tolist()
    return classes
