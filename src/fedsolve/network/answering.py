"""The node's side of a conversation: what it is asked, what it answers, what it refuses. No network.

A conversation is a note (a table of JSON values) and bytes, both ways:

    {"ask": "describe", ...}   what are your features and classes?  -> a note
    {"ask": "answer", ...}     an encoded request                    -> an encoded term, or what it needs
    {"ask": "letter", ...}     bytes for a channel of the participant, such as secure sums -> its bytes
    {"ask": "tell", ...}       a message for the people at the node  -> nothing but a receipt

A refusal is an answer too: {"ok": false, "error": KIND, "message": TEXT}. Both sides show a text:
the node all of it, the server one without the names of classes, unless the node shares them.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fedsolve.scoring.evaluation  # noqa: F401  registers the step that scores a model
from fedsolve import container, version
from fedsolve.arrays import Array
from fedsolve.errors import CohortError, DataError, FedsolveError, TermError
from fedsolve.federation.cohort import error_kind
from fedsolve.federation.encoding import decode_request, encode_request, encode_term
from fedsolve.federation.fingerprints import RowsByRun
from fedsolve.federation.messages import Chain, Needs, Request
from fedsolve.federation.participant import ClientData, Guarding, Participant
from fedsolve.labels import FEW_CLASSES, class_list, labels_from_note, labels_like, labels_note, listed
from fedsolve.network.parcels import Note
from fedsolve.network.site_columns import columns_note
from fedsolve.registry import NotAllowed, allowing
from fedsolve.tables.schema import Schema
from fedsolve.version import __version__


@dataclass(frozen=True)
class Event:
    """Something to show to the people at a node.

    over: the run has ended; failed: without a model. barred: this site cannot take part as it is, and waiting
    would not mend it.
    """

    what: Literal["described", "answered", "refused", "told"]
    text: str
    exchange: int | None = None
    kind: str | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    arrays: tuple[str, ...] = ()
    over: bool = False
    failed: bool = False
    barred: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


class Declined(DataError):
    """A refusal with a message for the server, `for_server`, that reveals none of this site's labels."""

    def __init__(self, text: str, for_server: str | None = None, barred: bool = False) -> None:
        super().__init__(text)
        self.for_server = text if for_server is None else for_server
        self.barred = barred


@dataclass(eq=False)
class Answerer:
    """Answers for one participant, and refuses what it must not or cannot answer.

    columns:       those of the table that the rows come from, plain numbers, whose names are sent; or the
                   backbone that made them of images.
    classes:       the only class list this site agrees to; None where it accepts any that has its labels.
    share_classes: whether the names of this site's classes may be sent when the server has no list.
    state:         folder where the model so far is kept, for nodes that start anew for every message.
    networks:      functions "package.module:function" that a request may have imported and called to make a
                   network; None where the request is one's own.
    methods:       likewise, classes "package.module:Class" that a request may have run.
    chain:         the model so far, where sites of one process share it.
    rows:          file that remembers, by run, a digest of the rows answered with: a site whose rows change
                   in the middle of a run refuses to go on, for the sums would be of two different data sets.
    attend:        gives a participant its side of secure sums; nothing is answered in the open then.
    guard:         refuses requests, by raising, before anything is computed.
    states:        folder of this client's share of a method's state, by run and exchange (SCAFFOLD's control
                   variates and the like); in memory when None, and lost with the process.
    device:        where answers are computed, see `backends`.
    """

    name: str
    data: ClientData
    _: KW_ONLY
    columns: Schema | None = None
    classes: Sequence[Any] | None = None
    share_classes: bool = False
    networks: Collection[str] | None = ()
    methods: Collection[str] | None = ()
    chain: Chain | None = None
    scratch: Path | None = None
    state: Path | None = None
    states: Path | None = None
    rows: Path | None = None
    device: str = "cpu"
    attend: Callable[[Participant], object] | None = None
    guard: Guarding | None = None
    show: Callable[[Event], None] | None = None

    def __post_init__(self) -> None:
        self._columns = columns_note(self.columns)
        self._classes = None if self.classes is None else class_list(self.classes)
        self._kept = None if self.state is None else self.state / "model-so-far.safetensors"
        self._remembered = Chain().digest
        self._rows = None if self.rows is None else RowsByRun(self.rows, self.data)
        self._participant = self._new_participant(self.data)
        if self.chain is not None:
            self._participant.memory.chain = self.chain
        if self._kept is not None and self._kept.exists():
            self._recall(self._kept)

    def __len__(self) -> int:
        return len(self.data)

    def reply(self, note: Note, payload: Array) -> tuple[Note, bytes]:
        """The answer to a message; never an exception, so that the other side learns what is wrong."""
        # Echoed in the reply, so they must be of types that can be sent.
        asked = {name: note.get(name) for name in ("run", "exchange") if type(note.get(name)) in (str, int)}
        ways = {
            "describe": self._describe,
            "answer": self._answer,
            "letter": self._letter,
            "tell": self._hear,
        }
        try:
            if "damaged" in note:
                raise TermError(f"'{self.name}' could not read the request: {note['damaged']}")
            check_peer(note)
            ask = str(note.get("ask"))
            if ask not in ways:
                raise TermError(f"'{self.name}' was asked to '{ask}', which it does not know.")
            with allowing(networks=self.networks, methods=self.methods):
                reply, answer = ways[ask](note, payload)
        except Exception as problem:  # whatever it is, the server must hear of it
            if not isinstance(problem, FedsolveError):
                traceback.print_exc()
            kind = error_kind(problem)
            barred = isinstance(problem, Declined) and problem.barred
            self._tell(Event("refused", f"{kind}: {problem}", asked.get("exchange"), barred=barred))
            refusal = {"error": kind, "message": self._for_server(problem)}
            return {"fedsolve": version.PROTOCOL, "ok": False, **asked, **refusal}, b""
        return {"fedsolve": version.PROTOCOL, "ok": True, **asked, **reply}, answer

    def _for_server(self, problem: Exception) -> str:
        """The message that goes to the server with a refusal: no more than this site has agreed to send.

        Messages about data name labels, and those of other software may contain anything.
        """
        about_request = isinstance(problem, TermError | CohortError | NotAllowed)
        if about_request or (self.share_classes and isinstance(problem, FedsolveError)):
            return str(problem)
        if isinstance(problem, Declined):
            return problem.for_server
        return f"'{self.name}' cannot answer ({type(problem).__name__}); its own output says why."

    def _tell(self, event: Event) -> None:
        """Show an event; a full disk or a closed terminal is no reason not to answer."""
        try:
            if self.show is not None:
                self.show(event)
        except Exception:
            traceback.print_exc()

    def _hear(self, note: Note, _: Array) -> tuple[Note, bytes]:
        over, failed, barred = (bool(note.get(word)) for word in ("over", "failed", "barred"))
        self._tell(Event("told", str(note.get("message")), over=over, failed=failed, barred=barred))
        return {}, b""

    def _describe(self, note: Note, _: Array) -> tuple[Note, bytes]:
        self._check_secure(bool(note.get("secure")))
        self._check_schema(note.get("schema"))
        self._check_lists(note)
        data, schema = self._participant.data, self.data.schema
        labels = data.labels
        description: Note = {"name": self.name, "version": __version__, "features": data.width}
        description |= {"classes": None, "columns": self._columns}
        description["targets"] = 1 if labels.ndim == 1 else int(labels.shape[1])
        description["schema"] = None if schema is None else schema.digest
        if note.get("task") == "regression":
            if labels.dtype.kind not in "fiub":
                raise Declined(f"'{self.name}' has targets of type {labels.dtype}; regression needs numbers.")
        elif note.get("classes") is None:
            if not self.share_classes:
                raise Declined(
                    f"the server declared no classes, and '{self.name}' does not send the names of its own. "
                    "Declare them at the server (--classes), or allow it here (--share-classes)."
                )
            own = np.unique(data.own_labels)
            if own.dtype.kind == "f" and len(own) > FEW_CLASSES and np.any(own != np.rint(own)):
                raise Declined(
                    f"the labels of '{self.name}' are numbers, and the server wants classes. Start it with "
                    "--task regression, or with --classes."
                )
            description["classes"] = labels_note(own)
        sent = "" if self._columns is None else "; sent are the names of its columns"
        if self._columns is not None and self._columns.get("extractor"):
            sent = "; sent is which backbone made its features"
        self._tell(Event("described", f"asked by run {note.get('run')}: what this site has{sent}"))
        return description, b""

    def _check_secure(self, asked: bool) -> None:
        """Refuse a server that wants this site's sums in the open when they are secure, or the reverse."""
        if not asked and self.attend is not None:
            raise Declined(
                f"the server wants the sums of '{self.name}' in the open, and this site answers in secure "
                "sums only. Start the server without --plain, or, if it may see them, this site with --plain."
            )
        if asked and self.attend is None:
            told = f"the server makes secure sums, and '{self.name}' was started with --plain."
            raise Declined(f"{told} Start it without.")

    def _check_lists(self, note: Note) -> None:
        """Refuse a class list that this site did not agree to, or that lacks one of its labels."""
        asked = labels_from_note(note.get("classes"))
        if asked is None:
            self._answer_with(self.data.own_labels)
            return
        if self._classes is not None and sorted(map(str, asked)) != sorted(map(str, self._classes)):
            mismatch = f"the server's class list [{listed(asked)}] is not the one '{self.name}' agreed to"
            settle = "Settle it between you."
            raise Declined(f"{mismatch}, [{listed(self._classes)}]. {settle}", f"{mismatch}. {settle}")
        try:
            self._answer_with(labels_like(self.data.own_labels, asked))
        except DataError as problem:
            told = f"'{self.name}' has a label that is not one of the {len(asked)} classes"
            raise Declined(str(problem), f"{told}; its own output says which.") from problem

    def _check_schema(self, asked: Any) -> None:
        """Refuse a server that says otherwise than this site what a row is."""
        own = self.data.schema
        same = "Give all sites and the server the same file (--schema schema.toml), or none."
        if (asked is None) != (own is None):
            told = f"the server has a schema, and '{self.name}' reads its rows without one."
            if asked is None:
                told = f"'{self.name}' reads its rows by a schema, and the server has none."
            raise Declined(f"{told} {same}", barred=True)
        if own is not None and (apart := own.differences(Schema.from_note(asked))):
            told = f"the schema of '{self.name}' is not the server's"
            hidden = f"{told}; its own output says in what they differ. {same}"
            raise Declined(f"{told}: {'; '.join(apart)}. {same}", hidden, barred=True)

    def _answer_with(self, labels: Array) -> None:
        """Take the site's labels in the type that this run's class list has; the next may have another."""
        site = self.data
        if labels.dtype.kind != self._participant.data.labels.dtype.kind:
            data = ClientData(site.source, labels, site.rows, site.weights, schema=site.schema)
            self._participant = self._new_participant(data)

    def _answer(self, note: Note, payload: Array) -> tuple[Note, bytes]:
        started, request = time.perf_counter(), decode_request(payload.tobytes())
        if request.exchange != note.get("exchange"):
            raise TermError(
                f"the message is for exchange {note.get('exchange')}, its request for {request.exchange}."
            )
        self._check_secure(False)
        self._check_run(note)
        answer = self._participant.answer(request)
        self._remember()
        encoded = encode_term(answer)
        if isinstance(answer, Needs):
            text = f"asked for the model from block {answer.have} on"
        else:
            answer.check_finite(self.name)
            text = f"answered {request.kind}, step {request.step}"
        arrays = () if isinstance(answer, Needs) else tuple(sorted(answer.arrays))
        spent = len(payload), len(encoded), time.perf_counter() - started, arrays
        self._tell(Event("answered", text, request.exchange, request.kind, *spent))
        about = {"name": self.name, "kind": request.kind, "digest": request.digest}
        return {**about, "empty": len(self._participant) == 0}, encoded

    def _letter(self, note: Note, payload: Array) -> tuple[Note, bytes]:
        self._check_run(note)
        channel = str(note.get("channel"))
        reply = self._participant.reply(channel, payload.tobytes())
        self._remember()
        return {"name": self.name, "channel": channel}, reply

    def _check_run(self, note: Note) -> None:
        """Refuse a message of a run that this site, as it is now, cannot be part of."""
        self._check_lists(note)
        own = None if self._columns is None else self._columns["digest"]
        if own is not None and note.get("columns") not in (None, own):  # it started with another file
            raise Declined(
                f"the columns of '{self.name}' are not those of the run, or in another order. Give it the "
                "table that it described itself with, and start it again."
            )
        if self._rows is not None and not self._rows.same(str(note.get("run"))):
            raise Declined(
                f"the rows of '{self.name}' are not those with which it took part in this run before. "
                "Put them back, or start a new run."
            )

    def _new_participant(self, data: ClientData) -> Participant:
        made = Participant(self.name, data, scratch=self.scratch, states=self.states, device=self.device)
        made.guard = self.guard
        if self.attend is not None:
            self.attend(made)
        return made

    def _remember(self) -> None:
        """Keep the model so far, where it has changed: as a request that carries all of it."""
        chain = self._participant.memory.chain
        if self._kept is not None and chain.digest != self._remembered:
            self._remembered = chain.digest
            blocks, digest = tuple(chain.blocks), chain.digest
            kept = Request("kept", 0, 0, (), position=len(chain), digest=digest, blocks=blocks)
            container.write_atomically(self._kept, encode_request(kept))

    def _recall(self, path: Path) -> None:
        """Take back the model so far; a file that cannot be read is as good as none."""
        chain = Chain()
        try:
            chain.accept(decode_request(container.read(path)))
        except FedsolveError:
            os.unlink(path)
            return
        self._remembered = chain.digest
        self._participant.memory.chain = chain


def check_peer(note: Note) -> None:
    """Refuse a server of another version."""
    apart = ""
    if (theirs := note.get("fedsolve")) != version.PROTOCOL:
        apart = f"speaks protocol {theirs!r}, this node {version.PROTOCOL}"
    elif (theirs := note.get("version")) != __version__:
        apart = f"runs fedsolve {theirs}, this node {__version__}: methods may differ"
    if apart:
        raise TermError(f"the server {apart}. Install the same fedsolve version on both sides.")
