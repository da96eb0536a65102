"""Options for reading rows, from a table or from a dataset through a backbone, and for who owns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import click

from fedsolve.cli.features import DatasetOptions, StoreOptions, built
from fedsolve.cli.options import Options, option, rare
from fedsolve.cli.output import Output
from fedsolve.data import partitions
from fedsolve.data.address import Address
from fedsolve.data.backbones import DEFAULT_BACKBONE, Backbone
from fedsolve.data.datasets import Dataset
from fedsolve.data.feature_store import Features
from fedsolve.data.partitions import KINDS
from fedsolve.data.row_reader import RowReader, is_address
from fedsolve.federation.local import LocalFederation
from fedsolve.tables.csv_text import Dialect
from fedsolve.tables.schema import Schema
from fedsolve.tables.table_file import ColumnLayout, Table

READING = "Reading the data"


class DialectOptions(Options):
    delimiter: str = rare("auto", "csv: what separates cells; 'tab', or 'auto' to guess.", "CHAR")
    decimal: str = rare("auto", "csv: before fractions; auto: by which most cells are numbers.", "SIGN")
    thousands: str = rare("auto", "csv: between groups of three digits; '' for none.", "SIGN")
    encoding: str = rare("utf-8", "csv: of its text.", "NAME")

    def dialect(self) -> Dialect:
        return Dialect(self.delimiter, self.decimal, self.thousands, self.encoding)


class TableOptions(DialectOptions):
    features_key: str | None = rare(
        None, "npz: the features.", "KEY", none="x_train, x_test, x, X, features, data"
    )
    labels_key: str | None = rare(
        None, "npz: labels.", "KEY", none="y_train, y_test, y, Y, labels, label, target"
    )
    label: str | None = option(
        None, "Label column.", "NAME|INDEX", none="label, target, class, y, or the last"
    )
    labels: str | None = option(
        None, "Columns of several labels a row, each 0 or 1.", "A,B", none="one label"
    )
    drop: tuple[str, ...] = rare((), "csv, parquet: column to leave out.", "NAME|INDEX")
    header: bool = rare(True, "csv: whether line 1 has names.")

    def layout(self, client: str | None = None) -> ColumnLayout:
        """The layout that these options describe; client: the column that names owners."""
        names = (each.name for each in fields(ColumnLayout) if each.name != "client")
        return ColumnLayout(client=client, **{name: getattr(self, name) for name in names})


class RowOptions(StoreOptions, DatasetOptions, TableOptions):
    title = READING
    backbone: str | None = option(
        None, "Makes features of images or text.", "B", none=f"the model's, or {DEFAULT_BACKBONE}"
    )

    def reader(self, output: Output, client: str | None = None) -> RowReader:
        """What reads such rows; client: the column that names owners."""

        def extract(dataset: Dataset, backbone: str, loaded: Backbone | None) -> Features:
            return built(output, dataset, backbone, self.store, loaded=loaded)[0]

        return RowReader(self.layout(client), self.backbone, self.root, extract, output, self.store)


@dataclass(frozen=True)
class Division:
    """How rows are split: by a partition of `fedsolve.partition`, or by the owners in the data (None)."""

    kind: str | None
    clients: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def federate(self, data: Table, **settings: Any) -> LocalFederation:
        """The table's rows as a federation in this process; settings: of `LocalFederation.from_arrays`."""
        assert data.labels is not None
        if self.kind is None:
            assert data.owners is not None
            owners: Any = data.owners.astype(str)
        else:
            assert self.clients is not None
            first = data.labels.reshape(len(data), -1)[:, 0]  # of several labels; they are dealt iid
            owners = partitions.deal(self.kind, first, self.clients, self.seed, self.options)
        return LocalFederation.from_arrays(
            data.features, data.labels, owners, self.clients, sample_weight=data.weights, **settings
        )


class ClientOptions(Options):
    title = "Who owns which rows"
    clients: int = option(20, "How many clients.")
    partition: str = option("iid", f"{', '.join(KINDS)}.", "KIND", choices=tuple(KINDS))
    alpha: float = option(0.1, "dirichlet: the smaller, the more uneven.")
    per_client: int = rare(2, "shards: how many shards of the rows, sorted by class, a client gets.")
    classes_per_client: int = rare(2, "pathological: how many classes a client has.")
    min_size: int = rare(0, "The fewest rows a client may have.")
    partition_seed: int = rare(0, "Seed of the partition.")
    client: str | None = option(
        None, "Column or array that names each row's owner.", "NAME", flag="--client-column"
    )

    def division(self, data: Sequence[str], schema: Schema | None) -> Division:
        """The division of these files that the options describe; options that exclude others are refused."""
        ways = ("clients", "partition", *filter(None, KINDS.values()), "min_size", "partition_seed")
        dealing = [name for name in ways if name in self.written]
        if len(data) > 1:
            if dealing or self.client is not None:
                raise click.UsageError(
                    "of several files each is one client; leave out --client-column and the partition"
                )
            return Division(None)
        address = Address.parse(data[0]) if is_address(data[0]) else None
        named = schema is not None and schema.client is not None
        if self.client is not None and dealing:
            raise click.UsageError(
                f"--client-column already says who owns each row; leave out {self.given(*dealing)[0]}"
            )
        if self.client is not None or (
            not dealing and (named or (address is not None and "client" in address.options))
        ):
            return Division(None)
        taken = KINDS[self.partition]
        for kind, parameter in KINDS.items():
            if parameter != taken and parameter in self.written:
                flag = self.given(parameter)[0]
                raise click.UsageError(f"{flag} belongs to --partition {kind}, not to {self.partition}")
        own = {} if taken is None else {taken: getattr(self, taken)}
        options = {**own, "min_size": self.min_size}
        return Division(self.partition, self.clients, options, self.partition_seed)
