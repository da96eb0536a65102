"""fedsolve over Flower: the same methods on a SuperLink and the nodes of other organisations.

    answering   the node's side of a conversation, without any network
    wire        requests and answers as Flower's records
    link        the server's end of a SuperLink: which nodes are there, send, receive
    flower      FlowerFederation: the engine that a method sees
    agreement   what the sites of a run have, and the spec they agree on
    roster      its members: who is there, who is taken in or refused
    questions   whatever members are asked, waited for and asked for again where need be
    exchange    one request on its way
    letters     bytes on their way whose meaning the engine does not know, as of secure sums
    expected    what terms must look like
    node        a node in one process, over Flower's Fleet API
    superlink   a SuperLink and a run on it, started and stopped by us
    server_app, client_app   the same for `flwr run` and Flower's own SuperNodes

Nothing is imported before it is used: flwr is an optional extra.
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


def require_flower() -> None:
    """Refuse, with the extra to install, where Flower is missing; and switch off what it sends home.

    Must come before the first import of flwr, which reads these variables once.
    """
    os.environ.update(QUIET)
    for name in ("no_proxy", "NO_PROXY"):
        # A proxy for the outside must not be asked for what is on this machine.
        listed = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*listed, "127.0.0.1", "localhost", "::1"]))
    if importlib.util.find_spec("flwr") is None:
        raise DataError(
            "this needs Flower, which is not installed. Install it: pip install 'fedsolve[flower]'."
        )
    # Its modules import each other in circles, which two threads at once would not survive.
    importlib.import_module("flwr.app")
    if not sys.stderr.isatty():
        importlib.import_module("flwr.supercore.logger").update_console_handler(colored=False)
