"""Access to private APIs of torch, with the purpose of each.

`PRIVATE` lists all of them; `tests/support/test_torch_compat.py` resolves each, and finds uses elsewhere. When torch
moves one, change it here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from distir_relax.errors import DistIRError

SCAN = "torch._higher_order_ops.associative_scan.associative_scan"
FUNCTIONAL_GRADIENT = "torch._functorch.eager_transforms.grad_and_value_impl"
BATCH_NORM = "torch.nn.modules.batchnorm._BatchNorm.forward"
DEPTH = "torch._C._functorch.get_dynamic_layer_stack_depth"
UNDO_TO_DEPTH = "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth"
COMPOSITE_OPS = "torch.export.exported_program._collect_all_valid_cia_ops"
IS_COMPOSITE = "torch.export.exported_program._is_preservable_cia_op"
PRIVATE = {
    "torch.utils._pytree.tree_flatten": "names for the leaves of a model's arguments and results",
    "torch.utils._pytree.tree_leaves": "the tensors in a model's arguments, and in those of an op",
    "torch.utils._pytree.tree_map": "copies of such arguments with other tensors",
    "torch.utils._pytree.tree_unflatten": "a model's results from named tensors",
    "torch.autograd.function._SingleLevelFunction": "refusal of custom autograd functions while a model is exported",
    "torch._foreach_lerp_": "teachers whose weights follow those of a student, updated as a list",
    "torch._subclasses.FakeTensor": "recognition of the tensors that torch.export traces with",
    "torch._subclasses.fake_tensor.__name__": "the logger that repeats errors of an op while a model is exported",
    "torch.Tensor._make_wrapper_subclass": "tensors whose data are read when an op needs them",
    "torch._C.DispatchKey": "shapes of recurrent layers, which torch.export traces step by step",
    "torch.ops.aten.lstm.input._dispatch_cache": "the same",
    "torch.utils._python_dispatch.TorchDispatchMode": "recorded steps, and the casts that an op makes under autocast",
    "torch.utils._python_dispatch._disable_current_modes": "functions that are part of a recorded step as a whole",
    "torch.ops.aten._to_copy.default": "the same",
    "torch.nn.modules.batchnorm._BatchNorm": "the same",
    BATCH_NORM: "capture of batch norms without a momentum",
    COMPOSITE_OPS: "functionalization that prepares the ops of a program, instead of all 525 of torch",
    IS_COMPOSITE: "the same",
    SCAN: "capture of linear recurrences",
    FUNCTIONAL_GRADIENT: "capture of torch.func.grad",
    DEPTH: "levels of torch.vmap that a failed import leaves",
    UNDO_TO_DEPTH: "the same",
    "torch.nn.modules.dropout._DropoutNd": "dropout modules, whose masks a program draws itself",
    "torch.ops.aten._native_batch_norm_legit.default": "batch norms whose schema has the writes to their statistics",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "attention to some keys, with normalizers",
    "torch.ops.mkldnn._linear_pointwise": "products by oneDNN",
    "torch.ops.mkldnn._reorder_linear_weight": "packing of such a weight",
    "torch.ops.mkldnn.data_ptr": "the packed weight, which our own product reads",
    "torch.ops.mkldnn._nbytes": "its size",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "whether the processor multiplies packed bfloat16",
}
"""The private APIs by path, with the purpose of each."""


@cache
def private(path: str) -> Any:
    """Return the object at a path of `PRIVATE`. Raises `DistIRError` if this torch does not have it."""
    module = path
    names: list[str] = []
    while module:
        try:
            value: Any = importlib.import_module(module)
            for name in names:
                value = getattr(value, name)
            return value
        except (ImportError, AttributeError):
            module, _, name = module.rpartition(".")
            names.insert(0, name)
    import torch

    raise DistIRError(
        f"torch {torch.__version__} has no {path}, used for {PRIVATE[path]}",
        hint="install the version of torch that constraints.txt names",
    )


@contextmanager
def levels_restored() -> Iterator[None]:
    """End the levels of torch.vmap that the block has begun and an error has left: each later draw would fail."""
    before = private(DEPTH)()
    try:
        yield
    finally:
        if private(DEPTH)() > before:
            private(UNDO_TO_DEPTH)(before)


def graph_op(name: str, schema: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Return the op ``distir::name`` of exported graphs; `shapes` gives its results on tensors without data.

    It is registered when this is called, once in a process.
    """
    import torch

    op = torch.library.custom_op(f"distir::{name}", compute, mutates_args=(), schema=schema)
    op.register_fake(shapes)
    return op


@contextmanager
def unlogged_errors() -> Iterator[None]:
    """Within the context torch does not log errors of an export that it raises as well, with tracebacks and names."""
    names = (private("torch._subclasses.fake_tensor.__name__"), "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def replaced(path: str, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Let the function at a path of `PRIVATE` be another one within the context, which is given the original."""
    owner_path, _, name = path.rpartition(".")
    original = private(path)
    owner = private(owner_path) if owner_path in PRIVATE else importlib.import_module(owner_path)
    setattr(owner, name, function)
    try:
        yield original
    finally:
        setattr(owner, name, original)


@contextmanager
def decomposed_as(op: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let `function` compute the results of an ATen op on traced tensors within the context, for their shapes alone."""
    keys = private("torch._C.DispatchKey")
    original = {key: op.py_kernels.get(key) for key in (keys.Autograd, keys.CompositeImplicitAutograd)}

    def kernel_of(kernel: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def call(x: Any, *arguments: Any) -> Any:
            return (kernel if type(x) is torch.Tensor else function)(x, *arguments)

        return call

    op.py_kernels.update({key: kernel_of(kernel) for key, kernel in original.items() if kernel is not None})
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.update({key: kernel for key, kernel in original.items() if kernel is not None})
        op._dispatch_cache.clear()


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples, dicts and registered containers."""
    leaves: list[Any] = private("torch.utils._pytree.tree_leaves")(tree)
    return leaves


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the nested container with `function` applied to each leaf."""
    return private("torch.utils._pytree.tree_map")(function, tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a nested container, and its structure."""
    leaves, structure = private("torch.utils._pytree.tree_flatten")(tree)
    return leaves, structure


def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    """Return the nested container of a structure with these leaves."""
    return private("torch.utils._pytree.tree_unflatten")(leaves, structure)
