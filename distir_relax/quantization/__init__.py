"""Quantization of the weights of imported models."""

from distir_relax.quantization.quantize import WEIGHT_FORMATS, quantize_weights

__all__ = ["WEIGHT_FORMATS", "quantize_weights"]
