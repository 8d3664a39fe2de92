"""Ops whose results have shapes that depend on data: how many elements are not zero, which numbers are distinct.

A program has one shape for every value, known before it runs, so that every rank's part of it is known. These ops have
no entry; a frontend says why.
"""

from __future__ import annotations

REASON = "how many elements its result has depends on data, and the shapes of a program are fixed before it runs"
HINT = "keep a fixed number of elements instead: where(mask, x, 0) for a selection, topk(x, k) for the first k"

_NAMES = frozenset(
    {
        *("onnx.NonZero", "onnx.Unique", "onnx.Compress", "onnx.NonMaxSuppression"),
        *("relax.nonzero", "relax.unique", "relax.vision.non_max_suppression"),
        *("relax.vision.all_class_non_max_suppression",),
    }
)


def is_data_dependent(name: str) -> bool:
    """Whether an op of ONNX (``onnx.NonZero``) or Relax (``relax.nonzero``) has results that data shape.

    A graph of torch says so itself: a dim of such a result is a symbol.
    """
    return name in _NAMES
