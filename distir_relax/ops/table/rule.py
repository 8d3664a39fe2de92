"""Factor rules: the relation between the dims of an op's operands and results, in one notation.

``matmul`` is ``"... m k, ... k n -> ... m n"``: `k` is in no result, so it is reduced (by sum unless specified
otherwise). ``(h d)`` is a dim made of two factors, outermost first. ``[c]`` must not be split: the op needs all of it
on one device. ``...`` stands for leading dims that broadcast. A dim of size 1 or 0 has no factor and cannot be split.

The compiler derives propagation, partial sums, local shapes and required gathers from the rule alone.
The notation follows the sharding rules of Shardy (openxla/shardy, docs/propagation.md) and einops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from distir_relax.ir import TensorType
from distir_relax.ops.table.windows import Window

PARALLEL, BLOCKED, WINDOW = "parallel", "blocked", "window"

Dims = tuple[tuple[int, ...], ...]
"""For each dim of a tensor, the indices of its factors, outermost first."""


@dataclass(frozen=True, slots=True)
class Factor:
    """`kind` is ``parallel``, ``blocked``, or the reduction (``sum``, ``max``, ``min``) that combines its parts."""

    name: str
    size: int
    kind: str = PARALLEL


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of one op instance, and their positions in each operand and result.

    `windows` relate dims without a common factor, where neighbouring result elements read overlapping intervals of the
    operand: if the result dim is split, devices exchange halos (see `lowering.halos`).
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    windows: tuple[Window, ...] = ()

    def index(self, name: str) -> int:
        """Return the index of the factor `name`; raise KeyError if it has size 1 or is not in the rule."""
        for i, factor in enumerate(self.factors):
            if factor.name == name:
                return i
        raise KeyError(name)


def parse_rule(
    text: str,
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int] | None = None,
    reduce: str = "sum",
    summed: Collection[str] = (),
) -> Rule:
    """Return the rule `text` for operands and results of the given shapes.

    `sizes` gives factors that the shapes do not determine (those grouped in one dim). `reduce` is the reduction of
    factors that are in no result. If a factor of `summed` is split, results that lack it are partial sums, though
    others have it; results that lack any other factor are the same on all devices. Raises ValueError if the text does
    not fit the shapes: a bug in an op's entry.
    """
    operand_text, result_text = text.split("->")
    specs = [*_split_tensors(operand_text), *_split_tensors(result_text)]
    shapes = [*operands, *results]
    if len(specs) != len(shapes):
        raise ValueError(f"rule {text!r} has {len(specs)} tensors, the op has {len(shapes)}")
    spread = [_spread(spec, shape, text) for spec, shape in zip(specs, shapes, strict=True)]
    factor_sizes = _bind_sizes(spread, shapes, sizes or {}, text)
    blocked = {name for tensor in spread for dim in tensor for name, is_blocked in dim if is_blocked}
    in_results = {name for tensor in spread[len(operands) :] for dim in tensor for name, _ in dim}

    order: dict[str, int] = {}
    factors: list[Factor] = []
    placed: list[Dims] = []
    for tensor, shape in zip(spread, shapes, strict=True):
        dims: list[tuple[int, ...]] = []
        for dim, size in zip(tensor, shape, strict=True):
            if not size or math.prod(factor_sizes[name] for name, _ in dim) != size:
                dims.append(())  # this operand broadcasts along the dim, or is empty
                continue
            for name, _ in dim:
                if factor_sizes[name] > 1 and name not in order:
                    order[name] = len(factors)
                    is_parallel = name in in_results and name not in summed
                    kind = BLOCKED if name in blocked else PARALLEL if is_parallel else reduce
                    factors.append(Factor(name, factor_sizes[name], kind))
            dims.append(tuple(order[name] for name, _ in dim if factor_sizes[name] > 1))
        placed.append(tuple(dims))
    return Rule(tuple(factors), tuple(placed[: len(operands)]), tuple(placed[len(operands) :]))


def dim_names(count: int) -> list[str]:
    """Return factor names for `count` dims."""
    return [f"d{i}" for i in range(count)]


def names_with(count: int, axis: int, at_axis: str) -> str:
    """Return a rule's text for a tensor of `count` dims, with `at_axis` for dim `axis`."""
    return " ".join(at_axis if i == axis else f"d{i}" for i in range(count))


def unsplit_axis_rule(
    types: Sequence[TensorType], attrs: Mapping[str, Any], results: Sequence[TensorType], same: str = "[axis]"
) -> Rule:
    """Return the rule of ops that need dim `axis` whole and are elementwise in all others.

    The results may have another size along it, or lack it. If they have the same size, `same` is their factor: by
    default the operand's, so that both dims are of one class.
    """
    shape, axis = types[0].shape, attrs["axis"]

    def names(result: TensorType) -> str:
        if len(result.shape) < len(shape):
            return names_with(len(shape), axis, "")
        return names_with(len(shape), axis, same if result.shape == shape else "[result]")

    text = f"{names_with(len(shape), axis, '[axis]')} -> {', '.join(map(names, results))}"
    return parse_rule(text, [shape], [result.shape for result in results])


def no_rule(types: Sequence[object], attrs: Mapping[str, object], results: Sequence[object]) -> Rule:
    """Raise NotImplementedError: the rule of entries that define none."""
    raise NotImplementedError("its entry has no factor rule; it is for programs that are split already")


_Spec = tuple[tuple[tuple[str, bool], ...], ...]


@lru_cache(maxsize=4096)
def _split_tensors(text: str) -> tuple[tuple[str, ...], ...]:
    # An empty item between two commas, or alone, is a scalar.
    return tuple(tuple(re.findall(r"\.\.\.|\([^)]*\)|[^\s()]+", tensor)) for tensor in text.split(","))


def _spread(tokens: tuple[str, ...], shape: tuple[int, ...], rule: str) -> _Spec:
    """Return the factors of `tokens`, with ``...`` expanded to factors numbered from the right."""
    dims: list[tuple[tuple[str, bool], ...]] = []
    for token in tokens:
        if token == "...":
            count = len(shape) - len(tokens) + 1
            dims += [((f"dim -{count - i}", False),) for i in range(count)]
        else:
            names = token.strip("()").split()
            dims.append(tuple((name.strip("[]"), name.startswith("[")) for name in names if name != "1"))
    if len(dims) != len(shape):
        raise ValueError(f"rule {rule!r}: {' '.join(tokens)!r} does not fit shape {shape}")
    return tuple(dims)


def _bind_sizes(
    spread: list[_Spec], shapes: Sequence[tuple[int, ...]], sizes: Mapping[str, int], rule: str
) -> dict[str, int]:
    bound = dict(sizes)
    for tensor, shape in zip(spread, shapes, strict=True):
        for dim, size in zip(tensor, shape, strict=True):
            if len(dim) == 1:
                name = dim[0][0]
                if bound.get(name, 1) != 1 and size not in (1, bound[name]):
                    raise ValueError(f"rule {rule!r}: factor {name} is {bound[name]} and {size}")
                bound[name] = max(bound.get(name, 1), size) if size else 0
    for tensor in spread:
        for dim in tensor:
            for name, _ in dim:
                if name not in bound:
                    raise ValueError(f"rule {rule!r}: the size of factor {name} is not given")
    return bound
