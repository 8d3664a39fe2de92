"""Training in one call: a model, its loss and an optimizer in, a step that updates the model on all ranks out."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from distir_relax.bundle import BACKENDS, Bundle, TrainingManifest, write_bundle
from distir_relax.compiler.compile import Plan, plan_of
from distir_relax.compiler.options import CompileOptions, complete, documents
from distir_relax.compiler.pass_pipeline import StepOfTraining
from distir_relax.compiler.source import Source
from distir_relax.errors import DistIRError, ImportModelError
from distir_relax.frontends.imported_model import Imported, snapshot
from distir_relax.frontends.torch.importer import EXPORT_LOCK, import_torch
from distir_relax.frontends.torch.loss_module import Loss, call_of, with_loss
from distir_relax.optimizers import RATE, AdamW, Optimizer
from distir_relax.strategies.strategy import Strategy
from distir_relax.support.learning_rate import as_schedule
from distir_relax.support.torch_compat import tree_map

if TYPE_CHECKING:
    import torch

PRECISIONS = ("", "bfloat16")


class TrainingStep:
    """A step of training, made by `compile_training`: ``step(inputs, targets)`` updates the model, and gives the loss.

    `plan` is the compiled program, `steps` how many steps were made. The model that it was made from does not change.
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
        """Make a step on a batch, ranks as threads of this process: the loss of the batch before it.

        `inputs` and `targets` are as the example was. Raises `RunError` for a batch unlike the example, and as a plan
        does when it is called.
        """
        if self._narrow:
            inputs, targets = _narrowed((inputs, targets))
        tensors = self.plan.imported.flatten(*call_of(inputs, targets, self._has_loss))
        with self._exclusive:
            outputs = self.plan.session(backend)(self.numbers(tensors), timeout, outputs=(self._loss,))
            self.steps += 1
        return float(outputs[self._loss])

    def numbers(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch by input names with what the host adds to it: the learning rate of this step, and its seed."""
        import torch

        found = {**tensors, RATE: torch.tensor(as_schedule(self.optimizer.lr)(self.steps), dtype=torch.float64)}
        if any(i.value.name == "seed" for i in self.plan.modules["global"].main.inputs):
            found["seed"] = torch.tensor(self._seed + self.steps, dtype=torch.int64)
        return found

    @property
    def _loss(self) -> str:
        return self.plan.modules["global"].main.outputs[0].name

    def parameters(self, backend: str = "torch") -> dict[str, torch.Tensor]:
        """All parameters as they are now, by the model's names: global tensors of the caller's own.

        Those that the loss does not depend on are as they were.
        """
        tensors = {**self.plan.imported.tensors, **self.plan.session(backend).state()}
        kept = {i.value.name for i in self.plan.modules["global"].main.inputs if i.role == "parameter"}
        used = {name: tensors[value] for name, value in self.plan.imported.names.items() if value in kept}
        return {**used, **{name: value.clone() for name, value in self._unused.items()}}

    def save(self, path: str | Path, backends: Sequence[str] = BACKENDS, overwrite: bool = True) -> Path:
        """Write the bundle, with parameters and state as they are now; see `Plan.save`."""
        return write_bundle(self.bundle(backends), Path(path), overwrite)

    def bundle(self, backends: Sequence[str] = BACKENDS) -> Bundle:
        """All that ranks need, in memory, with parameters and state as they are now."""
        state = self.plan.session().state()
        current = replace(self.plan.imported, tensors={**self.plan.imported.tensors, **state})
        return replace(self.plan, imported=current).bundle(backends).for_training(self._manifest())

    def _manifest(self) -> TrainingManifest:
        """What `distir train` is to know."""
        seed = "seed" if any(i.value.name == "seed" for i in self.plan.modules["global"].main.inputs) else None
        return TrainingManifest(self._loss, as_schedule(self.optimizer.lr), RATE, seed, self._seed, self.steps)


@dataclass(frozen=True, repr=False)
class Training:
    """What is to be trained, and how: the arguments of `compile_training` that say it, for a function in a user's file.

    ``distir compile FILE.py:FUNCTION --train`` and ``distir simulate`` take a function that returns one.
    """

    model: torch.nn.Module
    loss: Loss | None = None
    optimizer: Optimizer = field(default_factory=AdamW)
    example_batch: Any = None
    clip_norm: float | None = None
    precision: str = ""
    seed: int = 0

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {getattr(self.loss, '__name__', type(self.loss).__name__)}"
        return f"<training of {type(self.model).__name__}{loss}, {type(self.optimizer).__name__}>"

    def read(self, options: CompileOptions | None = None) -> Source:
        """Import the model with its loss, to be compiled with these options; raises what `compile_training` does.

        Where nothing says how it is sharded it is for one device.
        """
        _check_optimizer(self.optimizer)
        if self.precision not in PRECISIONS:
            raise DistIRError(f"precision is bfloat16, or left out, found {self.precision!r}")
        imported, trained = _import(self.model, self.loss, self.example_batch, self.precision)
        complete_options = complete(options or {}, _name(self.model))
        strategy, mesh, shardings = (complete_options[key] for key in ("strategy", "mesh", "shardings"))
        if strategy is None and mesh is None and shardings != "auto" and not imported.module.meshes:
            complete_options["strategy"] = Strategy()
        step = StepOfTraining(self.optimizer, trained, self.clip_norm, masters=bool(self.precision))
        return Source(imported, complete_options, step)

    def compile(self, **options: Any) -> TrainingStep:
        """The step of training, with other options of `compile_training`; raises what that raises."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return compile_training(own.pop("model"), own.pop("loss"), **own, **options)


@documents(CompileOptions)
def compile_training(
    model: torch.nn.Module,
    loss: Loss | None = None,
    *,
    optimizer: Optimizer,
    example_batch: Any,
    clip_norm: float | None = None,
    precision: str = "",
    seed: int = 0,
    **options: Unpack[CompileOptions],
) -> TrainingStep:
    """Compile a step of training of `model`, in the mode that it is in, for the devices of a strategy.

    `loss(output, targets)` is torch code that gives a number; the parameters of one that is a module are trained with
    the model's. Without it the model returns its loss, as transformers models do that are called with labels.
    `example_batch` is ``(inputs, targets)``, or ``inputs`` alone where there is no `loss`: `inputs` a tensor, a tuple,
    or a dict of keyword arguments. All parameters that require gradients are trained. `clip_norm` clips their
    gradients, together, to a norm. With ``precision="bfloat16"`` the model computes in bfloat16, and weights are kept
    and updated in float32. `seed` is that of dropout. The other options are those of `compile`; where nothing says how
    the model is sharded it runs on one device.

    Raises a `DistIRError`: as `compile` does, for an optimizer that is none of this package's, for gradient hooks, and
    for a loss that is no number or that a trained parameter does not reach.
    """
    training = Training(model, loss, optimizer, example_batch, clip_norm, precision, seed)
    plan = plan_of(training.read(options))
    own = model.named_parameters(remove_duplicate=False)
    unused = {name: p.detach().clone() for name, p in own if name in plan.imported.unused}
    return TrainingStep(plan, optimizer, loss is not None, bool(precision), seed, unused)


def _import(model: torch.nn.Module, loss: Loss | None, batch: Any, precision: str) -> tuple[Imported, tuple[str, ...]]:
    """The model with its loss, and the values of the parameters that require gradients."""
    inputs, targets = _batch(batch, loss is not None)
    computed, narrow_loss = model, loss
    if precision:
        import torch

        computed = copy.deepcopy(model).to(torch.bfloat16)
        if isinstance(loss, torch.nn.Module):
            narrow_loss = copy.deepcopy(loss).to(torch.bfloat16)
        inputs, targets = _narrowed((inputs, targets))
    args, kwargs = call_of(inputs, targets, loss is not None)
    # The call of the model is changed for as long as it is read.
    with EXPORT_LOCK:
        with with_loss(computed, narrow_loss):
            imported = snapshot(import_torch(computed, args, kwargs, training=True))
        with with_loss(model, loss):
            own = dict(model.named_parameters(remove_duplicate=False))
    wide = {imported.names[n]: p.detach().clone() for n, p in own.items() if precision and n in imported.names}
    trained = dict.fromkeys(imported.names[n] for n, p in own.items() if p.requires_grad and n in imported.names)
    if not trained:
        raise DistIRError("the model has no parameter that requires gradients", hint="requires_grad_(True)")
    return replace(imported, tensors={**imported.tensors, **wide}), tuple(trained)


def _check_optimizer(optimizer: Any) -> None:
    """Raise `DistIRError` for anything but an optimizer of this package."""
    if isinstance(optimizer, Optimizer):
        return
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        raise DistIRError(f"expected an optimizer, found the class {name}", hint=f"call it: {kind.__name__}(lr=1e-3)")
    ours = kind.__name__ if kind.__name__ in ("SGD", "Adam", "AdamW") else "AdamW"
    found = f"the class {name}" if isinstance(optimizer, type) else f"an object of type {name}"
    raise DistIRError(
        f"expected an optimizer of distir_relax, found {found}",
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


def _narrowed(tree: Any) -> Any:
    """A batch with bfloat16 in the place of wider floats."""
    import torch

    def narrow(leaf: Any) -> Any:
        wide = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if wide else leaf

    return tree_map(narrow, tree)


def _name(model: torch.nn.Module) -> str:
    return re.sub(r"\W+", "_", type(model).__name__).strip("_").lower() or "model"
