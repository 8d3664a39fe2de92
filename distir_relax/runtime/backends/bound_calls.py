"""Steps that are bound (`kernels.bound_step`), for calls of a program with the same sizes.

A call of a small program takes little more time than Python between its ops does. After some calls with the same sizes
its ops become a list of native calls with prepared arguments; for others Python is a small part, and they run op by op.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from distir_relax.bundle import Bundle
from distir_relax.errors import BundleError
from distir_relax.kernels.bound_step import BoundStep, CannotBind
from distir_relax.runtime.program_text import generated_text, own_text
from distir_relax.runtime.verification import read_stage

if TYPE_CHECKING:
    import torch

    from distir_relax.ir import Module

Bind: TypeAlias = "Callable[..., Sequence[torch.Tensor]]"
"""Adds a program to a step, for sizes by name, with what the program takes after them; returns the outputs."""

_CALLS = 4
"""Calls that run op by op before a step is bound."""
_MOST_COUNTED = 256
"""Maximum number of choices of sizes whose calls are counted; then the counts begin again."""
_MOST_STEPS = 8
"""Maximum number of steps that are kept."""
MOST_BYTES = 1 << 24
"""Bytes of all results of the largest program that is bound."""
_MOST_OUTPUTS = 1 << 21
"""Bytes of the largest outputs: each call copies them."""


class BoundCalls:
    """The steps of a program, by the sizes of its calls. `load` returns its `bind`, or None if it has none."""

    def __init__(self, load: Callable[[], Bind | None]) -> None:
        self._load = load
        self._calls: Counter[tuple[int, ...]] = Counter()
        self._steps: OrderedDict[tuple[int, ...], _BoundCall | None] = OrderedDict()

    def run(self, sizes: Mapping[str, int], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the outputs of a call; None if it has to run op by op."""
        bound = self._steps.get(_key(sizes))
        return None if bound is None else bound.run(inputs)

    def add(
        self, sizes: Mapping[str, int], of_sizes: Sequence[Sequence[torch.Tensor | None]],
        inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Note a call that ran op by op; bind the step of those like it, if there were enough of them.

        `of_sizes` is what the program takes after the sizes, if it takes anything.
        """
        key = _key(sizes)
        if len(self._calls) >= _MOST_COUNTED:
            self._calls.clear()
        self._calls[key] += 1
        if self._calls[key] < _CALLS or key in self._steps:
            return
        bound = None
        if sum(y.nbytes for y in outputs) <= _MOST_OUTPUTS and self._bind is not None:
            with suppress(CannotBind):
                bound = _BoundCall(self._bind, sizes, of_sizes, inputs)
        self._steps[key] = bound
        if len(self._steps) > _MOST_STEPS:
            self._calls.pop(self._steps.popitem(last=False)[0], None)

    @cached_property
    def _bind(self) -> Bind | None:
        return self._load()


class _BoundCall:
    def __init__(
        self, bind: Bind, sizes: Mapping[str, int], of_sizes: Sequence[Sequence[torch.Tensor | None]],
        inputs: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._step = BoundStep()
        self._of_sizes = of_sizes
        """Kernels read them."""
        self._inputs = [self._step.input(x) for x in inputs]
        self._outputs = bind(self._step, sizes, *of_sizes, *self._inputs)
        if self._step.native_calls < self._step.python_calls:
            raise CannotBind

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for mine, x in zip(self._inputs, inputs, strict=True):
            mine.copy_(x)
        self._step.run()
        return [y.clone() for y in self._outputs]


def emit_bound(bundle: Bundle, entry: str) -> str:
    """Return the text that binds a step of the program `entry`; empty if that is too large, or cannot be bound.

    It is empty, too, for a bundle whose torch module is not the one that is generated for its text.
    """
    from distir_relax.ir import gc_disabled
    from distir_relax.layout import assuming
    from distir_relax.lowering.emit.torch import to_torch_bound

    with gc_disabled():
        try:
            # Programs were verified when they were loaded.
            ranked = read_stage(bundle, "ranked", verified=True)
        except BundleError:
            return ""
        with assuming(ranked.guards):
            if _result_bytes(ranked, entry) > MOST_BYTES:
                return ""
            program = next(program for program in bundle.manifest.programs if program.name == entry)
            own = own_text(bundle, program)
            if own is not None and own != generated_text(bundle, program):
                return ""
            return to_torch_bound(ranked, entry, bundle.manifest.name)


def _result_bytes(module: Module, name: str) -> int:
    """Return the bytes of the results of all ops of a function, typically."""
    return sum(
        _result_bytes(module, op.callee) if op.callee else sum(v.tensor.typical.bytes for v in op.results)
        for op in module.function(name).ops
    )


def _key(sizes: Mapping[str, int]) -> tuple[int, ...]:
    import torch

    return (torch.get_num_threads(), *sizes.values())
