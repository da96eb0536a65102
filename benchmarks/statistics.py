"""What the methods of statistics cost: by model, by grid of times, and over many rows.

    python -m benchmarks.statistics models      exchanges, bytes and numbers told: 686 women, three hospitals
    python -m benchmarks.statistics grid        Cox with one baseline: coefficients by the grid of times
    python -m benchmarks.statistics rows --rows 1000000 --columns 30 --sites 20

Each writes its part of `--out`, with the load of the machine before and after.

The women are lifelines' gbsg2; the many rows are made up. statsmodels fits the pooled rows of the logistic
regression, lifelines those of the Cox regression (one site is its one baseline; the federated one has a
baseline for each site).
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fedsolve as fs
from benchmarks.machine import save, saved
from fedsolve.tables.encoder import encode

RIGHT = "age + tsize + pnodes + C(horTh)"
MODELS: dict[str, Any] = {
    "describe": fs.Describe(),
    "glm, linear": fs.GLM(f"time ~ {RIGHT}"),
    "glm, logistic": fs.GLM(f"cens ~ {RIGHT}", family="binomial"),
    "glm, logistic, errors by site": fs.GLM(f"cens ~ {RIGHT}", family="binomial", robust="cluster"),
    "cox, by site": fs.Cox(f"Surv(time, cens) ~ {RIGHT}"),
    "cox, one baseline": fs.Cox(f"Surv(time, cens) ~ {RIGHT}", strata=None),
    "cox, one baseline, efron": fs.Cox(f"Surv(time, cens) ~ {RIGHT}", strata=None, ties="efron"),
    "survival, two groups": fs.KaplanMeier("time", "cens", "horTh"),
    "mixed": fs.MixedModel(f"estrec ~ {RIGHT}"),
}


def women(sites: int) -> fs.LocalFederation:
    """686 women, dealt to so many hospitals one after the other."""
    from lifelines.datasets import load_gbsg2

    frame = load_gbsg2()
    texts = {"horTh": ("no", "yes"), "menostat": ("Post", "Pre"), "tgrade": ("I", "II", "III")}
    columns = [
        fs.Column(name, "category", categories=texts[name]) if name in texts else fs.Column(name)
        for name in frame
    ]
    schema = fs.Schema(tuple(columns))
    owners = np.arange(len(frame)) % sites
    return fs.LocalFederation.from_arrays(
        encode(schema, frame), np.zeros(len(frame)), owners, task="regression", schema=schema
    )


def models() -> list[str]:
    """A line of a table for every model."""
    lines = ["| | exchanges | bytes up, a site | numbers a site tells |", "|---|---|---|---|"]
    for name, method in MODELS.items():
        history = method.fit(women(3)).history
        sent = sum(record.bytes_up for record in history) / 3
        lines.append(f"| `{name}` | {len(history)} | {sent:,.0f} | {sent / 8:,.0f} |")
    return lines


def grid() -> list[str]:
    """A line of a table for every grid: cells, and the largest change of a coefficient in standard errors."""
    lines = ["| ties | cells of | cells | largest change |", "|---|---|---|---|"]
    for ties in ("breslow", "efron"):
        formula = f"Surv(time, cens) ~ {RIGHT}"
        exact = fs.Cox(formula, ties=ties).fit(women(1))
        for days in (60, 120, 360):
            model = fs.Cox(formula, strata=None, grid=float(days), ties=ties).fit(women(3))
            gap = np.max(np.abs(model.coefficient - exact.coefficient) / exact.standard_error)
            lines.append(f"| {ties} | {days} days | {model.facts['cells']} | {gap:.2f} |")
    return lines


def rows(count: int, columns: int) -> dict[str, np.ndarray]:
    """Columns x0, x1, ..., an outcome, and times to an event in whole days."""
    random = np.random.default_rng(0)
    x = random.standard_normal((count, columns))
    eta = x @ (random.standard_normal(columns) / np.sqrt(columns))
    died = random.random(count) < 1 / (1 + np.exp(1.0 - eta))
    time_to, until = random.exponential(1000 * np.exp(-eta)), random.uniform(0, 2000, count)
    frame = {f"x{place}": x[:, place] for place in range(columns)}
    return frame | {
        "ill": died * 1.0,
        "days": np.ceil(np.minimum(time_to, until)),
        "died": (time_to <= until) * 1.0,
    }


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return function(), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("models", "grid", "rows"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=30)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/statistics.json"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    before = os.getloadavg()[0]
    found: Any = (
        many(given) if given.what == "rows" else {"table": {"models": models, "grid": grid}[given.what]()}
    )
    print("\n".join(found["table"]) if "table" in found else json.dumps(found, indent=2))
    kept = saved(given.out, {})
    kept[given.what] = {
        **found,
        "load_before": before,
        "load_after": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    save(given.out, kept)


def many(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds and first coefficients over many rows, beside statsmodels and lifelines on the pooled ones."""
    table = rows(given.rows, given.columns)
    names = [f"x{place}" for place in range(given.columns)]
    schema = fs.Schema(tuple(fs.Column(name) for name in table))
    features, labels = np.column_stack(list(table.values())), np.zeros(given.rows)
    owners = np.arange(given.rows) % given.sites
    told: dict[str, Any] = {"rows": given.rows, "columns": given.columns, "sites": given.sites}
    right = " + ".join(names)
    for name, method in (
        ("logistic", fs.GLM(f"ill ~ {right}", family="binomial")),
        ("cox by site", fs.Cox(f"Surv(days, died) ~ {right}")),
        ("cox, one baseline", fs.Cox(f"Surv(days, died) ~ {right}", strata=None)),
    ):
        federation = fs.LocalFederation.from_arrays(
            features, labels, owners, task="regression", schema=schema
        )
        model, seconds = timed(lambda method=method, federation=federation: method.fit(federation))
        sent = sum(record.bytes_up for record in model.history) / given.sites
        told[name] = {"seconds": seconds, "exchanges": len(model.history), "numbers_a_site_tells": sent / 8}
        told[name]["first"] = float(model.coefficient[model.names.index("x0")])
        print(name, told[name], flush=True)
    import statsmodels.api as sm

    design = sm.add_constant(np.column_stack([table[name] for name in names]))
    family = sm.families.Binomial()
    fit, seconds = timed(lambda: sm.GLM(table["ill"], design, family=family).fit())
    told["statsmodels GLM, pooled"] = {"seconds": seconds, "first": float(fit.params[1])}
    print("statsmodels GLM", told["statsmodels GLM, pooled"], flush=True)
    import pandas
    from lifelines import CoxPHFitter

    frame = pandas.DataFrame({name: table[name] for name in (*names, "days", "died")})
    cox, seconds = timed(lambda: CoxPHFitter().fit(frame, "days", "died"))
    told["lifelines Cox, pooled"] = {"seconds": seconds, "first": float(cox.params_["x0"])}
    return told


if __name__ == "__main__":
    main()
