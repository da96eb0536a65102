"""Models for other programs: ONNX files from raw rows to labels, and writers for models of one's own."""

from fedsolve.export import traced_networks  # its definitions enter the writers of networks
from fedsolve.export.families import writes, writes_estimates
from fedsolve.export.onnx_file import CARD, OnnxFile, write_onnx
from fedsolve.export.onnx_graph import OPSET, PRECISIONS, OnnxGraph
from fedsolve.export.sklearn_pipelines import register_converters

__all__ = [
    "CARD",
    "OPSET",
    "PRECISIONS",
    "OnnxFile",
    "OnnxGraph",
    "register_converters",
    "traced_networks",
    "write_onnx",
    "writes",
    "writes_estimates",
]
