"""Results as tables and sentences for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import plans, rate

_GIGA, _MEGA = 1e9, 1e6
_QUIET = 0.05


def show_machine(console: Console, machine: dict[str, Any]) -> None:
    memory = machine["memory_bytes"]
    blas = ", ".join(
        f"{b['internal_api']} {b['version']} ({b['architecture']}, {b['num_threads']} threads)"
        for b in machine["blas"]
    )
    console.print(
        f"{machine['processor']}, {machine['cores']} cores"
        + (f", {memory / 2**30:.0f} GiB" if memory else "")
        + f"\nPython {machine['python']}, fedsolve {machine['fedsolve']}, numpy {machine['numpy']}, "
        f"scipy {machine['scipy']}\n{blas}\n"
        f"float64 products: {machine['matmul_one_thread'] / _GIGA:.1f} GFLOP/s on one thread, "
        f"{machine['matmul_all_threads'] / _GIGA:.1f} on all\n"
    )


def show_plans(console: Console, result: dict[str, Any]) -> None:
    setting, variants, ratios = result["setting"], result["variants"], result["ratios"]
    table = _table(
        f"DeepAFL on {result['data']}, {result['classes']} classes: {result['clients']} clients "
        f"({result['partition']}), d={setting['width']}, T={setting['layers']}, float64",
        "variant",
    )
    for name in ("exchanges", "seconds", "x", "up MB", "x", "down MB", "x", "peak MB", "x", "difference"):
        table.add_column(name, justify="right")
    for name, found in variants.items():
        ratio = ratios.get(name, {})
        table.add_row(
            name,
            str(found["exchanges"]),
            f"{found['seconds']:.2f}",
            _times(ratio.get("seconds")),
            f"{found['bytes_up'] / _MEGA:.1f}",
            _times(ratio.get("bytes_up")),
            f"{found['bytes_down'] / _MEGA:.1f}",
            _times(ratio.get("bytes_down")),
            _mega(found["peak_bytes"]),
            _times(ratio.get("peak_bytes")),
            f"{found['difference']:.0e}" if "difference" in found else "",
        )
    console.print(table)
    console.print(
        "x: how many times faster or smaller than the transcription with the same workers. up, down: "
        "payload of the whole run, all clients;\nthe last classifier's delivery is left out on both sides. "
        "difference: largest relative difference of any weight.\n"
        "transcription: the authors' formulation, W RᵀF formed from left to right; cheap-order: as W (RᵀF); "
        "default-threads: clients in turn, BLAS's own threads."
    )
    for name, found in variants.items():
        turns = [_turn(run["seconds"], run["others"]) for run in found["runs"]]
        console.print(f"{name}: {', '.join(turns)}" + (" (best shown)" if len(turns) > 1 else ""))
    loads = [found["others"] for found in variants.values() if found["others"] is not None]
    if max(loads, default=0.0) > _QUIET:
        console.print(
            f"other processes had up to {max(loads):.0%} of the machine during the runs shown: ratios of "
            "seconds are only fair on a quiet one."
        )
    if "lean" in variants:
        floor = result["floor"]
        times = variants["lean"]["seconds"] / floor["seconds"]
        console.print(
            f"lean: {times:.2f} times the {floor['seconds']:.1f} s that the participants' operations take "
            f"at this machine's rates, dgemm {floor['dgemm'] / 1e9:.0f} and dsyrk {floor['dsyrk'] / 1e9:.0f} "
            "GFLOP/s."
        )
    scores = sorted({f"{100 * found['accuracy']:.2f}" for found in variants.values() if "accuracy" in found})
    if scores:
        console.print(f"test accuracy: {' to '.join(dict.fromkeys((scores[0], scores[-1])))} %")
    if "lean" not in ratios:
        return
    lean, freely = ratios["lean"], variants.get("transcription-default-threads")
    quiet = all((variants[name]["others"] or 0.0) <= _QUIET for name in plans.MAIN_PAIR)
    _check(console, "lean is faster, same workers", lean["seconds"], plans.SPEED_TARGET, quiet)
    if freely is not None:
        faster = freely["seconds"] / variants["lean"]["seconds"]
        console.print(f"  lean is faster, default threading: {faster:.2f}x")
    _check(console, "lean uploads less", lean["bytes_up"], plans.UP_TARGET)
    _check(console, "lean downloads less", lean["bytes_down"], plans.DOWN_TARGET)
    console.print()


def show_rate(console: Console, result: dict[str, Any]) -> None:
    table = _table(
        f"Participants of a lean run: {result['clients']} clients of {result['rows_each']} rows, "
        f"{result['features']} features, d={result['width']}, T={result['layers']}",
        "exchange",
    )
    for name in ("GFLOP", "seconds", "GFLOP/s", "share"):
        table.add_column(name, justify="right")
    counted, seconds, machine = result["operations"], result["seconds"], result["matmul_rate"]
    lines = [(kind, counted[kind], seconds[kind]) for kind in seconds]
    lines.append(("all", sum(counted.values()), sum(seconds.values())))
    for kind, operations, taken in lines:
        reached = operations / taken
        table.add_row(
            kind,
            f"{operations / _GIGA:.1f}",
            f"{taken:.2f}",
            f"{reached / _GIGA:.1f}",
            f"{reached / machine:.0%}",
        )
    console.print(table)
    console.print(
        f"machine: {machine / _GIGA:.1f} GFLOP/s in square products; turns: "
        + ", ".join(_turn(s, o) for s, o in zip(result["all_seconds"], result["others"], strict=True))
    )
    fastest = result["all_seconds"].index(min(result["all_seconds"]))
    verdict = _verdict(result["share"] >= rate.TARGET, (result["others"][fastest] or 0.0) <= _QUIET)
    console.print(
        f"  share of the machine's rate: {result['share']:.0%} (target {rate.TARGET:.0%}: {verdict})\n"
    )


def show_growth(console: Console, points: list[dict[str, Any]]) -> None:
    table = _table("Growth: 10 classes, features of width d, IID clients, lean", "varied")
    for name in ("N", "d", "K", "T", "AFL s", "GFLOP/s", "DeepAFL s", "in exchanges", "GFLOP/s", "others"):
        table.add_column(name, justify="right")
    before = None
    for point in points:
        if before not in (None, point["varied"]):
            table.add_section()
        before = point["varied"]
        afl, deep = point["afl"], point["deepafl"]
        table.add_row(
            point["varied"],
            *(str(point[name]) for name in "NdKT"),
            f"{afl['seconds']:.3f}",
            f"{afl['rate'] / _GIGA:.1f}",
            f"{deep['seconds']:.2f}",
            f"{deep['exchange_seconds']:.2f}",
            f"{deep['rate'] / _GIGA:.1f}",
            "" if deep["others"] is None else f"{deep['others']:.0%}",
        )
    console.print(table)
    console.print("others: share of the machine that other processes had during the DeepAFL run shown.")


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first)
    return table


def _check(console: Console, what: str, found: float, target: float, quiet: bool = True) -> None:
    console.print(f"  {what}: {found:.2f}x (target {target:g}x: {_verdict(found >= target, quiet)})")


def _verdict(met: bool, quiet: bool) -> str:
    """Met or not; a busy machine slows both sides by chance, so nothing timed on it decides."""
    return ("met" if met else "not met") + ("" if quiet else ", but on a busy machine: run it again")


def _turn(seconds: float, others: float | None) -> str:
    """Seconds, and how much of the machine other processes had meanwhile."""
    return f"{seconds:.2f} s" + ("" if others is None else f" [others {others:.0%}]")


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _mega(size: int | None) -> str:
    return "" if size is None else f"{size / _MEGA:.0f}"


def show_overhead(console: Console, found: dict[str, Any]) -> None:
    """Ratios of a round's seconds, with the interval of the median."""
    work = f"{found['steps']} steps of {found['batch']} rows"
    table = Table(title=f"A round of {work}, {found['network']} on {found['device']}")
    for heading in ("method", "pairs", "median of ratios to FedAvg", "95 % interval", "FedAvg, s a round"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for entry in found["results"]:
        table.add_row(
            entry["method"],
            str(entry["pairs"]),
            f"{entry['median']:.3f}",
            f"{entry['low']:.3f} to {entry['high']:.3f}",
            f"{entry['baseline_seconds']:.3f}",
        )
    console.print(table)
