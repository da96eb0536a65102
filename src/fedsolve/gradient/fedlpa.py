"""FedLPA: one round; local models meet where their layer-wise Gaussian posteriors agree best.

Liu et al., "FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation", NeurIPS 2024.

    per layer   sum_k p_k B_k M A_k = sum_k p_k B_k M_k A_k

M_k is a client's weight with its bias as last column, A_k and B_k the Kronecker factors of its curvature at
the true labels (see `kfac`), each with `damping` on the diagonal. How a convolution's curvature is split
between the two decides what damping means: as in the authors' code, A_k = sum over rows and positions of
a aᵀ / (rows T²) and B_k = T sum of g gᵀ / rows, T output positions. Their script takes damping
sqrt(1 - 0.999) = 0.0316. The system is solved by conjugate gradients in float64, where their code takes the
better of two approximations on the test set. Weights of other layers (normalisation) are averaged. The
factors are gathered; the right side and the mean are sums.
"""

from __future__ import annotations

from fedsolve.gradient import kfac
from fedsolve.gradient.gradient_method import ClientGroup, GradientMethod, Term, Total, parameter, register
from fedsolve.gradient.oneshot import contribute_curvature, solve_layers
from fedsolve.gradient.server_state import ServerState, Weights


@register(
    paper="Liu et al., NeurIPS 2024",
    exchanges="1",
    up="rows * weights and rows; per layer two curvature factors of each client and their right side",
)
class FedLPA(GradientMethod):
    """FedLPA: one round, layer-wise Gaussian posteriors of the local models."""

    takes_weights = False
    one_shot = True
    gathers = True

    rounds: int = 1
    epochs: int = 10
    rate: float = 0.01
    momentum: float = 0.9
    damping: float = parameter(0.0316, "Added to the diagonal of both factors.", least=0)

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        contribute_curvature(group, client, term, kfac.true_labels, self.damping)

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        server.weights = solve_layers(server, mean, total)
