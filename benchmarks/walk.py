"""How much of fedsolve one command walks through: files and functions, counted while it runs.

    python -m benchmarks.walk [--json FILE]

Each walk runs twice in one process and counts the second run: what is imported or cached once is not part of
it. Lambdas, comprehensions and class bodies are left out. Without names of columns (--no-header) there is no
schema to propose, and --no-calibrate holds no rows out: with both, a walk is that of the training alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sklearn.datasets import load_breast_cancer, load_digits

import fedsolve as fs
from benchmarks.machine import save

ROOT = str(Path(fs.__file__).parent)


def walked(action: Callable[[], Any]) -> tuple[set[str], set[str]]:
    """The files and functions of fedsolve that `action` enters."""
    files: set[str] = set()
    functions: set[str] = set()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            files.add(code.co_filename)
            functions.add(f"{code.co_filename}:{code.co_qualname}")

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return files, functions


def command(*words: str) -> Callable[[], None]:
    """`fedsolve WORDS` in this process, with nothing printed."""
    from fedsolve.cli.main import main

    def action() -> None:
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            try:
                status = main(list(words))
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
        if status:
            raise RuntimeError(f"{words} ended with {status}: {told.getvalue()}")

    return action


def secure_exchange() -> None:
    """AFL over four clients from secure sums."""
    features, labels = load_digits(return_X_y=True)
    owners = [row % 4 for row in range(len(labels))]
    federation = fs.LocalFederation.from_arrays(features / 16.0, labels, owners)
    fs.AFL(ridge=1.0).fit(fs.privacy.SecureFederation(federation))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    given = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, plain, out = (Path(folder, name) for name in ("patients.csv", "numbers.csv", "model"))
        rows, outcomes = load_breast_cancer(return_X_y=True)
        lines = [
            f"{','.join(map(str, row))},{'nsw'[n % 3]},{outcomes[n]}" for n, row in enumerate(rows[:, :10])
        ]
        names = [f"measure{column}" for column in range(10)]
        table.write_text("\n".join([",".join([*names, "hospital", "outcome"]), *lines]) + "\n")
        plain.write_text("\n".join(lines) + "\n")
        train = ("train", str(table), "--label", "outcome", "--client-column", "hospital", "--out", str(out))
        alone = ("train", str(plain), "--no-header", "--label", "11", "--client-column", "10")
        alone += ("--no-calibrate", "--out", str(out))
        walks: dict[str, Callable[[], Any]] = {
            "train patients.csv": command(*train),
            "train patients.csv --method afl": command(*train, "--method", "afl"),
            "train numbers.csv --no-header --no-calibrate": command(*alone),
            "train numbers.csv --no-header --no-calibrate --method afl": command(*alone, "--method", "afl"),
            "one secure exchange in process": secure_exchange,
        }
        for name, action in walks.items():
            action()
            files, functions = walked(action)
            found[name] = {"files": len(files), "functions": len(functions)}
            print(f"{name}: {len(files)} files, {len(functions)} functions")
            if given.list:
                print("\n".join(sorted(function.removeprefix(ROOT) for function in functions)))
    save(given.json, found)


if __name__ == "__main__":
    main()
