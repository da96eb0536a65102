"""fedsolve over a network: the same methods on the sites of other organisations.

    answering   the site's side of a conversation, without any network
    flower      FlowerFederation: the engine that a method sees
    agreement   what the sites of a run have, and the spec they agree on
    roster      its members: who is there, who is taken in or refused
    questions   whatever members are asked, waited for and asked for again where need be
    exchange    one request on its way
    letters     bytes on their way whose meaning the engine does not know, as of secure sums
    expected    what terms must look like

`fedsolve server` and `fedsolve client`:

    handshake   what a site and the gate agree on, and how every call is sealed
    parcels     a note and bytes as one body
    gate        what the network reaches of a server: sessions, mailbox, doorway, admission
    gate_link   the server's end of its gate
    gate_client a site's calls at the gate
    node        a site in one process
    service     the gate and the list of sites, started and stopped by the server

`flwr run`, over a SuperLink and Flower's own SuperNodes:

    wire        requests and answers as Flower's records
    link        what the engine needs of a network, and Flower's grid as one
    server_app, client_app

Nothing is imported before it is used: flwr is an optional extra, and brings what the rest needs, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from fedsolve.errors import DataError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment in which Flower calls nobody and installs nothing."""


def require_network() -> None:
    """Refuse, with the extra to install, where what a server or a site needs is missing."""
    for name in ("no_proxy", "NO_PROXY"):
        # A proxy for the outside must not be asked for what is on this machine.
        listed = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*listed, "127.0.0.1", "localhost", "::1"]))
    if not all(importlib.util.find_spec(name) for name in ("httpx", "uvicorn", "starlette", "cryptography")):
        raise _missing("this needs packages that come with Flower, which is not installed.")


def require_flower() -> None:
    """Refuse, with the extra to install, where Flower is missing; and switch off what it sends home.

    Must come before the first import of flwr, which reads these variables once.
    """
    os.environ.update(QUIET)
    require_network()
    if importlib.util.find_spec("flwr") is None:
        raise _missing("this needs Flower, which is not installed.")
    # Its modules import each other in circles, which two threads at once would not survive.
    importlib.import_module("flwr.app")
    if not sys.stderr.isatty():
        importlib.import_module("flwr.supercore.logger").update_console_handler(colored=False)


def _missing(what: str) -> DataError:
    return DataError(f"{what} Install it: pip install 'fedsolve[flower]'.")
