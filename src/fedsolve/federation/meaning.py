"""Whether two machines mean the same: numbers that honest machines compute differ in signs and last bits.

A site that checks a server's blocks computes them itself, from the totals that were opened (`settling`). What
a method sends is compared by `differs`, which knows where equal meaning is not equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import singledispatch
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import with_prefix
from fedsolve.federation.messages import Block

if TYPE_CHECKING:
    from fedsolve.federation.method import Run

TOLERANCE = 1e-6
"""Norm of a difference as a share of the norm of what it is compared with."""

ADDITIVE: dict[str, frozenset[str]] = {}
"""By the key of a method, what is additive of it (see `Method`) besides what it says itself."""

_NEVER = 1e8

Judge = Callable[["Run[Any]", Block], Block]
"""Gives the block that counts in place of the one that a run has solved; refuses by raising."""

JUDGE: ContextVar[Judge | None] = ContextVar("judge", default=None)
"""Who judges every block that a run adds at this moment."""


@contextmanager
def settling(judge: Judge) -> Iterator[None]:
    """Let runs of this moment ask `judge` for every block that they add."""
    token = JUDGE.set(judge)
    try:
        yield
    finally:
        JUDGE.reset(token)


def distance(mine: Array, theirs: Array) -> float:
    """|theirs - mine| / |mine|, in norms; infinite where types or shapes differ. Equal numbers of any size,
    infinite ones too, count as equal and nothing else.
    """
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return np.inf
    unequal = mine != theirs
    if not np.any(unequal):
        return 0.0
    if mine.dtype.kind != "f":
        return np.inf
    here, there = mine.astype(np.float64), theirs.astype(np.float64)
    if not np.all(np.isfinite(there[unequal]) & np.isfinite(here[unequal])):
        return np.inf
    # A number that stands for "never", the same on both sides, would outweigh all others.
    size = float(np.linalg.norm(here[unequal | (np.abs(here) < _NEVER)]))
    gap = float(np.linalg.norm((there - here)[unequal]))
    return gap / size if size > 0 else np.inf


def differing(
    mine: Mapping[str, Array], theirs: Mapping[str, Array], within: float = TOLERANCE
) -> str | None:
    """What of `theirs` is not within a share of `mine`, in words; None where all is."""
    if mine.keys() != theirs.keys():
        return f"it has the arrays {sorted(theirs)[:8]}, not {sorted(mine)[:8]}"
    for name, array in mine.items():
        gap = distance(array, theirs[name])
        if not gap <= within:
            return f"'{name}' differs by {gap:.1e} of its size, {within:g} is allowed"
    return None


@singledispatch
def differs(run: Any, mine: Mapping[str, Array], theirs: Mapping[str, Array]) -> str | None:
    """Why `theirs`, arrays of a block, a request or a model that a server sent, do not mean the same as
    `mine`, which a run made of the totals; None where they do.

    Numbers are equal but for rounding, unless something is registered for the kind of run: where others are
    as good, such as factors of one product. Of a run with `members` each array is that of the member by whose
    name it is called: "NAME.array", or "NAME" alone.
    """
    members = getattr(run, "members", None)
    if not isinstance(members, Mapping) or mine.keys() != theirs.keys():
        return differing(mine, theirs)
    for name in dict.fromkeys(key.partition(".")[0] for key in mine):
        own, other = (with_prefix(dict(arrays), f"{name}.") for arrays in (mine, theirs))
        alone = differing({k: mine[k] for k in mine if k == name}, {k: theirs[k] for k in mine if k == name})
        if found := differs(members.get(name), own, other) or alone:
            return str(found)
    return None


def notes_differ(mine: Any, theirs: Any, unlike: Collection[str] = (), place: str = "") -> str | None:
    """Where two notes differ, in words; numbers with a fraction may do so by rounding. unlike: places that
    may hold anything.
    """
    if place in unlike:
        return None
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        if mine.keys() != theirs.keys():
            return f"{place or 'its note'} has {sorted(theirs)[:8]}, not {sorted(mine)[:8]}"
        pairs = [(f"{place}.{key}" if place else str(key), mine[key], theirs[key]) for key in mine]
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return f"'{place}' has {len(theirs)} entries, not {len(mine)}"
        pairs = [
            (f"{place}.{n}", one, other) for n, (one, other) in enumerate(zip(mine, theirs, strict=True))
        ]
    elif isinstance(mine, float) and isinstance(theirs, float):
        near = mine == theirs or abs(theirs - mine) <= TOLERANCE * abs(mine)
        return None if near else f"'{place}' is {theirs!r}, not {mine!r}"
    else:
        same = mine == theirs and isinstance(mine, bool) == isinstance(theirs, bool)
        return None if same else f"'{place}' is {ascii(theirs)[:60]}, not {ascii(mine)[:60]}"
    for name, one, other in pairs:
        found = notes_differ(one, other, unlike, name)
        if found is not None:
            return found
    return None
