"""A site as a process that takes its time: `slow_node.py NAME DATA SERVER KEYS STATE EXCHANGE SECONDS`.

Before it answers the exchange, it leaves the file STATE/answering, and waits.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import fedsolve as fs
from fedsolve.network.answering import Answerer
from fedsolve.network.keyfolder import Keys
from fedsolve.network.node import Connection, SiteNode


def main() -> None:
    name, data, server, keys, state, exchange, seconds = sys.argv[1:]

    class Slow(Answerer):
        def reply(self, note, payload):
            if note.get("ask") == "answer" and note["exchange"] >= int(exchange):
                (Path(state) / "answering").touch()
                time.sleep(float(seconds))
            return super().reply(note, payload)

    held, rows = Keys(keys), np.load(data)
    site = Slow(name, fs.ClientData(rows["x"], rows["y"]))
    SiteNode(site, Connection(server, held.authority, held.client_key(name))).serve()


if __name__ == "__main__":
    main()
