"""Ops of torch in a recorded step (`kernels.recording`), which torch reports one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distir_relax.kernels import elementwise, norms
from distir_relax.kernels.recording import Recording, calls_recorded, recording


@contextmanager
def recorded(step: Recording) -> Iterator[None]:
    """Record the ops of this thread, in the mode in which programs run: others have other ops."""
    with torch.inference_mode(), calls_recorded(step), CheckedReads(), RecordedOps(step):
        yield


class RecordedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which ops of torch are parts of a recording, or the native kernels that compute the same."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function, kwargs, step = func, kwargs or {}, self._recording
        if step.failure:
            return function(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if function in _without_elements():
            found = function(*args, **kwargs)
            return found if found.layout is not torch.strided else step.empty_as(found)
        changed = _changed(function, args, kwargs)
        is_constant = torch.Tag.nondeterministic_seeded not in function.tags and not any(map(step.computes, tensors))
        if not all(step.computes(x) or (is_constant and step.is_unread(x)) for x in changed if x.numel()):
            step.fail(f"{function} changes a constant")
            return function(*args, **kwargs)
        if is_constant:
            found = function(*args, **kwargs)
            step.constant(found, tensors)
            return found
        if _depends_on_elements(function, args):
            step.fail(f"{function} depends on elements of its operands")
            return function(*args, **kwargs)
        if (native := _native_forms().get(function)) is not None:
            # The kernel that it calls is recorded instead.
            with self:
                found = native(*args, **kwargs)
            if found is not None:
                step.reads(tensors)
                return found
        return step.add(function, args, kwargs, function(*args, **kwargs), only_views=not changed)


class CheckedReads(TorchFunctionMode):
    """A context in which a recording fails where Python reads elements of a value that a step computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = recording()
        if found is not None and func in _READS and found.computes(args[0]):
            found.fail(f"{func.__name__} depends on elements of its operand")
        return func(*args, **(kwargs or {}))


_READS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""What torch does not report as an op."""


def _depends_on_elements(function: Any, args: Sequence[Any]) -> bool:
    """Whether a result is no tensor, or has a shape, that depends on elements of operands."""
    if function is torch.ops.aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags


def _changed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the operands to whose elements an op of torch writes."""
    found: list[torch.Tensor] = []
    if function is torch.ops.aten.detach_.default:
        return found
    for number, argument in enumerate(function._schema.arguments if function._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
    return found


@cache
def _without_elements() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(
        {
            aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
            aten.new_empty_strided.default,
        }
    )  # fmt: skip


@cache
def _native_forms() -> dict[Any, Callable[..., torch.Tensor | None]]:
    """Return the kernels that compute what ops of torch do; they return None where they cannot."""
    return {**elementwise.native_forms(), **norms.native_forms()}
