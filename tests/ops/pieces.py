"""Every combination of placements, checked piece by piece.

A sharded program is a composition: operands are redistributed from how they lie to how the op wants them, the op runs,
and what is pending is reduced behind it. Millions of combinations are made of a few thousand such pieces. So every
combination is propagated, and its program is run only if it has a piece that no program run before had. Then each
value between pieces is compared with the unsharded one, not the results alone, so that each piece is right by itself.

A combination is right when the inputs lie as annotated, its program computes what the global one does if layouts are
left out, each piece takes what the one before gives, and all pieces are right. What a piece is lowered to depends on
its op, its layouts and, with ``tail="pad"``, on what is known of the filling of its operands; all of that is its key.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from distir_relax.errors import DistIRError
from distir_relax.interpret import execute
from distir_relax.ir import DTensorType, Module, Op, Output, Value, verify
from distir_relax.layout import Placement, Shard, parse_placements, print_placements
from distir_relax.lowering.padding import MODES
from distir_relax.lowering.to_distir import _Lowering, _Program
from distir_relax.ops import Trait, evaluate, lookup
from distir_relax.ops.table.dispatch import type_of
from distir_relax.ops.table.type_checks import check
from distir_relax.sharding import DelayReductions, Propagate
from distir_relax.sharding.factors import Factoring, factorize, is_annotation

if TYPE_CHECKING:
    from validator import Layout, Setting

Filling = tuple[float | None, ...]
"""What fills the short shards of a value along each mesh axis, where it is known."""

Key = tuple[object, ...]
"""A piece: the op and its attributes, the types and fillings of its operands, the types of its results."""


class Pieces:
    """The pieces of the programs of one setting, as far as they were found to be right."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.right: dict[Key, tuple[Filling, ...]] = {}
        """The pieces that are right, each with the fillings of its results."""
        self._factorings: dict[tuple[tuple[int, ...], ...], Factoring] = {}

    def wrong(self, layouts: tuple[Layout, ...]) -> str:
        """What is wrong with a combination, or nothing."""
        module = self.setting.module(layouts)
        try:
            sharded = DelayReductions().run(Propagate().run(module, self._factoring(module, layouts)))
            if why := difference(module, sharded):
                return why
            if not self._is_known(sharded):
                self._check(sharded, self.setting.data(layouts))
        except (DistIRError, ValueError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return ""

    def digests(self) -> frozenset[bytes]:
        """A name for each of the right pieces."""
        setting = f"{self.setting.op} {self.setting.mesh}"
        return frozenset(hashlib.blake2b(f"{setting} {key}".encode(), digest_size=16).digest() for key in self.right)

    def _factoring(self, module: Module, layouts: tuple[Layout, ...]) -> Factoring:
        """That of the program, which depends on the dims of terms that the inputs have and not on their layouts."""
        shapes = tuple(tuple(lead.data.shape) for lead in self.setting.leads(layouts))
        if shapes not in self._factorings:
            self._factorings[shapes] = factorize(module.main)
        return self._factorings[shapes]

    def _is_known(self, sharded: Module) -> bool:
        fillings: dict[str, Filling] = {}
        for key, results in _inputs(sharded):
            if key not in self.right:
                return False
            fillings[results[0].name] = self.right[key][0]
        for op in sharded.main.ops:
            key = _key(op, fillings)
            if key not in self.right:
                return False
            fillings.update(zip((v.name for v in op.results), self.right[key], strict=True))
        return True

    def _check(self, sharded: Module, data: dict[str, torch.Tensor]) -> None:
        """Run the program in both modes of tails, compare every value, and note its pieces."""
        verify(sharded, check)
        values = [v for op in sharded.main.ops for v in op.results]
        expected = _interpreted(sharded, data)
        main = replace(sharded.main, outputs=tuple(Output(v.name, v) for v in values))
        opened = replace(sharded, functions=(main,))
        for mode in MODES:
            lowering = _Lowering(_Program(opened, mode, {main.name}), main, main.name)
            distributed = Module("distributed", (lowering.main(),), sharded.meshes)
            for name, found in execute(opened, distributed, data).items():
                where = f"{mode}, %{name}: "
                torch.testing.assert_close(
                    found, expected[name], rtol=1e-9, atol=1e-9, equal_nan=True, msg=where.__add__
                )
        axes = range(len(self.setting.mesh.shape))
        # The last of the modes is ``pad``, where values have fillings.
        fillings = {
            name: tuple(lowering.padding.pad_values.get((local.name, axis)) for axis in axes)
            for name, local in lowering.values.items()
        }
        keys = [*_inputs(sharded), *((_key(op, fillings), op.results) for op in sharded.main.ops)]
        self.right.update((key, tuple(fillings[v.name] for v in results)) for key, results in keys)


def _key(op: Op, fillings: dict[str, Filling]) -> Key:
    operands = tuple((v.type, fillings[v.name]) for v in op.operands)
    return op.name, tuple(op.attrs.items()), operands, tuple(v.type for v in op.results)


def _inputs(sharded: Module) -> list[tuple[Key, tuple[Value, ...]]]:
    return [((item.value.type,), (item.value,)) for item in sharded.main.inputs]


def _interpreted(sharded: Module, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every value of the program, computed whole."""
    values = dict(data)
    for op in sharded.main.ops:
        held = [values[v.name] for v in op.operands]
        operands = tuple(Value(v.name, type_of(x)) for v, x in zip(op.operands, held, strict=True))
        results = evaluate(replace(op, operands=operands), held)
        values.update(zip((v.name for v in op.results), results, strict=True))
    return values


def difference(module: Module, sharded: Module) -> str:
    """Where a sharded program is not the global one with layouts: another op, another order, an input elsewhere."""
    stands_for: dict[str, str] = {}
    """The value of the global program that a value of either is, marks and redistributions left out."""
    laid: dict[str, str] = {}
    plain = []
    for op in module.main.ops:
        if is_annotation(op):
            source = op.operands[0].name
            stands_for[op.results[0].name] = source
            laid[source] = print_placements(op.placements)
        else:
            plain.append(op)
    defined: dict[str, Value] = {}
    same: dict[str, str] = {}
    for item in sharded.main.inputs:
        defined[item.value.name], same[item.value.name] = item.value, item.value.name
        if item.value.name in laid and not _lies(item.value.type, laid[item.value.name]):
            return f"input {item.value} lies as {item.value.type}, annotated {laid[item.value.name]}"
    remaining = iter(plain)
    for op in sharded.main.ops:
        if any(defined.get(v.name) != v for v in op.operands):
            return f"an operand of {op.name} is of another type than the value that it names"
        defined.update((v.name, v) for v in op.results)
        if Trait.REDISTRIBUTION in lookup(op.name).traits:
            same[op.results[0].name] = same[op.operands[0].name]
            continue
        original = next(remaining, None)
        if original is None or (original.name, original.attrs) != (op.name, op.attrs):
            return f"{op.name} stands for {original and original.name}"
        if [same[v.name] for v in op.operands] != [stands_for.get(v.name, v.name) for v in original.operands]:
            return f"{op.name} has other operands than in the global program"
        same.update((v.name, w.name) for v, w in zip(op.results, original.results, strict=True))
    outputs = [same[o.value.name] for o in sharded.main.outputs]
    if next(remaining, None) or outputs != [stands_for.get(o.value.name, o.value.name) for o in module.main.outputs]:
        return "the sharded program has not all ops, or other outputs"
    return ""


def _lies(kind: object, text: str) -> bool:
    assert isinstance(kind, DTensorType)
    return all(map(_is_as_asked, kind.placements, parse_placements(text)))


def _is_as_asked(found: Placement, asked: Placement) -> bool:
    if isinstance(asked, Shard):
        return isinstance(found, Shard) and found.dim == asked.dim
    return found == asked
