"""Conversion of torch's optimizers and learning rate schedulers, as existing scripts make them."""

from __future__ import annotations

import copy
import glob
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError
from distir_relax.optimizers.adadelta import Adadelta
from distir_relax.optimizers.adafactor import Adafactor
from distir_relax.optimizers.adagrad import Adagrad
from distir_relax.optimizers.adam import Adam, AdamW
from distir_relax.optimizers.groups import Groups
from distir_relax.optimizers.muon import Muon
from distir_relax.optimizers.nadam import NAdam, RAdam
from distir_relax.optimizers.optimizer import Optimizer
from distir_relax.optimizers.rmsprop import RMSprop
from distir_relax.optimizers.sgd import SGD
from distir_relax.optimizers.torch_optimizer import TorchOptimizer
from distir_relax.support.learning_rate import Constant, Schedule, Tabulated

if TYPE_CHECKING:
    import torch

_OPTIONS: Mapping[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "SGD": (SGD, ("momentum", "dampening", "weight_decay", "nesterov", "maximize")),
    "Adam": (Adam, ("betas", "eps", "weight_decay", "amsgrad", "maximize")),
    "AdamW": (AdamW, ("betas", "eps", "weight_decay", "amsgrad", "maximize")),
    "Adadelta": (Adadelta, ("rho", "eps", "weight_decay", "maximize")),
    "NAdam": (NAdam, ("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize")),
    "RAdam": (RAdam, ("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")),
    "RMSprop": (RMSprop, ("alpha", "eps", "weight_decay", "momentum", "centered", "maximize")),
    "Adagrad": (Adagrad, ("lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize")),
    "Adafactor": (Adafactor, ("beta2_decay", "eps", "d", "weight_decay", "maximize")),
    "Muon": (Muon, ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")),
}
"""The optimizers of `torch.optim` by name, with the options that they share with torch's."""
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable", "params", "lr", "initial_lr", "max_lr", "min_lr")
"""Entries of a group that do not change a step, or are the rate."""
_OF_MOMENTUM = {SGD: "momentum", RMSprop: "momentum", Adam: "betas", AdamW: "betas"}
"""The options of optimizers whose momentum a scheduler may change."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The rates of a group, and its momenta if they change."""

    lr: Schedule
    momentum: Schedule | None = None


def from_torch(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, scheduler: Any = None, *,
    steps: int | None = None, steps_per_call: int = 1, steps_per_epoch: int | None = None,
) -> Optimizer:  # fmt: skip
    """Return the optimizer that makes the steps of a torch optimizer of a model's parameters, group by group.

    Those of `torch.optim` that have an equal here become it; a class of another package is traced (`TorchOptimizer`).
    `scheduler` is one of `torch.optim.lr_scheduler`, or None: its rates and momenta in `steps` steps are recorded; it
    is stepped after each `steps_per_call`, counted anew in each epoch of `steps_per_epoch`.

    Raises `DistIRError` for an optimizer that has made steps or has other parameters than the trained ones of the
    model, for a scheduler that needs a metric, changes something else or has no number of `steps`, for momenta that
    change of an optimizer that takes none, and as `TorchOptimizer` does.
    """
    where = type(optimizer).__name__
    # Adagrad has its state, without steps, from the beginning.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise DistIRError("expected an optimizer that has made no step, found one with state", where)
    names = _names(optimizer, model)
    rates = [Recorded(Constant(float(group["lr"]))) for group in optimizer.param_groups]
    if scheduler is not None:
        if steps is None:
            raise DistIRError(
                "expected the number of steps, of which the scheduler's rates are recorded", type(scheduler).__name__,
                "pass steps=",
            )  # fmt: skip
        rates = record_rates(scheduler, steps, steps_per_call, steps_per_epoch)
    parts = [_part(optimizer, group, rate) for group, rate in zip(optimizer.param_groups, rates, strict=True)]
    largest = max(range(len(parts)), key=lambda number: len(names[number]))
    others = {
        glob.escape(name): parts[number]
        for number, part_names in enumerate(names)
        if number != largest and parts[number] != parts[largest]
        for name in part_names
    }
    return Groups(parts[largest], others) if others else parts[largest]


def record_rates(
    scheduler: Any, steps: int, steps_per_call: int = 1, steps_per_epoch: int | None = None
) -> list[Recorded]:
    """Return what a scheduler of torch sets for each group in `steps` steps; it does not change itself.

    It is stepped after each `steps_per_call` steps, counted anew in each epoch of `steps_per_epoch`. Raises
    `DistIRError` for one that needs a metric, and for one that changes more than rates and momenta.
    """
    import torch

    where, optimizer = type(scheduler).__name__, scheduler.optimizer
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise DistIRError(
            "expected rates that depend on the step alone, found some that depend on a metric", where,
            "leave the scheduler out, and give the run dr.callbacks.ReduceOnPlateau(metric)",
        )  # fmt: skip
    groups = [
        {
            **{name: value for name, value in group.items() if name != "params"},
            "params": [torch.zeros((), dtype=torch.float32)],
        }
        for group in optimizer.param_groups
    ]
    with warnings.catch_warnings():
        # Torch warns that the stand-in, whose steps are not its own, is not stepped.
        warnings.simplefilter("ignore")
        stand_in = torch.optim.SGD(groups, lr=0.0)
        # Without a copy of the parameters.
        own = copy.deepcopy(scheduler, {id(optimizer): stand_in})
        others = _others(stand_in)
        rates: list[list[float]] = [[] for _ in groups]
        momenta: list[list[float]] = [[] for _ in groups]
        for step in range(max(steps, 1)):
            in_epoch = step if steps_per_epoch is None else (step - 1) % steps_per_epoch + 1
            if step and in_epoch % steps_per_call == 0:
                own.step()
            for number, group in enumerate(stand_in.param_groups):
                rates[number].append(float(group["lr"]))
                momenta[number].append(float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0)))
            if _others(stand_in) != others:
                raise DistIRError("expected a scheduler of learning rates, found one of other options", where)
    of_momentum = [None if len(set(row)) == 1 else Tabulated(tuple(row)) for row in momenta]
    return [Recorded(*pair) for pair in zip(map(_schedule, rates), of_momentum, strict=True)]


def _schedule(rates: list[float]) -> Schedule:
    return Constant(rates[0]) if len(set(rates)) == 1 else Tabulated(tuple(rates))


def _others(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the options of groups that are neither rates nor momenta, which schedulers must not change."""
    return [[group.get("betas", (0.0,))[1:], group.get("weight_decay")] for group in optimizer.param_groups]


def _names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[list[str]]:
    """Return the names of the trained parameters of each group. Raise `DistIRError` unless each has a group."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[list[str]] = []
    for group in optimizer.param_groups:
        if any(id(p) not in named for p in group["params"]):
            raise DistIRError(
                "expected an optimizer of the model's parameters, found one of another tensor",
                type(optimizer).__name__, "make it with model.parameters()",
            )  # fmt: skip
        groups.append([named[id(p)] for p in group["params"] if p.requires_grad])
    missing = next((n for n, p in model.named_parameters() if p.requires_grad and not any(n in g for g in groups)), "")
    if missing:
        raise DistIRError(
            f"expected all parameters that require gradients in the optimizer, {missing!r} is not",
            type(optimizer).__name__, "freeze it with requires_grad_(False)",
        )  # fmt: skip
    return groups


def _part(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], recorded: Recorded) -> Optimizer:
    """Return the optimizer of a group."""
    import torch

    kind = type(optimizer)
    rate = recorded.lr.lr if isinstance(recorded.lr, Constant) else recorded.lr
    if kind.__name__ in _OPTIONS and getattr(torch.optim, kind.__name__, None) is kind:
        ours, shared = _OPTIONS[kind.__name__]
        if ours is Adam and group.get("decoupled_weight_decay"):
            ours = AdamW
        options = {name: group[name] for name in shared if name in group} | _changed(ours, group, recorded)
        make: Callable[..., Optimizer] = ours
        return make(lr=rate, **options)
    _changed(TorchOptimizer, group, recorded)
    if kind.__name__ == "Adafactor" and kind.__module__.startswith("transformers."):
        return _adafactor_of_transformers(group, rate)
    options = {name: value for name, value in group.items() if name not in _IMPLEMENTATION}
    if any(isinstance(value, torch.Tensor) for value in options.values()):
        raise DistIRError("expected options that are numbers, found a tensor", kind.__name__)
    return TorchOptimizer(kind, rate, **options)


def _changed(kind: type[Optimizer], group: Mapping[str, Any], recorded: Recorded) -> dict[str, Any]:
    """Return the options with a momentum that changes. Raises `DistIRError` for an optimizer that takes none."""
    if recorded.momentum is None:
        return {}
    if kind not in _OF_MOMENTUM:
        raise DistIRError(
            "expected a scheduler of learning rates, found one of momenta, too", kind.__name__,
            "SGD, RMSprop, Adam and AdamW take them; torch's OneCycleLR and CyclicLR change none with "
            "cycle_momentum=False",
        )  # fmt: skip
    name = _OF_MOMENTUM[kind]
    return {name: (recorded.momentum, group["betas"][1]) if name == "betas" else recorded.momentum}


def _adafactor_of_transformers(group: Mapping[str, Any], rate: float | Schedule) -> Optimizer:
    """Return the optimizer of a group of transformers' Adafactor, whose rates are given."""
    # Decay is relative to the parameter's scale there.
    decay = 0.0 if group["scale_parameter"] else group["weight_decay"]
    for option, expected in (("relative_step", False), ("beta1", None), ("weight_decay", decay)):
        if group[option] != expected:
            raise DistIRError(f"expected {option}={expected}, found {group[option]!r}", "Adafactor")
    added, least = group["eps"]
    return Adafactor(
        rate, group["decay_rate"], (0.0, least), group["clip_threshold"], group["weight_decay"],
        scale_parameter=group["scale_parameter"], relative_step=False, added_eps=added,
    )  # fmt: skip
