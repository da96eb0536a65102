"""Several runs side by side in the exchanges of one: their requests travel together, and so do their answers.

The runs of candidates that are to be compared share every exchange in this way: k of them take as many
exchanges as the longest, and their bytes together. The blocks of a member are blocks of the outer chain under
its name, so that a client that starts anew is sent them like any others; a member is trained on a part of the
rows where its opening says so. A comparison sends models, and brings back how they do on the rows that they
were not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import canonical_json, with_prefix
from fedsolve.errors import TermError
from fedsolve.federation.folds import PART, Part
from fedsolve.federation.messages import Block, Chain, Request, Term, Total
from fedsolve.federation.method import Run
from fedsolve.federation.participant import TOGETHER, ClientData, Memory, kind_of, step
from fedsolve.scoring.evaluation import models_asked
from fedsolve.scoring.quality import truth_of

TRAINING, COMPARISON = "lockstep", "lockstep-comparison"

_MEMBER = "member"

_OF_ROWS_ALONE = frozenset({"afl", "moments"})
"""Kinds of requests whose answers depend on rows and classes, not on the parameters of a method."""


# -- the server's side -----------------------------------------------------------------------------


def joined(
    outer: Run[Any], asked: Mapping[str, tuple[Run[Any], Request]], clients: tuple[str, ...], together: int
) -> Request:
    """What several members ask, as one request of the outer run.

    together: how many answers each client gives in one at most, over the whole of the outer run.
    """
    for name, (run, _) in asked.items():
        entered = sum(block.note.get(_MEMBER) == name for block in outer.chain.blocks)
        for block in run.chain.blocks[entered:]:
            outer.chain.append(Block({_MEMBER: name, "block": dict(block.note)}, block.arrays))
    requests = {name: request for name, (_, request) in asked.items()}
    notes = {
        name: {"kind": r.kind, "exchange": r.exchange, "step": r.step, "note": dict(r.note)}
        for name, r in requests.items()
    }
    arrays = {f"{name}.{key}": a for name, r in requests.items() for key, a in r.arrays.items()}

    def sizes() -> dict[str, float]:
        return {f"{name}.{key}": size for name, r in requests.items() for key, size in r.sizes().items()}

    deepest = max(request.step for request in requests.values())
    return outer.ask(TRAINING, deepest, clients, {"asked": notes, TOGETHER: together}, arrays, sizes)


def alike(asked: Mapping[str, tuple[Run[Any], Request]]) -> dict[str, str]:
    """For every member, the first member with the same question: the same first sums over the same rows."""
    first: dict[str, str] = {}
    found = {}
    for name, (run, request) in asked.items():
        plain = request.kind in _OF_ROWS_ALONE and request.position == 1
        about = [request.kind, dict(request.note), run.chain.opening.get(PART)]
        found[name] = first.setdefault(canonical_json(about), name) if plain else name
    return found


def share_of(total: Total, name: str) -> Total:
    """One member's share of a total."""
    term, prefix = total.term, f"{name}."
    own = Term(
        with_prefix(term.arrays, prefix),
        with_prefix(term.counts, prefix),
        frozenset(key.removeprefix(prefix) for key in term.symmetric if key.startswith(prefix)),
    )
    return Total(own, total.cohort, total.missing, total.empty)


# -- the client's side -----------------------------------------------------------------------------


@dataclass
class _Known:
    """What a client knows of a run's members: their chains so far, and what their steps keep."""

    digest: str = ""
    chains: dict[str, Chain] = field(default_factory=dict)
    caches: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: dict[Part | None, ClientData] = field(default_factory=dict)

    def part(self, data: ClientData, part: Part | None) -> ClientData:
        """The rows of a part; those of a preparation that changed are chosen anew."""
        if self.parts.get(None) is not data:
            self.parts = {None: data}
        if part is not None and part not in self.parts:
            self.parts[part] = part.of(data)
        return self.parts[part]


def _known_members(memory: Memory) -> _Known:
    """What this client keeps of the members of the run that its chain describes, with blocks that are new."""
    known, chain = memory.cache.get(TRAINING), memory.chain
    if known is None or known.digest not in chain.digests:
        known = memory.cache[TRAINING] = _Known()  # of another run
    for block in chain.blocks[chain.digests.index(known.digest) :]:
        if _MEMBER in block.note:
            member = known.chains.setdefault(block.note[_MEMBER], Chain())
            member.append(Block(block.note["block"], block.arrays))
    known.digest = chain.digest
    return known


@step(TRAINING, over_rows=True)
def answer_members(data: ClientData, request: Request, memory: Memory) -> Term:
    """The answers of all members that ask, each under its name."""
    known, asked = _known_members(memory), request.note["asked"]
    for one in asked.values():
        if not kind_of(one["kind"]).over_rows:
            raise TermError(
                f"requests of kind '{one['kind']}' are no sums over rows: ask them by themselves."
            )
    for name in known.caches.keys() - asked.keys():  # what a member kept that is finished
        del known.caches[name]
    whole = Term()
    for name, one in asked.items():
        chain = known.chains[name]
        part = chain.opening.get(PART)
        rows = known.part(data, None if part is None else Part(**part))
        inner = replace(
            memory,
            chain=chain,
            cache=known.caches.setdefault(name, {}),
            workspace=memory.workspace.within(name),
            budget=memory.budget // len(asked),
        )
        arrays: dict[str, Array] = with_prefix(dict(request.arrays), f"{name}.")
        own = Request(
            one["kind"], one["exchange"], one["step"], (), one["note"], arrays, len(chain), chain.digest
        )
        enter_term(whole, name, kind_of(one["kind"]).step(rows, own, inner))
    return whole


def enter_term(whole: Term, name: str, term: Term) -> None:
    """Add a member's term, under its name, to the term of all."""
    whole.arrays |= {f"{name}.{key}": array for key, array in term.arrays.items()}
    whole.counts |= {f"{name}.{key}": count for key, count in term.counts.items()}
    whole.factors |= {f"{name}.{key}": factor for key, factor in term.factors.items()}
    whole.symmetric |= {f"{name}.{key}" for key in term.symmetric}


@step(COMPARISON, over_rows=True)
def answer_comparison(data: ClientData, request: Request, memory: Memory) -> Term:
    """Of every model, on the rows it was not trained on: weight, mistakes and squared error, by layer.

    Of targets, the square of the squared error in place of mistakes.
    """
    known, term = _known_members(memory), Term()
    for name, model, part in models_asked(request, memory):
        rows = known.part(data, part)
        truth, weights = truth_of(model, rows.own_labels), rows.own_weights
        staged, counts = getattr(model, "staged_decision_function", None), model.classes is not None
        marks = np.zeros((3, getattr(model, "layers", 0) + 1 if staged else 1))
        for span in rows.spans():
            given = rows.features(span)
            scores = staged(given) if staged else model.estimates(given)[None]
            counted = np.ones(scores.shape[1]) if weights is None else weights[span]
            targets = np.eye(model.outputs)[truth[span]] if counts else truth[span]
            losses = np.sum((scores - targets) ** 2, axis=2)
            wrong = np.argmax(scores, axis=2) != truth[span] if counts else losses**2
            marks[0] += counted.sum()
            marks[1] += wrong @ counted
            marks[2] += losses @ counted
        term.arrays[f"{name}.marks"], term.counts[f"{name}.rows"] = marks, len(rows)
    return term
