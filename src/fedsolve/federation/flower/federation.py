"""The engine over a network: carries a request to nodes and sums their terms as they are taken.

Answers wait at the SuperLink and are taken one by one in the order of names, so that the result does
not depend on who was first, and one answer at a time is in this process. A request is safe to repeat:
a node that started anew in the middle of an exchange is asked again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import fedsolve
from fedsolve.checks import check_choice, check_whole
from fedsolve.container import Array
from fedsolve.errors import CohortError, DataError, TermError
from fedsolve.federation.encoding import PackedTerm, encode_request, read_term
from fedsolve.federation.engine import Spec
from fedsolve.federation.flower.expected import expected_layout
from fedsolve.federation.flower.link import Link, Node, Reply, check_sent
from fedsolve.federation.flower.sums import Misfit, PackedSum
from fedsolve.federation.flower.wire import LARGEST, PROTOCOL, Note
from fedsolve.federation.messages import Chain, Needs, Request, Total
from fedsolve.labels import class_list, labels_from_note, labels_note

if TYPE_CHECKING:
    from fedsolve.model import Model

Policy = Literal["wait", "continue", "error"]

_TRIES = 3
"""How often an answer that arrives damaged is asked for."""

_LOST = 50
"""How often an answer may turn out not to be there: a network that breaks, not a site that never sends."""

_REMOVED = "not registered any more"
_LONGEST_NAME = 200
_LARGEST_DESCRIPTION = 1 << 20
_LONGEST_WORD = 2000


@dataclass
class CohortReport:
    """Who took part in one exchange, and what became of the others.

    failed: answered with a refusal or with something unusable. late: did not answer in time.
    absent: was not there. again: how often a node had to be asked again.
    """

    exchange: int
    kind: str
    asked: tuple[str, ...]
    answered: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    again: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def missing(self) -> dict[str, str]:
        return dict(sorted({**self.failed, **self.late, **self.absent}.items()))

    @property
    def coverage(self) -> float:
        """Share of those asked that are in the sum."""
        return len(self.answered) / len(self.asked) if self.asked else 0.0


@dataclass
class _Member:
    """A node that belongs: its name, where it is, and since when it has been up."""

    name: str
    node: Node
    online: bool = True


@dataclass
class _Asked:
    """An open question to a member: `message` is None while it cannot be reached, `since` that time."""

    message: str | None
    activation: str
    request: Request
    since: float = 0.0
    catch_up: int = 0
    needed: int = 0
    tries: int = 1
    lost: int = 0


class FlowerFederation:
    """Nodes on a SuperLink.

    clients:   how many must be there before the first exchange.
    classes:   the class list; when None it is the union of what the sites agree to send.
    missing:   "wait" for a node that is not there; "continue" without it (exact for those present) as
               long as `min_clients` answered; "error": stop at the first failure. A refusal is a
               failure; with "wait" it stops the run too, for waiting would not mend it.
    patience:  seconds to wait for an answer: then "continue" goes on without it, the others stop.
    grace:     seconds that a node which left in the middle of an exchange has to come back.
    interval:  seconds between two looks for an answer.
    spec:      what was agreed in an earlier part of this run, when it is resumed.
    """

    prefers: Literal["bytes", "exchanges"] = "exchanges"

    def __init__(
        self,
        link: Link,
        *,
        clients: int = 1,
        classes: Sequence[Any] | None = None,
        task: Literal["classification", "regression"] = "classification",
        missing: Policy = "wait",
        min_clients: int = 1,
        patience: float | None = None,
        grace: float = 5.0,
        interval: float = 0.05,
        spec: Spec | None = None,
        report: Callable[[CohortReport], None] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        check_whole(1, clients=clients, min_clients=min_clients)
        if min_clients > clients:
            raise DataError(
                f"min_clients is {min_clients}, but only {clients} clients are waited for at the start. "
                "Lower the one or raise the other."
            )
        check_choice("missing", missing, ("wait", "continue", "error"))
        check_choice("task", task, ("classification", "regression"))
        self.task = task
        self.missing = missing
        self.min_clients = min_clients
        self.reports: list[CohortReport] = []
        self.run = secrets.token_hex(8)
        self._link = link
        self.expected = clients
        self.given = None if classes is None else class_list(classes)
        self._patience = patience
        self._grace = grace
        self._interval = interval
        self._report = report or (lambda report: None)
        self._tell = tell or (lambda text: None)
        self._spec = spec
        self._declared = spec.classes if spec is not None else None
        if classes is not None:
            self._declared = self.given
        self._members: dict[str, _Member] = {}
        self._describing: dict[int, tuple[str, str]] = {}
        self._refused: dict[int, tuple[str, str]] = {}
        self._doubles: dict[int, str] = {}
        self._told: set[str] = set()
        self._described: dict[str, Note] = {}
        self._looked = 0.0
        self._told_unknown = False

    # -- who is there ----------------------------------------------------------------------------

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the members, sorted; with "continue" those that are there now."""
        deadline = self._deadline()
        self._look()
        self._admit(self._interval)
        while True:
            present = sorted(name for name, member in self._members.items() if member.online)
            chosen = present if self.missing == "continue" else sorted(self._members)
            if len(chosen) >= self.min_clients and (self.missing != "error" or present == chosen):
                return tuple(chosen)
            self._tell_once(
                f"waiting: {len(chosen)} of at least {self.min_clients} members are connected "
                f"({', '.join(present) or 'none'})"
            )
            if time.monotonic() > deadline or self.missing == "error":
                raise CohortError(
                    f"{len(present)} of {len(self._members)} members are connected "
                    f"({', '.join(present) or 'none'}), at least {self.min_clients} needed. "
                    "Start them and resume."
                )
            time.sleep(self._interval)
            self._look(0.5)
            self._admit(0.0)

    def describe(self, patience: float | None = None) -> Spec:
        """What a method needs to know; waits until enough clients are there and agree."""
        patience = self._patience if patience is None else patience
        deadline = float("inf") if patience is None else time.monotonic() + patience
        told = -1
        self._link.expect(_LARGEST_DESCRIPTION)
        while True:
            self._look(0.2)
            self._admit(0.0)
            if len(self._members) >= self.expected:
                break
            if len(self._members) != told:
                told = len(self._members)
                self._tell(f"{told} of {self.expected} clients are there")
            if time.monotonic() > deadline:
                raise CohortError(
                    f"{len(self._members)} of {self.expected} clients came within {patience:g} s. "
                    f"{self._why_refused()}Start them and resume."
                )
            time.sleep(self._interval)
        if self._spec is None:
            self._spec = self._agree()
        return self._spec

    def enrol(self, members: Mapping[str, Node]) -> None:
        """Make these nodes members without asking them; their answers must bear their names."""
        self._members = {name: _Member(name, node) for name, node in members.items()}

    def _agree(self) -> Spec:
        notes = [self._described[name] for name in sorted(self._members)]
        features = int(notes[0]["features"])
        if self.task == "regression":
            return Spec(features, None, int(notes[0]["targets"]), self.prefers)
        if self._declared is None:
            found = [labels_from_note(note["classes"]) for note in notes]
            self._declared = class_list(None, [labels for labels in found if labels is not None])
        return Spec(features, self._declared, len(self._declared), self.prefers)

    def _look(self, every: float = 0.0) -> None:
        """See which nodes are there now, at most once in `every` seconds."""
        if time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
        nodes = self._link.nodes()
        registered = self._link.registered()
        for name in [] if registered is None else sorted(self._members.keys() - registered):
            del self._members[name]
            self._described.pop(name, None)
            self._tell(f"'{name}' is not registered any more; the run goes on without it")
        for member in self._members.values():
            member.online = member.node.id in nodes
            if member.online:
                member.node = nodes[member.node.id]
        known = {member.node.id for member in self._members.values()}
        for node in nodes.values():
            # One that started anew may have been mended, or has not heard what it was asked.
            heard = self._describing.get(node.id) or self._refused.get(node.id)
            earlier = self._members.get(self._doubles.get(node.id, ""))
            if earlier is not None and not earlier.online:
                # It was taken for a second site of a name that is free again.
                heard = self._describing.get(node.id)
                del self._doubles[node.id]
            if node.id not in known and (heard is None or heard[1] != node.activation):
                self._refused.pop(node.id, None)
                self._describing[node.id] = (self._ask_about(node), node.activation)

    def _ask_about(self, node: Node) -> str:
        note = self._note("describe") | {"task": self.task, "classes": self._classes_note()}
        names = self._link.send([node.id], note, b"")
        check_sent(names, [node.id])
        return names[0]

    def _admit(self, seconds: float) -> None:
        """Take in the nodes that have said what they have; wait `seconds` at most for those asked."""
        until = time.monotonic() + seconds
        while self._describing:
            nodes = self._link.nodes()
            for number, (message, activation) in list(self._describing.items()):
                reply = self._link.receive(message, lambda: True)
                if reply is None:
                    continue
                del self._describing[number]
                if number in nodes:
                    self._take_in(nodes[number], reply)
                elif not reply.absent:
                    self._take_in(Node(number, activation), reply)
            if time.monotonic() >= until:
                return
            time.sleep(self._interval)

    def _take_in(self, node: Node, reply: Reply) -> None:
        """Make a node a member, or say on both sides why not."""
        if reply.absent:
            return
        name = node.name or _plain(reply.note.get("name") or node.id)
        why = reply.failure
        if why is None and not reply.note.get("ok"):
            why = _plain(f"{reply.note.get('error')}: {reply.note.get('message')}")
        else:
            why = why or self._unfit(name, reply.note)
            if why is not None:
                self._link.send([node.id], self._note("tell") | {"message": f"refused: {why}"}, b"")
        if why is not None:
            if name in self._members:
                self._doubles[node.id] = name
            self._refused[node.id] = (f"'{name}': {why}", node.activation)
            self._tell(f"'{name}' is not taken in: {why}")
            return
        self._members[name] = _Member(name, node)
        self._described[name] = reply.note
        self._tell(f"'{name}' is there")

    def _unfit(self, name: str, note: Note) -> str | None:
        """Why this site, with this description, cannot be a member."""
        if note.get("fedsolve") != PROTOCOL:
            return f"it speaks protocol {_plain(note.get('fedsolve'))}, the server {PROTOCOL}"
        if note.get("name") != name:
            return (
                f"it calls itself '{_plain(note.get('name'))}', but its key is registered as '{name}'. "
                f"Start it with --name {name}, or register its key under the other name."
            )
        if not 0 < len(name) <= _LONGEST_NAME or "@" in name:
            return f"its name has {len(name)} characters or an @ in it. Start it with a short --name."
        for part in ("features", "targets"):
            if type(note.get(part)) is not int or not 0 < note[part] < 2**31:
                return (
                    f"it describes its {part} as {_plain(note.get(part))}, which is not a number of columns."
                )
        return self._misfit(name, note)

    def _misfit(self, name: str, note: Note) -> str | None:
        if name in self._members and self._members[name].online:
            return f"two sites are called '{name}'; names must differ."
        widths = {int(other["features"]) for other in self._described.values()}
        if self._spec is not None:
            widths = {self._spec.features}
        if widths and int(note["features"]) not in widths:
            return (
                f"'{name}' has {note['features']} features per row, the others {sorted(widths)}. "
                "All must use the same backbone."
            )
        targets = {int(other["targets"]) for other in self._described.values()}
        if self.task == "regression" and targets and int(note["targets"]) not in targets:
            return f"'{name}' has {note['targets']} targets, the others {sorted(targets)}."
        if self.task == "classification" and self._declared is None:
            notes = [*self._described.values(), note]
            try:
                found = [labels_from_note(other.get("classes")) for other in notes]
                known = [labels for labels in found if labels is not None]
                if found[-1] is None or len({labels.dtype.kind in "US" for labels in known}) > 1:
                    raise DataError("it names none, or names where others have numbers")
                np.unique(np.concatenate(known))
            except Exception as problem:  # it may have sent anything
                return f"the classes that '{name}' sent cannot be used ({_plain(problem)})."
        return None

    def _why_refused(self) -> str:
        why = "; ".join(text for text, _ in self._refused.values())
        return f"Not taken in: {why} " if why else ""

    # -- one exchange ----------------------------------------------------------------------------

    def exchange(self, request: Request, chain: Chain) -> Total:
        """Carry the request to its cohort and return the sum of the terms, added in the order of names."""
        started = time.monotonic()
        if request.exchange == 0 and not self._members:
            self.describe()
        cohort = sorted(request.cohort)
        report = CohortReport(request.exchange, request.kind, tuple(cohort))
        self.reports.append(report)
        known = [name for name in cohort if name in self._members]
        report.absent.update(dict.fromkeys(set(cohort) - set(known), "not part of the federation"))
        asked = self._ask_all(known, request)
        sums, empty = self._sums(request, chain), []
        bytes_up = catch_up = 0
        for name in known:
            try:
                found = self._await(name, asked, report, chain, sums, self._deadline(started))
            except _Missing as missing:
                getattr(report, missing.kind)[name] = str(missing)
                if self.missing != "continue" and str(missing) != _REMOVED:
                    self._finish(report, started)
                    raise self._stopped(name, report) from missing
                continue
            finally:
                catch_up += asked[name].catch_up
            term, is_empty = found
            sums.add(term, name)
            bytes_up += term.nbytes
            del term, found  # the next answer takes the place of this one
            report.answered.append(name)
            if is_empty:
                empty.append(name)
        self._finish(report, started)
        if len(report.answered) < max(1, self.min_clients):
            raise self._too_few(report)
        return Total(
            term=sums.take(),
            cohort=tuple(report.answered),
            missing=report.missing,
            empty=tuple(empty),
            bytes_up=bytes_up,
            bytes_down=request.nbytes * len(report.answered),
            catch_up_bytes=catch_up,
            seconds=report.seconds,
        )

    def _sums(self, request: Request, chain: Chain) -> PackedSum:
        """An empty sum that knows what it may be given."""
        layout = expected_layout(request, chain, self.describe() if self._spec is None else self._spec)
        if layout is None and not self._told_unknown:
            self._told_unknown = True
            self._tell(f"what answers to '{request.kind}' look like is known from the first one only")
        self._link.expect(LARGEST if layout is None else layout.nbytes)
        return PackedSum(layout)

    def evaluate(self, model: Model) -> float:
        """Federated accuracy (R² for regression): each client scores its own rows and sends sums."""
        from fedsolve.federation.evaluation import evaluate

        return evaluate(self, model)

    def tell_all(self, message: str, over: bool = False) -> None:
        """Show the people at every node a message; `over` says that the run has ended."""
        self._look()
        online = [member.node.id for member in self._members.values() if member.online]
        if online:
            note = self._note("tell") | {"message": message, "over": over}
            for number, name in zip(online, self._link.send(online, note, b""), strict=True):
                # Nobody need have heard it, but whoever is there now has a moment to take it.
                until = time.monotonic() + self._grace
                while self._link.receive(name, lambda: False) is None and time.monotonic() < until:
                    if number not in self._link.nodes():
                        break
                    time.sleep(self._interval)

    def _ask_all(self, names: Sequence[str], request: Request) -> dict[str, _Asked]:
        self._look()
        there = [name for name in names if name in self._members and self._members[name].online]
        messages = dict(zip(there, self._send(there, request), strict=True))
        return {name: _Asked(messages.get(name), self._activation(name), request) for name in names}

    def _activation(self, name: str) -> str:
        member = self._members.get(name)
        return "" if member is None else member.node.activation

    def _send(self, names: Sequence[str], request: Request) -> list[str]:
        if not names:
            return []
        nodes = [self._members[name].node.id for name in names]
        note = self._note("answer") | {"exchange": request.exchange, "classes": self._classes_note()}
        messages = self._link.send(nodes, note, encode_request(request))
        check_sent(messages, nodes)
        return messages

    def _await(
        self,
        name: str,
        asked: dict[str, _Asked],
        report: CohortReport,
        chain: Chain,
        sums: PackedSum,
        deadline: float,
    ) -> tuple[PackedTerm, bool]:
        """This member's term, checked; or `_Missing`."""
        mine = asked[name]
        began = time.monotonic()
        while True:
            member = self._members.get(name)
            if member is None:
                raise _Missing("absent", _REMOVED)
            reply = None
            if mine.message is not None:
                reply = self._link.receive(mine.message, lambda: self._same(name, mine))
            if reply is not None and reply.absent:
                mine.message, mine.since, reply = None, time.monotonic(), None
                member.online = False  # until the next look
                mine.lost += 1
                if mine.lost > _LOST:
                    raise _Missing("failed", f"its answer was lost {mine.lost} times on the way")
            if reply is not None:
                try:
                    answer = self._read(name, reply, mine.request, sums)
                except TermError as problem:
                    if mine.tries >= _TRIES:
                        if isinstance(problem, Misfit) and len(report.answered) == 1:
                            # One of two is wrong: to go on with either may be to go on with the wrong one.
                            raise self._undecided(report.answered[0], name, report, problem) from problem
                        raise _Missing("failed", f"TermError: {_plain(problem)}") from problem
                    mine.tries += 1
                    self._ask_again(name, mine, report)
                    continue
                if isinstance(answer, Needs):
                    self._bring_up(name, mine, answer, chain)
                    continue
                return answer, bool(reply.note.get("empty"))
            if time.monotonic() > deadline:
                waited = f"within {self._patience:g} s"
                if member.online:
                    raise _Missing("late", f"too late: no answer {waited}")
                raise _Missing("absent", f"not connected {waited}")
            self._look(0.5)
            self._admit(0.0)  # one that comes back may be another node
            for other in asked:
                self._follow(other, asked[other], report)
            if time.monotonic() - began > self._grace:
                state = "it has not answered yet" if member.online else "it is not connected"
                self._tell_once(f"exchange {report.exchange + 1}: waiting for '{name}': {state}")
            gone = mine.message is None and time.monotonic() - mine.since > self._grace
            if gone and self.missing != "wait":
                raise _Missing("absent", "not connected")
            time.sleep(self._interval)

    def _follow(self, name: str, asked: _Asked, report: CohortReport) -> None:
        """Ask a member again that started anew since it was asked; it does not know of the question."""
        member = self._members.get(name)
        if member is None or name in report.missing or name in report.answered or not member.online:
            return
        if asked.message is None or member.node.activation != asked.activation:
            self._ask_again(name, asked, report)

    def _ask_again(self, name: str, asked: _Asked, report: CohortReport) -> None:
        asked.message = self._send([name], asked.request)[0]
        asked.activation = self._members[name].node.activation
        report.again[name] = report.again.get(name, 0) + 1

    def _bring_up(self, name: str, asked: _Asked, needs: Needs, chain: Chain) -> None:
        """Send a member the model blocks that it lacks."""
        # Twice at most: that a node holds blocks of another run shows only when newer ones do not
        # continue them; then it asks for everything. A restart may begin this anew.
        asked.needed += 1
        if asked.needed > 2 * _TRIES:
            raise _Missing(
                "failed", f"it still lacks model blocks from {needs.have} on after being sent them"
            )
        asked.request = asked.request.starting_at(needs.have, chain)
        asked.catch_up += asked.request.nbytes
        asked.message = self._send([name], asked.request)[0]
        asked.activation = self._members[name].node.activation

    def _read(self, name: str, reply: Reply, request: Request, sums: PackedSum) -> PackedTerm | Needs:
        """The answer of a reply, fit to be added; whatever was sent, else `TermError` or `_Missing`."""
        try:
            answer = self._checked(name, reply, request)
            if isinstance(answer, PackedTerm):
                sums.check(answer, name, bool(reply.note.get("empty")))
            return answer
        except (TermError, _Missing):
            raise
        except Exception as problem:
            raise TermError(
                f"the answer of '{name}' cannot be read ({type(problem).__name__}: {problem})."
            ) from problem

    def _checked(self, name: str, reply: Reply, request: Request) -> PackedTerm | Needs:
        """The answer of a reply to this very request; anything else is refused by name."""
        if reply.damaged:
            raise TermError(f"the answer of '{name}' cannot be read: {reply.failure}")
        if reply.failure is not None:
            raise _Missing("failed", _plain(reply.failure))
        note = reply.note
        if note.get("fedsolve") != PROTOCOL:
            spoken = _plain(note.get("fedsolve"))
            raise _Missing("failed", f"it speaks protocol {spoken}, the server {PROTOCOL}")
        if not note.get("ok"):
            raise _Missing("failed", _plain(f"{note.get('error')}: {note.get('message')}"))
        wanted: Note = {
            "name": name,
            "run": self.run,
            "exchange": request.exchange,
            "kind": request.kind,
            "digest": request.digest,
        }
        for part, value in wanted.items():
            if note.get(part) != value:
                raise TermError(f"'{name}' answered {part} {note.get(part)!r}, asked was {value!r}.")
        if reply.payload is None:
            raise TermError(f"'{name}' answered without a term.")
        answer = read_term(reply.payload)
        if isinstance(answer, Needs) and not 0 <= answer.have < request.position:
            raise TermError(
                f"'{name}' asks for model blocks from {answer.have} on; there are {request.position}."
            )
        return answer

    def _same(self, name: str, asked: _Asked) -> bool:
        self._look(0.5)
        member = self._members.get(name)
        return member is not None and member.online and member.node.activation == asked.activation

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def _finish(self, report: CohortReport, started: float) -> None:
        report.seconds = time.monotonic() - started
        self._report(report)

    def _stopped(self, name: str, report: CohortReport) -> Exception:
        why = report.missing[name]
        if why.startswith("DataError: "):
            return DataError(f"participant '{name}': {why.removeprefix('DataError: ')}")
        return CohortError(
            f"participant '{name}' failed in exchange {report.exchange} ({report.kind}): {why.rstrip('.')}. "
            "Mend it and resume, or let the federation go on without it (missing='continue')."
        )

    def _undecided(self, first: str, second: str, report: CohortReport, problem: TermError) -> CohortError:
        return CohortError(
            f"exchange {report.exchange} ({report.kind}): '{first}' and '{second}' contradict each other; "
            f"which of them is wrong is not known ({_plain(problem)}). Mend one of them and resume."
        )

    def _too_few(self, report: CohortReport) -> CohortError:
        reasons = "; ".join(f"'{name}': {why.rstrip('.')}" for name, why in [*report.missing.items()][:3])
        return CohortError(
            f"exchange {report.exchange} ({report.kind}): {len(report.answered)} of {len(report.asked)} "
            f"participants answered, at least {self.min_clients} needed. {reasons or 'Nobody was asked'}. "
            "Mend them and resume, or lower min_clients."
        )

    def _deadline(self, started: float | None = None) -> float:
        if self._patience is None:
            return float("inf")
        return (time.monotonic() if started is None else started) + self._patience

    def _note(self, ask: str) -> Note:
        return {"fedsolve": PROTOCOL, "version": fedsolve.__version__, "ask": ask, "run": self.run}

    def _classes_note(self) -> Any:
        declared: Array | None = self._declared
        return labels_note(declared)

    def __repr__(self) -> str:
        return f"FlowerFederation({len(self._members)} clients, missing={self.missing!r})"


def _plain(said: Any) -> str:
    """What a site said, as one line that a terminal shows as it is."""
    text = " ".join(str(said).split())
    return "".join(sign if sign.isprintable() else "?" for sign in text[:_LONGEST_WORD])


class _Missing(Exception):
    """A member that is not in the sum; `kind` is the field of the report that says why."""

    def __init__(self, kind: Literal["failed", "late", "absent"], why: str) -> None:
        super().__init__(why)
        self.kind = kind
