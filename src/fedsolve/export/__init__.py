"""Models for other programs: ONNX files from raw rows to labels, and writers for models of one's own."""

from fedsolve.export import formulas, traced_networks  # their definitions enter the writers
from fedsolve.export.families import writes, writes_estimates
from fedsolve.export.onnx_file import CARD, OnnxFile, register_converters, write_onnx
from fedsolve.export.onnx_graph import OPSET, PRECISIONS, OnnxGraph

__all__ = [
    "CARD",
    "OPSET",
    "PRECISIONS",
    "OnnxFile",
    "OnnxGraph",
    "formulas",
    "register_converters",
    "traced_networks",
    "write_onnx",
    "writes",
    "writes_estimates",
]
