"""Import of ONNX models."""

from distir_relax.frontends.onnx.importer import import_onnx

__all__ = ["import_onnx"]
