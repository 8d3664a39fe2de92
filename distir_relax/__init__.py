"""distir-relax: mark a few tensors with `annotate_sharding`, get one program per rank, launch them with `mpirun`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distir_relax.errors import DistIRError

if TYPE_CHECKING:
    from distir_relax import lr, optim
    from distir_relax.bisection import Bisection, bisect
    from distir_relax.compiler.compare_precision import PrecisionComparison, compare_precision
    from distir_relax.compiler.compile import ImplicitGatherWarning, Plan, bind, compile
    from distir_relax.compiler.generation import Generation, compile_generation
    from distir_relax.compiler.simulate import simulate
    from distir_relax.compiler.simulate_generation import GenerationSimulation, simulate_generation
    from distir_relax.compiler.source import NothingSplit
    from distir_relax.compiler.training import Training, TrainingStep, compile_training
    from distir_relax.cost.profile import load_profile
    from distir_relax.frontends.dynamic_shapes import Dim
    from distir_relax.frontends.shape_ops import annotate_shape_ops
    from distir_relax.frontends.torch.meta_buffers import empty_weights
    from distir_relax.integrations.finetune import FineTuning, finetune
    from distir_relax.layout import DeviceMesh
    from distir_relax.lowering.program_builder import ProgramBuilder
    from distir_relax.ops import define as define_op
    from distir_relax.report.training_run import RunReport
    from distir_relax.runtime.process_session.session import ProcessSession, launch
    from distir_relax.runtime.training import callbacks
    from distir_relax.runtime.training.callbacks import Callback
    from distir_relax.runtime.training.in_process import train
    from distir_relax.runtime.training.packing import pack
    from distir_relax.serving.loaded_bundle import load
    from distir_relax.sharding.annotate import annotate_sharding
    from distir_relax.strategies import Strategy
    from distir_relax.strategy_search.generation import search_generation
    from distir_relax.strategy_search.search import search

__version__ = "0.1.0"
__all__ = [
    "Bisection",
    "Callback",
    "DeviceMesh",
    "Dim",
    "DistIRError",
    "FineTuning",
    "Generation",
    "GenerationSimulation",
    "ImplicitGatherWarning",
    "NothingSplit",
    "Plan",
    "PrecisionComparison",
    "ProcessSession",
    "ProgramBuilder",
    "RunReport",
    "Strategy",
    "Training",
    "TrainingStep",
    "annotate_shape_ops",
    "annotate_sharding",
    "bind",
    "bisect",
    "callbacks",
    "compare_precision",
    "compile",
    "compile_generation",
    "compile_training",
    "define_op",
    "empty_weights",
    "finetune",
    "launch",
    "load",
    "load_profile",
    "lr",
    "optim",
    "pack",
    "search",
    "search_generation",
    "simulate",
    "simulate_generation",
    "train",
]

# Imported lazily: a rank that runs a bundle imports this package too, and must not load the compiler.
_HOMES = {
    "DeviceMesh": "distir_relax.layout",
    "Dim": "distir_relax.frontends.dynamic_shapes",
    "NothingSplit": "distir_relax.compiler.source",
    "Callback": "distir_relax.runtime.training.callbacks",
    "Plan": "distir_relax.compiler.compile",
    "RunReport": "distir_relax.report.training_run",
    "ImplicitGatherWarning": "distir_relax.compiler.compile",
    "annotate_shape_ops": "distir_relax.frontends.shape_ops",
    "annotate_sharding": "distir_relax.sharding.annotate",
    "PrecisionComparison": "distir_relax.compiler.compare_precision",
    "compare_precision": "distir_relax.compiler.compare_precision",
    "bind": "distir_relax.compiler.compile",
    "Bisection": "distir_relax.bisection",
    "bisect": "distir_relax.bisection",
    "compile": "distir_relax.compiler.compile",
    "Generation": "distir_relax.compiler.generation",
    "GenerationSimulation": "distir_relax.compiler.simulate_generation",
    "compile_generation": "distir_relax.compiler.generation",
    "compile_training": "distir_relax.compiler.training",
    "Training": "distir_relax.compiler.training",
    "TrainingStep": "distir_relax.compiler.training",
    "define_op": "distir_relax.ops",
    "empty_weights": "distir_relax.frontends.torch.meta_buffers",
    "launch": "distir_relax.runtime.process_session.session",
    "load": "distir_relax.serving.loaded_bundle",
    "load_profile": "distir_relax.cost.profile",
    "ProcessSession": "distir_relax.runtime.process_session.session",
    "ProgramBuilder": "distir_relax.lowering.program_builder",
    "search": "distir_relax.strategy_search.search",
    "search_generation": "distir_relax.strategy_search.generation",
    "simulate": "distir_relax.compiler.simulate",
    "simulate_generation": "distir_relax.compiler.simulate_generation",
    "Strategy": "distir_relax.strategies",
    "pack": "distir_relax.runtime.training.packing",
    "FineTuning": "distir_relax.integrations.finetune",
    "finetune": "distir_relax.integrations.finetune",
    "train": "distir_relax.runtime.training.in_process",
}
# Public names that are modules.
_MODULES = {
    "callbacks": "distir_relax.runtime.training.callbacks",
    "lr": "distir_relax.lr",
    "optim": "distir_relax.optim",
}
# Public names that differ from those in their modules.
_NAMES = {"define_op": "define"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), _NAMES.get(name, name))
    raise AttributeError(f"module 'distir_relax' has no attribute {name!r}")


def __dir__() -> list[str]:
    # A function, since lazily imported names are not in the module's own list.
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"])
