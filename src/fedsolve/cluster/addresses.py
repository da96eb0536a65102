"""Whether a Ray cluster answers at an address, before Ray waits for it for minutes."""

from __future__ import annotations

import os
import re
import socket

from fedsolve.errors import CohortError, DataError

_SECONDS = 10
_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
"""What a client of HTTP/2, which Ray speaks, says first: the preface, and settings without any."""


def check_address(address: str, given: str) -> None:
    """Refuse an address where no Ray cluster is; given: how it was said, "RAY_ADDRESS" or "address="."""
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
    """The error for a cluster that is not there."""
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
        answer = b""
        while len(answer) < 4:
            part = connection.recv(9)
            if not part:
                break
            answer += part
    if answer[3:4] != b"\4":
        raise ConnectionError("something else than Ray listens there")
