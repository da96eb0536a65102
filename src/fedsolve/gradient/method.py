"""What all gradient methods share: parameters, the round, and the client's answer.

A round sends the weights down, lets every client of a cohort train, and sums `weight * w` and `weight`;
the algorithms differ in what they override. Client side: `prepare`, `losses`, `edit`, `contribute`,
`state`. Server side: `outgoing`, `extras`, `update`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from fedsolve import registry
from fedsolve.checks import check_choice, check_not_negative, check_whole
from fedsolve.container import Array, with_prefix
from fedsolve.errors import DataError, TermError
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Chain, Request, Term, Total
from fedsolve.federation.method import Method, Run
from fedsolve.federation.participant import ClientData, Memory, group_step
from fedsolve.federation.states import State, ticket
from fedsolve.gradient import alignment, networks
from fedsolve.gradient.feedback import Feedback, eligible_layers
from fedsolve.gradient.group import Group, Step, surroundings
from fedsolve.gradient.learners import SingleNetwork, borrowed
from fedsolve.gradient.models import GradientModel
from fedsolve.gradient.streams import stream

if TYPE_CHECKING:
    from torch import Tensor

KIND = "gradient"
DRIFT = "gradient-drift"
TOGETHER = 25
"""Heads that train side by side; of the same order as the cost of one more torch call a step."""

CHOICES = ("lowest", "highest", "skewness")

Weights = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class GradientMethod(Method[GradientModel]):
    """Parameters of every gradient method.

    network:       "linear" or "mlp:256" on features; "cnn", "mobilenet_v2", "resnet18", "resnet50" on images;
                   "package.module:function" or a torch module of your own.
    rounds, participation: exchanges, and the share of the clients asked in each.
    epochs, batch, last_batch: local passes a round, rows a step, whether a short last batch is kept.
    rate, rate_decay: learning rate, and its factor from round to round.
    optimiser, momentum, weight_decay, clip: local optimiser; clip is the largest gradient norm.
    weighting:     clients count by their rows ("size") or all alike ("uniform").
    buffers:       running statistics of BatchNorm are averaged, or stay with each client ("local").
    feedback:      FLFA: None, "lowest", "highest" or "skewness" (how the layer is chosen), or layer names
                   joined by commas. The other feedback_ parameters shape it; see `feedback` and `alignment`.
    track:         "drift" measures how far clients move apart, at the cost of more traffic.
    shape:         of an image, "channels,height,width"; inferred for common sizes.
    precision, device, seed: float32 or float64, a torch device, and the seed of all random streams.
    """

    reported: ClassVar[str] = "global"
    """Which of a run's targets is the model: where it is not the global one, the paper says so."""

    keeps_state: ClassVar[bool] = False
    """Whether clients keep something from exchange to exchange."""

    network: str = "linear"
    rounds: int = 100
    participation: float = 1.0
    epochs: int = 1
    batch: int = 64
    last_batch: Literal["keep", "drop"] = "keep"
    rate: float = 0.05
    rate_decay: float = 1.0
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    weighting: Literal["size", "uniform"] = "size"
    buffers: Literal["average", "local"] = "average"
    feedback: str | None = None
    feedback_layers: int = 1
    feedback_matrix: Literal["global", "random"] = "global"
    feedback_scaling: Literal["layer", "row", "none"] = "layer"
    feedback_route: Literal["layer", "direct"] = "layer"
    feedback_first: bool = False
    feedback_sketch: int = 0
    track: Literal["drift"] | None = None
    shape: str | None = None
    precision: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.network, str):
            object.__setattr__(self, "network", networks.register_network(self.network))
        check_whole(1, rounds=self.rounds, epochs=self.epochs, batch=self.batch)
        check_whole(1, feedback_layers=self.feedback_layers)
        check_whole(0, seed=self.seed, feedback_sketch=self.feedback_sketch)
        check_not_negative(
            rate=self.rate, rate_decay=self.rate_decay, momentum=self.momentum, weight_decay=self.weight_decay
        )
        if not 0 < self.participation <= 1:
            raise DataError(f"participation must lie in (0, 1]; got {self.participation!r}.")
        if self.clip is not None and not self.clip > 0:
            raise DataError(f"clip must be a positive gradient norm, or none; got {self.clip!r}.")
        check_choice("last_batch", self.last_batch, ("keep", "drop"))
        check_choice("optimiser", self.optimiser, ("sgd", "adam"))
        check_choice("weighting", self.weighting, ("size", "uniform"))
        check_choice("buffers", self.buffers, ("average", "local"))
        check_choice("feedback_matrix", self.feedback_matrix, ("global", "random"))
        check_choice("feedback_scaling", self.feedback_scaling, ("layer", "row", "none"))
        check_choice("feedback_route", self.feedback_route, ("layer", "direct"))
        check_choice("track", self.track, (None, "drift"))
        check_choice("precision", self.precision, ("float32", "float64"))

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """`shape` as numbers."""
        if self.shape is None:
            return None
        try:
            return tuple(int(size) for size in self.shape.split(","))
        except ValueError:
            raise DataError(f"shape must be 'channels,height,width'; got {self.shape!r}.") from None

    @property
    def recordable(self) -> bool:
        """Whether a GPU may replay a step: plain SGD does the same to the same tensors every time."""
        return self.optimiser == "sgd"

    @property
    def stateful(self) -> bool:
        """Whether clients of a run with these parameters keep something."""
        return self.keeps_state or self.buffers == "local"

    def start(self, spec: Spec) -> GradientRun:
        return GradientRun(self, spec)

    # -- the client's side ------------------------------------------------------------------------

    def trains_together(self, features: int, outputs: int) -> bool:
        """Whether clients of one process train side by side: heads of linear layers do."""
        return self.feedback is None and networks.stacked_widths(self.network, features, outputs) is not None

    def passes(self, round_: int) -> int:
        """How often a client goes through its rows in a round."""
        return self.epochs

    def prepare(self, group: Group) -> None:
        """Before the first local step."""

    def losses(self, step: Step) -> Tensor:
        """Each client's loss on its batch: the mean cross-entropy."""
        return step.cross_entropy(step.forward().logits)

    def gradients(self, step: Step) -> None:
        """Fill in the losses of a step and their gradients."""
        losses = self.losses(step)
        step.gradients = step.differentiate(losses)
        step.losses = losses.detach()

    def edit(self, step: Step) -> None:
        """Change the gradients before they are clipped and used; runs without recording gradients."""

    def weight(self, group: Group, client: int) -> float:
        """How much a client counts in the mean."""
        return float(group.sizes[client]) if self.weighting == "size" else 1.0

    def contribute(self, group: Group, client: int, term: Term) -> None:
        """Add to a client's term what this algorithm sums besides the weights."""

    def state(self, group: Group, client: int) -> State | None:
        """What a client keeps for its next exchange; None when nothing."""
        return None

    def feedback_part(self, group: Group) -> Feedback | None:
        """Feedback alignment for this round, when layers were chosen for it."""
        layers: Sequence[str] = group.note.get("feedback", ())
        if not layers:
            return None
        assert isinstance(group.learners, SingleNetwork)
        return Feedback(
            group.learners.network,
            layers,
            matrix=self.feedback_matrix,
            scaling=self.feedback_scaling,
            route=self.feedback_route,
            seed=self.seed,
            in_place=group.device.type == "cuda",
        )

    # -- the server's side ------------------------------------------------------------------------

    def opening_state(self, server: Server) -> None:
        """Before round 0."""

    def outgoing(self, server: Server) -> Weights:
        """The weights that clients start from."""
        return server.weights

    def extras(self, server: Server) -> dict[str, Array]:
        """What else travels down."""
        return {}

    def update(self, server: Server, mean: Weights, total: Total) -> None:
        """Take the clients' mean weights (float64): the next global model."""
        server.weights = mean

    def prelude(self, server: Server) -> tuple[str, dict[str, Any]] | None:
        """A question to the cohort before it trains, as a request kind and note; None when there is none.

        Asked for again after every answer, so that one question may follow from another.
        """
        return None

    def heard(self, server: Server, total: Total) -> None:
        """Take the answer to the prelude."""

    def preludes(self, server: Server) -> int:
        """How many preludes are still to come when no cohort changes."""
        return 0


@dataclass
class Server:
    """The server's state of a gradient method.

    weights: the global model in float64. buffers: averaged running statistics. memory: whatever the
    algorithm keeps, as named arrays. aggregated: the mean of the newest local models. clients: how many the
    federation has. cohort: who is asked in this round. received: what the clients were sent.
    """

    method: GradientMethod
    spec: Spec
    weights: Weights
    buffers: Weights
    round: int = 0
    clients: int = 0
    cohort: tuple[str, ...] = ()
    memory: dict[str, Array] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    aggregated: Weights = field(default_factory=dict)

    def sent(self) -> Weights:
        """The weights as this round's clients received them: rounded to the precision they travel in."""
        precision = np.dtype(self.method.precision)
        return _doubles({n: w.astype(precision) for n, w in self.method.outgoing(self).items()})

    def kept(self, prefix: str) -> Weights:
        """Arrays `prefix.NAME` of the memory by weight name; zeros before the first."""
        return {
            name: self.memory.get(f"{prefix}.{name}", np.zeros(array.shape))
            for name, array in self.weights.items()
        }

    def keep(self, prefix: str, values: Mapping[str, Array]) -> None:
        self.memory |= {f"{prefix}.{name}": array for name, array in values.items()}


class GradientRun(Run[GradientModel]):
    """Rounds of a gradient method: an optional prelude, training, and an optional measure of drift."""

    method: GradientMethod

    def __init__(self, method: GradientMethod, spec: Spec) -> None:
        super().__init__(method, spec)
        if spec.classes is None:
            raise DataError("gradient methods classify; use AFL or DeepAFL for regression.")
        network = networks.build_network(
            method.network,
            spec.features,
            spec.outputs,
            seed=method.seed,
            dtype=method.precision,
            shape=method.image_shape,
        )
        weights = {n: p.detach().numpy() for n, p in networks.float_parameters(network).items()}
        buffers = {n: b.numpy() for n, b in networks.float_buffers(network).items()}
        self.server = Server(method, spec, _doubles(weights), _doubles(buffers))
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
        layers = [
            layer
            for layer in eligible_layers(network, method.feedback_first)
            if network.get_submodule(layer).weight.requires_grad
        ]
        if method.feedback not in CHOICES:
            named = [layer.strip() for layer in method.feedback.split(",")]
            with Feedback(network, named):
                return named
        if len(layers) < method.feedback_layers:
            raise DataError(
                f"feedback alignment should choose {method.feedback_layers} layers, and network "
                f"'{method.network}' has {len(layers)} after its first, where it would change nothing. "
                "Take a deeper network, or let the first layer be chosen too (feedback_first)."
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
            server.cohort = _sample(method, clients, server.round)
            self._phase = self._opening_phase()
        note: dict[str, Any] = {"rate": method.rate * method.rate_decay**server.round, "since": self._known()}
        if self._phase == "prelude":
            asked = method.prelude(server)
            assert asked is not None
            return self._ask(asked[0], server.round, server.cohort, note | asked[1])
        if self._phase == "drift":
            answered = self.history[-1].cohort
            return self._ask(DRIFT, server.round, answered, note, _sent(self._means, "move", np.float64))
        precision = np.dtype(method.precision)
        arrays = _sent(method.outgoing(server), "w", precision) | _sent(server.buffers, "b", precision)
        arrays |= {name: array.astype(precision) for name, array in method.extras(server).items()}
        note |= {"feedback": self._chosen(), "layers": self.layers}
        return self._ask(KIND, server.round, server.cohort, note, arrays)

    def _opening_phase(self) -> str:
        return "train" if self.method.prelude(self.server) is None else "prelude"

    def _chosen(self) -> list[str]:
        """The layers of this round's feedback alignment."""
        if self.method.feedback is not None and self.method.feedback not in CHOICES:
            return self.layers
        return list(self.server.note.get("feedback", []))

    def _known(self) -> dict[str, int]:
        """Which exchange's state each client starts from; names stay with the server."""
        run, cohort = self.chain.digests[1], self.server.cohort
        return {ticket(run, client): self._since[client] for client in cohort if client in self._since}

    def absorb(self, total: Total) -> None:
        server, method, phase = self.server, self.method, self._phase
        if phase == "prelude":
            method.heard(server, total)
            self._end("prelude", total, self._opening_phase(), {})
            return
        if phase == "drift":
            trained = total.count("trained")
            # Clients that are gone, or were started anew, no longer have the update to measure.
            whole = trained == server.note["trained"] and total.cohort == self.history[-1].cohort
            drift = float(total["drift"][0]) / trained if whole else None
            self._end("drift", total, "start", {"drift": drift})
            server.round += 1
            return
        exchange = len(self.history)
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
        server.buffers |= _mean(total, "b.")
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
        """A round in which nobody who answered could train changes nothing; refused if all answered."""
        server, method = self.server, self.method
        if len(total.cohort) == server.clients:
            if total.count("rows") == 0:
                raise DataError("no rows at all: every client that answered is empty.")
            if total.count("trained") > 0:
                raise TermError(
                    "the clients' weights sum to zero; no mean can be formed. Use another weighting."
                )
            raise DataError(
                f"round {server.round}: no client had a batch to train on (batch {method.batch}, last_batch "
                f"'{method.last_batch}', BatchNorm needs two rows). Lower batch, or keep the last batch."
            )
        self._end("train", total, "start", {"round": server.round, "idle": len(total.cohort)})
        server.round += 1

    def _end(self, kind: str, total: Total, phase: str, metrics: dict[str, Any]) -> None:
        self._phase = phase
        self._record(kind, self.server.round, total, 0, metrics=metrics)

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
                ratios, cosines = np.split(total["agreement"] / trained, 2)
                metrics["feedback_ratio"] = dict(zip(self._chosen(), ratios.tolist(), strict=True))
                metrics["feedback_cosine"] = dict(zip(self._chosen(), cosines.tolist(), strict=True))
            metrics["mean_squared_drift"] = alignment.mean_squared_drift(
                with_prefix(total.term.arrays, "move."), float(total["move_square"][0]), trained
            )
        return metrics

    def _choose_layers(self, total: Total, metrics: dict[str, Any]) -> None:
        """The layers of the next round's feedback alignment, from this round's updates (Eq. 14)."""
        method, server = self.method, self.server
        if method.feedback not in CHOICES:
            return
        sizes = {layer: server.weights[_weight(layer)].size for layer in self.layers}
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
        precision = np.dtype(self.method.precision)
        return GradientModel(
            {name: array.astype(precision) for name, array in weights.items()},
            {name: array.astype(precision) for name, array in self.server.buffers.items()},
            self.spec.classes,
            self.spec.features,
            {"method": self.method.key} | self.method.parameters(),
        )

    def _contents(self) -> tuple[dict[str, Array], dict[str, Any]]:
        server = self.server
        arrays = _prefixed("weights", server.weights) | _prefixed("buffers", server.buffers)
        arrays |= _prefixed("memory", server.memory) | _prefixed("aggregated", server.aggregated)
        arrays |= _prefixed("means", self._means)
        note = {
            "round": server.round,
            "clients": server.clients,
            "cohort": list(server.cohort),
            "phase": self._phase,
            "since": self._since,
            "server": server.note,
        }
        return arrays, note

    def _restore(self, arrays: dict[str, Array], note: dict[str, Any]) -> None:
        server = self.server
        # A file sorts its arrays; the network's own order is kept, so that sums over weights keep their bits.
        weights, buffers = with_prefix(arrays, "weights."), with_prefix(arrays, "buffers.")
        server.weights = {name: weights[name] for name in server.weights}
        server.buffers = {name: buffers[name] for name in server.buffers}
        aggregated = with_prefix(arrays, "aggregated.")
        server.aggregated = {name: aggregated[name] for name in server.weights if name in aggregated}
        server.memory = with_prefix(arrays, "memory.")
        self._means = with_prefix(arrays, "means.")
        server.round, server.clients, server.cohort = note["round"], note["clients"], tuple(note["cohort"])
        server.note, self._phase, self._since = note["server"], note["phase"], note["since"]


# -- the client's answers --------------------------------------------------------------------------


def _together(request: Request, chain: Chain) -> int:
    opening = (chain.blocks or request.blocks)[0].note["opening"]
    method = _method_of(opening)
    return TOGETHER if method.trains_together(opening["features"], opening["outputs"]) else 1


def _method_of(opening: Mapping[str, Any]) -> GradientMethod:
    method: GradientMethod = registry.method_class(opening["method"])(**opening["parameters"])
    return method


@group_step(KIND, _together)
def answer(clients: Sequence[ClientData], request: Request, memories: Sequence[Memory]) -> list[Term]:
    """Local training of a group of clients from the weights received: weight * w and weight of each."""
    import torch

    opening = memories[0].chain.blocks[0].note["opening"]
    method = _method_of(opening)
    for client in clients:
        if client.width != opening["features"]:
            raise DataError(
                f"this client has {client.width} features per row, the run uses {opening['features']}. "
                "All must use the same backbone or image size."
            )
        if client.weights is not None:
            raise DataError("gradient methods do not take sample weights; leave them out, or use DeepAFL.")
    device = find_device(method.device)
    with borrowed(method, opening["features"], opening["outputs"], device) as lend, surroundings(device):
        group = Group(method, clients, request, memories, device, lend)
        group.train()
        terms = group.terms()
        for place, number in enumerate(group.order):
            if group.steps[place] > 0:
                with torch.no_grad():
                    _measure(group, place, terms[number])
    return terms


def _measure(group: Group, place: int, term: Term) -> None:
    """What the choice of layers and the measure of drift need, in unweighted sums."""
    import torch

    method = group.method
    if method.feedback not in CHOICES and method.track is None:
        return
    weights = group.weights_of(place)
    if method.feedback in CHOICES:
        layers: Sequence[str] = group.note["layers"]
        now, before = (_end_to_end(held, layers) for held in (weights, group.start))
        sizes = [weights[_weight(layer)].numel() for layer in layers]
        updates = dict(zip(layers, torch.split(now - before, sizes), strict=True))
        term.arrays |= alignment.alignment_sums(updates, method.feedback_sketch, method.seed)
    if method.track == "drift":
        held = {n: (w.double() - group.start[n].double()).cpu().numpy() for n, w in weights.items()}
        term.arrays |= {f"move.{name}": array for name, array in held.items()}
        term.arrays["move_square"] = np.array([sum(float(np.vdot(a, a)) for a in held.values())])
        group.memories[place].cache["move"] = (group.run, group.exchange, held)
        if group.agreement:
            told = list(group.agreement.values())
            term.arrays["agreement"] = np.array([a.ratio for a in told] + [a.cosine for a in told])


def _end_to_end(held: Mapping[str, Tensor], layers: Sequence[str]) -> Tensor:
    """The layers' weights as one row of float64: a handful of kernels instead of several for each layer."""
    import torch

    return torch.cat([held[_weight(layer)].reshape(-1) for layer in layers]).double()


def _weight(layer: str) -> str:
    """The name of a layer's weight; a network that is itself a layer has no name before it."""
    return f"{layer}.weight" if layer else "weight"


@group_step(DRIFT, lambda request, chain: 1)
def answer_drift(clients: Sequence[ClientData], request: Request, memories: Sequence[Memory]) -> list[Term]:
    """How far each client's newest update lies from the mean of all clients' (the paper's H, Eq. 59)."""
    terms = []
    for memory in memories:
        run, exchange, held = memory.cache.get("move", ("", -1, None))
        if (run, exchange) != (memory.chain.digests[1], request.exchange - 1):
            held = None  # it had no part in this round, or was started anew since
        elif isinstance(held, dict):
            held = _distance(held, request.arrays)
            # The number answers the same question again; the update itself is needed no more.
            memory.cache["move"] = (run, exchange, held)
        found = 0.0 if held is None else float(held)
        terms.append(Term({"drift": np.array([found])}, {"trained": int(held is not None)}))
    return terms


def _distance(moves: Mapping[str, Array], means: Mapping[str, Array]) -> float:
    return float(np.sqrt(sum(float(np.sum((move - means[f"move.{n}"]) ** 2)) for n, move in moves.items())))


def find_device(name: str) -> Any:
    """The torch device of this name; "auto" is a GPU where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise DataError(f"device '{name}' is not one that torch knows ('cpu', 'cuda', 'auto').") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DataError(f"device '{name}' was asked for, and torch finds no GPU here. Use the device cpu.")
    return device


def _sample(method: GradientMethod, clients: tuple[str, ...], round_: int) -> tuple[str, ...]:
    """The cohort of a round: a share of the clients, at least one, drawn by seed and round."""
    if method.participation == 1:
        return clients
    count = max(1, round(method.participation * len(clients)))
    found = stream(method.seed, "cohort", round_).choice(len(clients), size=count, replace=False)
    return tuple(clients[index] for index in sorted(found))


def _mean(total: Total, prefix: str) -> Weights:
    weight = float(total["weight"][0])
    return {
        name.removeprefix(prefix): array / weight
        for name, array in total.term.arrays.items()
        if name.startswith(prefix)
    }


def _doubles(weights: Mapping[str, Array]) -> Weights:
    return {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}


def _sent(weights: Mapping[str, Array], prefix: str, precision: Any) -> Weights:
    return {f"{prefix}.{name}": array.astype(precision) for name, array in weights.items()}


def _prefixed(prefix: str, arrays: Mapping[str, Array]) -> Weights:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}
