"""Data of meta-device buffers, from a checkpoint or from the model's initialization.

Import folds constants computed from buffers, so buffers need data before. Parameters are read later, when a rank needs
its shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.frontends.checkpoint import read_tensors

if TYPE_CHECKING:
    import torch


@contextmanager
def empty_weights() -> Iterator[None]:
    """Inside the context, new modules have their parameters on the meta device, and their buffers in memory.

    A large model needs no memory for its weights, and buffers that its constructor computes (rotary frequencies,
    positions) have their values, as ``compile(model, …, checkpoint=PATH)`` requires.
    """
    import torch

    original = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None:
            empty = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    torch.nn.Module.register_parameter = register  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def buffers_with_data(model: torch.nn.Module, checkpoint: Path) -> Iterator[None]:
    """Inside the context, meta-device buffers of `model` have data, if available.

    Those in the checkpoint are read; a transformers model initializes others (``_init_weights``). Raises
    `ImportModelError` for a checkpoint that cannot be read.
    """
    missing = [
        (module, name, f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    originals = [(module, name, module._buffers[name]) for module, name, _ in missing]
    try:
        loaded = read_tensors(checkpoint, [path for *_, path in missing]) if missing else {}
        for module, name, path in missing:
            if path in loaded:
                module._buffers[name] = loaded[path]
        _initialize(model, [(module, name) for module, name, path in missing if path not in loaded])
        yield
    finally:
        for module, name, buffer in originals:
            module._buffers[name] = buffer


def _initialize(model: torch.nn.Module, buffers: Collection[tuple[torch.nn.Module, str]]) -> None:
    """Initialize buffers by the transformers model; those that it does not initialize are unchanged."""
    import torch

    initialize = getattr(model, "_init_weights", None)
    if not callable(initialize):
        return
    candidates: list[tuple[torch.nn.Module, str, Any, torch.Tensor]] = []
    for module, name in buffers:
        before = module._buffers[name]
        assert before is not None
        sentinel = torch.full(before.shape, _sentinel(before.dtype), dtype=before.dtype)
        module._buffers[name] = sentinel.clone()
        candidates.append((module, name, before, sentinel))
    with torch.no_grad():
        for module in {id(module): module for module, _ in buffers}.values():
            initialize(module)
    for module, name, before, sentinel in candidates:
        value = module._buffers[name]
        if value is None or torch.equal(value.nan_to_num(nan=-1.0), sentinel.nan_to_num(nan=-1.0)):
            module._buffers[name] = before


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no initialization produces."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min
