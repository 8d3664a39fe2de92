"""Constants of many elements: evaluation without copies along dims in which they are uniform.

The attention mask of a long sequence, [batch, 1, length, length], depends on positions alone, which are the same for
all samples. Pointwise ops are computed on one index of such dims, and the result is a tensor of stride 0 along them. A
constant that is still larger than `MOST_BYTES` is not computed: its op stays in the program, where a rank computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distir_relax.ir import TensorType
from distir_relax.layout import DTYPES
from distir_relax.ops import Builder, Trait, lookup
from distir_relax.support.torch_compat import tree_leaves, tree_map

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 1 << 24
"""Constants of up to this size are computed as torch does."""
MOST_BYTES = 1 << 27
"""The largest constant that is computed: more than a mask of 8,192 positions, or a rotary table of 131,072."""

Converter = Callable[..., Any]


def is_small(results: Any) -> bool:
    """Return whether results of these types (a node's `meta["val"]`) are computed as torch does."""
    return _nominal_bytes(results) <= SMALL_BYTES


def _nominal_bytes(results: Any) -> int:
    """Return the bytes of all results, without shared ones; 0 if a size is unknown."""
    import torch

    items = results if isinstance(results, (tuple, list)) else [results]
    tensors = [x for x in items if isinstance(x, torch.Tensor)]
    if any(isinstance(n, torch.SymInt) for x in tensors for n in x.shape):
        return 0
    return sum(math.prod(x.shape) * x.itemsize for x in tensors)


def is_pointwise(convert: Converter | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a conversion to the op table's ops gives pointwise ops alone."""
    import torch

    builder = Builder()

    def operand(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return builder.input("x", TensorType(tuple(x.shape), dtype_of(x)))

    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if convert is None or not tensors or any(dtype_of(x) not in DTYPES for x in tensors):
        return False
    try:
        convert(builder, *map(operand, args), **{key: operand(x) for key, x in kwargs.items()})
    except Exception:  # The conversion needs constants' values, or takes no such operands.
        return False
    traits = [lookup(op.name).traits for op in builder.ops]
    return all(Trait.POINTWISE in t or Trait.SCALAR in t for t in traits)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with one index of each dim in which it is uniform; of floats only where its stride is 0."""
    for dim, size in enumerate(x.shape):
        if size > 1 and (x.stride(dim) == 0 or _is_uniform(x, dim)):
            x = x.narrow(dim, 0, 1)
    return x


def _is_uniform(x: torch.Tensor, dim: int) -> bool:
    # Zeros of both signs are equal, and NaN is not.
    if x.is_floating_point() or x.is_complex() or x.nbytes > MOST_BYTES:
        return False
    first = x.narrow(dim, 0, 1)
    return bool((first == x.narrow(dim, -1, 1)).all()) and bool((first == x).all())


def compute_pointwise(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], val: Any) -> Any:
    """Return the result of a pointwise op of type `val`, of stride 0 along uniform dims; None if it is too large."""
    import torch

    args, kwargs = tree_map(lambda x: narrowed(x) if isinstance(x, torch.Tensor) else x, (tuple(args), dict(kwargs)))
    shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if math.prod(_broadcast_shape(shapes)) * val.itemsize > MOST_BYTES:
        return None
    return target(*args, **kwargs).expand(val.shape)


def _broadcast_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    import torch

    return torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call,no-any-return]


def compute(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an op. One that cannot take strides of 0, such as a view, gets contiguous operands."""
    import torch

    try:
        return target(*args, **kwargs)
    except RuntimeError:
        leaves = [x for x in tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, torch.Tensor)]
        if all(x.is_contiguous() for x in leaves):
            raise
        copy = lambda x: x.contiguous() if isinstance(x, torch.Tensor) else x  # noqa: E731
        args, kwargs = tree_map(copy, (tuple(args), dict(kwargs)))
        return target(*args, **kwargs)


def is_too_large(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an op would allocate more than `MOST_BYTES` for its results; a view allocates nothing."""
    import torch

    shared: list[Any] = []

    def without_data(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("meta")
        if not isinstance(x, torch.Tensor):
            return x
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        shared.append(meta.untyped_storage())
        return meta

    args, kwargs = tree_map(without_data, (tuple(args), dict(kwargs)))
    results = [x for x in tree_leaves(compute(target, args, kwargs)) if isinstance(x, torch.Tensor)]
    owned = [x.untyped_storage() for x in results]
    return sum(x.nbytes() for x in owned if not any(x is other for other in shared)) > MOST_BYTES


def dtype_of(x: torch.Tensor) -> str:
    """Return the name of a dtype, such as ``int64``."""
    return str(x.dtype).removeprefix("torch.")
