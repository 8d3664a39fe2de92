"""Compilation of a model to a plan with one program per distinct rank."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from distir_relax.autosharding import PlaceBySearch
from distir_relax.autosharding.serialize import print_search
from distir_relax.bundle import BACKENDS, STAGE_FILES, Bundle, CallManifest, OnWritten, write_bundle
from distir_relax.compiler.attention_bounds import bound_attention
from distir_relax.compiler.given_shardings import complete_for
from distir_relax.compiler.import_precision import import_in_precision, is_torch
from distir_relax.compiler.options import ImportOptions, ModelOptions, documents, import_options
from distir_relax.compiler.origin import from_files, origin_of
from distir_relax.compiler.pass_manager import Dump, Observer, Stages, run_passes
from distir_relax.compiler.pass_pipeline import RANK_PASSES
from distir_relax.compiler.plan_summary import Overview
from distir_relax.compiler.source import Source
from distir_relax.counterexample import Stages as Programs
from distir_relax.counterexample import find_counterexample
from distir_relax.errors import DistIRError, VerificationError
from distir_relax.frontends.checkpoint import checkpoint_files, with_checkpoint
from distir_relax.frontends.dynamic_shapes import fix_dims
from distir_relax.frontends.imported_model import Imported, snapshot
from distir_relax.frontends.outline_blocks import Outline
from distir_relax.ir import Gather, Module, Pass, print_module
from distir_relax.ir.symbols import check_symbols, module_symbols, specialize
from distir_relax.layout import DeviceMesh, Symbol
from distir_relax.lowering.emit.bundle import program_to_bundle, to_bundle
from distir_relax.optimizers import with_state
from distir_relax.precision import WEIGHT_FORMATS, quantize_weights
from distir_relax.proof import Proof, Refuted, prove
from distir_relax.runtime.session_cache import Sessions
from distir_relax.sharding import layout_comments
from distir_relax.simulation.footprint import Footprint, footprint
from distir_relax.support.precisions import check_precision
from distir_relax.support.torch_compat import tree_leaves

if TYPE_CHECKING:
    import torch
    import tvm

    from distir_relax.autosharding.alternatives import Alternatives
    from distir_relax.runtime.session import Session


class ImplicitGatherWarning(UserWarning):
    """A sharded tensor is gathered without a request."""


@dataclass(repr=False)
class Plan:
    """A compiled model: one program per distinct rank, and the program at each stage.

    `modules` holds the program at each stage (``global``, ``sharded``, ``distributed``, ``ranked``), with the records
    of the passes (`Module.records`); `seconds` is the time of each pass. `texts` are further files of the bundle, those
    of a tokenizer. `encoder` computes the states that the calls for a sequence share, and `start` is the token that the
    decoder begins with. `proof` is the result of comparing it with the model (`check=True`). `plan(x)` runs it with
    ranks as threads of this process, and returns the model's results.
    """

    name: str
    imported: Imported
    modules: Mapping[str, Module]
    tail: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    encoder: Plan | None = None
    start: int = 0
    proof: Proof | None = None
    _passes: Sequence[Pass] = ()
    _source: Source | None = None
    _sessions: Sessions = field(init=False)

    def __post_init__(self) -> None:
        self._sessions = Sessions(lambda backend: self.bundle(()))

    def __repr__(self) -> str:
        return str(self._overview)

    def _repr_html_(self) -> str:
        """HTML representation for notebooks."""
        return self._overview.html()

    @property
    def _overview(self) -> Overview:
        return Overview.of(self.name, self.modules, self.tail, sum(self.seconds.values()))

    @property
    def footprint(self) -> Footprint:
        """Number of programs, weights of each rank, with those of the encoder, and bytes that each sends in a run."""
        own = footprint(self.modules["distributed"], self.modules["ranked"])
        if self.encoder is None:
            return own
        weights = zip(own.weights, self.encoder.footprint.weights, strict=True)
        return replace(own, weights=tuple(map(sum, weights)))

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of the plan."""
        return self.modules["distributed"].meshes[0]

    def text(self, stage: str) -> str:
        """Return the text of the program at a stage; the sharded stage has the reason for each placement."""
        return print_module(self.modules[stage], layout_comments(self.modules[stage]) if stage == "sharded" else None)

    def at(self, **sizes: int) -> Plan:
        """Return the plan for fixed values of some symbols: ``plan.at(sequence=512)``.

        Its programs take inputs of these sizes only. Raises `DistIRError` for a name that is not one of its symbols, a
        value out of bounds, and one that violates a guard.
        """
        check_symbols(sizes, self.symbols)
        modules = {stage: specialize(module, sizes) for stage, module in self.modules.items()}
        imported = replace(self.imported, module=specialize(self.imported.module, sizes))
        encoder = self.encoder
        if encoder is not None:
            encoder = encoder.at(**{name: size for name, size in sizes.items() if name in encoder.symbols})
        return replace(self, imported=imported, modules=modules, encoder=encoder)

    def part(self, step: Pass) -> Plan:
        """Return the plan of a part of its program: the pass `step` selects one of the distributed program."""
        module = self.modules["distributed"]
        run_passes(module, [step, *RANK_PASSES], [stages := Stages(), *self.source.checks])
        return replace(self, modules={**self.modules, **stages.modules}, seconds={**self.seconds, **stages.seconds})

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the weights that the program changes."""
        main = self.modules["global"].main
        changed = {*main.next_values, *(i.value.name for i in main.inputs if i.role == "state")}
        return tuple(i.value.name for i in main.inputs if i.value.name in changed)

    @property
    def symbols(self) -> dict[str, Symbol]:
        """The symbols of its sizes, by name."""
        return module_symbols(self.modules["distributed"])

    @property
    def source(self) -> Source:
        """The imported model, to be compiled again with other options."""
        assert self._source is not None, "a plan is compiled from a source"
        return replace(self._source, imported=self.imported)

    def bundle(self, backends: Sequence[str] = BACKENDS) -> Bundle:
        """Return the bundle in memory, with the weights as they were when the model was compiled.

        The code of `backends` is generated once, so that ops without it are refused now; any backend can run it.
        """
        bundle = to_bundle(
            self.name,
            self.modules["sharded"],
            self.modules["distributed"],
            self.modules["ranked"],
            self.imported.tensors,
            self.tail,
            tuple(backends),
            self.source.options["fast_math"],
            self.imported.origin,
        )
        if self.imported.arguments:
            bundle = bundle.called(CallManifest.of(self.imported.arguments, self.imported.constants))
        bundle = bundle.with_texts({**self.texts, STAGE_FILES["global"]: print_module(self.imported.module)})
        if self.encoder is not None:
            bundle = bundle.with_encoder(self.encoder.bundle(backends), self.start)
        search = self._search
        return bundle if search is None else bundle.with_texts(print_search(search, self.modules["global"]))

    @property
    def alternatives(self) -> Alternatives:
        """Costs of other layouts, by function and value: ``plan.alternatives.best("main", "w", layout)``.

        Raises `DistIRError` for a plan without a search for placements.
        """
        from distir_relax.autosharding.alternatives import Alternatives

        if self._search is None:
            raise DistIRError("this plan's placements were not searched", hint='compile with shardings="auto"')
        return Alternatives(self._search, self.modules["global"])

    @property
    def _search(self) -> PlaceBySearch | None:
        return next((step for step in self._passes if isinstance(step, PlaceBySearch)), None)

    def save(
        self,
        path: str | Path,
        backends: Sequence[str] = BACKENDS,
        overwrite: bool = True,
        weights: Literal["refer", "copy"] = "refer",
        on_written: OnWritten | None = None,
    ) -> Path:
        """Write the bundle folder at `path` atomically; see ``docs/bundle.md``.

        An existing bundle is replaced unless `overwrite` is false; anything else is never overwritten. The weights of
        a model folder (`compile_generation`) stay there: the bundle refers to its files, unless `weights` is "copy".
        `on_written` is called after each weight of the bundle, with the bytes that were written, and those of all.
        Raises `BundleError` if `path` cannot be written.
        """
        return write_bundle(self.bundle(backends), Path(path), overwrite, weights == "refer", on_written)

    def __call__(self, *args: Any, backend: str = "torch", timeout: float | None = None, **kwargs: Any) -> Any:
        """Run the plan on the model's own arguments, with ranks as threads of this process; return the model's result.

        The first call of a backend loads it. Calls from several threads run one after the other. Raises `RunError` for
        arguments that do not match the example's, for an unknown backend, and if a rank waits for others for
        more than `timeout` seconds (120 by default; 0: never).
        """
        inputs = self.imported.flatten(args, kwargs)
        # New values of state stay on their ranks.
        results = self.imported.results
        outputs_needed = [*results, *self.imported.written] if results else None
        outputs = self._sessions.run(inputs, backend, timeout, outputs_needed)
        for output, name in self.imported.written.items():
            inputs[name].copy_(outputs[output])
        return self.imported.rebuild(outputs)

    def session(self, backend: str = "torch") -> Session:
        """Return the session that calls of the plan use: loaded on a backend, with ranks as threads of this process.

        Raises `RunError` for an unknown backend, and if a failed run has lost the state.
        """
        return self._sessions.of(backend)

    def to_onnx_sharding(self, model: Any) -> Any:
        """Return a copy of an ONNX model with this plan's layouts as multi-device metadata (IR version 11).

        `model` is the path or the `onnx.ModelProto` that the plan was compiled from. Raises `PlacementError` for a
        mesh of several axes, and for sizes that the metadata cannot express.
        """
        from distir_relax.frontends.onnx.multi_device_metadata import write_sharding
        from distir_relax.frontends.onnx.tensors import load_model

        return write_sharding(load_model(model), self._inline_sharded(), self.imported.values)

    def to_relax(self) -> tuple[dict[str, tvm.IRModule], tuple[str, ...]]:
        """Return the programs of the ranks as plain Relax, by name, and the name of each rank's program.

        Each module holds one function, whose parameters are the rank's shards, and whose communication is packed calls;
        ``docs/tvm.md`` describes how to build and run it. Raises `VerificationError` if TVM infers another type for an
        op than the op table.
        """
        from distir_relax.lowering.emit.relax import to_relax_programs

        programs = to_relax_programs(self.modules["ranked"], self.source.options["fast_math"])
        return programs, self.modules["ranked"].ranks

    def to_relax_dtensor(self, pending: str = "") -> tvm.IRModule:
        """Return the sharded program with TVM's `R.DTensor` types and `R.dist.redistribute`; see ``docs/tvm.md``.

        Relax has no partial sums. With `pending="R"` they are typed ``R``, as by TVM's own propagation, and the
        reduction is implicit; by default they raise. Raises `PlacementError` for a layout, and `UnsupportedOpError` for
        an op, that Relax cannot express; ValueError for another `pending`.
        """
        from distir_relax.lowering.emit.relax_dtensor import to_relax_dtensor

        return to_relax_dtensor(self._inline_sharded(), pending)

    def _inline_sharded(self) -> Module:
        """Return the sharded program without functions; its values have the model's names."""
        if len(self.modules["sharded"].functions) == 1:
            return self.modules["sharded"]
        before = takewhile(lambda step: step.gives != "distributed", self._passes)
        return run_passes(self.imported.module, [step for step in before if not isinstance(step, Outline)])


def bind(plan: Plan, **sizes: int) -> Plan:
    """Return a plan for fixed values of some symbols: ``dr.bind(plan, sequence=512)``. See `Plan.at`."""
    return plan.at(**sizes)


@documents(ModelOptions)
def compile(
    model: Any,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[ModelOptions],
) -> Plan:
    """Compile `model` for the devices of a mesh.

    `model` is a `torch.nn.Module` with an example call that determines its shapes, a TVM `IRModule`, an ONNX model (a
    path or an `onnx.ModelProto`), or (program, tensors): a program of the global stage, with its parameters and
    constants by name. Annotations stand in the model (`annotate_sharding`), or are passed as `shardings` together with
    a `mesh`: a `DeviceMesh`, its shape, or a number of devices. With ``shardings="auto"`` an optimization chooses the
    placements that take the least time on the machine of `profile` (``docs/placements.md``). A `strategy`, such as
    ``"2/4/1/1"``, shards the batch and the weights that annotations leave open (``docs/strategies.md``).

    `precision` is that of weights and activations, "float32" or "bf16", by default the model's own; inputs and outputs
    keep their dtypes. With "int8", "int8-channel" or "int4" the weights of linear layers and experts are stored in 8 or
    4 bits (`quantize_weights`). Weights whose names match a pattern of `keep` stay as they are (``docs/precision.md``).

    The plan holds a copy of the weights as they are now. A model on the meta device can be compiled and simulated;
    with `checkpoint` its weights are read when they are needed.

    Raises a `DistIRError`: `ImportModelError` and `UnsupportedOpError` for a model that cannot be imported,
    `AnnotationError` and `PlacementError` for annotations that cannot hold; for a `precision` that is unknown or that
    has no weight to change, and a pattern of `keep` that matches none; `VerificationError` for a plan that is not
    proved to compute the model (``docs/trust.md``; not with `check=False`). Warns with `ImplicitGatherWarning` where a
    sharded tensor is gathered without a request, and `NothingSplit` where nothing is sharded over the mesh.
    """
    of_import, of_compilation = import_options(options)
    imported = read_model(model, example_inputs, example_kwargs, **of_import)
    return compile_source(Source(imported, complete_for(of_compilation, default_name(model), model, imported)))


def read_model(
    model: Any,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[ImportOptions],
) -> Imported:
    """Import the program and the weights of a model, as `compile` does. Raises what `compile` raises."""
    name, checkpoint, dims = default_name(model), options.get("checkpoint"), options.get("dims") or {}
    precision, keep = options.get("precision"), options.get("keep", ())
    check_precision(precision, keep, name)
    with _data_of_buffers(model, (example_inputs, example_kwargs), checkpoint):
        imported = import_in_precision(model, example_inputs, example_kwargs, name, options)
        imported = bound_attention(snapshot(fix_dims(imported, dims)))
    imported = imported if checkpoint is None else with_checkpoint(imported, checkpoint)
    if imported.origin.model is None:
        imported = replace(imported, origin=origin_of(model))
    if checkpoint is not None:
        imported = from_files(imported, checkpoint_files(Path(checkpoint)))
    return quantize_weights(imported, precision, keep, name) if precision and precision in WEIGHT_FORMATS else imported


def _data_of_buffers(model: Any, inputs: Any, checkpoint: str | Path | None) -> AbstractContextManager[None]:
    """Return a context in which meta-device buffers of a torch model have data, if a checkpoint has the weights."""
    if checkpoint is None or not is_torch(model):
        return nullcontext()
    import torch

    from distir_relax.frontends.torch.meta_buffers import buffers_with_data

    # An example without data gives constants without data.
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return nullcontext() if any(t.is_meta for t in tensors) else buffers_with_data(model, Path(checkpoint))


def compile_source(source: Source) -> Plan:
    """Compile an imported model. Raises and warns as `compile` does."""
    imported, options = source.imported, source.options
    passes = source.passes()
    # Dumps come before the checks, so that an invalid program is written before its verification fails.
    dumps = [] if options["dump"] is None else [Dump(options["dump"])]
    observers: list[Observer] = [stages := Stages(), *options["observers"], *dumps, *source.checks]
    strategy = source.strategy
    # Devices that share a sequence gather keys where they need them.
    expected = strategy.option_axes if strategy is not None else ()
    _warn_of_gathers(run_passes(imported.module, passes, observers), options["gather_threshold"], expected)
    with_weights = replace(imported, tensors=with_state(stages.modules["global"], imported.tensors))
    modules = stages.modules
    proof = _prove(modules, imported.module) if source.is_proved else None
    return Plan(
        str(options["name"]), with_weights, modules, options["tail"], stages.seconds, proof=proof, _passes=passes,
        _source=source,
    )  # fmt: skip


def _prove(modules: Mapping[str, Module], model: Module) -> Proof:
    """Return the proof of a plan; raise `VerificationError`, with the smallest input that shows it, if it has none."""
    stages = Programs(modules["ranked"], modules["distributed"], modules["sharded"], model)
    try:
        return prove(stages.ranked, stages.distributed, stages.sharded, stages.model)
    except Refuted as wrong:
        example = find_counterexample(stages, wrong.statement)
        raise VerificationError(
            f"{wrong.message}\n  {example}",
            wrong.where,
            "the plan is wrong, or the checks cannot follow it; check=False (--no-check) makes it nevertheless",
        ) from None


def program_bundle(
    name: str, module: Module, tensors: Mapping[str, torch.Tensor], backends: tuple[str, ...] = ("torch",)
) -> Bundle:
    """Return a bundle of a distributed program whose inputs and outputs declare their layouts.

    `tensors` are its parameters, constants and state by name. Raises `DistIRError` for an input or output without a
    layout, for a tensor that is missing or of another type, and as `to_bundle` does.
    """
    return program_to_bundle(name, module, run_passes(module, RANK_PASSES), tensors, backends)


def _warn_of_gathers(module: Module, threshold: int, expected: Collection[str]) -> None:
    """Warn of large gathers along other axes than the expected ones."""
    for record in module.records:
        if isinstance(record, Gather) and record.bytes >= threshold and not set(record.axes) <= set(expected):
            warnings.warn(str(record), ImplicitGatherWarning, stacklevel=4)


def default_name(model: Any) -> str:
    """Return the default name of a model."""
    if isinstance(model, tuple):
        return str(model[0].main.name)
    path = isinstance(model, (str, Path))
    return re.sub(r"\W+", "_", Path(model).stem if path else type(model).__name__).strip("_").lower() or "model"
