"""Methods, their state machines and the loop that trains them; messages can be imported from here, too."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, singledispatch
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np

from fedsolve import container, registry, version
from fedsolve.arrays import Array
from fedsolve.backends.activations import ACTIVATIONS, activate
from fedsolve.errors import ModelFileError
from fedsolve.federation.engine import Federation, Follow, Spec
from fedsolve.federation.folds import Part
from fedsolve.federation.meaning import JUDGE
from fedsolve.federation.messages import Block, Chain, Request, Term, Total
from fedsolve.labels import labels_from_note, labels_note
from fedsolve.model import Model
from fedsolve.parameters import check
from fedsolve.tables.schema import Extractor, Schema

__all__ = ["Block", "Chain", "Federation", "Method", "Record", "Request", "Run", "Spec", "Term", "Total"]

M = TypeVar("M", bound=Model)

_BASE = {"method", "spec", "chain", "history", "offset", "member", "_sent", "_asked"}


@dataclass(frozen=True)
class Record:
    """One exchange: who took part, what travelled, how long it took, what was solved.

    bytes_up and bytes_down are payloads summed over clients; catch_up_bytes is what late or restarted clients
    were sent besides. `step` counts what the method counts, layers or rounds; `risk` is the regularised risk
    of the newest classifier; `metrics` is what else the method measured, such as loss and drift of a round;
    `error_bounds` and `digest` are those of the total; `stage` is the part of the run that it belongs to.
    """

    exchange: int
    kind: str
    step: int
    cohort: tuple[str, ...]
    missing: Mapping[str, str]
    empty: tuple[str, ...]
    bytes_up: int
    bytes_down: int
    catch_up_bytes: int
    seconds: float
    risk: float | None = None
    accuracy: float | None = None
    solved: tuple[str, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error_bounds: Mapping[str, float] = field(default_factory=dict)
    stage: str = "training"
    digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        # Not dataclasses.asdict: its deep copies of every metric would cost more than writing a checkpoint.
        return dict(vars(self))


SCORES = "scores"
"""Of a record's metrics: means and spread of the scores of the rows that a model was trained on."""


@singledispatch
def bounds(run: Any, note: Mapping[str, Any]) -> dict[str, float]:
    """What no number of a client's answer to this request can exceed, by array, where that is known."""
    return {}


class Run(ABC, Generic[M]):
    """A method under way: `request` says what to ask next, `absorb` takes the total, `model` is the end.

    Everything a run knows is in `chain`, `history` and what `stored` gives, so that saving, loading and
    resuming are the same few lines for every method. By default a run stores its own attributes.

    offset: the number of its first exchange, where others came before it in a `StagedRun`.
    member: its name, where several runs share their exchanges.
    transient: names of attributes that can be made again and are not stored.
    threads: how many BLAS may use; None sets no limit.
    outlook: what comes now, in words, until it was told.
    """

    threads: int | None = None
    outlook: str = ""
    transient: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, method: Method[M], spec: Spec) -> None:
        self.method = method
        self.spec = spec
        self.chain = Chain([Block({"opening": opening(method, spec)})])
        self.history: list[Record] = []
        self.offset = 0
        self.member: str | None = None
        self._sent = 0
        self._asked = Request("", 0, 0, (), position=1)

    @abstractmethod
    def request(self, clients: tuple[str, ...]) -> Request | None:
        """What to ask next, and whom among those present; None when the model is complete."""

    @abstractmethod
    def absorb(self, total: Total) -> None:
        """Take the answer to the last request."""

    def model(self) -> M:
        """The finished model; runs that prepare, choose or calibrate give none."""
        raise AssertionError(f"{type(self).__name__} gives no model")

    @property
    def exchanges(self) -> int:
        """How many exchanges the whole run takes when no cohort changes."""
        return 1

    @property
    def expected(self) -> int:
        """How many exchanges are likely, of a run that ends when it has converged."""
        return self.exchanges

    @property
    def depth(self) -> int:
        """How many classifiers there are so far, where a run has one after every layer."""
        return 0

    def stored(self) -> dict[str, Any]:
        """The run's own state; by default its attributes."""
        return {name: value for name, value in vars(self).items() if name not in _BASE | self.transient}

    def take_stored(self, kept: dict[str, Any]) -> None:
        """Take back what `stored` gave."""
        vars(self).update(kept)

    def agree(self, more: Mapping[str, Any]) -> None:
        """Add to the opening what a run around this one agrees on, before anything is asked."""
        assert len(self.chain.blocks) == 1
        self.chain = Chain([Block({"opening": {**self.chain.opening, **more}})])

    def add(self, block: Block) -> Block:
        """Add a block to the model. Use the one that is returned, which is the clients' version of it."""
        judge = JUDGE.get()
        found = block if judge is None else judge(self, block)
        self.chain.append(found)
        return found

    def ask(
        self,
        kind: str,
        step: int,
        cohort: tuple[str, ...],
        note: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Array] | None = None,
        sizes: Callable[[], Mapping[str, float]] | None = None,
    ) -> Request:
        """The request of this exchange, with the blocks of the model that clients do not have yet.

        sizes: gives, by array, an upper bound on the numbers of a term; `bounds` by default.
        """
        self._asked = Request(
            kind=kind,
            exchange=self.offset + len(self.history),
            step=step,
            cohort=cohort,
            note=note or {},
            arrays=arrays or {},
            position=len(self.chain.blocks),
            digest=self.chain.digests[-1],
            blocks=tuple(self.chain.blocks[self._sent :]),
            sizes=partial(bounds, self, note or {}) if sizes is None else sizes,
        )
        return self._asked

    def record(
        self,
        total: Total,
        kind: str | None = None,
        step: int | None = None,
        position: int | None = None,
        **more: Any,
    ) -> None:
        """Add the last exchange to the history.

        kind and step are the request's unless history should call it otherwise; position is the length of
        the chain that clients now have.
        """
        # What bounds its numbers knows the run: kept, it would keep the run in memory after its end.
        self._asked = asked = dataclasses.replace(self._asked, arrays={}, blocks=(), sizes=dict)
        self._sent = asked.position if position is None else position
        self.history.append(
            Record(
                exchange=self.offset + len(self.history),
                kind=asked.kind if kind is None else kind,
                step=asked.step if step is None else step,
                **{name: known for name, known in vars(total).items() if name in Record.__annotations__},
                **more,
            )
        )

    # -- saving and resuming ---------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The checkpoint."""
        arrays, note = container.to_parts(self.parts(), f"the run {type(self).__name__}")
        return container.to_bytes(arrays, {"checkpoint": version.CHECKPOINT, **note}, sealed=True)

    def restore(self, data: bytes, path: str) -> None:
        """Continue from `to_bytes`; a checkpoint of another method, setting or version is refused."""
        before = f"{path}{container.PREVIOUS}"
        remedy = f"The one before it is {before}: move it to {path} and resume."
        remedy = remedy if os.path.exists(before) else "Start afresh."
        what = f"checkpoint {path}"
        arrays, note = container.from_bytes(data, what=what, error=ModelFileError, remedy=remedy)
        found = note.pop("checkpoint", None)
        if found != version.CHECKPOINT:
            raise ModelFileError(
                f"{path} is not a checkpoint of version {version.CHECKPOINT} (found {found!r}). Use the "
                "fedsolve that wrote it, or start afresh."
            )
        with container.undamaged(what, "Start afresh."):
            self.take_parts(container.from_parts(arrays, note), path)

    def parts(self) -> dict[str, Any]:
        """The whole state, exactly: whatever `container.to_parts` can store."""
        return {
            "state": self.stored(),
            "blocks": [[dict(block.note), dict(block.arrays)] for block in self.chain.blocks],
            "sent": self._sent,
            "history": [record.as_dict() for record in self.history],
        }

    def take_parts(self, kept: dict[str, Any], path: str) -> None:
        """Take back what `parts` gave; path: for messages."""
        chain = Chain(Block(note, arrays) for note, arrays in kept["blocks"])
        if not len(chain) or chain.digests[1] != self.chain.digests[1]:
            raise ModelFileError(
                f"checkpoint {path} belongs to a run with other parameters, classes or features. "
                "Resume with the settings it was started with, or choose another checkpoint path."
            )
        self.chain = chain
        self._sent = kept["sent"]
        self.history = [Record(**entry) for entry in kept["history"]]
        self.take_stored(kept["state"])


@dataclass(frozen=True)
class Laws:
    """What a method promises of every federation; `fedsolve.testing.check_method` holds it to that.

    partition: how far scores may differ, as a share of the largest, when the same rows are divided among
        other clients; None where the model depends on who owns which rows.
    empty: whether a client without rows changes nothing.
    """

    partition: float | None = 1e-9
    empty: bool = True


class Method(ABC, Generic[M]):
    """Frozen parameters of a method; subclasses are frozen dataclasses, their fields made by `parameter`.

    key:     under which name others find the method; `register` gives it, or it is the class's address.
    gathers: whether the server needs each client's answer by itself, not only their sum.
    multilabel: whether it learns several labels a row, each 0 or 1, as targets of least squares.
    additive: names of arrays whose terms are no larger than their total, as of Gram matrices: secure sums
             send them in half the bytes. Not gradients: their total vanishes while the terms do not.
    recurring: names of other arrays, or beginnings of names that end in ".", whose totals are of like size
             in all exchanges: in half the bytes too, and asked for again in full where that does not do.
    preparation: what becomes of a table's numbers before a step sees them; "public": by the schema alone.
    chooses: whether parameters, or the method itself, are still to be chosen among `candidates`.
    laws:    what holds of the method in every federation.
    travels: how often and what, in words ("exchanges", "up", "down"), where `register` is not told.
    recommended: defaults of commands and estimators, such as "auto" for what can be chosen.
    unnamed: parameters, each with a value that it is not named with among `parameters()`.
    """

    key: ClassVar[str]
    gathers: ClassVar[bool] = False
    multilabel: ClassVar[bool] = False
    additive: ClassVar[frozenset[str]] = frozenset()
    recurring: ClassVar[frozenset[str]] = frozenset()
    preparation: ClassVar[Literal["standardise", "fill", "none", "public"]] = "standardise"
    chooses: ClassVar[bool] = False
    laws: ClassVar[Laws] = Laws()
    travels: ClassVar[Mapping[str, str]] = {}
    recommended: ClassVar[Mapping[str, Any]] = {}
    unnamed: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        address = registry.define(cls)
        if "key" not in cls.__dict__:
            cls.key = address

    @classmethod
    def trial(cls) -> Self:
        """A small instance, for checks and examples: seconds, not minutes."""
        return cls()

    __post_init__ = check
    """Checks each parameter; a method adds the rules that involve several of them."""

    @abstractmethod
    def start(self, spec: Spec) -> Run[M]:
        """The state machine of this method for a federation like `spec`."""

    def parameters(self) -> dict[str, Any]:
        """The parameters by name, as JSON values."""
        values: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in values.items()
            if name not in self.unnamed or value != self.unnamed[name]
        }

    def agreement(self) -> dict[str, Any]:
        """What else both sides must agree on before the first answer."""
        return {}

    def check_source(self, source: Extractor | None) -> None:
        """Refuse image features of a backbone that this method cannot use; None: no image features."""

    def largest_side(self, spec: Spec) -> int:
        """The longest side of a square matrix that a client may make; an engine plans its memory by it."""
        return spec.features

    def traffic(self, spec: Spec, rows: int) -> tuple[int, int]:
        """How many numbers a client sends besides AFL's sums, and receives; zero where it is not known."""
        return 0, 0

    def afforded(self, spec: Spec) -> Method[M]:
        """This method, with any limits of time and memory turned into sizes; asked of methods that choose."""
        return self

    def candidates(self, spec: Spec, rows: int) -> Sequence[Method[M]]:
        """The candidates for so many rows in all, the cheapest first; itself if nothing is to be chosen."""
        return (self,)

    def scaled(self, share: float) -> Method[M]:
        """This candidate as it is tried on a share of the rows: a smaller one, if it can be."""
        return self

    def fit(
        self,
        federation: Federation,
        checkpoint: str | os.PathLike[str] | None = None,
        resume: bool = False,
        follow: Follow = (),
        *,
        schema: Schema | None = None,
        standardise: bool = True,
        class_weight: Literal["balanced"] | None = None,
        calibrate: bool = False,
        biases: bool | None = None,
        part: Part | None = None,
    ) -> M:
        """Train over a federation.

        checkpoint: file that holds the state after every exchange, replaced atomically; clients of this
                    process keep their share of it in a folder beside it, NAME.clients.
        resume:     continue from that file if it exists; without it an existing file is not touched.
        follow:     followers of the training, such as trackers (see `engine`), and functions that are
                    called after every exchange with its record and the expected number of exchanges.

        The others say what comes before and after the training: see `Recipe`.
        """
        from fedsolve.federation.recipe import Recipe

        recipe = Recipe(self, schema, standardise, class_weight, calibrate, biases, part)
        return recipe.fit(federation, checkpoint, resume, follow)


def opening(method: Method[Any], spec: Spec) -> dict[str, Any]:
    """Block 0 of the chain: what both sides must agree on before the first answer."""
    return {
        "method": method.key,
        "parameters": method.parameters(),
        "features": spec.features,
        "outputs": spec.outputs,
        "classes": labels_note(spec.classes),
        **({"labels": list(spec.labels)} if spec.labels else {}),
        **method.agreement(),
    }


def opening_classes(chain: Chain) -> Array | None:
    """The class list a participant was told in the opening."""
    return labels_from_note(chain.opening["classes"])


def flat_activations(parameters: Mapping[str, Any], size: float = 1.0) -> list[tuple[str, str, float]]:
    """Parameters whose activation has one value on a whole stretch of what rows make it see, in the run's
    precision, so that a unit may be equal for all rows but one: (parameter, activation, gain).

    size: root mean square of the rows' numbers, of standardised ones 1; as far as the first activation lets
          it through: one that is bounded shows signs of large numbers, not how large they are.
    """
    given, found = parameters.get("gain"), []
    zero = parameters.get("zero_activation", parameters.get("activation"))
    seen = max(1.0, *np.abs(activate(zero, np.array([-size, size])))) if zero in ACTIVATIONS else size
    for name, chosen in parameters.items():
        gain = float(given) if isinstance(given, int | float) and name != "zero_activation" else 1.0
        told = name.endswith("activation") and not name.startswith("refinement")  # which stays at its client
        if told and chosen in ACTIVATIONS:
            reach = max(4.0, np.sqrt(3.0) * gain * seen)  # three deviations of a random projection
            inputs = np.linspace(-reach, reach, 2001).astype(parameters.get("precision", "float64"))
            if np.any(np.diff(activate(chosen, inputs)) == 0):
                found.append((name, chosen, gain))
    return found
