"""Backbones that read text, and timm: the real packages, on small networks with random weights."""

from __future__ import annotations

import importlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsolve.data.backbones import Backbone, load_backbone
from fedsolve.data.backbones.preprocessing import prepare
from fedsolve.errors import DataError, ModelFileError

from .tiny_text import tiny_bert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXTS = ["fever and cough", "a severe rash of the left leg since one day", "no pain", "", "fever " * 40]


@pytest.fixture
def bert(tmp_path: Path) -> tuple[Path, Any]:
    return tmp_path / "bert", tiny_bert(tmp_path / "bert")


@pytest.mark.parametrize("output", ["", "mean", "cls", "pooled"])
def test_text_through_transformers(bert: tuple[Path, Any], output: str) -> None:
    folder, model = bert
    backbone = load_backbone(f"hf:{folder}" + (f"?output={output}" if output else ""))
    assert isinstance(backbone, Backbone)
    assert (backbone.width, backbone.identity["output"]) == (32, output or "mean")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, features in zip(TEXTS, backbone.extract(TEXTS), strict=True):
        # Alone, a text needs no filling, so that the attention mask plays no part.
        batch = tokenizer([text], truncation=True, max_length=24, return_tensors="pt")
        with torch.inference_mode():
            result = model(input_ids=batch["input_ids"])
        by_hand = {"pooled": result.pooler_output[0], "cls": result.last_hidden_state[0, 0]}
        expected = by_hand.get(output, result.last_hidden_state[0].mean(0))
        np.testing.assert_allclose(features, expected.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(backbone.extract(TEXTS), backbone.extract(TEXTS))
    assert backbone.extract([]).shape == (0, 32)


def test_texts_that_are_cut(bert: tuple[Path, Any]) -> None:
    folder, _ = bert
    backbone: Any = load_backbone(f"hf:{folder}")
    assert backbone.cut(TEXTS).tolist() == [False, False, False, False, True]
    # Two tokens mark the beginning and the end.
    assert backbone.cut(["fever " * 22, "fever " * 23]).tolist() == [False, True]
    np.testing.assert_array_equal(*backbone.extract(["fever " * 30, "fever " * 22]))
    shorter: Any = load_backbone(f"hf:{folder}?length=4")
    assert shorter.cut(TEXTS).tolist() == [True, True, False, False, True]
    with pytest.raises(DataError, match=r"cannot process text: .*Check length \(25 tokens\)"):
        load_backbone(f"hf:{folder}?length=25")
    with pytest.raises(DataError, match=r"length is a number of tokens, such as 256; got 'many'"):
        load_backbone(f"hf:{folder}?length=many")


def test_identity_of_text(bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = bert
    first = load_backbone(f"hf:{folder}").identity
    json.dumps(first)
    shutil.copytree(folder, tmp_path / "copy")
    assert load_backbone(f"hf:{tmp_path / 'copy'}").identity == first
    tiny_bert(tmp_path / "weights", seed=1)
    weights = load_backbone(f"hf:{tmp_path / 'weights'}").identity
    assert weights["weights"] != first["weights"]
    assert {**weights, "weights": first["weights"]} == first
    vocabulary = (tmp_path / "copy" / "tokenizer.json").read_text()
    assert '"fever"' in vocabulary
    (tmp_path / "copy" / "tokenizer.json").write_text(vocabulary.replace('"fever"', '"fewer"'))
    words = load_backbone(f"hf:{tmp_path / 'copy'}").identity
    assert words["preprocessing"]["tokenizer"] != first["preprocessing"]["tokenizer"]
    assert words["weights"] == first["weights"]
    assert load_backbone(f"hf:{folder}?output=cls").identity != first
    assert load_backbone(f"hf:{folder}?length=8").identity != first


def test_licence_and_errors_of_text(bert: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = bert
    assert load_backbone(f"hf:{folder}").licence is None  # type: ignore[attr-defined]
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# A network\n")
    assert load_backbone(f"hf:{folder}").licence == "cc-by-4.0"  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="unknown option 'size'"):
        load_backbone(f"hf:{folder}?size=32")
    bare = tmp_path / "bare"
    transformers.BertModel(model.config, add_pooling_layer=False).save_pretrained(bare)
    with pytest.raises(ModelFileError, match="tokenizer knows 5 words and the network 96"):
        load_backbone(f"hf:{bare}")
    for file in (*folder.glob("tokenizer*"), folder / "vocab.txt"):
        shutil.copy(file, bare)
    assert load_backbone(f"hf:{bare}").extract(TEXTS).shape == (5, 32)
    with pytest.raises(DataError, match="the weights have no pooled output"):
        load_backbone(f"hf:{bare}?output=pooled")


def test_text_through_sentence_transformers(bert: tuple[Path, Any], tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers")
    parts = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    folder, _ = bert
    network = parts.Transformer(str(folder), max_seq_length=16)
    pooled = parts.Pooling(32, pooling_mode="mean")
    model = package.SentenceTransformer(modules=[network, pooled, parts.Normalize()], device="cpu")
    model.save(str(tmp_path / "sentences"))
    backbone: Any = load_backbone(f"st:{tmp_path / 'sentences'}")
    assert (backbone.width, backbone.reads) == (32, "text")
    np.testing.assert_allclose(backbone.extract(TEXTS), model.encode(TEXTS), rtol=1e-5, atol=1e-6)
    # The same network by transformers, normalised by hand.
    plain = load_backbone(f"hf:{folder}?length=16").extract(TEXTS)
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(backbone.extract(TEXTS), plain, rtol=1e-4, atol=1e-5)
    assert backbone.cut(TEXTS).tolist() == [False, False, False, False, True]
    assert load_backbone(f"st:{tmp_path / 'sentences'}").identity == backbone.identity
    shorter: Any = load_backbone(f"st:{tmp_path / 'sentences'}?length=4")
    assert shorter.identity != backbone.identity
    assert shorter.cut(TEXTS).tolist() == [True, True, False, False, True]
    first = package.SentenceTransformer(
        modules=[network, parts.Pooling(32, pooling_mode="cls")], device="cpu"
    )
    first.save(str(tmp_path / "first"))
    other = load_backbone(f"st:{tmp_path / 'first'}")
    assert other.identity["weights"] == backbone.identity["weights"]
    assert other.identity["config"] != backbone.identity["config"]
    with pytest.raises(ModelFileError, match="there is no folder"):
        load_backbone("st:./absent")


def real_timm() -> Any:
    """timm, where it is installed. Beside a processor's torch, its torchvision may lack compiled operators.

    Networks of timm use none of them, but torchvision names them when it is imported.
    """
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            import torchvision  # noqa: F401

            break
        except ImportError:
            break
        except RuntimeError:
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip("timm"), operators


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet10t", "vit_small_patch14_dinov2", "vit_base_patch16_siglip_224"])
def test_timm_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm, _operators = real_timm()
    from PIL import Image

    torch.manual_seed(0)
    if name.startswith("vit"):  # one layer of its twelve
        monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1))
    model = timm.create_model(name, pretrained=False).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    backbone: Any = load_backbone(f"timm:{name}?weights={tmp_path / 'weights.pth'}")
    assert backbone.licence == model.pretrained_cfg["license"]
    pixels = np.random.default_rng(0).integers(0, 256, (3, 200, 260, 3), dtype=np.uint8)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    theirs = torch.stack([transform(Image.fromarray(image)) for image in pixels])
    np.testing.assert_allclose(prepare(pixels, backbone.preprocessing), theirs.numpy(), atol=1e-5)
    with torch.inference_mode():
        by_hand = model.forward_head(model.forward_features(theirs), pre_logits=True)
    np.testing.assert_allclose(backbone.extract(pixels), by_hand.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(DataError, match="has no model 'nothing'"):
        load_backbone("timm:nothing")
    with pytest.raises(ModelFileError, match=r"weights cannot be fetched.*weights=FILE"):
        load_backbone(f"timm:{name}")
