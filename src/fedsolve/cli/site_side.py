"""A site's side, whatever brings the questions: the options that say who it is, and what answers for it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsolve.cli.inputs import RowOptions
from fedsolve.cli.keys import TakingPartOptions
from fedsolve.cli.model_options import AllowOptions
from fedsolve.cli.options import option, required
from fedsolve.cli.output import Output
from fedsolve.cli.run_options import named_classes
from fedsolve.data.backbones import DEFAULT_BACKBONE, portable
from fedsolve.data.row_reader import dialect_only
from fedsolve.errors import DataError
from fedsolve.federation.participant import ClientData
from fedsolve.labels import FEW_CLASSES
from fedsolve.pages.words import megabytes
from fedsolve.tables.proposal import propose_for
from fedsolve.tables.schema import Schema, read_schema
from fedsolve.tables.table_file import ColumnLayout, TrainOrTest

if TYPE_CHECKING:
    from fedsolve.network.answering import Answerer, Event
    from fedsolve.network.proposing import Proposing
    from fedsolve.privacy.policy import SitePolicy
    from fedsolve.privacy.secure_client import Sent

SITE = "This site"
_SECURE = "SECURE SUMS: what this site sends is masked; the server sees totals over all sites"
_PLAIN = "PLAIN: the server sees this site's own sums"
_CHECKED = "It answers only what sites have checked, about whole cells of rows (docs/threat-model.md)"
_UNCHECKED = "It answers what nobody has checked, too (its policy: verified = false)"


class SiteOptions(TakingPartOptions, AllowOptions):
    title = SITE
    plain: bool = option(False, "No secure sums: let the server see this site's own sums.")
    policy: str | None = option(
        None, "Limits on what this site answers (TOML).", "FILE", none="strict limits"
    )
    name: str = required("Its name, as it is registered.", "NAME")
    classes: str | None = option(
        None, "Refuse a run with another class list.", "A,B,...", none="any with its labels"
    )
    share_classes: bool = option(
        False, "Allow sending the names of this site's classes when the server has no list."
    )
    state: str | None = option(
        None, "Folder of its state, with what it sent.", "DIR", none="fedsolve-client-NAME"
    )

    @property
    def folder(self) -> Path:
        return Path(self.state or f"fedsolve-client-{self.name}")


class SiteDataOptions(RowOptions):
    title = "This site's data"
    data: str = required("File or address, as for 'train'.", "DATA")
    backbone: str | None = option(None, "What turns images into features.", none=DEFAULT_BACKBONE)
    schema: str | None = option(
        None, "What a row is; a server with another is refused.", "FILE", none="plain numbers"
    )
    propose: bool = option(
        False,
        "Without a schema: send what the columns are (names, kinds, classes and categories of ten rows or "
        "more, rounded medians), and read the table by what the sites' proposals give.",
    )


def answerer(
    site: SiteOptions, rows: SiteDataOptions, output: Output, **settings: Any
) -> tuple[Answerer | Proposing, Diary]:
    """What answers for this site, and the diary of what it sends."""
    from fedsolve.network.answering import Answerer
    from fedsolve.network.proposing import Proposing
    from fedsolve.privacy.ledger import Ledger
    from fedsolve.privacy.policy import Budget, PolicyGuard, SitePolicy

    folder = site.folder
    policy = SitePolicy() if site.policy is None else SitePolicy.from_file(site.policy)
    output.note(_PLAIN if site.plain else f"{_SECURE}. {_CHECKED if policy.verified else _UNCHECKED}")
    ledger, diary = Ledger(folder / "ledger"), Diary(output, folder / "sent.jsonl")
    budget = Budget(ledger.folder, ledger.row_key, policy.epsilon_total, policy.delta_total, math.inf)
    guarding = PolicyGuard(policy, budget)
    attend, guard = None, guarding.check_and_pay
    if not site.plain:
        from fedsolve.network.security import latest_keys, load_client_key
        from fedsolve.privacy.primitives import signer, verifier
        from fedsolve.privacy.secure_client import SecureClient

        keys, guard = site.key_folder, guarding.check
        sign = signer(load_client_key(keys, site.name))
        verify = verifier(latest_keys(keys, site.name, output.note))
        own: dict[str, Any] = {"policy": policy, "ledger": ledger, "tell": diary.sent}
        attend = partial(SecureClient, sign=sign, verify=verify, **own)
    if budget.limited or budget.spent:
        output.note(f"{budget.said()}.")

    def made(agreed: Schema | None = None) -> Answerer:
        data, columns = site_rows(site.name, rows, output, agreed)
        return Answerer(
            site.name,
            data,
            columns=columns,
            classes=named_classes(site.classes),
            share_classes=site.share_classes,
            networks=site.networks,
            methods=site.methods,
            scratch=folder,
            states=folder / "states",
            rows=folder / "rows.json",
            attend=attend,
            guard=guard,
            show=diary.enter,
            **settings,
        )

    proposal = proposed(rows, policy)
    if proposal is None:
        return made(), diary
    return Proposing(site.name, proposal, folder, made, diary.enter), diary


def proposed(rows: SiteDataOptions, policy: SitePolicy) -> Schema | None:
    """What this site would say of its columns; None where it is not to propose."""
    if not rows.propose or rows.schema is not None:
        return None
    return propose_for([rows.data], rows.layout(), fewest=policy.fewest_rows)


@contextmanager
def naming_ways(data: str) -> Iterator[None]:
    """A block in which a table that is not of plain numbers is refused with the ways to take part with it."""
    try:
        yield
    except DataError as problem:
        if "'fedsolve schema'" not in str(problem):
            raise
        raise DataError(
            f"{data} is not all plain numbers. Give --propose at every site, or the same --schema at every "
            f"site and the server. What stands in the way: {problem}"
        ) from problem


def site_rows(
    name: str, options: SiteDataOptions, output: Output, schema: Schema | None = None
) -> tuple[ClientData, Schema | None]:
    """The rows that a site takes part with, and the columns of its table where no schema describes them.

    schema: the one that the sites agreed on, which names the label too.
    """
    reader = options.reader(output)
    if schema is not None:
        reader.layout = ColumnLayout(**vars(options.dialect()))
    elif options.schema is not None:
        schema, reader.layout = read_schema(options.schema), dialect_only(reader.layout)
    parts: tuple[TrainOrTest, ...] = ()
    if schema is None or schema.extractor is not None:
        parts = reader.parts(options.data)
    if schema is not None:
        table, columns = reader.described(options.data, schema, owned=False), None
    else:
        with naming_ways(options.data):
            table = reader.rows(options.data, "train" if parts else None)
        columns = table.schema
        if columns is not None and columns.extractor is not None:
            # Where this site keeps the files of a backbone is not sent.
            extractor = columns.extractor
            named = dataclasses.replace(extractor, address=portable(extractor.address))
            columns = dataclasses.replace(columns, extractor=named)
    assert table.labels is not None
    count = len(set(table.labels.tolist()))
    numbers = table.labels.dtype.kind in "iuf" and count > FEW_CLASSES
    output.note(
        f"'{name}': {len(table):,} rows of {table.features.shape[1]:,} features, "
        f"{count} {'different numbers as labels' if numbers else 'classes'}"
        + (" (the test part stays out)" if "test" in parts else "")
    )
    return ClientData(table.features, table.labels, weights=table.weights, schema=schema), columns


class Diary:
    """Shows what this site is asked and sends, and keeps it in a file, one line of JSON each.

    on_end: hears that a run is over, or that this site cannot take part.
    """

    def __init__(self, output: Output, path: Path) -> None:
        self.on_end: Callable[[Event], None] = lambda event: None
        self._output = output
        self._path = path
        self._answers = self._sent = self._received = 0
        self._arrays: set[str] = set()

    def enter(self, event: Event) -> None:
        traffic = ""
        if event.what == "answered":
            self._answers += 1
            self._sent += event.bytes_up
            self._received += event.bytes_down
            self._arrays.update(event.arrays)
            traffic = f": {megabytes(event.bytes_down)} MB down, {megabytes(event.bytes_up)} MB up"
            traffic += f" ({', '.join(event.arrays)})" if event.arrays else ""
        where = "" if event.exchange is None else f"exchange {event.exchange + 1}: "
        clock = "" if self._output.log == "json" else f"{time.strftime('%H:%M:%S')} "
        fields = {name: value for name, value in vars(event).items() if name not in ("text", "about")}
        self._output.note(f"{clock}{where}{event.text}{traffic}", **fields)
        if event.over or event.barred:
            self.on_end(event)
        # Last: on a full disk a site must hear all the same that the run is over.
        line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **vars(event)}
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def sent(self, sent: Sent) -> None:
        from fedsolve.network.answering import Event
        from fedsolve.privacy.secure_client import request_note

        about = dict(sent.about)
        fields = about.get("layout", {}).get("fields", []) if sent.what == "masked" else []
        event = Event("answered", f"sent {sent.text}", bytes_up=sent.bytes_up, about=about)
        if (request := sent.request) is not None:
            about |= {"asked": request_note(request)} if about else {}
            asked, kind, down = request.exchange, request.kind, request.nbytes
            event = dataclasses.replace(event, exchange=asked, kind=kind, bytes_down=down)
        self.enter(dataclasses.replace(event, arrays=tuple(field[0] for field in fields)))

    def summary(self) -> dict[str, Any]:
        return {
            "answers": self._answers,
            "bytes_sent": self._sent,
            "bytes_received": self._received,
            "sent": sorted(self._arrays),
            "log": str(self._path),
        }
