"""Local training: a group of clients, from the weights received to the weights they send back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array, stream
from fedsolve.backends.torch_later import GENERATOR, Tensor, nn, torch
from fedsolve.container import with_prefix
from fedsolve.errors import DataError, DivergenceError
from fedsolve.federation.method import Request, Term, opening_classes
from fedsolve.federation.participant import ClientData, Memory
from fedsolve.federation.states import State, ticket
from fedsolve.gradient import networks
from fedsolve.gradient.batches import GroupBatches, GroupRows, plan_batches, steps_per_epoch
from fedsolve.gradient.feedback import eligible_layers
from fedsolve.gradient.learners import (
    Forward,
    Learners,
    SingleNetwork,
    Stack,
    StackedHeads,
    StackedNetworks,
    handed_over,
    laid_out,
    load,
    on_host,
)
from fedsolve.gradient.networks.heads import weight_names
from fedsolve.gradient.optimisers import Optimiser, clip_norms
from fedsolve.gradient.slots import Recordings, Slot, on_thread_of_size, replays
from fedsolve.gradient.steps import Step
from fedsolve.labels import encode_labels

if TYPE_CHECKING:
    from fedsolve.gradient.feedback import Alignment, Feedback
    from fedsolve.gradient.gradient_method import GradientMethod

PAD_LIMIT = 1024
"""Rows of a batch up to which short ones of heads are padded to the whole."""


class ClientGroup:
    """Clients that train together: one whole network, or many heads or small networks in step.

    round, rate: of this exchange. least: the smallest batch the network can train on.
    rows: what the clients hold. batches: what they train on, step by step.
    sizes: rows of each client. counted: the same by the rows' weights, where they have any.
    start: the weights received, by name, without a client axis.
    received: whatever else the request carried, by its full name. class_counts (clients, classes).
    scratch: for the algorithm, for the length of the exchange.
    """

    _drawn: list[str] | None

    def __init__(
        self,
        method: GradientMethod,
        clients: Sequence[ClientData],
        request: Request,
        memories: Sequence[Memory],
        device: torch.device,
        slot: Slot,
    ) -> None:
        chain = memories[0].chain
        opening = chain.opening
        classes = opening_classes(chain)
        assert classes is not None
        self.method = method
        self.device = device
        self.run: str = chain.digests[1]
        self.exchange = request.exchange
        self.round: int = request.step
        self.rate: float = request.note["rate"]
        self.note = request.note
        self.classes: int = opening["outputs"]
        self.features: int = opening["features"]
        self.dtype: torch.dtype = getattr(torch, method.precision)
        self._slot = slot
        self._spare: nn.Module | None = None
        heads = method.trains_together(self.features, self.classes)
        # A single one is faster with recorded steps.
        self._stacked = heads or (
            len(clients) > 1 and method.trains_together(self.features, self.classes, str(device))
        )
        self._network = None if heads else slot.lend()
        self.least = 2 if self._network is not None and networks.batch_norms(self._network) else 1
        codes = [encode_labels(client.own_labels, classes) for client in clients]
        plans = [
            plan_batches(method, len(client), self.round, memory.name, self.least)
            for client, memory in zip(clients, memories, strict=True)
        ]
        # The clients with the most steps first: those still training are always the leading ones.
        self.order = sorted(range(len(clients)), key=lambda k: (-len(plans[k]), k))
        self.memories = [memories[k] for k in self.order]
        self.clients = [memory.name for memory in self.memories]
        clients, codes = [clients[k] for k in self.order], [codes[k] for k in self.order]
        self.rows = GroupRows(method, clients, self.clients, codes, self.features, device)
        self.sizes, self.counted = self.rows.sizes, self.rows.counted
        self._lay_out([plans[k] for k in self.order])
        counts = np.stack([np.bincount(own, minlength=self.classes) for own in codes])
        self.class_counts = torch.as_tensor(counts, dtype=self.dtype, device=device)
        tensors = {name: self._tensor(array) for name, array in request.arrays.items()}
        self.start, self.buffers = with_prefix(tensors, "w."), with_prefix(tensors, "b.")
        self.received = {name: tensor for name, tensor in tensors.items() if not name.startswith("w.")}
        since: Mapping[str, int] = request.note.get("since", {})
        self._since = [since.get(ticket(self.run, name)) for name in self.clients]
        self._states: list[State | None] = [
            None if exchange is None else memory.states.read(self.run, exchange)
            for memory, exchange in zip(self.memories, self._since, strict=True)
        ]
        self.scratch: dict[str, Any] = {}
        self.agreement: dict[str, Alignment] = {}
        self.learners = self._learners()

    # -- what algorithms use ----------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the trained weights, in the order of `Step.weights`."""
        return self.learners.names

    def weights_now(self) -> dict[str, Tensor]:
        """The weights by name, with a client axis in a stack."""
        return {n: weight.detach() for n, weight in zip(self.names, self.learners.weights, strict=True)}

    def weights_of(self, client: int) -> dict[str, Tensor]:
        """One client's weights by name."""
        return self.client_of(self.weights_now(), client)

    def nothing(self) -> dict[str, Tensor]:
        """Zeros for every weight: the state of a client that takes part for the first time."""
        return {name: torch.zeros_like(self.start[name]) for name in self.names}

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Set these weights, by name, with a client axis in a stack."""
        with torch.no_grad():
            for name, weight in self.weights_now().items():
                if name in values:
                    weight.copy_(values[name])

    def state(self, prefix: str, default: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The clients' states `prefix.NAME` for every weight, with a client axis in a stack.

        default: by weight name, without a client axis; for clients that have no state yet.
        """
        states = {}
        for name in self.names:
            kept = [(state or {}).get(f"{prefix}.{name}", default[name]) for state in self._states]
            parts = [self._tensor(own) for own in kept]
            states[name] = torch.stack(parts) if self.learners.stacked else parts[0]
        return states

    def own_state(self, client: int) -> State | None:
        """What this client ended its last exchange with; None when it takes part for the first time."""
        return self._states[client] or None

    def reference(
        self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> Forward:
        """A frozen network with these weights and buffers, in eval mode.

        buffers: those that the client started the round with when None.
        """
        return self.learners.reference(weights, self.buffers if buffers is None else buffers)

    def own_buffers(self, prefix: str) -> dict[str, Tensor]:
        """The buffers `prefix.NAME` of a single network's client; what it started with where it kept none."""
        own = with_prefix(self._states[0] or {}, f"{prefix}.")
        return {n: self._tensor(own[n]) if n in own else buffer for n, buffer in self.buffers.items()}

    def first_model(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and buffers that the run began with: every participant can draw them from the seed."""
        if self.round == 0:
            return self.start, self.buffers
        network = self.method.build(self.features, self.classes, first=True).to(self.device)
        weights = {name: value.detach() for name, value in networks.float_parameters(network).items()}
        return weights, networks.float_buffers(network)

    def buffers_now(self) -> dict[str, Tensor]:
        """The running statistics of a single network; a stack has none."""
        learners = self.learners
        return networks.float_buffers(learners.network) if isinstance(learners, SingleNetwork) else {}

    def snapshot(self, client: int, weights: str, buffers: str) -> State:
        """A client's model of this moment as a state: weights and running statistics by these prefixes."""
        found = {f"{weights}.{name}": on_host(value) for name, value in self.weights_of(client).items()}
        return found | {f"{buffers}.{name}": on_host(value) for name, value in self.buffers_now().items()}

    def drawn(self, number: int) -> dict[str, Tensor]:
        """What the method draws for a step (`GradientMethod.draw`), fractions in the group's precision."""
        drawn = {name: torch.as_tensor(array) for name, array in self.method.draw(self, number).items()}
        self._drawn = list(drawn) if self._drawn is None else self._drawn
        if list(drawn) != self._drawn:
            raise DataError(
                f"{type(self.method).__name__}.draw gives {list(drawn)} for one step and {self._drawn} for "
                "another. Give every step of a round the same names, in the same order."
            )
        return {
            name: (values.to(self.dtype) if values.is_floating_point() else values).to(self.device)
            for name, values in drawn.items()
        }

    def generator(self, client: int, role: str) -> np.random.Generator:
        """A random stream of this client and round that nothing else draws from."""
        return stream(self.method.seed, role, self.clients[client], self.round)

    def client_of(self, values: Mapping[str, Tensor], client: int) -> dict[str, Tensor]:
        """One client's part of per-client tensors by weight name."""
        return {name: v[client] if self.learners.stacked else v for name, v in values.items()}

    def whole(self, client: int) -> nn.Module:
        """A network with this client's weights and running statistics, in eval mode, until the next call."""
        if self._spare is None:
            self._spare = self._slot.lend().eval()
        load(self._spare, self.start | self.weights_of(client), self.buffers_now())
        return self._spare

    def again(
        self,
        method: GradientMethod,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] | None = None,
        *,
        rate: float | None = None,
        plans: list[list[Array]] | None = None,
    ) -> ClientGroup:
        """The same clients once more in this round, with weights and an objective of their own.

        Nothing of it is sent, and `start` is still what was received. Its random streams are its own, so the
        training that is sent is the same with or without it.

        method:  its hooks, epochs and optimiser. weights: where to start, by name, with a client axis in a
                 stack. buffers: of a single network; those received when None. rate: this round's when None.
        plans:   batches of each client, as positions among its rows; the method's own when None. A stack
                 then takes as many steps for everybody: a client without a batch has an empty one.
        """
        part = copy.copy(self)
        part.method, part.scratch, part._spare = method, {}, None
        # Feedback alignment is for the weights that are sent.
        part.note = {**self.note, "feedback": ()}
        part.rate = self.rate if rate is None else rate
        if isinstance(self.learners, Stack):
            part.learners = copy.copy(self.learners)
            part.learners.weights = [weights[name].clone() for name in self.names]
        else:
            part._network = self._slot.lend()
            load(part._network, self.start | dict(weights), self.buffers if buffers is None else buffers)
            part.learners = SingleNetwork(part._network, self._slot.lend)
        if plans is None:
            owned = zip(self.sizes, self.clients, strict=True)
            plans = [plan_batches(method, int(rows), self.round, name, self.least) for rows, name in owned]
        else:
            steps = max(map(len, plans))
            plans = [[*plan, *[np.zeros(0, dtype=np.int64)] * (steps - len(plan))] for plan in plans]
        part._lay_out(plans)
        return part

    # -- training ---------------------------------------------------------------------------------

    def train(self) -> None:
        """All local steps of all clients of the group."""
        method = self.method
        with ExitStack() as stack:
            draws = self._draws()
            if draws:
                # Dropout draws from a generator that all threads share: one client at a time.
                stack.enter_context(GENERATOR)
                stack.enter_context(
                    torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
                )
                torch.manual_seed(int(self.generator(0, "dropout").integers(2**63)))
            method.prepare(self)
            single = not self.learners.stacked and not self.rows.weighted
            # What the host draws would be recorded with the step; the GPU draws anew in every replay.
            replayed = draws <= {"cuda"} and method.recordable and single and replays(self.device)
            kept = (self._recordings() if replayed else None) or Recordings(self._slot.pool)
            feedback = self._feedback(kept, replayed)
            if feedback is not None:
                stack.enter_context(feedback)
            advance = self._advance(self._optimiser(kept))
            if replayed:
                advance = kept.stepper(advance, self.batches.lengths(0), feedback is not None)
            for number in range(int(self.steps.max(initial=0))):
                active = int(np.sum(self.steps > number))
                step = Step(self, number, active)
                advance(step)
                if feedback is not None:
                    feedback.rescale()
                assert step.losses is not None
                with torch.no_grad():
                    self.losses[:active, number] = step.losses
                    self._count(step, self._last[:active] <= number)
            if feedback is not None and method.track is not None:
                self.agreement = feedback.agreement()
        self._check_losses()

    def _recordings(self) -> Recordings | None:
        """What was recorded in this slot with other clients, ready for this one, where it can last."""
        if not self.method.uses_tensors_only:
            return None
        assert self._network is not None
        parts: dict[str, dict[str, Any]] = {
            part: getattr(self, part) for part in ("start", "received", "scratch")
        }
        tensors = {(part, n): value for part, own in parts.items() for n, value in own.items()}
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            return None
        kept = self._slot.recordings.setdefault(id(self._network), Recordings(self._slot.pool))
        # From here on the group's tensors are those that recorded steps read, with this client's values.
        for (part, name), tensor in kept.receive(self.method, tensors).items():
            parts[part][name] = tensor
        return kept

    def _optimiser(self, kept: Recordings) -> Optimiser:
        """The optimiser, afresh; its tensors stay where recorded steps find them."""
        if kept.optimiser is not None:
            kept.optimiser.begin(self.rate)
            return kept.optimiser
        method = self.method
        rate: float | Tensor = self.rate
        if method.optimiser == "sgd" and not self.learners.stacked and replays(self.device):
            # A number would be recorded with the step; the arithmetic is the same for steps that are not.
            rate = torch.tensor(rate, dtype=self.dtype, device=self.device)
        kept.optimiser = Optimiser(
            method.optimiser, rate, method.momentum, method.weight_decay, method.nesterov
        )
        return kept.optimiser

    def _feedback(self, kept: Recordings, replayed: bool) -> Feedback | None:
        """Feedback alignment in this round's layers; recorded steps read a B for every layer there is."""
        layers: Sequence[str] = self.note.get("feedback", ())
        if not layers:
            return None
        learners = self.learners
        assert isinstance(learners, SingleNetwork)
        possible = eligible_layers(learners.network) if replayed else layers
        feedback = kept.feedback(lambda: self.method.feedback_part(self, possible))
        if replayed:
            feedback.choose(layers)
        return feedback

    def _advance(self, optimiser: Optimiser) -> Callable[[Step], None]:
        """What a step does to the weights, as a function."""
        method, stacked = self.method, self.learners.stacked
        names = method.moved(self)
        places = [place for place, name in enumerate(self.names) if name in names]
        if not places:
            raise DataError(
                f"method '{method.key}' moves no weight of network '{method.network}', which has no base "
                "beneath its classifier. Take a network with a hidden layer."
            )

        def advance(step: Step) -> None:
            method.gradients(step)
            with torch.no_grad():
                method.edit(step)
                gradients = [step.gradients[place] for place in places]
                if method.clip is not None:
                    clip_norms(gradients, method.clip, stacked)
                weights = self.learners.weights
                moved = [weights[place][: step.active] if stacked else weights[place] for place in places]
                optimiser.step(moved, gradients, step.active if stacked else None)

        return advance

    def _draws(self) -> set[str]:
        """Which generators the network itself draws from, as dropout does."""
        if self._network is None or self._stacked or not self.steps[0]:
            return set()
        network, inputs = self._network, self.batches.at(0, 1)[0][0]
        if not replays(self.device):
            return networks.draws(network, inputs)
        return on_thread_of_size(len(inputs), lambda: networks.draws(network, inputs))

    def _count(self, step: Step, final: Array) -> None:
        """Correct predictions of the clients that are in their last epoch."""
        if step.output is None or not final.any():
            return
        hits = (step.output.logits.argmax(dim=-1) == step.targets) & step.real_rows()
        counts = hits.sum(dim=1)
        if not final.all():
            counts = counts * torch.as_tensor(final, device=self.device)
        self.correct[: step.active] += counts

    def _check_losses(self) -> None:
        if bool(torch.isfinite(self.losses).all()):
            return
        client, number = (int(i) for i in torch.nonzero(~torch.isfinite(self.losses))[0])
        remedy = f"Lower rate (now {self.rate:g}) or set clip."
        if number == 0:  # no step has been taken yet
            remedy += " If it is the first round, look for very large features, or set precision='float64'."
        raise DivergenceError(
            f"the loss of '{self.clients[client]}' became {self.losses[client, number].item()} in round "
            f"{self.round}, step {number}. {remedy}"
        )

    def _learners(self) -> Learners:
        """The networks, loaded with what was received."""
        if self._network is None:
            widths = networks.stacked_widths(self.method.network, self.features, self.classes)
            assert widths is not None
            # Not the order of the request: a message that was encoded has its arrays sorted.
            names = weight_names(len(widths) - 1)
            return StackedHeads(names, self._stacks(names))
        if self.method.buffers == "local" and not self._stacked:
            self.buffers = self.own_buffers("buffer")
        load(self._network, self.start, self.buffers)
        single = SingleNetwork(self._network, self._slot.lend)
        if not self._stacked:
            return single
        return StackedNetworks(single.names, self._stacks(single.names), self._network)

    def _lay_out(self, plans: Sequence[Sequence[Array]]) -> None:
        """Make ready for these batches."""
        # Heads always have the same shape, so that a client's result does not depend on whom it trains with.
        same = self._network is None and self.method.batch <= PAD_LIMIT
        tall = self.method.batch if same else None
        self.batches = GroupBatches(self.rows, self.method, plans, self.round, self._stacked, tall)
        self._drawn = None
        self.steps = self.batches.steps
        # The step with which each client's last pass begins.
        self._last: Array = np.maximum(self.steps - steps_per_epoch(self.method, self.sizes, self.least), 0)
        shape = len(plans), max(1, int(self.steps.max()))
        self.losses = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.correct = torch.zeros(len(plans), dtype=torch.int64, device=self.device)

    def _stacks(self, names: list[str]) -> list[Tensor]:
        """The weights received, once for every client."""
        starts = [self.start[name] for name in names]
        return [start.expand(len(self.clients), *start.shape).clone() for start in starts]

    def _tensor(self, array: Array | Tensor) -> Tensor:
        tensor = torch.as_tensor(array, dtype=self.dtype).to(self.device)
        # The kernels of a depthwise convolution leave the layout to its input.
        return tensor if tensor.shape[1:2] == (1,) else laid_out(tensor)

    # -- answering --------------------------------------------------------------------------------

    def terms(self) -> list[Term]:
        """The clients' terms in the order in which they were given; their states are filed."""
        method = self.method
        losses = self.losses.double().cpu().numpy()
        correct = self.correct.cpu().numpy()
        seen = [sum(self.batches.lengths(place, int(first))) for place, first in enumerate(self._last)]
        # A stack of networks is summed on its device: ten times a million weights stay there.
        sent = handed_over if isinstance(self.learners, StackedNetworks) else on_host
        stay = method.withheld(self)
        weights: dict[str, Any] = {n: sent(w) for n, w in self.weights_now().items() if n not in stay}
        terms = [Term() for _ in self.order]
        for place, client in enumerate(self.order):
            term = Term(counts={"rows": int(self.sizes[place]), "trained": int(self.steps[place] > 0)})
            if self.steps[place] > 0:
                weight = float(method.weight(self, place))
                for name, array in weights.items():
                    term.arrays[f"w.{name}"] = array[place] if self.learners.stacked else array
                    term.factors[f"w.{name}"] = weight
                if method.buffers == "average":
                    for name, value in self.buffers_now().items():
                        term.arrays[f"b.{name}"] = on_host(value)
                        term.factors[f"b.{name}"] = weight
                term.arrays["weight"] = np.array([weight])
                term.arrays["loss"] = np.array([losses[place, : self.steps[place]].mean()])
                term.counts |= {"correct": int(correct[place]), "seen": seen[place]}
                method.contribute(self, place, term)
            terms[client] = term
            if method.stateful:
                self._file_state(place)
        return terms

    def _file_state(self, place: int) -> None:
        state = dict(self._states[place] or {})
        if self.steps[place] > 0:
            state = dict((self.method.state(self, place) if self.method.keeps else None) or {})
            if self.method.buffers == "local":
                state |= {f"buffer.{name}": on_host(value) for name, value in self.buffers_now().items()}
        self.memories[place].states.write(self.run, self.exchange, state, self._since[place])
