"""Lowering: distributed programs, padding, pipelines, projection to ranks, and code generation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distir_relax.lowering.gradient_accumulation import AccumulateInCalls
    from distir_relax.lowering.microbatches import Microbatches
    from distir_relax.lowering.multi_mesh import ToPlaces
    from distir_relax.lowering.ordered_sums import OrderSums
    from distir_relax.lowering.overlap import OverlapCollectives
    from distir_relax.lowering.pipeline import Pipeline
    from distir_relax.lowering.project import Project
    from distir_relax.lowering.ranked.attend_states import AttendStates
    from distir_relax.lowering.ranked.bound_attention import BoundAttention
    from distir_relax.lowering.ranked.drop_identities import DropIdentities
    from distir_relax.lowering.ranked.fuse import FuseDifferentiable, FuseLocal
    from distir_relax.lowering.ranked.index_positions import IndexPositions
    from distir_relax.lowering.ranked.join_products import JoinProducts
    from distir_relax.lowering.ranked.merge_equal import MergeEqual
    from distir_relax.lowering.ranked.one_sequence import OneSequence
    from distir_relax.lowering.ranked.skip_repeats import SkipRepeats
    from distir_relax.lowering.to_distir import ToDistIR

__all__ = [
    "AccumulateInCalls",
    "AttendStates",
    "BoundAttention",
    "DropIdentities",
    "FuseDifferentiable",
    "FuseLocal",
    "IndexPositions",
    "JoinProducts",
    "MergeEqual",
    "Microbatches",
    "OneSequence",
    "OrderSums",
    "OverlapCollectives",
    "Pipeline",
    "Project",
    "SkipRepeats",
    "ToDistIR",
    "ToPlaces",
]

# Lazy: ranks import `lowering.emit`, and must not load the compiler.
_MODULES = {
    "AccumulateInCalls": "distir_relax.lowering.gradient_accumulation",
    "AttendStates": "distir_relax.lowering.ranked.attend_states",
    "DropIdentities": "distir_relax.lowering.ranked.drop_identities",
    "FuseDifferentiable": "distir_relax.lowering.ranked.fuse",
    "FuseLocal": "distir_relax.lowering.ranked.fuse",
    "BoundAttention": "distir_relax.lowering.ranked.bound_attention",
    "IndexPositions": "distir_relax.lowering.ranked.index_positions",
    "JoinProducts": "distir_relax.lowering.ranked.join_products",
    "MergeEqual": "distir_relax.lowering.ranked.merge_equal",
    "Microbatches": "distir_relax.lowering.microbatches",
    "OneSequence": "distir_relax.lowering.ranked.one_sequence",
    "OrderSums": "distir_relax.lowering.ordered_sums",
    "OverlapCollectives": "distir_relax.lowering.overlap",
    "Pipeline": "distir_relax.lowering.pipeline",
    "Project": "distir_relax.lowering.project",
    "SkipRepeats": "distir_relax.lowering.ranked.skip_repeats",
    "ToDistIR": "distir_relax.lowering.to_distir",
    "ToPlaces": "distir_relax.lowering.multi_mesh",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'distir_relax.lowering' has no attribute {name!r}")
