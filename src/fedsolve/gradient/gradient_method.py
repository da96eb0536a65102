"""What all gradient methods share: parameters, and the hooks in which the algorithms differ.

A round sends the weights down (`run`), lets every client of a cohort train (`answers`, `group`), and sums
`weight * w` and `weight`. Client side: `prepare`, `losses`, `edit`, `contribute`,
`state`. Server side: `outgoing`, `extras`, `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from fedsolve.checks import check_choice, check_not_negative, check_whole
from fedsolve.container import Array
from fedsolve.errors import DataError
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Term, Total
from fedsolve.federation.method import Laws, Method
from fedsolve.federation.states import State
from fedsolve.gradient import augmentation, networks
from fedsolve.gradient.feedback import Feedback
from fedsolve.gradient.group import ClientGroup
from fedsolve.gradient.learners import SingleNetwork
from fedsolve.gradient.network_model import GradientModel
from fedsolve.gradient.run import GradientRun
from fedsolve.gradient.server_state import ServerState, Weights
from fedsolve.gradient.steps import Step

if TYPE_CHECKING:
    from torch import Tensor


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
    crop, flip:    training images are cut at random from a black margin of `crop` pixels, and mirrored with
                   chance `flip`.
    pixel_mean, pixel_deviation: of each channel, 0 black to 1 white, such as "0.49,0.48,0.45": what images
                   are normalised by, in training and by the model; without them pixels lie in [-1, 1].
    precision, device, seed: float32 or float64, a torch device, and the seed of all random streams.
    """

    laws: ClassVar[Laws] = Laws(partition=None)

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
    feedback_sketch: int = 2048
    track: Literal["drift"] | None = None
    shape: str | None = None
    crop: int = 0
    flip: float = 0.0
    pixel_mean: str | None = None
    pixel_deviation: str | None = None
    precision: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.network, str):
            object.__setattr__(self, "network", networks.register_network(self.network))
        check_whole(1, rounds=self.rounds, epochs=self.epochs, batch=self.batch)
        check_whole(1, feedback_layers=self.feedback_layers)
        check_whole(0, seed=self.seed, feedback_sketch=self.feedback_sketch, crop=self.crop)
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
        augmentation.check_parameters(self)

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

    @classmethod
    def trial(cls) -> Self:
        return cls(network="mlp:6", rounds=min(2, cls.rounds), batch=16)

    def start(self, spec: Spec) -> GradientRun:
        return GradientRun(self, spec)

    # -- the client's side ------------------------------------------------------------------------

    def trains_together(self, features: int, outputs: int) -> bool:
        """Whether clients of one process train side by side: heads of linear layers do."""
        return self.feedback is None and networks.stacked_widths(self.network, features, outputs) is not None

    def passes(self, round_: int) -> int:
        """How often a client goes through its rows in a round."""
        return self.epochs

    def prepare(self, group: ClientGroup) -> None:
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

    def weight(self, group: ClientGroup, client: int) -> float:
        """How much a client counts in the mean."""
        return float(group.sizes[client]) if self.weighting == "size" else 1.0

    def contribute(self, group: ClientGroup, client: int, term: Term) -> None:
        """Add to a client's term what this algorithm sums besides the weights."""

    def state(self, group: ClientGroup, client: int) -> State | None:
        """What a client keeps for its next exchange; None when nothing."""
        return None

    def feedback_part(self, group: ClientGroup) -> Feedback | None:
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
            received=group.start,
            in_place=group.device.type == "cuda",
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
        server.weights = mean

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
