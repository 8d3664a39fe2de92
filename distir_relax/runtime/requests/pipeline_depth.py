"""The number of steps that keep all stages of a pipeline busy."""

from __future__ import annotations

from distir_relax.bundle import Manifest


def pipeline_depth(manifest: Manifest) -> int:
    """Return the number of stages of a program that continues sequences: one step for each can be in flight."""
    return max(1, len({state.tensor.ranks for state in manifest.states}))
