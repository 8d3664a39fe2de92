"""Weights in the layout of a kernel, which `executable.Hoist` puts into programs: ``pack(w, b) {of="linear_bias", …}``.

The code is that of the op `of`, which takes them (`Packed`), for results of a `dtype` with a number of `rows`.
"""

from __future__ import annotations

from distir_relax.ir import PACKED, TensorType
from distir_relax.ops.table import Attrs, Semantics, Trait, Types, define


def _infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return tuple(TensorType(kind.shape, kind.dtype, PACKED) for kind in types)


define(
    "pack",
    Semantics(
        infer=_infer,
        torch="({*},)",
        attributes={
            "of": "the op that takes the weights",
            "rows": "the number of rows of its result, a typical one if it is symbolic",
            "dtype": "the dtype of its result",
        },
    ),
    traits={Trait.PACKS},
)
