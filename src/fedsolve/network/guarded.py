"""A SuperLink whose control interface asks for a secret: the second barrier behind the gate.

    python -m fedsolve.network.guarded PARENT_PID SECRET_FILE WORDS OF flower-superlink...

Loopback is open to every account of the machine, and Flower's control interface to whoever reaches it. Flower
has a hook for authentication there, used by its commercial edition; here it compares a bearer token with the
secret in a file that only its owner can read. Where the hook is not found as expected nothing is started.
"""

from __future__ import annotations

import hmac
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsolve import log_lines

_MODULE = "flwr.superlink.cli.flower_superlink"
_HOOK = "load_control_authn_plugin"
_WEB_LOG = "get_uvicorn_log_config"


class Bearer:
    """Adds the secret to the calls of a client of the control interface."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret.decode("ascii")

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Flower's form of an interceptor."""
        context.request.headers["authorization"] = f"Bearer {self._secret}"
        return call_next(context)


def plugin(secret: bytes) -> Any:
    """Flower's plug-in for authentication at the control interface: the secret, or nothing."""
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class Guard(NoOpControlAuthnPlugin):  # type: ignore[misc]
        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, Any]:
            for _, value in metadata:
                token = value.encode() if isinstance(value, str) else value
                if hmac.compare_digest(token, secret):
                    return super().validate_tokens_in_metadata(metadata)  # type: ignore[no-any-return]
            return False, None

        def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
            return None, None

    return Guard()


def main() -> None:
    """Run the SuperLink until it is told to stop or the process that started it is gone."""
    from flwr.supercore.app_utils import start_parent_process_monitor

    log_lines.begin("superlink")
    parent = int(sys.argv.pop(1))
    secret = Path(sys.argv.pop(1)).read_bytes()
    superlink = importlib.import_module(_MODULE)
    if len(secret) < 32 or not callable(getattr(superlink, _HOOK, None)):
        sys.exit("the control interface cannot be guarded: is this the release of Flower that fedsolve pins?")
    setattr(superlink, _HOOK, lambda: plugin(secret))
    log_lines.adopt("flwr")
    if callable(theirs := getattr(superlink, _WEB_LOG, None)):
        setattr(superlink, _WEB_LOG, lambda level: _our_log(theirs(level)))
    start_parent_process_monitor(parent)
    superlink.flower_superlink()


def _our_log(config: dict[str, Any]) -> dict[str, Any]:
    """Flower's settings for the log of its web server, with our lines; what it leaves out stays left out."""
    for handler in config["handlers"].values():
        for name in ("formatter", "stream"):
            handler.pop(name, None)
        handler["class"] = "fedsolve.log_lines.ToRoot"
    return config


if __name__ == "__main__":
    main()
