"""What all gradient methods share: parameters, and the hooks in which the algorithms differ.

A round sends the weights down (`run`), lets every client of a cohort train (`answers`, `group`), and sums
`weight * w` and `weight`. Client side: `prepare`, `moved`, `draw`, `losses`, `gradients`, `edit`,
`withheld`, `contribute`, `state`. Server side: `outgoing`, `extras`, `update`. A method's file finds here
what hooks are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from fedsolve.arrays import Array
from fedsolve.backends.torch_later import Tensor, nn
from fedsolve.container import with_prefix
from fedsolve.errors import DataError
from fedsolve.federation.messages import Term as Term
from fedsolve.federation.messages import Total as Total
from fedsolve.federation.method import Laws as Laws
from fedsolve.federation.method import Method, Spec
from fedsolve.federation.states import State as State
from fedsolve.gradient import augmentation, networks, optimisers
from fedsolve.gradient.alignment import CHOICES
from fedsolve.gradient.feedback import HELD, Feedback
from fedsolve.gradient.feedback import check_parameters as check_feedback
from fedsolve.gradient.group import ClientGroup as ClientGroup
from fedsolve.gradient.learners import SingleNetwork
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.pixel_form import check_form, is_treated
from fedsolve.gradient.run import GradientRun
from fedsolve.gradient.server_state import ServerState as ServerState
from fedsolve.gradient.server_state import Weights as Weights
from fedsolve.gradient.steps import Step as Step
from fedsolve.parameters import parameter as parameter
from fedsolve.registry import register as register
from fedsolve.tables.schema import Extractor

FEEDBACK = "Feedback alignment"
SCHEDULE = "Learning rate from round to round"
IMAGES = "Images: how they are cut, mirrored and normalised"

WRITTEN = ("shape", "schedule_rounds", "pixel_mean", "pixel_deviation", "feedback")
"""Parameters that are lists written as text; in Python and TOML they may be lists or numbers as well."""


@dataclass(frozen=True, kw_only=True)
class GradientMethod(Method[GradientModel]):
    """Parameters of every gradient method.

    `network` may also be a torch module of your own. Optimisers begin afresh in every round. The first layer
    is a candidate for feedback where `feedback_first` says so, as in the paper's rule, although nothing
    changes there; a `feedback_sketch` is what the choice is made from. See `feedback` and `alignment`.
    """

    laws: ClassVar[Laws] = Laws(partition=None)
    travels: ClassVar[Mapping[str, str]] = {
        "exchanges": "rounds",
        "up": "rows * weights and rows",
        "down": "weights",
    }
    recurring: ClassVar[frozenset[str]] = frozenset({"w.", "b."})

    reported: ClassVar[str] = "global"
    """Which of a run's targets is the model: where it is not the global one, the paper says so."""

    keeps_state: ClassVar[bool] = False
    """Whether clients keep something from exchange to exchange."""

    averages: ClassVar[bool] = True
    """Whether `update` moves towards the mean by `server_step`. Counts only for the class whose `update` it
    is."""

    tensors_only: ClassVar[bool] = False
    """Whether all that a step reads and that changes between clients or rounds is tensors in the group's
    start, received and scratch, or comes from `draw`, so that a GPU may record it once for all, and train
    clients of small networks as a stack, whose weights have a client axis and whose terms hold tensors.
    Counts only for the class that says so: who inherits from it and changes a hook says it anew."""

    takes_weights: ClassVar[bool] = True
    """Whether rows may count by a weight: in the losses, and a client by the sum over its rows."""

    one_shot: ClassVar[bool] = False
    """Whether it has one round."""

    hidden: ClassVar[str] = ""
    """What it does with hidden layers, if a network must have them, as the end of a sentence."""

    stays: ClassVar[str] = ""
    """The part of a network that never leaves its client, if any (`withheld`)."""

    network: str = parameter(
        "linear",
        "On features: linear, mlp:256, mlp:512,128. On images: cnn, mobilenet_v2, resnet18, resnet50, with "
        "GroupNorm resnet18:gn, unchanged mobilenet_v2:stock. Your own: package.module:function.",
        metavar="NAME",
    )
    rounds: int = parameter(100, "Times that weights travel.", least=1)
    participation: float = parameter(1.0, "Share of clients asked per round.", above=0, most=1)
    epochs: int = parameter(1, "Local passes over the rows in a round.", least=1)
    batch: int = parameter(64, "Rows of a local step.", least=1)
    last_batch: Literal["keep", "drop"] = parameter("keep", "Rows that do not fill a batch.")
    rate: float = parameter(0.05, "Learning rate.", least=0)
    rate_decay: float = parameter(1.0, "Factor on the rate from round to round.", least=0)
    schedule: Literal["constant", "step", "cosine"] = parameter(
        "constant", "Besides the decay: falling in steps, or along a cosine to 0.", group=SCHEDULE
    )
    schedule_rounds: str | None = parameter(
        None, "Rounds from which a stepped rate is lower.", metavar="ROUNDS", group=SCHEDULE
    )
    schedule_factor: float = parameter(
        optimisers.SCHEDULE_FACTOR, "Factor of each step.", least=0, group=SCHEDULE
    )
    warmup: int = parameter(0, "Rounds in which the rate rises to its height.", least=0, group=SCHEDULE)
    local_steps: int | None = parameter(
        None, "Local steps in a round, in place of --epochs.", least=1, none="as many as --epochs takes"
    )
    optimiser: Literal["sgd", "adam", "adamw"] = parameter("sgd", "Local optimiser, afresh in every round.")
    momentum: float = parameter(0.0, "Momentum of the local SGD.", least=0)
    nesterov: bool = parameter(False, "Nesterov's momentum.")
    weight_decay: float = parameter(0.0, "Local weight decay.", least=0)
    server_step: float = parameter(
        1.0, "How far the server goes from its weights to the mean of the clients'.", least=0
    )
    clip: float | None = parameter(None, "Largest norm of a local gradient.", above=0)
    weighting: Literal["size", "uniform"] = parameter("size", "Clients count by their rows or all alike.")
    buffers: Literal["average", "local"] = parameter(
        "average",
        "Running statistics of BatchNorm: local ones stay with the clients, and the shared model has none to "
        "predict with.",
    )
    feedback: str | None = parameter(
        None,
        "Replace backward weights by the global ones, in the layers where clients agree least (lowest), most "
        "(highest), as the distribution suggests (skewness), or in named ones (features.3,classifier).",
        metavar="HOW|LAYERS",
        group=FEEDBACK,
    )
    feedback_layers: int = parameter(1, "How many layers are chosen.", least=1, group=FEEDBACK)
    feedback_matrix: Literal["global", "random"] = parameter(
        "global", "Backward weights; random is an ablation.", group=FEEDBACK
    )
    feedback_scaling: Literal["layer", "row", "none"] = parameter(
        "layer", "Whose norm the backward weights get.", group=FEEDBACK
    )
    feedback_route: Literal["layer", "direct"] = parameter(
        "layer", "direct is DFA, an ablation.", group=FEEDBACK
    )
    feedback_sync: int = parameter(
        1, "Rounds for which backward weights stay those of the first of them.", least=1, group=FEEDBACK
    )
    feedback_first: bool = parameter(False, "Let the first layer be chosen too.", group=FEEDBACK)
    feedback_sketch: int = parameter(
        2048, "Numbers sent of a larger update; 0: all.", least=0, group=FEEDBACK
    )
    track: Literal["drift"] | None = parameter(None, "Measure drift: one more exchange a round.")
    shape: str | None = parameter(
        None, "Images as channels,height,width.", metavar="C,H,W", none="from the data"
    )
    crop: int = parameter(0, "Black margin from which training images are cut.", least=0, group=IMAGES)
    flip: float = parameter(0.0, "Chance that a training image is mirrored.", least=0, most=1, group=IMAGES)
    pixel_mean: str | None = parameter(
        None, "Mean of each channel, 0 black to 1 white.", metavar="NUMBERS", group=IMAGES
    )
    pixel_deviation: str | None = parameter(
        None, "Deviation of each channel, likewise.", metavar="NUMBERS", group=IMAGES
    )
    precision: Literal["float32", "float64"] = parameter("float32", "float32 is faster.")
    seed: int = parameter(0, "Seed of weights, batches, participation.", least=0)

    def __post_init__(self) -> None:
        if not isinstance(self.network, str):
            object.__setattr__(self, "network", networks.register_network(self.network))
        for name in WRITTEN:
            object.__setattr__(self, name, _written(getattr(self, name)))
        super().__post_init__()
        augmentation.check_parameters(self)
        check_feedback(self)
        self._check()

    def _check(self) -> None:
        """Refuse parameters that do not go together, or not with what the method declares."""
        name, colon, _ = (type(self).__doc__ or "").partition(":")
        name = name if colon and " " not in name else type(self).__name__
        owner = next(kind for kind in type(self).__mro__ if "update" in vars(kind))
        other, chosen = self.optimiser != "sgd", self.feedback in CHOICES
        measure = "track" if self.track == "drift" else "feedback"
        for is_refused, why in (
            (
                (self.schedule == "step") != bool(optimisers.milestones(self)),
                "schedule 'step' and schedule_rounds go together; got "
                f"{self.schedule!r} and {self.schedule_rounds!r}.",
            ),
            (
                self.schedule != "step" and self.schedule_factor != optimisers.SCHEDULE_FACTOR,
                f"schedule_factor ({self.schedule_factor}) is of schedule 'step'; got {self.schedule!r}.",
            ),
            (
                self.warmup > self.rounds,
                f"warmup ({self.warmup}) is longer than the run ({self.rounds} rounds).",
            ),
            (
                other and self.momentum,
                f"momentum ({self.momentum}) is of the optimiser sgd; {self.optimiser} has moments of its "
                "own. Leave it out.",
            ),
            (
                self.nesterov and not self.momentum,
                "nesterov is a form of momentum; give momentum, such as 0.9.",
            ),
            (
                self.server_step != 1 and not vars(owner).get("averages", False),
                f"server_step is for methods that take the mean of the clients' weights; {name} updates its "
                "weights in its own way. Leave it out.",
            ),
            (
                self.one_shot and self.rounds != 1,
                f"{name} takes one round of long local training; got rounds={self.rounds}. Raise epochs "
                "instead.",
            ),
            (
                self.one_shot and chosen,
                f"feedback='{self.feedback}' chooses layers by the round before, and {name} has one round. "
                "Name the layers, joined by commas.",
            ),
            (
                self.stays and (chosen or self.track == "drift"),
                f"{measure}={getattr(self, measure)!r} sends updates of all weights, and in {name} the "
                f"{self.stays} never leaves its client. Leave {measure} out.",
            ),
            (
                self.hidden and self.network == "linear",
                f"network 'linear' is a classifier without hidden layers, and {name} {self.hidden}. Take one "
                "that has some, such as mlp:256.",
            ),
        ):
            if is_refused:
                raise DataError(why)

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """`shape` as numbers."""
        return networks.shape_from(self.shape)

    @property
    def recordable(self) -> bool:
        """Whether a GPU may replay a step: plain SGD does the same to the same tensors every time.

        A method from outside may draw or count in its steps, which a replayed one would not: it says if not.
        """
        is_ours = type(self).__module__.partition(".")[0] == "fedsolve"
        # Direct feedback makes its matrices on the way back, where nothing can be recorded.
        is_direct = self.feedback is not None and self.feedback_route == "direct"
        return self.optimiser == "sgd" and (is_ours or self.uses_tensors_only) and not is_direct

    @property
    def uses_tensors_only(self) -> bool:
        """Whether this class itself says that its steps read tensors only."""
        return bool(vars(type(self)).get("tensors_only", False))

    @property
    def keeps(self) -> bool:
        """Whether clients keep a `state` with these parameters."""
        return self.keeps_state

    @property
    def stateful(self) -> bool:
        """Whether they keep that, or running statistics."""
        return self.keeps or self.buffers == "local"

    @classmethod
    def trial(cls) -> Self:
        return cls(network="mlp:6", rounds=min(2, cls.rounds), batch=16)

    def check_source(self, source: Extractor | None) -> None:
        if source is not None and is_treated(self.parameters()):
            check_form(source)

    def start(self, spec: Spec) -> GradientRun:
        return GradientRun(self, spec)

    # -- the client's side ------------------------------------------------------------------------

    def trains_together(self, features: int, outputs: int, device: str = "cpu") -> bool:
        """Whether clients of one process train side by side: heads of linear layers do.

        On a GPU small networks do too, of methods whose steps read tensors alone.
        """
        if self.feedback is not None:
            return False
        if networks.stacked_widths(self.network, features, outputs) is not None:
            return True
        small = self.network in networks.STACKED and features <= networks.STACKED_FEATURES
        return device.startswith("cuda") and self.uses_tensors_only and small

    def build(self, features: int, outputs: int, *, first: bool = False) -> nn.Module:
        """The network; first: with the weights that runs begin with, which everybody draws by seed."""
        return networks.build_network(
            self.network,
            features,
            outputs,
            seed=self.seed if first else 0,
            dtype=self.precision,
            shape=self.image_shape,
        )

    def rate_of(self, round_: int) -> float:
        """The learning rate of a round."""
        return self.rate * optimisers.factor_of(self, round_)

    def passes_of(self, client: str, round_: int) -> int:
        """How often a client goes through its rows in a round."""
        return self.epochs

    def with_passes(self, epochs: int) -> Self:
        """The same method with so many passes for everybody, as for a client that trains by itself."""
        return replace(self, epochs=epochs, local_steps=None)

    def prepare(self, group: ClientGroup) -> None:
        """Before the first local step."""

    def moved(self, group: ClientGroup) -> list[str]:
        """Names of the weights that local steps move; the others stay as they are."""
        return group.names

    def draw(self, group: ClientGroup, number: int) -> dict[str, Array]:
        """Random numbers of a step by name, for `Step.drawn`; drawn in a step they would be recorded.

        The same names for every step of a round.
        """
        return {}

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

    def weight(self, group: ClientGroup, client: int) -> float:
        """How much a client counts in the mean."""
        return float(group.counted[client]) if self.weighting == "size" else 1.0

    def withheld(self, group: ClientGroup) -> list[str]:
        """Names of the weights that clients do not send."""
        return []

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        """Add to a client's term what this algorithm sums besides the weights.

        The weights in it may be changed; those of a stack of networks are tensors.
        """

    def state(self, group: ClientGroup, client: int) -> State | None:
        """What a client keeps for its next exchange, or None. Called only where `keeps` is true."""
        return None

    def feedback_part(self, group: ClientGroup, layers: Sequence[str]) -> Feedback:
        """Feedback alignment in these layers."""
        assert isinstance(group.learners, SingleNetwork)
        return Feedback(
            group.learners.network,
            layers,
            matrix=self.feedback_matrix,
            scaling=self.feedback_scaling,
            route=self.feedback_route,
            seed=self.seed,
            received=group.start | with_prefix(group.received, HELD),
            held=self.feedback_sync > 1,
        )

    # -- the server's side ------------------------------------------------------------------------

    def opening_state(self, server: ServerState) -> None:
        """Before round 0."""

    def outgoing(self, server: ServerState) -> Weights:
        """The weights that clients start from."""
        return server.weights

    def extras(self, server: ServerState) -> dict[str, Array]:
        """What else travels down."""
        return {}

    def update(self, server: ServerState, mean: Weights, total: Total) -> None:
        """Take the clients' mean weights (float64): the next global model."""
        server.weights = self.stepped(server, mean)

    def statistics(self, server: ServerState, mean: Weights) -> Weights:
        """The next running statistics of BatchNorm, from the clients' mean (float64): that mean."""
        return mean

    def stepped(self, server: ServerState, mean: Weights) -> Weights:
        """The weights `server_step` of the way from those that were sent to the mean."""
        if self.server_step == 1:
            return mean
        sent = server.sent()
        return {name: sent[name] + self.server_step * (mean[name] - sent[name]) for name in mean}

    def prelude(self, server: ServerState) -> tuple[str, dict[str, Any]] | None:
        """A question to the cohort before it trains, as a request kind and note; None when there is none.

        Asked for again after every answer, so that one question may follow from another.
        """
        return None

    def heard(self, server: ServerState, total: Total) -> None:
        """Take the answer to the prelude."""

    def preludes(self, server: ServerState) -> int:
        """How many preludes are still to come when no cohort changes."""
        return 0


def _written(value: Any) -> Any:
    """A list or a number as the text that stands for it."""
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
