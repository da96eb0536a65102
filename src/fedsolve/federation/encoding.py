"""The exact binary form of requests and terms, for any network that carries them.

Safetensors with a version field; symmetric arrays are packed as their upper triangle.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedsolve import version
from fedsolve.arrays import Array
from fedsolve.container import from_bytes, to_bytes, with_prefix
from fedsolve.errors import TermError
from fedsolve.federation.messages import Block, Needs, Request, Term, check_triangle

_FIELDS: dict[str, type] = {
    "kind": str,
    "digest": str,
    "note": dict,
    **dict.fromkeys(("exchange", "step", "position"), int),
}
"""The fields of a request that travel as they are, with their types."""


def encode_request(request: Request) -> bytes:
    """The exact bytes of a request; `cohort` stays with the server."""
    arrays = {f"array.{name}": array for name, array in request.arrays.items()}
    for index, block in enumerate(request.blocks):
        arrays.update({f"block.{index}.{name}": array for name, array in block.arrays.items()})
    return to_bytes(
        arrays,
        {
            "wire": version.MESSAGE,
            "message": "request",
            **{name: getattr(request, name) for name in _FIELDS},
            "note": dict(request.note),
            "blocks": [dict(block.note) for block in request.blocks],
        },
    )


def decode_request(data: bytes) -> Request:
    """The request of `encode_request`, refused when damaged or of another version."""
    arrays, note = from_bytes(data, what="this request", error=TermError)
    with _complete(note, "request"):
        fields = [(name, note[name], kind) for name, kind in (_FIELDS | {"blocks": list}).items()]
        fields += [("blocks", block, dict) for block in note["blocks"]]
        for name, value, kind in fields:  # numbers end up in the names of files
            fits = isinstance(value, kind) and not isinstance(value, bool)
            if not fits or (kind is int and value < 0):
                wanted = "whole number" if kind is int else kind.__name__
                raise TermError(f"'{name}' of this request must be a {wanted}; got {ascii(value)[:80]}.")
        return Request(
            **{name: note[name] for name in _FIELDS},
            cohort=(),
            arrays=with_prefix(arrays, "array."),
            blocks=tuple(
                Block(block_note, with_prefix(arrays, f"block.{index}."))
                for index, block_note in enumerate(note["blocks"])
            ),
        )


def encode_term(term: Term | Needs) -> bytes:
    """The exact bytes of a participant's answer, symmetric arrays packed."""
    if isinstance(term, Needs):
        return to_bytes({}, {"wire": version.MESSAGE, "message": "needs", "have": term.have})
    return to_bytes(
        term.packed().arrays,
        {
            "wire": version.MESSAGE,
            "message": "term",
            "counts": term.counts,
            "symmetric": sorted(term.symmetric),
            "factors": term.factors,
        },
    )


def read_term(data: Array) -> Term | Needs:
    """The answer of `encode_term` as views of its bytes (uint8): nothing is unpacked or copied.

    Refused when damaged or of another version; arrays are in the order of their names.
    """
    arrays, note = from_bytes(data, what="this term", error=TermError, remedy="Send it again.", copied=False)
    with _complete(note, "term", "needs"):
        if note["message"] == "needs":
            return Needs(int(note["have"]))
        symmetric = frozenset(note["symmetric"])
        for name in symmetric:
            check_triangle(arrays[name])
        counts = {name: int(value) for name, value in note["counts"].items()}
        factors = {name: float(value) for name, value in note["factors"].items()}
        return Term(dict(sorted(arrays.items())), counts, symmetric, factors)


def decode_term(data: bytes) -> Term | Needs:
    """The answer of `encode_term`, its symmetric arrays unpacked."""
    answer = read_term(np.frombuffer(data, dtype=np.uint8))
    return answer.mirror() if isinstance(answer, Term) else answer


@contextmanager
def _complete(note: dict[str, Any], message: str, *others: str) -> Iterator[None]:
    """Refuse a message of another version or kind, and one that lacks a field or has one of another type."""
    if note.get("wire") != version.MESSAGE:
        raise TermError(
            f"this {message} uses wire version {note.get('wire')!r}; this fedsolve speaks {version.MESSAGE}. "
            "Install the same fedsolve version on both sides."
        )
    if note.get("message") not in (message, *others):
        raise TermError(f"expected a {message}, received a {note.get('message')!r}.")
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as problem:
        raise TermError(
            f"this {message} is incomplete ({type(problem).__name__}: {problem}). Send it again from the "
            "same fedsolve version."
        ) from problem


def request_digest(request: Request) -> str:
    """SHA-256 over what is asked, without blocks: they vary in repeats, and the chain's digest is in it."""
    return hashlib.sha256(encode_request(dataclasses.replace(request, blocks=()))).hexdigest()
