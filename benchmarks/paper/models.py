"""The DistIR paper's synthetic MLPs (its table 1): training programs in 16 bits, no weight of which is ever made.

distir simulate benchmarks/paper/models.py:mlp_103b --profile dgx2-v100 --strategy 4/2/2/32 --global-batch 131072
"""

from __future__ import annotations

from distir_relax import Strategy
from distir_relax.ir import Module
from distir_relax.strategies import mlp_training

ONE_DEVICE = Strategy()


def mlp_1b(strategy: Strategy = ONE_DEVICE, global_batch: int = 64) -> Module:
    """16 layers of 8192 x 8192: 1.1 billion parameters, 2.1 GB."""
    return mlp_training(16, 8192, strategy, global_batch)


def mlp_17b(strategy: Strategy = ONE_DEVICE, global_batch: int = 64) -> Module:
    """64 layers of 16384 x 16384: 17 billion parameters, 34 GB."""
    return mlp_training(64, 16384, strategy, global_batch)


def mlp_103b(strategy: Strategy = ONE_DEVICE, global_batch: int = 64) -> Module:
    """96 layers of 32768 x 32768: 103 billion parameters, 206 GB."""
    return mlp_training(96, 32768, strategy, global_batch)
