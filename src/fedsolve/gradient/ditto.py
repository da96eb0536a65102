"""Ditto: beside the global model, each client trains one of its own that is pulled towards it.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

    w_i: FedAvg.     v_i <- v_i - personal_rate * (grad CE(v_i) + personal_pull (v_i - W))

W is what was received in this round. Only w_i is sent, so the global model is FedAvg's whatever the pull. v_i
stays with its client from round to round and starts from the run's first weights, also where the client
takes part late: without a pull it is local training and knows nothing of the others. Both see the same
batches. A client that never took part trains v from the final global model, pulled towards it.
"""

from __future__ import annotations

from fedsolve.federation.participant import ClientData
from fedsolve.gradient.fedprox import FedProx
from fedsolve.gradient.gradient_method import ClientGroup, State, parameter, register
from fedsolve.gradient.network_model import GradientModel, PersonalGradientModel
from fedsolve.gradient.personalised import PersonalMethod, as_method, kept, train_alone

OWN = "personal"
STATISTICS = "personal_buffer"


@register(
    paper="Li, Hu, Beirami, Smith, ICML 2021",
    up="rows * weights and rows; of the client's own model, nothing",
)
class Ditto(PersonalMethod):
    """Ditto: FedAvg, and a model of each client's own pulled towards the global one.

    The pull is lambda of the paper.
    """

    keeps_state = True

    personal_pull: float = parameter(
        1.0, "Strength of the pull of a client's own model towards the global one (lambda).", least=0
    )
    personal_rate: float | None = parameter(
        None, "Learning rate of a client's own model.", least=0, none="as --rate, with its decay"
    )
    personal_epochs: int | None = parameter(
        None, "Local passes a round of a client's own model.", least=1, none="as --epochs"
    )

    @property
    def part(self) -> FedProx:
        """The training of a client's own model: FedProx pulls towards what was received, too."""
        rate = self.rate if self.personal_rate is None else self.personal_rate
        epochs = self.epochs if self.personal_epochs is None else self.personal_epochs
        steps = self.local_steps if self.personal_epochs is None else None
        changes = {"rate": rate, "epochs": epochs, "local_steps": steps}
        return as_method(FedProx, self, proximal=self.personal_pull, **changes)

    def prepare(self, group: ClientGroup) -> None:
        method = self.part
        known = all(group.own_state(client) for client in range(len(group.clients)))
        weights = group.state(OWN, group.start if known else group.first_model()[0])
        rate = method.rate_of(group.round)
        own = group.again(method, weights, group.own_buffers(STATISTICS), rate=rate)
        own.train()
        group.scratch["own"] = own

    def state(self, group: ClientGroup, client: int) -> State | None:
        own: ClientGroup = group.scratch["own"]
        return own.snapshot(client, OWN, STATISTICS)

    def personal(self, model: GradientModel, data: ClientData, state: State | None) -> GradientModel:
        if state is not None:
            return PersonalGradientModel.of(model, kept(state, OWN), kept(state, STATISTICS))
        return train_alone(self.part, model, data)
