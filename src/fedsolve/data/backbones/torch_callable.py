"""`torch:MODULE:CALLABLE`: a network of your own, made by a function in a module or a Python file.

Also `timm:NAME` and `torchvision:NAME`, their networks without the classifier, where they are installed; and
`TorchBackbone`, which carries the networks of other packages, too.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import read
from fedsolve.data.address import Address
from fedsolve.data.backbones.preprocessing import (
    CHANNELS,
    FILTERS,
    OPTIONS,
    Preprocessing,
    checked_features,
    digest_of,
    in_pieces,
    prepare,
)
from fedsolve.errors import DataError, ModelFileError, explained, require

VERSION = 1


def load(address: Address, cache: Path | None) -> TorchBackbone:
    """`torch:my_networks:make?size=224&normalise=imagenet`, or `torch:./my_networks.py:make`.

    The callable takes no arguments and returns a `torch.nn.Module` that maps images (n, channels,
    height, width) to features (n, width). Options besides those of the preprocessing: device.
    """
    if address.scheme != "torch":
        return _from_zoo(address)
    torch = require("torch", "torch", "a torch backbone")
    address.allow("device", *OPTIONS)
    place, _, name = address.rest.rpartition(":")
    if not (place and name):
        raise DataError(
            f"{address.text}: name a module and a callable, such as torch:my_networks:make "
            "or torch:./my_networks.py:make."
        )
    preprocessing = Preprocessing().adjusted(address)
    module = _import(place, address.text)
    made = _make(module, name, torch, address.text)
    # Equal weights in another forward function are another backbone.
    source = getattr(module, "__file__", None)
    code = digest_of([read(source)]) if source and Path(source).suffix == ".py" else None
    identity = {"name": f"torch:{Path(place).stem}:{name}", "code": code}
    device = address.options.get("device", "cpu")
    return TorchBackbone(f"torch:{address.rest}", made, preprocessing, identity, device=device)


class TorchBackbone:
    """A torch network as a backbone: evaluation mode, no gradients, float32.

    Networks that give different features for the same rows are refused.

    name:     for people; identity: for the feature store, completed here by weights and preprocessing.
    call:     from a batch on the device to features; the module itself when None.
    device:   "cpu", "cuda", ...; part of the identity, since devices round differently.
    licence:  of the weights, where their package tells.
    """

    reads = "images"

    def __init__(
        self,
        name: str,
        module: Any,
        preprocessing: Any,
        identity: Mapping[str, Any],
        *,
        call: Callable[[Any], Any] | None = None,
        device: str = "cpu",
        licence: str | None = None,
    ) -> None:
        self._torch = require("torch", "torch", name)
        self.name = name
        self.preprocessing = preprocessing
        self.licence = licence
        self.runtime = f"torch {self._torch.__version__}"
        self.identity: dict[str, Any] = {
            **identity,
            "version": VERSION,
            "weights": weights_digest(module),
            "preprocessing": preprocessing.as_dict(),
            "device": device.partition(":")[0],
        }
        with explained(
            f"{name} cannot run on device '{device}'", "Leave device out to run on the processor."
        ):
            self._module = module.float().eval().to(device)
        self._device = device
        self._call = call or self._module
        self.width: int | None = None  # until it is tried out
        rows = self._samples()
        first, second = self.extract(rows), self.extract(rows)
        if not np.array_equal(first, second):
            raise DataError(
                f"{name} gives different features for the same {self.reads} (largest difference "
                f"{np.abs(first - second).max():.1e}). Remove what is random in its forward function."
            )
        self.width = int(first.shape[1])

    def extract(self, rows: Sequence[Any]) -> Array:
        """Features (rows, width) in float32."""
        return in_pieces(rows, self.width, self._run)

    def _run(self, rows: Sequence[Any]) -> Array:
        batch = self._batch(rows)
        with self._torch.inference_mode(), explained(*self._failing(batch)):
            output = self._call(batch)
        if not isinstance(output, self._torch.Tensor):
            raise DataError(
                f"{self.name} must return one tensor of features; got {type(output).__name__}. "
                "Wrap the network in a module that returns the features alone."
            )
        remedy = "Average over the other dimensions, such as features.mean((2, 3))."
        return checked_features(output.float().cpu().numpy(), len(rows), self.name, remedy)

    def _batch(self, rows: Sequence[Any]) -> Any:
        return self._torch.from_numpy(prepare(rows, self.preprocessing)).to(self._device)

    def _failing(self, batch: Any) -> tuple[str, str]:
        """What to say where the network fails."""
        shape = f"{tuple(batch.shape[1:])} (channels, height, width)"
        return f"{self.name} cannot process images of shape {shape}", "Check size and channels."

    def _samples(self) -> list[Any]:
        rng = np.random.default_rng(0)
        height, width = self.preprocessing.size or (224, 224)
        shape = (height, width, CHANNELS[self.preprocessing.channels] or 3)
        return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(2)]


def weights_digest(module: Any) -> str:
    """SHA-256 over names, types, shapes and values of all parameters and buffers."""

    def parts() -> Iterator[bytes | memoryview]:
        for name, tensor in sorted(module.state_dict().items()):
            # Some types, such as bfloat16, have no numpy counterpart; float32 holds their values exactly.
            values = tensor.detach().cpu()
            values = values.float() if values.is_floating_point() and values.itemsize < 4 else values
            array = np.ascontiguousarray(values.numpy())
            yield f"{name} {array.dtype.str} {array.shape}".encode()
            yield memoryview(array.tobytes())

    return digest_of(parts())


def load_weights(module: Any, file: str, what: str) -> None:
    """Fill `module` from a state dict in a file (torch or safetensors); every tensor must fit."""
    torch = require("torch", "torch", what)
    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelFileError(f"{what}: there is no file of weights {path}.")
    remedy = "Give the state dict of this very network."
    with explained(f"{what}: the weights in {path} cannot be used", remedy, ModelFileError):
        if path.suffix == ".safetensors":
            state = require("safetensors.torch", "torch", what).load_file(path)
        else:
            # Only tensors are read: a pickle could otherwise run code of its own.
            state = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
            state = state["state_dict"]
        module.load_state_dict(state)


def _import(place: str, address: str) -> ModuleType:
    with explained(f"{address}: importing {place} failed"):
        try:
            if not place.endswith(".py"):
                return importlib.import_module(place)
            file = Path(place).expanduser()
            if not file.is_file():
                raise DataError(f"{address}: there is no file {file}.")
            # A name of its own, so that a file called numpy.py does not replace numpy.
            name = f"fedsolve_backbone_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
            loader = SourceFileLoader(name, str(file))
            module = sys.modules[name] = module_from_spec(ModuleSpec(name, loader, origin=str(file)))
            module.__file__ = str(file)
            try:
                loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
            return module
        except ModuleNotFoundError as problem:
            if problem.name is None or not place.startswith(problem.name):
                raise DataError(f"{address}: importing {place} failed: {problem}. Install it.") from problem
            raise DataError(
                f"{address}: there is no module '{place}'. Give the path of its file instead, such as "
                f"torch:./{place.replace('.', '/')}.py:..., or install the package."
            ) from problem


def _make(module: ModuleType, name: str, torch: Any, address: str) -> Any:
    attribute = getattr(module, name, None)
    if attribute is None:
        names = ", ".join(sorted(each for each in vars(module) if not each.startswith("_")))
        raise DataError(f"{address}: {module.__name__} has no '{name}'; it has {names or 'nothing'}.")
    if isinstance(attribute, torch.nn.Module):
        return attribute
    with explained(f"{address}: calling {name}() failed", "It must work without arguments."):
        made = attribute()
    if not isinstance(made, torch.nn.Module):
        raise DataError(f"{address}: {name}() must return a torch.nn.Module; got {type(made).__name__}.")
    return made


# -- networks of torchvision and timm ---------------------------------------------------------------

# Where torchvision's classifiers keep their last layers.
_HEADS = ("fc", "classifier", "heads", "head")


def _from_zoo(address: Address) -> TorchBackbone:
    """`timm:resnet18`, or `timm:resnet18?weights=FILE` with a state dict of your own; torchvision likewise.

    Without a file the pretrained weights are used, from the package's cache or the network.
    """
    zoo, target, file = address.scheme, address.rest, address.options.get("weights")
    address.allow("weights", "device", *OPTIONS)
    name = f"{zoo}:{target}"
    if not target:
        raise DataError(f"{address.text}: name a model, such as {zoo}:resnet18.")
    make = _timm if zoo == "timm" else _torchvision
    remedy = f"Fetch them elsewhere and give the file: {name}?weights=FILE"
    with explained(f"{address.text}: the weights cannot be fetched", remedy, ModelFileError):
        model, says, licence = make(target, file is None, address.text)
    if file:
        load_weights(model, file, address.text)
    if zoo == "timm":
        model.reset_classifier(0)
    else:
        _remove_head(model, address.text)
    device = address.options.get("device", "cpu")
    identity = {"name": name}
    return TorchBackbone(name, model, says.adjusted(address), identity, device=device, licence=licence)


def _timm(target: str, pretrained: bool, address: str) -> tuple[Any, Preprocessing, str | None]:
    timm, data = (require(module, None, address) for module in ("timm", "timm.data"))
    if not timm.is_model(target.partition(".")[0]):
        raise DataError(f"{address}: timm {timm.__version__} has no model '{target}'.")
    model = timm.create_model(target, pretrained=pretrained)
    says = data.resolve_model_data_config(model)
    channels, height, width = says["input_size"]
    # The shorter side to size / crop_pct and the middle of that; or the whole image, squeezed.
    squeezed = says.get("crop_mode") == "squash" and says["crop_pct"] == 1.0
    known = squeezed or says.get("crop_mode", "center") == "center"
    if channels != 3 or height != width or not known or says["interpolation"] not in FILTERS:
        raise DataError(
            f"{address}: timm prepares images in a way that fedsolve does not know ({says}). "
            "Make the model in a function of your own and use torch:MODULE:CALLABLE."
        )
    preprocessing = Preprocessing(
        size=(height, width),
        shorter_side=None if squeezed else int(height / says["crop_pct"]),
        interpolation=says["interpolation"],
        mean=tuple(says["mean"]),
        std=tuple(says["std"]),
        middle="even",
    )
    return model, preprocessing, getattr(model, "pretrained_cfg", {}).get("license")


def _torchvision(target: str, pretrained: bool, address: str) -> tuple[Any, Preprocessing, str | None]:
    models = require("torchvision", None, address).models
    unknown = f"{address}: torchvision has no classifier '{target}'"
    with explained(unknown, kinds=(ValueError, AttributeError, KeyError)):
        weights = models.get_model_weights(target).DEFAULT
        model = models.get_model(target, weights=weights if pretrained else None)
    # The preset of the weights: resize the shorter side, cut the middle, normalise.
    says = weights.transforms()
    size, shorter = says.crop_size, says.resize_size
    interpolation = str(getattr(says.interpolation, "value", says.interpolation))
    if len(size) != 1 or len(shorter) != 1 or interpolation not in FILTERS:
        raise DataError(f"{address}: torchvision's preprocessing is of an unknown form: {says}.")
    preprocessing = Preprocessing(
        size=(size[0], size[0]),
        shorter_side=shorter[0],
        interpolation=interpolation,
        mean=tuple(says.mean),
        std=tuple(says.std),
        middle="even",
    )
    return model, preprocessing, None


def _remove_head(model: Any, address: str) -> None:
    """Replace the last linear layer by the identity."""
    layers = require("torch", None, address).nn
    for name in _HEADS:
        head = getattr(model, name, None)
        if isinstance(head, layers.Linear):
            setattr(model, name, layers.Identity())
            return
        if isinstance(head, layers.Sequential) and isinstance(head[-1], layers.Linear):
            head[-1] = layers.Identity()
            return
    raise DataError(
        f"{address}: {type(model).__name__} does not end in a linear layer. Take the features you want in "
        "a function of your own and use torch:MODULE:CALLABLE."
    )
