"""Tensors of sizes that are known at import, some of them symbolic, and what ops compute from them.

The shape of a tensor is such a tensor: ``(batch, 8, sequence + 1)``. An op computes with its elements, numbers and
symbolic sizes, by its entry: `Semantics.sizes`, or `Trait.MOVES` if it only moves elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.layout import is_symbolic

Sizes = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""The elements of an op's result from those of its operands, as numpy arrays of objects, and its attributes.

Elements are integers, truth values and symbolic sizes. Raises NotImplementedError for a result that is none of them.
"""


@dataclass(frozen=True, eq=False)
class SizeArray:
    """A tensor with symbolic elements: `entries` is a numpy array of objects, numbers and symbolic sizes."""

    entries: Any
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return tuple(self.entries.shape)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.entries.size)

    @property
    def type(self) -> TensorType:
        """The type of the tensor."""
        return TensorType(self.shape, self.dtype)

    def reshape(self, *shape: Any) -> SizeArray:
        """Return a tensor of another shape with the same elements, as numpy does."""
        return SizeArray(self.entries.reshape(*shape), self.dtype)


def size_array(elements: Any, dtype: str) -> Any:
    """Return a tensor of these elements: a numpy array if none is symbolic, else a `SizeArray`."""
    import numpy as np

    entries = np.asarray(elements, dtype=object)
    return SizeArray(entries, dtype) if any(map(is_symbolic, entries.flat)) else entries.astype(dtype)


def pointwise_sizes(function: Callable[..., Any]) -> Sizes:
    """Return the `Sizes` of an op that computes each element from those at its position; operands broadcast."""

    def compute(operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        import numpy as np

        return np.frompyfunc(function, len(operands), 1)(*operands)

    return compute


def reduced_sizes(function: Callable[[Any, Any], Any]) -> Sizes:
    """Return the `Sizes` of a reduction over the dims in attribute `axis` by a function of two elements."""

    def compute(operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        import numpy as np

        (entries,), axes = operands, attrs["axis"]
        for axis in sorted(axes if isinstance(axes, tuple) else (axes,), reverse=True):
            entries = np.frompyfunc(function, 2, 1).reduce(entries, axis=axis, keepdims=attrs["keepdims"])
        return entries

    return compute
