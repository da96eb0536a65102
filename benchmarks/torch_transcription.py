"""DeepAFL as its authors formulate it, in torch on one device: what `benchmarks.gpu` compares with.

As `transcription`, which is its counterpart in numpy: full matrices from every client, an inverse, two full
eigendecompositions, the whole Omega. With their data path a client's rows stay in host memory and pass
through a `DataLoader` in batches of 512 whenever statistics are taken or features are brought to a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedsolve.closedform.projections import projection

BATCH = 512


class Authors:
    """A whole run; projections, activations and precision are those of `fedsolve`."""

    def __init__(
        self,
        features: Any,
        labels: Any,
        owners: Any,
        clients: int,
        layers: int,
        width: int,
        seed: int,
        device: torch.device,
        resident: bool,
        ridge: float = 1.0,
        residual_ridge: float = 0.01,
    ) -> None:
        self.layers, self.width, self.device, self.resident = layers, width, device, resident
        self.ridge, self.residual_ridge = ridge, residual_ridge
        shapes = [("zero", 0, features.shape[1]), *(("hidden", t, width) for t in range(layers))]
        drawn = [projection(seed, role, layer, inputs, width) for role, layer, inputs in shapes]
        self.maps = [
            (torch.tensor(each.weight, device=device), torch.tensor(each.bias, device=device))
            for each in drawn
        ]
        self.classes = int(labels.max()) + 1
        there = device if resident else torch.device("cpu")
        self.clients = []
        for client in range(clients):
            rows = np.flatnonzero(owners == client)
            phi = torch.from_numpy(features[rows]).double().to(there)
            self.clients.append((phi, torch.from_numpy(labels[rows]).to(there)))

    def warm_up(self) -> None:
        """Load libraries and kernels."""
        a = torch.eye(self.width, dtype=torch.float64, device=self.device)
        torch.linalg.eigh(a)
        torch.linalg.inv(a) @ a
        for _ in self._batches(*self.clients[0]):
            break

    def fit(self) -> list[Any]:
        """The classifiers W_0 .. W_T, as arrays of the host."""
        weights = []
        omega: Any = None
        for layer in range(self.layers + 1):
            gram, cross = self._classifier_sums(layer, omega)
            system = gram + self.ridge * torch.eye(self.width, dtype=gram.dtype, device=self.device)
            weight = torch.linalg.inv(system) @ cross
            weights.append(weight.cpu().numpy())
            if layer < self.layers:
                omega = self._sandwich(*self._block_sums(layer, weight), weight)
        return weights

    def _classifier_sums(self, layer: int, omega: Any) -> tuple[Any, Any]:
        gram = torch.zeros((self.width, self.width), dtype=torch.float64, device=self.device)
        cross = torch.zeros((self.width, self.classes), dtype=torch.float64, device=self.device)
        for number, (held, codes) in enumerate(self.clients):
            if not len(codes):
                continue
            own_gram, own_cross = torch.zeros_like(gram), torch.zeros_like(cross)
            moved = []
            for rows, targets in self._batches(held, codes):
                if layer == 0:
                    phi = torch.tanh(rows @ self.maps[0][0] + self.maps[0][1])
                else:
                    phi = rows + self._hidden(layer - 1, rows) @ omega
                own_gram += phi.T @ phi
                own_cross += phi.T @ targets
                moved.append(phi.to(held.device))
            self.clients[number] = (torch.cat(moved), codes)
            gram += own_gram
            cross += own_cross
        return gram, cross

    def _block_sums(self, layer: int, weight: Any) -> tuple[Any, Any]:
        hidden_gram = torch.zeros((self.width, self.width), dtype=torch.float64, device=self.device)
        corrected = torch.zeros_like(hidden_gram)
        for held, codes in self.clients:
            own_gram, own_corrected = torch.zeros_like(hidden_gram), torch.zeros_like(hidden_gram)
            for phi, targets in self._batches(held, codes):
                hidden = self._hidden(layer, phi)
                own_gram += hidden.T @ hidden
                own_corrected += weight @ (targets - phi @ weight).T @ hidden
            hidden_gram += own_gram
            corrected += own_corrected
        return hidden_gram, corrected

    def _sandwich(self, hidden_gram: Any, corrected: Any, weight: Any) -> Any:
        hidden_values, hidden_vectors = torch.linalg.eigh(hidden_gram)
        weight_values, weight_vectors = torch.linalg.eigh(weight @ weight.T)
        inner = hidden_vectors.T @ corrected.T @ weight_vectors
        inner = inner / (self.residual_ridge + torch.outer(hidden_values, weight_values))
        return hidden_vectors @ inner @ weight_vectors.T

    def _hidden(self, layer: int, phi: Any) -> Any:
        weight, bias = self.maps[layer + 1]
        return torch.nn.functional.gelu(phi @ weight + bias, approximate="tanh")

    def _batches(self, held: Any, codes: Any) -> Iterator[tuple[Any, Any]]:
        """A client's rows and one-hot labels on the device: all at once, or batch by batch from the host."""
        if not len(codes):
            return
        if self.resident:
            yield held, torch.nn.functional.one_hot(codes, self.classes).double()
            return
        for rows, labels in DataLoader(TensorDataset(held, codes), batch_size=BATCH):
            here = labels.to(self.device)
            yield rows.to(self.device), torch.nn.functional.one_hot(here, self.classes).double()
