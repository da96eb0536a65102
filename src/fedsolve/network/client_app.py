"""The ClientApp for `flwr run` on Flower's own SuperNodes: a site whose data are two .npy files.

The node's configuration names them:

    flower-supernode ... --node-config 'name="north" features="/data/x.npy" labels="/data/y.npy"'

and may add `share-classes=true`, `allow-networks="package.module:function,..."` (functions that a run may
have called to make a network), `allow-methods="package.module:Class,..."` (methods from outside fedsolve) and
`state="FOLDER"`, where the model so far is kept between messages: each is answered by a fresh process.
`fedsolve client` is one process, and faster.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedsolve.errors import DataError
from fedsolve.federation.participant import ClientData
from fedsolve.network.answering import Answerer
from fedsolve.network.keyfolder import private_folder
from fedsolve.network.wire import record, unpack

app = ClientApp()


@app.query()  # type: ignore[misc, untyped-decorator, unused-ignore]
def query(message: Any, context: Any) -> Any:
    """Answer one message."""
    config = context.node_config
    site = _site(
        str(config.get("name", context.node_id)),
        str(config.get("features", "")),
        str(config.get("labels", "")),
        bool(config.get("share-classes", False)),
        str(config.get("state", "")),
        str(config.get("allow-networks", "")),
        str(config.get("allow-methods", "")),
    )
    note, answer = site.reply(*unpack(message.content))
    return Message(record(note, answer), reply_to=message)


@cache
def _site(
    name: str, features: str, labels: str, share_classes: bool, state: str, networks: str, methods: str
) -> Answerer:
    if not features or not labels:
        raise DataError(
            f'node \'{name}\' has no data: its --node-config must name features="x.npy" and labels="y.npy".'
        )
    try:
        data = ClientData(np.load(features, mmap_mode="r"), np.load(labels))
    except OSError as problem:
        raise DataError(f"node '{name}' cannot read its data: {problem}.") from problem
    folder = Path(state) if state else None
    states = None if folder is None else folder / "states"
    if folder is not None:
        private_folder(folder)
    return Answerer(
        name,
        data,
        share_classes=share_classes,
        networks=_listed(networks),
        methods=_listed(methods),
        state=folder,
        scratch=folder,
        states=states,
        rows=None if folder is None else folder / "rows.json",
    )


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
