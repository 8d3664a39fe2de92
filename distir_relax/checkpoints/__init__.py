"""Checkpoints of training runs: global tensors, written and read by all ranks together, and the position."""

from distir_relax.checkpoints.export import export_pretrained, export_weights
from distir_relax.checkpoints.folder import (
    STATE_FILE,
    Position,
    Saved,
    begin,
    best,
    checkpoint_names,
    finish,
    latest,
    remove,
    saved_steps,
)
from distir_relax.checkpoints.parameters import common_prefix, read_parameters
from distir_relax.checkpoints.state_file import StateFile

__all__ = [
    "STATE_FILE", "Position", "Saved", "StateFile", "begin", "best", "checkpoint_names", "common_prefix",
    "export_pretrained", "export_weights", "finish", "latest", "read_parameters", "remove", "saved_steps",
]  # fmt: skip
