"""Hosts with and without feedback alignment, paired by seed: scores, intervals, and the rule of decision.

`docs/experiment-flfa.md` says what is decided and how; it was written before there was a result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ARMS = ("FedLC", "FedLC+lowest", "FedLC+highest")
ARMS += tuple(f"FedAvgM-{form}{plus}" for form in ("classic", "damped") for plus in ("", "+lowest"))
ARMS += ("FedAvgM-damped+highest",)
"""The arms of the protocol: a host, and what follows the plus says which layer feedback alignment takes."""

CLAIMS = {"FedLC": 0.67, "FedAvgM-classic": 6.45, "FedAvgM-damped": 6.45}
"""What the paper says feedback alignment adds to a host on Fashion-MNIST, in points of accuracy."""

TEST = "lowest"
"""The choice of layers that the decision is about; others are exploratory."""

ROUNDS, FIRST, LAST = 60, 41, 60
MOST_SEEDS = 10
CONFIDENCE = 0.95


def results(out: Path) -> list[dict[str, Any]]:
    """The results of all runs in a folder."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def scores(
    told: Sequence[dict[str, Any]], first: int = FIRST, last: int = LAST
) -> dict[str, dict[int, float]]:
    """By arm and seed: mean test accuracy in % of rounds `first` to `last`, counted from 1, if it has all."""
    found: dict[str, dict[int, float]] = {}
    for one in told:
        window = [line["test_accuracy"] for line in one["rounds"][first - 1 : last]]
        if len(window) == last - first + 1:
            found.setdefault(one["arm"], {})[one["seed"]] = 100 * float(np.mean(window))
    return {arm: dict(sorted(found[arm].items())) for arm in sorted(found, key=_place)}


def _place(arm: str) -> tuple[int, str]:
    return (ARMS.index(arm) if arm in ARMS else len(ARMS), arm)


@dataclass(frozen=True)
class Comparison:
    """A host with feedback alignment against itself without: differences by seed, mean and interval."""

    arm: str
    differences: dict[int, float]
    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """What follows from the rule, as a sentence."""
        host, _, choice = self.arm.partition("+")
        claim = CLAIMS.get(host)
        seeds = len(self.differences)
        if choice != TEST or claim is None:
            return "exploratory: no decision is taken from it"
        found = []
        if self.low > 0:
            found.append("an effect: the interval lies wholly above 0")
        if self.high < claim:
            found.append(f"the paper's claim (+{claim}) does not hold here: the upper end is below it")
        if found:
            return "; and ".join(found)
        more = "add two seeds" if seeds < MOST_SEEDS else "and no more seeds are run"
        return f"undecided with {seeds} seeds: {more}"


def compare(found: dict[str, dict[int, float]]) -> list[Comparison]:
    """Every arm with feedback alignment against its host, over the seeds that both have."""
    told = []
    for arm, own in found.items():
        host = arm.partition("+")[0]
        if "+" not in arm or host not in found:
            continue
        both = {seed: own[seed] - found[host][seed] for seed in own if seed in found[host]}
        if both:
            told.append(Comparison(arm, both, *paired_interval(list(both.values()))))
    return told


def paired_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of differences, and the 95 % interval of Student's t; unbounded for a single one."""
    from scipy.stats import t  # takes a second to import, and training needs none of it

    values = np.asarray(differences, dtype=np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return mean, mean - half, mean + half


def report(told: Sequence[dict[str, Any]], first: int = FIRST, last: int = LAST) -> str:
    """Scores of all arms, the paired differences, and the sentences that follow from the rule."""
    found = scores(told, first, last)
    lines = [f"Test accuracy in %, mean of rounds {first} to {last}:", ""]
    lines += ["| arm | seeds | mean | each seed | seconds a round, each |", "|---|---:|---:|---|---|"]
    for arm, own in found.items():
        each = ", ".join(f"{seed}: {score:.2f}" for seed, score in own.items())
        mean = np.mean(list(own.values()))
        lines.append(f"| {arm} | {len(own)} | {mean:.2f} | {each} | {_seconds(told, arm)} |")
    lines += ["", "Paired differences, points:", ""]
    lines += ["| arm | seeds | mean | 95 % interval | each seed | rule |", "|---|---:|---:|---|---|---|"]
    for one in compare(found):
        each = ", ".join(f"{value:+.2f}" for value in one.differences.values())
        interval = f"{one.low:+.2f} to {one.high:+.2f}"
        lines.append(
            f"| {one.arm} | {len(one.differences)} | {one.mean:+.2f} | {interval} | {each} | {one.verdict} |"
        )
    short = [
        f"{one['arm']}:{one['seed']} ({len(one['rounds'])})" for one in told if len(one["rounds"]) < last
    ]
    if short:
        lines += ["", f"Not finished, with their rounds: {', '.join(short)}."]
    return "\n".join(lines)


def _seconds(told: Sequence[dict[str, Any]], arm: str) -> str:
    """The median seconds of a round, seed by seed; how many runs shared the machine is not in the results."""
    runs = sorted((one for one in told if one["arm"] == arm), key=lambda one: int(one["seed"]))
    return ", ".join(f"{np.median([line['seconds'] for line in one['rounds']]):.1f}" for one in runs)


LOOKS = ("", "lowest", "highest")
"""The choices of a layer, each with a look of its own in every panel."""


def draw(told: Sequence[dict[str, Any]]) -> Any:
    """Test accuracy round by round, with and without feedback alignment; a panel for each host."""
    from fedsolve.experiments.charts import ACCURACY
    from fedsolve.experiments.observations import mean_error
    from fedsolve.pages.plots import Axis, Panel, Series
    from fedsolve.pages.plots import draw as draw_panels

    curves: dict[str, dict[str, list[list[float]]]] = {}
    for one in sorted(told, key=lambda one: _place(one["arm"])):
        host, _, choice = one["arm"].partition("+")
        values = [100 * line["test_accuracy"] for line in one["rounds"]]
        curves.setdefault(host, {}).setdefault(choice, []).append(values)
    groups = []
    for host, by_choice in curves.items():
        series = []
        for choice, runs in by_choice.items():
            means, errors = zip(*(mean_error(values) for values in zip(*runs, strict=False)), strict=True)
            name = f"with feedback alignment, {choice}" if choice else "without"
            look = LOOKS.index(choice)
            series.append(Series(name, look, tuple(range(1, len(means) + 1)), means, errors))
        groups.append((host, series))
    rounds = Axis("round", whole=True)
    return draw_panels([Panel(series, rounds, ACCURACY, host) for host, series in groups])
