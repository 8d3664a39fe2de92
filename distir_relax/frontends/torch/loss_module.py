"""A torch model combined with its loss, imported as one program that returns a scalar."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.loss_call import loss_call
from distir_relax.frontends.torch.transformers_options import smoothed_loss

if TYPE_CHECKING:
    import torch

TARGETS = "targets"
"""Keyword argument for the targets in a call of a model with its loss."""

Loss = Callable[[Any, Any], Any]
LOSS = "loss"
"""The name of the loss among the results of a model with metrics."""


@contextmanager
def with_loss(
    model: torch.nn.Module,
    loss: Loss | None,
    metrics: Mapping[str, Loss] | None = None,
    smoothing: float = 0.0,
) -> Iterator[None]:
    """Inside the context, a call of `model` returns the loss of its output: ``loss(output, targets)``.

    With `metrics` it returns a dict of the loss, as `LOSS`, and of each metric: ``metric(output, targets)``, or
    ``metric(output, inputs)`` if the model returns its own loss, where `inputs` are its arguments by keyword.

    The call takes the model's arguments, and the targets by keyword. Without a `loss` the model returns its own: a
    scalar, or an output with one under ``loss`` (transformers models, called with labels). A loss that is a module with
    parameters becomes a submodule of the model, so that its parameters are trained too. With `smoothing` the loss of a
    transformers model is that of smoothed labels. Raises `ImportModelError` without any loss.
    """
    original, has_own_forward = model.forward, "forward" in vars(model)
    parameters = list(inspect.signature(original).parameters.values())
    if loss is not None and any(p.name == TARGETS for p in parameters):
        raise ImportModelError(
            f"{type(model).__name__}.forward has a parameter {TARGETS!r} itself",
            hint="pass no loss, and let the model return it",
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        if loss is None:
            labels = kwargs.pop("labels", None) if smoothing else None
            output = original(*args, **kwargs)
            if smoothing:
                return results(smoothed_loss(model, output, labels, smoothing), output, {**kwargs, "labels": labels})
            return results(_model_loss(model, output), output, kwargs)
        targets = kwargs.pop(TARGETS)
        # A model may call all of its submodules, as `torch.nn.Sequential` does.
        model._modules.pop(attached, None)
        try:
            output = original(*args, **kwargs)
        finally:
            if attached:
                model._modules[attached] = cast("torch.nn.Module", loss)
        return results(loss_call(loss)(output, targets), output, targets)

    def results(value: Any, output: Any, targets: Any) -> Any:
        if metrics is None:
            return value
        return {LOSS: value, **{name: metric(output, targets) for name, metric in metrics.items()}}

    if loss is not None:
        keyword = inspect.Parameter(TARGETS, inspect.Parameter.KEYWORD_ONLY)
        last = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - last, keyword)
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    model.forward = forward
    attached = _attach(model, loss)
    try:
        yield
    finally:
        if attached:
            del model._modules[attached]
        if has_own_forward:
            model.forward = original
        else:
            del model.forward


def _attach(model: torch.nn.Module, loss: Loss | None) -> str:
    """Make a loss with parameters a submodule of `model`; return its name, or "" without parameters or if it is one."""
    import torch

    if not isinstance(loss, torch.nn.Module) or not any(True for _ in loss.parameters()):
        return ""
    if any(module is loss for module in model.modules()):
        return ""
    name = next(name for name in ("loss", "loss_module", "training_loss") if not hasattr(model, name))
    model._modules[name] = loss
    return name


def call_arguments(inputs: Any, targets: Any, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a call of a model, with a loss or its own, on a batch.

    `inputs` is a tensor, a tuple, or a dict of keyword arguments.
    """
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    else:
        args, kwargs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}
    return args, {**kwargs, TARGETS: targets} if has_loss else kwargs


def _model_loss(model: torch.nn.Module, output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if loss is None or not hasattr(loss, "dtype"):
        raise ImportModelError(
            f"expected {type(model).__name__} to return its loss, found "
            f"{'none' if loss is None else type(loss).__name__}",
            hint="pass loss=, or the inputs for the model's loss: labels, for transformers models",
        )
    return loss
