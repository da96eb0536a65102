"""The rounds of a gradient method on the server: ask a cohort, take the sums, go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import check_rows, stream
from fedsolve.backends.devices import find_device
from fedsolve.backends.torch_later import torch
from fedsolve.container import with_prefix
from fedsolve.errors import DataError, TermError
from fedsolve.federation.method import Request, Run, Spec, Total
from fedsolve.federation.states import ticket
from fedsolve.gradient import alignment, networks
from fedsolve.gradient.alignment import CHOICES, weight_of
from fedsolve.gradient.answers import DRIFT, KIND
from fedsolve.gradient.augmentation import ImageInputs
from fedsolve.gradient.feedback import HELD, Feedback, changing_layers, trained_layers
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.server_state import ServerState, Weights, doubles

if TYPE_CHECKING:
    from fedsolve.gradient.gradient_method import GradientMethod

_KEPT = ("weights", "buffers", "round", "clients", "cohort", "memory", "note", "aggregated")
_OWN = ("_phase", "_since", "_means")
"""What is stored of the server's state, and of the run itself."""


class GradientRun(Run[GradientModel]):
    """Rounds of a gradient method: an optional prelude, training, and an optional measure of drift."""

    method: GradientMethod

    def __init__(self, method: GradientMethod, spec: Spec) -> None:
        super().__init__(method, spec)
        if spec.classes is None:
            raise DataError("gradient methods classify; use AFL or DeepAFL for regression.")
        network = method.build(spec.features, spec.outputs, first=True)
        ImageInputs(method.parameters(), spec.features)  # refused now rather than by every client
        weights = {name: value.detach() for name, value in networks.float_parameters(network).items()}
        self.server = ServerState(method, spec, doubles(weights), doubles(networks.float_buffers(network)))
        self.layers = self._feedback_layers(network)
        self._phase = "start"
        self._since: dict[str, int] = {}
        self._means: Weights = {}
        method.opening_state(self.server)

    def _feedback_layers(self, network: Any) -> list[str]:
        """The layers that feedback alignment chooses among; refused when there is none or a name is wrong."""
        method = self.method
        if method.feedback is None:
            return []
        if method.feedback not in CHOICES:
            named = list(dict.fromkeys(layer.strip() for layer in method.feedback.split(",")))
            with Feedback(network, named):
                return named
        blank = ImageInputs(method.parameters(), self.spec.features).read(torch.zeros(2, self.spec.features))
        layers = trained_layers(network) if method.feedback_first else changing_layers(network, blank)
        if len(layers) < method.feedback_layers:
            raise DataError(
                f"feedback alignment should choose {method.feedback_layers} layers, and network "
                f"'{method.network}' has {len(layers)} after its first trained one, where it would change "
                "nothing. Take a deeper network, or let the first layer be chosen too (feedback_first)."
            )
        return layers

    @property
    def exchanges(self) -> int:
        asked = sum(record.kind == "prelude" for record in self.history)
        a_round = 1 + (self.method.track == "drift")
        return self.method.rounds * a_round + asked + self.method.preludes(self.server)

    def request(self, clients: tuple[str, ...]) -> Request | None:
        server, method = self.server, self.method
        if server.round >= method.rounds:
            return None
        if self._phase == "start":
            server.clients = len(clients)
            server.cohort = cohort_of(method, clients, server.round)
            self._phase = self._opening_phase()
        run, cohort = self.chain.digests[1], server.cohort
        # Which exchange's state each client starts from; names stay with the server.
        since = {ticket(run, client): self._since[client] for client in cohort if client in self._since}
        note: dict[str, Any] = {"rate": method.rate_of(server.round), "since": since}
        if self._phase == "prelude":
            asked = method.prelude(server)
            assert asked is not None
            return self.ask(asked[0], server.round, server.cohort, note | asked[1])
        if self._phase == "drift":
            answered = self.history[-1].cohort
            moves = {f"move.{name}": move for name, move in doubles(self._means).items()}
            return self.ask(DRIFT, server.round, answered, note, moves)
        arrays = {f"w.{name}": array for name, array in method.outgoing(server).items()}
        arrays |= {f"b.{name}": array for name, array in server.buffers.items()}
        arrays = self._rounded(arrays | method.extras(server))
        arrays |= self._held(arrays)
        note |= {"feedback": self._chosen(), "layers": self.layers}
        return self.ask(KIND, server.round, server.cohort, note, arrays)

    def _opening_phase(self) -> str:
        return "train" if self.method.prelude(self.server) is None else "prelude"

    def _chosen(self) -> list[str]:
        """The layers of this round's feedback alignment."""
        if self.method.feedback is not None and self.method.feedback not in CHOICES:
            return self.layers
        return list(self.server.note.get("feedback", []))

    def _held(self, arrays: Weights) -> Weights:
        """Backward weights of an earlier round, for this round's feedback alignment; none where they are new.

        arrays: what is sent now, held on to in the first of every `feedback_sync` rounds.
        """
        method, server = self.method, self.server
        if method.feedback is None or method.feedback_sync == 1:
            return {}
        if server.round % method.feedback_sync == 0:
            names = [weight_of(layer) for layer in self.layers]
            server.memory |= {f"{HELD}{name}": np.asarray(arrays[f"w.{name}"]) for name in names}
            return {}
        return {f"{HELD}{weight_of(n)}": server.memory[f"{HELD}{weight_of(n)}"] for n in self._chosen()}

    def absorb(self, total: Total) -> None:
        server, method, phase = self.server, self.method, self._phase
        total.term.on_host()
        if phase == "prelude":
            method.heard(server, total)
            self._end("prelude", total, self._opening_phase(), {})
            return
        if phase == "drift":
            trained = total.count("trained")
            # Clients that left or were restarted no longer have the update to measure.
            whole = trained == server.note["trained"] and total.cohort == self.history[-1].cohort
            drift = float(total["drift"][0]) / trained if whole else None
            self._end("drift", total, "start", {"drift": drift})
            server.round += 1
            return
        exchange = self.offset + len(self.history)
        if method.stateful:
            self._since |= dict.fromkeys(total.cohort, exchange)
        if total.count("trained") == 0 or not float(total["weight"][0]) > 0:
            self._pass_over(total)
            return
        metrics = self._metrics(total)
        mean = _mean(total, "w.")
        server.aggregated = mean
        # Weights that no client trains stay as they are.
        sent = server.sent()
        method.update(server, {name: mean.get(name, sent[name]) for name in sent}, total)
        server.weights = doubles(server.weights)  # numpy makes plain numbers of weights without axes
        server.buffers |= method.statistics(server, _mean(total, "b."))
        self._choose_layers(total, metrics)
        if method.track == "drift":
            trained = total.count("trained")
            moves = with_prefix(total.term.arrays, "move.")
            self._means = {name: move / trained for name, move in moves.items()}
            server.note["trained"] = trained
            self._end("train", total, "drift", metrics)
            return
        self._end("train", total, "start", metrics)
        server.round += 1

    def _pass_over(self, total: Total) -> None:
        """Change nothing in a round in which no client that answered could train.

        Refused if all clients answered, and in the last round if nobody has trained in any.
        """
        server, method = self.server, self.method
        last = server.round + 1 >= method.rounds
        for_nothing = last and total.count("trained") == 0 and not server.aggregated
        if len(total.cohort) == server.clients or for_nothing:
            check_rows(total.count("rows"))
            if total.count("trained") > 0:
                raise TermError(
                    "the clients' weights sum to zero; no mean can be formed. Use another weighting."
                )
            raise DataError(
                f"round {server.round}: no client had a batch to train on (batch {method.batch}, last_batch "
                f"'{method.last_batch}', BatchNorm needs two rows), nor in any round before. Lower batch, or "
                "keep the last batch."
            )
        self._end("train", total, "start", {"round": server.round, "idle": len(total.cohort)})
        server.round += 1

    def _end(self, kind: str, total: Total, phase: str, metrics: dict[str, Any]) -> None:
        self._phase = phase
        self.record(total, kind, self.server.round, 0, metrics=metrics)

    def _metrics(self, total: Total) -> dict[str, Any]:
        trained = total.count("trained")
        metrics: dict[str, Any] = {
            "round": self.server.round,
            "loss": float(total["loss"][0]) / trained,
            "local_accuracy": total.count("correct") / max(1, total.count("seen")),
            "idle": len(total.cohort) - trained,
        }
        if self._chosen():
            metrics["feedback"] = self._chosen()
        if self.method.track == "drift":
            if "agreement" in total.term.arrays:
                ratios, cosines, defined = np.split(total["agreement"], 3)
                for name, sums in (("feedback_ratio", ratios), ("feedback_cosine", cosines)):
                    means = [float(s / n) if n else None for s, n in zip(sums, defined, strict=True)]
                    metrics[name] = dict(zip(self._chosen(), means, strict=True))
            metrics["mean_squared_drift"] = alignment.mean_squared_drift(
                with_prefix(total.term.arrays, "move."), float(total["move_square"][0]), trained
            )
        return metrics

    def _choose_layers(self, total: Total, metrics: dict[str, Any]) -> None:
        """The layers of the next round's feedback alignment, from this round's updates (Eq. 14)."""
        method, server = self.method, self.server
        if method.feedback not in CHOICES:
            return
        sizes = {layer: server.weights[weight_of(layer)].size for layer in self.layers}
        scores = alignment.alignment_scores(total.term.arrays, sizes, method.feedback_sketch)
        if not scores:
            return
        choice = server.note.get("choice", method.feedback)
        if choice == "skewness":
            choice = alignment.choice_by_skewness(scores)
            server.note["choice"] = choice
            metrics["skewness"] = alignment.skewness(scores)
        metrics["alignment"] = dict(scores)
        server.note["feedback"] = list(alignment.choose_layers(scores, choice, method.feedback_layers))

    def targets(self) -> dict[str, GradientModel]:
        """The models of this moment by name: the global one, and the mean of the newest local ones."""
        named = {"global": self.server.weights}
        if self.server.aggregated:
            named["aggregated"] = self.server.weights | self.server.aggregated
        return {name: self._model(weights) for name, weights in named.items()}

    def model(self) -> GradientModel:
        model = self.targets()[self.reported()]
        model.history = tuple(self.history)
        return model

    def reported(self) -> str:
        """Which of the targets `model` gives at this moment."""
        return self.method.reported if self.server.aggregated else "global"

    def _model(self, weights: Weights) -> GradientModel:
        model = GradientModel(
            self._rounded(weights),
            self._rounded(self.server.buffers),
            self.spec.classes,
            self.spec.features,
            {"method": self.method.key} | self.method.parameters(),
        )
        model.device = str(find_device(self.spec.device))
        if hasattr(self.method, "personal"):  # then models know where the clients keep their states
            model.run = self.chain.digests[1]
            model.kept = {ticket(model.run, client): exchange for client, exchange in self._since.items()}
        return model

    def _rounded(self, arrays: Weights) -> Weights:
        """Copies in the precision in which arrays travel."""
        return {name: np.array(array, dtype=self.method.precision) for name, array in arrays.items()}

    def stored(self) -> dict[str, Any]:
        kept = {name: getattr(self.server, name) for name in _KEPT}
        return kept | {name: getattr(self, name) for name in _OWN}

    def take_stored(self, kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            setattr(self if name in _OWN else self.server, name, value)


def cohort_of(method: GradientMethod, clients: tuple[str, ...], round_: int) -> tuple[str, ...]:
    """The cohort of a round: a share of the clients, at least one, drawn by seed and round."""
    if method.participation == 1:
        return clients
    count = max(1, round(method.participation * len(clients)))
    drawn = stream(method.seed, "cohort", round_).choice(len(clients), size=count, replace=False)
    return tuple(clients[index] for index in sorted(drawn))


def _mean(total: Total, prefix: str) -> Weights:
    weight = float(total["weight"][0])
    return {n: np.asarray(array / weight) for n, array in with_prefix(total.term.arrays, prefix).items()}
