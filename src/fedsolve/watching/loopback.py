"""Page, JSON and metrics of a run, served to this machine only.

It listens on 127.0.0.1 and answers only requests whose Host is a loopback name, which stops DNS rebinding.
No other page may read or frame an answer. Every account of this machine can read it, and so can anyone who is
let in by a tunnel.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedsolve.errors import CohortError, FedsolveError, explained
from fedsolve.pages.templates import content_policy
from fedsolve.watching.board import Board, What
from fedsolve.watching.status_page import CONTENT_TYPE, SCRIPT, html_status, metrics

PORT = 9093
"""The default port of the page, if it is free."""

_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_FORMS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "/": ("text/html; charset=utf-8", html_status),
    "/status.json": ("application/json", lambda document: json.dumps(document, allow_nan=False) + "\n"),
    "/metrics": (CONTENT_TYPE, metrics),
}
_log = logging.getLogger("fedsolve")
_TEXT = "text/plain; charset=utf-8"
_LOOKED, _LINGER = 6.0, 2.6
"""Seconds: a page loaded this recently counts as open; how long to wait for its next load."""


class StatusServer(ThreadingHTTPServer):
    """Serves what `document` gives until it is closed; a context. looked: when the page was last loaded."""

    daemon_threads = True

    def __init__(self, document: Callable[[], Mapping[str, Any]], port: int = 0) -> None:
        what, remedy = f"the status page cannot be at 127.0.0.1:{port}", "Choose another port, or 0 for any."
        with explained(what, remedy, CohortError, (OSError, OverflowError)):
            super().__init__(("127.0.0.1", port), _Answers)
        self.document, self.looked = document, -math.inf
        self._thread = threading.Thread(target=self.serve_forever, name="status page", daemon=True)
        self._thread.start()

    @classmethod
    def preferably(cls, document: Callable[[], Mapping[str, Any]], port: int = PORT) -> StatusServer:
        """At this port, or at any free port if it is taken."""
        try:
            return cls(document, port)
        except CohortError:
            return cls(document, 0)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def close(self) -> None:
        if time.monotonic() - self.looked < _LOOKED:
            time.sleep(_LINGER)
        self.shutdown()
        self.server_close()
        self._thread.join(5)

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle_error(self, *_: Any) -> None:
        """Ignore disconnected clients."""


class StatusPage(Board):
    """A follower that shows a training on a page of this machine while it goes on.

    >>> with fs.StatusPage() as page:
    ...     print(page.address)
    ...     model = fs.DeepAFL(layers=50).fit(federation, follow=page)

    port: where the page is; another one where that is taken.
    """

    def __init__(self, title: str = "", port: int = PORT, *, what: What = "training") -> None:
        super().__init__(what, title)
        self._server = StatusServer.preferably(self.document, port)

    @property
    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        self._server.close()
        super().close()


class _Answers(BaseHTTPRequestHandler):
    server: StatusServer
    server_version, sys_version = "fedsolve", ""
    timeout = 10

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name not in _HOSTS:
            self._answer(403, _TEXT, "This page is for the machine itself: use 127.0.0.1.\n")
            return
        found = _FORMS.get(path := self.path.partition("?")[0])
        if found is None:
            self._answer(404, _TEXT, "There is /, /status.json and /metrics.\n")
            return
        kind, shown = found
        try:
            text = shown(self.server.document())
        except FedsolveError as problem:
            self._answer(501, _TEXT, f"{problem}\n")
            return
        except Exception:
            _log.exception("the status page cannot be made")
            self._answer(500, _TEXT, "The page cannot be made; the log says why.\n")
            return
        self._answer(200, kind, text)
        if path == "/":
            self.server.looked = time.monotonic()

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", content_policy(SCRIPT))
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing: all requests come from this machine."""
