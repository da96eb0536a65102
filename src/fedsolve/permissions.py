"""Which code from outside fedsolve may be imported and run because a request or a file names it.

Everything is for the person whose process this is. Where somebody else chose the name, importing it is
running what they chose, so those who read a request or a file say what they agree to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fedsolve.errors import DataError

_ALLOWED: dict[str, ContextVar[frozenset[str] | None]] = {
    kind: ContextVar(f"allowed {kind}s", default=None) for kind in ("network", "method")
}


class NotAllowed(DataError):
    """Code was named by somebody who may not choose what runs here."""


@contextmanager
def allowing(networks: Iterable[str] | None = None, methods: Iterable[str] | None = None) -> Iterator[None]:
    """Within, only what is named may be imported; None allows everything."""
    names = {"network": networks, "method": methods}
    tokens = {
        kind: _ALLOWED[kind].set(None if given is None else frozenset(given)) for kind, given in names.items()
    }
    try:
        yield
    finally:
        for kind, token in tokens.items():
            _ALLOWED[kind].reset(token)


def check_allowed(kind: str, name: str, covers: Callable[[str], bool] | None = None) -> None:
    """Refuse the network or method `name` unless it is among those allowed, or one of them covers it."""
    agreed = _ALLOWED[kind].get()
    if agreed is not None and name not in agreed and not (covers and any(map(covers, agreed))):
        raise NotAllowed(
            f"{kind} '{name}' would import and run code from outside fedsolve, and nobody here allowed that "
            f"(allowed: {', '.join(sorted(agreed)) or 'none'}). If you know the code and trust it, start "
            f"again with --allow-{kind} {name}."
        )
