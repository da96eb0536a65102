"""Page (by the template pages/status.html), JSON and metrics of a run, served to this machine only.

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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedsolve.errors import CohortError, FedsolveError, explained, require
from fedsolve.pages.templates import content_policy, render
from fedsolve.watching import phrases
from fedsolve.watching.board import Board, What
from fedsolve.watching.phrases import measure_words, spoken

PORT = 9093
"""The default port of the page, if it is free."""

SCRIPT = "status.js"
_CLASSES = {"exchange": "", "kind": "wide", "clients": "number wide", "down": "number wide"}
_LAST = 12
_LEFT, _RIGHT, _TOP, _BOTTOM = 8, 312, 20, 110  # of a curve, in a drawing of 320 x 132


def html_status(document: Mapping[str, Any]) -> str:
    heading = document["title"] or document["method"] or "fedsolve"
    eyebrow = [f"fedsolve {document['fedsolve']}", document["what"]]
    if document["secure"] is not None:
        eyebrow.append("secure sums" if document["secure"] else "plain sums")
    heads, rows = phrases.exchanges(document["recent"])
    finished = document["finished_cells"][: -_LAST - 1 : -1]
    return render(
        "status.html",
        kind="status",
        script=SCRIPT,
        title=f"{phrases.headline(document)} · {heading}",
        heading=heading,
        eyebrow=[*eyebrow, f"since {phrases.clock(document['started'])}"],
        document=document,
        phrases=phrases,
        finished=[(cell["name"], _scores(cell["scores"])) for cell in finished],
        curves=list(_curves(document)),
        exchange_heads=[(head, _CLASSES.get(head, "number")) for head in heads],
        exchanges=rows[::-1],
    )


def _scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{spoken(name)} {measure_words(name, value)}" for name, value in scores.items())


def _curves(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every measure that was taken at least twice, as a line over exchanges."""
    for name in phrases.CURVES:
        taken = [record for record in document["records"] if name in record["measures"]]
        points = [(float(record["exchange"]), record["measures"][name]) for record in taken]
        if len(points) < 2:
            continue
        values = [value for _, value in points]
        least, most, last = (measure_words(name, value) for value in (min(values), max(values), values[-1]))
        (first, _), (end, _) = points[0], points[-1]
        spread = max(values) - min(values) or max(abs(values[0]), 1.0) * 1e-3
        yield {
            "name": spoken(name),
            "words": f"{spoken(name)} over exchanges, from {least} to {most}, now {last}",
            "least": least,
            "most": most,
            "last": last,
            "first": f"{first:.0f}",
            "end": f"{end:.0f}",
            "points": [
                (
                    round(_LEFT + (exchange - first) / (end - first or 1.0) * (_RIGHT - _LEFT), 1),
                    round(_BOTTOM - (value - min(values)) / spread * (_BOTTOM - _TOP), 1),
                )
                for exchange, value in points
            ],
        }


def metrics(document: Mapping[str, Any]) -> str:
    """The metrics of a `Board`'s document, as text. Sites are counted, not named."""
    client = require("prometheus_client", "network", "the page of metrics")

    class Once:
        def collect(self) -> Iterator[Any]:
            return _families(document)

    return str(client.generate_latest(Once()).decode())


def _families(document: Mapping[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def family(kind: Any, name: str, words: str, value: Any, label: str = "") -> Iterator[Any]:
        """One value, or one for each value of a label; none where nothing is known."""
        if value is None or value == {}:
            return
        found = kind(f"fedsolve_{name}", words, labels=[label] if label else [])
        for key, number in value.items() if label else [("", value)]:
            found.add_metric([str(key)] if label else [], float(number))
        yield found

    gauge, counter = partial(family, GaugeMetricFamily), partial(family, CounterMetricFamily)

    records, sites, cells = document["records"], document["sites"], document["cells"]
    info = GaugeMetricFamily("fedsolve_info", "What is run.", labels=["what", "method", "title", "version"])
    info.add_metric([str(document[name]) for name in ("what", "method", "title", "fedsolve")], 1)
    yield info
    phases = {phase: document["phase"] == phase for phase in phrases.PHASES}
    yield from gauge("phase", "1 for the phase that the run is in.", phases, "phase")
    started = "When this process began, in seconds since the epoch."
    yield from gauge("start_time_seconds", started, document["started"])
    yield from counter("exchanges", "Exchanges that are done.", document["done"])
    yield from gauge("exchanges_expected", "Exchanges of the run, if known.", document["exchanges"])
    words = "Payload bytes from sites (up), to sites (down), and to those that lacked blocks (catch_up)."
    yield from counter("payload_bytes", words, document["bytes"], "direction")
    if records:
        yield from gauge("last_exchange_seconds", "Seconds of the last exchange.", records[-1]["seconds"])
        words = "Risk, accuracy and the like of the last exchange."
        yield from gauge("measure", words, records[-1]["measures"], "measure")
    if (under := document["under_way"]) is not None:
        taken = document["now"] - under["since"]
        yield from gauge("exchange_under_way_seconds", "Seconds of the exchange under way so far.", taken)
    yield from gauge("seconds_left", "Estimated seconds until the end.", document["seconds_left"])
    if document["expected_sites"] is not None:
        yield from gauge("sites_expected", "Sites waited for at the start.", document["expected_sites"])
        yield from gauge("sites_connected", "Sites connected now.", sum(one["connected"] for one in sites))
        waited = sum(one["state"] == "asked" for one in sites)
        yield from gauge("sites_waited_for", "Sites whose answer has not come.", waited)
    if cells is not None:
        yield from gauge("cells_done", "Cells of the experiment that are done.", cells["done"])
        yield from gauge("cells", "Cells of the experiment.", cells["total"])
    lives = {one["name"]: one["days"] for one in document["certificates"]}
    yield from gauge("certificate_days_left", "Days until a certificate expires.", lives, "certificate")
    yield from counter("restarts", "How often the run was started again.", document["starts"] - 1)


_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_FORMS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "/": ("text/html; charset=utf-8", html_status),
    "/status.json": ("application/json", lambda document: json.dumps(document, allow_nan=False) + "\n"),
    "/metrics": ("text/plain; version=0.0.4; charset=utf-8", metrics),
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
