"""What foreign code may be imported here: by default all of it, for this is somebody's own process.

Where a request or a file names a function or a class, importing it is running what somebody else chose. So
those who read one say beforehand, by name, what they agree to:

    with allowing(networks=["package.module:function"]):
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from fedsolve.errors import DataError

Kind = Literal["network", "method"]

_USES: dict[Kind, str] = {"network": "import and call a function", "method": "import and run a class"}

_allowed: ContextVar[Mapping[Kind, frozenset[str] | None] | None] = ContextVar("allowed", default=None)


class NotAllowed(DataError):
    """Code was named by somebody who may not choose what runs here."""


@contextmanager
def allowing(*, networks: Iterable[str] | None = (), methods: Iterable[str] | None = ()) -> Iterator[None]:
    """Within, only the named code is imported, as "package.module:name"; None allows all of a kind."""
    named: dict[Kind, Iterable[str] | None] = {"network": networks, "method": methods}
    token = _allowed.set({kind: None if each is None else frozenset(each) for kind, each in named.items()})
    try:
        yield
    finally:
        _allowed.reset(token)


def restricted() -> bool:
    """Whether somebody said what may be imported at this moment."""
    return _allowed.get() is not None


def check_allowed(kind: Kind, address: str, covers: Callable[[str], bool] | None = None) -> None:
    """Refuse code that may not be imported here: it is not named, nor covered by anything that is."""
    allowed = _allowed.get()
    agreed = None if allowed is None else allowed[kind]
    if agreed is not None and address not in agreed and not (covers and any(map(covers, agreed))):
        raise NotAllowed(
            f"{kind} '{address}' would {_USES[kind]} of this machine, and nobody here allowed that "
            f"(allowed: {', '.join(sorted(agreed)) or 'none'}). If you know it and trust it, start again "
            f"with --allow-{kind} {address}."
        )
