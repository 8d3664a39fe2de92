"""Weights of 8 or 4 bits: their format, their quantization, and their meaning; `linear` has fast products."""

from distir_relax.kernels.quantized.reference import grouped_product, product, products, routed_product, rows
from distir_relax.kernels.quantized.weights import (
    GROUP,
    dequantize,
    parts_of,
    quantize_int4,
    quantize_int8,
    quantize_int8_groups,
)

__all__ = [
    "GROUP",
    "dequantize",
    "grouped_product",
    "parts_of",
    "product",
    "products",
    "quantize_int4",
    "quantize_int8",
    "quantize_int8_groups",
    "routed_product",
    "rows",
]
