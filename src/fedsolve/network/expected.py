"""What replies must look like, and reading them.

The first term of a sum has no other to be compared with, and one of the wrong shape would have all others
refused. So the server answers its request itself, for a pretended site of two rows of zeros, and keeps
nothing but names and shapes. Where terms are large it does not; the first two that contradict each other
then stop the run.
"""

from __future__ import annotations

import numpy as np

from fedsolve import registry, version
from fedsolve.arrays import Array
from fedsolve.errors import TermError
from fedsolve.federation.client_data import run_schema
from fedsolve.federation.cohort import Answer, Missing, RunningSum, TermLayout
from fedsolve.federation.encoding import read_term
from fedsolve.federation.engine import Spec
from fedsolve.federation.messages import Chain, Needs, Request
from fedsolve.federation.participant import ClientData, Participant
from fedsolve.network.link import Reply
from fedsolve.network.parcels import Note

_NOBODY = "nobody"
_LARGE = 32 << 20
"""Bytes of one square matrix from which on the server does not answer itself: it would need several."""


def _largest_side(chain: Chain, spec: Spec) -> int:
    """The longest side that a square matrix of this run may have."""
    return registry.method_of(chain.opening).largest_side(spec) if len(chain) else spec.features


def largest_matrix(chain: Chain, spec: Spec) -> int:
    """Bytes of the largest symmetric matrix that an answer of this run may hold, packed."""
    side = _largest_side(chain, spec)
    return 8 * side * (side + 1) // 2


def expected_layout(request: Request, chain: Chain, spec: Spec) -> TermLayout | None:
    """The layout of the terms that answer a request; None where this server cannot answer it, or where that
    would take more memory than the answers do.
    """
    if spec.classes is not None:
        labels: Array = spec.classes[:2]
    else:
        labels = np.zeros(2) if spec.outputs == 1 else np.zeros((2, spec.outputs))
    try:
        if _largest_side(chain, spec) ** 2 * 8 > _LARGE:
            return None
        rows = ClientData(np.zeros((2, spec.features)), labels, schema=run_schema(chain))
        nobody = Participant(_NOBODY, rows)
        with np.errstate(all="ignore"):
            term = nobody.answer(request.starting_at(0, chain) if request.position else request)
    except Exception:  # a site's refusal says more than this one
        return None
    # Without arrays it abstained from training, as a site with less than a batch does; others may not.
    if isinstance(term, Needs) or (request.position and not term.arrays):
        return None
    return TermLayout.of(term, _NOBODY)


def check_reply(name: str, wanted: Note, reply: Reply) -> Array:
    """The bytes of a reply; refused if it cannot be read, is a refusal, or is about something else."""
    if reply.damaged:
        raise TermError(f"the answer of '{name}' cannot be read: {reply.failure}")
    if reply.failure is not None:
        raise Missing("failed", str(reply.failure))
    note = reply.note
    if note.get("fedsolve") != version.PROTOCOL:
        raise Missing("failed", f"it speaks protocol {note.get('fedsolve')}, the server {version.PROTOCOL}")
    if not note.get("ok"):
        raise Missing("failed", f"{note.get('error')}: {note.get('message')}")
    for part, value in {"name": name, **wanted}.items():
        if note.get(part) != value:
            raise TermError(f"'{name}' answered {part} {note.get(part)!r}, asked was {value!r}.")
    if reply.payload is None:
        raise TermError(f"'{name}' answered without the bytes it was asked for.")
    return reply.payload


def read_answer(name: str, request: Request, run: str, sums: RunningSum, reply: Reply) -> Answer | Needs:
    """A member's answer to this very request, ready to be added.

    Anything else that was sent is a `TermError` or `Missing`.
    """
    about = {"exchange": request.exchange, "kind": request.kind, "digest": request.digest}
    try:
        term = read_term(check_reply(name, {"run": run, **about}, reply))
        if isinstance(term, Needs):
            if not 0 <= term.have < request.position:
                raise TermError(
                    f"'{name}' asks for blocks from {term.have} on; there are {request.position}."
                )
            return term
        answer = sums.check(term, name, empty=(name,) if reply.note.get("empty") else ())
        sums.check_fits(answer)
        return answer
    except (TermError, Missing):
        raise
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise TermError(f"the answer of '{name}' cannot be read ({why}).") from problem
