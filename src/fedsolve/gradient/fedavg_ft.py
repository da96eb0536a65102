"""FedAvg-FT and FedProx-FT: train together, then every client fine-tunes a copy by itself.

The runs are those of FedAvg and FedProx. Afterwards a client goes `fine_epochs` times through its rows from
the final global model, with the run's own local objective and optimiser (FedProx pulls towards that model),
and sends nothing. Clients keep nothing during the run, so one that never took part fine-tunes like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedsolve.federation.participant import ClientData
from fedsolve.gradient.fedprox import FedProx
from fedsolve.gradient.gradient_method import State, parameter, register
from fedsolve.gradient.network_model import GradientModel, PersonalGradientModel
from fedsolve.gradient.personalised import PersonalMethod, kept, train_alone


@dataclass(frozen=True, kw_only=True)
class FineTuning(PersonalMethod):
    """Fine-tuning after any run."""

    travels: ClassVar[Mapping[str, str]] = {
        **PersonalMethod.travels,
        "up": "rows * weights and rows; of the fine-tuning, nothing",
    }

    fine_epochs: int = parameter(
        1, "Passes over a client's rows after the run; 0 leaves the global model as it is.", least=0
    )
    fine_rate: float | None = parameter(
        None, "Learning rate of these passes.", least=0, none="that of the round after the last"
    )

    def personal(self, model: GradientModel, data: ClientData, state: State | None) -> GradientModel:
        if self.fine_epochs == 0:
            return PersonalGradientModel.of(model, {}, kept(state))
        return train_alone(self.with_passes(self.fine_epochs), model, data, state, rate=self.fine_rate)


@register(key="fedavg-ft", paper="McMahan et al., AISTATS 2017, with local fine-tuning")
class FedAvgFT(FineTuning):
    """FedAvg-FT: FedAvg, then every client fine-tunes a copy of the model."""


@register(key="fedprox-ft", paper="Li et al., MLSys 2020, with local fine-tuning")
class FedProxFT(FineTuning, FedProx):
    """FedProx-FT: FedProx, then every client fine-tunes a copy of the model."""

    proximal: float = parameter(
        0.001, "Strength of the pull towards the weights received, and after the run to the final ones."
    )
