"""Supported dtypes."""

from __future__ import annotations

DTYPES = {
    "float64": ("f64", 8),
    "float32": ("f32", 4),
    "float16": ("f16", 2),
    "bfloat16": ("bf16", 2),
    "int64": ("i64", 8),
    "int32": ("i32", 4),
    "int16": ("i16", 2),
    "int8": ("i8", 1),
    "uint8": ("u8", 1),
    "bool": ("bool", 1),
}
"""Each dtype with its short name in program text and its size in bytes."""
