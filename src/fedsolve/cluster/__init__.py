"""fedsolve over many machines of one organisation, by Ray core.

    row_file         where a client's rows are; its worker reads them there
    lanes            a cohort in lanes, and the tree in which their sums meet
    worker           the worker's side: answers for clients and adds their terms, without Ray
    crew             starts, asks and replaces workers
    ray_federation   RayFederation: the engine that a method sees

Nothing is imported before it is used: ray is an optional extra.
"""

from __future__ import annotations

import os
import re
import socket

from fedsolve.errors import CohortError, DataError, require

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Ray sends no usage reports, and leaves GPUs visible to workers that reserve none."""


def require_ray() -> None:
    """Refuse where Ray is missing, naming the extra to install; switch off its usage reports."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    require("ray", "ray", "this engine")


_SECONDS = 10
_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
"""What a client of HTTP/2, which Ray speaks, says first: the preface, and settings without any."""


def check_address(address: str, given: str) -> None:
    """Refuse an address where no Ray cluster answers; given: "RAY_ADDRESS" or "address=", its origin."""
    if not isinstance(address, str):
        raise DataError(f"{given} must be text such as 'HOST:6379'; got {address!r}.")
    if address in ("auto", "local"):
        return
    found = re.fullmatch(r"(ray://)?(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})(/.*)?", address)
    if found is None:
        if "://" in address and not address.startswith("ray://"):
            return  # of a provider that Ray knows
        raise DataError(
            f"{given} is '{address}', which is no address of a Ray cluster. Use HOST:PORT, such as "
            "'10.0.0.1:6379', ray://HOST:PORT, or auto for one that runs on this machine."
        )
    host = found[2].strip("[]")
    if found[1] is None and host in ("localhost", "127.0.0.1", "::1"):
        from ray.util import get_node_ip_address

        host = get_node_ip_address()  # where Ray will look for it
    try:
        _greet(host, int(found[3]))
    except (OSError, OverflowError) as problem:
        raise unreachable(address, given, problem) from problem


def unreachable(address: str, given: str, problem: Exception) -> CohortError:
    why = " ".join(str(problem).split()).rstrip(".") or type(problem).__name__
    return CohortError(
        f"no Ray cluster answers at '{address}' ({given}): {why}. Start one there (ray start --head), "
        f"correct the address, or leave {given} out for a cluster on this machine."
    )


def _greet(host: str, port: int) -> None:
    with socket.create_connection((host, port), timeout=_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(_OPENING)
        with connection.makefile("rb") as reading:
            answer = reading.read(4)
    if answer[3:] != b"\4":
        raise ConnectionError("something else than Ray listens there")
