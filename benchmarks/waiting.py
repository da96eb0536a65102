"""`python -m benchmarks.waiting`: how long workers wait for each other when clients are uneven.

The engine's rule by itself, with a client taking as long as its rows (and 20 more): seconds over those of
workers that never wait. A term waits until all before it are added, and only so many may.
"""

from __future__ import annotations

import heapq

import numpy as np

import fedsolve as fs


def waited(sizes: list[float], workers: int, terms: int, largest_first: bool) -> float:
    """The time until all are added, over that of workers that never wait."""
    added, now, idle = 0, 0.0, workers
    taken: set[int] = set()
    done: set[int] = set()
    busy: list[tuple[float, int]] = []
    while added < len(sizes):
        near = [turn for turn in range(added, min(added + terms, len(sizes))) if turn not in taken]
        if idle and near:
            turn = max(near, key=sizes.__getitem__) if largest_first else near[0]
            taken.add(turn)
            heapq.heappush(busy, (now + sizes[turn], turn))
            idle -= 1
            continue
        now, turn = heapq.heappop(busy)
        idle += 1
        done.add(turn)
        while added in done:
            added += 1
    return now / max(sum(sizes) / workers, max(sizes))


def main() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 50_000)
    print("alpha  seed  workers  in order, workers + 1 terms  largest first, twice as many")
    for alpha in (0.05, 0.1, 1.0):
        for seed in range(3):
            owners = fs.partition.dirichlet(labels, 100, alpha=alpha, seed=seed)
            sizes = [float(size) + 20.0 for size in np.bincount(owners, minlength=100)]
            for workers in (2, 4, 8):
                before = waited(sizes, workers, workers + 1, largest_first=False)
                after = waited(sizes, workers, 2 * (workers + 1), largest_first=True)
                print(f"{alpha:5}  {seed:4}  {workers:7}  {before:27.3f}  {after:28.3f}")


if __name__ == "__main__":
    main()
