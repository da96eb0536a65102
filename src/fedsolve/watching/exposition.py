"""How a run stands as metrics, in the text form that Prometheus reads (version 0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("starting", "gathering", "running", "complete", "stopped")


@dataclass(frozen=True)
class _Metric:
    """One metric: its samples, each with labels and a value."""

    name: str
    kind: str
    words: str
    samples: Sequence[tuple[Mapping[str, str], float]]

    def text(self) -> str:
        lines = [f"# HELP {self.name} {_help(self.words)}", f"# TYPE {self.name} {self.kind}"]
        for labels, value in self.samples:
            inner = ",".join(f'{name}="{_label(text)}"' for name, text in labels.items())
            lines.append(
                f"{self.name}{{{inner}}} {_value(value)}" if inner else f"{self.name} {_value(value)}"
            )
        return "\n".join(lines)


def metrics(document: Mapping[str, Any]) -> str:
    """The metrics of a document of a `Board`, as text."""
    return "\n".join(metric.text() for metric in _metrics(document) if metric.samples) + "\n"


def _metrics(document: Mapping[str, Any]) -> Iterable[_Metric]:
    sites: Sequence[Mapping[str, Any]] = document["sites"]
    records: Sequence[Mapping[str, Any]] = document["records"]

    def gauge(name: str, words: str, *values: float | None) -> _Metric:
        samples: list[tuple[Mapping[str, str], float]] = [({}, v) for v in values if v is not None]
        return _Metric(f"fedsolve_{name}", "gauge", words, samples)

    info = {name: str(document[name]) for name in ("what", "method", "title")}
    yield _Metric(
        "fedsolve_info", "gauge", "What is run.", [({**info, "version": str(document["fedsolve"])}, 1)]
    )
    phases = [({"phase": phase}, float(document["phase"] == phase)) for phase in PHASES]
    yield _Metric("fedsolve_phase", "gauge", "1 for the phase that the run is in.", phases)
    yield gauge(
        "start_time_seconds", "When this process began, in seconds of the epoch.", document["started"]
    )
    yield _counter("exchanges_total", "Exchanges that are done.", [({}, document["done"])])
    yield gauge("exchanges_expected", "Exchanges of the whole run, as far as known.", document["exchanges"])
    directions = [({"direction": name}, document["bytes"][name]) for name in ("up", "down", "catch_up")]
    yield _counter(
        "payload_bytes_total",
        "Payload bytes from sites (up), to sites, and to those that lacked blocks.",
        directions,
    )
    if records:
        yield gauge("last_exchange_seconds", "Seconds of the last exchange.", records[-1]["seconds"])
        measures = [({"measure": name}, value) for name, value in records[-1]["measures"].items()]
        yield _Metric(
            "fedsolve_measure", "gauge", "Risk, accuracy and the like of the last exchange.", measures
        )
    if (under := document["under_way"]) is not None:
        yield gauge(
            "exchange_under_way_seconds",
            "How long the exchange under way has taken.",
            document["now"] - under["since"],
        )
    yield gauge("seconds_left", "Estimated seconds until the end.", document["seconds_left"])
    if document["expected_sites"] is not None:
        yield gauge("sites_expected", "Sites waited for at the start.", document["expected_sites"])
        yield gauge("sites_connected", "Sites connected now.", sum(one["connected"] for one in sites))
        waited = sum(one["state"] == "asked" for one in sites)
        yield gauge("sites_waited_for", "Sites whose answer has not come.", waited)
    if document["cells"] is not None:
        yield gauge("cells_done", "Cells of the experiment that are done.", document["cells"]["done"])
        yield gauge("cells", "Cells of the experiment.", document["cells"]["total"])
    lives = [({"certificate": one["name"]}, one["days"]) for one in document["certificates"]]
    yield _Metric("fedsolve_certificate_days_left", "gauge", "Days until a certificate expires.", lives)
    yield _counter("restarts_total", "How often the run was started again.", [({}, document["starts"] - 1)])


def _counter(name: str, words: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> _Metric:
    return _Metric(f"fedsolve_{name}", "counter", words, list(samples))


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))
