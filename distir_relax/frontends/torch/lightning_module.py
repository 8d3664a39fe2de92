"""Lightning modules: their training and validation steps as programs, and the optimizer that they configure.

A module is recognized by its methods, so Lightning itself is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.errors import ImportModelError
from distir_relax.frontends.torch.loss_module import LOSS

if TYPE_CHECKING:
    import torch

_LOGGING = ("log", "log_dict")
_BATCH_END = "on_train_batch_end"
_CALLED = ("forward", "training_step", "validation_step", "configure_optimizers", _BATCH_END)
"""Methods of a module that are part of a compiled training."""
_OTHER_RUNS = (
    "test_step", "predict_step", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    "prepare_data", "setup", "teardown", "configure_model", "transfer_batch_to_device", "print",
)  # fmt: skip
"""Methods that a training without Lightning does not need: those of tests and predictions, of data, which the caller
passes, and those that make layers, which the caller calls before."""


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """The result of `configure_optimizers`: an optimizer of torch, and a scheduler of its rate or None.

    The scheduler is stepped each `frequency` batches of an epoch, or epochs if it counts `epochs`.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    epochs: bool = False
    frequency: int = 1


def is_lightning(model: Any) -> bool:
    """Return whether a model has the methods of a `LightningModule`."""
    return callable(getattr(model, "training_step", None)) and callable(getattr(model, "configure_optimizers", None))


def check_lightning(module: Any) -> None:
    """Raise `ImportModelError` for a module whose step cannot be one program."""
    where = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise ImportModelError(
            "expected automatic optimization, found a module that calls its optimizers itself", where,
            "return the loss from training_step, or pass a plain model with loss= and optimizer=",
        )  # fmt: skip
    for name in _overridden(type(module)):
        if name not in _CALLED and name not in _OTHER_RUNS and not name.startswith(("on_test_", "on_predict_")):
            raise ImportModelError(
                f"the module has its own {name}, which a compiled step does not call", where, _instead(name)
            )


def _overridden(kind: type) -> list[str]:
    """Return the methods of Lightning's own classes that a module's class overrides."""
    ours = [base for base in kind.__mro__ if is_of_lightning(base)]
    methods = {name for base in ours for name, value in vars(base).items() if inspect.isfunction(value)}
    return [name for name in sorted(methods) if name[0] != "_" and not is_of_lightning(getattr(kind, name))]


def _instead(name: str) -> str:
    if name.startswith("on_"):
        return "write a dr.Callback, and pass it to dr.train; or update state of the model in training_step"
    return "remove the override"


def configured_optimizer(module: Any) -> ConfiguredOptimizer:
    """Call `configure_optimizers` of a module. Raise `ImportModelError` for no optimizer and for several."""
    import torch

    result: Any = module.configure_optimizers()
    where = f"{type(module).__name__}.configure_optimizers"
    scheduler: Any = None
    if isinstance(result, (tuple, list)):
        pair = len(result) == 2 and all(isinstance(part, (tuple, list)) for part in result)
        optimizers, schedulers = result if pair else (result, ())
        if len(optimizers) != 1 or len(schedulers) > 1:
            raise ImportModelError(
                f"expected one optimizer, found {len(optimizers)}", where, "use dr.optim.Groups for groups"
            )
        result, scheduler = optimizers[0], schedulers[0] if schedulers else None
    if isinstance(result, Mapping):
        result, scheduler = result.get("optimizer"), result.get("lr_scheduler")
    if not isinstance(result, torch.optim.Optimizer):
        raise ImportModelError(f"expected an optimizer of torch, found {type(result).__name__}", where)
    if not isinstance(scheduler, Mapping):
        return ConfiguredOptimizer(result, scheduler, epochs=scheduler is not None)
    epochs = scheduler.get("interval", "epoch") == "epoch"
    return ConfiguredOptimizer(result, scheduler["scheduler"], epochs, int(scheduler.get("frequency", 1)))


def has_validation_step(module: Any) -> bool:
    """Return whether a Lightning module has a `validation_step` of its own."""
    return _has_own(module, "validation_step")


def has_batch_end_hook(module: Any) -> bool:
    """Return whether a Lightning module has an `on_train_batch_end` of its own."""
    return _has_own(module, _BATCH_END)


def _has_own(module: Any, name: str) -> bool:
    own = getattr(type(module), name, None)
    return own is not None and not is_of_lightning(own)


@contextmanager
def with_training_step(module: torch.nn.Module) -> Iterator[None]:
    """Inside the context, a call of `module` returns the loss of its `training_step`.

    A batch that is a tuple or a list is passed as arguments, a dict by keyword. Raises `ImportModelError`, in that
    call, for a step that returns no loss.
    """

    def loss(batch: Any, logged: Mapping[str, Any]) -> Any:
        result = _call_step(module, "training_step", batch)
        value: Any = result.get(LOSS) if isinstance(result, Mapping) else result
        if value is None or not hasattr(value, "dtype"):
            raise ImportModelError(
                f"expected a loss, found {type(value).__name__}", f"{type(module).__name__}.training_step"
            )
        return value

    with _calling(module, loss):
        yield


@contextmanager
def with_validation_step(module: torch.nn.Module) -> Iterator[None]:
    """Inside the context, a call of `module` returns the scalars that its `validation_step` logs, by their names.

    The loss, if the step returns one, is under `LOSS`. A module without a `validation_step` evaluates its training
    step. Raises `ImportModelError`, in that call, for a step without any result.
    """
    name = "validation_step" if has_validation_step(module) else "training_step"

    def results(batch: Any, logged: Mapping[str, Any]) -> Any:
        result = _call_step(module, name, batch)
        value: Any = result.get(LOSS) if isinstance(result, Mapping) else result
        found = {LOSS: value, **logged} if hasattr(value, "dtype") else dict(logged)
        if not found:
            raise ImportModelError(
                "expected a loss, or tensors that are logged, found none", f"{type(module).__name__}.{name}"
            )
        return found

    with _calling(module, results):
        yield


def is_of_lightning(owner: Any) -> bool:
    """Return whether a class or a function is defined by Lightning."""
    return str(getattr(owner, "__module__", "")).split(".")[0] in ("pytorch_lightning", "lightning")


@contextmanager
def _calling(module: torch.nn.Module, results: Callable[[Any, Mapping[str, Any]], Any]) -> Iterator[None]:
    """Inside the context, a call of `module` is one of `results`, with the batch and the tensors logged meanwhile.

    The module's own forward is called by the calls of itself in there.
    """
    original, inside = module.forward, False
    logged: dict[str, Any] = {}

    def forward(*batch: Any, **named: Any) -> Any:
        nonlocal inside
        if inside:
            return original(*batch, **named)
        inside = True
        logged.clear()
        try:
            return results(named or (batch[0] if len(batch) == 1 else batch), logged)
        finally:
            inside = False

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(value, "dtype") and value.dim() == 0:
            logged[name] = value

    def log_dict(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in values.items():
            log(name, value)

    replaced = {"forward": forward, **dict(zip(_LOGGING, (log, log_dict), strict=True))}
    before = {name: vars(module)[name] for name in replaced if name in vars(module)}
    vars(module).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(module)[name]
        vars(module).update(before)


def _call_step(module: torch.nn.Module, name: str, batch: Any) -> Any:
    """Call a step with a batch, and with the batch's number if it takes one."""
    step = getattr(module, name)
    parameters = list(inspect.signature(step).parameters.values())
    takes_number = len(parameters) > 1 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    return step(batch, 0) if takes_number else step(batch)
