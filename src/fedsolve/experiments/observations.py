"""What a run says, one model at a time: coordinates and metrics of every cell at every depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsolve.experiments.config import METRICS, PartitionSpec
from fedsolve.experiments.round_metrics import REPRESENTATION
from fedsolve.experiments.run_folder import RunFolder
from fedsolve.experiments.significance import Counts
from fedsolve.gradient.networks.stages import stage_of

BACKBONES = {
    "torchvision:resnet18": "ResNet-18",
    "torchvision:vgg11": "VGG11",
    "torchvision:vit_b_16": "ViT-B-16",
    "efficientnet-lite0": "EfficientNet-Lite0",
}
"""Names the papers use for backbones."""

LOCAL = ("worst_decile", "gain_shared", "gain_alone")
"""Measures of cells that were scored client by client, shares of one."""


@dataclass(frozen=True)
class Observation:
    """A trained model as a table sees it.

    coordinates: dataset, backbone, partition, clients, method, algorithm, depth (None where there are
        no layers), noise and every parameter; also stage, where a table tells how often each was chosen.
    setting:     the partition in the papers' signs.
    varied:      the parameters that the experiment varies for this method.
    values:      metrics by name, accuracies in per cent. counts: (correct, rows) on the test rows.
    """

    coordinates: Mapping[str, Any]
    setting: str
    varied: tuple[str, ...]
    seed: int
    values: Mapping[str, float]
    counts: Counts | None


def observations(run: RunFolder) -> list[Observation]:
    """All of a run, in the order of its experiment: the depths asked for, or the last layer."""
    table = run.experiment.table
    if table.by_stage:
        return [found for cell in run.cells for found in _by_stage(cell)]
    found = [one for cell in run.cells for one in _of_cell(cell)]
    return _with_relative_seconds(found, table.baseline) if "relative_seconds" in table.values else found


def chosen_stages(cell: Mapping[str, Any]) -> dict[str, float]:
    """Shares of one that each stage of a cell's network has in the choices for feedback alignment."""
    feedback: Mapping[str, Any] = cell.get("feedback") or {"layers": [], "rounds": []}
    total = sum(feedback["rounds"])
    shares: dict[str, float] = {}
    for layer, rounds in zip(feedback["layers"], feedback["rounds"], strict=True):
        if total == 0:
            break
        stage = stage_of(cell["parameters"]["network"], layer)
        shares[stage] = shares.get(stage, 0.0) + rounds / total
    return shares


def _by_stage(cell: Mapping[str, Any]) -> Iterator[Observation]:
    for one in _of_cell(cell):
        for stage, share in chosen_stages(cell).items():
            coordinates = {**one.coordinates, "stage": stage}
            yield dataclasses.replace(one, coordinates=coordinates, values={"selected": 100.0 * share})


def _with_relative_seconds(found: Sequence[Observation], baseline: str | None) -> list[Observation]:
    """Seconds as multiples of those of the baseline on the same rows, dealt alike."""

    def where(one: Observation) -> tuple[Any, ...]:
        return (*(one.coordinates[name] for name in ("dataset", "backbone", "partition", "noise")), one.seed)

    of_baseline = {where(one): one.values for one in found if one.coordinates["method"] == baseline}
    related = []
    for one in found:
        base, own = of_baseline.get(where(one), {}).get("seconds"), one.values.get("seconds")
        more = {"relative_seconds": own / base} if base and own is not None else {}
        related.append(dataclasses.replace(one, values={**one.values, **more}))
    return related


def _of_cell(cell: Mapping[str, Any]) -> Iterator[Observation]:
    dealt = cell["partition"]
    options = {name: value for name, value in dealt.items() if name not in ("name", "kind", "clients")}
    setting = PartitionSpec(dealt["name"], dealt["kind"], dealt["clients"], options).setting
    dataset = cell["dataset"]
    backbone = dataset["backbone"] or "none"
    coordinates = dict(cell["parameters"]) | {
        "dataset": dataset["name"],
        # Options after the question mark say how images are prepared; the network is the same.
        "backbone": BACKBONES.get(backbone.partition("?")[0], backbone),
        "partition": dealt["name"],
        "clients": dealt["clients"],
        "method": cell["method"],
        "algorithm": cell["algorithm"],
        "noise": cell["noise"],
        "depth": None,
    }
    staged = cell["seconds_per_layer"] is not None
    last = len(cell["seconds_per_layer"]) - 1 if staged else None
    for depth in cell["depths"] or [last]:
        values = _values(cell, depth)
        yield Observation(
            coordinates | {"depth": depth},
            setting,
            tuple(cell["grid"]),
            cell["seed"],
            values,
            counts_at(cell, depth),
        )


def counts_at(cell: Mapping[str, Any], depth: int | None) -> Counts | None:
    """Test rows that a cell reads correctly after `depth` layers, and all of them.

    depth: None for the last layer, or for no layers at all. None comes back where there are no test rows,
        or where only a mean is known.
    """
    layers = cell["test_correct_per_layer"]
    correct = layers[depth] if layers and depth is not None else cell["test_correct"]
    return None if correct is None else (int(correct), int(cell["test_rows"]))


def _values(cell: Mapping[str, Any], depth: int | None) -> dict[str, float]:
    """The metrics of a cell after `depth` layers; those it has not are left out."""
    found: dict[str, Any] = {
        "test": _at(cell, "accuracy", depth),
        "train": _at(cell, "train_accuracy", depth),
        "seconds": _at(cell, "seconds", depth),
        "exchanges": _at(cell, "exchanges", depth),
        "megabytes_up": _at(cell, "bytes_up", depth),
        "megabytes_down": _at(cell, "bytes_down", depth),
        "risk": cell["risk"][depth or 0] if cell["risk"] else None,
    }
    shares = (*LOCAL, "best_round", "tail_rounds")
    plain = ("deviation", "drift", *REPRESENTATION)
    found |= {name: cell["measures"].get(name) for name in (*plain, *shares)}
    for part, layers in (cell["separability"] or {}).items():
        found |= {f"{part}_{name}": value for name, value in layers[depth].items()}
    factors = dict.fromkeys(("test", "train", *shares), 100.0)
    factors |= {"megabytes_up": 1e-6, "megabytes_down": 1e-6}
    return {name: found[name] * factors.get(name, 1.0) for name in METRICS if found.get(name) is not None}


def _at(cell: Mapping[str, Any], name: str, depth: int | None) -> Any:
    return cell[name] if depth is None else (cell[f"{name}_per_layer"] or {depth: None})[depth]
