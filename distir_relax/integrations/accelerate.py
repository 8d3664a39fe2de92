"""Scripts written for Hugging Face accelerate: `prepare` takes what `Accelerator.prepare` does.

Such a script

    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

becomes

    step, loader = prepare(model, optimizer, loader, scheduler, loss=criterion, steps=1000, strategy="2/1/1/1",
                           mixed_precision="bf16")
    for inputs, targets in loader:
        loss = step(inputs, targets)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from distir_relax.compiler.training import TrainingStep, compile_training
from distir_relax.errors import RunError
from distir_relax.optimizers import from_torch

if TYPE_CHECKING:
    import torch

_PRECISIONS = {None: None, "no": None, "bf16": "bf16", "fp16": "fp16"}


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    scheduler: Any = None,
    *,
    loss: Any = None,
    steps: int | None = None,
    mixed_precision: str | None = None,
    **options: Any,
) -> tuple[TrainingStep, Iterable[Any]]:
    """Compile the step of a training script; return it with the loader.

    A call of the step is a forward, a backward, a step of the optimizer and one of the scheduler. A batch of the loader
    is that of all ranks, ``(inputs, targets)``, or the inputs alone without a `loss`, where the model returns it.
    `scheduler` is stepped after each step, of which there are at most `steps`. The other options are those of
    `compile_training`: `strategy`, `clip_norm`, `metrics`.

    Raises a `DistIRError` as `compile_training` and `from_torch` do, for a loader without batches, and for another
    precision than None, ``no``, ``bf16`` and ``fp16``.
    """
    if mixed_precision not in _PRECISIONS:
        raise RunError(f"expected mixed_precision to be no, bf16 or fp16, found {mixed_precision!r}", "prepare")
    batch = next(iter(loader), None)
    if batch is None:
        raise RunError("expected a loader with batches, found none", "prepare")
    converted = from_torch(optimizer, model, scheduler, steps=steps)
    step = compile_training(
        model, loss, optimizer=converted, example_batch=batch, precision=_PRECISIONS[mixed_precision], **options
    )
    return step, loader
