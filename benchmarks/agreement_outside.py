"""Methods beside other people's code, which is no part of this repository: float64, the same batches.

`python -m benchmarks.agreement --outside --pfllib DIR --fedsol DIR --flower`, the folders being checkouts of
TsingZ0/PFLlib and Lee-Gihun/FedSOL. Their clients train on the batches that fedsolve plans, and their own
code sums. Every line says whose code it is and what had to be matched.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedsolve.federation.local import LocalFederation
from fedsolve.gradient import (
    FedAvg,
    FedBABU,
    FedBN,
    FedDBE,
    FedNova,
    FedOpt,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedSOL,
    PerFedAvg,
)
from fedsolve.gradient.batches import plan_batches

WIDTH, HIDDEN, CLASSES, CLIENTS, ROWS = 6, 5, 3, 4, 12
SHARED: dict[str, Any] = {
    "precision": "float64",
    "rate": 0.1,
    "rounds": 3,
    "epochs": 2,
    "batch": 4,
}


class Split(nn.Module):
    """A base and a head, as PFLlib has them; with BatchNorm where asked for."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(WIDTH, HIDDEN))
        if normalised:
            self.base.add_module("bn", nn.BatchNorm1d(HIDDEN))
        self.base.add_module("act", nn.ReLU())
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.double()

    def forward(self, inputs: Any) -> Any:
        return self.head(self.base(inputs))


def federation(sizes: Sequence[int] = (ROWS,) * CLIENTS) -> LocalFederation:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((sum(sizes), WIDTH))
    labels = np.argmax(features @ rng.standard_normal((WIDTH, CLASSES)), axis=1)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return LocalFederation.from_arrays(features, labels, owners, workers=1, classes=range(CLASSES))


class Epochs:
    """A loader whose next iteration is the next epoch of the batches that fedsolve planned."""

    def __init__(self, data: tuple[Any, Any], plans: list[Any]) -> None:
        features, labels = data
        a_pass = len(labels) // SHARED["batch"]
        batches = [(features[batch], labels[batch]) for plan in plans for batch in plan]
        self._epochs = [batches[first : first + a_pass] for first in range(0, len(batches), a_pass)]
        self.everything = [(features, labels)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._epochs.pop(0) if self._epochs else self.everything)


def far(found: Any, expected: nn.Module | dict[str, Any], only: str = "") -> float:
    theirs = expected if isinstance(expected, dict) else dict(expected.named_parameters())
    pairs = [(found[name], theirs[name].detach()) for name in theirs if name.startswith(only)]
    return max(float(np.abs(np.asarray(one) - other.numpy()).max()) for one, other in pairs)


class PFLlib:
    """PFLlib's clients and sums on the rows of `federation()`."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder / "system"))
        # What reads data sets and writes results needs packages that are not installed.
        for module, name in (
            ("utils", ""),
            ("utils.data_utils", "read_client_data"),
            ("utils.dlg", "DLG"),
            ("h5py", ""),
        ):
            sys.modules[module] = types.ModuleType(module)
            setattr(sys.modules[module], name or "unused", None)

    def args(self, model: nn.Module, **own: Any) -> types.SimpleNamespace:
        common = {
            "model": model,
            "algorithm": "",
            "dataset": "",
            "device": "cpu",
            "save_folder_name": "",
            "num_classes": CLASSES,
            "batch_size": SHARED["batch"],
            "local_learning_rate": SHARED["rate"],
            "local_epochs": SHARED["epochs"],
            "few_shot": 0,
            "learning_rate_decay": False,
            "learning_rate_decay_gamma": 1.0,
        }
        return types.SimpleNamespace(**common | own)

    def clients(self, module: str, name: str, model: nn.Module, **own: Any) -> list[Any]:
        kind = getattr(importlib.import_module(f"flcore.clients.{module}"), name)
        args = self.args(model, **own)
        return [kind(args, each, ROWS, 0, train_slow=False, send_slow=False) for each in range(CLIENTS)]

    def rounds(
        self,
        method: Any,
        clients: list[Any],
        shared: Callable[[Any], nn.Module] | None,
        plans: Callable[[int, str], list[Any]] | None = None,
        after: Callable[[list[Any]], None] | None = None,
        before: Callable[[Any], None] | None = None,
    ) -> Any:
        """Rounds in which `shared` of every client is averaged; None: nothing of it. The last mean."""
        data, mean = _tensors(), None
        for number in range(method.rounds):
            for client, (name, rows) in zip(clients, data.items(), strict=True):
                if mean is not None:
                    client.set_parameters(mean)
                if before is not None:
                    before(client)
                planned = plans(number, name) if plans else [plan_batches(method, ROWS, number, name, 1)]
                loader = Epochs(rows, planned)
                client.load_train_data = lambda *_, loader=loader: loader
                client.train()
            if shared is not None:
                mean = self.mean([shared(client) for client in clients])
            if after is not None:
                after(clients)
        return mean

    def mean(self, models: list[nn.Module]) -> nn.Module:
        """The server's own sum."""
        kind = importlib.import_module("flcore.servers.serverbase").Server
        server = object.__new__(kind)
        server.uploaded_models, server.uploaded_weights = models, [1 / len(models)] * len(models)
        server.aggregate_parameters()
        found: nn.Module = server.global_model
        return found


def _tensors(sizes: Sequence[int] = (ROWS,) * CLIENTS) -> dict[str, tuple[Any, Any]]:
    found = {}
    for participant in federation(sizes).participants:
        rows = participant.data
        found[participant.name] = (
            torch.as_tensor(rows.features(slice(None))),
            torch.as_tensor(rows.own_labels()),
        )
    return found


def compare(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Method, what was matched, and the largest difference of any weight after three rounds."""
    outside = PFLlib(folder)
    names = list(_tensors())

    method: Any = FedAvg(network=Split(), **SHARED)
    mean = outside.rounds(method, outside.clients("clientavg", "clientAVG", Split()), lambda c: c.model)
    yield "fedavg", "PFLlib: nothing", far(method.fit(federation()).weights, mean)

    method = FedProx(network=Split(), proximal=0.3, **SHARED)
    clients = outside.clients("clientprox", "clientProx", Split(), mu=0.3)
    mean = outside.rounds(method, clients, lambda c: c.model)
    yield "fedprox", "PFLlib: nothing", far(method.fit(federation()).weights, mean)

    method = FedPer(network=Split(), **SHARED)
    clients = outside.clients("clientper", "clientPer", Split())
    mean = outside.rounds(method, clients, lambda c: c.model.base)
    model = method.fit(federation())
    heads = [far(model.personal(n).weights, c.model, "head") for n, c in zip(names, clients, strict=True)]
    base = far(model.weights, {f"base.{n}": v for n, v in mean.named_parameters()})
    yield "fedper", "PFLlib: nothing", max(base, *heads)

    method = FedRep(network=Split(), head_epochs=3, **SHARED)
    first = FedAvg(network=Split(), **SHARED | {"epochs": 3})
    clients = outside.clients("clientrep", "clientRep", Split(), plocal_epochs=3)
    mean = outside.rounds(
        method,
        clients,
        lambda c: c.model.base,
        plans=lambda n, c: [plan_batches(each, ROWS, n, c, 1) for each in (first, method)],
    )
    model = method.fit(federation())
    heads = [far(model.personal(n).weights, c.model, "head") for n, c in zip(names, clients, strict=True)]
    base = far(model.weights, {f"base.{n}": v for n, v in mean.named_parameters()})
    yield "fedrep", "PFLlib: nothing", max(base, *heads)

    method = FedBN(network=Split(normalised=True), **SHARED)
    clients = outside.clients("clientbn", "clientBN", Split(normalised=True))
    mean = outside.rounds(method, clients, lambda c: c.model)
    model = method.fit(federation())
    for client in clients:
        client.set_parameters(mean)
    found = []
    for name, client in zip(names, clients, strict=True):
        own = model.personal(name)
        found += [far(own.weights, client.model), far(own.buffers, _statistics(client.model))]
    yield "fedbn", "PFLlib: their BatchNorm is what is called 'bn'", max(found)

    method = FedBABU(network=Split(), fine_epochs=2, fine_rate=0.1, **SHARED)
    clients = outside.clients("clientbabu", "clientBABU", Split(), fine_tuning_epochs=2)
    mean = outside.rounds(method, clients, lambda c: c.model.base)
    model = method.fit(federation())
    alone = FedAvg(network=Split(), **SHARED)
    found = [far(model.weights, {f"base.{n}": v for n, v in mean.named_parameters()})]
    for name, client, rows in zip(names, clients, _tensors().values(), strict=True):
        client.set_parameters(mean)
        loader = Epochs(rows, [plan_batches(alone, ROWS, method.rounds, "alone", 1)])
        client.load_train_data = lambda *_, loader=loader: loader
        client.fine_tune()
        found.append(far(model.personal(name).weights, client.model))
    yield "fedbabu", "PFLlib: nothing", max(found)

    method = PerFedAvg(network=Split(), inner_rate=0.1, **SHARED)
    clients = outside.clients("clientperavg", "clientPerAvg", Split())
    for client in clients:
        client.batch_size = SHARED["batch"] // 2
    mean = outside.rounds(method, clients, lambda c: c.model)
    yield (
        "per-fedavg",
        "PFLlib: inner_rate = rate: theirs are one",
        far(method.fit(federation()).weights, mean),
    )

    method = FedDBE(
        network=Split(), consistency=2.0, mean_momentum=0.3, discard_first=True, **SHARED | {"rounds": 4}
    )
    waiting = torch.zeros(2, WIDTH).double(), torch.zeros(2, dtype=torch.long)
    base = importlib.import_module("flcore.clients.clientbase").Client
    base.load_train_data, read = (lambda *_: [waiting]), base.load_train_data
    clients = outside.clients("clientdbe", "clientDBE", Split(), kl_weight=2.0, momentum=0.3)
    base.load_train_data = read
    beginning = FedDBE(**{**_given(method), "network": Split(), "rounds": 1, "discard_first": False})
    outside.rounds(beginning, clients, None)
    common = sum(client.running_mean for client in clients) / CLIENTS
    for client in clients:
        client.global_mean = common.data.clone()
        client.set_parameters(Split())
    later = FedDBE(**{**_given(method), "network": Split(), "rounds": 3})
    mean = outside.rounds(
        later, clients, lambda c: c.model, plans=lambda n, c: [plan_batches(method, ROWS, n + 1, c, 1)]
    )
    model = method.fit(federation())
    shifts = [
        float(np.abs(model.personal(n).shift - c.client_mean.detach().numpy()).max())
        for n, c in zip(names, clients, strict=True)
    ]
    yield "feddbe", "PFLlib, its authors': discard_first", max(far(model.weights, mean), *shifts)

    method = FedProto(network=Split(), pull=0.7, weighting="uniform", **SHARED)
    clients = outside.clients("clientproto", "clientProto", Split(), lamda=0.7)
    server = importlib.import_module("flcore.servers.serverproto")

    def prototypes(them: list[Any]) -> None:
        for client in them:
            client.collect_protos()
        common = server.proto_aggregation([client.protos for client in them])
        for client in them:
            client.set_protos(common)

    outside.rounds(method, clients, None, after=prototypes)
    model = method.fit(federation())
    found = [far(model.personal(n).weights, c.model) for n, c in zip(names, clients, strict=True)]
    yield "fedproto", "PFLlib: prototypes after training (theirs are those met while training)", max(found)


def _statistics(model: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in model.named_buffers() if not n.endswith("num_batches_tracked")}


def compare_fedsol(folder: Path) -> Iterator[tuple[str, str, float]]:
    """FedSOL's authors' clients, as they are and without a perturbation where w = W; their FedNova server."""
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("wandb", types.ModuleType("wandb"))  # a logger, which nothing here calls
    for kind, adaptive in (("fedsol_fixed", False), ("fedsol_adaptive", True)):
        trainer = importlib.import_module(f"algorithms.{kind}.ClientTrainer").ClientTrainer
        sam = importlib.import_module("algorithms.optimizer").SAM
        own = {"rho": 0.4, "perturb_head": True, "perturb_body": True}
        method: Any = FedSOL(network=Split(), radius=0.4, adaptive=adaptive, **SHARED)
        found = method.fit(federation()).weights
        for still in (False, True):
            first = sam.first_step

            def unmoved(self: Any, *words: Any, first: Any = first, **named: Any) -> None:
                """No perturbation in the first step of a round, where the gradient is rounding noise."""
                if not getattr(self, "begun", False):
                    for group in self.param_groups:
                        group["rho"], group["kept"] = 0.0, group["rho"]
                first(self, *words, **named)
                for group in self.param_groups:
                    group["rho"] = group.pop("kept", group["rho"])
                self.begun = True

            if still:
                sam.first_step = unmoved
            theirs = _authors(trainer, types.SimpleNamespace(**own), method, (ROWS,) * CLIENTS)
            sam.first_step = first
            said = "no perturbation in a round's first step, where w = W" if still else "nothing"
            yield (
                "fedsol",
                f"FedSOL's authors ({'adaptive' if adaptive else 'fixed'}): {said}",
                far(found, theirs),
            )

    sizes = (4, 8, 12, 16)
    method = FedNova(network=Split(), momentum=0.6, **SHARED)
    module = importlib.import_module("algorithms.fednova.Server")
    server = object.__new__(module.Server)
    steps = [SHARED["epochs"] * size // SHARED["batch"] for size in sizes]
    server.local_a = {i: (t - 0.6 * (1 - 0.6**t) / 0.4) / 0.4 for i, t in enumerate(steps)}
    base = importlib.import_module("algorithms.BaseClientTrainer").BaseClientTrainer
    theirs = _authors(base, None, method, sizes, server._nova_aggregation)
    yield "fednova", "FedSOL's repository: nothing", far(method.fit(federation(sizes)).weights, theirs)


def _authors(trainer: Any, own: Any, method: Any, sizes: Sequence[int], merge: Any = None) -> dict[str, Any]:
    """Rounds of a client trainer of FedSOL's repository; models are averaged by rows unless `merge` does."""
    model = Split()
    client = trainer(
        algo_params=own, model=Split(), local_epochs=SHARED["epochs"], device="cpu", num_classes=CLASSES
    )
    client._get_local_stats = dict
    shares = dict(enumerate(sizes))
    for number in range(method.rounds):
        weights = model.state_dict()
        optimiser = torch.optim.SGD(model.parameters(), lr=SHARED["rate"], momentum=method.momentum)
        found = {}
        for index, (name, rows) in enumerate(_tensors(sizes).items()):
            client.reset()
            more = {"rho": own.rho} if "rho" in inspect.signature(client.download_global).parameters else {}
            client.download_global(weights, optimiser.state_dict(), **more)
            plan = plan_batches(method, len(rows[1]), number, name, 1)
            client.local_loaders = {"train": Epochs(rows, [plan])}
            client.train()
            found[index] = client.upload_local()
        if merge is None:
            total = sum(sizes)
            mean = {n: sum(shares[i] / total * w[n] for i, w in found.items()) for n in weights}
        else:
            mean = merge(weights, found, dict(shares))
        model.load_state_dict(mean)
    return dict(model.named_parameters())


def compare_flower() -> Iterator[tuple[str, str, float]]:
    """FedOpt beside Flower's strategies, on FedAvg's local steps."""
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server import strategy as strategies

    tau = 1e-3
    for key, name in (("adagrad", "FedAdagrad"), ("yogi", "FedYogi")):
        method = FedOpt(network=Split(), server_optimiser=key, server_rate=0.05, adaptivity=tau, **SHARED)
        if key == "adagrad":
            method = FedOpt(**{**_given(method), "beta_1": 0.0})
        model = Split()
        start = [value.detach().numpy().copy() for value in model.parameters()]
        own = {"eta": 0.05, "tau": tau, "initial_parameters": ndarrays_to_parameters(start)}
        own |= {} if key == "adagrad" else {"beta_1": 0.9, "beta_2": 0.99}
        strategy = getattr(strategies, name)(**own)
        strategy.v_t = [np.full_like(value, tau**2) for value in start]
        current = start
        for number in range(method.rounds):
            results = []
            for client, (features, labels) in _tensors().items():
                local = Split()
                with torch.no_grad():
                    for value, array in zip(local.parameters(), current, strict=True):
                        value.copy_(torch.as_tensor(array))
                optimiser = torch.optim.SGD(local.parameters(), lr=SHARED["rate"])
                for batch in plan_batches(method, ROWS, number, client, 1):
                    optimiser.zero_grad()
                    nn.functional.cross_entropy(local(features[batch]), labels[batch]).backward()
                    optimiser.step()
                sent = ndarrays_to_parameters([value.detach().numpy() for value in local.parameters()])
                results.append((None, FitRes(Status(Code.OK, ""), sent, ROWS, {})))
            current = parameters_to_ndarrays(strategy.aggregate_fit(number + 1, results, [])[0])
        names = [each for each, _ in model.named_parameters()]
        theirs = {each: torch.as_tensor(array) for each, array in zip(names, current, strict=True)}
        yield (
            "fedopt",
            f"Flower's {name}: squares begin at tau² (theirs at 0)",
            far(method.fit(federation()).weights, theirs),
        )


def _given(method: Any) -> dict[str, Any]:
    return {name: getattr(method, name) for name in method.parameters()}
