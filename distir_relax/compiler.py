"""The whole pipeline in one call: a model and its annotations in, a plan for every rank out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distir_relax.bundle import Bundle, write_bundle
from distir_relax.errors import AnnotationError, ImportModelError
from distir_relax.frontends.imported import Imported
from distir_relax.ir import DeviceMesh, Module, Value, print_module
from distir_relax.lowering import FuseLocal, Project, ToDistIR
from distir_relax.lowering.to_bundle import BACKENDS, to_bundle
from distir_relax.sharding import DelayReductions, Propagate, Propagation, traffic
from distir_relax.sharding.annotate import apply_shardings

if TYPE_CHECKING:
    import tvm

    from distir_relax.runtime.session import Session


class SurpriseGather(UserWarning):
    """The program gathers a split tensor where nobody asked for it."""


@dataclass
class Plan:
    """A compiled model: one program per distinct rank, with everything on the way there.

    `modules` holds the program at each stage (``global``, ``sharded``, ``distributed``, ``ranked``); `reasons` says
    why each value lies as it does, and what a `redistribute` sends. `plan(x)` runs it here, ranks as threads, and
    returns what the model returns.
    """

    name: str
    imported: Imported
    modules: Mapping[str, Module]
    tail: str
    reasons: Mapping[str, str]
    _sessions: dict[str, Session] = field(default_factory=dict, repr=False)

    @property
    def mesh(self) -> DeviceMesh:
        """The devices that the plan is for."""
        return self.modules["sharded"].meshes[0]

    def text(self, stage: str) -> str:
        """The program at a stage, as text. The sharded stage carries the reason for each placement."""
        return print_module(self.modules[stage], self._reason if stage == "sharded" else None)

    def bundle(self, backends: Sequence[str] = BACKENDS) -> Bundle:
        """All that ranks need, in memory; the weights are the model's own tensors, not copies."""
        return to_bundle(
            self.name,
            self.modules["sharded"],
            self.modules["distributed"],
            self.modules["ranked"],
            self.imported.tensors,
            self.tail,
            tuple(backends),
            self._reason,
        )

    def save(self, path: str | Path, backends: Sequence[str] = BACKENDS, overwrite: bool = True) -> Path:
        """Write the bundle folder at `path`, whole or not at all; see ``docs/bundle.md``.

        A bundle that is there already is replaced unless `overwrite` is false; anything else is never touched.
        Raises `BundleError` when `path` cannot be written.
        """
        write_bundle(self.bundle(backends), Path(path), overwrite=overwrite)
        return Path(path)

    def __call__(self, *args: Any, backend: str = "torch", **kwargs: Any) -> Any:
        """Run the plan on the model's own arguments, ranks as threads of this process; returns what the model does.

        The first call of a backend loads it. Raises `RunError` for arguments unlike the example's.
        """
        from distir_relax.runtime.session import Session

        if backend not in self._sessions:
            self._sessions[backend] = Session(self.bundle((backend,)), backend)
        return self.imported.rebuild(self._sessions[backend](self.imported.flatten(args, kwargs)))

    def to_onnx_sharding(self, model: Any) -> Any:
        """A copy of an ONNX model with this plan's layouts as its multi-device metadata (IR version 11).

        `model` is the path or the `onnx.ModelProto` that the plan was compiled from. Raises `PlacementError` for a
        mesh of several axes, and for sizes that the metadata cannot express.
        """
        from distir_relax.frontends.onnx_sharding import write_sharding
        from distir_relax.frontends.onnx_tensors import load_model

        return write_sharding(load_model(model), self.modules["sharded"], self.imported.values)

    def to_relax_dtensor(self) -> tvm.IRModule:
        """The sharded program in TVM's own terms, `R.DTensor` types and `R.dist.redistribute`: see ``docs/tvm.md``.

        Raises `PlacementError` for a layout, and `UnsupportedOpError` for an op, that these cannot express.
        """
        from distir_relax.lowering.to_relax_dtensor import to_relax_dtensor

        return to_relax_dtensor(self.modules["sharded"])

    def _reason(self, value: Value) -> str:
        return self.reasons.get(value.name, "")


def compile(
    model: Any,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    shardings: Mapping[str, str] | None = None,
    mesh: DeviceMesh | None = None,
    tail: str = "ragged",
    name: str | None = None,
    gather_threshold: int = 1 << 20,
) -> Plan:
    """Compile `model` for the devices of a mesh.

    `model` is a `torch.nn.Module` with the example call that its shapes are taken from, a TVM `IRModule`, or an ONNX
    model (a path or an `onnx.ModelProto`) with `input_shapes` for the inputs whose dims it leaves open.
    Annotations stand in the model (`annotate_sharding`), or are given as `shardings`: glob patterns over names of
    parameters and inputs, each with its placement, together with `mesh`. A `mesh` given here takes the place of the one that annotations in the model name: the same model
    for another number of devices. `tail` says what ranks with a short shard
    do: ``ragged`` (own shapes) or ``pad`` (filled up to the largest shard).

    Raises a `DistIRError`: `ImportModelError` and `UnsupportedOpError` for what cannot be read, `AnnotationError` and
    `PlacementError` for annotations that cannot hold. Warns `SurpriseGather` where a split tensor of at least
    `gather_threshold` bytes is gathered unasked; of smaller ones the text of the sharded stage says so.
    """
    imported = _import(model, example_inputs, example_kwargs, input_shapes)
    if shardings:
        target = mesh or next(iter(imported.module.meshes), None)
        if target is None:
            raise AnnotationError("shardings were given without a mesh", hint='pass mesh=DeviceMesh((2,), ("tp",))')
        imported = apply_shardings(imported, shardings, target)
    propagation = Propagate(mesh).run(imported.module)
    for gather in propagation.gathers:
        if gather.bytes >= gather_threshold:
            warnings.warn(gather.message, SurpriseGather, stacklevel=2)
    sharded = DelayReductions().run(propagation.module)
    distributed = ToDistIR(tail).run(sharded)
    modules = {
        "global": imported.module,
        "sharded": sharded,
        "distributed": distributed,
        "ranked": FuseLocal().run(Project().run(distributed)),
    }
    return Plan(name or _default_name(model), imported, modules, tail, _remarks(propagation, sharded))


def _default_name(model: Any) -> str:
    path = isinstance(model, (str, Path))
    return re.sub(r"\W+", "_", Path(model).stem if path else type(model).__name__).strip("_").lower() or "model"


def _remarks(propagation: Propagation, sharded: Module) -> dict[str, str]:
    """Why each value lies as it does, and for a `redistribute` what it sends and whether anybody asked for it."""
    unasked = {gather.value for gather in propagation.gathers}
    found = {name: [reason] for name, reason in propagation.reasons.items()}
    for moved in traffic(sharded):
        found.setdefault(moved.result, []).append(str(moved))
    return {name: "; ".join([*texts, *(["unasked"] if name in unasked else [])]) for name, texts in found.items()}


def _import(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    input_shapes: Mapping[str, Sequence[int]] | None,
) -> Imported:
    kinds = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(model).__mro__}
    if isinstance(model, (str, Path)) or "onnx.ModelProto" in kinds:
        from distir_relax.frontends.onnx import import_onnx

        if args or kwargs:
            raise ImportModelError("an ONNX model takes input_shapes, not an example call")
        return import_onnx(model, input_shapes)
    if input_shapes:
        raise ImportModelError(
            f"input_shapes are for ONNX models, found {type(model).__name__}", hint="give example_inputs"
        )
    if "torch.Module" in kinds:
        from distir_relax.frontends.torch import import_torch

        return import_torch(model, tuple(args), kwargs)
    if "tvm.IRModule" in kinds:
        from distir_relax.frontends.relax import import_relax

        return import_relax(model)
    raise ImportModelError(
        f"expected a torch.nn.Module, a TVM IRModule or an ONNX model, found {type(model).__name__}",
        hint="for a file, build the model in a function and name it: distir compile model.py:build",
    )
