"""Seconds of a round of FedAvg: fedsolve beside loops that people write, and beside Flower's simulation.

The same network, clients, batches of the same size and plain SGD everywhere; what differs is the machinery.

    plain loop    one module: weights loaded, the client's batches indexed from one tensor, weights averaged
    PFLlib        its loop written anew: a model and a DataLoader for every client, weights copied to and fro;
                  without the evaluation of every client that PFLlib does besides
    Flower        its simulation on Ray, with a NumPyClient that trains as the plain loop does

A worker of fedsolve has one thread, so that the result does not depend on how many there are; loops have as
many threads as fedsolve has workers, and are compared with that. All ways take turns round by round, so that
whatever else runs on the machine slows all of them down; its load is kept with the result. A first round of
each is not counted; told are the median of the others, the smallest, the largest, and the median of the
processor's seconds.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import fedsolve as fs
from benchmarks.machine import progress
from fedsolve.federation.recipe import exchanges
from fedsolve.gradient import FedAvg
from fedsolve.gradient.networks import build_network
from fedsolve.threads import usable_cores

CLASSES = 10


@dataclass(frozen=True)
class Task:
    """What is trained: images (rows, 784) as bytes, labels, and the settings of a round."""

    network: str = "cnn"
    clients: int = 10
    rows: int = 300
    epochs: int = 1
    batch: int = 64
    rate: float = 0.01
    device: str = "cpu"

    def images(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(0)
        count = self.clients * self.rows
        return rng.integers(0, 256, (count, 784), dtype=np.uint8), rng.integers(0, CLASSES, count)

    def client(self, number: int) -> slice:
        return slice(number * self.rows, (number + 1) * self.rows)


def measure(
    rounds: int = 5, flower: bool = True, workers: tuple[int, ...] = (), **settings: Any
) -> dict[str, Any]:
    """Seconds a round of every way, and the ratio to fedsolve's on as many cores."""
    task = Task(**settings)
    ways: dict[tuple[str, int], Iterator[None]] = {}
    for count in workers or dict.fromkeys((1, usable_cores())):
        ways["fedsolve", count] = with_fedsolve(task, count)
        ways |= {("plain loop", count): plain_loop(task), ("PFLlib's loop", count): pfllib_loop(task)}
        if task.network == "cnn":
            ways["plain loop, torch's layers", count] = plain_loop(task, usual_layers(task))
    progress(f"{len(ways)} ways in turn: {rounds + 1} rounds")
    times: dict[tuple[str, int], list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for (name, cores), steps in ways.items():
            taken = _timed(steps, cores)
            if number:
                times[name, cores].append(taken)
    found = [_told(way, cores, *zip(*taken, strict=True)) for (way, cores), taken in times.items()]
    if flower:
        progress(f"Flower's simulation: {rounds + 1} rounds")
        found.append(_told("Flower's simulation", usable_cores(), flower_rounds(task, rounds)))
    yardsticks = {one["cores"]: one["median"] for one in found if one["way"] == "fedsolve"}
    for one in found:
        one["ratio"] = one["median"] / yardsticks.get(one["cores"], found[0]["median"])
    return {"task": vars(task), "load": os.getloadavg(), "ways": found}


def _told(way: str, cores: int, seconds: Sequence[float], processor: Sequence[float] = ()) -> dict[str, Any]:
    told = {"way": way, "cores": cores, "seconds": list(seconds), "median": float(np.median(seconds))}
    return told | ({"processor": float(np.median(processor))} if processor else {})


def _timed(steps: Iterator[None], cores: int) -> tuple[float, float]:
    """Seconds of a round by the clock and of the processor."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        started = time.perf_counter(), time.process_time()
        next(steps)
        return time.perf_counter() - started[0], time.process_time() - started[1]
    finally:
        torch.set_num_threads(before)


def with_fedsolve(task: Task, workers: int) -> Iterator[None]:
    """Rounds of fedsolve's FedAvg, so many clients at once."""
    images, labels = task.images()
    owners = np.arange(len(labels)) // task.rows
    federation = fs.LocalFederation.from_arrays(images, labels, owners, workers=workers, device=task.device)
    method = FedAvg(
        network=task.network,
        rounds=10**6,
        epochs=task.epochs,
        batch=task.batch,
        rate=task.rate,
    )
    for _ in exchanges(method.start(federation.describe()), federation):
        _wait(task)
        yield


def plain_loop(task: Task, network: Any = None) -> Iterator[None]:
    """FedAvg as one writes it in an afternoon; with fedsolve's network where no other is given."""
    import torch

    images, labels = task.images()
    inputs, targets = _tensors(task, images), torch.as_tensor(labels, device=task.device)
    network = network or _network(task)
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    while True:
        sums = {name: torch.zeros_like(value) for name, value in weights.items()}
        for client in range(task.clients):
            own = task.client(client)
            network.load_state_dict(weights)
            _train(task, network, inputs[own], targets[own])
            for name, value in network.state_dict().items():
                sums[name] += value / task.clients
        weights = sums
        _wait(task)
        yield


def usual_layers(task: Task) -> Any:
    """The small CNN as torch's layers one after the other."""
    from torch import nn

    first = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers = [*first, *second, nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers).to(task.device)


def pfllib_loop(task: Task) -> Iterator[None]:
    """FedAvg in the manner of PFLlib: objects for every client, and copies between them and the server."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = task.images()
    inputs, targets = _tensors(task, images).cpu(), torch.as_tensor(labels)
    server = _network(task)
    clients = []
    for number in range(task.clients):
        own = task.client(number)
        model = copy.deepcopy(server)
        loader = DataLoader(TensorDataset(inputs[own], targets[own]), task.batch, shuffle=True)
        clients.append((model, torch.optim.SGD(model.parameters(), lr=task.rate), loader))
    while True:
        for model, _, _ in clients:
            for new, old in zip(server.parameters(), model.parameters(), strict=True):
                old.data = new.data.clone()
        for model, optimiser, loader in clients:
            model.train()
            for _ in range(task.epochs):
                for some, answers in loader:
                    loss = torch.nn.functional.cross_entropy(
                        model(some.to(task.device)), answers.to(task.device)
                    )
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
        server = copy.deepcopy(clients[0][0])
        for value in server.parameters():
            value.data.zero_()
        for model, _, _ in clients:
            for total, value in zip(server.parameters(), model.parameters(), strict=True):
                total.data += value.data.clone() / task.clients
        _wait(task)
        yield


def flower_rounds(task: Task, rounds: int) -> list[float]:
    """Seconds of each round of Flower's simulation after the first."""
    import flwr
    from flwr.client import ClientApp, NumPyClient
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg as Strategy

    ends: list[float] = []

    class Client(NumPyClient):  # type: ignore[misc]
        def __init__(self, number: int) -> None:
            self.number = number

        def fit(self, parameters: Any, config: Any) -> Any:
            import torch

            images, labels = task.images()
            own = task.client(self.number)
            network = _network(task)
            names = list(network.state_dict())
            pairs = zip(names, map(torch.as_tensor, parameters), strict=True)
            network.load_state_dict(dict(pairs))
            answers = torch.as_tensor(labels[own], device=task.device)
            _train(task, network, _tensors(task, images[own]), answers)
            return [value.cpu().numpy() for value in network.state_dict().values()], task.rows, {}

    def evaluated(number: int, parameters: Any, config: Any) -> None:
        ends.append(time.perf_counter())

    def server(context: Any) -> Any:
        first = [value.cpu().numpy() for value in _network(task).state_dict().values()]
        strategy = Strategy(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_available_clients=task.clients,
            evaluate_fn=evaluated,
            initial_parameters=flwr.common.ndarrays_to_parameters(first),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds + 1))

    def client(context: Any) -> Any:
        return Client(int(context.node_config["partition-id"])).to_client()

    flwr.simulation.run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=client),
        num_supernodes=task.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.1 * (task.device != "cpu")}},
    )
    # The first end is before any training, the second that of the round that warms up.
    return list(np.diff(ends)[1:])


def _network(task: Task) -> Any:
    return build_network(task.network, 784, CLASSES).to(task.device)


def _tensors(task: Task, images: Any) -> Any:
    import torch

    scaled = torch.as_tensor(images).to(task.device, torch.float32).div_(127.5).sub_(1.0)
    return scaled.reshape(-1, 1, 28, 28)


def _train(task: Task, network: Any, inputs: Any, targets: Any) -> None:
    import torch

    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr=task.rate)
    for _ in range(task.epochs):
        order = torch.randperm(len(targets), device=targets.device)
        for first in range(0, len(order), task.batch):
            batch = order[first : first + task.batch]
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs[batch]), targets[batch]).backward()
            optimiser.step()


def _wait(task: Task) -> None:
    if task.device != "cpu":
        import torch

        torch.cuda.synchronize()


def table(found: dict[str, Any]) -> str:
    """The ways and their seconds, as Markdown."""
    lines = ["| | cores | seconds a round | from | to | processor | to fedsolve |", "|---|" + "---:|" * 6]
    for one in found["ways"]:
        numbers = (one["median"], min(one["seconds"]), max(one["seconds"]), one.get("processor", np.nan))
        told = " | ".join(f"{number:.3f}" for number in numbers)
        lines.append(f"| {one['way']} | {one['cores']} | {told} | {one['ratio']:.2f} |")
    lines.append(f"Load of the machine at the end: {found['load'][0]:.1f}.")
    return "\n".join(lines)
