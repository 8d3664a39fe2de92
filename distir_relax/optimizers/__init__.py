"""Optimizers, and the passes that add their steps to programs with gradients."""

from distir_relax.optimizers.adam import Adam, AdamW
from distir_relax.optimizers.master_weights import MasterWeights, with_state
from distir_relax.optimizers.optimize import RATE, STEP, Optimize
from distir_relax.optimizers.optimizer import Optimizer
from distir_relax.optimizers.sgd import SGD

__all__ = ["RATE", "SGD", "STEP", "Adam", "AdamW", "MasterWeights", "Optimize", "Optimizer", "with_state"]
