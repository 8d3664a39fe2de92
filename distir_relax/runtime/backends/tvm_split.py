"""Cuts a program in what runs once and what runs on every call, and puts kernels in place of the ops they are for.

What weights alone determine (packing them for the kernels, padding a tail block, masks) becomes ``prepare``, which
runs when the weights are loaded; the rest is ``main``::

    prepare(weights...)                           -> (prepared...)
    main(inputs..., kept weights..., prepared...) -> (outputs...)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distir_relax.runtime.backends import tvm_kernels as kernels

PREFIX = "distir."


@dataclass(frozen=True)
class Split:
    """A module with the functions `prepare` and `main`.

    `kept` are the positions, among the weights, of those that `main` takes as they are; `calls` are the methods of
    the communicator that it calls.
    """

    module: Any
    kept: tuple[int, ...]
    calls: frozenset[str]


def split_program(function: Any, inputs: int, host: kernels.Machine) -> Split:
    """Split a straight-line Relax function whose first `inputs` parameters are inputs, the others weights."""
    return _Splitter(function, inputs, host).run()


class _Splitter:
    """Values are known by the variables of the original function; `early` are those that weights alone determine."""

    def __init__(self, function: Any, inputs: int, host: kernels.Machine) -> None:
        self.inputs = list(function.params)[:inputs]
        self.weights = list(function.params)[inputs:]
        self.host = host
        self.bindings = [b for block in function.body.blocks for b in block.bindings]
        self.result = function.body.body
        self.definitions = {b.var: b.value for b in self.bindings}
        self.values: dict[Any, Any] = {}
        self.early = self._find_early()
        late = [b for b in self.bindings if b.var not in self.early]
        self.packs = {b.var: key for b in late if (key := self._packable(b.value)) is not None}
        used = set(_variables(self.result))
        for b in late:
            used.update(_variables(b.value)[:1] if b.var in self.packs else _variables(b.value))
        self.kept = [i for i, w in enumerate(self.weights) if w in used]
        self.crossing = [b.var for b in self.bindings if b.var in self.early and b.var in used]

    def run(self) -> Split:
        """Both functions, with their kernels."""
        from tvm import relax

        builder = relax.BlockBuilder()
        self.values = {w: relax.Var(w.name_hint, w.ty) for w in self.weights}
        with builder.function("prepare", list(self.values.values())):
            with builder.dataflow():
                self._emit(builder, early=True)
                keys = list(dict.fromkeys(self.packs.values()))
                panels = [self._pack(builder, *key) for key in keys]
                whole = builder.emit_output(relax.Tuple([self.values[v] for v in self.crossing] + panels))
            builder.emit_func_output(whole)

        order = [*self.inputs, *(self.weights[i] for i in self.kept), *self.crossing]
        self.values = {v: relax.Var(v.name_hint, v.ty) for v in order}
        packed = {key: relax.Var(f"{key[0].name_hint}_packed", panel.ty) for key, panel in zip(keys, panels, strict=True)}
        with builder.function("main", [*self.values.values(), *packed.values()]):
            with builder.dataflow():
                for var, key in self.packs.items():
                    self.values[var] = packed[key]
                self._emit(builder, early=False)
                whole = builder.emit_output(_substitute(self.definitions[self.result], self.values))
            builder.emit_func_output(whole)
        calls = {name for b in self.bindings if (name := _packed_call(b.value)) is not None}
        return Split(builder.get(), tuple(self.kept), frozenset(calls))

    def _find_early(self) -> set[Any]:
        early: set[Any] = set()
        known = set(self.weights)
        for b in self.bindings:
            # Communication stays where the program has it: ranks load their weights each in its own time.
            if _packed_call(b.value) is None and b.var != self.result and known.issuperset(_variables(b.value)):
                known.add(b.var)
                early.add(b.var)
        return early

    def _packable(self, call: Any) -> tuple[Any, bool] | None:
        """For a product with a weight on its right: the weight, and whether it lies transposed."""
        if not (_is_op(call, "relax.matmul") and _suits(call)) or len(call.args[1].ty.shape) != 2:
            return None
        right = call.args[1]
        if right not in self.early and right not in self.weights:
            return None
        source = self.definitions.get(right)
        return (source.args[0], True) if _is_op(source, "relax.permute_dims") else (right, False)

    def _emit(self, builder: Any, early: bool) -> None:
        for b in self.bindings:
            if (b.var in self.early) != early or b.var == self.result:
                continue
            call = _substitute(b.value, self.values)
            if b.var in self.packs:
                call = _packed_product(builder, call, self.values[b.var], self.host)
            else:
                kernel = next((make for name, make in _KERNELS.items() if _is_op(call, name)), None)
                if kernel is not None and _suits(call):
                    call = kernel(builder, call, self.host)
            self.values[b.var] = builder.emit(call, name_hint=b.var.name_hint)

    def _pack(self, builder: Any, weight: Any, transposed: bool) -> Any:
        from tvm import relax

        shape, dtype = _shape(weight), _dtype(weight)
        k, n = reversed(shape) if transposed else shape
        kernel = builder.add_func(kernels.pack(k, n, dtype, transposed), "pack")
        kind = relax.TensorType(kernels.packed_shape(k, n, dtype), dtype)
        return builder.emit(relax.call_tir(kernel, [self.values[weight]], kind))


def _packed_product(builder: Any, call: Any, panels: Any, host: kernels.Machine) -> Any:
    from tvm import relax

    x, result = call.args[0], call.ty if call.ty is not None else None
    *lead, k = _shape(x)
    n = _shape(call.args[1])[1] if result is None else 0
    raise NotImplementedError((lead, k, n, panels, relax))
