"""Checkpoints of training runs: global tensors, written and read by all ranks together, and the position."""

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
from distir_relax.checkpoints.state_file import StateFile

__all__ = [
    "STATE_FILE", "Position", "Saved", "StateFile", "begin", "best", "checkpoint_names", "finish",
    "latest", "remove", "saved_steps",
]  # fmt: skip
