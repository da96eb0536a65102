"""`python -m benchmarks [plans|rate|growth|personal]`: all of the first three, or one part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import growth, machine, personal, plans, rate, report
from benchmarks.data import Rows, from_file, synthetic
from benchmarks.transcription import Setting
from benchmarks.worker import VARIANTS
from fedsolve.errors import DataError

_json = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all results here."
)
_data = click.option(
    "--data",
    "data_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="npz with x_train, y_train (x_test, y_test, scale, offset); synthetic rows without it.",
)


class Bench:
    """Collects results while they are shown."""

    def __init__(self, json_path: Path | None) -> None:
        self.console = Console(width=140, highlight=False, markup=False)
        self.json_path = json_path
        self.results: dict[str, Any] = {}

    def open(self) -> None:
        machine.progress("measuring the machine's matrix-multiply rate")
        self.results["machine"] = machine.describe()
        report.show_machine(self.console, self.results["machine"])

    def plans(self, rows: Rows, setting: Setting, *how: Any) -> None:
        result = plans.compare(rows, setting, *how)
        self.results.setdefault("plans", []).append(result)
        report.show_plans(self.console, result)

    def rate(self, **sizes: int) -> None:
        self.results["rate"] = rate.measure(**sizes)
        report.show_rate(self.console, self.results["rate"])

    def growth(self) -> None:
        self.results["growth"] = growth.measure()
        report.show_growth(self.console, self.results["growth"])

    def close(self) -> None:
        machine.save(self.json_path, self.results)


@click.group(invoke_without_command=True)
@_json
@_data
@click.pass_context
def main(context: click.Context, json_path: Path | None, data_path: Path | None) -> None:
    """Speed, traffic and memory of the closed forms. Without a command: all parts."""
    if context.invoked_subcommand is not None:
        if json_path is not None or data_path is not None:
            raise click.UsageError("give --json and --data after the command.")
        return
    bench = Bench(json_path)
    bench.open()
    setting = Setting(layers=5, width=1024)
    bench.plans(synthetic(20_000, 512), setting, 100, 0.1)
    if data_path is not None:
        bench.plans(_rows(data_path, None), setting, 100, 0.1)
    bench.rate()
    bench.growth()
    bench.close()


@main.command("plans")
@_json
@_data
@click.option("--rows", type=click.IntRange(min=1), help="Rows; 20,000 synthetic ones or the whole file.")
@click.option("--features", default=512, show_default=True, help="Features of synthetic rows.")
@click.option("--clients", default=100, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--layers", default=5, show_default=True)
@click.option("--ridge", default=1.0, show_default=True)
@click.option("--residual-ridge", default=0.01, show_default=True)
@click.option("--alpha", default=0.1, show_default=True, help="Dirichlet concentration; 0 is IID.")
@click.option("--repeats", default=3, show_default=True, help="Turns of lean and the transcription.")
@click.option("--only", multiple=True, type=click.Choice(VARIANTS), help="Variants; all when not given.")
def plans_command(
    json_path: Path | None,
    data_path: Path | None,
    rows: int | None,
    features: int,
    clients: int,
    width: int,
    layers: int,
    ridge: float,
    residual_ridge: float,
    alpha: float,
    repeats: int,
    only: tuple[str, ...],
) -> None:
    """Each exchange plan against a transcription of the authors' formulation."""
    found = synthetic(rows or 20_000, features) if data_path is None else _rows(data_path, rows)
    bench = Bench(json_path)
    bench.open()
    setting = Setting(layers, width, ridge, residual_ridge)
    bench.plans(found, setting, clients, alpha or None, repeats, only or VARIANTS)
    bench.close()


@main.command("rate")
@_json
@click.option("--clients", default=40, show_default=True)
@click.option("--rows-each", default=500, show_default=True)
@click.option("--features", default=512, show_default=True)
@click.option("--width", default=1024, show_default=True)
@click.option("--layers", default=5, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def rate_command(json_path: Path | None, **sizes: int) -> None:
    """Share of the machine's matrix-multiply rate that participants reach."""
    bench = Bench(json_path)
    bench.open()
    bench.rate(**sizes)
    bench.close()


@main.command("growth")
@_json
def growth_command(json_path: Path | None) -> None:
    """Seconds against rows, width, clients and layers."""
    bench = Bench(json_path)
    bench.open()
    bench.growth()
    bench.close()


@main.command("personal")
@_json
@click.option(
    "--data",
    "data_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="npz with x_train, y_train, x_test, y_test (scale, offset).",
)
@click.option("--rows", type=click.IntRange(min=1), help="Training rows; all of the file.")
@click.option("--clients", multiple=True, type=int, default=(50, 100), show_default=True)
@click.option("--alpha", multiple=True, type=float, default=(0.1, 0.5, 1.0), show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--width", default=1024, show_default=True, help="Of both streams.")
@click.option("--ridge", default=0.01, show_default=True)
@click.option("--refinement-ridge", default=1.0, show_default=True)
@click.option("--layers", default=5, show_default=True, help="Blocks of the DeepAFL entries.")
@click.option("--gradient", is_flag=True, help="Gradient methods too (needs fedsolve[torch]).")
@click.option("--rounds", default=200, show_default=True, help="Of the gradient methods; FedPCL has 3.")
@click.option("--network", default="linear", show_default=True, help="Of the gradient methods.")
@click.option("--rate", default=0.05, show_default=True, help="Of the gradient methods, FedPCL aside.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*personal.ENTRIES, *personal.BY_GRADIENT]),
    help="Entries; all of them.",
)
@click.option(
    "--figures", type=click.Path(file_okay=False, path_type=Path), help="Folder for the two figures."
)
def personal_command(
    json_path: Path | None,
    data_path: Path,
    rows: int | None,
    clients: tuple[int, ...],
    alpha: tuple[float, ...],
    seeds: int,
    width: int,
    ridge: float,
    refinement_ridge: float,
    layers: int,
    gradient: bool,
    rounds: int,
    network: str,
    rate: float,
    only: tuple[str, ...],
    figures: Path | None,
) -> None:
    """Local accuracy of personalised models against their streams and against shared models."""
    found = _rows(data_path, rows)
    if not len(found.test_labels):
        raise click.UsageError(f"{data_path} has no test rows (x_test, y_test).")
    setting = personal.Setting(width, width, ridge, refinement_ridge, layers, rounds, network, rate)
    needed = ("primary only", "local only", "APFL, auto")
    known = (*personal.ENTRIES, *(personal.BY_GRADIENT if gradient or only else ()))
    entries = tuple(name for name in known if not only or name in only or name in needed)
    result = personal.measure(found, setting, clients, alpha, range(seeds), entries)
    personal.show(Console(width=140, highlight=False, markup=False), result)
    if figures is not None:
        personal.draw(result, figures)
    machine.save(json_path, result)


def _rows(path: Path, limit: int | None) -> Rows:
    try:
        return from_file(path, limit)
    except DataError as problem:
        raise click.UsageError(str(problem)) from None


@main.command("overhead")
@click.option("--pairs", default=20, show_default=True, help="Pairs of rounds per method, timed A B B A.")
@click.option("--network", default="mobilenet_v2", show_default=True)
@click.option("--clients", default=2, show_default=True)
@click.option("--rows", default=320, show_default=True, help="Rows of every client.")
@click.option("--epochs", default=1, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@_json
def _overhead(json_path: Path | None, **how: Any) -> None:
    """What feedback alignment, a proximal term and a generator add to a round of FedAvg (needs torch)."""
    from benchmarks import overhead

    found = overhead.measure(**how)
    report.show_overhead(Console(width=140, highlight=False, markup=False), found)
    machine.save(json_path, found)


@main.command("speed")
@click.option("--network", default="cnn", show_default=True)
@click.option("--clients", default=10, show_default=True)
@click.option("--rows", default=300, show_default=True, help="Images of each client.")
@click.option("--epochs", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--workers", multiple=True, type=int, help="Clients at once; 1 and all cores without it.")
@click.option("--flower/--no-flower", default=True, show_default=True, help="Flower's simulation too.")
@_json
def _speed(json_path: Path | None, **how: Any) -> None:
    """A round of FedAvg beside plain loops and Flower's simulation (needs torch; flwr and ray)."""
    from benchmarks import speed

    found = speed.measure(**how)
    click.echo(speed.table(found))
    machine.save(json_path, found)


@main.command("sketch")
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=40, show_default=True)
@click.option("--sketch", default=2048, show_default=True)
@click.option("--network", default="mobilenet_v2", show_default=True)
@click.option("--epochs", default=5, show_default=True)
@click.option("--limit", type=int, default=None, help="Only the first images.")
@click.option("--device", default="auto", show_default=True)
@_json
def _sketch(data: Path, json_path: Path | None, **how: Any) -> None:
    """Whether sketched updates choose the layer that whole ones would, on Fashion-MNIST (needs torch)."""
    from benchmarks import sketch

    found = sketch.measure(data, **how)
    for name, value in found.items():
        click.echo(f"{name:14} {value}")
    machine.save(json_path, found)


@main.command("checked")
@click.option("--width", default=1024, show_default=True)
@click.option("--classes", default=100, show_default=True)
@click.option("--clients", default=4, show_default=True)
@click.option("--layers", default=3, show_default=True)
@_json
def _checked(json_path: Path | None, **how: Any) -> None:
    """What it costs that sites check the questions of a secure run (needs fedsolve[privacy])."""
    from benchmarks import checked

    measured = checked.measure(**how)
    checked.show(Console(width=140, highlight=False, markup=False), measured)
    machine.save(json_path, measured)


@main.command("masks")
@click.option("--width", default=1024, show_default=True)
@click.option("--classes", default=100, show_default=True)
@click.option("--clients", multiple=True, type=int, default=(20, 200), show_default=True)
@click.option("--slots", default=10, show_default=True, help="Sums that the keys of a setup last for.")
@click.option("--mebibytes", default=16, show_default=True, help="Of the vector that rates are measured on.")
@click.option("--repeats", default=5, show_default=True)
@_json
def _masks(json_path: Path | None, **how: Any) -> None:
    """What secure sums cost on one core (needs fedsolve[privacy])."""
    from benchmarks import masks

    measured = masks.measure(**how)
    masks.show(Console(width=140, highlight=False, markup=False), measured)
    machine.save(json_path, measured)


@main.command("calibration")
@click.argument("path", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_json
def _calibration(path: Path | None, json_path: Path | None) -> None:
    """Calibration error and log loss before and after, on digits, breast cancer and a feature file PATH."""
    from benchmarks import calibration

    found = calibration.measure(path)
    calibration.show(Console(width=140, highlight=False, markup=False), found)
    machine.save(json_path, found)


@main.command("heads")
@_json
@click.option(
    "--data",
    "data_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="npz with x_train, y_train, x_test, y_test (scale, offset); without it, only --figure of --json.",
)
@click.option("--clients", default=100, show_default=True)
@click.option("--alpha", default=0.1, show_default=True, help="Dirichlet concentration; 0 is IID.")
@click.option("--memory", default=4.0, show_default=True, help="GB that all clients together may keep.")
@click.option("--only", multiple=True, help="Rows by name; all but those that take long.")
@click.option("--grid", is_flag=True, help="Settings among which test labels choose, instead of the rows.")
@click.option("--divided-otherwise", metavar="ROW", help="How far its scores differ for other clients.")
@click.option("--figure", type=click.Path(dir_okay=False, path_type=Path), help="Draw all rows of --json.")
def _heads(
    json_path: Path | None,
    data_path: Path | None,
    clients: int,
    alpha: float,
    memory: float,
    only: tuple[str, ...],
    grid: bool,
    divided_otherwise: str | None,
    figure: Path | None,
) -> None:
    """Methods for frozen features beside each other; rows of --json that are not measured again stay."""
    from benchmarks import heads

    known = (*heads.ENTRIES, *heads.GRID)
    unknown = sorted({*only, *filter(None, [divided_otherwise])} - set(known))
    if unknown:
        raise click.UsageError(f"no row is called '{unknown[0]}'; known are {', '.join(known)}.")
    if divided_otherwise is not None and data_path is not None:
        found = heads.difference(_rows(data_path, None), clients, alpha, divided_otherwise, memory)
        click.echo(json.dumps(found))
        return
    only = tuple(heads.GRID) if grid else only
    kept: dict[str, Any] = machine.saved(json_path, {})
    if data_path is not None:
        for found in heads.measure(_rows(data_path, None), clients, alpha, only, memory):
            rows = {**kept.get("rows", {}), **found["rows"]}
            kept = found | {"rows": {name: rows[name] for name in known if name in rows}}
            machine.save(json_path, kept)
    if not kept:
        raise click.UsageError("give --data to measure, or --json with rows that were.")
    heads.show(Console(width=140, highlight=False, markup=False), kept)
    if figure is not None:
        heads.draw(kept, figure)


@main.command("heads-settings")
@click.argument("method", type=click.Choice(["softmax", "kernel", "penalties"]))
@click.option(
    "--data",
    "data_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="npz with x_train, y_train; its test rows are not looked at.",
)
@click.option("--landmarks", default=2048, show_default=True)
@click.option("--every/--default", default=True, help="Every bandwidth and ridge, or the default ones.")
def _heads_settings(method: str, data_path: Path, landmarks: int, every: bool) -> None:
    """Held-out accuracies of the settings among which the defaults were chosen."""
    from benchmarks import heads_settings

    rows = _rows(data_path, None)
    found = {
        "softmax": lambda: heads_settings.softmax(rows),
        "kernel": lambda: heads_settings.kernel(rows, landmarks, every),
        "penalties": lambda: heads_settings.penalties(rows),
    }
    for line in found[method]():
        click.echo("  ".join(f"{name} {value}" for name, value in line.items()))


@main.command("fashion-mnist", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def _fashion_mnist(words: tuple[str, ...]) -> None:
    """FLFA on Fashion-MNIST in the paper's setting, with and without feedback alignment (needs torch)."""
    from benchmarks import fashion_mnist

    fashion_mnist.main(words)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
