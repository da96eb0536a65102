"""What feedback alignment, a proximal term and a generator add to a round of FedAvg on a network.

Rounds of two methods are timed in turns, A B B A, so that a slow spell of the machine meets both; every
pair gives a ratio, and the median of the ratios is reported with the interval that holds the true median
with 95 % confidence (order statistics, no assumption about the noise). A round is everything a user waits
for: the exchange with local training, the sums, the server's update and the choice of the layer.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from scipy.stats import binom

import fedsolve as fs
from benchmarks.machine import progress
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import FedAvg, FedGen, FedProx
from fedsolve.gradient.networks import stacked_widths

SKETCH = 2048


def measure(
    pairs: int = 20,
    network: str = "mobilenet_v2",
    clients: int = 2,
    rows: int = 320,
    epochs: int = 1,
    device: str = "cpu",
) -> dict[str, Any]:
    """Ratios of a round's seconds: FedAvg with feedback alignment, FedProx and FedGen against FedAvg.

    Heads have no feedback alignment.
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (clients * rows, 784), dtype=np.uint8)
    labels = rng.integers(0, 10, clients * rows)
    owners = np.arange(clients * rows) // rows
    federation = fs.LocalFederation.from_arrays(images, labels, owners, workers=1, device=device)
    common: dict[str, Any] = {
        "network": network,
        "rounds": 4 * pairs + 10,
        "epochs": epochs,
        "rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-3,
    }
    plain = FedAvg(**common)
    arms = {
        "FedAvg + FLFA": FedAvg(feedback="lowest", feedback_sketch=SKETCH, **common),
        "FedProx": FedProx(proximal=0.01, **common),
        "FedGen": FedGen(**common),
        "FedAvg again": FedAvg(**common),
    }
    if stacked_widths(network, 784, 10) is not None:
        del arms["FedAvg + FLFA"]
    results = []
    for name, method in arms.items():
        baseline, tried = (exchanges(m.start(federation.describe()), federation) for m in (plain, method))
        # Two rounds each first: networks are built, kernels loaded, and round 0 has no chosen layer.
        for _ in range(2):
            next(baseline), next(tried)
        ratios, seconds = [], []
        while len(ratios) < pairs:
            first, second = _timed(baseline), _timed(tried)
            third, fourth = _timed(tried), _timed(baseline)
            ratios += [second / first, third / fourth]
            seconds += [first, fourth]
            progress(f"{name}: {len(ratios)} of {pairs} pairs, median {np.median(ratios):.3f}")
        low, high = median_interval(ratios)
        results.append(
            {
                "method": name,
                "pairs": len(ratios),
                "median": float(np.median(ratios)),
                "low": low,
                "high": high,
                "baseline_seconds": float(np.median(seconds)),
                "ratios": ratios,
            }
        )
    steps = epochs * -(-rows // plain.batch) * clients
    return {
        "network": network,
        "device": _device_name(device),
        "steps": steps,
        "batch": plain.batch,
        "sketch": SKETCH,
        "results": results,
    }


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """The values between which the median lies with this confidence, by order statistics."""
    ordered = sorted(values)
    skip = int(binom.ppf((1 - confidence) / 2, len(ordered), 0.5))
    skip = min(skip, (len(ordered) - 1) // 2)
    return ordered[skip], ordered[-1 - skip]


def _timed(rounds: Any) -> float:
    started = time.perf_counter()
    next(rounds)
    return time.perf_counter() - started


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
