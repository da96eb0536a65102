"""Methods, their state machines, and the short loop that trains over any federation."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from fedsolve import attributes, container, formats, registry
from fedsolve.container import Array
from fedsolve.errors import DataError, ModelFileError
from fedsolve.federation.engine import Federation, KeepsStates, KnowsHoldings, PlansAhead, Spec, Wraps
from fedsolve.federation.followers import Follower, Followers, Training, hears
from fedsolve.federation.meaning import differing, settled
from fedsolve.federation.messages import Block, Chain, Request, Total
from fedsolve.labels import labels_from_note, labels_note
from fedsolve.model import Model
from fedsolve.parameters import check
from fedsolve.schema import Extractor

M = TypeVar("M", bound=Model)

_BASE = {"method", "spec", "chain", "history", "whose_rows", "_sent", "_asked"}
_HELD = "held"


@dataclass(frozen=True)
class Record:
    """One exchange: who took part, what travelled, how long it took, what was solved.

    bytes_up and bytes_down are payloads summed over clients; catch_up_bytes is what late or
    restarted clients were sent besides. `step` counts what the method counts, layers or rounds; `risk` is
    the regularised risk of the newest classifier; `metrics` is what else the method measured, such as loss
    and drift of a round; `error_bounds` is, by array, how far a secure sum can be from the exact one.
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

    @property
    def layer(self) -> int:
        """`step` under its former name."""
        return self.step

    def as_dict(self) -> dict[str, Any]:
        # Not dataclasses.asdict: its deep copies of every metric would cost more than writing a checkpoint.
        return {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}


class Run(ABC, Generic[M]):
    """A method under way: `request` says what to ask next, `absorb` takes the total, `model` is the end.

    Everything a run knows is in `chain`, `history` and what `stored` gives, so that saving, loading and
    resuming are the same few lines for every method. By default a run stores its own attributes.

    whose_rows: who holds which, as `Holdings.note` has it, where the engine knows; for its checkpoint.
    transient: names of attributes that can be made again and are not stored.
    unlike: places in the notes of requests, as "note.entry", that differ between machines and mean nothing.
    """

    transient: ClassVar[frozenset[str]] = frozenset()
    unlike: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, method: Method[M], spec: Spec) -> None:
        self.method = method
        self.spec = spec
        self.chain = Chain([Block({"opening": opening(method, spec)})])
        self.history: list[Record] = []
        self.whose_rows: dict[str, list[Any]] | None = None
        self._sent = 0
        self._asked = ("", 0, 1)

    @abstractmethod
    def request(self, clients: tuple[str, ...]) -> Request | None:
        """What to ask next, and whom among those present; None when the model is complete."""

    @abstractmethod
    def absorb(self, total: Total) -> None:
        """Take the answer to the last request."""

    @abstractmethod
    def model(self) -> M:
        """The finished model."""

    @property
    def exchanges(self) -> int:
        """How many exchanges the whole run takes when no cohort changes."""
        return 1

    @property
    def stages(self) -> int:
        """How many classifiers there are so far, of a run that has one after every layer."""
        return 0

    def expect(self, trainings: int, besides: int) -> None:
        """Hear how often a run around this one trains with its choice, and what else it exchanges: a budget
        counts that."""

    def choice(self) -> dict[str, Any] | None:
        """What this run chose, to train again with; None where nothing was to be chosen, or is not yet."""
        return None

    def take_choice(self, choice: Mapping[str, Any]) -> None:
        """Begin with what another run of this method chose, before anything is asked."""
        raise NotImplementedError(f"{type(self).__name__} chooses nothing")

    def stored(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The run's own state as named arrays and a note; by default its attributes."""
        own = {name: value for name, value in vars(self).items() if name not in _BASE | self.transient}
        return attributes.to_parts(own, f"the run {type(self).__name__}")

    def take_stored(self, arrays: dict[str, Array], note: dict[str, Any]) -> None:
        """Take back what `stored` gave."""
        vars(self).update(attributes.from_parts(arrays, note))

    def agree(self, more: Mapping[str, Any]) -> None:
        """Add to the opening, before anything is asked: what a run around this one agrees on besides."""
        assert len(self.chain) == 1
        note = self.chain.blocks[0].note["opening"]
        self.chain.truncate(0)
        self.chain.append(Block({"opening": {**note, **more}}))

    def add(self, block: Block) -> Block:
        """Add a block to the model; the one given back, as the clients have it, counts from here on."""
        found = settled(self, block)
        self.chain.append(found)
        return found

    def within(self) -> Mapping[str, Run[Any]]:
        """The runs inside this one that know what their arrays mean, by the prefix of the arrays' names."""
        return {}

    def differs(self, mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> str | None:
        """Why `theirs`, arrays of a block, a request or a model that a server sent, do not mean the same as
        `mine`, which follow from the totals; None where they do.

        By default numbers are equal but for rounding. A method overrides it where others are as good, such as
        factors of one product.
        """
        return differing(mine, theirs)

    def ask(
        self,
        kind: str,
        step: int,
        cohort: tuple[str, ...],
        note: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Array] | None = None,
        sizes: Callable[[], Mapping[str, float]] = dict,
    ) -> Request:
        """The request of this exchange, with the blocks of the model that clients have not been sent.

        sizes: makes, by array, what no number of a term can exceed, where that is known.
        """
        self._asked = (kind, step, len(self.chain))
        return Request(
            kind=kind,
            exchange=len(self.history),
            step=step,
            cohort=cohort,
            note=note or {},
            arrays=arrays or {},
            position=len(self.chain),
            digest=self.chain.digest,
            blocks=tuple(self.chain.blocks[self._sent :]),
            sizes=sizes,
        )

    def record(
        self,
        total: Total,
        kind: str | None = None,
        step: int | None = None,
        position: int | None = None,
        **more: Any,
    ) -> None:
        """Enter the exchange that was asked for last.

        kind and step are the request's unless history should call it otherwise; position is the length of
        the chain that clients now have.
        """
        asked_kind, asked_step, asked_position = self._asked
        self._sent = asked_position if position is None else position
        self.history.append(
            Record(
                exchange=len(self.history),
                kind=asked_kind if kind is None else kind,
                step=asked_step if step is None else step,
                cohort=total.cohort,
                missing=total.missing,
                empty=total.empty,
                bytes_up=total.bytes_up,
                bytes_down=total.bytes_down,
                catch_up_bytes=total.catch_up_bytes,
                seconds=total.seconds,
                error_bounds=total.error_bounds,
                **more,
            )
        )

    # -- saving and resuming ---------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The whole state of the run, exactly."""
        arrays, note = self.stored()
        arrays = {f"state.{name}": array for name, array in arrays.items()}
        for index, block in enumerate(self.chain.blocks):
            arrays.update({f"block.{index}.{name}": a for name, a in block.arrays.items()})
        entries = {
            "checkpoint": formats.CHECKPOINT.version,
            "state": note,
            "blocks": [dict(block.note) for block in self.chain.blocks],
            "sent": self._sent,
            "history": [record.as_dict() for record in self.history],
        }
        return container.to_bytes(arrays, entries | self.held_note(), sealed=True)

    def held_note(self) -> dict[str, Any]:
        """What a checkpoint says of who holds which rows; nothing where nobody knows."""
        return {} if self.whose_rows is None else {_HELD: self.whose_rows}

    def restore(self, data: bytes, path: str) -> None:
        """Continue from `to_bytes`; a checkpoint of another method, setting or version is refused."""
        arrays, note = checkpoint_contents(data, path)
        if note.get("checkpoint") not in formats.CHECKPOINT.read:
            raise ModelFileError(
                f"{path} is not a checkpoint of version {formats.CHECKPOINT.version} "
                f"(found {note.get('checkpoint')!r}). Use the fedsolve that wrote it, or start afresh."
            )
        try:
            self._take_over(arrays, note, path)
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            raise ModelFileError(
                f"checkpoint {path} is incomplete ({type(problem).__name__}: {problem}). Start afresh."
            ) from problem

    def _current(self, first: Block) -> Block:
        """The opening of a stored chain without the parameters that methods no longer have."""
        opening = dict(first.note.get("opening", {}))
        told = opening.get("parameters", {})
        opening["parameters"] = {n: v for n, v in told.items() if n not in self.method.retired}
        return Block({**first.note, "opening": opening}, first.arrays)

    def _take_over(self, arrays: dict[str, Array], note: dict[str, Any], path: str) -> None:
        chain = Chain(
            Block(block_note, container.with_prefix(arrays, f"block.{index}."))
            for index, block_note in enumerate(note["blocks"])
        )
        if not len(chain) or self._current(chain.blocks[0]).digest("") != self.chain.digests[1]:
            raise ModelFileError(
                f"checkpoint {path} belongs to a run with other parameters, classes or features. "
                "Resume with the settings it was started with, or choose another checkpoint path."
            )
        self.chain = chain
        self._sent = note["sent"]
        self.history = [record_from(entry) for entry in note["history"]]
        self.take_stored(container.with_prefix(arrays, "state."), note["state"])


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
    additive: names of arrays whose terms are no larger than their total, as of Gram matrices: secure sums
             send them in half the bytes. Not gradients: their total vanishes while the terms do not.
    recurring: names of other arrays, or beginnings of names that end in ".", whose totals are of like size
             in all exchanges: in half the bytes too, and asked for again in full where that does not do.
    laws:    what holds of the method in every federation.
    friendly: what commands and estimators set where nobody says anything: "auto" for what can be chosen.
    retired: names of former parameters that say nothing of the model; files that have them are still read.
    """

    key: ClassVar[str]
    gathers: ClassVar[bool] = False
    additive: ClassVar[frozenset[str]] = frozenset()
    recurring: ClassVar[frozenset[str]] = frozenset()
    laws: ClassVar[Laws] = Laws()
    friendly: ClassVar[Mapping[str, Any]] = {}
    retired: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        address = registry.define(cls)
        if "key" not in cls.__dict__:
            cls.key = address

    @classmethod
    def trial(cls) -> Self:
        """A small instance, for checks and examples: seconds, not minutes."""
        return cls()

    def __post_init__(self) -> None:
        """Check each parameter by itself; a method adds the rules that join several."""
        check(self)

    @abstractmethod
    def start(self, spec: Spec) -> Run[M]:
        """The state machine of this method for a federation like `spec`."""

    def parameters(self) -> dict[str, Any]:
        """The parameters by name, as JSON values."""
        values: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()}

    def agreement(self) -> dict[str, Any]:
        """What else both sides must agree on before the first answer."""
        return {}

    def check_source(self, source: Extractor | None) -> None:
        """Refuse features of images by a backbone (None: of no images) that this method cannot take."""

    def largest_side(self, spec: Spec) -> int:
        """The longest side of a square matrix that a client may make; an engine plans its memory by it."""
        return spec.features

    def fit(
        self,
        federation: Federation,
        checkpoint: str | os.PathLike[str] | None = None,
        resume: bool = False,
        progress: Callable[[Record, int], None] | Follower | None = None,
        watch: Callable[[Run[M]], Mapping[str, Any]] | Follower | None = None,
        follow: Follower | Sequence[Follower] = (),
    ) -> M:
        """Train over a federation.

        checkpoint: file that holds the state after every exchange, replaced atomically; clients of this
                    process keep their share of it in a folder beside it, NAME.clients.
        resume:     continue from that file if it exists; without it an existing file is not touched.
        progress:   called after every exchange with its record and the expected number of exchanges.
        watch:      called after every exchange with the run; what it gives joins the record's metrics.
        follow:     whoever hears more of it, such as trackers: see `followers`. `progress` and `watch` are
                    followers of one event each, `advanced` and `look`.
        """
        more = (follow,) if isinstance(follow, Follower) else tuple(follow)
        heard = Followers(hears("look", watch), hears("advanced", progress), *more)
        run = self.start(federation.describe())
        if isinstance(federation, KeepsStates):
            # Always told: a run without a checkpoint may not touch the states of one that has one.
            beside = None if checkpoint is None else Path(f"{os.fspath(checkpoint)}.clients")
            federation.keep_states(beside)
        if checkpoint is not None and os.path.exists(checkpoint):
            if not resume:
                raise ModelFileError(
                    f"checkpoint {checkpoint} exists. Pass resume=True to continue from it, or remove it."
                )
            stored = container.read(checkpoint)
            run.restore(stored, str(checkpoint))
            _check_held(federation, stored, str(checkpoint))
        elif resume and checkpoint is None:
            raise DataError("resume=True needs a checkpoint path to resume from.")
        if isinstance(federation, PlansAhead):
            federation.plan(max(1, run.exchanges - len(run.history)), self, len(run.history))
        heard.started(
            Training(
                method=unwrapped(self).key,
                parameters=self.parameters(),
                spec=run.spec,
                clients=federation.clients,
                expected=run.exchanges,
                history=tuple(run.history),
                checkpoint=None if checkpoint is None else os.fspath(checkpoint),
            )
        )
        try:
            for record in exchanges(run, federation, heard):
                if found := heard.look(run):
                    run.history[-1] = dataclasses.replace(record, metrics={**record.metrics, **found})
                if checkpoint is not None:
                    if isinstance(federation, KnowsHoldings) and (holdings := federation.holdings()):
                        run.whose_rows = holdings.note()
                    container.write_atomically(checkpoint, run.to_bytes(), keep_previous=True)
                heard.advanced(run.history[-1], run.exchanges)
            within = federation.federation if isinstance(federation, Wraps) else federation
            model = self.finished(run.model(), within)
        except BaseException as problem:
            heard.stopped(problem)
            raise
        heard.finished(model)
        return model

    def finished(self, model: M, federation: Federation) -> M:
        """The model as `fit` gives it; personalised ones remember a federation of this process."""
        return model


def exchanges(run: Run[M], federation: Federation, heard: Follower | None = None) -> Iterator[Record]:
    """Train step by step: one record after every exchange, until the model is complete.

    heard: told of every request before it goes out.
    """
    while (request := run.request(federation.clients)) is not None:
        if heard is not None:
            heard.asked(request, run.exchanges)
        run.absorb(federation.exchange(request, run.chain))
        yield run.history[-1]


def opening(method: Method[Any], spec: Spec) -> dict[str, Any]:
    """Block 0 of the chain: what both sides must agree on before the first answer."""
    return {
        "method": method.key,
        "parameters": method.parameters(),
        "features": spec.features,
        "outputs": spec.outputs,
        "classes": labels_note(spec.classes),
        **method.agreement(),
    }


def checkpoint_contents(data: bytes, path: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Arrays and note of a checkpoint; a damaged one is refused with the way to the one before."""
    before = container.previous(path)
    remedy = (
        f"The one before it is {before}: move it to {path} and resume."
        if before.exists()
        else "Start afresh."
    )
    return container.from_bytes(data, what=f"checkpoint {path}", error=ModelFileError, remedy=remedy)


def _check_held(federation: Federation, stored: bytes, path: str) -> None:
    """Refuse a checkpoint that was made with other rows; one from before this was noted says nothing."""
    kept = container.note_of(stored).get(_HELD)
    if kept and isinstance(federation, KnowsHoldings) and (holdings := federation.holdings()):
        holdings.check(kept, path)


def unwrapped(method: Method[Any]) -> Method[Any]:
    """The method that others are around, such as `Described` and `Calibrated`."""
    while isinstance(inner := getattr(method, "method", None), Method):
        method = inner
    return method


def opening_classes(chain: Chain) -> Array | None:
    """The class list a participant was told in the opening."""
    return labels_from_note(chain.blocks[0].note["opening"]["classes"])


def record_from(entry: dict[str, Any]) -> Record:
    """The record that `Record.as_dict` described."""
    if "layer" in entry:  # written before a round was told from a layer
        entry["step"] = entry.pop("layer")
    for name in ("cohort", "empty", "solved"):
        entry[name] = tuple(entry[name])
    return Record(**entry)
