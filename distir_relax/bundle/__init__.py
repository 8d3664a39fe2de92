"""The bundle: the folder that the compiler writes and a rank reads. The format is in docs/bundle.md."""

from __future__ import annotations

from distir_relax.bundle.bundle import STAGE_FILES, Bundle
from distir_relax.bundle.format import (
    DTYPE_BYTES,
    FORMAT,
    Interval,
    Manifest,
    Mesh,
    Program,
    Shard,
    Tensor,
    local_bytes,
    local_intervals,
    local_shape,
)
from distir_relax.bundle.read import check_weights, read_bundle
from distir_relax.bundle.weights import FileWeights, TensorWeights, WeightSource
from distir_relax.bundle.write import write_bundle

__all__ = [
    "DTYPE_BYTES",
    "FORMAT",
    "STAGE_FILES",
    "Bundle",
    "FileWeights",
    "Interval",
    "Manifest",
    "Mesh",
    "Program",
    "Shard",
    "Tensor",
    "TensorWeights",
    "WeightSource",
    "check_weights",
    "local_bytes",
    "local_intervals",
    "local_shape",
    "read_bundle",
    "write_bundle",
]
