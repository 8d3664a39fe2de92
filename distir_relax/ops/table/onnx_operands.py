"""Operands of an ONNX node as seen by its conversion: values, or arrays that are known at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distir_relax.ir import TensorType, Value
from distir_relax.ops.table.size_array import SizeArray


class OnnxOperands:
    """The operands of one node, by position.

    `items` holds, for each, a value, a numpy array if its data is constant, a `SizeArray` if it is known up to symbols,
    or None if it is omitted. `place` converts an array to a value; `constants` gives the data of parameters by value
    name.
    """

    def __init__(self, items: list[Any], place: Callable[[Any], Value], constants: Mapping[str, Any]) -> None:
        self._items = items
        self._place = place
        self._constants = constants

    def __len__(self) -> int:
        """The number of operands of the node, including omitted ones."""
        return len(self._items)

    def has(self, index: int) -> bool:
        """Return whether the operand is present."""
        return index < len(self._items) and self._items[index] is not None

    def __getitem__(self, index: int) -> Any:
        """Return the operand as a value; raise NotImplementedError if it is omitted."""
        if not self.has(index):
            raise NotImplementedError(f"operand {index} is omitted")
        item = self._items[index]
        return item if isinstance(item, Value) else self._place(item)

    def dtype(self, index: int) -> str:
        """Return the dtype of an operand."""
        item = self._items[index]
        return item.tensor.dtype if isinstance(item, Value) else str(item.dtype)

    def array(self, index: int) -> Any:
        """Return the data of an operand that must be known at import, as a numpy array; None if it is omitted.

        The array is one of objects if some elements are symbolic sizes. Raises NotImplementedError if the operand is
        computed at run time.
        """
        if not self.has(index):
            return None
        item = self._items[index]
        if isinstance(item, SizeArray):
            return item.entries
        if not isinstance(item, Value):
            return item
        if item.name not in self._constants:
            raise NotImplementedError(f"operand {index} is computed at run time, expected one that is constant")
        return self._constants[item.name].numpy()

    def numbers(self, index: int, otherwise: Any = None) -> Any:
        """Return the numbers of a constant operand as a list; `otherwise` if it is omitted."""
        data = self.array(index)
        return otherwise if data is None else data.reshape(-1).tolist()

    def number(self, index: int, otherwise: Any = None) -> Any:
        """Return the first number of a constant operand; `otherwise` if it is omitted."""
        data = self.array(index)
        return otherwise if data is None else data.reshape(-1).tolist()[0]

    def constant_numbers(self, index: int) -> Any:
        """Like `numbers`, but return None for an operand that is computed at run time."""
        return None if isinstance(self._items[index], Value) else self.numbers(index)

    def constant(self, array: Any) -> Value:
        """Return a value with the data of a numpy array."""
        return self._place(array)

    def pointwise(self) -> list[Any]:
        """Return all operands as values, for a broadcasting op.

        An array of one element that widens no other operand becomes a scalar.
        """
        ranks = [len(x.tensor.shape) for x in self._items if isinstance(x, Value) and isinstance(x.type, TensorType)]
        ranks += [x.ndim for x in self._items if not isinstance(x, Value) and x.size != 1]
        widest = max(ranks, default=-1)
        return [
            self[i]
            if isinstance(item, Value) or item.size != 1 or item.ndim > widest
            else self._place(item.reshape(()))
            for i, item in enumerate(self._items)
        ]
