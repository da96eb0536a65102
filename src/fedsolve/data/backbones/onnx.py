"""`onnx:FILE`: any network in an ONNX file, run by onnxruntime on the processor.

The same images in the same batches give the same bits; in other batches they differ by rounding only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedsolve.arrays import Array
from fedsolve.container import read
from fedsolve.data.backbones.backbone_address import AddressOptions
from fedsolve.data.backbones.preprocessing import (
    CHANNELS,
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
_CHECK = "Check size and layout."
_LAYOUTS: tuple[Layout, ...] = ("nchw", "nhwc")


def load(target: str, options: AddressOptions, cache: Path | None) -> OnnxBackbone:
    """`onnx:FILE?size=224&normalise=imagenet&layout=nchw&output=NAME`; all options may be left out.

    Size and layout are read from the file where it fixes them; pixels are scaled to [0, 1] and not
    normalised further unless the options say so.
    """
    if not target:
        raise DataError(f"{options.address}: name the file, such as onnx:model.onnx.")
    file = Path(target).expanduser()
    layout = cast(Layout | None, options.text("layout", _LAYOUTS))
    session = open_session(file, options.text("output"), layout)
    preprocessing = _suited(session, options)
    options.finish()
    identity = {"name": "onnx", "version": VERSION, "weights": weights_digest(file), "output": session.output}
    return OnnxBackbone(f"onnx:{file.name}", session, preprocessing, identity)


class OnnxBackbone:
    """A network in an ONNX file as a backbone.

    file, output, layout, input_type: what is run, and how. fixed: images at a time, where the file fixes it.
    """

    def __init__(
        self, name: str, session: Session, preprocessing: Preprocessing, identity: dict[str, Any]
    ) -> None:
        self.name = name
        self.preprocessing = preprocessing
        self.identity = {**identity, "layout": session.layout, "preprocessing": preprocessing.as_dict()}
        self.runtime = f"onnxruntime {session.version}"
        self.file, self.output, self.layout = session.file, session.output, session.layout
        self.fixed, self.input_type = session.shape[0], np.dtype(session.type).name
        self._session = session
        # One run tells the width, and that size, rank and output fit, before any image is read.
        channels = CHANNELS[preprocessing.channels] or 3
        black = np.zeros((*(preprocessing.size or (224, 224)), channels), dtype=np.uint8)
        self.width: int | None = self.extract([black]).shape[1]

    def extract(self, images: Sequence[Array]) -> Array:
        """Features (images, width) in float32."""
        return in_pieces(
            images,
            getattr(self, "width", None),  # not known before the first run
            lambda some: self._session.run(prepare(some, self.preprocessing, self.layout)),
        )


class Session:
    """An opened ONNX file with one image input and one chosen output."""

    def __init__(self, file: Path, session: Any, version: str, output: str, layout: Layout) -> None:
        self.version = version
        self.output = output
        self.layout = layout
        self.file = file
        self._session = session
        image = session.get_inputs()[0]
        self._input = image.name
        self.type = _TYPES[image.type]
        self.shape = tuple(side if isinstance(side, int) else None for side in image.shape)

    @property
    def channels(self) -> int | None:
        """Channels of the input where the file fixes them."""
        return self.shape[1] if self.layout == "nchw" else self.shape[3]

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Height and width of the input, each where the file fixes it."""
        height, width = self.shape[2:] if self.layout == "nchw" else self.shape[1:3]
        return height, width

    def run(self, batch: Array) -> Array:
        """Features (images, width) of a prepared batch."""
        fixed = self.shape[0]
        if fixed is None or fixed == len(batch):
            return self._run(batch)
        # A file with a fixed number of images: the last group is filled up with its last image.
        missing = -len(batch) % fixed
        filled = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)])
        groups = [self._run(filled[start : start + fixed]) for start in range(0, len(filled), fixed)]
        features: Array = np.concatenate(groups)[: len(batch)]
        return features

    def _run(self, batch: Array) -> Array:
        with explained(f"{self.file.name} cannot process images of shape {batch.shape[1:]}", _CHECK):
            (output,) = self._session.run([self.output], {self._input: batch.astype(self.type, copy=False)})
        remedy = "Choose another output with output=NAME, or add a global average pooling to the network."
        return checked_features(output, len(batch), f"{self.file.name}, output '{self.output}',", remedy)


def open_session(file: Path, output: str | None = None, layout: Layout | None = None) -> Session:
    """The ONNX file ready to run on all cores; a `ModelFileError` names what is wrong with the file."""
    runtime = require("onnxruntime", "onnx", "an ONNX backbone")
    if not file.is_file():
        raise ModelFileError(f"there is no ONNX file {file}. Give the path of a file after 'onnx:'.")
    settings = runtime.SessionOptions()
    settings.log_severity_level = 4  # problems are raised; its own lines on stderr would break a progress bar
    settings.use_deterministic_compute = True
    what = f"{file} is not an ONNX file that onnxruntime {runtime.__version__} can open"
    with explained(what, "Export it again, or update onnxruntime.", ModelFileError):
        session = runtime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    return Session(
        file, session, runtime.__version__, _output(file, session, output), _layout(file, session, layout)
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


def _suited(session: Session, options: AddressOptions) -> Preprocessing:
    """The preprocessing of the options, in the size and channels that the file asks for."""
    height, width = session.size
    base = Preprocessing(
        size=(height or 224, width or 224), channels="gray" if session.channels == 1 else "rgb"
    )
    chosen = base.adjusted(options)
    for fixed, wanted in zip((height, width), chosen.size or (), strict=True):
        if fixed is not None and fixed != wanted:
            raise DataError(
                f"{options.address}: the file reads images of {height} x {width} pixels (height x width); "
                f"size {chosen.size} does not fit. Leave the option out."
            )
    if session.channels is not None and CHANNELS[chosen.channels] != session.channels:
        raise DataError(
            f"{options.address}: the file reads {session.channels} channel(s); channels={chosen.channels} "
            "does not fit. Leave the option out."
        )
    return chosen
