"""Who owns which rows: partition options, and the federation they make of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from fedsolve.cli.command import Choice, F, option, options
from fedsolve.container import Array
from fedsolve.data import partitions
from fedsolve.data.datasets import is_address
from fedsolve.data.datasets.dataset_address import Address
from fedsolve.data.tables import Table
from fedsolve.federation.local import LOCAL_MEMORY, LocalFederation
from fedsolve.federation.members import Deal
from fedsolve.owners import rows_by_client
from fedsolve.schema import Schema

CLIENTS = 20
KINDS: dict[str, tuple[str, Any] | None] = {
    "iid": None,
    "dirichlet": ("alpha", 0.1),
    "shards": ("per_client", 2),
    "pathological": ("classes_per_client", 2),
}
"""For each partition: the parameter it takes and its default here."""
DIVIDING = (
    "client",
    "clients",
    "partition",
    *(named[0] for named in KINDS.values() if named is not None),
    "min_size",
    "partition_seed",
)
"""Options that say who owns which rows."""


@dataclass(frozen=True)
class Division:
    """How rows are dealt: a partition of `fedsolve.partition`, or by the owners the file names (None)."""

    kind: str | None
    clients: int = CLIENTS
    parameter: Any = None
    min_size: int = 0
    seed: int = 0

    def owners(self, labels: Array) -> Array:
        """Which client owns each row."""
        assert self.kind is not None
        deal = getattr(partitions, self.kind)
        owners: Array = deal(
            labels, self.clients, seed=self.seed, min_size=self.min_size, **self._parameters()
        )
        return owners

    def as_dict(self) -> dict[str, Any]:
        if self.kind is None:
            return {"kind": "named"}
        return {"kind": self.kind, **self._parameters(), "min_size": self.min_size, "seed": self.seed}

    def _parameters(self) -> dict[str, Any]:
        named = None if self.kind is None else KINDS[self.kind]
        return {} if named is None else {named[0]: self.parameter}


def client_options(command: F) -> F:
    """Decorator: a partition by its parameters, or the column that names owners."""
    group = "Who owns which rows"

    def number(name: str, kind: type, text: str, default: Any, more: bool = False) -> Callable[[F], F]:
        return option(name, type=kind, group=group, more=more, help=f"{text}  [default: {default}]")

    defaults = {named[0]: named[1] for named in KINDS.values() if named is not None}
    return options(
        number("--clients", int, "How many clients.", CLIENTS),
        option(
            "--partition",
            type=Choice(list(KINDS)),
            metavar="KIND",
            group=group,
            help=f"{', '.join(KINDS)}.  [default: iid]",
        ),
        number("--alpha", float, "dirichlet: the smaller, the more uneven.", defaults["alpha"]),
        number(
            "--per-client",
            int,
            "shards: runs of rows, sorted by class, each gets.",
            defaults["per_client"],
            True,
        ),
        number(
            "--classes-per-client",
            int,
            "pathological: classes each has.",
            defaults["classes_per_client"],
            True,
        ),
        number("--min-size", int, "Rows every client has at least.", Division.min_size, True),
        number("--partition-seed", int, "Seed of the deal.", Division.seed, True),
        option(
            "--client-column",
            "--client-key",
            "client",
            metavar="NAME",
            group=group,
            help="Column or array that names each row's owner.",
        ),
    )(command)


def split_from(ctx: click.Context, given: dict[str, Any]) -> Division:
    """The split that `client_options` describe; options that do not go together are refused."""
    parameters = [named[0] for named in KINDS.values() if named is not None]
    used = [name for name in DIVIDING if name != "client" and given[name] is not None]
    schema = given.get("schema")
    if schema is not None and schema.client is not None and not used:
        return Division(None)
    data = Address.parse(given["data"]) if is_address(given["data"]) else None
    if given["client"] is not None or (data is not None and "client" in data.options and not used):
        if used:
            raise click.UsageError(
                f"--client-column already says who owns each row; leave out {_flag(used[0])}", ctx
            )
        return Division(None)
    kind = given["partition"] or "iid"
    named = KINDS[kind]
    for parameter in parameters:
        if given[parameter] is not None and (named is None or named[0] != parameter):
            owner = next(k for k, other in KINDS.items() if other is not None and other[0] == parameter)
            raise click.UsageError(f"{_flag(parameter)} belongs to --partition {owner}, not to {kind}", ctx)
    value = None if named is None else named[1] if given[named[0]] is None else given[named[0]]
    return Division(
        kind,
        clients=CLIENTS if given["clients"] is None else given["clients"],
        parameter=value,
        min_size=given["min_size"] or 0,
        seed=given["partition_seed"] or 0,
    )


def federate(
    data: Table, split: Division, workers: int | None, schema: Schema | None = None
) -> LocalFederation:
    """The table's rows as a federation in this process; `schema` where one describes them for the run."""
    assert data.labels is not None
    if split.kind is not None:
        owners = split.owners(data.labels)
        return LocalFederation.from_arrays(
            data.features,
            data.labels,
            owners,
            clients=split.clients,
            workers=workers,
            schema=schema,
            sample_weight=data.weights,
        )
    assert data.owners is not None
    texts = data.owners.astype(str)
    names, owners = np.unique(texts, return_inverse=True)
    dealt = rows_by_client(owners, len(names))
    clients = tuple(names.tolist())
    deal = Deal(data.features, data.labels, data.weights, schema, *dealt, LOCAL_MEMORY, None, clients)
    classes = None if schema is None or not schema.classes else schema.classes
    return LocalFederation(deal, workers=workers, classes=classes)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
