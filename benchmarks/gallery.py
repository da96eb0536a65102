"""The gallery of results: `python -m benchmarks.gallery` writes docs/results.md from benchmarks/results.

A claim is a heading, the files that it rests on, the command that makes them, and a function that gives a
sentence and a table of what they hold. Date and machine come from the files; where one does not say, the page
does. A file that is not there is listed with its command, so that nothing is claimed without numbers.
`--check` writes nothing and ends with 1 if the page is not what the files make.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
Told = tuple[str, list[list[str]]]
"""A sentence, and a table whose first row is its heading."""


@dataclass(frozen=True)
class Claim:
    """What is claimed, in which files its numbers are, and how they are told."""

    title: str
    file: str
    command: str
    tell: Callable[[Any], Told]
    more: str = ""
    """A page that says more."""


def read(path: Path) -> tuple[Any, dict[str, Any]]:
    """A file's results, and its day and machine; those of a jsonl file stand in its lines."""
    if path.suffix == ".json":
        document = json.loads(path.read_text())
        results = document.pop("results")
        if isinstance(results, dict) and "machine" in results:
            document["machine"] = results["machine"]  # says more: devices and rates
        return results, document
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    days = sorted({line.get("date") or line["time"][:10] for line in lines})
    about = {"machine": lines[0]["machine"]} if "machine" in lines[0] else {}
    return lines, about | {"date": " to ".join(sorted({days[0], days[-1]}))}


def number(value: float) -> str:
    """Three figures, or a power of ten."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def agreement(data: Any) -> Told:
    lines = [each for each in data if each.get("difference") is not None]
    failed = sorted({each["method"] for each in data if each["failed"]})
    missing = sorted({each["method"] for each in data} - {each["method"] for each in lines})
    worst = sorted(lines, key=lambda each: -each["difference"])
    told = f"{len(lines)} methods, {sum(each['comparisons'] for each in lines):,} comparisons; "
    told += f"the largest difference is {number(worst[0]['difference'])}. "
    told += (
        f"Failed: {', '.join(failed) or 'none'}. Not measured in this run: {', '.join(missing) or 'none'}. "
    )
    table = [["method", "compared with", "largest difference"]]
    rows = [[each["method"], each["oracle"], number(each["difference"])] for each in worst[:10]]
    return told + "The ten largest:", table + rows


def outside(data: Any) -> Told:
    table = [["method", "whose code, and what was set alike", "largest difference"]]
    for each in data:
        table.append([each["method"], each["oracle"], number(each["difference"])])
    return "Methods beside other people's programs, step for step in float64.", table


def exported(data: Any) -> Told:
    table = [["model", "precision", "largest difference", "model file, kB", "ONNX, kB"]]
    for each in data:
        sizes = [f"{each[name] / 1e3:.0f}" for name in ("file_bytes", "onnx_bytes")]
        table.append([each["model"], each["precision"], number(each["difference"]), *sizes])
    return "An exported model gives the probabilities of the model itself.", table


def plans(data: Any) -> Told:
    (plan, *_) = data["plans"]
    names = {"lean": "fedsolve", "transcription": "the authors' formulation"}
    table = [["", "seconds", "GB up", "GB down", "test accuracy, %", "scores differ by"]]
    for name, each in plan["variants"].items():
        row = [f"{each['seconds']:.1f}", f"{each['bytes_up'] / 1e9:.1f}", f"{each['bytes_down'] / 1e9:.2f}"]
        row += [f"{100 * each['accuracy']:.2f}", number(each["difference"])]
        table.append([names.get(name, name), *row])
    ratio = plan["ratios"]["lean"]
    told = (
        f"DeepAFL of {plan['setting']['layers']} layers over {plan['clients']} clients ({plan['data']}): "
        f"{ratio['seconds']:.1f} times as fast, {ratio['bytes_up']:.1f} times fewer bytes up and "
        f"{ratio['bytes_down']:.0f} times fewer down than the authors' formulation with as many workers."
    )
    return told, table


def gpu(data: Any) -> Told:
    table = [["classes", "fedsolve, s", "authors' formulas, rows on the device, s", "authors' data path, s"]]
    for classes in (10, 100):
        fit, theirs = data[f"fit_{classes}"], data[f"authors_{classes}"]
        cells = [
            f"{theirs[name]:.2f} ({theirs[f'{name}_ratio']:.1f} x)"
            for name in ("resident", "their_data_path")
        ]
        table.append([str(classes), f"{fit['seconds']:.2f}", *cells])
    fit = data["fit_10"]
    told = f"DeepAFL of {fit['layers']} layers, {fit['rows']:,} rows, {fit['clients']} clients, on one GPU."
    return told, table


def kernel(data: Any) -> Told:
    table = [["landmarks", "seconds", "share of the device's product rate", "peak memory, GB"]]
    for name, each in data.items():
        if name.startswith("kernel_"):
            row = [f"{each['seconds']:.2f}", f"{each['share']:.0%}", f"{each['peak_bytes'] / 1e9:.0f}"]
            table.append([f"{each['landmarks']:,}", *row])
    real = data["real"]
    host, device = real["cpu"], next(each for name, each in real.items() if name.startswith("cuda"))
    told = (
        f"50,000 random rows, 100 classes. On features of CIFAR-10 with {real['landmarks']:,} landmarks: "
        f"{device['seconds']:.2f} s and {device['accuracy']:.2%} on the device, {host['seconds']:.0f} s and "
        f"{host['accuracy']:.2%} on its host, scores {number(real['scores_apart'])} apart."
    )
    return told, table


def workers(data: Any) -> Told:
    methods = {"deepafl": "DeepAFL", "afl": "AFL", "kernelafl": "KernelAFL"}
    heads = [head for name in methods.values() for head in (f"{name}, s", "times as fast")]
    table = [["workers", *heads, "bare products"]]
    strong = {(x["method"], x["workers"]): x for x in data["lines"] if x["scaling"] in ("strong", "cores")}
    for count in sorted({workers for _, workers in strong}):
        row = [str(count)]
        for name in methods:
            each = strong[name, count]
            row += [f"{each['seconds']:.2f}", f"{each['efficiency'] * count:.1f}"]
        table.append([*row, f"{strong['products', count]['efficiency'] * count:.1f} times"])
    one = strong["deepafl", 1]
    told = (
        f"{one['clients'] * one['rows']:,} rows over workers in Ray, beside what the cores themselves give."
    )
    return told, table


def clients(data: Any) -> Told:
    table = [["clients", "rows each", "columns", "fedsolve, s", "scikit-learn's Ridge, pooled, s"]]
    pairs = {(each["clients"], each["rows"], each["width"]): {} for each in data["lines"]}
    for each in data["lines"]:
        pairs[each["clients"], each["rows"], each["width"]][each["what"]] = each["seconds"]
    for (count, rows, width), seconds in pairs.items():
        table.append(
            [f"{count:,}", str(rows), str(width), *(f"{seconds[w]:.1f}" for w in ("fedsolve", "ridge"))]
        )
    return (
        "AFL over many clients in one process, beside one ridge regression of the pooled rows.",
        table,
    )


def rows(data: Any) -> Told:
    table = [["rows", "from", "method", "seconds", "memory beside mapped rows, MB"]]
    for each in data["lines"]:
        row = [f"{each['rows']:,}", each["source"], each["method"], f"{each['seconds']:.1f}"]
        table.append([*row, f"{each['anonymous']:.0f}"])
    return "Rows stay on the disk, mapped or read in blocks.", table


def tables(data: Any) -> Told:
    lines = data
    methods = sorted({each["method"] for each in lines})
    names = sorted({each["table"] for each in lines})
    table = [["table", *methods]]

    def mean(method: str, what: str, *of: str) -> float | None:
        found = [each[what] for each in lines if each["method"] == method and each["table"] in of]
        return statistics.fmean(found) if found else None

    for name in names:
        means = [mean(method, "accuracy", name) for method in methods]
        table.append([name, *("" if each is None else f"{100 * each:.1f}" for each in means)])
    for label, what, scale in (("mean, %", "accuracy", 100), ("seconds, mean", "seconds", 1)):
        means = [mean(method, what, *names) for method in methods]
        table.append([label, *("" if each is None else f"{scale * each:.3g}" for each in means)])
    splits = len({each["split"] for each in lines})
    told = f"Test accuracy in % on {len(names)} tables of scikit-learn, mean of {splits} splits. "
    return told + "fedsolve's classifiers have no setting given; scikit-learn's search theirs.", table


def heads(data: Any) -> Told:
    table = [["head", "test accuracy, %", "exchanges", "MB up", "seconds"]]
    for name, each in sorted(data["rows"].items(), key=lambda item: -item[1]["accuracy"]):
        row = [f"{100 * each['accuracy']:.2f}", str(each["exchanges"]), f"{each['bytes_up'] / 1e6:,.0f}"]
        table.append([name, *row, number(each["seconds"])])
    told = (
        f"Heads on frozen features ({data['data']}), {data['clients']} clients, Dirichlet {data['alpha']}: "
    )
    return told + "closed forms beside 200 rounds of back-propagation (FedAvg).", table


def gradient(data: Any) -> Told:
    partitions = list(dict.fromkeys(each["partition"]["name"] for each in data))
    table = [["method", *partitions, "exchanges", "seconds"]]
    for method in dict.fromkeys(each["method"] for each in data):
        own = [each for each in data if each["method"] == method]
        best = {each["partition"]["name"]: _best(each) for each in own}
        cells = [f"{100 * best[name]:.2f}" if name in best else "" for name in partitions]
        seconds = statistics.fmean(each["seconds"] for each in own)
        table.append([method, *cells, str(own[0]["exchanges"]), number(seconds)])
    told = "Test accuracy in % by partition. Gradient methods are scored in their best round."
    return told, table


def _best(cell: Any) -> float:
    return float((cell["measures"] or {}).get("best_round", cell["accuracy"]))


def personal(data: Any) -> Told:
    cells = data["cells"]
    names = list(dict.fromkeys(name for cell in cells for name in cell["entries"]))
    settings = sorted(
        {(cell["clients"], cell["alpha"]) for cell in cells}, key=lambda each: (each[0], -each[1])
    )
    table = [["", *(f"{count} clients, Dirichlet {alpha:g}" for count, alpha in settings)]]
    for name in names:
        row = []
        for setting in settings:
            found = [
                cell["entries"][name]["mean"]
                for cell in cells
                if (cell["clients"], cell["alpha"]) == setting and name in cell["entries"]
            ]
            row.append(f"{100 * statistics.fmean(found):.1f}" if found else "")
        table.append([name, *row])
    return (
        "Mean accuracy in % of clients on rows of their own kind, with a shared model and with their own.",
        table,
    )


def speed(data: Any) -> Told:
    table = [["way", "median seconds of a round", "times fedsolve"]]
    for each in data["ways"]:
        table.append([each["way"], f"{each['median']:.2f}", f"{each['ratio']:.2f}"])
    task = data["task"]
    told = f"A round of FedAvg, {task['clients']} clients of {task['rows']} rows, network {task['network']}, "
    told += f"{task['device']}."
    return told, table


def private(data: Any) -> Told:
    table = [["data", "noise by", "epsilon", "method", "test accuracy, %"]]
    for each in data:
        scores = each["accuracy"]
        told = f"{statistics.fmean(scores):.2f} ({min(scores):.2f} to {max(scores):.2f})"
        table.append([each["data"], each["noise"], f"{each['epsilon']:g}", each["method"], told])
    return "Noise with an account: what epsilon costs, mean and range of the runs, delta 1e-5.", table


def regression(data: Any) -> Told:
    names = list(next(iter(data.values()))[0]["r2"])
    table = [["table", *names, "in 95 % intervals", "two partitions apart"]]
    for name, splits in data.items():
        means = [f"{statistics.fmean(one['r2'][each] for one in splits):.3f}" for each in names]
        inside = f"{100 * statistics.fmean(one['inside'] for one in splits):.1f} %"
        table.append([name, *means, inside, f"{max(one['apart'] for one in splits):.0e}"])
    return "Auto over ten clients beside pooled searches: mean R² on test rows.", table


def harm(data: Any) -> Told:
    heads = [
        "fits",
        "mean probability off, at most",
        "off by more than 0.1",
        "log loss above the base, at most",
    ]
    table = [["", "signal", *heads]]
    for name, kinds in data.items():
        for kind, one in kinds.items():
            told = [str(one["fits"]), f"{one['off']:.3f}", str(one["far off"]), f"{one['excess']:+.3f}"]
            table.append([name, kind, *told])
    return "Fits with no, weak and strong signal and of rare classes, looked at on fresh rows.", table


def million(data: Any) -> Told:
    data = data["rows"]
    table = [["", "seconds", "first coefficient"]]
    for name, one in data.items():
        if isinstance(one, dict):
            table.append([name, f"{one['seconds']:.1f}", f"{one['first']:.12f}"])
    about = (
        f"{data['rows']:,} rows of {data['columns']} columns at {data['sites']} sites, beside the pooled rows"
    )
    return f"{about} (load {data['load_before']:.0f} to {data['load_after']:.0f} on two cores).", table


def chaos(data: Any) -> Told:
    table = [["what struck", "how often"]]
    for name in ("kills", "freezes"):
        table += [[f"{name}: {role}", str(count)] for role, count in sorted(data[name].items())]
    table.append([f"full disk ({data['disk']})", str(len(data["full_disks"]))])
    told = f"{data['identical']} of {data['trainings']} disturbed trainings gave the bytes of a calm one."
    return told, table


def digests(data: Any) -> Told:
    models = data
    return (
        f"Digests of {len(models)} trained models: what a refactoring must leave as it is, bit for bit.",
        [],
    )


def plain(sentence: str) -> Callable[[Any], Told]:
    """A teller for files that hold rows: numbers and words as they stand."""

    def tell(data: Any) -> Told:
        return sentence, _flat(data.get("lines", data) if isinstance(data, dict) else data)

    return tell


def _flat(data: Any, most: int = 40, widest: int = 10) -> list[list[str]]:
    if isinstance(data, dict) and data and all(isinstance(each, dict) for each in data.values()):
        data = [{"": name, **each} for name, each in data.items()]
    lines = [
        {name: each for name, each in line.items() if isinstance(each, str | int | float)}
        for line in (data if isinstance(data, list) else [data])
    ]
    heads = list(dict.fromkeys(name for line in lines for name in line))[:widest]
    return [heads, *([_cell(line.get(name)) for name in heads] for line in lines[:most])]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)


TO = "--json benchmarks/results/"
CLAIMS = {
    "Exactness": (
        Claim(
            "Every method beside its oracle",
            "agreement.json",
            f"python -m benchmarks.agreement {TO}agreement.json",
            agreement,
            "agreement.md",
        ),
        Claim(
            "Other people's code gives the same",
            "agreement-outside.json",
            "python -m benchmarks.agreement --outside DIR",
            outside,
            "agreement.md",
        ),
        Claim(
            "ONNX files give the same",
            "exported.json",
            f"python -m benchmarks.exported {TO}exported.json",
            exported,
            "how-to-export.md",
        ),
        Claim(
            "A refactoring changes no bit",
            "digests.json",
            "python -m benchmarks.digests --compare benchmarks/results/digests.json",
            digests,
        ),
    ),
    "Bytes and speed": (
        Claim(
            "Against the authors' formulation, on two cores",
            "plans-cifar10.json",
            "python -m benchmarks plans --data cifar10_lite0.npz --layers 20 --only lean "
            f"--only transcription {TO}plans-cifar10.json",
            plans,
            "performance.md",
        ),
        Claim(
            "Against the authors' formulation, on a GPU",
            "gpu-h200.json",
            f"python -m benchmarks.gpu {TO}gpu-h200.json",
            gpu,
            "performance.md",
        ),
        Claim(
            "Kernel machines on a GPU",
            "kernel-h200.json",
            "python -m benchmarks.gpu --part kernel --landmarks 16384 --landmarks 32768 "
            f"--data cifar10_lite0.npz {TO}kernel-h200.json",
            kernel,
            "performance.md",
        ),
        Claim(
            "Many clients, against scikit-learn on pooled rows",
            "scale-clients.json",
            f"python -m benchmarks.scale clients {TO}scale-clients.json",
            clients,
            "performance.md",
        ),
        Claim(
            "Many workers",
            "scale-machines.json",
            "python -m benchmarks.scale machines --layers 3 --plot docs/workers-scaling.png "
            f"{TO}scale-machines.json",
            workers,
            "performance.md",
        ),
        Claim(
            "Millions of rows",
            "scale-rows.json",
            f"python -m benchmarks.scale rows {TO}scale-rows.json",
            rows,
            "performance.md",
        ),
        Claim(
            "A round of FedAvg on two cores",
            "speed-cpu.json",
            f"python -m benchmarks speed {TO}speed-cpu.json",
            speed,
            "how-to-gradient.md",
        ),
        Claim(
            "A round of FedAvg on a GPU",
            "speed-gpu.json",
            f"python -m benchmarks speed --device cuda --no-flower --workers 1 {TO}speed-gpu.json",
            speed,
            "how-to-gradient.md",
        ),
    ),
    "Accuracy": (
        Claim(
            "Against back-propagation, on frozen features",
            "heads.json",
            f"python -m benchmarks heads --data cifar10_lite0.npz {TO}heads.json",
            heads,
            "which-method.md",
        ),
        Claim(
            "Against gradient methods, by partition",
            "cifar10-lite0-gradient/cells.jsonl",
            "fedsolve experiment run experiments/real/cifar10-lite0-gradient.toml --data-root DIR",
            gradient,
            "how-to-gradient.md",
        ),
        Claim(
            "Against scikit-learn, on tables",
            "tables.jsonl",
            f"python -m benchmarks.tables {TO}tables.jsonl",
            tables,
            "which-method.md",
        ),
        Claim(
            "Regression, against scikit-learn on pooled rows",
            "regression.json",
            f"python -m benchmarks.regression {TO}regression.json",
            regression,
            "how-to-estimators.md",
        ),
        Claim(
            "A model for every site",
            "personal.json",
            "python -m benchmarks personal --rounds 20 --gradient --data cifar10_lite0.npz "
            f"{TO}personal.json",
            personal,
            "how-to-personal-models.md",
        ),
        Claim(
            "Calibration does no harm",
            "harm.json",
            f"python -m benchmarks.harm {TO}harm.json",
            harm,
            "how-to-answers.md",
        ),
        Claim(
            "Regression tables, against statsmodels and lifelines",
            "statistics.json",
            "python -m benchmarks.statistics rows --rows 1000000 --columns 30 --sites 20",
            million,
            "how-to-statistics.md",
        ),
    ),
    "Privacy": (
        Claim(
            "Accuracy with noise",
            "private.json",
            f"python -m benchmarks.private --data cifar10_lite0.npz {TO}private.json",
            private,
            "how-to-private.md",
        ),
    ),
    "Operation": (
        Claim(
            "Many sites, one server",
            "sites.json",
            "python -m benchmarks.sites --sites 20,50,100,200,1000 --out benchmarks/results/sites.json",
            plain("Secure sums with questions that sites check, through TLS, by number of sites."),
            "operations.md",
        ),
        Claim(
            "Kill -9, frozen processes, full disks",
            "chaos.json",
            f"python -m benchmarks.chaos {TO}chaos.json",
            chaos,
            "operations.md",
        ),
        Claim(
            "The engines side by side",
            "engines.json",
            "python -m benchmarks.engines --out benchmarks/results/engines.json",
            plain("The same DeepAFL by every engine."),
            "which-engine.md",
        ),
        Claim(
            "Ray beside one process",
            "scale-engines.json",
            f"python -m benchmarks.scale engines {TO}scale-engines.json",
            plain("Seconds, and how far the models are apart."),
            "performance.md",
        ),
    ),
}


def machine(about: dict[str, Any], data: Any) -> str:
    """The processor or the device that a file names."""
    found = about.get("machine") or (data if isinstance(data, dict) else {})
    if device := found.get("device"):
        return str(device)
    cpu = found.get("processor") or found.get("cpu")
    return f"{cpu}, {found['cores']} cores" if cpu else "not in the file"


def page() -> str:
    """The whole page, from the files that are there."""
    text = [
        "# Gallery of results",
        "",
        "What this project claims, each claim with its numbers, the command that makes them, the day, the",
        "machine and the file. `python -m benchmarks.gallery` makes this page; a test holds it to the files.",
    ]
    waiting = []
    for group, claims in CLAIMS.items():
        there = [claim for claim in claims if (RESULTS / claim.file).exists()]
        waiting += [claim for claim in claims if claim not in there]
        if there:
            text += ["", f"## {group}"]
        for claim in there:
            text += ["", *_shown(claim)]
    if waiting:
        text += ["", "## Not yet in the gallery", ""]
        text += [
            "No file holds these numbers yet; the command writes one.",
            "",
            "| claim | command |",
            "|---|---|",
        ]
        text += [f"| {_linked(claim)} | `{claim.command}` |" for claim in waiting]
    return "\n".join(text) + "\n"


def _shown(claim: Claim) -> list[str]:
    data, about = read(RESULTS / claim.file)
    try:
        sentence, table = claim.tell(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        sentence = "The file has another form than this page knows; its first rows as they stand."
        table = _flat(data, 10)
    heading, *rows = table or [[]]
    lines = [f"### {claim.title}", "", sentence]
    if heading:
        lines += ["", _row(heading), "|" + "---|" * len(heading), *map(_row, rows)]
    facts = [
        f"file `benchmarks/results/{claim.file}`",
        f"date: {about.get('date', 'not in the file')}",
        f"machine: {machine(about, data)}",
    ]
    if claim.more:
        facts.append(f"[more]({claim.more})")
    return [*lines, "", f"    {claim.command}", "", "; ".join(facts) + "."]


def _linked(claim: Claim) -> str:
    return f"[{claim.title}]({claim.more})" if claim.more else claim.title


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is another")
    if parser.parse_args().check:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)}: {page().count('### ')} claims")


if __name__ == "__main__":
    main()
