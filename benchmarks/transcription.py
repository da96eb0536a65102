"""DeepAFL as its authors formulate it, in plain numpy: the yardstick of the plans.

Every client uploads full matrices: G = PhiᵀPhi and H = PhiᵀY, then Pi = FᵀF and W RᵀF (d x d_F).
The server inverts G + lambda I, eigendecomposes both Pi and W Wᵀ in full, divides elementwise and
sends back W and the whole Omega. A client recomputes F when it updates its features. Projections,
activations and precision are those of `fedsolve`, so that the weights can be compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsolve.backends.activations import activate
from fedsolve.closedform.projections import projection
from fedsolve.threads import blas_threads

Array = NDArray[Any]
Statistics = tuple[Array, ...]


@dataclass(frozen=True)
class Setting:
    """What both sides of the comparison share."""

    layers: int
    width: int
    ridge: float = 1.0
    residual_ridge: float = 0.01
    seed: int = 0


@dataclass
class Fitted:
    """Classifiers W_0 .. W_T, blocks Omega_1 .. Omega_T, and payload bytes summed over clients."""

    classifiers: list[Array] = field(default_factory=list)
    omegas: list[Array] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0

    def predict(self, setting: Setting, features: Array) -> Array:
        """Class positions of new rows."""
        phi = _first(setting, features)
        for layer, omega in enumerate(self.omegas):
            phi = phi + _hidden(setting, layer, phi) @ omega
        return np.asarray(np.argmax(phi @ self.classifiers[-1], axis=1))


class Client:
    """One client: its one-hot labels and its features at the current layer."""

    def __init__(self, setting: Setting, features: Array, rows: Array, labels: Array) -> None:
        self.setting = setting
        self.labels = labels
        self.phi = np.empty(0)
        self._features, self._rows = features, rows

    def classifier_statistics(self, layer: int, omega: Array | None) -> Statistics:
        """G and H, after the features have been brought to this layer."""
        if omega is None:
            self.phi = _first(self.setting, self._features[self._rows])
        else:
            self.phi = self.phi + _hidden(self.setting, layer - 1, self.phi) @ omega
        return self.phi.T @ self.phi, self.phi.T @ self.labels

    def block_statistics(self, layer: int, weight: Array, left_to_right: bool) -> Statistics:
        """Pi and W RᵀF; the product of three is formed from left to right, or the cheap way round."""
        hidden = _hidden(self.setting, layer, self.phi)
        residual = self.labels - self.phi @ weight
        if left_to_right:
            return hidden.T @ hidden, weight @ residual.T @ hidden
        return hidden.T @ hidden, weight @ (residual.T @ hidden)


def fit(
    setting: Setting,
    features: Array,
    codes: Array,
    owners: Array,
    clients: int,
    *,
    workers: int | None,
    left_to_right: bool = True,
) -> Fitted:
    """Train over the clients; codes are class positions.

    workers: threads over clients with one BLAS thread each, one for the server's solutions too, as
    `fedsolve` has it; None takes the clients one after another with the BLAS library's own threads.
    """
    with blas_threads(None if workers is None else 1):
        return _fit(setting, features, codes, owners, clients, workers, left_to_right)


def _fit(
    setting: Setting,
    features: Array,
    codes: Array,
    owners: Array,
    clients: int,
    workers: int | None,
    left_to_right: bool,
) -> Fitted:
    targets = np.eye(int(codes.max()) + 1)[codes]
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(1, clients))
    everybody = [Client(setting, features, rows, targets[rows]) for rows in np.split(order, bounds)]
    fitted = Fitted()

    def ask(answer: Callable[[Client], Statistics]) -> Statistics:
        total, sent = _total(everybody, answer, workers)
        fitted.bytes_up += sent
        return total

    omega: Array | None = None
    for layer in range(setting.layers + 1):
        gram, cross = ask(partial(Client.classifier_statistics, layer=layer, omega=omega))
        weight = np.linalg.inv(gram + setting.ridge * np.eye(len(gram))) @ cross
        fitted.classifiers.append(weight)
        if layer == setting.layers:
            break
        fitted.bytes_down += weight.nbytes * clients
        hidden_gram, corrected = ask(
            partial(Client.block_statistics, layer=layer, weight=weight, left_to_right=left_to_right)
        )
        omega = sandwich(hidden_gram, corrected, weight, setting.residual_ridge)
        fitted.omegas.append(omega)
        fitted.bytes_down += omega.nbytes * clients
    return fitted


def sandwich(hidden_gram: Array, corrected: Array, weight: Array, ridge: float) -> Array:
    """Omega (d_F, d) from Pi and W RᵀF: V [(Vᵀ (W RᵀF)ᵀ U) / (ridge + l_F ⊗ l_W)] Uᵀ."""
    hidden_values, hidden_vectors = np.linalg.eigh(hidden_gram)
    weight_values, weight_vectors = np.linalg.eigh(weight @ weight.T)
    inner = hidden_vectors.T @ corrected.T @ weight_vectors
    inner = inner / (ridge + np.outer(hidden_values, weight_values))
    return np.asarray(hidden_vectors @ inner @ weight_vectors.T)


def _total(
    clients: list[Client], answer: Callable[[Client], Statistics], workers: int | None
) -> tuple[Statistics, int]:
    """The sum of all clients' statistics and the bytes they would send."""
    lock = threading.Lock()
    total: list[Array] = []
    sent = 0

    def work(client: Client) -> None:
        nonlocal sent
        statistics = answer(client)
        with lock:
            sent += sum(array.nbytes for array in statistics)
            if not total:
                total.extend(statistics)
                return
            for mine, array in zip(total, statistics, strict=True):
                mine += array

    if workers is None:
        for client in clients:
            work(client)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, clients))
    return tuple(total), sent


def _first(setting: Setting, features: Array) -> Array:
    """Phi_0 = tanh(X A + a)"""
    zero = projection(setting.seed, "zero", 0, features.shape[1], setting.width)
    return activate("tanh", features @ zero.weight + zero.bias)


def _hidden(setting: Setting, layer: int, phi: Array) -> Array:
    """F = gelu(Phi B + b)"""
    block = projection(setting.seed, "hidden", layer, setting.width, setting.width)
    return activate("gelu", phi @ block.weight + block.bias)
