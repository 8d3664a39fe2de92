"""The operands of an ONNX node, as its conversion sees them: values, or numbers that are known at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distir_relax.ir import TensorType, Value


class OnnxOperands:
    """The operands of one node, by position.

    `items` holds, for each, a value, a numpy array whose data is known, or None where it is left out. `place` makes a
    value of an array; `known` gives the data of values that are parameters, by value name.
    """

    def __init__(self, items: list[Any], place: Callable[[Any], Value], known: Mapping[str, Any]) -> None:
        self._items = items
        self._place = place
        self._known = known

    def __len__(self) -> int:
        """How many operands the node lists, left-out ones included."""
        return len(self._items)

    def has(self, index: int) -> bool:
        """Whether the operand is given."""
        return index < len(self._items) and self._items[index] is not None

    def __getitem__(self, index: int) -> Any:
        """The operand as a value; raises NotImplementedError where it is left out."""
        if not self.has(index):
            raise NotImplementedError(f"operand {index} is left out")
        item = self._items[index]
        return item if isinstance(item, Value) else self._place(item)

    def array(self, index: int) -> Any:
        """The data of an operand that must be known at import, as a numpy array; None where it is left out.

        Raises NotImplementedError for one that is computed at run time.
        """
        if not self.has(index):
            return None
        item = self._items[index]
        if not isinstance(item, Value):
            return item
        if item.name not in self._known:
            raise NotImplementedError(f"operand {index} is computed at run time, expected one that is constant")
        return self._known[item.name].numpy()

    def numbers(self, index: int, otherwise: Any = None) -> Any:
        """The numbers of a known operand as a list; `otherwise` where it is left out."""
        data = self.array(index)
        return otherwise if data is None else data.reshape(-1).tolist()

    def number(self, index: int, otherwise: Any = None) -> Any:
        """The single number of a known operand; `otherwise` where it is left out."""
        data = self.array(index)
        return otherwise if data is None else data.reshape(-1)[0].item()

    def known_numbers(self, index: int) -> Any:
        """As `numbers`, but None for an operand that is computed at run time."""
        return None if isinstance(self._items[index], Value) else self.numbers(index)

    def constant(self, array: Any) -> Value:
        """A value with the data of a numpy array."""
        return self._place(array)

    def pointwise(self) -> list[Any]:
        """All operands as values, for an op that broadcasts them.

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
