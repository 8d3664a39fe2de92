"""Compilation of a model, its loss and an optimizer to a distributed training step."""

from __future__ import annotations

import copy
import glob
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from distir_relax.bundle import AVERAGED, BACKENDS, Bundle, TrainingManifest, write_bundle
from distir_relax.checkpoints import DataPosition, read_parameters
from distir_relax.compiler.attention_bounds import bound_attention
from distir_relax.compiler.compile import Plan, compile_source
from distir_relax.compiler.deterministic import deterministic_options
from distir_relax.compiler.evaluation_totals import accumulated, evaluated_names, keep_totals
from distir_relax.compiler.given_shardings import complete_for
from distir_relax.compiler.lightning_hooks import BatchEndHook
from distir_relax.compiler.model_tensors import ModelTensors, copy_tensors
from distir_relax.compiler.options import CompileOptions, check_names, declared, documents
from distir_relax.compiler.origin import from_files, origin_of
from distir_relax.compiler.pass_pipeline import EvaluationConfig, TrainingConfig
from distir_relax.compiler.source import Source
from distir_relax.errors import CheckpointError, DistIRError, ImportModelError, RunError
from distir_relax.frontends.dynamic_shapes import DimSpec, fix_dims
from distir_relax.frontends.imported_model import Imported, eliminate_dead_ops, snapshot
from distir_relax.frontends.torch.importer import EXPORT_LOCK, import_torch
from distir_relax.frontends.torch.lightning_module import (
    ConfiguredOptimizer,
    check_lightning,
    configured_optimizer,
    has_batch_end_hook,
    has_validation_step,
    is_lightning,
    with_training_step,
    with_validation_step,
)
from distir_relax.frontends.torch.loss_module import LOSS, TOTALS, Loss, call_arguments, with_loss
from distir_relax.frontends.torch.module_modes import in_mode
from distir_relax.frontends.torch.trainer_arguments import read_arguments
from distir_relax.frontends.torch.trainer_settings import TrainerSettings
from distir_relax.frontends.torch.transformers_options import noisy_embeddings
from distir_relax.ir import NEXT_ROLE
from distir_relax.layout import print_placements, typical_value
from distir_relax.ops.elementwise.seed import SEED, takes_seed
from distir_relax.optimizers import (
    GRADIENT_NORM,
    LOSS_SCALE,
    OPTIMIZERS,
    AdamW,
    Averaging,
    LossScale,
    Optimizer,
    Update,
    Updates,
    from_torch,
    kinds_of,
    losses_of,
    rates_of,
)  # fmt: skip
from distir_relax.runtime.training.callbacks import Callback, EarlyStopping, StepResult, TimeLimit, logger
from distir_relax.runtime.training.callbacks.callback import call_with_weights
from distir_relax.strategies.pipeline_stages import weight_origins
from distir_relax.strategies.strategy import Strategy, as_strategy
from distir_relax.support.precisions import AUTOCAST_PRECISIONS, TRAINING_PRECISIONS, spelling
from distir_relax.support.tensor_bytes import tensor_digest
from distir_relax.support.torch_compat import tree_map

if TYPE_CHECKING:
    import torch

    from distir_relax.runtime.session import Session


_T = TypeVar("_T")
_NARROW = "bf16-true"
_REDUCE_DTYPES: Mapping[str | None, str] = {None: "", "float32": "", "bf16": "bfloat16", "fp16": "float16"}


class TrainingStep:
    """A training step compiled by `compile_training`: ``step(inputs, targets)`` updates the model, returns the loss.

    `plan` is the compiled program, `steps` the number of steps so far. The original model does not change.
    """

    def __init__(
        self, plan: Plan, optimizer: Optimizer, has_loss: bool, precision: str | None, seed: int,
        model_tensors: ModelTensors, compile_evaluation: Callable[[Plan], Plan], has_metrics: bool,
        callbacks: Sequence[Callback] = (), clip_norm: float | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.optimizer = optimizer
        self.steps = 0
        self.data_position: tuple[int, DataPosition] | None = None
        """The last step of a run (`dr.train`), and its position in the data; None before it."""
        self.gradient_norm: float | None = None
        """The norm of the gradients of the last call, before clipping; None before it, and if it is not measured."""
        self.losses: dict[str, float] = {}
        """The losses of the last call by name, of a step of several updates."""
        self.callbacks = tuple(callbacks)
        """Callbacks that are part of the step: hooks of a Lightning module."""
        self._exclusive = threading.RLock()
        self._clip_norm = clip_norm
        self._has_loss = has_loss
        self._precision = precision
        self._seed = seed
        self._model_tensors = model_tensors
        self._compile_evaluation = compile_evaluation
        self._has_metrics = has_metrics

    def __repr__(self) -> str:
        return f"step {self.steps} of {self.plan!r}"

    def __call__(
        self, inputs: Any, targets: Any = None, *, backend: str = "torch", timeout: float | None = None
    ) -> float:
        """Run a step on a batch, with ranks as threads of this process; return the batch's loss before the update.

        `inputs` and `targets` have the structure of the example. Raises `RunError` for a batch that differs from the
        example, and as calling a plan does.
        """
        tensors = self._flatten(self.plan, inputs, targets)
        with self._exclusive:
            losses = losses_of(self.optimizer)
            names = (self._loss, *losses, *self._measured)
            outputs = self.plan.session(backend)(self.numbers(tensors), timeout, outputs=names)
            self.steps += 1
            self.losses = {name: float(outputs[name]) for name in losses}
            self.gradient_norm = next((float(outputs[name]) for name in self._measured), None)
            if self.callbacks:
                self._call_callbacks(float(outputs[self._loss]), self.plan.session(backend))
        return float(outputs[self._loss])

    def _call_callbacks(self, loss: float, session: Session) -> None:
        for callback in self.callbacks:
            callback.done(StepResult(self.steps, loss, 0.0, 0))
        names = self._model_tensors.saved_values
        replaced = call_with_weights(self.callbacks, self.steps, names, session.state())
        session.replace_state(list(replaced), replaced)

    def evaluate(
        self, batches: Iterable[Any], *, averaged: bool = False, backend: str = "torch", timeout: float | None = None
    ) -> dict[str, float]:
        """Return the loss and the metrics of `compile_training` with the parameters at present, in evaluation mode.

        They do not depend on the cut into batches, if they are computed from sums over samples, returned as pairs, or
        objects with a state; others are means over batches, which weigh by their samples (docs/training.md). A batch is
        ``(inputs, targets)``, or `inputs` alone if the model returns its loss, as the example is. With `averaged`,
        parameters are their averages. Raises `RunError` for no batches, for averages of a step that keeps none, and as
        a step does.
        """
        if averaged and not any(name.endswith(AVERAGED) for name in self.plan.state_names):
            raise _no_averages()
        plan = self.evaluation
        main = plan.imported.module.main
        names, last = evaluated_names(main), accumulated(main)
        totals, count = dict.fromkeys(names, 0.0), 0
        with self._exclusive:
            session = plan.session(backend)
            session.copy_state(self.plan.session(backend), AVERAGED if averaged else "")
            for batch in batches:
                tensors = self._flatten(plan, *_batch(batch, self._has_loss))
                outputs = session(tensors, timeout, outputs=names)
                rows = next((len(x) for x in tensors.values() if x.dim()), 1)
                count += rows
                for name in names:
                    totals[name] = float(outputs[name]) if name in last else totals[name] + rows * float(outputs[name])
        if not count:
            raise RunError("expected batches to evaluate, found none")
        return {name: total if name in last else total / count for name, total in totals.items()}

    def _flatten(self, plan: Plan, inputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch by the input names of a plan, in the dtypes that it computes in."""
        inputs, targets = _in_precision(self._precision, inputs, targets)
        return plan.imported.flatten(*call_arguments(inputs, targets, self._has_loss))

    @cached_property
    def evaluation(self) -> Plan:
        """The plan that computes the loss and the metrics in evaluation mode, compiled on first use.

        Raises `DistIRError` for a step of several updates.
        """
        if losses_of(self.optimizer):
            raise DistIRError(
                "expected a step with one loss, found several updates", self.plan.name,
                "evaluate the model in torch, with the weights that copy_to_model gives",
            )  # fmt: skip
        return self._compile_evaluation(self.plan)

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

    @property
    def _measured(self) -> tuple[str, ...]:
        """The output with the gradient norm, if the step measures it."""
        return tuple(o.name for o in self.plan.modules["global"].main.outputs if o.name == GRADIENT_NORM)

    def parameters(self, backend: str = "torch", averaged: bool = False) -> dict[str, torch.Tensor]:
        """Return all parameters at present, by the model's names: global tensors that the caller owns.

        Parameters that the loss does not depend on have their initial values. With `averaged`, those that are trained
        are their averages; raises `RunError` if the step keeps none.
        """
        tensors = self._tensors(backend, averaged)
        used = {name: tensors[value] for name, value in self._model_tensors.parameter_values.items()}
        return {**used, **{name: value.clone() for name, value in self._model_tensors.unused.items()}}

    def copy_to_model(self, model: torch.nn.Module, averaged: bool = False, backend: str = "torch") -> None:
        """Copy all parameters at present, and the buffers that training changes, into `model`, for use in torch.

        `model` is the one that was compiled, or one like it: its tensors keep their dtypes and devices. Parameters of
        the loss are not copied. With `averaged`, trained parameters are their averages. Raises `CheckpointError`, and
        changes nothing, for a model with other names or shapes, and `RunError` as `parameters` does.
        """
        tensors = self._tensors(backend, averaged)
        used = {name: tensors[value] for name, value in self._model_tensors.model_values.items()}
        copy_tensors({**used, **self._model_tensors.unused}, model)

    def load_parameters(
        self, source: Mapping[str, torch.Tensor] | str | Path, *, averaged: bool = False, strict: bool = True,
        backend: str = "torch",
    ) -> None:  # fmt: skip
        """Replace the parameters, frozen ones too, and the buffers that training changes.

        `source` has tensors by the model's names (a `state_dict`), or is a path: a safetensors file, a folder that
        `save_pretrained` has written, a checkpoint or the folder of a run's checkpoints, or a folder of
        `torch.distributed.checkpoint`. With `averaged`, weights of a checkpoint are averages. Floats are converted
        to the dtype of the step's. Unless `strict`, names of other tensors are ignored, and tensors that are missing
        stay as they are. The optimizer's state, averages and `steps` stay, too; `plan` is a new one.

        Raises `CheckpointError`, and changes nothing, for files that cannot be read, and, with the name, for a tensor
        that is missing, unknown, or has another shape. A state dict may lack the parameters of the loss, and a
        checkpoint of a run those that training does not change.
        """
        tensors, optional, where = source, frozenset[str](), "load_parameters"
        files: Sequence[Path] = ()
        if not isinstance(tensors, Mapping):
            where = str(source)
            stored = read_parameters(Path(where), self._model_tensors.names, averaged)
            tensors, files = stored.tensors, stored.files
            if stored.partial:
                optional = frozenset(self.plan.imported.tensors.keys() - set(self.plan.state_names))
        elif averaged:
            raise CheckpointError("expected the path of a checkpoint, which may hold averages, found tensors", where)
        values, unused = self._model_tensors.match(tensors, self.plan.imported, optional, where, strict)
        keeps = not strict or bool(optional)
        with self._exclusive:
            # Before the first step, they are the plan's own.
            state = self.plan.session(backend).state() if self.steps else {}
            plan = _with_tensors(self.plan, {**state, **values})
            self.plan = replace(plan, imported=from_files(plan.imported, files, keeps, read=True))
            if "evaluation" in vars(self):
                self.evaluation = _with_tensors(self.evaluation, values)
            self._model_tensors = self._model_tensors.with_unused(unused)

    def replace_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace weights, by the program's names; `plan` is a new one, whose state is as before the first step."""
        with self._exclusive:
            self.plan = _with_tensors(self.plan, tensors)
            if "evaluation" in vars(self):
                self.evaluation = _with_tensors(self.evaluation, tensors)

    def _tensors(self, backend: str, averaged: bool) -> dict[str, torch.Tensor]:
        """Return the program's weights at present; if `averaged`, averages in place of trained ones."""
        state = self.plan.session(backend).state()
        averages = {name.removesuffix(AVERAGED): value for name, value in state.items() if name.endswith(AVERAGED)}
        if averaged and not averages:
            raise _no_averages()
        return {**self.plan.imported.tensors, **state, **(averages if averaged else {})}

    def save(self, path: str | Path, backends: Sequence[str] = BACKENDS, overwrite: bool = True) -> Path:
        """Write the bundle, with the current parameters and state; see `Plan.save`.

        Raises `DistIRError` for a step with callbacks, which are Python.
        """
        if self.callbacks:
            raise DistIRError(
                f"expected a step without hooks, which a bundle has not, found {type(self.callbacks[0]).__name__}",
                self.plan.name, "train it with dr.train, or write the hook as a callback for distir train --callbacks",
            )  # fmt: skip
        return write_bundle(self.bundle(backends), Path(path), overwrite)

    def bundle(self, backends: Sequence[str] = BACKENDS) -> Bundle:
        """Return the bundle in memory, with the current parameters and state.

        It has the evaluation if the step was compiled with `metrics`.
        """
        state = self.plan.session().state()
        current = replace(self.plan.imported, tensors={**self.plan.imported.tensors, **state})
        bundle = replace(self.plan, imported=current).bundle(backends).for_training(self._manifest())
        if not self._has_metrics:
            return bundle
        evaluated = replace(
            self.evaluation.imported, tensors={**self.evaluation.imported.tensors, **state}, origin=current.origin
        )
        evaluation = replace(self.evaluation, imported=evaluated).bundle(backends)
        main = evaluated.module.main
        return bundle.with_evaluation(evaluation, evaluated_names(main), accumulated(main))

    def _manifest(self) -> TrainingManifest:
        """Return the part of the manifest for `distir train`."""
        seed = SEED if takes_seed(self.plan.modules["global"].main) else None
        names = self._model_tensors.saved_values
        rates, norm = rates_of(self.optimizer), next(iter(self._measured), None)
        buffers = tuple(self._model_tensors.constants)
        return TrainingManifest(
            self._loss, rates, seed, self._seed, self.steps, names=names, gradient_norm=norm, buffers=buffers,
            losses=losses_of(self.optimizer), fixed=self.plan.imported.digests,
            settings={"optimizer": kinds_of(self.optimizer), "clip_norm": str(self._clip_norm)},
        )  # fmt: skip


def _checks_names(kind: type[_T]) -> type[_T]:
    """Make the constructor of a dataclass raise a TypeError that lists its options for one that it does not have."""
    construct, names = kind.__init__, [f.name for f in fields(kind)]  # type: ignore[arg-type]

    @wraps(construct)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        if later := [name for name in options if name in declared(CompileOptions)]:
            raise TypeError(
                f"{later[0]!r} is an option of compilation: {kind.__name__}(...).compile({later[0]}=...). "
                f"Expected one of {', '.join(names)}"
            )
        check_names(options, object, names)
        construct(self, *args, **options)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


@_checks_names
@dataclass(frozen=True, repr=False)
class Training:
    """A training to compile: arguments of `compile_training`, for a function in a user's file.

    ``distir compile FILE.py:FUNCTION --train`` and ``distir simulate`` take a function that returns one. Without an
    `optimizer` it is that of a Lightning module or of `arguments`, else AdamW; a list of updates becomes `Updates`.
    """

    model: torch.nn.Module
    loss: Loss | None = None
    optimizer: Optimizer | None = None
    example_batch: Any = None
    clip_norm: float | None = None
    precision: str | None = None
    seed: int = 0
    dynamic_shapes: DimSpec | None = None
    dims: Mapping[str, Any] | None = None
    averaging: Averaging | None = None
    metrics: Mapping[str, Loss] | None = None
    gradient_norm: bool = False
    loss_scale: LossScale | None = None
    deterministic: int | None = None
    reduce_dtype: str | None = None
    arguments: Any = None
    steps_per_epoch: int | None = None
    label_smoothing: float = 0.0
    neftune_noise_alpha: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", _as_optimizer(self.optimizer))

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {getattr(self.loss, '__name__', type(self.loss).__name__)}"
        optimizer = "" if self.optimizer is None else f", {type(self.optimizer).__name__}"
        return f"<training of {type(self.model).__name__}{loss}{optimizer}>"

    @cached_property
    def resolved(self) -> Training:
        """The training with the optimizer, clipping, precision and seed that a Lightning module and `arguments` have.

        Those that are set here stay. Raises a `DistIRError` for a module or arguments without an equal here.
        """
        self._check_lightning()
        settings, optimizer = self._settings, self.optimizer
        if optimizer is None:
            configured = configured_optimizer(self.model) if self._is_lightning else settings.optimizer
            optimizer = AdamW() if configured is None else self._convert(configured)
        return replace(
            self, optimizer=optimizer, clip_norm=settings.clip_norm if self.clip_norm is None else self.clip_norm,
            precision=self.precision or settings.precision, seed=self.seed or settings.seed, arguments=None,
            label_smoothing=self.label_smoothing or settings.label_smoothing,
            neftune_noise_alpha=self.neftune_noise_alpha or settings.neftune_noise_alpha,
        )  # fmt: skip

    def run_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `dr.train` that `arguments` have: ``dr.train(step, data, **run_options())``.

        Raises `ImportModelError` as `compile_training` does, and for a training without `arguments`.
        """
        if self.arguments is None:
            raise DistIRError("expected a training with the arguments of a loop, found none", "run_options")
        options, settings = dict(self._settings.run), self._settings
        callbacks: list[Any] = [_made_logger(path) for path in settings.logs]
        callbacks += [EarlyStopping(**chosen) for chosen in settings.early_stopping]
        if settings.max_seconds is not None:
            callbacks.append(TimeLimit(settings.max_seconds))
        return {**options, "callbacks": callbacks} if callbacks else options

    @cached_property
    def _settings(self) -> TrainerSettings:
        if self.arguments is None:
            return TrainerSettings()
        return read_arguments(self.arguments, self.model, self.steps_per_epoch)

    @property
    def _is_lightning(self) -> bool:
        return is_lightning(self.model)

    def _check_lightning(self) -> None:
        """Raise a `DistIRError` for a Lightning module whose step cannot be compiled, or that has a loss besides."""
        if not self._is_lightning:
            return
        check_lightning(self.model)
        if self.loss is not None or self.metrics is not None:
            raise DistIRError(
                "expected no loss and no metrics for a Lightning module, whose steps compute and log them",
                type(self.model).__name__,
            )

    def _convert(self, configured: ConfiguredOptimizer) -> Optimizer:
        """Return the optimizer of a Lightning module or of `arguments`, with its scheduler."""
        calls, epoch = configured.frequency, self._settings.steps_per_epoch or self.steps_per_epoch
        if configured.scheduler is not None and epoch is None and (configured.epochs or calls > 1):
            raise DistIRError(
                "expected the number of steps of an epoch, by which the scheduler is stepped",
                type(configured.scheduler).__name__, "pass steps_per_epoch=len(loader)",
            )  # fmt: skip
        if configured.epochs:
            calls, epoch = calls * (epoch or 1), None
        else:
            # Lightning counts the batches of an epoch, of which a step takes as many as it accumulates.
            calls //= math.gcd(calls, self._settings.accumulation)
        return from_torch(
            configured.optimizer, self.model, configured.scheduler, steps=self._settings.run.get("steps"),
            steps_per_call=calls, steps_per_epoch=epoch,
        )  # fmt: skip

    def _with_arguments(self, options: CompileOptions) -> CompileOptions:
        """Return options of compilation with the microbatches and the recomputation that `arguments` have."""
        settings = self._settings
        if settings.accumulation == 1 and not settings.recomputes:
            return options
        strategy = options.get("strategy")
        present = Strategy() if strategy is None else as_strategy(strategy)
        if settings.accumulation > 1:
            if present.microbatches not in (1, settings.accumulation):
                raise DistIRError(
                    f"expected the {settings.accumulation} microbatches of the arguments, found {present.microbatches}",
                    f"strategy {present}",
                )
            present = present.replace(microbatches=settings.accumulation)
        if settings.recomputes and present.checkpoint == "none":
            present = present.replace(checkpoint="block")
        return {**options, "strategy": present}

    def read(self, options: CompileOptions | None = None) -> Source:
        """Import the model with its loss, to be compiled with these options; raises what `compile_training` does.

        Without any sharding it is for one device.
        """
        if self.arguments is not None or self.optimizer is None:
            with in_mode(self.model, training=True) if self._settings.trains else nullcontext():
                return self.resolved.read(self._with_arguments(options or {}))
        self._check_lightning()
        _check_optimizer(self.optimizer)
        if self.precision not in (None, *TRAINING_PRECISIONS):
            raise DistIRError(
                f"expected a precision of {' or '.join(TRAINING_PRECISIONS)} for training, found {self.precision!r}",
                hint=spelling(self.precision) or "weights of 8 and 4 bits are for inference",
            )
        self._check_several(options or {})
        imported, trained = self._import()
        if isinstance(self.optimizer, Updates):
            self.optimizer.check_parameters(trained)
        scale = self.loss_scale or (LossScale() if self.precision == "fp16" else None)
        if scale is not None:
            imported = replace(imported, tensors={**imported.tensors, LOSS_SCALE: _scalar(scale.init)})
        if self.reduce_dtype not in _REDUCE_DTYPES:
            names = ", ".join(str(name) for name in _REDUCE_DTYPES)
            raise DistIRError(f"expected a reduce_dtype of {names}, found {self.reduce_dtype!r}")
        rest = (self.clip_norm, self._is_narrow, self.averaging, self.gradient_norm, scale, self.deterministic)
        step = TrainingConfig(self.optimizer, trained, *rest, _REDUCE_DTYPES[self.reduce_dtype])
        complete_options = self._options(options or {}, imported)
        if self.deterministic is not None:
            if _REDUCE_DTYPES[self.reduce_dtype]:
                raise DistIRError("`deterministic` adds up gradients in float32", hint="leave reduce_dtype out")
            complete_options = deterministic_options(complete_options, imported.module, self.deterministic)
        return Source(imported, complete_options, step)

    def step(self, plan: Plan, options: CompileOptions) -> TrainingStep:
        """Return the step of a plan that was compiled from what `read` returns, with these options."""
        if self.arguments is not None or self.optimizer is None:
            return self.resolved.step(plan, self._with_arguments(options))
        has_metrics = self.metrics is not None or (self._is_lightning and has_validation_step(self.model))

        def compile_evaluation(step: Plan) -> Plan:
            return _with_tensors(self._compile_evaluation(step, options), step.imported.tensors)

        return TrainingStep(
            plan, self.optimizer, self.loss is not None, self.precision, self.seed,
            ModelTensors.of(self.model, plan.imported), compile_evaluation, has_metrics,
            (BatchEndHook(self.model),) if self._is_lightning and has_batch_end_hook(self.model) else (),
            self.clip_norm,
        )  # fmt: skip

    def _compile_evaluation(self, step: Plan, options: CompileOptions) -> Plan:
        """Compile the evaluation for batches of any size, unless the model or its layouts need that of the example."""
        if spec := self._any_batch(step.imported):
            try:
                return compile_source(self.read_evaluation(step, options, spec))
            except DistIRError:
                # A model that does not run at all raises its own error below.
                pass
        return compile_source(self.read_evaluation(step, options))

    def _any_batch(self, imported: Imported) -> DimSpec | None:
        """Return the first dims of all inputs as one symbolic dim; None if their dims are declared, or differ."""
        shapes = {i.value.name: i.value.tensor.shape for i in imported.module.main.inputs if i.role == "input"}
        sizes = {shape[:1] for name, shape in shapes.items() if name != SEED}
        if self.dynamic_shapes or self.dims or len(sizes) != 1 or sizes <= {(), (0,), (1,)}:
            return None
        return {name: {0: "batch"} for name in shapes if name != SEED}

    def read_evaluation(
        self, step: Plan, options: CompileOptions | None = None, dynamic_shapes: DimSpec | None = None
    ) -> Source:
        """Import the model in evaluation mode with its loss and the metrics, to be compiled with these options.

        The weights that the training `step` changes have its layouts. The program returns the loss and the metrics by
        name. `dynamic_shapes` replaces those of the training. Raises what `read` raises, and `ImportModelError` for a
        metric that is no scalar.
        """
        layouts = {
            item.value.name: print_placements(item.value.dtensor.placements)
            for item in step.modules["sharded"].main.inputs
            if item.value.name in step.state_names
        }
        imported = self._import_evaluation(layouts, dynamic_shapes or self.dynamic_shapes)
        complete_options = self._options(options or {}, imported)
        given = complete_options["shardings"]
        if step.modules["sharded"].meshes:
            weights = {glob.escape(name): layouts[value] for name, value in imported.names.items() if value in layouts}
            complete_options["shardings"] = {**({} if given is None or isinstance(given, str) else given), **weights}
            complete_options["mesh"] = complete_options["mesh"] or step.modules["sharded"].meshes[0]
        assert self.optimizer is not None, "a resolved training has one"
        states = TrainingConfig(self.optimizer, averaging=self.averaging).states
        evaluation = EvaluationConfig(tuple(layouts), states, self._is_narrow, _weights_of_stages(step))
        return Source(imported, complete_options, evaluation=evaluation)

    def _check_several(self, options: CompileOptions) -> None:
        """Raise a `DistIRError` for several updates with options that are for a single one."""
        if not isinstance(self.optimizer, Updates):
            return
        strategy = options.get("strategy")
        present = Strategy() if strategy is None else as_strategy(strategy)
        found = {
            "metrics": self.metrics is not None, "gradient_norm": self.gradient_norm, "precision='fp16'":
            self.precision == "fp16", "loss_scale": self.loss_scale is not None,
            "deterministic": self.deterministic is not None, "label_smoothing": bool(self.label_smoothing),
            f"the strategy {present}": present.microbatches > 1 or present.pipeline > 1,
        }  # fmt: skip
        if others := [name for name, is_given in found.items() if is_given]:
            raise DistIRError(
                f"expected a single update for {others[0]}, found {len(self.optimizer.updates)}", "optimizer",
                "several updates take the whole batch at once, on any number of data and tensor ranks",
            )  # fmt: skip

    def _options(self, options: CompileOptions, imported: Imported) -> CompileOptions:
        """Return complete options of compilation: without any sharding, those for one device."""
        complete_options = complete_for(options, _name(self.model), self.model, imported)
        strategy, mesh, shardings = (complete_options[key] for key in ("strategy", "mesh", "shardings"))
        if strategy is None and mesh is None and shardings != "auto" and not imported.module.meshes:
            complete_options["strategy"] = Strategy()
        return complete_options

    @property
    def _autocast(self) -> str:
        """The dtype of products, as torch's autocast has it; "" without."""
        return AUTOCAST_PRECISIONS.get(self.precision or "", "")

    @property
    def _is_narrow(self) -> bool:
        return self.precision == _NARROW

    def _import(self) -> tuple[Imported, tuple[str, ...]]:
        """Import the model with its loss; return it with the values of the parameters that require gradients."""
        model, loss = self.model, self.loss
        computed, computed_loss, args, kwargs = self._computed()
        # Import temporarily replaces the model's forward.
        with EXPORT_LOCK:
            noise = self.neftune_noise_alpha
            with self._calling(computed, computed_loss), noisy_embeddings(computed, noise) if noise else nullcontext():
                imported = import_torch(
                    computed, args, kwargs, training=True, dynamic_shapes=self.dynamic_shapes, dims=self.dims,
                    autocast=self._autocast,
                )  # fmt: skip
                imported = bound_attention(snapshot(fix_dims(imported, self.dims or {})))
            with with_loss(model, loss):
                parameters = dict(model.named_parameters(remove_duplicate=False))
                digests = {name: tensor_digest(attrgetter(name)(model)) for name in sorted(imported.fixed)}
        names, masters = imported.names, parameters if self._is_narrow else {}
        weights = {item.value.name for item in imported.module.main.inputs if item.role == "parameter"}
        wide = {names[n]: p.detach().clone() for n, p in masters.items() if names.get(n) in weights}
        trained = dict.fromkeys(names[n] for n, p in parameters.items() if p.requires_grad and n in names)
        if not trained:
            raise DistIRError("the model has no parameter that requires gradients", hint="requires_grad_(True)")
        tensors = {**imported.tensors, **wide}
        return replace(imported, tensors=tensors, origin=origin_of(model), digests=digests), tuple(trained)

    def _calling(
        self, computed: torch.nn.Module, loss: Loss | None, metrics: Mapping[str, Loss] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which a call of the model that computes returns its loss, and the metrics."""
        if not 0 <= self.label_smoothing < 1:
            raise DistIRError(f"expected a factor from 0 to below 1, found {self.label_smoothing}", "label_smoothing")
        if self.label_smoothing and (loss is not None or self._is_lightning):
            raise DistIRError(
                "expected no loss with label_smoothing, which is for transformers models that return their loss",
                "label_smoothing", "F.cross_entropy has an option of this name",
            )  # fmt: skip
        if self._is_lightning:
            return with_training_step(computed)
        several = losses_of(self.optimizer)
        return with_loss(computed, loss, metrics, self.label_smoothing, several)

    def _computed(self) -> tuple[torch.nn.Module, Loss | None, tuple[Any, ...], dict[str, Any]]:
        """Return the model and the loss that compute, copies in another precision, and the example call."""
        import torch

        inputs, targets = _in_precision(self.precision, *_batch(self.example_batch, self.loss is not None))
        model, loss = self.model, self.loss
        if self._autocast or self._is_narrow:
            dtype = torch.float32 if self._autocast else torch.bfloat16
            model = _in_dtype(model, dtype)
            loss = _in_dtype(loss, dtype) if isinstance(loss, torch.nn.Module) else loss
        return model, loss, *call_arguments(inputs, targets, loss is not None)

    def _import_evaluation(self, changed: Collection[str], dynamic_shapes: DimSpec | None) -> Imported:
        computed, loss, args, kwargs = self._computed()
        metrics = dict(self.metrics or {})
        if LOSS in metrics:
            raise DistIRError(f"expected metrics of other names than {LOSS!r}, which is that of the loss")
        calling = with_validation_step(computed) if self._is_lightning else self._calling(computed, loss, metrics)
        with EXPORT_LOCK, in_mode(computed, training=False), calling:
            shapes: Any = {"dynamic_shapes": dynamic_shapes, "dims": self.dims, "autocast": self._autocast}
            imported = _without_updates(import_torch(computed, args, kwargs, changing=changed, **shapes))
            imported = snapshot(fix_dims(imported, self.dims or {}))
        main = imported.module.main
        for output in main.outputs:
            if output.value.tensor.shape and output.role != NEXT_ROLE:
                raise ImportModelError(
                    f"expected a scalar for {output.name!r}, found {output.value.tensor}", hint="take the mean"
                )
        shapes = [i.value.tensor.shape for i in main.inputs if i.role == "input"]
        rows = next((typical_value(shape[0]) for shape in shapes if shape), 1)
        return keep_totals(imported, (*metrics, *evaluated_names(main)), rows)

    def compile(self, **options: Any) -> TrainingStep:
        """Compile the training step, with more options of `compile_training`; raises what that raises."""
        arguments = {f.name: getattr(self, f.name) for f in fields(self)} | options
        return compile_training(arguments.pop("model"), arguments.pop("loss"), **arguments)


@documents(CompileOptions)
def compile_training(
    model: torch.nn.Module,
    loss: Loss | None = None,
    *,
    optimizer: Optimizer | Sequence[Update] | None = None,
    example_batch: Any,
    clip_norm: float | None = None,
    precision: str | None = None,
    seed: int = 0,
    dynamic_shapes: DimSpec | None = None,
    dims: Mapping[str, Any] | None = None,
    averaging: Averaging | None = None,
    metrics: Mapping[str, Loss] | None = None,
    gradient_norm: bool = False,
    loss_scale: LossScale | None = None,
    deterministic: int | None = None,
    reduce_dtype: str | None = None,
    arguments: Any = None,
    steps_per_epoch: int | None = None,
    label_smoothing: float = 0.0,
    neftune_noise_alpha: float | None = None,
    **options: Unpack[CompileOptions],
) -> TrainingStep:
    """Compile a training step of `model`, in its current mode, for the devices of a strategy.

    `loss(output, targets)` is torch code that returns a scalar; if it is a module, its parameters are trained too.
    Without it the model returns its loss, as transformers models called with labels do. `example_batch` is ``(inputs,
    targets)``, or ``inputs`` alone without a `loss`: `inputs` is a tensor, a tuple, or a dict of keyword arguments. All
    parameters that require gradients are trained. `clip_norm` clips their global gradient norm, which is then measured
    (`TrainingStep.gradient_norm`), as with ``gradient_norm=True``. With ``precision="bf16"`` the model runs as under
    ``torch.autocast``: products in bfloat16, weights and all else in float32; ``"fp16"`` is the same with float16, and
    the loss is scaled. With ``"bf16-true"`` the model is in bfloat16 itself, with copies of its weights in float32 that
    are updated. Gradients are summed in float32; with ``reduce_dtype="bf16"`` those of ranks in bfloat16. `loss_scale`
    has other options of scaling than the default ones, for any precision. `seed` is that of dropout. `dynamic_shapes`
    names dims of inputs and ``targets`` that differ from batch to batch, as for `compile`, and `dims` gives bounds of
    them. With `averaging`, such as ``dr.optim.EMA(0.999)``, the step keeps averages of the trained parameters
    (`TrainingStep.parameters`). `metrics` are functions ``metric(output, targets)`` by name that return a scalar, or a
    pair (sum, count), and objects with `update`, `compute` and `reset`, such as those of torchmetrics:
    `TrainingStep.evaluate` computes them. With `deterministic` the batch is cut into that number of pieces, whose
    gradients are added in order: steps have the same bits on each number of data-parallel ranks that divides it. The
    other options are those of `compile`; without any sharding the model runs on one device.

    `optimizer` may be a list of `Update`, each of its own parameters by its own loss, such as those of a GAN. Then the
    model, or `loss`, returns a dict of losses by name, and `TrainingStep.losses` has them.

    `model` may be a Lightning module: it has its loss, its optimizer and the metrics of its `validation_step`.
    `arguments` are ``transformers.TrainingArguments`` or a Lightning ``Trainer``: optimizer, schedule, clipping,
    precision, microbatches and seed are theirs unless they are set here. `steps_per_epoch` is needed where epochs are
    counted. Without any optimizer it is AdamW. `label_smoothing` and `neftune_noise_alpha` are those of transformers'
    `Trainer`, for its models.

    Raises a `DistIRError`: as `compile` does, for an optimizer not of this package, for gradient hooks, for a loss
    that is not a scalar or does not depend on a trained parameter, and for a module or arguments without an equal here.
    """
    check_names(options, CompileOptions, [f.name for f in fields(Training)])
    training = Training(
        model, loss, _as_optimizer(optimizer), example_batch, clip_norm, precision, seed, dynamic_shapes, dims,
        averaging, metrics, gradient_norm, loss_scale, deterministic, reduce_dtype, arguments, steps_per_epoch,
        label_smoothing, neftune_noise_alpha,
    )  # fmt: skip
    return training.step(compile_source(training.read(options)), options)


def _without_updates(imported: Imported) -> Imported:
    """Return an imported model without the new values of its state, which an evaluation leaves as it is.

    The state of metrics is not its own.
    """
    main, *others = imported.module.functions
    count = len(imported.results)
    kept = [output for output in main.outputs[count:] if output.name.startswith(f"{TOTALS}.")]
    main = eliminate_dead_ops(replace(main, outputs=(*main.outputs[:count], *kept)))
    values = {item.value.name for item in main.inputs}
    return replace(
        imported, module=replace(imported.module, functions=(main, *others)), written={},
        tensors={name: tensor for name, tensor in imported.tensors.items() if name in values},
        names={name: value for name, value in imported.names.items() if value in values},
    )  # fmt: skip


def _made_logger(path: str) -> Callback:
    """Return the logger of another loop, which makes the folder of its file."""
    if path.endswith(".csv"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return logger(path)


def _with_tensors(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> Plan:
    """Return the plan with other weights, which are loaded when it runs."""
    return replace(plan, imported=replace(plan.imported, tensors={**plan.imported.tensors, **tensors}))


def _no_averages() -> RunError:
    return RunError("this step keeps no averages of parameters", hint="compile it with averaging=dr.optim.EMA(0.999)")


def _weights_of_stages(step: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the parameters of each stage of a pipeline; empty without one."""
    main = step.modules["global"].main
    origins = weight_origins(main)
    stages: dict[Any, dict[str, None]] = {}
    for op in main.ops:
        if op.task and op.attrs["kind"] == "F":
            names = dict.fromkeys(origins[v.name] for v in op.operands if v.name in origins)
            stages.setdefault(op.attrs["stage"], {}).update(names)
    return tuple(tuple(stages[stage]) for stage in sorted(stages))


def _as_optimizer(given: Optimizer | Sequence[Update] | None) -> Optimizer | None:
    """Return an optimizer of all updates of a list."""
    return Updates(tuple(given)) if isinstance(given, (list, tuple)) else given  # type: ignore[return-value]


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
        hint=f"pass dr.optim.{ours}(lr=...), which has torch's options, "
        f"dr.optim.TorchOptimizer({kind.__name__}, lr=...) for a class of torch.optim.Optimizer whose step is "
        "elementwise, or a dr.optim.Optimizer of your own",
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


def _in_precision(precision: str | None, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Cast the floats of a batch for a model that is in bfloat16 itself."""
    import torch

    def narrow(leaf: Any) -> Any:
        return leaf.bfloat16() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(narrow, (inputs, targets)) if precision == _NARROW else (inputs, targets)


def _in_dtype(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return a module whose floats of at most 32 bits have this dtype: itself, or a copy of one that has others."""
    import torch

    others = {torch.float32, torch.bfloat16, torch.float16} - {dtype}
    has_others = any(tensor.dtype in others for tensor in (*module.parameters(), *module.buffers()))
    return copy.deepcopy(module).to(dtype) if has_others else module


def _scalar(number: float) -> torch.Tensor:
    import torch

    return torch.tensor(number, dtype=torch.float32)


def _name(model: torch.nn.Module) -> str:
    return re.sub(r"\W+", "_", type(model).__name__).strip("_").lower() or "model"
