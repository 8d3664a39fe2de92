"""Scans of a model: a linear recurrence along a dim is captured as one op, for any length.

Models of transformers with a state-space scan, such as Mamba, have a loop over positions, and also torch's
``associative_scan``, which they take when they are compiled. A loop is captured for one length only; so they are let to
take the scan while they are exported. Of scans, only linear recurrences have an op: their function of two elements is
``(a, x), (b, y) -> (a b, b x + y)``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from distir_relax.errors import UnsupportedOpError
from distir_relax.support.torch_compat import SCAN, graph_op, replaced

if TYPE_CHECKING:
    import torch

_CHOICE = {"is_torchdynamo_compiling": True, "is_torchdynamo_exporting": False}
"""The functions by which a model of transformers chooses its scan, and their results then."""
_POINTS = ((2.0, 3.0, 5.0, 7.0), (-1.5, 0.25, 0.5, -2.0), (0.0, 1.0, 4.0, 8.0))


@contextmanager
def captured_scans(model: torch.nn.Module) -> Iterator[None]:
    """Let `torch.export` capture the linear recurrences of a model within the context.

    A scan of another kind raises UnsupportedOpError there.
    """
    with ExitStack() as stack:
        original = stack.enter_context(replaced(SCAN, _linear_scan))
        for module in _modules_of(model):
            for name in [name for name, value in vars(module).items() if value is original]:
                stack.enter_context(patch.object(module, name, _linear_scan))
            if all(hasattr(module, name) for name in _CHOICE) and _has_scan(module):
                for name, result in _CHOICE.items():
                    stack.enter_context(patch.object(module, name, lambda r=result: r))
        yield


def is_linear_scan(target: Any) -> bool:
    """Whether the target of a node of an exported graph is a linear recurrence: factors, terms, dim."""
    return str(target) == "distir.linear_scan.default"


def _modules_of(model: torch.nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's classes."""
    names = dict.fromkeys(type(part).__module__ for part in model.modules())
    return [sys.modules[name] for name in names if name in sys.modules]


def _has_scan(module: ModuleType) -> bool:
    try:
        return "associative_scan(" in inspect.getsource(module)
    except (OSError, TypeError):
        return False


def _linear_scan(
    combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """Stand in for torch's ``associative_scan``; the products of factors are the first result."""
    import torch

    if not _is_linear_recurrence(combine_fn, xs):
        raise UnsupportedOpError(
            "associative_scan: only linear recurrences are supported, (a, x), (b, y) -> (a b, b x + y)",
            hint="write other scans as cumulative sums or products",
        )
    factors, terms = (x.flip(dim) for x in xs) if reverse else xs
    shape = torch.broadcast_shapes(factors.shape, terms.shape)  # type: ignore[no-untyped-call]
    factors, terms = factors.expand(shape), terms.expand(shape)
    dtype = torch.promote_types(factors.dtype, terms.dtype)
    found = _op()(factors.to(dtype), terms.to(dtype), dim % terms.dim())
    products = torch.cumprod(factors, dim)
    return type(xs)((products.flip(dim), found.flip(dim))) if reverse else type(xs)((products, found))


def _is_linear_recurrence(combine_fn: Callable[[Any, Any], Any], xs: Any) -> bool:
    """Whether a function of two pairs is that of a linear recurrence, tried on numbers."""
    if not isinstance(xs, (tuple, list)) or len(xs) != 2:
        return False
    kind: Any = type(xs)
    try:
        return all(tuple(combine_fn(kind((a, x)), kind((b, y)))) == (a * b, b * x + y) for a, x, b, y in _POINTS)
    except (TypeError, ValueError, AttributeError):
        return False


@cache
def _op() -> Any:
    """Return the op of an exported graph: ``distir::linear_scan``, of factors and terms of one shape, and a dim."""
    import torch

    from distir_relax.kernels.scans import linear

    schema = "(Tensor factors, Tensor terms, int axis) -> Tensor"
    return graph_op("linear_scan", schema, linear, lambda factors, terms, axis: torch.empty_like(terms))
