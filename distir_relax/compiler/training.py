"""Compilation of a model, its loss and an optimizer to a distributed training step."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from distir_relax.bundle import BACKENDS, Bundle, TrainingManifest, write_bundle
from distir_relax.compiler.compile import Plan, compile_source
from distir_relax.compiler.options import CompileOptions, complete, documents
from distir_relax.compiler.pass_pipeline import TrainingConfig
from distir_relax.compiler.source import Source
from distir_relax.errors import DistIRError, ImportModelError, RunError
from distir_relax.frontends.dynamic_shapes import DimSpec, fix_dims
from distir_relax.frontends.imported_model import Imported, snapshot
from distir_relax.frontends.torch.importer import EXPORT_LOCK, import_torch
from distir_relax.frontends.torch.loss_module import Loss, call_arguments, with_loss
from distir_relax.ops.elementwise.seed import SEED, takes_seed
from distir_relax.optimizers import AVERAGED, OPTIMIZERS, AdamW, Averaging, Optimizer, rates_of
from distir_relax.strategies.strategy import Strategy
from distir_relax.support.precisions import PRECISIONS
from distir_relax.support.torch_compat import tree_map

if TYPE_CHECKING:
    import torch


class TrainingStep:
    """A training step compiled by `compile_training`: ``step(inputs, targets)`` updates the model, returns the loss.

    `plan` is the compiled program, `steps` the number of steps so far. The original model does not change.
    """

    def __init__(
        self, plan: Plan, optimizer: Optimizer, has_loss: bool, narrow: bool, seed: int,
        unused: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.optimizer = optimizer
        self.steps = 0
        self._exclusive = threading.RLock()
        self._has_loss = has_loss
        self._narrow = narrow
        self._seed = seed
        self._unused = unused

    def __repr__(self) -> str:
        return f"step {self.steps} of {self.plan!r}"

    def __call__(
        self, inputs: Any, targets: Any = None, *, backend: str = "torch", timeout: float | None = None
    ) -> float:
        """Run a step on a batch, with ranks as threads of this process; return the batch's loss before the update.

        `inputs` and `targets` have the structure of the example. Raises `RunError` for a batch that differs from the
        example, and as calling a plan does.
        """
        if self._narrow:
            inputs, targets = _to_bfloat16((inputs, targets))
        tensors = self.plan.imported.flatten(*call_arguments(inputs, targets, self._has_loss))
        with self._exclusive:
            outputs = self.plan.session(backend)(self.numbers(tensors), timeout, outputs=(self._loss,))
            self.steps += 1
        return float(outputs[self._loss])

    def numbers(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a batch by input names, with the learning rate and the seed of this step."""
        import torch

        rates = {name: schedule(self.steps) for name, schedule in rates_of(self.optimizer).items()}
        inputs = {**tensors, **{name: torch.tensor(rate, dtype=torch.float64) for name, rate in rates.items()}}
        if takes_seed(self.plan.modules["global"].main):
            inputs[SEED] = torch.tensor(self._seed + self.steps, dtype=torch.int64)
        return inputs

    @property
    def _loss(self) -> str:
        return self.plan.modules["global"].main.outputs[0].name

    def parameters(self, backend: str = "torch", averaged: bool = False) -> dict[str, torch.Tensor]:
        """Return all parameters at present, by the model's names: global tensors that the caller owns.

        Parameters that the loss does not depend on have their initial values. With `averaged`, those that are trained
        are their averages; raises `RunError` if the step keeps none.
        """
        state = self.plan.session(backend).state()
        averages = {name.removesuffix(AVERAGED): value for name, value in state.items() if name.endswith(AVERAGED)}
        if averaged and not averages:
            raise RunError("this step keeps no averages of parameters", hint="compile it with averaging=dr.EMA(0.999)")
        tensors = {**self.plan.imported.tensors, **state, **(averages if averaged else {})}
        parameters = {i.value.name for i in self.plan.modules["global"].main.inputs if i.role == "parameter"}
        used = {name: tensors[value] for name, value in self.plan.imported.names.items() if value in parameters}
        return {**used, **{name: value.clone() for name, value in self._unused.items()}}

    def save(self, path: str | Path, backends: Sequence[str] = BACKENDS, overwrite: bool = True) -> Path:
        """Write the bundle, with the current parameters and state; see `Plan.save`."""
        return write_bundle(self.bundle(backends), Path(path), overwrite)

    def bundle(self, backends: Sequence[str] = BACKENDS) -> Bundle:
        """Return the bundle in memory, with the current parameters and state."""
        state = self.plan.session().state()
        current = replace(self.plan.imported, tensors={**self.plan.imported.tensors, **state})
        return replace(self.plan, imported=current).bundle(backends).for_training(self._manifest())

    def _manifest(self) -> TrainingManifest:
        """Return the part of the manifest for `distir train`."""
        seed = SEED if takes_seed(self.plan.modules["global"].main) else None
        return TrainingManifest(self._loss, rates_of(self.optimizer), seed, self._seed, self.steps)


@dataclass(frozen=True, repr=False)
class Training:
    """A training to compile: arguments of `compile_training`, for a function in a user's file.

    ``distir compile FILE.py:FUNCTION --train`` and ``distir simulate`` take a function that returns one.
    """

    model: torch.nn.Module
    loss: Loss | None = None
    optimizer: Optimizer = field(default_factory=AdamW)
    example_batch: Any = None
    clip_norm: float | None = None
    precision: str | None = None
    seed: int = 0
    dynamic_shapes: DimSpec | None = None
    dims: Mapping[str, Any] | None = None
    averaging: Averaging | None = None

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {getattr(self.loss, '__name__', type(self.loss).__name__)}"
        return f"<training of {type(self.model).__name__}{loss}, {type(self.optimizer).__name__}>"

    def read(self, options: CompileOptions | None = None) -> Source:
        """Import the model with its loss, to be compiled with these options; raises what `compile_training` does.

        Without any sharding it is for one device.
        """
        _check_optimizer(self.optimizer)
        if self.precision not in (None, *PRECISIONS):
            raise DistIRError(
                f"expected a precision of {' or '.join(PRECISIONS)} for training, found {self.precision!r}",
                hint="weights of 8 and 4 bits are for inference",
            )
        imported, trained = self._import()
        complete_options = complete(options or {}, _name(self.model))
        strategy, mesh, shardings = (complete_options[key] for key in ("strategy", "mesh", "shardings"))
        if strategy is None and mesh is None and shardings != "auto" and not imported.module.meshes:
            complete_options["strategy"] = Strategy()
        step = TrainingConfig(self.optimizer, trained, self.clip_norm, self._is_narrow, self.averaging)
        return Source(imported, complete_options, step)

    @property
    def _is_narrow(self) -> bool:
        return self.precision == "bf16"

    def _import(self) -> tuple[Imported, tuple[str, ...]]:
        """Import the model with its loss; return it with the values of the parameters that require gradients."""
        model, loss = self.model, self.loss
        inputs, targets = _batch(self.example_batch, loss is not None)
        computed, narrow_loss = model, loss
        if self._is_narrow:
            import torch

            computed = copy.deepcopy(model).to(torch.bfloat16)
            if isinstance(loss, torch.nn.Module):
                narrow_loss = copy.deepcopy(loss).to(torch.bfloat16)
            inputs, targets = _to_bfloat16((inputs, targets))
        args, kwargs = call_arguments(inputs, targets, loss is not None)
        # Import temporarily replaces the model's forward.
        with EXPORT_LOCK:
            with with_loss(computed, narrow_loss):
                imported = import_torch(
                    computed, args, kwargs, training=True, dynamic_shapes=self.dynamic_shapes, dims=self.dims
                )
                imported = snapshot(fix_dims(imported, self.dims or {}))
            with with_loss(model, loss):
                parameters = dict(model.named_parameters(remove_duplicate=False))
        names, masters = imported.names, parameters if self._is_narrow else {}
        wide = {names[n]: p.detach().clone() for n, p in masters.items() if n in names}
        trained = dict.fromkeys(names[n] for n, p in parameters.items() if p.requires_grad and n in names)
        if not trained:
            raise DistIRError("the model has no parameter that requires gradients", hint="requires_grad_(True)")
        return replace(imported, tensors={**imported.tensors, **wide}), tuple(trained)

    def compile(self, **options: Any) -> TrainingStep:
        """Compile the training step, with more options of `compile_training`; raises what that raises."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self)} | options
        return compile_training(arguments.pop("model"), arguments.pop("loss"), **arguments)


@documents(CompileOptions)
def compile_training(
    model: torch.nn.Module,
    loss: Loss | None = None,
    *,
    optimizer: Optimizer,
    example_batch: Any,
    clip_norm: float | None = None,
    precision: str | None = None,
    seed: int = 0,
    dynamic_shapes: DimSpec | None = None,
    dims: Mapping[str, Any] | None = None,
    averaging: Averaging | None = None,
    **options: Unpack[CompileOptions],
) -> TrainingStep:
    """Compile a training step of `model`, in its current mode, for the devices of a strategy.

    `loss(output, targets)` is torch code that returns a scalar; if it is a module, its parameters are trained too.
    Without it the model returns its loss, as transformers models called with labels do. `example_batch` is ``(inputs,
    targets)``, or ``inputs`` alone without a `loss`: `inputs` is a tensor, a tuple, or a dict of keyword arguments. All
    parameters that require gradients are trained. `clip_norm` clips their global gradient norm. With
    ``precision="bf16"`` the model computes in bfloat16, and weights are stored and updated in float32. `seed` is
    that of dropout. `dynamic_shapes` names dims of inputs and ``targets`` that differ from batch to batch, as for
    `compile`, and `dims` gives bounds of them. With `averaging`, such as ``dr.EMA(0.999)``, the step keeps averages of
    the trained parameters (`TrainingStep.parameters`). The other options are those of `compile`; without any sharding
    the model runs on one device.

    Raises a `DistIRError`: as `compile` does, for an optimizer not of this package, for gradient hooks, and for a loss
    that is not a scalar or does not depend on a trained parameter.
    """
    training = Training(
        model, loss, optimizer, example_batch, clip_norm, precision, seed, dynamic_shapes, dims, averaging
    )
    plan = compile_source(training.read(options))
    named_parameters = model.named_parameters(remove_duplicate=False)
    unused = {name: p.detach().clone() for name, p in named_parameters if name in plan.imported.unused}
    return TrainingStep(plan, optimizer, loss is not None, precision == "bf16", seed, unused)


def _check_optimizer(optimizer: Any) -> None:
    """Raise `DistIRError` unless `optimizer` is an optimizer of this package."""
    if isinstance(optimizer, Optimizer):
        return
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        raise DistIRError(f"expected an optimizer, found the class {name}", hint=f"call it: {kind.__name__}(lr=1e-3)")
    ours = kind.__name__ if kind.__name__ in OPTIMIZERS else "AdamW"
    description = f"the class {name}" if isinstance(optimizer, type) else f"an object of type {name}"
    raise DistIRError(
        f"expected an optimizer of distir_relax, found {description}",
        hint=f"pass dr.{ours}(lr=...), which has torch's options, or a dr.Optimizer of your own",
    )


def _batch(batch: Any, has_loss: bool) -> tuple[Any, Any]:
    if not has_loss:
        alone = isinstance(batch, (tuple, list)) and len(batch) == 2 and batch[1] is None
        return (batch[0], None) if alone else (batch, None)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ImportModelError(
            f"expected example_batch=(inputs, targets), found {type(batch).__name__}",
            hint="inputs is a tensor, a tuple, or a dict of keyword arguments",
        )
    return batch[0], batch[1]


def _to_bfloat16(tree: Any) -> Any:
    """Cast wider floats of a batch to bfloat16."""
    import torch

    def narrow(leaf: Any) -> Any:
        wide = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if wide else leaf

    return tree_map(narrow, tree)


def _name(model: torch.nn.Module) -> str:
    return re.sub(r"\W+", "_", type(model).__name__).strip("_").lower() or "model"
