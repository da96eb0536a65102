"""FedAvg: local SGD, then the mean of the local models.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    w_i <- w_i - rate * grad CE,   W <- sum_i p_i w_i,   p_i = n_i / sum_j n_j
"""

from __future__ import annotations

from fedsolve.gradient.gradient_method import GradientMethod, register


@register(paper="McMahan et al., AISTATS 2017")
class FedAvg(GradientMethod):
    """FedAvg: local gradient descent and the mean of the local models."""

    tensors_only = True
