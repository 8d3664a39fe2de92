"""Casts of autocast, made explicit: a graph that was exported under `torch.autocast` has none, its results are as if.

What an op's operands are cast to is not written down here. Each op is called once on tensors without data, under
autocast, and torch's own casts are observed; so it is torch's table of ops, of the version that is installed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.frontends.torch.functionalize import is_in_place
from distir_relax.frontends.torch.inline_subgraphs import AUTOCAST, name_outputs
from distir_relax.support.torch_compat import private, tree_flatten, tree_unflatten, unlogged_errors

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

_DEVICE = "cpu"
"""Models are exported on CPUs, and so the ops are those of ``torch.autocast("cpu")``."""


def under_autocast(dtype: str) -> Any:
    """Return a context in which torch computes in ``bfloat16`` or ``float16`` what it can; without effect for ""."""
    import torch

    return torch.autocast(_DEVICE, getattr(torch, dtype)) if dtype else nullcontext()


def explicit_casts(program: ExportedProgram, dtype: str) -> bool:
    """Insert the casts of a program that was exported under autocast to `dtype`, and of parts that have their own.

    Return whether there is any autocast: ops may then have operands of several dtypes.
    """
    is_cast = bool(dtype)
    casts = _Casts(program.graph, set(program.graph_signature.inputs_to_parameters))
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        if is_in_place(node.target):
            casts.forget()
        if narrow := node.meta.get(AUTOCAST, dtype):
            is_cast = True
            casts.insert(node, narrow)
    if casts.number:
        program.graph_module.recompile()
        name_outputs(program)
    return is_cast


@dataclass(frozen=True)
class _Observed:
    """The dtypes that the operands of an op are cast to, and those that its results have then."""

    operands: tuple[torch.dtype | None, ...]
    results: tuple[torch.dtype | None, ...]


class _Casts:
    """Inserts casts into a graph, once for each value and dtype.

    `made` are those of values that are still what they were, `number` counts all. Parameters, the placeholders of these
    names, are cast before all else: they belong to no module, so that a program of microbatches casts them once.
    """

    def __init__(self, graph: Graph, parameters: Collection[str]) -> None:
        self.made: dict[tuple[Node, torch.dtype], Node] = {}
        self.number = 0
        self._graph = graph
        self._parameters = parameters
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._observed: dict[tuple[Any, ...], _Observed] = {}

    def forget(self) -> None:
        """Make new casts of values that may have changed in place: all but parameters."""
        self.made = {key: cast for key, cast in self.made.items() if key[0].name in self._parameters}

    def insert(self, node: Node, narrow: str) -> None:
        """Insert casts of the operands of a node, and of those of its results that have another dtype then."""
        leaves, structure = tree_flatten((node.args, node.kwargs))
        dtypes = [_float_of(_value(leaf)) for leaf in leaves]
        if getattr(node.target, "_schema", None) is None or not any(dtypes):
            return
        key = (node.target, narrow, *(dtype or type(leaf) for dtype, leaf in zip(dtypes, leaves, strict=True)))
        if key not in self._observed:
            self._observed[key] = _observe(node, [*map(_value, leaves)], structure, narrow)
        observed = self._observed[key]
        cast = [
            leaf if wanted in (None, dtype) else self._cast(leaf, wanted, node)
            for leaf, dtype, wanted in zip(leaves, dtypes, observed.operands, strict=True)
        ]
        node.args, node.kwargs = tree_unflatten(cast, structure)
        val = node.meta.get("val")
        if isinstance(val, (tuple, list)):
            pairs = zip(val, observed.results, strict=True)
            node.meta = {**node.meta, "val": type(val)(x if d is None else x.to(d) for x, d in pairs)}
            for user in list(node.users):
                self._cast_result(user, observed.results[user.args[1]])  # type: ignore[index]
        else:
            self._cast_result(node, observed.results[0])

    def _cast(self, source: Node, dtype: torch.dtype, user: Node) -> Node:
        if (source, dtype) not in self.made:
            is_parameter = source.name in self._parameters
            with self._graph.inserting_before(self._first if is_parameter else user):
                self.made[source, dtype] = self._new_cast(source, dtype, {} if is_parameter else user.meta)
        return self.made[source, dtype]

    def _cast_result(self, node: Node, computed: torch.dtype | None) -> None:
        """Cast a result that has the dtype `computed`, if it has another one in torch."""
        expected = _float_of(node.meta.get("val"))
        if expected is None or computed in (None, expected):
            return
        users = list(node.users)
        node.meta = {**node.meta, "val": node.meta["val"].to(computed)}
        with self._graph.inserting_after(node):
            cast = self._new_cast(node, expected, node.meta)
        for user in users:
            user.replace_input_with(node, cast)

    def _new_cast(self, source: Node, dtype: torch.dtype, meta: Mapping[str, Any]) -> Node:
        """Make a cast with the line and the module of a node's metadata."""
        import torch

        self.number += 1
        cast = self._graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
        cast.meta = {**meta, "val": source.meta["val"].to(dtype)}
        return cast


def _observe(node: Node, values: list[Any], structure: Any, narrow: str) -> _Observed:
    """Call an op under autocast, and without it on operands that are cast."""
    import torch

    mode, cast = private("torch.utils._python_dispatch.TorchDispatchMode"), private("torch.ops.aten._to_copy.default")
    floats = {i: value for i, value in enumerate(values) if _float_of(value) is not None}

    class Casts(mode):  # type: ignore[misc,valid-type]
        found: dict[int, torch.dtype]

        def __enter__(self) -> Any:
            self.found = {}
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            dtype: Any = (kwargs or {}).get("dtype")
            if func is cast and getattr(dtype, "is_floating_point", False):
                # Composite ops cast views of their operands.
                for i, value in floats.items():
                    if _shares_memory(value, args[0]):
                        self.found.setdefault(i, dtype)
            return func(*args, **(kwargs or {}))

    casts: Any = Casts
    narrow_dtype = getattr(torch, narrow)
    widest = max((value.dtype for value in floats.values()), key=lambda dtype: dtype.itemsize)
    # What an op casts within, and not its operands, is not seen: then these have one dtype.
    uniform = ([dtype if i in floats else None for i in range(len(values))] for dtype in (narrow_dtype, widest))
    with unlogged_errors():
        with casts() as own, suppress(RuntimeError):
            _call(node.target, values, structure)
        with casts() as all_casts, torch.autocast(_DEVICE, narrow_dtype, cache_enabled=False):
            _call(node.target, values, structure)
        found = {i: dtype for i, dtype in all_casts.found.items() if own.found.get(i) is not dtype}
        dtypes = [found.get(i, _float_of(value)) for i, value in enumerate(values)]
        for attempt in (dtypes, *uniform):
            with suppress(RuntimeError):
                observed = _Observed(tuple(attempt), _call(node.target, _cast_all(values, attempt), structure))
                if observed.results == _dtypes(node.meta["val"]):
                    break
    return observed


def _call(target: Any, values: list[Any], structure: Any) -> tuple[torch.dtype | None, ...]:
    args, kwargs = tree_unflatten(values, structure)
    return _dtypes(target(*args, **kwargs))


def _dtypes(results: Any) -> tuple[torch.dtype | None, ...]:
    return tuple(map(_float_of, results if isinstance(results, (tuple, list)) else [results]))


def _cast_all(values: list[Any], dtypes: list[torch.dtype | None]) -> list[Any]:
    return [x if dtype is None else x.to(dtype) for x, dtype in zip(values, dtypes, strict=True)]


def _value(leaf: Any) -> Any:
    """Return the tensor without data of a node, or another argument."""
    return leaf.meta.get("val") if hasattr(leaf, "meta") else leaf


def _float_of(value: Any) -> torch.dtype | None:
    """Return the dtype of a tensor of floats."""
    dtype = getattr(value, "dtype", None)
    return dtype if getattr(dtype, "is_floating_point", False) else None


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or a.untyped_storage()._cdata == b.untyped_storage()._cdata
