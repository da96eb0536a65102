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
from fedsolve.container import from_bytes, to_bytes, views, with_prefix
from fedsolve.errors import TermError
from fedsolve.federation.messages import Block, Needs, Request, Term, check_triangle


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
            "kind": request.kind,
            "exchange": request.exchange,
            "step": request.step,
            "note": dict(request.note),
            "position": request.position,
            "digest": request.digest,
            "blocks": [dict(block.note) for block in request.blocks],
        },
    )


def decode_request(data: bytes) -> Request:
    """The request of `encode_request`, refused when damaged or of another version."""
    arrays, note = from_bytes(data, what="this request", error=TermError)
    with _complete(note, "request"):
        _check_fields(note)
        return Request(
            kind=note["kind"],
            exchange=note["exchange"],
            step=note["step"],
            cohort=(),
            note=note["note"],
            arrays=with_prefix(arrays, "array."),
            position=note["position"],
            digest=note["digest"],
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
    arrays, note = views(data, what="this term", error=TermError)
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
    if isinstance(answer, Term):
        answer.mirror()
    return answer


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


def _check_fields(note: dict[str, Any]) -> None:
    """Refuse a request whose fields are not of their types: numbers end up in the names of files."""
    for name, kind in (("kind", str), ("digest", str), ("note", dict), ("blocks", list)):
        _check_field(name, note[name], isinstance(note[name], kind), f"be a {kind.__name__}")
    for name in ("exchange", "step", "position"):
        _check_field(name, note[name], type(note[name]) is int and note[name] >= 0, "be a whole number")
    for block in note["blocks"]:
        _check_field("blocks", block, isinstance(block, dict), "hold tables")


def _check_field(name: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise TermError(f"'{name}' of this request must {wanted}; got {ascii(value)[:80]}.")


def request_digest(request: Request) -> str:
    """SHA-256 over what is asked, without blocks: they vary in repeats, and the chain's digest is in it."""
    return hashlib.sha256(encode_request(dataclasses.replace(request, blocks=()))).hexdigest()
