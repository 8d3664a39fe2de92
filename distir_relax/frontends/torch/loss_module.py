"""A torch model combined with its loss, imported as one program that returns a scalar."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
TOTALS = "evaluation_totals"
"""The name under which a model has the states of metrics; those of an evaluation's own states begin with it."""


@contextmanager
def with_loss(
    model: torch.nn.Module,
    loss: Loss | None,
    metrics: Mapping[str, Loss] | None = None,
    smoothing: float = 0.0,
    several: Sequence[str] = (),
) -> Iterator[None]:
    """Inside the context, a call of `model` returns the loss of its output: ``loss(output, targets)``.

    With `metrics` it returns a dict of the loss, as `LOSS`, and of each metric: ``metric(output, targets)``, or
    ``metric(output, inputs)`` if the model returns its own loss, where `inputs` are its arguments by keyword. A pair is
    under ``NAME.sum`` and ``NAME.count``; an object with `update` and `compute` is a `StatefulMetric`.

    The call takes the model's arguments, and the targets by keyword. Without a `loss` the model returns its own: a
    scalar, or an output with one under ``loss`` (transformers models, called with labels). A loss that is a module with
    parameters becomes a submodule of the model, so that its parameters are trained too. With `smoothing` the loss of a
    transformers model is that of smoothed labels. With `several` names the loss is a dict of losses, and the call
    returns those. Raises `ImportModelError` without any loss, and without one of these.
    """
    import torch

    from distir_relax.frontends.torch.stateful_metric import StatefulMetric, is_stateful

    measures = {name: StatefulMetric(name, m) if is_stateful(m) else m for name, m in (metrics or {}).items()}
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
            output = alone(*args, **kwargs)
            if smoothing:
                return results(smoothed_loss(model, output, labels, smoothing), output, {**kwargs, "labels": labels})
            return results(_model_loss(model, output, several), output, kwargs)
        targets = kwargs.pop(TARGETS)
        output = alone(*args, **kwargs)
        return results(loss_call(loss)(output, targets), output, targets)

    def alone(*args: Any, **kwargs: Any) -> Any:
        # A model may call all of its submodules, as `torch.nn.Sequential` does.
        for name in attached:
            del model._modules[name]
        try:
            return original(*args, **kwargs)
        finally:
            model._modules.update(attached)

    def results(value: Any, output: Any, targets: Any) -> Any:
        if metrics is None:
            return _losses(value, several)
        found = {LOSS: value}
        for name, metric in measures.items():
            measured = metric(output, targets)
            if isinstance(measured, (tuple, list)) and len(measured) == 2:
                found |= {f"{name}.sum": _scalar(measured[0]), f"{name}.count": _scalar(measured[1])}
            else:
                found[name] = measured
        return found

    if loss is not None:
        keyword = inspect.Parameter(TARGETS, inspect.Parameter.KEYWORD_ONLY)
        last = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - last, keyword)
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    model.forward = forward
    attached: dict[str, Any] = _attach(model, loss)
    if states := [m for m in measures.values() if isinstance(m, StatefulMetric)]:
        attached[TOTALS] = torch.nn.ModuleList(states)
    model._modules.update(attached)
    try:
        yield
    finally:
        for name in attached:
            del model._modules[name]
        if has_own_forward:
            model.forward = original
        else:
            del model.forward


def _scalar(value: Any) -> Any:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float32)


def _attach(model: torch.nn.Module, loss: Loss | None) -> dict[str, Any]:
    """Return a loss with parameters that `model` does not have, by a name for a submodule; empty for another loss."""
    import torch

    if not isinstance(loss, torch.nn.Module) or not any(True for _ in loss.parameters()):
        return {}
    if any(module is loss for module in model.modules()):
        return {}
    return {next(name for name in ("loss", "loss_module", "training_loss") if not hasattr(model, name)): loss}


def call_arguments(inputs: Any, targets: Any, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a call of a model, with a loss or its own, on a batch.

    `inputs` is a tensor, a tuple, or a dict of keyword arguments.
    """
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    else:
        args, kwargs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}
    return args, {**kwargs, TARGETS: targets} if has_loss else kwargs


def _losses(found: Any, names: Sequence[str]) -> Any:
    """Return losses by name, in the order of these; the loss itself for no names."""
    if not names:
        return found
    known = found if isinstance(found, Mapping) else {}
    for name in names:
        if name not in known:
            shown = ", ".join(map(str, known)) or type(found).__name__
            raise ImportModelError(
                f"expected a dict with the loss {name!r}, found {shown}",
                hint="the model, or its loss function, returns the losses of all updates by name",
            )
    return {name: known[name] for name in names}


def _model_loss(model: torch.nn.Module, output: Any, several: Sequence[str] = ()) -> Any:
    if several:
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if loss is None or not hasattr(loss, "dtype"):
        raise ImportModelError(
            f"expected {type(model).__name__} to return its loss, found "
            f"{'none' if loss is None else type(loss).__name__}",
            hint="pass loss=, or the inputs for the model's loss: labels, for transformers models",
        )
    return loss
