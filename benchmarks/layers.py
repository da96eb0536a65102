"""`python -m benchmarks.layers [--json FILE]`: milliseconds of a local step of MobileNetV2 on a GPU.

With our layers in Triton (BatchNorm with its rectifier, depthwise convolutions) and with those of torch and
cuDNN in the same run: forward, backward and SGD with momentum, recorded as a CUDA graph and replayed, one
training alone and several at once on streams of their own.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.machine import progress, save
from fedsolve.gradient.learners import laid_out
from fedsolve.gradient.networks import normalisation
from fedsolve.gradient.networks.mobilenet import MobileNetV2
from fedsolve.gradient.optimisers import Optimiser
from fedsolve.gradient.slots import Pool, on_thread_of_size

WARM = 3


class Training:
    """One network, a batch and a stream, and a recorded step."""

    def __init__(self, rows: int) -> None:
        torch.manual_seed(0)
        network = MobileNetV2(1, 10).cuda()
        weights = list(network.parameters())
        images = laid_out(torch.randn(rows, 1, 28, 28, device="cuda"))
        labels = torch.arange(rows, device="cuda") % 10
        optimiser = Optimiser("sgd", torch.tensor(0.01, device="cuda"), 0.9, 1e-3)
        self.stream = torch.cuda.Stream()

        def step() -> tuple[torch.Tensor, ...]:
            loss = F.cross_entropy(network(images), labels)
            gradients = list(torch.autograd.grad(loss, weights))
            with torch.no_grad():
                optimiser.step(weights, gradients)
            return (loss.detach(),)

        with torch.cuda.stream(self.stream):
            for _ in range(WARM):
                on_thread_of_size(rows, step)
            self._pool = Pool()
            self.replay, (self.loss,) = on_thread_of_size(rows, lambda: self._pool.record(step))


def milliseconds(trainings: list[Training], steps: int) -> float:
    """Of one step, all trainings at once; the better of two attempts."""
    found = []
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            for training in trainings:
                with torch.cuda.stream(training.stream):
                    training.replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / steps / len(trainings) * 1e3)
    return min(found)


def measure(rows: int, at_once: list[int], steps: int) -> dict[str, Any]:
    """Milliseconds a step by number of trainings at once, of each kind of layers."""
    ours = normalisation._triton_layers()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    for name, layers in (("torch", None), ("triton", ours)):
        normalisation._triton_layers = lambda layers=layers: layers  # type: ignore[assignment]
        trainings = [Training(rows) for _ in range(max(at_once))]
        found[name] = {str(count): milliseconds(trainings[:count], steps) for count in at_once}
        progress(f"{name}: {found[name]}")
    found["ratio"] = {count: found["torch"][count] / found["triton"][count] for count in found["torch"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="of a batch")
    parser.add_argument("--at-once", type=int, action="append", help="trainings; 1, 2 and 6")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here, and these layers are for one.")
    found = measure(given.rows, given.at_once or [1, 2, 6], given.steps)
    save(given.json, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
