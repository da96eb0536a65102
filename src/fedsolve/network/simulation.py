"""Virtual clients by the thousand in Ray, through Flower's simulation runtime.

The clients are spread over worker processes, on one machine or on a Ray cluster; features are mapped from
a file that all of them can read. On one machine `LocalFederation` does the same work in a fraction of the
time: it starts no processes and copies no terms.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.labels import class_list, plain_labels
from fedsolve.network import require_flower
from fedsolve.network.flower import FlowerFederation
from fedsolve.network.link import GridLink, Node, Reply
from fedsolve.network.wire import Note
from fedsolve.threads import usable_cores

T = TypeVar("T")

_AHEAD = 4


@dataclass(frozen=True)
class Deal:
    """Where the rows are, and whose they are: what a worker process needs to be any of the clients."""

    features: str
    labels: str
    owners: str
    clients: int

    def name(self, client: int) -> str:
        return f"client-{client:0{len(str(self.clients - 1))}d}"


class SimulationLink(GridLink):
    """Keeps a few messages per worker on their way.

    Flower's simulation goes through all waiting messages for every node it has, and keeps all answers that
    are not taken: a thousand at once cost minutes and gigabytes.
    """

    def __init__(self, grid: Any, window: int) -> None:
        super().__init__(grid)
        self._window = window
        self._waiting: deque[tuple[str, int, Note, bytes]] = deque()
        self._ids: dict[str, str] = {}
        self._sent = 0

    def send(self, nodes: Sequence[int], note: Note, payload: bytes) -> list[str]:
        names = [f"{self._sent + index}" for index in range(len(nodes))]
        self._sent += len(nodes)
        self._waiting.extend(zip(names, nodes, [note] * len(nodes), [payload] * len(nodes), strict=True))
        self._push()
        return names

    def receive(self, message: str, still_there: Callable[[], bool]) -> Reply | None:
        if message not in self._ids:
            self._push(until=message)
        reply = super().receive(self._ids[message], still_there)
        if reply is not None:
            del self._ids[message]
            self._push()
        return reply

    def _push(self, until: str | None = None) -> None:
        while self._waiting and (len(self._ids) < self._window or until is not None):
            name, node, note, payload = self._waiting.popleft()
            (self._ids[name],) = super().send([node], note, payload)
            if name == until:
                return


def simulate(
    features: Array,
    labels: Any,
    owners: Array,
    work: Callable[[FlowerFederation], T],
    *,
    clients: int | None = None,
    classes: Sequence[Any] | None = None,
    workers: int | None = None,
    scratch: Path | None = None,
) -> T:
    """The result of `work` on a federation whose client `k` owns the rows where `owners == k`.

    workers: processes that stand for the clients; all cores when None.
    scratch: folder that all workers can read, for the rows; the system's temporary one when None.
    """
    require_flower(simulation=True)
    labels, owners = plain_labels(labels), np.asarray(owners)
    count = int(owners.max()) + 1 if clients is None else clients
    if count < 1 or (len(owners) and owners.max() >= count):
        raise DataError(f"owners run to {owners.max()}, but there are {count} clients.")
    known = class_list(classes, [labels])
    workers = workers or usable_cores()
    results: list[T] = []
    with tempfile.TemporaryDirectory(prefix="fedsolve-simulation-", dir=scratch) as folder:
        deal = _write(Path(folder), features, labels, owners, count)

        def serve(grid: Any) -> None:
            while len(grid.state.nodes) < count:  # the runtime starts beside us
                time.sleep(0.01)
            link = SimulationLink(grid, _AHEAD * workers)
            spec = Spec(int(features.shape[1]), known, len(known), FlowerFederation.prefers)
            federation = FlowerFederation(link, clients=count, missing="error", interval=0.005, spec=spec)
            # The runtime makes its nodes in the order of the clients.
            federation.enrol({deal.name(k): Node(int(node)) for k, node in enumerate(grid.state.nodes)})
            results.append(work(federation))

        _run(serve, deal, workers)
    return results[0]


def _write(folder: Path, features: Array, labels: Array, owners: Array, clients: int) -> Deal:
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(clients + 1))
    path = _file_of(features)
    if path is None:
        path = folder / "features.npy"
        np.save(path, features)
    np.save(folder / "labels.npy", labels)
    np.savez(folder / "owners.npz", order=order, bounds=bounds)
    return Deal(str(path), str(folder / "labels.npy"), str(folder / "owners.npz"), clients)


def _file_of(features: Array) -> Path | None:
    """The .npy file of which this array is the whole; None for a part, or for changes not in the file."""
    path = getattr(features, "filename", None)
    if not isinstance(features, np.memmap) or features.mode == "c" or not str(path).endswith(".npy"):
        return None
    try:
        whole = np.load(str(path), mmap_mode="r")
    except (OSError, ValueError):
        return None

    def place(array: Any) -> tuple[object, ...]:
        return array.shape, array.strides, array.dtype, array.offset

    return Path(str(path)) if place(whole) == place(features) else None


def _run(serve: Callable[[Any], None], deal: Deal, workers: int) -> None:
    from flwr.app import Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server, client = ServerApp(), ClientApp()

    @server.main()  # type: ignore[misc, untyped-decorator, unused-ignore]
    def main(grid: Any, context: Any) -> None:
        serve(grid)

    @client.query()  # type: ignore[misc, untyped-decorator, unused-ignore]
    def query(message: Any, context: Any) -> Any:
        from fedsolve.network.simulation import answer
        from fedsolve.network.wire import record, unpack

        note, payload = answer(deal, int(context.node_config["partition-id"]), *unpack(message.content))
        return Message(record(note, payload), reply_to=message)

    loud = logging.getLogger("flwr").level
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_simulation(
                server,
                client,
                deal.clients,
                backend_config={
                    "init_args": {
                        "num_cpus": workers,
                        "include_dashboard": False,
                        "log_to_driver": False,
                        "logging_level": "ERROR",
                    },
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
    finally:
        logging.getLogger("flwr").setLevel(loud)


# -- in a worker process ---------------------------------------------------------------------------


def answer(deal: Deal, client: int, note: Note, payload: Array) -> tuple[Note, bytes]:
    """The answer of a virtual client, in whatever process it is asked.

    The process keeps the model so far, which all clients share; a client's own state is in a folder.
    """
    from fedsolve.federation.participant import ClientData
    from fedsolve.network.answering import Answerer
    from fedsolve.threads import blas_threads

    features, labels, order, bounds, chain = _opened(deal)
    rows = order[bounds[client] : bounds[client + 1]]
    data = ClientData(features, labels, rows, checked=True)
    states = Path(deal.labels).parent / "states"
    site = Answerer(
        deal.name(client), data, share_classes=True, networks=None, methods=None, chain=chain, states=states
    )
    with blas_threads(1):
        return site.reply(note, payload)


@cache
def _opened(deal: Deal) -> tuple[Array, Array, Array, Array, Any]:
    from fedsolve.federation.messages import Chain

    owners = np.load(deal.owners)
    features = np.load(deal.features, mmap_mode="r")
    return features, np.load(deal.labels), owners["order"], owners["bounds"], Chain()
