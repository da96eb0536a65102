"""The model a gradient method gives: a network by name, with its weights and running statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from fedsolve import registry
from fedsolve.arrays import Array
from fedsolve.backends.torch_later import torch
from fedsolve.container import with_prefix
from fedsolve.errors import DataError, TermError
from fedsolve.federation.states import State, StateStore, ticket
from fedsolve.gradient import networks
from fedsolve.gradient.augmentation import ImageInputs
from fedsolve.labels import encode_labels, labels_from_note
from fedsolve.model import Model

if TYPE_CHECKING:
    from fedsolve.federation.participant import ClientData

_ROWS = 2048


class GradientModel(Model):
    """A classifier whose scores are a network's logits.

    run: digest of the training run, under which its clients keep their states; None where it does not matter.
    kept: which exchange's state each client keeps of it, by the client's `ticket`.
    """

    family: ClassVar[str] = "gradient"
    further: ClassVar[tuple[str, ...]] = ()
    """Arrays that models of a class have besides weights and buffers."""
    logits = True

    def __init__(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        classes: Array | None,
        features: int,
        parameters: Mapping[str, Any],
        run: str | None = None,
        kept: Mapping[str, int] | None = None,
    ) -> None:
        assert classes is not None
        super().__init__(features, classes, len(classes))
        self.weights = dict(weights)
        self.buffers = dict(buffers)
        self.parameters = dict(parameters)
        self.run = run
        self.kept = dict(kept or {})

    def network(self) -> Any:
        """The torch module with this model's weights, in eval mode."""
        from fedsolve.gradient.learners import load

        parameters = self.parameters
        network = networks.build_network(
            parameters["network"],
            self.features,
            self.outputs,
            dtype=parameters["precision"],
            shape=networks.shape_from(parameters["shape"]),
        )
        tensors = ({n: torch.as_tensor(a) for n, a in part.items()} for part in (self.weights, self.buffers))
        load(network, *tensors)
        return network.eval().to(self.device)

    def representation(self, features: Any) -> tuple[Array, Array]:
        """The input of the last layer (rows, width), and the scores."""
        passes = list(self._passes(self._checked(features)))
        if not passes:
            return np.zeros((0, 0)), np.zeros((0, self.outputs))
        return np.concatenate([seen for seen, _ in passes]), np.concatenate([scores for _, scores in passes])

    def placed(self, device: str) -> Self:
        return super().placed(device.removeprefix("torch:"))

    def images(self, device: str, precision: str | None = None) -> ImageInputs:
        """How rows become inputs of the network, on this device and in this precision."""
        return ImageInputs(self.parameters, self.features, device, precision)

    def _passes(self, rows: Array) -> Iterator[tuple[Array, Array]]:
        """Features of the last layer and scores, some thousand rows at a time."""
        network, images = self.network(), self.images(self.device)
        for start in range(0, len(rows), _ROWS):
            # A copy: stored features are mapped read-only, and torch wants to write.
            part = torch.from_numpy(np.array(rows[start : start + _ROWS])).to(self.device)
            with torch.no_grad():
                seen, scores = networks.features_of(network, images.read(part))
            yield seen.double().cpu().numpy(), scores.double().cpu().numpy()

    def method(self) -> Any:
        """The method that trained this model, with its parameters."""
        kind = registry.method_class(self.parameters["method"])
        names = {field.name for field in dataclasses.fields(kind)}
        # A model may know more than its method, such as the backbone that gave its rows.
        return kind(**{name: value for name, value in self.parameters.items() if name in names})

    @property
    def personalises(self) -> bool:  # type: ignore[override]
        return not self.private and hasattr(registry.method_class(self.parameters["method"]), "personal")

    @property
    def predicts(self) -> bool:  # type: ignore[override]
        kind = registry.method_class(self.parameters["method"])
        return self.private or getattr(kind, "shares_a_predictor", True)

    @property
    def caveat(self) -> str | None:
        # Code from outside is not run for a remark: such a model is read without it.
        is_foreign = registry.is_foreign(self.parameters["method"])
        known = None if is_foreign else super().caveat
        kept = not self.private and self.parameters.get("buffers") == "local"
        # As layers of torch call them; a network's other buffers may be constants.
        if known or not kept or not any(n.rpartition(".")[2].startswith("running_") for n in self.buffers):
            return known
        personal = not is_foreign and self.personalises
        own = " make a client's model of it ('fedsolve personalise')," if personal else ""
        return (
            "the running statistics of BatchNorm in this shared model were never trained: with buffers "
            f"'local' they stay with the clients, and it predicts badly by itself. To predict,{own} train "
            "with --buffers average, or take a network without them, such as resnet18:gn."
        )

    def own_model(self, data: ClientData, states: StateStore | None = None) -> Model:
        """The predictor of the client that owns `data`, from what it kept of the run, if anything."""
        if not self.personalises:
            return super().own_model(data, states)
        data.check_width(self.features, "the model")
        if data.weights is not None:
            raise DataError("gradient methods do not take sample weights; leave them out, or use APFL.")
        assert self.classes is not None
        encode_labels(data.own_labels, self.classes)
        predictor: Model = self.method().personal(self, data, self._state(states))
        return predictor

    def _state(self, states: StateStore | None) -> State | None:
        """What a client kept of the run; None if it took no part, an error if it is lost."""
        if states is None or self.run is None:
            return None
        place = self.kept.get(ticket(self.run, states.client))
        if place is None:
            return None
        try:
            return states.read(self.run, place) or None
        except TermError:
            raise DataError(
                f"what '{states.client}' kept of the run is gone: later runs took its place, or it is in a "
                "folder, beside a checkpoint or the site's own. Name that folder "
                "(Participant(..., states=FOLDER)), or train again."
            ) from None

    def scores(self, features: Array) -> Array:
        passes = [scores for _, scores in self._passes(features)]
        return np.concatenate([np.zeros((0, self.outputs)), *passes])

    def arrays(self) -> dict[str, Array]:
        named = {f"weights.{name}": array for name, array in self.weights.items()}
        named |= {f"buffers.{name}": array for name, array in self.buffers.items()}
        return named | {name: getattr(self, name) for name in self.further}

    def note(self) -> dict[str, Any]:
        run = {} if self.run is None else {"run": self.run, "kept": dict(sorted(self.kept.items()))}
        return {"parameters": self.parameters} | run

    @classmethod
    def restored(cls, arrays: dict[str, Array], note: dict[str, Any]) -> GradientModel:
        model = cls(
            with_prefix(arrays, "weights."),
            with_prefix(arrays, "buffers."),
            labels_from_note(note["classes"]),
            note["features"],
            note["parameters"],
            note.get("run"),
            note.get("kept"),
        )
        for name in cls.further:
            setattr(model, name, arrays[name])
        return model


class PersonalGradientModel(GradientModel):
    """One client's own network."""

    family: ClassVar[str] = "gradient-personal"
    private: ClassVar[bool] = True

    @classmethod
    def of(
        cls, shared: GradientModel, weights: Mapping[str, Array], buffers: Mapping[str, Array] | None = None
    ) -> Self:
        """The network of `shared` with these weights and buffers in place of its own; the rest is shared."""
        model = cls(
            shared.weights | dict(weights),
            shared.buffers | dict(buffers or {}),
            shared.classes,
            shared.features,
            shared.parameters,
            shared.run,
        )
        model.device = shared.device
        return model
