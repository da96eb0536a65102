"""AFL's aggregation law on dummy data: the paper's Tables A.1 and A.2, from its own formulas.

    python examples/aggregation_law.py [--rows 10000] [--width 512] [--runs 1]

Table A.1: entry-wise 1-norm deviation between the jointly trained weight and the one aggregated pair by
pair, without and with the regulariser that is removed afterwards (RI). Table A.2: what clients
reach on their own against AFL, on the embedded digits.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
from scipy.linalg import LinAlgWarning
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import fedsolve as fs
from fedsolve.closedform import laws


def dummy_data(rows: int, width: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random features and one-hot targets, the same number of rows in every class."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(rows) % classes)
    return rng.standard_normal((rows, width)), np.eye(classes)[labels]


def deviation(
    joint: np.ndarray, features: np.ndarray, targets: np.ndarray, clients: int, regulariser: float
) -> float:
    """|W - W_aggregated|_1, the sum over all entries, for an even random split among `clients`."""
    owners = np.arange(len(features)) % clients
    merged = laws.aggregate(
        laws.local_solution(features[owners == client], targets[owners == client], regulariser)
        for client in range(clients)
    )
    weight = laws.remove_regulariser(merged, regulariser) if regulariser else merged.weight
    return float(np.abs(joint - weight).sum())


def table_a1(rows: int, width: int, runs: int) -> dict[int, tuple[float, float]]:
    """For every K, the deviation without and with RI, averaged over runs."""
    clients = (2, 10, 20, 50, 100, 200)
    table = np.zeros((len(clients), 2))
    for run in range(runs):
        features, targets = dummy_data(rows, width, 10, seed=run)
        joint = np.linalg.lstsq(features, targets, rcond=None)[0]
        with warnings.catch_warnings():
            # Without RI the first sums of Gram matrices are singular: that is the point of the table.
            warnings.simplefilter("ignore", LinAlgWarning)
            for row, count in enumerate(clients):
                table[row] += [deviation(joint, features, targets, count, g) / runs for g in (0.0, 1.0)]
    return {count: (float(a), float(b)) for count, (a, b) in zip(clients, table, strict=True)}


def table_a2() -> None:
    features, labels = load_digits(return_X_y=True)
    features = features / 16.0
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1300], order[1300:]
    owners = fs.partition.dirichlet(labels[train], clients=100, alpha=0.1, seed=0)
    targets = np.eye(10)[labels[train]]
    weights = laws.local_only(features[train], targets, owners, clients=100, ridge=1.0)
    own = [np.mean(np.argmax(features[test] @ weight, axis=1) == labels[test]) for weight in weights]
    federation = fs.LocalFederation.from_arrays(features[train], labels[train], owners, clients=100)
    afl = fs.AFL(ridge=1.0).fit(federation).score(features[test], labels[test])
    print("\nTable A.2 on digits, 100 clients, Dirichlet 0.1: test accuracy")
    print(f"{'local best':>12} {'local mean':>12} {'AFL':>12}")
    print(f"{max(own):>12.2%} {np.mean(own):>12.2%} {afl:>12.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--runs", type=int, default=1)
    arguments = parser.parse_args()
    print(f"Table A.1: deviation, {arguments.rows} rows x {arguments.width}, 10 classes")
    print(f"{'K':>6} {'without RI':>14} {'with RI':>14}")
    with threadpool_limits(1):
        table = table_a1(arguments.rows, arguments.width, arguments.runs)
    for clients, (without, with_ri) in table.items():
        print(f"{clients:>6} {without:>14.2e} {with_ri:>14.2e}")
    table_a2()


if __name__ == "__main__":
    main()
