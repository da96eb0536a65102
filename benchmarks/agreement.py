"""Every method beside its oracle: `python -m benchmarks.agreement [--only KEY] [--json FILE]`.

Each line is a method of `fedsolve methods`, what it is compared with (formulas in plain torch or numpy,
scikit-learn, statsmodels or lifelines), the largest difference that the comparisons of its test found, and
the command that runs this test alone; a test that fails ends the command with 1.

    python -m benchmarks.agreement --outside DIR

runs methods beside other people's code, of which checkouts lie in DIR (`benchmarks.agreement_outside`). What
differs by convention is in docs/agreement.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.machine import save

G, C, S = "tests/gradient/test_", "tests/closedform/test_", "tests/statistics/test_"
LOSSES = f"{G}loss_methods.py::test_equals_the_plain_rewriting"
ORACLES: dict[str, tuple[str, str]] = {
    "afl": (f"{C}invariance.py::test_partition_does_not_matter_for_afl", "ridge of the pooled rows"),
    "apfl": (f"{C}apfl.py -k theorem_1 or theorem_2 or without_biases", "the paper's equations, pooled"),
    "cascade": (f"{C}variants.py -k strateg or cascade", "the paper's four strategies, pooled"),
    "deepafl": (f"{C}variants.py::test_variant_equals_the_direct_computation", "Kronecker systems, pooled"),
    "kernelafl": (
        f"{C}kernel_afl.py::test_it_is_the_dense_solution_of_the_pooled_rows",
        "dense system, pooled",
    ),
    "kernelsoftmax": (
        f"{C}kernel_afl.py::test_the_likelihood_of_kernels_is_that_of_logistic_regression_on_them",
        "scikit-learn",
    ),
    "softmax": (f"{C}softmax.py::test_coefficients_are_those_of_scikit_learn", "scikit-learn"),
    "glm": (f"{S}glm.py::test_the_fit_is_that_of_the_pooled_rows", "statsmodels"),
    "cox": (f"{S}survival.py -k baseline_for_each or exact_on_its_grid", "lifelines, statsmodels"),
    "kaplan-meier": (
        f"{S}survival.py::test_curves_and_log_rank_are_those_of_lifelines_on_the_grid",
        "lifelines",
    ),
    "fedavg": (f"{G}engine.py::test_fedavg_equals_its_plain_form", "plain torch"),
    "fedavg-ft": (f"{G}personal_methods.py::test_fine_tuning_equals_its_formulas", "plain torch"),
    "fedprox": (f"{G}server_methods.py::test_fedprox_equals_its_formulas", "plain torch"),
    "fedprox-ft": (f"{G}personal_methods.py::test_fine_tuning_equals_its_formulas", "plain torch"),
    "fedavgm": (f"{G}server_methods.py::test_fedavgm_equals_its_formulas", "plain torch"),
    "fedopt": (f"{G}server_methods.py::test_fedopt_equals_its_formulas", "plain torch"),
    "fedacg": (f"{G}server_methods.py::test_fedacg_equals_its_formulas", "plain torch"),
    "feddyn": (f"{G}server_methods.py::test_feddyn_equals_its_formulas", "plain torch"),
    "scaffold": (f"{G}server_methods.py::test_scaffold_equals_its_formulas", "plain torch"),
    "fednova": (f"{G}own_parts.py::test_updates_are_divided_by_local_steps", "plain torch"),
    "moon": (f"{LOSSES} -k moon", "plain torch"),
    "fedsol": (f"{LOSSES} -k fedsol", "plain torch"),
    "fedrs": (f"{LOSSES} -k fedrs", "plain torch"),
    "fedlc": (f"{LOSSES} -k fedlc", "plain torch"),
    "fedntd": (f"{LOSSES} -k fedntd", "plain torch"),
    "feddisco": (f"{G}feddisco.py::test_weights_follow_the_formula", "plain torch"),
    "fedawa": (f"{G}fedawa.py::test_weights_follow_the_formula", "plain torch"),
    "fedgen": (f"{G}fedgen.py::test_it_follows_the_formulas", "plain torch"),
    "fedlpa": (f"{G}oneshot_methods.py::test_fedlpa_solves_the_kronecker_system", "Kronecker system"),
    "fedfisher": (f"{G}oneshot_methods.py::test_the_diagonal_solution_follows_the_formula", "plain torch"),
    "fedfisher-kfac": (
        f"{G}oneshot_methods.py::test_kronecker_fedfisher_solves_the_same_system_without_damping",
        "Kronecker system",
    ),
    "flfa": (
        f"{LOSSES.replace('equals', 'with_feedback_alignment_equals')}",
        "plain torch, loss methods as hosts",
    ),
    "ditto": (f"{G}personal_methods.py::test_ditto_equals_its_formulas", "plain torch"),
    "fedala": (f"{G}personal_methods.py::test_fedala_equals_its_formulas", "plain torch"),
    "fedselect": (f"{G}personal_methods.py::test_fedselect_equals_its_formulas", "plain torch"),
    "feddbe": (f"{G}feddbe.py::test_feddbe_equals_its_formulas", "plain torch"),
    "fedas": (f"{G}fedas.py::test_fedas_equals_its_formulas", "plain torch"),
    "fedpcl": (f"{G}fedpcl.py::test_fedpcl_equals_its_formulas", "plain torch"),
    "fedper": (f"{G}own_parts.py::test_classifiers_stay_and_bases_are_averaged -k FedPer", "plain torch"),
    "fedrep": (f"{G}own_parts.py::test_classifiers_stay_and_bases_are_averaged -k FedRep", "plain torch"),
    "fedbn": (f"{G}own_parts.py::test_batch_norm_stays_with_its_client", "plain torch"),
    "fedproto": (f"{G}own_parts.py::test_prototypes_are_what_travels", "plain torch"),
    "fedbabu": (f"{G}own_parts.py::test_a_body_under_a_classifier_that_nobody_trains", "plain torch"),
    "per-fedavg": (f"{G}own_parts.py::test_gradients_where_one_step_leads", "plain torch"),
}
"""By method: the test, and what it compares with."""

APART = {
    "auto": "chooses among others",
    "private": "adds noise; its accounts are tested against dp-accounting",
    "release": "adds noise",
    "describe": "counts and quantiles, tests/statistics/test_describe.py",
    "mixed": "statsmodels by likelihood, tests/statistics/test_mixed.py",
}
"""Methods whose result is not one number beside another's."""

MEASURES = ("far", "relative", "relative_difference")
COMPARISONS = ("assert_close", "near")
"""Names of the functions by which tests compare: those that give a difference, and those that assert."""


def difference(found: Any, expected: Any) -> float:
    """The largest difference of arrays, or of arrays by name, relative to the largest number above 1."""
    if isinstance(found, Mapping):
        return max((difference(found[name], expected[name]) for name in found), default=0.0)
    left, right = (np.asarray(value, dtype=np.float64) for value in (found, expected))
    if not left.size:
        return 0.0
    return float(np.nanmax(np.abs(left - right)) / max(1.0, float(np.nanmax(np.abs(right)))))


class Recorder:
    """A plugin of pytest that keeps what the comparisons of each test found."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.failed: list[str] = []
        self.passed = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for module in {item.module for item in items}:
            for name in (*MEASURES, *COMPARISONS):
                if hasattr(module, name):
                    measured = name in MEASURES
                    setattr(module, name, self._heard(getattr(module, name), measured))
        self._exact = np.testing.assert_allclose
        np.testing.assert_allclose = self._heard(self._exact, measured=False)

    def _heard(self, function: Callable[..., Any], measured: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def hear(found: Any, expected: Any, *more: Any, **named: Any) -> Any:
            given = function(found, expected, *more, **named)
            value = given if measured else _tried(found, expected)
            if value is not None:
                self.found.append(float(value))
            return given

        return hear

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1

    def pytest_sessionfinish(self) -> None:
        if hasattr(self, "_exact"):
            np.testing.assert_allclose = self._exact


def _tried(found: Any, expected: Any) -> float | None:
    try:
        return difference(found, expected)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


def measure(key: str) -> dict[str, Any]:
    """A line of the table."""
    test, oracle = ORACLES[key]
    where, _, only = test.partition(" -k ")
    recorder = Recorder()
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        words = [where, *(["-k", only] if only else []), "-q", "-p", "no:xdist", "-W", "ignore"]
        code = pytest.main(words, plugins=[recorder])
    command = f"pytest {where}" + (f' -k "{only}"' if only else "")
    if code != 0 or not recorder.found:
        seen = f"pytest ended with {int(code)}" if code else "its test compares by none of the names here"
        recorder.failed = recorder.failed or [f"{where}: {seen}"]
    line = {"method": key, "oracle": oracle, "command": command, "comparisons": len(recorder.found)}
    # A test may also show that something else is far away; such numbers are above what any test allows.
    near = [value for value in recorder.found if value < 1e-3]
    return line | {"difference": max(near, default=None), "tests": recorder.passed, "failed": recorder.failed}


def lines(only: list[str]) -> Iterator[dict[str, Any]]:
    import fedsolve  # noqa: F401  (methods register themselves)
    from fedsolve.registry import methods

    known = {info.key for info in methods()}
    lacking = known - ORACLES.keys() - APART.keys()
    if lacking:
        raise SystemExit(f"no oracle is named for {', '.join(sorted(lacking))}; add them to ORACLES.")
    for key in only or ORACLES:
        yield measure(key)


def outside(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of comparisons with other people's code, of which checkouts lie in a folder."""
    from benchmarks.agreement_outside import SOURCES

    here = [name for name in SOURCES if (folder / name).is_dir() or (name == "flwr" and find_spec(name))]
    lacking = ", ".join(name for name in SOURCES if name not in here)
    if lacking:
        print(f"Not compared, as there is no checkout of it in {folder}: {lacking}.", file=sys.stderr)
    path = list(sys.path)
    for name in here:
        sys.path[:] = path
        for key, matched, value in SOURCES[name](folder / name):
            command = f"python -m benchmarks.agreement --outside DIR, with {name} in DIR"
            yield {"method": key, "oracle": matched, "command": command, "difference": value, "failed": []}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="KEY", choices=sorted(ORACLES))
    parser.add_argument("--outside", metavar="DIR", type=Path, help="compare with the checkouts in DIR")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(words)
    table = []
    print("| method | oracle | difference | command |\n|---|---|---|---|")
    for line in outside(given.outside) if given.outside else lines(given.only):
        table.append(line)
        seen = f"{line['difference']:.0e}" if line["difference"] else "exact"
        shown = "**failed**" if line["failed"] else seen
        print(f"| {line['method']} | {line['oracle']} | {shown} | `{line['command']}` |", flush=True)
    save(given.json, table)
    return 1 if any(line["failed"] for line in table) else 0


if __name__ == "__main__":
    sys.exit(main())
