"""FedAvg: local SGD, then the mean of the local models.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    w_i <- w_i - rate * grad CE,   W <- sum_i p_i w_i,   p_i = n_i / sum_j n_j
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsolve.gradient.gradient_method import GradientMethod
from fedsolve.registry import Info, register


@register(
    Info(
        key="fedavg",
        title="FedAvg: local gradient descent and the mean of the local models",
        paper="McMahan et al., AISTATS 2017",
        exchanges="rounds",
        up="rows * weights and rows",
        down="weights",
    )
)
@dataclass(frozen=True, kw_only=True)
class FedAvg(GradientMethod):
    """Parameters of FedAvg: those of every gradient method."""

    key: ClassVar[str] = "fedavg"
    steady: ClassVar[bool] = True
