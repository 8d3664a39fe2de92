"""Local op fusion: replace several ops with the fused op that is equivalent to them.

Applied to ranks' programs, and to distributed programs before they are simulated; activations and norms are fused
before a program is differentiated. Fused ops and their patterns are defined in the op table (`Code.patterns`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from distir_relax.errors import VerificationError
from distir_relax.ir import Function, Module, Op, PlacedType, TensorType, count_uses, live_ops, producers
from distir_relax.ops import Trait, infer, lookup
from distir_relax.ops.table import Attrs, OpDef
from distir_relax.ops.table.patterns import Match, Pattern, fusions, match
from distir_relax.ops.table.spmd_inference import infer_placed


@dataclass(frozen=True, slots=True)
class FuseLocal:
    """Pass: ranked or distributed stage, in and out."""

    takes: ClassVar[tuple[str, ...]] = ("distributed", "ranked")
    gives: ClassVar[str] = ""

    def run(self, module: Module) -> Module:
        """Fuse ops in every function. Equal ranks stay equal; distributed ops fuse only on equal device sets."""
        return replace(module, functions=tuple(_fuse(f, lambda entry: True) for f in module.functions))


@dataclass(frozen=True, slots=True)
class FuseDifferentiable:
    """Pass: global stage in and out. Fuses ops into those that have a gradient, which needs the operands only.

    Otherwise the results of most of the ops are saved until the backward pass. A program with annotations keeps its
    norms: a norm that is fused needs the normalized dims whole, its mean alone can be computed in parts.
    """

    takes: ClassVar[tuple[str, ...]] = ("global",)
    gives: ClassVar[str] = "global"

    def run(self, module: Module) -> Module:
        """Fuse ops in every function."""
        ops = (op for function in module.functions for op in function.ops if not op.callee)
        is_annotated = any(Trait.ANNOTATION in lookup(op.name, op.location).traits for op in ops)

        def may_be(entry: OpDef) -> bool:
            return entry.gradient is not None and (Trait.POINTWISE in entry.traits or not is_annotated)

        return replace(module, functions=tuple(_fuse(f, may_be) for f in module.functions))


def _fuse(function: Function, may_be: Callable[[OpDef], bool]) -> Function:
    """Fuse ops into those that `may_be` fused."""
    uses = count_uses(function)
    producer_of = producers(function)
    patterns: dict[str, list[tuple[str, Pattern]]] = defaultdict(list)
    """The fused ops and their patterns, by the last op of the pattern."""
    for name, pattern in fusions():
        if may_be(lookup(name)):
            patterns[pattern.name].append((name, pattern))
    fused: dict[str, Op] = {}
    removed: set[str] = set()
    # From the last op to the first, so that the largest pattern wins over smaller ones inside it.
    for op in reversed(function.ops):
        if not op.results or op.results[0].name in removed:
            continue
        for name, pattern in patterns.get(op.name, ()):
            matched = match(pattern, op, producer_of, uses)
            if matched is None or any(o.results[0].name in removed for o in matched.inner):
                continue
            attrs = _fused_attrs(name, matched)
            if attrs is None or not _is_applicable(name, matched, attrs, op):
                continue
            fused[op.results[0].name] = Op(name, matched.operands, op.results, attrs, op.location)
            removed.update(o.results[0].name for o in matched.inner)
            break
    remaining = [op for op in function.ops if not op.results or op.results[0].name not in removed]
    ops = [fused.get(op.results[0].name, op) if op.results else op for op in remaining]
    result = replace(function, ops=tuple(ops))
    # Scalars that only the matched ops used are dead now.
    return replace(result, ops=live_ops(result, _has_side_effects))


def _fused_attrs(name: str, matched: Match) -> Attrs | None:
    """Return the attributes of the fused op, None if it does not apply."""
    attrs_of = lookup(name).code.fused_attrs
    kinds = [v.type for v in matched.operands]
    shapes = [kind.shape for kind in kinds if isinstance(kind, (TensorType, PlacedType))]
    return attrs_of(shapes, matched.attrs) if attrs_of else matched.attrs


def _is_applicable(name: str, matched: Match, attrs: Attrs, op: Op) -> bool:
    """Whether the fused op can replace `op`: it has the same result types, on the same devices."""
    kinds = [v.type for v in matched.operands]
    placed_types = [kind for kind in kinds if isinstance(kind, PlacedType)]
    result_types = [v.type for o in (*matched.inner, op) for v in o.results]
    if any("stream" in o.attrs for o in (*matched.inner, op)):
        return False
    try:
        if not placed_types:
            return infer(name, [v.tensor for v in matched.operands], attrs) == tuple(v.type for v in op.results)
        if len({kind.devices for kind in (*placed_types, *result_types) if isinstance(kind, PlacedType)}) > 1:
            return False
        return infer_placed(name, placed_types, attrs, placed_types[0].devices) == tuple(v.type for v in op.results)
    except VerificationError:
        return False


def _has_side_effects(op: Op) -> bool:
    """Whether an op has effects besides its results: other devices take part in it, or in its callee."""
    return not lookup(op.name, op.location).traits.isdisjoint({Trait.COMMUNICATES, Trait.CALL})
