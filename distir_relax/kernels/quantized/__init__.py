"""Weights of 8 or 4 bits: their format, their quantization, and products with them."""

from distir_relax.kernels.quantized.linear import QuantizedLinear, pack_quantized
from distir_relax.kernels.quantized.weights import GROUP, dequantize, quantize_int4, quantize_int8

__all__ = ["GROUP", "QuantizedLinear", "dequantize", "pack_quantized", "quantize_int4", "quantize_int8"]
