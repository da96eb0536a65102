"""`python -m benchmarks.big_table`: a large csv through `fedsolve predict`, beside the reader's own speed.

A million rows of 30 numbers, with an identifier and without labels. Every line is a process of its own:
pyarrow reading the file into float64 columns and nothing else, the same by pandas where it is installed, what
fedsolve reads (the encoded features, columns found by name), and the whole command with the predictions
written to a file. Seconds leave out the start of Python and imports; memory is the peak of the process, with
them. Processor seconds are those of all threads together, and depend less on what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import fedsolve as fs
from benchmarks.machine import save
from fedsolve.tables.schema import Column, Schema

COLUMNS = 30

_FRAME = """
import json, resource, sys, time
{imports}
used = time.process_time()
started = time.perf_counter()
{body}
seconds, used = time.perf_counter() - started, time.process_time() - used
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print("measured " + json.dumps({{"seconds": seconds, "cpu": used, "megabytes": peak}}))
"""

WORK: dict[str, tuple[str, str]] = {
    "imports alone": ("import pyarrow.csv, fedsolve.cli.main", "pass"),
    "pyarrow, reading": (
        "import pyarrow as pa\nfrom pyarrow import csv",
        "kinds = {f'c{n}': pa.float64() for n in range(COLUMNS)} | {'id': pa.string()}\n"
        "table = csv.read_csv(DATA, convert_options=csv.ConvertOptions(column_types=kinds))\n"
        "assert table.num_rows == ROWS",
    ),
    "pandas, reading": ("import pandas", "assert len(pandas.read_csv(DATA)) == ROWS"),
    "fedsolve, reading": (
        "import pyarrow.csv\nimport fedsolve as fs\nfrom fedsolve.tables.table_file import read_table",
        "schema = fs.load_model(MODEL).schema\n"
        "assert len(read_table(DATA, schema, labelled=False, keep=['id'])) == ROWS",
    ),
    "fedsolve predict": (
        "import pyarrow.csv\nfrom fedsolve.cli.main import main",
        "try:\n    main(['predict', MODEL, DATA, '--out', OUT, '--quiet'])\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code",
    ),
}
"""What each process imports beforehand, and what is measured."""


def make(folder: Path, rows: int) -> None:
    """The csv, and a model of its columns."""
    rng = np.random.default_rng(0)
    names = [f"c{number}" for number in range(COLUMNS)]
    sample = rng.normal(size=(2000, COLUMNS))
    labels = np.where(sample[:, 0] + sample[:, 1] > 0, "ill", "well")
    model = fs.AFL(ridge=1.0).fit(fs.LocalFederation.from_arrays(sample, labels, np.arange(2000) % 4))
    columns = [Column(name, missing="refuse") for name in names] + [Column("id", "identifier")]
    model.schema = Schema(tuple(columns), "label", ("ill", "well"))
    model.save(folder / "model.safetensors")
    with open(folder / "data.csv", "w", encoding="utf-8") as stream:
        stream.write(",".join(["id", *names]) + "\n")
        for start in range(0, rows, 10_000):
            block = rng.normal(size=(min(10_000, rows - start), COLUMNS))
            for number, row in enumerate(block.tolist()):
                stream.write(f"p{start + number}," + ",".join([f"{cell:.6f}" for cell in row]) + "\n")


def measure(what: str, folder: Path, rows: int) -> dict[str, float] | None:
    """Seconds and peak megabytes of one of `WORK` in a process of its own; None where a package lacks."""
    imports, body = WORK[what]
    named = {"DATA": folder / "data.csv", "MODEL": folder / "model.safetensors", "OUT": folder / "out.csv"}
    values = "".join(f"{name} = {str(path)!r}\n" for name, path in named.items())
    values += f"ROWS, COLUMNS = {rows}, {COLUMNS}\n"
    script = _FRAME.format(imports=values + imports, body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in done.stderr:
        return None
    if done.returncode:
        raise RuntimeError(f"{what} failed:\n{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("measured "))
    found: dict[str, float] = json.loads(line.removeprefix("measured "))
    return found


@click.command(help=__doc__)
@click.option("--rows", default=1_000_000, show_default=True, help="Rows of the csv.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each; the fastest counts.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write results here."
)
def main(rows: int, repeats: int, json_path: Path | None) -> None:
    results: dict[str, Any] = {"rows": rows, "columns": COLUMNS}
    with tempfile.TemporaryDirectory(prefix="fedsolve-bench-") as name:
        folder = Path(name)
        make(folder, rows)
        results["megabytes"] = (folder / "data.csv").stat().st_size / 1e6
        for what in WORK:
            # Taken in turns, so that what else the machine does at a time falls on all of them alike.
            results[what] = None
        for _ in range(repeats):
            for what in WORK:
                found = measure(what, folder, rows)
                if found and (results[what] is None or found["seconds"] < results[what]["seconds"]):
                    results[what] = found
    console = Console(width=100, highlight=False)
    console.print(
        f"{rows:,} rows of {COLUMNS} numbers and an identifier, {results['megabytes']:.0f} MB of csv"
    )
    table = Table("", "seconds", "of pyarrow's", "processor seconds", "of pyarrow's", "peak MB")
    own = results["pyarrow, reading"]
    for what in WORK:
        if results[what] is not None:
            found = results[what]
            times = [(found[unit], found[unit] / own[unit]) for unit in ("seconds", "cpu")]
            cells = [f"{number:.2f}" for pair in times for number in pair]
            table.add_row(what, *cells, f"{found['megabytes']:.0f}")
    console.print(table)
    save(json_path, results)


if __name__ == "__main__":
    main()
