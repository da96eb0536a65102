"""`python -m benchmarks.scale [clients|engines|machines|model|rows]`: many clients, Ray, rows beyond memory.

clients    AFL over 10,000 and 100,000 clients in one process, beside scikit-learn's Ridge on the pooled rows
engines    five methods in Ray with two workers, beside the local engine
machines   strong and weak scaling in Ray over 1 to 16 workers, beside the local engine and bare products
model      seconds on paper of more machines and rows, fitted to what `machines` measured
rows       AFL and DeepAFL on rows that are mapped or read from parquet, growing to 2,000,000 x 512
Every measurement is a process of its own. --json stores the table with the machine and its load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.machine import MAPPED, Memory, OtherWork

CLASSES = 10
_GROUP = 16384


@click.group()
def main() -> None:
    """What grows with clients, with machines and with rows."""


_json = click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))


@main.command()
@_json
@click.option("--size", multiple=True, default=("10000x50x512", "100000x20x256"), show_default=True)
def clients(size: tuple[str, ...], json_path: Path | None) -> None:
    """Building a federation of KxROWSxWIDTH, and AFL on it."""
    lines = []
    for text in size:
        count, rows, width = (int(number) for number in text.split("x"))
        for what in ("fedsolve", "ridge"):
            lines.append(_apart("clients", what=what, clients=count, rows=rows, width=width))
            _store(lines, json_path)
    columns = (
        "what",
        "clients",
        "rows",
        "width",
        "build",
        "build_processor",
        "seconds",
        "processor",
        "above_rows",
    )
    _finish("AFL over very many clients", columns, lines)


@main.command()
@_json
@click.option("--clients", "count", default=40, show_default=True)
@click.option("--rows-each", default=500, show_default=True)
@click.option("--width", default=64, show_default=True)
@click.option("--workers", default=2, show_default=True)
def engines(count: int, rows_each: int, width: int, workers: int, json_path: Path | None) -> None:
    """The best of three runs of each method by each engine, once everything has started."""
    found = _apart("engines", clients=count, rows=rows_each, width=width, workers=workers)
    lines = found.pop("lines")
    _store([found | line for line in lines], json_path)
    _finish("Ray beside one process", ("method", "exchanges", "local", "ray", "ratio", "apart"), lines)


@main.command()
@_json
@click.option("--method", "keys", multiple=True, default=("afl", "deepafl", "kernelafl"), show_default=True)
@click.option("--workers", multiple=True, type=int, default=(1, 2, 4, 8, 16), show_default=True)
@click.option("--clients", "count", default=128, show_default=True, help="At the most workers.")
@click.option("--rows-each", default=2000, show_default=True)
@click.option("--width", default=512, show_default=True)
@click.option("--deep", default=1024, show_default=True, help="Width of DeepAFL, and landmarks of KernelAFL.")
@click.option("--layers", default=5, show_default=True)
@click.option("--kill/--no-kill", default=True, show_default=True, help="A run in which a worker is killed.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Where to draw the speed-up.")
def machines(
    keys: tuple[str, ...],
    workers: tuple[int, ...],
    count: int,
    rows_each: int,
    width: int,
    deep: int,
    layers: int,
    kill: bool,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """The same rows over ever more workers (strong), and as many rows for each worker (weak).

    What the file of --json holds already is not measured again, so that a run may be done in pieces.
    Efficiency: seconds of one worker / (workers x seconds), of weak scaling without the workers. `between` is
    what workers send each other and `here` what comes to the driver, in MB of terms, in the whole run.
    `cores`: processes that multiply matrices of their own, all at once, as the machine's own measure.
    """
    from fedsolve.threads import usable_cores

    usable = sorted(number for number in workers if number <= usable_cores()) or [1]
    if len(usable) < len(workers):
        click.echo(
            f"{usable_cores()} cores here: {', '.join(map(str, usable))} workers are measured.", err=True
        )
    most = max(usable)
    size = {"rows": rows_each, "width": width, "deep": deep, "layers": layers}
    lines = _measured(json_path)

    def add(scaling: str, number: int, clients: int, methods: tuple[str, ...] = keys) -> None:
        given = {"scaling": scaling, "workers": number, "clients": clients, **size}
        done = {line["method"] for line in lines if given.items() <= line.items()}
        left = [method for method in methods if method not in done]
        if not left:
            return
        lines.extend(given | line for line in _apart("machines", methods=left, **given)["lines"])
        if (scaling, number) == ("strong", most):  # as many rows for each worker as at the most workers
            same = [line for line in lines if given.items() <= line.items() and line["method"] in left]
            lines.extend([line | {"scaling": "weak"} for line in same])
        for line in lines:
            line["efficiency"] = _efficiency(line, lines)
        _store(lines, json_path)

    for number in [usable[0], *reversed(usable[1:])]:
        add("strong", number, count)
        add("cores", number, 0, ("products",))
        if number < most:
            add("weak", number, max(1, count * number // most))
    add("local", most, count)
    if kill and "deepafl" in keys:
        add("killed", most, count, ("deepafl",))
    lines.sort(key=lambda line: (line["method"], line["scaling"], line["workers"]))
    columns = ("scaling", "method", "workers", "clients", "rows", "start", "seconds", "efficiency")
    _finish("Strong and weak scaling", (*columns, "exchanges", "between", "here", "model", "others"), lines)
    if plot is not None:
        _draw_workers(lines, plot)


def _measured(path: Path | None) -> list[dict[str, Any]]:
    """What an earlier run of `machines` stored."""
    return json.loads(path.read_text())["results"]["lines"] if path and path.exists() else []


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--method", default="deepafl", show_default=True)
@click.option("--nodes", default=100, show_default=True, help="Machines like that of the file.")
@click.option("--rows", default=1_000_000_000, show_default=True)
@click.option("--network", default=1.25, show_default=True, help="GB a second between machines.")
def model(file: Path, method: str, nodes: int, rows: int, network: float) -> None:
    """Seconds on paper for machines that are not here, fitted to what `machines` stored in FILE."""
    lines = [line for line in _measured(file) if line["method"] == method]
    cores = {x["workers"]: x["efficiency"] for x in _measured(file) if x["method"] == "products"}
    lines = [x for x in lines if x["scaling"] in ("strong", "weak") and x["workers"] in cores]
    fitted = fit_model(lines, cores)
    row, once, level = fitted
    click.echo(
        f"seconds = {row:.3g} x rows / (workers x share) + {once:.3g} + {level:.3g} x log2(workers)\n"
        "share: what so many processes keep of one's rate in bare products"
    )
    for line in lines:
        (told,) = terms_of([line], cores) @ fitted
        click.echo(
            f"{line['scaling']:>7} {line['workers']:3} workers {line['clients'] * line['rows']:9,} rows: "
            f"{line['seconds']:6.2f} s, on paper {told:6.2f}"
        )
    most = max(cores)
    sums = lines[0]["here"] / 1e3 / network  # a level of the tree between machines sends every sum once
    between = float(np.ceil(np.log2(nodes)))
    parts = {
        "rows": row * rows / (nodes * most * cores[most]),
        "server": once,
        "tree": level * np.log2(most) + sums * between,
    }
    click.echo(
        f"{nodes} machines of {most} workers, {rows:,} rows: {sum(parts.values()):.1f} s ("
        + ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
        + ")"
    )


def terms_of(lines: list[dict[str, Any]], cores: dict[int, float]) -> Any:
    """Of each measurement: rows of a worker at the machine's own share, one, and levels of the tree."""
    return np.array(
        [
            [x["clients"] * x["rows"] / (x["workers"] * cores[x["workers"]]), 1.0, np.log2(x["workers"])]
            for x in lines
        ]
    )


def fit_model(lines: list[dict[str, Any]], cores: dict[int, float]) -> Any:
    """Seconds for a row, once, and for a level; none below zero, errors as shares of what was measured."""
    from scipy.optimize import nnls

    seconds = np.array([line["seconds"] for line in lines])
    return nnls(terms_of(lines, cores) / seconds[:, None], np.ones(len(lines)))[0]


def _efficiency(line: dict[str, Any], lines: list[dict[str, Any]]) -> float:
    """Beside the fewest workers of the same measurement."""
    same = [x for x in lines if (x["scaling"], x["method"]) == (line["scaling"], line["method"])]
    first = min(same, key=lambda x: x["workers"])
    more = line["workers"] / first["workers"] if line["scaling"] == "strong" else 1.0
    return float(first["seconds"] / (more * line["seconds"]))


@main.command()
@_json
@click.option("--rows", "counts", multiple=True, type=int, default=(250_000, 500_000, 1_000_000, 2_000_000))
@click.option("--source", "kinds", multiple=True, default=("npy", "parquet"), show_default=True)
@click.option("--width", default=512, show_default=True)
@click.option("--layers", default=3, show_default=True)
@click.option("--clients", "count", default=8, show_default=True)
@click.option("--budget", default=256, show_default=True, help="MB for derived features, and for row groups.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="For the files; temporary.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Where to draw the growth.")
def rows(
    counts: tuple[int, ...],
    kinds: tuple[str, ...],
    width: int,
    layers: int,
    count: int,
    budget: int,
    folder: Path | None,
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """AFL and DeepAFL on rows that do not lie in memory; all kinds of files at the largest size."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="fedsolve-rows-", dir=folder) as name:
        for number in counts:
            for source in kinds if number == max(counts) else kinds[:1]:
                path = Path(name) / f"rows.{source}"
                write_rows(path, number, width)
                given = {"path": str(path), "rows": number, "width": width, "clients": count}
                for method in ("afl", "deepafl"):
                    lines.append(
                        _apart("rows", source=source, method=method, layers=layers, budget=budget, **given)
                    )
                    _store(lines, json_path)
                for file in Path(name).iterdir():
                    file.unlink()
    columns = ("source", "method", "rows", "width", "seconds", "anonymous", "mapped", "others")
    _finish("Rows beyond memory", columns, lines)
    if plot is not None:
        _draw(lines, plot)


def write_rows(path: Path, count: int, width: int) -> None:
    """Rows of float32 with labels by a linear rule, span by span: .npy with .labels.npy, or .parquet."""
    rng = np.random.default_rng(0)
    rule = rng.standard_normal((width, CLASSES)).astype(np.float32)
    labels = np.empty(count, dtype=np.int64)
    with _Writer(path, count, width) as write:
        for start in range(0, count, _GROUP):
            stop = min(count, start + _GROUP)
            features = rng.standard_normal((stop - start, width), dtype=np.float32)
            labels[start:stop] = np.argmax(features @ rule, axis=1)
            write(start, features, labels[start:stop])
    if path.suffix == ".npy":
        np.save(path.with_suffix(".labels.npy"), labels)


class _Writer:
    def __init__(self, path: Path, count: int, width: int) -> None:
        self._path, self._shape = path, (count, width)

    def __enter__(self) -> Callable[[int, Any, Any], None]:
        if self._path.suffix == ".npy":
            file = np.lib.format.open_memmap(self._path, "w+", np.float32, self._shape)

            def write(start: int, features: Any, labels: Any) -> None:
                file[start : start + len(features)] = features

            self._close: Callable[[], None] = file.flush
            return write
        import pyarrow
        from pyarrow import parquet

        kind = pyarrow.list_(pyarrow.float32(), self._shape[1])
        schema = pyarrow.schema([("features", kind), ("label", pyarrow.int64())])
        writer = parquet.ParquetWriter(self._path, schema, compression="none", use_dictionary=False)

        def write_group(start: int, features: Any, labels: Any) -> None:
            lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(features.ravel()), type=kind)
            writer.write_table(pyarrow.table([lists, pyarrow.array(labels)], schema=schema))

        self._close = writer.close
        return write_group

    def __exit__(self, *_: object) -> None:
        self._close()


# -- one measurement, in a process of its own --------------------------------------------------------


def measure_clients(what: str, clients: int, rows: int, width: int) -> dict[str, Any]:
    """Building and AFL, or Ridge on the same rows."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((clients * rows, width))
    labels = rng.integers(0, CLASSES, len(features))
    owners = rng.permutation(np.repeat(np.arange(clients), rows))
    import fedsolve as fs

    if what == "ridge":
        from sklearn.linear_model import Ridge

        targets = np.eye(CLASSES)[labels]
        with _Timed() as timed, Memory() as memory:
            Ridge(alpha=1.0, fit_intercept=False, copy_X=False).fit(features, targets)
        return timed.found | {"build": 0.0, "build_processor": 0.0, "above_rows": memory.grown}
    with Memory() as memory:
        with _Timed() as built:
            federation = fs.LocalFederation.from_arrays(features, labels, owners, clients)
        with _Timed() as timed:
            fs.AFL(ridge=1.0).fit(federation)
    return timed.found | {
        "build": built.found["seconds"],
        "build_processor": built.found["processor"],
        "above_rows": memory.grown,
    }


def _methods(layers: int, deep: int) -> dict[str, Callable[[], Any]]:
    import fedsolve as fs

    return {
        "afl": lambda: fs.AFL(ridge=1.0),
        "deepafl": lambda: fs.DeepAFL(layers=layers, width=deep),
        "kernelafl": lambda: fs.KernelAFL(landmarks=deep, ridge=1.0),
        "softmax": lambda: fs.Softmax(ridge=1.0),
        "fedavg": lambda: fs.gradient.FedAvg(rounds=layers, network="mlp:64"),
    }


def measure_engines(clients: int, rows: int, width: int, workers: int) -> dict[str, Any]:
    """Each method by both engines; apart: how far their scores differ."""
    import fedsolve as fs

    rng = np.random.default_rng(0)
    features = rng.standard_normal((clients * rows, width))
    noise = rng.standard_normal((len(features), CLASSES))
    labels = np.argmax(features[:, :CLASSES] + noise, axis=1)
    given = features, labels, np.arange(len(features)) % clients
    local, lines = fs.LocalFederation.from_arrays(*given), []
    with fs.RayFederation.from_arrays(*given, workers=workers) as ray:
        for name, method in _methods(3, 512).items():
            seconds, scores = {}, []
            for engine, federation in (("local", local), ("ray", ray)):
                runs = []
                for _ in range(4):
                    with _Timed() as timed:
                        model = method().fit(federation)
                    runs.append(timed.found["seconds"])
                seconds[engine] = min(runs[1:])
                scores.append(model.decision_function(features[:500]))
            line = {"method": name, "exchanges": len(model.history), **seconds}
            apart = f"{np.max(np.abs(scores[0] - scores[1])):.0e}"
            lines.append(line | {"ratio": seconds["ray"] / seconds["local"], "apart": apart})
    return {"lines": lines}


def measure_machines(
    scaling: str,
    methods: list[str],
    workers: int,
    clients: int,
    rows: int,
    width: int,
    deep: int,
    layers: int,
) -> dict[str, Any]:
    """Runs after one of AFL, which waits for everything to start."""
    import hashlib
    import signal

    import fedsolve as fs
    from fedsolve.container import to_bytes

    if scaling == "cores":
        return {"lines": [measure_products(workers)]}
    known = _methods(layers, deep)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((clients * rows, width), dtype=np.float32)
    labels = np.argmax(features[:, :CLASSES], axis=1)
    owners = np.repeat(np.arange(clients), rows)
    # Whatever is derived from rows stays in memory: this measures workers, not disks.
    keywords = {"workers": workers, "memory_budget": 4 * 8 * len(features) * max(width, deep)}
    with _Timed() as started:
        engine = fs.LocalFederation if scaling == "local" else fs.RayFederation
        federation: Any = engine.from_arrays(features, labels, owners, clients, **keywords)
        known["afl"]().fit(federation)
    if scaling == "killed":
        pids = federation.pids

        def kill(answered: int, asked: int) -> None:
            if pids and answered < asked:
                os.kill(pids.pop(), signal.SIGKILL)
                pids.clear()

        federation.progress = kill
    lines = []
    for key in methods:
        with _Timed() as timed:
            model = known[key]().fit(federation)
        here = sum(record.bytes_up / len(record.cohort) for record in model.history) / 1e6
        found = {
            "method": key,
            "start": started.found["seconds"],
            "model": hashlib.sha256(to_bytes(*model.contents())).hexdigest()[:12],
            "exchanges": len(model.history),
            "exchange_seconds": sum(record.seconds for record in model.history),
            "between": here * (min(workers, clients) - 1) * (scaling != "local"),
            "here": here * (scaling != "local"),
        }
        lines.append(timed.found | found)
    if scaling != "local":
        federation.close()
    return {"lines": lines}


def measure_products(workers: int, times: int = 12, side: int = 2048) -> dict[str, Any]:
    """Seconds in which so many processes, with one thread each, multiply matrices of their own."""
    code = (
        "import sys, numpy as np; from threadpoolctl import threadpool_limits as limit; limit(1);"
        f"a = np.random.default_rng(0).random(({side}, {side})); b = a @ a; print(flush=True); input();"
        f"[np.matmul(a, a, out=b) for _ in range({times})]"
    )
    words = [sys.executable, "-c", code]
    started = [subprocess.Popen(words, stdin=-1, stdout=-1, text=True) for _ in range(workers)]
    for process in started:
        process.stdout.readline()  # type: ignore[union-attr]
    with _Timed() as timed:
        for process in started:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        for process in started:
            process.communicate()
    rate = workers * times * 2.0 * side**3 / timed.found["seconds"]
    nothing: dict[str, Any] = dict.fromkeys(("start", "between", "here", "exchanges"), 0)
    return timed.found | nothing | {"method": "products", "model": f"{rate / 1e9:.0f} GFLOP/s", "rate": rate}


def measure_rows(
    source: str, method: str, path: str, rows: int, width: int, clients: int, layers: int, budget: int
) -> dict[str, Any]:
    """Peak anonymous and mapped memory of one training."""
    import fedsolve as fs

    if source == "npy":
        features: Any = np.load(path, mmap_mode="r")
        labels = np.load(Path(path).with_suffix(".labels.npy"))
    else:
        features = fs.ParquetRows(path, "label", memory=budget << 20)
        labels = features.labels
    owners = np.arange(rows) * clients // rows
    deep = fs.DeepAFL(layers=layers, width=width)
    with Memory() as memory, Memory(MAPPED) as mapped, _Timed() as timed:
        federation = fs.LocalFederation.from_arrays(
            features, labels, owners, clients, memory_budget=budget << 20, scratch=Path(path).parent
        )
        (fs.AFL(ridge=1.0) if method == "afl" else deep).fit(federation)
    return timed.found | {"anonymous": memory.peak, "mapped": mapped.peak}


class _Timed:
    """Seconds, seconds of processor time, and the share of the machine that others had."""

    def __enter__(self) -> _Timed:
        self._others, self._processor, self._started = OtherWork(), time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.found: dict[str, Any] = {
            "seconds": time.perf_counter() - self._started,
            "processor": time.process_time() - self._processor,
            "others": self._others.share(),
        }


_MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "clients": measure_clients,
    "engines": measure_engines,
    "machines": measure_machines,
    "rows": measure_rows,
}


@cache
def _machine() -> dict[str, Any]:
    return machine.describe()


def _store(lines: list[dict[str, Any]], path: Path | None) -> None:
    """Tell what was measured last, and keep all of it: a long benchmark may be stopped."""
    machine.progress(str(lines[-1]))
    if path is not None:
        machine.save(path, {"machine": _machine(), "load": os.getloadavg(), "lines": lines})


def _apart(name: str, **sizes: Any) -> dict[str, Any]:
    line = [sys.executable, "-m", "benchmarks.scale", "measure", name, json.dumps(sizes)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{name} {sizes}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return sizes | found


@main.command(hidden=True)
@click.argument("name")
@click.argument("sizes")
def measure(name: str, sizes: str) -> None:
    """One measurement, as a line of JSON."""
    click.echo(json.dumps(_MEASURES[name](**json.loads(sizes))))


def _finish(title: str, columns: tuple[str, ...], lines: list[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(*(f"{v:.2f}" if isinstance(v := line[name], float) else str(v) for name in columns))
    Console(width=140, highlight=False).print(table)
    print("seconds of the clock and of the processor; MB; others: share of the machine that others had.")


def _draw(lines: list[dict[str, Any]], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    from fedsolve.pages.plots import MARKERS, SERIES, SETTINGS

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        seconds, memory = figure.subplots(1, 2)
    for place, (method, label) in enumerate((("afl", "AFL"), ("deepafl", "DeepAFL"))):
        chosen = [line for line in lines if line["method"] == method and line["source"] == "npy"]
        counts = [line["rows"] / 1e6 for line in chosen]
        look: dict[str, Any] = {"marker": MARKERS[place], "color": SERIES[place], "label": label}
        seconds.plot(counts, [line["processor"] for line in chosen], **look)
        memory.plot(counts, [line["anonymous"] / 1e3 for line in chosen], **look)
    seconds.set(xlabel="million rows", ylabel="processor seconds", ylim=(0, None), xlim=(0, None))
    memory.set(xlabel="million rows", ylabel="anonymous memory, GB", ylim=(0, 1.5), xlim=(0, None))
    seconds.legend(frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw_workers(lines: list[dict[str, Any]], path: Path) -> None:
    """How many times as fast as one worker (strong), and the efficiency of weak scaling."""
    import matplotlib
    from matplotlib.figure import Figure

    from fedsolve.pages.plots import MARKERS, SERIES, SETTINGS

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        strong, weak = figure.subplots(1, 2)
    names = {"afl": "AFL", "deepafl": "DeepAFL", "kernelafl": "KernelAFL", "products": "the machine itself"}
    there = {line["method"] for line in lines}
    for place, (method, label) in enumerate((key, label) for key, label in names.items() if key in there):
        look: dict[str, Any] = {"marker": MARKERS[place], "color": SERIES[place], "label": label}
        for axes, kinds in ((strong, ("strong", "cores")), (weak, ("weak", "cores"))):
            own = [x for x in lines if x["method"] == method and x["scaling"] in kinds]
            counts = [line["workers"] for line in own]
            gains = axes is strong
            axes.plot(counts, [x["efficiency"] * (x["workers"] if gains else 1) for x in own], **look)
    counts = sorted({line["workers"] for line in lines})
    strong.plot(counts, counts, linestyle=":", color="0.5", label="as many times")
    for axes, what in ((strong, "times as fast as one worker"), (weak, "efficiency, as many rows each")):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="workers", ylabel=what, xticks=counts, xticklabels=list(map(str, counts)))
    strong.set_yscale("log", base=2)
    strong.set(yticks=counts, yticklabels=list(map(str, counts)))
    weak.set_ylim(0, 1.15)
    strong.legend(frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.scale")
