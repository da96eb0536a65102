"""`onnx:FILE`: any network in an ONNX file, run by onnxruntime on the processor.

The same images in the same batches give the same bits; in other batches they differ by rounding only.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import read
from fedsolve.data.address import Address
from fedsolve.data.backbones.preprocessing import (
    CHANNELS,
    OPTIONS,
    Layout,
    Preprocessing,
    checked_features,
    digest_of,
    in_pieces,
    prepare,
)
from fedsolve.errors import DataError, ModelFileError, explained, require

VERSION = 1
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
# Weights kept beside the file: an entry "location" of a tensor, its key and value length-prefixed.
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x01-\x7f])", re.DOTALL)
_LAYOUTS: tuple[Layout, ...] = ("nchw", "nhwc")


def load(address: Address, cache: Path | None) -> OnnxBackbone:
    """`onnx:FILE?size=224&normalise=imagenet&layout=nchw&output=NAME`; all options may be left out.

    Size and layout are read from the file where it fixes them; pixels are scaled to [0, 1] and not
    normalised further unless the options say so.
    """
    address.allow("layout", "output", *OPTIONS)
    if not address.rest:
        raise DataError(f"{address.text}: name the file, such as onnx:model.onnx.")
    file = Path(address.rest).expanduser()
    return OnnxBackbone(f"onnx:{file.name}", file, address)


class OnnxBackbone:
    """A network in an ONNX file, run on all cores; a `ModelFileError` names what is wrong with the file.

    address: the options: layout, output and preprocessing, where the file leaves a choice. preprocessing,
             identity: those of a file that is known; found from the file and the options when None.
    fixed:   images at a time, where the file fixes it. input_type: of its pixels.
    """

    def __init__(
        self,
        name: str,
        file: Path,
        address: Address,
        preprocessing: Preprocessing | None = None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        runtime = require("onnxruntime", "onnx", "an ONNX backbone")
        if not file.is_file():
            raise ModelFileError(f"there is no ONNX file {file}. Give the path of a file after 'onnx:'.")
        settings = runtime.SessionOptions()
        settings.log_severity_level = 4  # problems are raised; its own lines would break a progress bar
        settings.use_deterministic_compute = True
        what = f"{file} is not an ONNX file that onnxruntime {runtime.__version__} can open"
        with explained(what, "Export it again, or update onnxruntime.", ModelFileError):
            session = runtime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
        self.name, self.file, self._session = name, file, session
        self.runtime = f"onnxruntime {runtime.__version__}"
        self.output = _output(file, session, address.word("output"))
        self.layout = _layout(file, session, cast(Layout | None, address.word("layout", _LAYOUTS)))
        image = session.get_inputs()[0]
        self._input, self._type = image.name, _TYPES[image.type]
        self.input_type = np.dtype(self._type).name
        shape = [side if isinstance(side, int) else None for side in image.shape]
        self.fixed = shape[0]
        self.preprocessing = preprocessing or _suited(shape, self.layout, address)
        known = {"name": "onnx", "version": VERSION, "output": self.output}
        about = identity or known | {"weights": weights_digest(file)}
        self.identity = {**about, "layout": self.layout, "preprocessing": self.preprocessing.as_dict()}
        # One run tells the width, and that size, rank and output fit, before any image is read.
        channels = CHANNELS[self.preprocessing.channels] or 3
        black = np.zeros((*(self.preprocessing.size or (224, 224)), channels), dtype=np.uint8)
        self.width: int | None = None
        self.width = self.extract([black]).shape[1]

    def extract(self, images: Sequence[Array]) -> Array:
        """Features (images, width) in float32."""
        return in_pieces(
            images, self.width, lambda some: self.run(prepare(some, self.preprocessing, self.layout))
        )

    def run(self, batch: Array) -> Array:
        """Features (images, width) of a prepared batch."""
        many = self.fixed or len(batch)
        # A file with a fixed number of images: the last group is filled up with its last image.
        filled = np.concatenate([batch, np.repeat(batch[-1:], -len(batch) % many, axis=0)])
        pieces = [self._run(filled[at : at + many]) for at in range(0, len(filled), many)]
        return np.concatenate(pieces)[: len(batch)]

    def _run(self, batch: Array) -> Array:
        what = f"{self.file.name} cannot process images of shape {batch.shape[1:]}"
        with explained(what, "Check size and layout."):
            (output,) = self._session.run([self.output], {self._input: batch.astype(self._type, copy=False)})
        remedy = "Choose another output with output=NAME, or add a global average pooling to the network."
        return checked_features(output, len(batch), f"{self.file.name}, output '{self.output}',", remedy)


def trace(module: Any, example: Any, file: Any, taken: str, given: str, opset: int) -> None:
    """Write a torch module as ONNX to a path or a stream, with these names of its input and its output.

    It takes any number of rows like those of the example.
    """
    with warnings.catch_warnings():
        # The tracing exporter is announced as legacy; the other one needs further packages.
        warnings.simplefilter("ignore")
        require("torch", "torch", "exporting a network").onnx.export(
            module,
            (example,),
            file,
            input_names=[taken],
            output_names=[given],
            dynamic_axes={name: {0: taken} for name in (taken, given)},
            opset_version=opset,
            dynamo=False,
        )


def weights_digest(file: Path) -> str:
    """SHA-256 of the file and of the files beside it in which it keeps large tensors."""
    data = read(file)
    places = set()
    for match in _LOCATION.finditer(data):
        places.add(data[match.end() : match.end() + match.group(1)[0]].decode(errors="replace"))
    beside = [file.parent / place for place in sorted(places)]
    return digest_of([data, *(read(other) for other in beside if other.is_file())])


def _output(file: Path, session: Any, wanted: str | None) -> str:
    outputs = {output.name: output.shape for output in session.get_outputs()}
    listed = ", ".join(f"{name} {tuple(shape)}" for name, shape in outputs.items())
    if wanted is None and len(outputs) > 1:
        raise DataError(f"{file.name} has {len(outputs)} outputs ({listed}). Choose one with output=NAME.")
    if wanted is not None and wanted not in outputs:
        raise DataError(f"{file.name} has no output '{wanted}'; it has {listed}.")
    return wanted or str(next(iter(outputs)))


def _layout(file: Path, session: Any, wanted: Layout | None) -> Layout:
    inputs = session.get_inputs()
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in _TYPES:
        listed = ", ".join(f"{entry.name}: {entry.type} {tuple(entry.shape)}" for entry in inputs)
        raise DataError(
            f"{file.name} must have one input of four dimensions (images, channels, height, width) of "
            f"floating-point numbers; it has {listed}. Export the image part of the network alone."
        )
    shape = inputs[0].shape
    fitting: list[Layout] = [
        layout for layout, side in zip(_LAYOUTS, (shape[1], shape[3]), strict=True) if side in (1, 3)
    ]
    if wanted is not None:
        if isinstance(shape[1 if wanted == "nchw" else 3], int) and wanted not in fitting:
            raise DataError(f"{file.name} reads images of shape {tuple(shape)}, which is not {wanted}.")
        return wanted
    if len(fitting) != 1:
        raise DataError(
            f"{file.name} reads images of shape {tuple(shape)}: whether channels come first or last is "
            "not clear. Say layout=nchw or layout=nhwc."
        )
    return fitting[0]


def _suited(shape: Sequence[int | None], layout: Layout, address: Address) -> Preprocessing:
    """The preprocessing of the options, in the size and channels that the file asks for."""
    height, width = shape[2:] if layout == "nchw" else shape[1:3]
    channels = shape[1] if layout == "nchw" else shape[3]
    base = Preprocessing(size=(height or 224, width or 224), channels="gray" if channels == 1 else "rgb")
    chosen = base.adjusted(address)
    for fixed, wanted in zip((height, width), chosen.size or (), strict=True):
        if fixed is not None and fixed != wanted:
            raise DataError(
                f"{address.text}: the file reads images of {height} x {width} pixels (height x width); "
                f"size {chosen.size} does not fit. Leave the option out."
            )
    if channels is not None and CHANNELS[chosen.channels] != channels:
        raise DataError(
            f"{address.text}: the file reads {channels} channel(s); channels={chosen.channels} does not "
            "fit. Leave the option out."
        )
    return chosen
