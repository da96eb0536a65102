"""Centralised AFL and DeepAFL in plain numpy, written from the papers: the tests' second opinion.

Nothing here comes from the package. Projections follow the documented scheme 1, blocks are Eq. 8
with full eigendecompositions of both matrices, and every classifier and block can be given the rows
it is computed over, so that this is also the textbook for cohorts that change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


def relative_difference(found: Array, expected: Array) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def one_hot(labels: Array) -> Array:
    """Rows of the identity, classes in sorted order."""
    classes = np.unique(labels)
    return (labels[:, None] == classes[None, :]).astype(np.float64)


def random_map(
    seed: int, role: str, layer: int, inputs: int, outputs: int, gain: float = 1.0
) -> tuple[Array, Array]:
    """Weight (inputs, outputs) and bias (outputs,) of projection scheme 1."""
    name = f"fedsolve projection 1|{seed}|{role}|{layer}|{inputs}|{outputs}"
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    integers = np.random.Philox(key=key).random_raw((inputs + 1) * outputs)
    uniforms = (integers // np.uint64(2**11)).astype(np.float64) / 2.0**53
    table = ((2.0 * uniforms - 1.0) * (gain / np.sqrt(inputs))).reshape(inputs + 1, outputs)
    return table[:-1], table[-1]


def gelu(x: Array) -> Array:
    """The tanh form."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "tanh": np.tanh,
    "relu": lambda x: np.where(x > 0, x, 0.0),
}


def ridge(features: Array, targets: Array, penalty: float) -> Array:
    """(XᵀX + penalty I)^-1 XᵀY, by the pseudo-inverse where XᵀX alone is asked for."""
    if penalty == 0:
        return np.linalg.pinv(features, rcond=1e-10) @ targets
    system = features.T @ features + penalty * np.eye(features.shape[1])
    return np.linalg.solve(system, features.T @ targets)


def sandwich(hidden: Array, residual: Array, weight: Array, penalty: float) -> Array:
    """Omega of Eq. 8: V [(Vᵀ Fᵀ R Wᵀ U) / (penalty + lamF ⊗ lamW)] Uᵀ."""
    hidden_values, v = np.linalg.eigh(hidden.T @ hidden)
    weight_values, u = np.linalg.eigh(weight @ weight.T)
    # Both matrices are positive semidefinite; rounding can leave eigenvalues just below zero.
    curvature = np.outer(np.clip(hidden_values, 0, None), np.clip(weight_values, 0, None))
    return v @ ((v.T @ (hidden.T @ residual) @ weight.T @ u) / (penalty + curvature)) @ u.T


@dataclass
class DeepOracle:
    """DeepAFL on pooled data; `fit` fills classifiers W_t, omegas Omega_t and risks."""

    layers: int
    width: int
    hidden_width: int | None = None
    ridge: float = 1.0
    residual_ridge: float = 0.01
    activation: str = "gelu"
    zero_activation: str = "tanh"
    gain: float = 1.0
    block_input: str = "previous"
    seed: int = 0
    classifiers: list[Array] = field(default_factory=list)
    omegas: list[Array] = field(default_factory=list)
    risks: list[float] = field(default_factory=list)

    def zero(self, inputs: Array) -> Array:
        """Phi_0"""
        weight, bias = random_map(self.seed, "zero", 0, inputs.shape[1], self.width)
        return ACTIVATIONS[self.zero_activation](inputs @ weight + bias)

    def hidden(self, layer: int, phi: Array, initial: Array) -> Array:
        """F_layer"""
        source = phi if self.block_input == "previous" else initial
        outputs = self.hidden_width or self.width
        weight, bias = random_map(self.seed, "hidden", layer, self.width, outputs, self.gain)
        return ACTIVATIONS[self.activation](source @ weight + bias)

    def fit(
        self,
        inputs: Array,
        targets: Array,
        classifier_rows: Sequence[Array] | None = None,
        block_rows: Sequence[Array] | None = None,
    ) -> DeepOracle:
        """Algorithm 1 on the pooled rows.

        classifier_rows[t], block_rows[t]: masks of the rows over which W_t and Omega_{t+1} are
        computed; all rows when None. Features are advanced for every row.
        """
        everyone = np.ones(len(inputs), dtype=bool)
        initial = phi = self.zero(inputs)
        for layer in range(self.layers + 1):
            rows = everyone if classifier_rows is None else classifier_rows[layer]
            weight = ridge(phi[rows], targets[rows], self.ridge)
            self.classifiers.append(weight)
            self.risks.append(self.risk(phi[rows], targets[rows], weight, self.omegas))
            if layer == self.layers:
                break
            rows = everyone if block_rows is None else block_rows[layer]
            hidden = self.hidden(layer, phi, initial)
            residual = targets[rows] - phi[rows] @ weight
            omega = sandwich(hidden[rows], residual, weight, self.residual_ridge)
            self.omegas.append(omega)
            phi = phi + hidden @ omega
        return self

    def risk(self, phi: Array, targets: Array, weight: Array, omegas: Sequence[Array]) -> float:
        """|Y - Phi W|² + ridge |W|² + residual_ridge sum |Omega|²"""
        fit = np.sum((targets - phi @ weight) ** 2) + self.ridge * np.sum(weight**2)
        return float(fit + self.residual_ridge * sum(np.sum(omega**2) for omega in omegas))

    def stages(self, inputs: Array, omegas: Sequence[Array]) -> list[Array]:
        """Phi_0, Phi_1, ... of a network with these blocks."""
        phis = [self.zero(inputs)]
        for layer, omega in enumerate(omegas):
            phis.append(phis[-1] + self.hidden(layer, phis[-1], phis[0]) @ omega)
        return phis

    def decision_function(self, inputs: Array) -> Array:
        """Scores after the last block."""
        return self.stages(inputs, self.omegas)[-1] @ self.classifiers[-1]

    def largest_difference(self, classifiers: Sequence[Array], omegas: Sequence[Array]) -> float:
        """The worst relative difference of any W_t or Omega_t."""
        assert len(classifiers) == len(self.classifiers)
        assert len(omegas) == len(self.omegas)
        pairs = [*zip(classifiers, self.classifiers, strict=True), *zip(omegas, self.omegas, strict=True)]
        return max(relative_difference(found, expected) for found, expected in pairs)
