"""Recording of a step: what a program does once becomes a list that runs again on other data of the same sizes.

A program that runs while it is recorded computes as always. Each call of a native kernel is noted with its arguments
(`native.call_list`), each op of torch as a function (`recorded_ops`), and results are in memory that is free for others
after the last use of a tensor, so its plan follows from the tensors' lifetimes. The step is then a loop over native
calls, without Python or allocations between them. Ops on constants have run, and views need nothing.

What depends on the elements of a result, other than by ops and kernels, cannot be recorded. Functions that do so are
parts of a step as a whole (`runs_whole`); elsewhere the recording fails, and the program goes on unrecorded.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from distir_relax.kernels.native.call_list import CallList
from distir_relax.kernels.native.load import Kernel, observed
from distir_relax.kernels.step_memory import Memory, unowned

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")


class Recording:
    """What a program does in a step, in order. It fails when results have more than `most_bytes` together."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        self._memory, self._inputs = Memory(), Memory()
        self.failure = ""
        """Why the step cannot run again; empty if it can."""
        self._parts: list[CallList | Callable[[], object]] = []
        self._counted: dict[Callable[..., None], tuple[int, ...]] = {}
        self._times: Counter[int] = Counter()
        self._kept: list[object] = []
        self._unread: set[int] = set()
        """The memory of constants that no part of the step reads."""
        self._left = most_bytes

    @property
    def native_calls(self) -> int:
        """The number of calls of native kernels."""
        return sum(len(part) for part in self._parts if isinstance(part, CallList))

    @property
    def python_calls(self) -> int:
        """The number of calls of functions of Python."""
        return sum(not isinstance(part, CallList) for part in self._parts)

    def run(self) -> None:
        """Run the step."""
        for part in self._parts:
            part.run() if isinstance(part, CallList) else part()
        for function, numbers in self._counted.items():
            function(*numbers)

    def fail(self, reason: str) -> None:
        """Record nothing more: the step cannot run again."""
        self.failure = self.failure or reason

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the step with the elements of `x`, which others are copied to before it runs."""
        # It is written before the step, so its memory is that of no value before its first use.
        with paused():
            return self._inputs.empty(x.shape, x.dtype).copy_(x)

    def empty_as(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the step of the shape of `x`, and the order of its dims in memory."""
        self._left -= x.nbytes
        if self._left < 0:
            self.fail("its results are large")
        strides = x.stride()
        order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
        made = self._memory.empty([x.shape[dim] for dim in order], x.dtype)
        return made.permute([order.index(dim) for dim in range(x.dim())])

    def computes(self, x: torch.Tensor | None) -> bool:
        """Return whether `x` is an input or a result of the step, rather than a constant, or none."""
        if x is None or not _is_plain(x):
            return False
        address = x.untyped_storage().data_ptr()
        return self._memory.contains(address) or self._inputs.contains(address)

    def constant(self, found: Any, operands: Sequence[torch.Tensor]) -> None:
        """Note the result of an op that is the same in each run; it may be a view of one of the operands."""
        self.keep(found)
        self._unread |= _storages(found) - _storages(operands)

    def reads(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a part of the step reads these tensors."""
        self._unread -= _storages(tensors)

    def is_unread(self, x: torch.Tensor) -> bool:
        """Return whether `x` is a constant of the step that no part of it reads, so that another may change it."""
        return x.untyped_storage().data_ptr() in self._unread

    def keep(self, *objects: object) -> None:
        """Let objects live as long as the step, because kernels use their memory."""
        self._kept += objects

    def times(self, number: int) -> int:
        """Return how often this was called with `number` before, such as by the calls of a function with that step."""
        self._times[number] += 1
        return self._times[number] - 1

    def count(self, function: Callable[..., None], *numbers: int) -> None:
        """Let each run end with a call of `function`, of the sums of all numbers that are given for it."""
        before = self._counted.get(function, (0,) * len(numbers))
        self._counted[function] = tuple(a + b for a, b in zip(before, numbers, strict=True))

    def whole(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a function as one part of the step; return its result.

        Tensors are recorded, alone or in a list or tuple. Other results are for other whole functions alone.
        """
        with paused():
            found: Any = function(*map(_now, args), **kwargs)
            return self.add(function, args, kwargs, found)  # type: ignore[no-any-return]

    def kernel(self, kernel: Kernel, arguments: Sequence[int | float]) -> None:
        """Add the call of a native kernel with numbers and addresses."""
        if self.failure:
            return
        if not self._parts or not isinstance(self._parts[-1], CallList):
            self._parts.append(CallList())
        part = self._parts[-1]
        assert isinstance(part, CallList)
        part.add(kernel, *arguments)

    def add(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], found: Any,
        only_views: bool = False,
    ) -> Any:  # fmt: skip
        """Add a function that has found these results; return those of the step, in its memory.

        With `only_views`, it does nothing where it returns views of its operands.
        """
        from torch.utils._pytree import tree_map

        several = type(found) in (list, tuple)
        results = list(found) if several else [found]
        given = _storages((args, kwargs))
        new = [_is_plain(x) and x.numel() > 0 and x.untyped_storage().data_ptr() not in given for x in results]
        if self.failure or (only_views and not any(new)):
            return found
        self._unread -= given
        kept: list[Any] = [
            self.empty_as(x).copy_(x) if is_new else x if x is None or _is_tensor(x) else _Later(x)
            for x, is_new in zip(results, new, strict=True)
        ]
        targets = [unowned(x) if is_new else x for x, is_new in zip(kept, new, strict=True)]
        inputs, options = tree_map(self._unowned, (list(args), dict(kwargs)))
        out = _with_out(function) if new == [True] and not several else None
        if out is not None:
            self._parts.append(partial(out, *inputs, **options, out=targets[0]))
        else:

            def run() -> None:
                again = function(*map(_now, inputs), **options)
                for target, x, is_new in zip(targets, again if several else (again,), new, strict=True):
                    if is_new:
                        target.copy_(x)
                    elif type(target) is _Later:
                        target.value = x

            self._parts.append(run)
        return type(found)(kept) if several else kept[0]

    def _unowned(self, x: Any) -> Any:
        return unowned(x) if self.computes(x) else x


class _Later:
    """A result of a whole function that is no tensor, such as a transfer that another waits for."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _now(x: Any) -> Any:
    return x.value if type(x) is _Later else x


class _OfThread(threading.local):
    recording: Recording | None = None


_of_thread = _OfThread()


def recording() -> Recording | None:
    """Return the recording of this thread; None if there is none."""
    found = _of_thread.recording
    return None if found is None or found.failure else found


@contextmanager
def calls_recorded(found: Recording | None) -> Iterator[None]:
    """Record the calls of kernels in this thread, and functions that run whole: nothing if `found` is None."""
    before = _of_thread.recording, observed.by
    _of_thread.recording, observed.by = found, None if found is None else found.kernel
    try:
        yield
    finally:
        _of_thread.recording, observed.by = before


@contextmanager
def paused() -> Iterator[None]:
    """Record nothing of what this thread does."""
    if _of_thread.recording is None:
        yield
        return
    from torch.utils._python_dispatch import _disable_current_modes

    with calls_recorded(None), _disable_current_modes():
        yield


def runs_whole(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function be one part of a recorded step, because it depends on elements of tensors."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        found = recording()
        return function(*args, **kwargs) if found is None else found.whole(function, *args, **kwargs)

    return run


def _storages(tree: Any) -> set[int]:
    """Return where the memory of all tensors of a tree begins."""
    from torch.utils._pytree import tree_leaves

    return {x.untyped_storage().data_ptr() for x in tree_leaves(tree) if _is_plain(x)}


def _is_tensor(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor)


def _is_plain(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor) and x.layout is torch.strided


@cache
def _with_out(function: Any) -> Any:
    """Return the overload of an op of torch that writes its result to an argument ``out``; None if there is none."""
    import torch

    if not isinstance(function, type(torch.ops.aten.add.Tensor)) or len(function._schema.returns) != 1:
        return None
    wanted = _arguments(function)
    packet = function._overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    return next((o for o in others if _arguments(o)[:-1] == wanted and o._schema.arguments[-1].name == "out"), None)


def _arguments(function: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in function._schema.arguments]
