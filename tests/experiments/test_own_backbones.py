"""The first tables of the papers on their own backbones, end to end; a stand-in has each network's name."""

from __future__ import annotations

import dataclasses
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsolve.data.datasets import published
from tests.command import document

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHIPPED = Path(__file__).parents[2] / "experiments"
KEPT = {"afl", "deepafl", "apfl", "local", "fedavg"}


class Pooled(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """Takes the place of ResNet-18 and ViT-MAE: 75 pooled pixels, and a classifier that is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(5), torch.nn.Flatten())
        self.fc = torch.nn.Linear(75, 4)

    def forward(self, images: Any) -> Any:
        return self.fc(self.body(images))

    def reset_classifier(self, classes: int) -> None:
        self.fc = torch.nn.Identity()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's resnet18 and timm's vit_base_patch16_224.mae, with weights."""
    preset = SimpleNamespace(
        crop_size=[224],
        resize_size=[256],
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
        interpolation=SimpleNamespace(value="bilinear"),
    )
    torchvision: Any = ModuleType("torchvision")
    torchvision.models = SimpleNamespace(
        get_model=lambda name, weights=None: {"resnet18": Pooled}[name](),
        get_model_weights=lambda name: SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: preset)),
    )
    timm: Any = ModuleType("timm")
    timm.__version__ = "1.0"
    timm.is_model = lambda name: name == "vit_base_patch16_224"  # timm knows it without the tag
    timm.create_model = lambda name, pretrained: Pooled()
    timm.data = ModuleType("timm.data")
    timm.data.resolve_model_data_config = lambda model: {
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
        "crop_pct": 0.9,
        "crop_mode": "center",
    }
    for name, module in (("torchvision", torchvision), ("timm", timm), ("timm.data", timm.data)):
        monkeypatch.setitem(sys.modules, name, module)


def small_cifar100(root: Path) -> Any:
    """Three training images and one test image of each class, alike by their class."""
    rng = np.random.default_rng(0)
    looks = rng.integers(0, 200, (100, 3072))
    folder = root / "cifar-100-python"
    folder.mkdir()
    for name, each in (("train", 3), ("test", 1)):
        labels = np.tile(np.arange(100), each)
        images = (looks[labels] + rng.integers(0, 50, (len(labels), 3072))).astype(np.uint8)
        contents = {b"data": images, b"fine_labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(contents, protocol=2))
    meta = {b"fine_label_names": [b"class %02d" % number for number in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    return dataclasses.replace(published.CIFAR100, rows=(300, 100), digests={})


@pytest.mark.slow
@pytest.mark.parametrize("table", ["afl/table-1", "deepafl/table-01", "apfl/table-1"])
def test_a_table_runs_on_its_own_backbone(
    table: str, tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file as it is but for seeds, rounds, clients, widths, and gradient methods besides FedAvg."""
    monkeypatch.setattr(published, "KNOWN", (small_cifar100(tmp_path),))
    text = (SHIPPED / f"{table}.toml").read_text()
    text = re.sub(r"seeds = \[.*?\]", "seeds = [0]", text)
    text = re.sub(r"(width = )\d+", r"\g<1>32", text)
    text = re.sub(r"(rounds = )\d+", r"\g<1>2", text)
    opening, *partitions = re.split(r"(?=^\[\[partition\]\])", text, flags=re.MULTILINE)
    text = (
        opening + re.sub(r"clients = \d+", "clients = 5", partitions[0]) + partitions[-1].partition("\n\n")[2]
    )
    head, *methods = re.split(r"(?=^\[\[method\]\])", text, flags=re.MULTILINE)
    *methods, last = methods
    tail = re.search(r"^\[(?!\[)", last, flags=re.MULTILINE)
    cut = len(last) if tail is None else tail.start()
    methods.append(last[:cut])
    kept = [method for method in methods if re.search(r'method = "(.*?)"', method)[1] in KEPT]  # type: ignore[index]
    assert len(kept) >= 1
    file = tmp_path / "table.toml"
    file.write_text(head + "".join(kept) + last[cut:])
    where = ("--data-root", tmp_path, "--store", tmp_path / "store", "--runs", tmp_path / "runs")
    document("experiment", "run", file, "--dataset", "CIFAR-100", *where)
    cells = [line for path in (tmp_path / "runs").glob("*/cells.jsonl") for line in path.open()]
    assert len(cells) >= len(kept)
    accuracies = [float(found) for line in cells for found in re.findall(r'"accuracy":([\d.]+)', line)]
    assert len(accuracies) == len(cells)
    assert max(accuracies) > 0.3
    assert all(str(("torchvision:resnet18", "timm:vit_base")[table.startswith("apfl")]) in c for c in cells)
