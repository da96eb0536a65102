"""fedsolve over a network: the same methods on the sites of other organisations.

    answering   the site's side of a conversation, without any network
    network_federation   the engine that a method sees
    running     a run of it that survives its process
    agreement   what the sites of a run have, and the spec they agree on
    roster      its members: who is there, who is taken in or refused
    questions   whatever members are asked, waited for and asked for again where need be
    expected    what replies must look like
    link        what carries messages to sites and answers back: by gate_link, file_link or flower
    gate        what the network reaches of a server: mailbox, doorway; gate_link is the server's end of it
    node        a site in one process, which calls at the gate by gate_client
    keyfolder   keys and lists of sites; besides certificates, security (whom a site believes), diagnosis

Nothing is imported before it is used: what a network needs is an optional extra.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata

from fedsolve.errors import DataError
from fedsolve.version import __version__

NEEDED = ("httpx", "starlette", "uvicorn", "cryptography")
"""What `fedsolve[network]` installs for server and sites."""


def require_network() -> None:
    """Refuse, with the extra to install, where what a server or a site needs is missing."""
    for name in ("no_proxy", "NO_PROXY"):
        # A proxy for the outside must not be asked for what is on this machine.
        listed = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*listed, "127.0.0.1", "localhost", "::1"]))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(f"{', '.join(missing)} is not installed: pip install 'fedsolve[network]'.")


def versions() -> dict[str, str | None]:
    """Versions of what two ends of a federation compare, and of what each needs; None: not installed."""
    found: dict[str, str | None] = {"fedsolve": __version__, "python": platform.python_version()}
    for name in ("numpy", *NEEDED):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
