"""Ops with data-dependent result shapes, such as the indices of nonzero elements or the distinct values.

Every value of a program has a static shape, so that each rank's part of it is static. These ops therefore have no
entry; frontends report the reason.
"""

from __future__ import annotations

DATA_DEPENDENT = (
    "how many elements its result has depends on data, and the shapes of a program are fixed before it runs"
)
DATA_DEPENDENT_HINT = (
    "keep a fixed number of elements instead: where(mask, x, 0) for a selection, topk(x, k) for the first k"
)

_NAMES = frozenset(
    {
        *("onnx.NonZero", "onnx.Unique", "onnx.Compress", "onnx.NonMaxSuppression"),
        *("relax.nonzero", "relax.unique", "relax.vision.non_max_suppression"),
        *("relax.vision.all_class_non_max_suppression",),
    }
)


def is_data_dependent(name: str) -> bool:
    """Return whether an op of ONNX (``onnx.NonZero``) or Relax (``relax.nonzero``) has data-dependent result shapes.

    torch graphs need no list: a dim of such a result is a symbol.
    """
    return name in _NAMES
