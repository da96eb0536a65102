"""Which client owns each row: every row has one owner, and every draw is seeded.

All functions return owners: (rows,) integers in [0, clients). Clients may come out empty unless
`min_size` asks for at least that many rows each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedsolve.arrays import Array, check_whole, owned_rows
from fedsolve.errors import DataError

KINDS: dict[str, str | None] = {
    "iid": None,
    "dirichlet": "alpha",
    "shards": "per_client",
    "pathological": "classes_per_client",
}
"""The partitions by name, each with the parameter that it takes."""


def deal(kind: str, labels: Any, clients: int, seed: int, options: Mapping[str, Any]) -> Array:
    """The owners by the partition of this name. options: its parameter, and min_size."""
    owners: Array = globals()[kind](labels, clients, seed=seed, **options)
    return owners


def iid(labels: Any, clients: int, seed: int = 0, min_size: int = 0) -> Array:
    """Rows dealt at random in equal shares (sizes differ by at most one)."""
    labels = _checked(labels, clients, min_size)
    rng = named_rng(seed, "iid")
    owners = np.empty(len(labels), dtype=np.int64)
    owners[rng.permutation(len(labels))] = np.arange(len(labels)) % clients
    return _with_min_size(owners, clients, min_size, rng)


def dirichlet(
    labels: Any, clients: int, alpha: float, seed: int = 0, min_size: int = 0, capped: bool = False
) -> Array:
    """Latent Dirichlet allocation (NIID-1): each class is spread by its own Dirichlet(alpha) draw.

    The draw is made in log space, so that it neither underflows nor loops at any alpha > 0;
    small alpha puts nearly all of a class on one client. capped: whoever has its equal share of all rows
    gets nothing of the classes that follow, as in NIID-Bench.
    """
    labels = _checked(labels, clients, min_size)
    if not (np.isfinite(alpha) and alpha > 0):
        raise DataError(f"alpha must be a finite number > 0; got {alpha!r}.")
    rng = named_rng(seed, "dirichlet")
    owners = np.empty(len(labels), dtype=np.int64)
    sizes = np.zeros(clients)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        # log Gamma(alpha) variate = log Gamma(alpha + 1) variate + log(uniform) / alpha
        logs = np.log(rng.gamma(alpha + 1.0, size=clients)) - rng.exponential(size=clients) / alpha
        if capped:
            logs = np.where(sizes * clients < len(labels), logs, -np.inf)
        shares = np.exp(logs - logs.max())
        bounds = np.rint(np.cumsum(shares / shares.sum()) * len(rows)).astype(np.int64)
        bounds[-1] = len(rows)
        owners[rows] = np.searchsorted(bounds, np.arange(len(rows)), side="right")
        sizes += np.bincount(owners[rows], minlength=clients)
    return _with_min_size(owners, clients, min_size, rng)


def shards(labels: Any, clients: int, per_client: int, seed: int = 0, min_size: int = 0) -> Array:
    """Sharding (NIID-2): rows sorted by class, cut into clients * per_client shards, dealt at random."""
    labels = _checked(labels, clients, min_size)
    if per_client < 1:
        raise DataError(f"per_client must be at least 1; got {per_client}.")
    rng = named_rng(seed, "shards")
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    count = clients * per_client
    holders = np.repeat(np.arange(clients), per_client)[rng.permutation(count)]
    owners = np.empty(len(labels), dtype=np.int64)
    owners[order] = holders[np.arange(len(labels)) * count // max(1, len(labels))]
    return _with_min_size(owners, clients, min_size, rng)


def pathological(
    labels: Any, clients: int, classes_per_client: int, seed: int = 0, min_size: int = 0
) -> Array:
    """Each client holds at most `classes_per_client` classes; a class is cut evenly among its holders.

    Classes are dealt in turn from reshuffled decks, so every class has a holder whenever
    clients * classes_per_client is at least the number of classes; otherwise that is refused.
    """
    labels = _checked(labels, clients, min_size)
    classes, codes = np.unique(labels, return_inverse=True)
    if not 1 <= classes_per_client <= len(classes):
        raise DataError(f"classes_per_client must lie in 1 to {len(classes)}; got {classes_per_client}.")
    if clients * classes_per_client < len(classes):
        raise DataError(
            f"{clients} clients with {classes_per_client} classes each cannot hold {len(classes)} classes. "
            "Raise clients or classes_per_client."
        )
    rng = named_rng(seed, "pathological")
    holders: list[list[int]] = [[] for _ in classes]
    deck: list[int] = []
    for client in rng.permutation(clients):
        hand: list[int] = []
        while len(hand) < classes_per_client:
            fresh = [c for c in deck if c not in hand]
            if not fresh:
                deck += rng.permutation(len(classes)).tolist()
                continue
            hand.append(fresh[0])
            deck.remove(fresh[0])
        for code in hand:
            holders[code].append(int(client))
    owners = np.empty(len(labels), dtype=np.int64)
    for code, held_by in enumerate(holders):
        rows = rng.permutation(np.flatnonzero(codes == code))
        owners[rows] = np.asarray(held_by)[np.arange(len(rows)) * len(held_by) // max(1, len(rows))]
    return _with_min_size(owners, clients, min_size, rng)


def alike(labels: Any, own_labels: Any, owners: Any, clients: int | None = None, seed: int = 0) -> Array:
    """Owners of further rows, such as a test part, that give each client the class shares it already has.

    labels: of the rows to deal. own_labels, owners: of the rows that are owned already. Every class is cut
    in proportion to who owns it; a class that nobody owns, in proportion to all rows owned. Small clients
    may come out empty.
    """
    labels, own_labels, owners = np.asarray(labels), np.asarray(own_labels), np.asarray(owners)
    if len(own_labels) != len(owners) or len(owners) == 0:
        raise DataError(f"{len(own_labels)} labels and {len(owners)} owners; give one owner per owned row.")
    count = int(owners.max()) + 1 if clients is None else clients
    rng = named_rng(seed, "alike")
    new_owners = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        counts = np.bincount(owners[own_labels == label], minlength=count)
        if not counts.any():
            counts = np.bincount(owners, minlength=count)
        # In random order, so that rounding favours no client.
        order = rng.permutation(count)
        bounds = np.rint(np.cumsum(counts[order]) / counts.sum() * len(rows)).astype(np.int64)
        new_owners[rows] = order[np.searchsorted(bounds, np.arange(len(rows)), side="right")]
    return new_owners


def held_out(labels: Any, owners: Any, share: float = 0.25, seed: int = 0) -> Array:
    """Which rows each client keeps for testing: (rows,) true for `share` of every class that it owns.

    Rounded at random, so that the share holds on average however few rows a client has of a class. A
    client keeps at least one row to train on.
    """
    labels, owners = np.asarray(labels), np.asarray(owners)
    if labels.shape != owners.shape or labels.ndim != 1:
        raise DataError(f"labels and owners must be one per row; got shapes {labels.shape}, {owners.shape}.")
    if not 0.0 < share < 1.0:
        raise DataError(f"share must lie between 0 and 1; got {share!r}.")
    rng = named_rng(seed, "held out")
    tested = np.zeros(len(labels), dtype=bool)
    for client in np.unique(owners):
        own = np.flatnonzero(owners == client)
        for label in np.unique(labels[own]):
            rows = rng.permutation(own[labels[own] == label])
            tested[rows[: int(np.floor(share * len(rows) + rng.random()))]] = True
        if tested[own].all():
            tested[own[rng.integers(len(own))]] = False
    return tested


def class_counts(labels: Any, owners: Any, clients: int | None = None) -> Array:
    """Who owns what: (clients, classes) numbers of rows, classes sorted."""
    labels, owners = np.asarray(labels), np.asarray(owners)
    classes, codes = np.unique(labels, return_inverse=True)
    count = int(owners.max()) + 1 if clients is None else clients
    table = np.zeros((count, len(classes)), dtype=np.int64)
    np.add.at(table, (owners, codes), 1)
    return table


def heterogeneity(labels: Any, owners: Any) -> float:
    """How far the clients' class shares are from the overall ones: 0 is IID, near 1 is one class each.

    Mean total variation, weighted by rows.
    """
    table = class_counts(labels, owners).astype(np.float64)
    overall = table.sum(axis=0) / table.sum()
    sizes = table.sum(axis=1)
    filled = sizes > 0
    shares = table[filled] / sizes[filled, None]
    return float(np.sum(sizes[filled] * 0.5 * np.abs(shares - overall).sum(axis=1)) / sizes.sum())


def _with_min_size(owners: Array, clients: int, min_size: int, rng: np.random.Generator) -> Array:
    """Move random rows from the largest clients to those below `min_size`; a bounded number of moves."""
    if min_size <= 0:
        return owners
    rows_of = [rng.permutation(rows).tolist() for rows in owned_rows(owners, clients)]
    for client in range(clients):
        while len(rows_of[client]) < min_size:
            largest = max(range(clients), key=lambda other: len(rows_of[other]))
            row = rows_of[largest].pop()
            rows_of[client].append(row)
            owners[row] = client
    return owners


def _checked(values: Any, clients: int, min_size: int) -> Array:
    labels: Array = np.asarray(values)
    if labels.ndim != 1 or len(labels) == 0:
        raise DataError(f"labels must be a non-empty one-dimensional array; got shape {labels.shape}.")
    if clients < 1:
        raise DataError(f"clients must be at least 1; got {clients}.")
    if min_size * clients > len(labels):
        raise DataError(
            f"{clients} clients with at least {min_size} rows each need {min_size * clients} rows; "
            f"there are {len(labels)}."
        )
    return labels


def named_rng(seed: int, role: str) -> np.random.Generator:
    """The random stream of this seed and role."""
    check_whole(0, seed=seed)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *role.encode()])))
