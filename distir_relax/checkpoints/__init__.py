"""Checkpoints of training runs: global tensors, written and read by all ranks together, and the position."""

from distir_relax.checkpoints.export import export_pretrained, export_weights
from distir_relax.checkpoints.folder import (
    STATE_FILE,
    Saved,
    begin,
    best,
    checkpoint_names,
    finish,
    is_checkpoint,
    latest,
    remove,
    saved_steps,
)
from distir_relax.checkpoints.parameters import common_prefix, read_parameters
from distir_relax.checkpoints.position import START, DataPosition, Position
from distir_relax.checkpoints.resumption import (
    Renamed,
    Resumption,
    by_names_of,
    check_frozen,
    compare,
    fixed_digests,
    frozen_weights,
)
from distir_relax.checkpoints.state_file import StateFile

__all__ = [
    "START", "STATE_FILE", "DataPosition", "Position", "Renamed", "Resumption", "Saved", "StateFile", "begin", "best",
    "by_names_of", "check_frozen", "checkpoint_names", "common_prefix", "compare", "export_pretrained",
    "export_weights", "finish", "fixed_digests", "frozen_weights", "is_checkpoint", "latest", "read_parameters",
    "remove", "saved_steps",
]  # fmt: skip
