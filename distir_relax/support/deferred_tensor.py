"""Tensors whose data are read when an op needs them, and freed after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch

from distir_relax.support.torch_compat import private, tree_leaves, tree_map

_ALIASES = ("aten::detach", "aten::alias")


class TensorSource(Protocol):
    """A place where the data of a tensor are stored as they are."""

    def whole(self) -> torch.Tensor:
        """Return the data, which must not be written to."""
        ...

    def widened(self, dtype: torch.dtype) -> Self | None:
        """Return the source of the same tensor in another dtype, or None if it cannot be read so."""
        ...


class DeferredTensor(torch.Tensor):
    """A tensor of the shape and dtype of `kind`, a meta-device tensor, whose data `compute` returns.

    Ops on deferred tensors alone, such as a transposition or a concatenation, give deferred tensors. Ops that also take
    another tensor compute the data, which are freed after the op unless its result is a view of them. The data cannot
    be written to. `source` is where the data are stored, if they are not computed; a cast may keep it.
    """

    source: Any

    @staticmethod
    def __new__(cls, kind: torch.Tensor, compute: Callable[[], torch.Tensor], source: Any = None) -> DeferredTensor:
        make: Any = private("torch.Tensor._make_wrapper_subclass")
        made: DeferredTensor = make(cls, kind.shape, strides=kind.stride(), dtype=kind.dtype, device="cpu")
        return made

    def __init__(self, kind: torch.Tensor, compute: Callable[[], torch.Tensor], source: Any = None) -> None:
        self._kind, self._compute, self.source = kind, compute, source

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, source: TensorSource) -> DeferredTensor:
        """Return the tensor of a source."""
        return cls(torch.empty(tuple(shape), dtype=dtype, device="meta"), source.whole, source)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<deferred tensor {tuple(self.shape)}, {self.dtype}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

    def read(self) -> torch.Tensor:
        """Return the data, which must not be written to."""
        return self._compute()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        first = args[0] if args and isinstance(args[0], cls) else None
        if first is not None and schema.is_mutable:
            raise RuntimeError(f"{func} writes to a tensor whose data are read when an op needs them")
        if first is not None and schema.name in _ALIASES:
            return cls(first._kind, first._compute, first.source)
        if first is not None and first.source is not None and schema.name == "aten::_to_copy":
            wide = first.source.widened(kwargs.get("dtype", first.dtype))
            if wide is not None:
                return cls.of(first.shape, kwargs.get("dtype", first.dtype), wide)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        are_tensors = bool(schema.returns) and all(str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns)
        if not are_tensors or not all(isinstance(tensor, cls) for tensor in tensors):
            return _run(func, args, kwargs)
        on_meta = {**kwargs, "device": "meta"} if kwargs.get("device") is not None else kwargs
        kinds = func(*tree_map(_kind, tuple(args)), **tree_map(_kind, on_meta))
        if isinstance(kinds, torch.Tensor):
            return cls(kinds, partial(_run, func, args, kwargs))
        return type(kinds)(cls(kind, partial(_item, func, args, kwargs, n)) for n, kind in enumerate(kinds))


def read_deferred(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its data, which must not be written to if it was deferred."""
    return tensor.read() if isinstance(tensor, DeferredTensor) else tensor


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map(_data, (tuple(args), kwargs))
    return func(*args, **kwargs)


def _item(func: Any, args: Any, kwargs: Any, number: int) -> torch.Tensor:
    result: torch.Tensor = _run(func, args, kwargs)[number]
    return result


def _data(item: Any) -> Any:
    return item.read() if isinstance(item, DeferredTensor) else item


def _kind(item: Any) -> Any:
    return item._kind if isinstance(item, DeferredTensor) else item
