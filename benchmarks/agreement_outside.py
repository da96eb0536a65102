"""Methods beside other people's code, which is no part of this repository: float64, the same batches.

`python -m benchmarks.agreement --outside DIR`, where DIR holds checkouts of `SOURCES` (TsingZ0/PFLlib,
KarhouTam/FL-bench, Lee-Gihun/FedSOL, MediaBrain-SJTU/FedDisco, ChanglongShi/FedAWA, Divyansh03/FedFisher);
flwr is compared where it is installed, and FedFisher's code needs the package nngeometry. Every line says
whose code it is and what had to be matched.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from fedsolve.federation.local import LocalFederation
from fedsolve.gradient import (
    FedAvg,
    FedAWA,
    FedBABU,
    FedBN,
    FedDBE,
    FedDisco,
    FedFisher,
    FedFisherKFAC,
    FedLC,
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
UNEVEN = (4, 8, 12, 16)
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
        self.base = nn.Sequential(nn.Linear(WIDTH, HIDDEN, dtype=torch.float32))
        if normalised:
            self.base.add_module("bn", nn.BatchNorm1d(HIDDEN))
        self.base.add_module("act", nn.ReLU())
        self.head = nn.Linear(HIDDEN, CLASSES, dtype=torch.float32)
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


@contextlib.contextmanager
def borrowed(folder: Path, *stubs: str) -> Iterator[Callable[[str], Any]]:
    """Import modules of a checkout in float64 and in silence; stubs stand for what is not needed of them."""
    own = {path.stem for path in folder.iterdir()} | {stub.partition(".")[0] for stub in stubs}

    def taken_out() -> dict[str, Any]:
        return {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] in own}

    kept, path = taken_out(), list(sys.path)
    sys.path.insert(0, str(folder))
    sys.modules.update({stub: mock.MagicMock() for stub in stubs})
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield importlib.import_module
    finally:
        torch.set_default_dtype(torch.float32)
        sys.path[:] = path
        taken_out()
        sys.modules.update(kept)


def trained(
    method: Any, weights: Mapping[str, Any], number: int, sizes: Sequence[int], loss: Any = None
) -> dict[str, nn.Module]:
    """Every client's network after its local steps from these weights; `loss(client, logits, labels)`."""
    found: dict[str, nn.Module] = {}
    for client, (features, labels) in _tensors(sizes).items():
        found[client] = local = Split()
        local.load_state_dict(weights)
        optimiser = torch.optim.SGD(local.parameters(), lr=method.rate, momentum=method.momentum)
        for batch in plan_batches(method, len(labels), number, client, 1):
            optimiser.zero_grad()
            logits, true = local(features[batch]), labels[batch]
            (loss(client, logits, true) if loss else nn.functional.cross_entropy(logits, true)).backward()
            optimiser.step()
    return found


def mixed(models: Mapping[str, nn.Module], shares: Sequence[float]) -> dict[str, Any]:
    """The mean of networks by shares."""
    states = [model.state_dict() for model in models.values()]
    return {
        name: sum(share * state[name] for share, state in zip(shares, states, strict=True))
        for name in states[0]
    }


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
            torch.as_tensor(rows.own_labels),
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

    yield from _compare_fedlc(outside)


def _compare_fedlc(outside: PFLlib) -> Iterator[tuple[str, str, float]]:
    method: Any = FedLC(network=Split(), calibration=2.0, **SHARED)
    found, rows = method.fit(federation()).weights, list(_tensors().values())
    base = importlib.import_module("flcore.clients.clientbase").Client
    server = importlib.import_module("flcore.servers.serverlc").FedLC
    torch.set_default_dtype(torch.float64)
    for alone, matched in ((False, "nothing"), (True, "its server counts the classes of each client alone")):
        with mock.patch.object(base, "load_train_data", lambda self, *_: [rows[self.id]]):
            clients = outside.clients("clientlc", "clientLC", Split())
        base_server = server.__mro__[1]
        for some in [[client] for client in clients] if alone else [clients]:
            named = {"clients": some, "join_ratio": 1, "num_clients": len(some)}
            with (
                mock.patch.object(base_server, "__init__", lambda self, *_, n=named: vars(self).update(n)),
                mock.patch.multiple(base_server, set_clients=mock.DEFAULT, set_slow_clients=mock.DEFAULT),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                server(outside.args(Split(), tau=2.0), 0)
        mean = outside.rounds(method, clients, lambda c: c.model)
        yield "fedlc", f"PFLlib: {matched}", far(found, mean)
    torch.set_default_dtype(torch.float32)


def compare_flbench(folder: Path) -> Iterator[tuple[str, str, float]]:
    """The loss of FL-bench's FedLC, which counts a class that a client lacks as 1e-8 rows."""
    method = FedLC(network=Split(), calibration=2.0, **SHARED)
    rows = {client: labels for client, (_, labels) in _tensors(UNEVEN).items()}
    bounds = np.cumsum((0, *UNEVEN))
    with borrowed(folder, "src.client.fedavg") as read:
        sys.modules["src.client.fedavg"].FedAvgClient = types.SimpleNamespace  # type: ignore[attr-defined]
        theirs = read("src.client.fedlc").FedLCClient(
            dataset=types.SimpleNamespace(targets=torch.cat(list(rows.values())), classes=range(CLASSES)),
            data_indices=[{"train": range(*pair)} for pair in itertools.pairwise(bounds)],
            device="cpu",
            args=types.SimpleNamespace(fedlc=types.SimpleNamespace(tau=2.0)),
        )

        def loss(client: str, logits: Any, labels: Any) -> Any:
            theirs.client_id = list(rows).index(client)
            return theirs.criterion(logits, labels)

        mean: Mapping[str, Any] = Split().state_dict()
        for number in range(method.rounds):
            mean = mixed(trained(method, mean, number, UNEVEN, loss), np.array(UNEVEN) / sum(UNEVEN))
    yield "fedlc", "FL-bench: nothing", far(method.fit(federation(UNEVEN)).weights, dict(mean))


def compare_feddisco(folder: Path) -> Iterator[tuple[str, str, float]]:
    """The authors' shares, on FedAvg's local steps."""
    method = FedDisco(network=Split(), discrepancy=0.5, offset=0.1, **SHARED)
    with borrowed(folder) as read:
        disco = read("disco")
        counts = np.stack([np.bincount(y, minlength=CLASSES) for _, y in _tensors(UNEVEN).values()])
        even = np.full(CLASSES, 1 / CLASSES)
        away = disco.get_distribution_difference(counts, range(len(UNEVEN)), "kl", even)
        shares = disco.disco_weight_adjusting(np.array(UNEVEN) / sum(UNEVEN), away, 0.5, 0.1)
    mean: Mapping[str, Any] = Split().state_dict()
    for number in range(method.rounds):
        mean = mixed(trained(method, mean, number, UNEVEN), shares)
    yield "feddisco", "authors: nothing", far(method.fit(federation(UNEVEN)).weights, dict(mean))


def compare_fedawa(folder: Path) -> Iterator[tuple[str, str, float]]:
    """The authors' server step: as it is, and with the shares after its last step."""
    steps, names, args = 3, [name for name, _ in Split().named_parameters()], types.SimpleNamespace
    method = FedAWA(network=Split(), server_start="raw", server_steps=steps, **SHARED)
    found = method.fit(federation(UNEVEN)).weights
    for behind in (True, False):
        with borrowed(folder, "utils") as read:
            server = read("server_funct")
            mean: Mapping[str, Any] = Split().state_dict()
            logits = torch.tensor(np.array(UNEVEN) / sum(UNEVEN))
            for number in range(method.rounds):
                models = trained(method, mean, number, UNEVEN)
                flat = [{"flat_w": _flat(model.state_dict(), names)} for model in models.values()]
                central = types.SimpleNamespace(model=mock.MagicMock())
                central.model.get_param.return_value = {"flat_w": _flat(mean, names)}

                # Their mean has the shares from before the last step: those after `steps` need one more.
                own = {"server_optimizer": "adam", "reg_distance": "cos", "gamma": 1.0}
                merged, after = (
                    server.fedawa(args(server_epochs=count, **own), flat, None, central, 0, logits.clone())
                    for count in (steps + (not behind), steps)
                )
                parts = torch.split(merged[0]["flat_w"].detach(), [mean[name].numel() for name in names])
                logits = after[1]
                mean = {n: part.reshape(mean[n].shape) for n, part in zip(names, parts, strict=True)}
        said = "server_start='raw'" + ("" if behind else ", and shares after the last step")
        yield "fedawa", f"authors: {said}", far(found, dict(mean))


def _flat(weights: Mapping[str, Any], names: Sequence[str]) -> Any:
    return torch.cat([weights[name].detach().reshape(-1) for name in names])


def compare_fedfisher(folder: Path) -> Iterator[tuple[str, str, float]]:
    """The authors' local training and Fisher information: their merge, iteration and system."""
    stubs = "torchvision torchvision.utils kornia ot lapsolver tqdm data models algs.dense algs.pfnm"
    with borrowed(folder, *stubs.split()) as read:
        training, merging = read("train_model"), read("run_one_shot_algs")
        merging.quantize_layer = lambda values, *_: values
        method = FedFisher(network=Split(), **SHARED | {"rounds": 1, "momentum": 0.9})
        args = {"bs": 1, "eta": method.rate, "local_epochs": method.epochs, "augmentation": False}
        args["device"] = "cpu"
        shares = np.array(UNEVEN) / sum(UNEVEN)
        local, _, _, diagonals = zip(*_fisher_of_clients(training, method, args, UNEVEN), strict=True)
        weighted = [diagonal * share for share, diagonal in zip(shares, diagonals, strict=True)]
        given = (len(local[0]), len(local), shares, args, Split(), local, weighted)
        closed = merging.get_fisher_merge_model(*given)
        # It keeps the step with the best validation score; here the last one.
        merging.one_shot_fisher_diag.__globals__["test_img"] = mock.Mock(
            side_effect=((number, 0.0) for number in range(1, 10**6))
        )
        iterated = merging.get_fisher_diag_model(*given, None)
        diagonal_form = method.fit(federation(UNEVEN)).weights

        # Their objective has 1 / p_i where the paper has p_i, so all have as many rows. Its optimum is not
        # unique (softmax ignores a common shift), so the optimum found here is put into their equation.
        vector, product = training.PVector.from_model, merging.one_shot_fisher_kfac.__globals__
        even = (ROWS,) * CLIENTS
        method = FedFisherKFAC(network=Split(), floor=0.0, **SHARED | {"rounds": 1, "momentum": 0.9})
        _, models, factors, _ = zip(*_fisher_of_clients(training, method, args, even), strict=True)
        solved = Split()
        found = method.fit(federation(even)).weights
        solved.load_state_dict({name: torch.as_tensor(value) for name, value in found.items()})
        shares = np.full(CLIENTS, 1 / CLIENTS)
        left = product["get_dot_product"](factors, vector(solved), shares).get_flat_representation()
        pairs = zip(factors, models, strict=True)
        right = sum(F.mv(vector(model)).get_flat_representation() * CLIENTS for F, model in pairs)
        difference = float(((left - right).abs().max() / right.abs().max()).detach())
    yield "fedfisher", "authors' Fisher diagonal and merge: no quantisation", far(diagonal_form, closed)
    yield (
        "fedfisher",
        "authors' 1,901 steps of an iteration to the same optimum",
        far(diagonal_form, iterated),
    )
    yield "fedfisher-kfac", "authors' Kronecker factors: relative residual of their equation", difference


def _fisher_of_clients(
    training: Any, method: Any, args: Any, sizes: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    """Each client's weights, network, Kronecker factors and diagonal, by the authors' training."""
    fisher = training.FIM
    for client, data in _tensors(sizes).items():
        whole = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), len(data[1]))
        training.FIM = lambda w=whole, **named: fisher(**named | {"device": "cpu", "loader": w})
        update = training.LocalUpdate(args, whole.dataset)
        update.ldr_train = Epochs(data, [plan_batches(method, len(data[1]), 0, client, 1)])
        weights, model, factors, diagonal = update.train_and_compute_fisher(Split(), CLASSES)
        yield weights.detach(), model, factors, diagonal
    training.FIM = fisher


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

    sizes = UNEVEN
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


def compare_flower(folder: Path | None = None) -> Iterator[tuple[str, str, float]]:
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


SOURCES: dict[str, Callable[[Path], Iterator[tuple[str, str, float]]]] = {
    "PFLlib": compare,
    "FL-bench": compare_flbench,
    "FedSOL": compare_fedsol,
    "FedDisco": compare_feddisco,
    "FedAWA": compare_fedawa,
    "FedFisher": compare_fedfisher,
    "flwr": compare_flower,
}
"""By the folder of a checkout; flwr is compared as installed."""
