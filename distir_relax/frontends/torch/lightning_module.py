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
    "prepare_data", "setup", "teardown", "configure_model", "print",
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
    if "batch_transfer" in name or "transfer_batch" in name:
        return "transform batches in the data set or in its collate_fn"
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
        for kind, parts in (("optimizer", optimizers), ("scheduler", schedulers)):
            if len(parts) > 1 or not (parts or kind == "scheduler"):
                raise ImportModelError(
                    f"expected one {kind}, found {len(parts)}", where,
                    "use dr.optim.Groups for groups" if kind == "optimizer" else "join their rates in a LambdaLR",
                )  # fmt: skip
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

    def loss(batch: Any) -> Any:
        result = _call_step(module, "training_step", batch)
        value: Any = result.get(LOSS) if isinstance(result, Mapping) else result
        if value is None or not hasattr(value, "dtype"):
            raise ImportModelError(
                f"expected a loss, found {type(value).__name__}", f"{type(module).__name__}.training_step"
            )
        return value

    with _calling(module, loss, lambda name, value, **options: None):
        yield


@contextmanager
def with_validation_step(module: torch.nn.Module) -> Iterator[None]:
    """Inside the context, a call of `module` returns the scalars that its `validation_step` logs, by their names.

    The loss, if the step returns one, is under `LOSS`. A module without a `validation_step` evaluates its training
    step. Raises `ImportModelError`, in that call, for a step without any result.
    """
    name = "validation_step" if has_validation_step(module) else "training_step"
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, **options: Any) -> None:
        logged[name] = _logged_scalar(name, value, options, type(module).__name__)

    def results(batch: Any) -> Any:
        logged.clear()
        result = _call_step(module, name, batch)
        value: Any = result.get(LOSS) if isinstance(result, Mapping) else result
        found = {LOSS: value, **logged} if hasattr(value, "dtype") else dict(logged)
        if not found:
            raise ImportModelError(
                "expected a loss, or tensors that are logged, found none", f"{type(module).__name__}.{name}"
            )
        return found

    with _calling(module, results, log):
        yield


def _logged_scalar(name: str, value: Any, options: Mapping[str, Any], where: str) -> Any:
    """Return a logged value as a scalar tensor. Raise `ImportModelError` for other means than over the evaluation."""
    import torch

    where = f"{where}.log({name!r})"
    if (reduction := options.get("reduce_fx", "mean")) not in ("mean", torch.mean):
        raise ImportModelError(
            f"expected reduce_fx='mean', found {reduction!r}", where, "compute it in a dr.Callback, or log a mean"
        )
    if options.get("on_epoch") is False:
        raise ImportModelError("expected a metric of the whole evaluation, found on_epoch=False", where)
    if callable(getattr(value, "compute", None)):
        raise ImportModelError(
            f"expected a number or a tensor of one element, found the metric {type(value).__name__}", where,
            "compile model and loss as a plain training with metrics={NAME: metric}, which keeps the metric's state",
        )  # fmt: skip
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=torch.float32)
    if value.numel() != 1:
        raise ImportModelError(f"expected a tensor of one element, found the shape {tuple(value.shape)}", where)
    return value.reshape(())


class _FrozenValue:
    """Stands for a value that changes during a run, which a program would keep as it was at the export.

    It may be passed on. Any use raises `ImportModelError`.
    """

    def __init__(self, name: str, where: str) -> None:
        self._name, self._where = name, where

    def _refuse(self, *args: Any) -> Any:
        raise _frozen(self._name, self._where)

    __bool__ = __int__ = __float__ = __index__ = __str__ = __format__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __neg__ = __and__ = _refuse


class _Detached:
    """Stands for the trainer of a module: a step that reads its state raises `ImportModelError`, by name."""

    is_global_zero, global_rank, local_rank = True, 0, 0
    sanity_checking, logger, loggers, progress_bar_callback = False, None, (), None

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _frozen(name, self._where)


def _frozen(name: str, where: str) -> ImportModelError:
    return ImportModelError(
        f"the step reads {name}, whose value at compilation a program would repeat", where,
        "count in a buffer of the module (self.count += 1) and compute with that, or pass the number with the batch",
    )  # fmt: skip


def is_of_lightning(owner: Any) -> bool:
    """Return whether a class or a function is defined by Lightning."""
    return str(getattr(owner, "__module__", "")).split(".")[0] in ("pytorch_lightning", "lightning")


@contextmanager
def _calling(module: torch.nn.Module, results: Callable[[Any], Any], log: Callable[..., None]) -> Iterator[None]:
    """Inside the context, a call of `module` is one of `results`, with the batch; values are logged by `log`.

    The module's own forward is called by the calls of itself in there.
    """
    original, inside = module.forward, False

    def forward(*batch: Any, **named: Any) -> Any:
        nonlocal inside
        if inside:
            return original(*batch, **named)
        inside = True
        try:
            return results(named or (batch[0] if len(batch) == 1 else batch))
        finally:
            inside = False

    def log_named(
        name: str, value: Any, prog_bar: bool = False, logger: Any = None, on_step: Any = None, on_epoch: Any = None,
        reduce_fx: Any = "mean", *args: Any, **others: Any,
    ) -> None:  # fmt: skip
        log(name, value, on_epoch=on_epoch, reduce_fx=reduce_fx)

    def log_dict(values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in values.items():
            log_named(name, value, *args, **options)

    replaced: dict[str, Any] = {"forward": forward, **dict(zip(_LOGGING, (log_named, log_dict), strict=True))}
    if hasattr(module, "_trainer"):
        replaced["_trainer"] = _Detached(type(module).__name__)
    before = {name: vars(module)[name] for name in replaced if name in vars(module)}
    vars(module).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(module)[name]
        vars(module).update(before)


def _call_step(module: torch.nn.Module, name: str, batch: Any) -> Any:
    """Call a step with a batch, and if it takes the batch's number with an object that cannot be read."""
    step = getattr(module, name)
    parameters = list(inspect.signature(step).parameters.values())
    takes_number = len(parameters) > 1 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    number = _FrozenValue("batch_idx", f"{type(module).__name__}.{name}")
    return step(batch, number) if takes_number else step(batch)
