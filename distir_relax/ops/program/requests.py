"""Values of the requests of a step: rows of all in one tensor, or a tensor for each (`executable.BatchRequests`).

``rows_of_each(x) {axis, size}``  a tensor for each, of `x`, which has the rows of all along `axis`
``join_rows(x) {axis}``           the inverse
``same_for_each(x)``              `x` for each
``one_of_each(x)``                one of equal tensors, that of the first
"""

from __future__ import annotations

from distir_relax.ir import EACH, TensorType
from distir_relax.ops.table import Attrs, Semantics, Trait, Types, define


def _of_each(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (TensorType(types[0].shape, types[0].dtype, EACH),)


def _of_all(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    return (types[0].plain,)


_AXIS = {"axis": "the dim with the rows"}
_SIZE = {"size": "which rows: of new positions, `new`, or of the last ones, `last`"}
define(
    "rows_of_each",
    Semantics(infer=_of_each, torch="{0}.split(sizes[{size}], {axis})", attributes={**_AXIS, **_SIZE}),
    traits={Trait.FOR_EACH},
)
define("join_rows", Semantics(infer=_of_all, torch="join({0}, {axis})", attributes=_AXIS), traits={Trait.FOR_EACH})
define("same_for_each", Semantics(infer=_of_each, torch="[{0}] * len(requests)"), traits={Trait.FOR_EACH})
define("one_of_each", Semantics(infer=_of_all, torch="{0}[0]"), traits={Trait.FOR_EACH})
