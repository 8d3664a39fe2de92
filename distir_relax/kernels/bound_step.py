"""Steps whose memory and calls are prepared once, for programs that run many times with the same sizes.

A program is bound by running it without data: each op takes memory for its result, and adds what computes it to the
step. Memory is free for others after the last use of a tensor, so its plan follows from the tensors' lifetimes. Native
kernels are called without Python between them (`native.call_list`); other ops run as functions of Python.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from distir_relax.kernels.native.call_list import CallList

if TYPE_CHECKING:
    import torch

    from distir_relax.kernels.native.load import Kernel

Kind: TypeAlias = "tuple[Sequence[int], torch.dtype]"
"""Shape and dtype of a tensor."""

_ALIGNMENT = 64
_LEAST = 1 << 16


class CannotBind(Exception):
    """Raised while a program is bound that has to run op by op."""


@dataclass(slots=True)
class Started:
    """What a step has started, and the kind of its result."""

    kind: Kind
    value: Any = None


class BoundStep:
    """What a program does in a step, in order."""

    def __init__(self) -> None:
        self.memory = Memory()
        self._parts: list[CallList | Callable[[], None]] = []
        self._counted: dict[Callable[..., None], tuple[int, ...]] = {}
        self._times: Counter[int] = Counter()
        self._kept: list[object] = []

    @property
    def native_calls(self) -> int:
        """The number of calls of native kernels."""
        return sum(len(part) for part in self._parts if isinstance(part, CallList))

    @property
    def python_calls(self) -> int:
        """The number of calls of functions of Python."""
        return sum(not isinstance(part, CallList) for part in self._parts)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the step's memory, which others take after its last use."""
        return self.memory.empty(shape, dtype)

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the step with the elements of `x`, which others are copied to before it runs."""
        return self.empty(x.shape, x.dtype).copy_(x)

    def computes(self, x: torch.Tensor | None) -> bool:
        """Return whether `x` is an input or a result of the step, rather than a constant, or none."""
        return x is not None and self.memory.contains(x.data_ptr())

    def keep(self, *objects: object) -> None:
        """Let objects live as long as the step, because kernels use their memory."""
        self._kept += objects

    def times(self, number: int) -> int:
        """Return how often this was called with `number` before, such as by the calls of a function with that step."""
        self._times[number] += 1
        return self._times[number] - 1

    def add(self, kernel: Kernel, *arguments: int | float) -> None:
        """Add the call of a native kernel with numbers and addresses."""
        if not self._parts or not isinstance(self._parts[-1], CallList):
            self._parts.append(CallList())
        part = self._parts[-1]
        assert isinstance(part, CallList)
        part.add(kernel, *arguments)

    def python(
        self, compute: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor], kind: Kind
    ) -> torch.Tensor:
        """Add a function of some operands; return the tensor that gets its result, which is of this kind."""
        (result,) = self.several(lambda *given: (compute(*given),), operands, kind)
        return result

    def several(
        self, compute: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor], *kinds: Kind
    ) -> tuple[torch.Tensor, ...]:
        """Add a function of some operands that returns several results of these kinds; return the tensors for them."""
        given = [_unowned(x) for x in operands]
        tensors = tuple(self.empty(*kind) for kind in kinds)
        targets = [_unowned(x) for x in tensors]

        def run() -> None:
            for target, value in zip(targets, compute(*given), strict=True):
                target.copy_(value)

        self._parts.append(run)
        return tensors

    def into(self, compute: Callable[[torch.Tensor, torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor:
        """Add a function of `x` and the tensor for its result, which is like `x`; return that tensor."""
        result = self.empty(x.shape, x.dtype)
        self._parts.append(partial(compute, _unowned(x), _unowned(result)))
        return result

    def do(self, function: Callable[[], Any]) -> None:
        """Add a function."""
        self._parts.append(function)

    def call(self, function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> torch.Tensor:
        """Add a function of `x` whose result is not needed, such as a check; return `x`."""
        self._parts.append(partial(function, _unowned(x)))
        return x

    def count(self, function: Callable[..., None], *numbers: int) -> None:
        """Let each run end with a call of `function`, of the sums of all numbers that are given for it."""
        before = self._counted.get(function, (0,) * len(numbers))
        self._counted[function] = tuple(a + b for a, b in zip(before, numbers, strict=True))

    def start(self, function: Callable[[], Any], kind: Kind) -> Started:
        """Add a function that starts what another finishes, with a result of this kind; return it for that one."""
        started = Started(kind)

        def run() -> None:
            started.value = function()

        self._parts.append(run)
        return started

    def finish(self, function: Callable[[Any], torch.Tensor], started: Started) -> torch.Tensor:
        """Add the function that finishes a started one; return its result."""
        result = self.empty(*started.kind)
        target = _unowned(result)

        def run() -> None:
            target.copy_(function(started.value))
            started.value = None

        self._parts.append(run)
        return result

    def view(self, compute: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
        """Return the function's view of a tensor, or views; where it copies `x`, the copy is part of the step."""
        import torch

        found = compute(x)
        views = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        if all(v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in views):
            return found
        if isinstance(found, torch.Tensor):
            return self.python(compute, (x,), (found.shape, found.dtype))
        return self.several(compute, (x,), *((v.shape, v.dtype) for v in views))

    def run(self) -> None:
        """Run the step."""
        for part in self._parts:
            part.run() if isinstance(part, CallList) else part()
        for function, numbers in self._counted.items():
            function(*numbers)


def _unowned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, which others may take when `x` is gone."""
    import torch

    if not x.numel():
        return x
    size = 1 + sum((count - 1) * step for count, step in zip(x.shape, x.stride(), strict=True))
    memory = (ctypes.c_char * (size * x.itemsize)).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype, count=size).as_strided(x.shape, x.stride())


class Memory:
    """Memory for tensors, which is used again as soon as a tensor and all of its views are gone."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Any, list[tuple[int, int]]]] = []
        """Blocks of memory, each with its free intervals: offsets of begin and end, in order."""
        self.size = 0
        """Bytes of all blocks."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose elements may have any value."""
        import torch

        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        size = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        number, start = self._take(size)
        slot = (ctypes.c_char * size).from_address(self._blocks[number][0].data_ptr() + start)
        weakref.finalize(slot, self._free, number, start, start + size)
        return torch.frombuffer(slot, dtype=dtype, count=count).view(tuple(shape))

    def contains(self, address: int) -> bool:
        """Return whether an address is one of this memory."""
        starts = ((block.data_ptr(), block.nbytes) for block, _ in self._blocks)
        return any(start <= address < start + size for start, size in starts)

    def _take(self, size: int) -> tuple[int, int]:
        """Return the block and the offset of free memory, the smallest interval that is large enough."""
        import torch

        fits = [
            (end - start, number, start)
            for number, (_, free) in enumerate(self._blocks)
            for start, end in free
            if end - start >= size
        ]
        if not fits:
            block = max(size, _LEAST, self.size)
            self._blocks.append((torch.empty(block, dtype=torch.uint8), [(0, block)]))
            self.size += block
            return self._take(size)
        _, number, start = min(fits)
        free = self._blocks[number][1]
        place = next(i for i, interval in enumerate(free) if interval[0] == start)
        end = free[place][1]
        free[place : place + 1] = [(start + size, end)] if end > start + size else []
        return number, start

    def _free(self, number: int, start: int, end: int) -> None:
        free = self._blocks[number][1]
        free.append((start, end))
        free.sort()
        joined: list[tuple[int, int]] = []
        for interval in free:
            if joined and joined[-1][1] == interval[0]:
                joined[-1] = (joined[-1][0], interval[1])
            else:
                joined.append(interval)
        free[:] = joined
