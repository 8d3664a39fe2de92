"""Rejection of custom autograd behaviour in models that are imported for training.

`torch.export` records only the forward computation. A `torch.autograd.Function` with its own backward, a gradient hook,
and a parameter outside of the model's modules would be dropped silently: the model would train differently than under
torch.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_in_stack
from distir_relax.support.torch_compat import private, tree_leaves

if TYPE_CHECKING:
    import torch

_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HINT = "gradients of a program are those of its ops; to change a gradient, change the loss or write an optimizer"


def reject_custom_autograd(model: torch.nn.Module, training: bool) -> Any:
    """Return a context for the export of `model`, without effect unless it is imported for `training`.

    Raises `ImportModelError` for gradient hooks of the model's modules and parameters, and inside the context for a
    call of a user's `torch.autograd.Function`, for registration of a hook on a tensor, and for use of a tensor that
    requires a gradient but is not a parameter of the model.
    """
    return _reject(model) if training else nullcontext()


@contextmanager
def _reject(model: torch.nn.Module) -> Iterator[None]:
    _reject_registered_hooks(model)
    with _reject_functions(), _reject_tensor_hooks(), _reject_foreign_parameters(model):
        yield


def _reject_registered_hooks(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in _MODULE_HOOKS):
            raise ImportModelError(
                "the module has a hook on its gradients (register_full_backward_hook), which a program does not call",
                name or type(model).__name__,
                f"remove the hook before compiling: {_HINT}",
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ImportModelError(
                "the parameter has a hook on its gradient (register_hook), which a program does not call",
                name,
                f"remove the hook before compiling: {_HINT}",
            )


@contextmanager
def _reject_functions() -> Iterator[None]:
    from torch.utils.checkpoint import CheckpointFunction

    base = private("torch.autograd.function._SingleLevelFunction")
    importer = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Other threads may run models meanwhile.
        if threading.get_ident() == importer and cls is CheckpointFunction:
            # Reentrant activation checkpointing runs its function without gradients, and again in the backward pass.
            function, _, *inputs = args
            return function(*inputs)
        # torch's own functions have correct gradients.
        if threading.get_ident() == importer and not cls.__module__.startswith("torch."):
            raise ImportModelError(
                f"the model has a custom gradient: {cls.__name__}, a torch.autograd.Function",
                location_in_stack("".join(traceback.format_stack())),
                "gradients of a program are those of its ops; for a straight-through estimator write "
                "x + (f(x) - x).detach()",
            )
        return super(base, cls).apply(*args, **kwargs)

    # All calls pass through this method, including those by a saved `apply`.
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


@contextmanager
def _reject_tensor_hooks() -> Iterator[None]:
    import torch

    originals = {name: getattr(torch.Tensor, name) for name in _TENSOR_HOOKS}
    importer = threading.get_ident()

    def rejecting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def register(tensor: Any, hook: Any) -> Any:
            # torch's own hooks, such as those of its exporter, and other threads' are not part of the model.
            is_torch = str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch.")
            if is_torch or threading.get_ident() != importer:
                return original(tensor, hook)
            raise ImportModelError(
                f"the model hooks the gradient of a tensor ({name}), which a program does not call",
                location_in_stack("".join(traceback.format_stack())),
                _HINT,
            )

        return register

    for name, original in originals.items():
        setattr(torch.Tensor, name, rejecting(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def _reject_foreign_parameters(model: torch.nn.Module) -> Any:
    """Return a context in which use of a foreign trainable parameter raises: the program would treat it as constant."""
    import torch
    from torch.overrides import TorchFunctionMode

    parameter_ids = {id(parameter) for parameter in model.parameters()}
    fake = private("torch._subclasses.FakeTensor")

    class ForeignParameterCheck(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in tree_leaves((args, kwargs)):
                real = isinstance(leaf, torch.nn.Parameter) and not isinstance(leaf, fake)
                if real and leaf.requires_grad and id(leaf) not in parameter_ids:
                    raise ImportModelError(
                        f"a parameter of shape {tuple(leaf.shape)} is used that belongs to no module of the model or "
                        "of its loss, so it would not be trained",
                        location_in_stack("".join(traceback.format_stack())),
                        "make its module a submodule of the model, pass a loss that is a torch.nn.Module, or call "
                        "requires_grad_(False)",
                    )
            return func(*args, **(kwargs or {}))

    return ForeignParameterCheck()
