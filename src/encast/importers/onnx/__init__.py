"""ONNX files: exports of encoders, read to a graph of plain ops. Nothing of a file is executed."""

from encast.importers.onnx.read import Export, read_export

__all__ = ["Export", "read_export"]
