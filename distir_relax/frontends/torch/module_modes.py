"""Training and evaluation mode of a model's modules, and the layers that compute differently in each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distir_relax.errors import ImportModelError
from distir_relax.support.torch_compat import private

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


@contextmanager
def in_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """Inside the context, all modules of a model are in training or in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def reject_active_dropout(model: torch.nn.Module) -> None:
    """Raise `ImportModelError` for a model in training mode with a dropout layer that drops elements."""
    if not model.training:
        return
    for name, module in model.named_modules():
        if module.training and (rate := _layer_rate(module)):
            raise ImportModelError(
                f"{type(model).__name__} is in training mode: its dropout {name or 'layer'!r} "
                f"drops {rate:.0%} at random",
                hint="call model.eval() first",
            )


def warn_of_evaluation_mode(model: torch.nn.Module, exported: ExportedProgram) -> None:
    """Warn of a model in evaluation mode that is exported for training, if its mode changes its results.

    These are layers of torch, attributes called dropout, and calls of torch's functions of dropout that drop nothing.

    The model may also be a part of one in training mode, such as the result of `from_pretrained` in a module with a
    head. Single layers in evaluation mode, and parts without trained parameters, are frozen on purpose.
    """
    modules, calls = dict(model.named_modules(remove_duplicate=False)), _inactive_dropout(exported)
    parts = dict(model.named_children()) if model.training else {"": model}
    for name, part in parts.items():
        is_whole = not name or any(True for _ in part.children())
        if part.training or not is_whole or not any(p.requires_grad for p in part.parameters()):
            continue
        inner = [f"{name}.{path}".strip(".") for path, _ in part.named_modules()]
        layers = [n for n in inner if _depends_on_mode(modules[n]) or (n in calls and not modules[n].training)]
        if layers:
            warnings.warn(
                f"{name or type(model).__name__} is in evaluation mode, as from_pretrained returns it: it trains "
                "without dropout and with fixed statistics of batch norms "
                f"({layers[0] or type(model).__name__!r} and {len(layers) - 1} more "
                "layers). Call model.train() first",
                stacklevel=2,
            )


def _inactive_dropout(exported: ExportedProgram) -> set[str]:
    """Return the modules that call a function of dropout with a rate above 0, and without training."""
    found = set()
    for node in exported.graph.nodes:
        if "dropout" in str(node.target) and len(node.args) == 3 and node.args[1] and node.args[2] is False:
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            found.add(str(stack[-1][0]) if stack else "")
    return found


def _depends_on_mode(layer: torch.nn.Module) -> bool:
    """Return whether a layer in evaluation mode computes something else in training."""
    # Functional dropout has its rate in an attribute, such as `attention_dropout`.
    rates = [value for name, value in vars(layer).items() if "dropout" in name and isinstance(value, float)]
    has_statistics = getattr(layer, "running_mean", None) is not None
    return not layer.training and bool(_layer_rate(layer) or any(rates) or has_statistics)


def _layer_rate(layer: torch.nn.Module) -> float:
    """Return the share of elements that a layer drops in training."""
    import torch

    if isinstance(layer, private("torch.nn.modules.dropout._DropoutNd")):
        return float(layer.p)
    # A recurrent layer may have dropout between its layers.
    return float(layer.dropout) if isinstance(layer, torch.nn.RNNBase) and layer.num_layers > 1 else 0.0
