"""Buffers of a model on the meta device, whose data a checkpoint holds or the model computes when it is made.

Constants of a program are computed from buffers while the model is read, so buffers need their data before. Parameters
do not: they are read when a rank needs its part.
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
    """While it is open, modules that are made have their parameters on the meta device, and their buffers in memory.

    So a large model is made without memory for its weights, and buffers that its constructor computes (rotary
    frequencies, positions) have their values: ``compile(model, …, checkpoint=PATH)`` then finds all that it needs.
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
    """While it is open, buffers of `model` on the meta device have data, where there is a way to get it.

    Those that the checkpoint holds are read; of others a transformers model says itself how they are initialized
    (``_init_weights``). Raises `ImportModelError` for a checkpoint that cannot be read.
    """
    missing = [
        (module, name, f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    held = [(module, name, module._buffers[name]) for module, name, _ in missing]
    try:
        read = read_tensors(checkpoint, [path for *_, path in missing]) if missing else {}
        for module, name, path in missing:
            if path in read:
                module._buffers[name] = read[path]
        _initialize(model, [(module, name) for module, name, path in missing if path not in read])
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def _initialize(model: torch.nn.Module, buffers: Collection[tuple[torch.nn.Module, str]]) -> None:
    """Let a transformers model compute buffers; those that it leaves alone stay as they are."""
    import torch

    initialize = getattr(model, "_init_weights", None)
    if not callable(initialize):
        return
    marked: list[tuple[torch.nn.Module, str, Any, torch.Tensor]] = []
    for module, name in buffers:
        before = module._buffers[name]
        assert before is not None
        marks = torch.full(before.shape, _mark(before.dtype), dtype=before.dtype)
        module._buffers[name] = marks.clone()
        marked.append((module, name, before, marks))
    with torch.no_grad():
        for module in {id(module): module for module, _ in buffers}.values():
            initialize(module)
    for module, name, before, marks in marked:
        now = module._buffers[name]
        if now is None or torch.equal(now.nan_to_num(nan=-1.0), marks.nan_to_num(nan=-1.0)):
            module._buffers[name] = before


def _mark(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialization gives."""
    import torch

    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min
