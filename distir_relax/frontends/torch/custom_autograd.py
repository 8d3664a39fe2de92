"""Custom autograd behaviour in models that are imported for training: functions with gradients of their own, and hooks.

`torch.export` records only the forward computation. Of a `torch.autograd.Function` the backward is traced too, from a
gradient to those of its inputs, and an op tells which ops these are (`autodiff.own_gradients`). A gradient hook, and a
parameter outside of the model's modules, would be dropped silently: they are refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.location import location_here
from distir_relax.support.torch_compat import graph_op, private, tree_leaves

if TYPE_CHECKING:
    import torch

_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HINT = "gradients of a program are those of its ops; to change a gradient, change the loss or write an optimizer"


def custom_autograd(model: torch.nn.Module, training: bool) -> Any:
    """Return a context for the export of `model`, without effect unless it is imported for `training`.

    Raises `ImportModelError` for gradient hooks of the model's modules and parameters, and inside the context for
    registration of a hook on a tensor, for use of a tensor that requires a gradient but is not a parameter of the
    model, and for a `torch.autograd.Function` that changes inputs or has several results with gradients.
    """
    return _with_custom_autograd(model) if training else nullcontext()


@contextmanager
def _with_custom_autograd(model: torch.nn.Module) -> Iterator[None]:
    _reject_registered_hooks(model)
    with _traced_functions(), _reject_tensor_hooks(), _reject_foreign_parameters(model):
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
def _traced_functions() -> Iterator[None]:
    from torch.utils.checkpoint import CheckpointFunction

    base = private("torch.autograd.function._SingleLevelFunction")
    importer = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Other threads may run models meanwhile.
        if threading.get_ident() == importer and cls is CheckpointFunction:
            # Reentrant activation checkpointing runs its function without gradients, and again in the backward pass.
            function, _, *inputs = args
            return function(*inputs)
        # torch's own functions have the gradients of their ops.
        if threading.get_ident() == importer and not cls.__module__.startswith("torch."):
            return _traced(cls, args)
        return super(base, cls).apply(*args, **kwargs)

    # All calls pass through this method, including those by a saved `apply`.
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


class _Context:
    """The context of a function's forward and backward, with attributes of the user's."""

    def __init__(self, args: Sequence[Any], taken: Sequence[Any]) -> None:
        self._originals = {id(new): old for new, old in zip(taken, args, strict=True)}
        self.needs_input_grad = tuple(map(_is_float, args))
        self.saved_tensors: tuple[Any, ...] = ()
        self.without_gradient: tuple[Any, ...] = ()
        self.fills = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tuple(self._originals.get(id(tensor), tensor) for tensor in tensors)

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.without_gradient = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.fills = value

    def mark_dirty(self, *tensors: Any) -> None:
        raise _refused("a function that changes its inputs in place (mark_dirty)", "return a new tensor")


def _traced(function: Any, args: Sequence[Any]) -> Any:
    """Trace a function, and its backward; return its results."""
    import torch

    taken = [x.detach() if _is_float(x) else x for x in args]
    context = _Context(args, taken)
    if function.setup_context is torch.autograd.Function.setup_context:
        output = function.forward(context, *taken)
    else:
        output = function.forward(*taken)
        function.setup_context(context, tuple(taken), output)
    results = list(output) if isinstance(output, (tuple, list)) else [output]
    numbers = [i for i, x in enumerate(results) if _is_float(x) and not any(x is y for y in context.without_gradient)]
    if not numbers or not any(context.needs_input_grad):
        return output
    if len(numbers) > 1:
        raise _refused(f"{function.__name__}, a function of several results with gradients", "one function for each")
    (number,) = numbers
    seed_of, own_gradient = own_gradient_ops()
    seed = seed_of(results[number])
    zeros = [torch.zeros_like(x) if context.fills and isinstance(x, torch.Tensor) else None for x in results]
    # As in torch, it runs outside of an autocast, and gradients have the dtypes of what they are of.
    with torch.autocast(results[number].device.type, enabled=False):
        grads = function.backward(context, *(seed if i == number else x for i, x in enumerate(zeros)))
    grads = list(grads) if isinstance(grads, (tuple, list)) else [grads]
    pairs = [(x, grad.to(x.dtype)) for x, grad in zip(args, grads, strict=False) if _is_float(x) and grad is not None]
    if pairs:
        inputs, gradients = map(list, zip(*pairs, strict=True))
        results[number] = own_gradient(results[number], seed, inputs, gradients)
    return type(output)(results) if isinstance(output, (tuple, list)) else results[0]


def _is_float(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _refused(what: str, hint: str) -> ImportModelError:
    where = location_here()
    return ImportModelError(f"the model calls {what}, which a program cannot differentiate", where, hint)


def is_seed(target: Any) -> bool:
    """Whether the target of a node of an exported graph stands for the gradient of its operand."""
    return str(target) == "distir.gradient_seed.default"


def is_own_gradient(target: Any) -> bool:
    """Whether the target of a node of an exported graph is the second of `own_gradient_ops`."""
    return str(target) == "distir.own_gradient.default"


@cache
def own_gradient_ops() -> tuple[Any, Any]:
    """Return the ops ``distir::gradient_seed`` and ``distir::own_gradient`` of exported graphs.

    The second has a value, its seed, inputs, and the gradients of these.
    """
    import torch

    seed = graph_op("gradient_seed", "(Tensor y) -> Tensor", torch.zeros_like, torch.empty_like)
    schema = "(Tensor y, Tensor seed, Tensor[] inputs, Tensor[] gradients) -> Tensor"
    return seed, graph_op("own_gradient", schema, lambda y, *_: y.clone(), lambda y, *_: torch.empty_like(y))


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
                location_here(),
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
                        location_here(),
                        "make its module a submodule of the model, pass a loss that is a torch.nn.Module, or call "
                        "requires_grad_(False)",
                    )
            return func(*args, **(kwargs or {}))

    return ForeignParameterCheck()
