"""Optimizers, and the passes that add their steps to programs with gradients."""

from distir_relax.optimizers.adadelta import Adadelta
from distir_relax.optimizers.adafactor import Adafactor
from distir_relax.optimizers.adagrad import Adagrad
from distir_relax.optimizers.adam import Adam, AdamW
from distir_relax.optimizers.averaging import EMA, SWA, Averaging
from distir_relax.optimizers.from_torch import from_torch
from distir_relax.optimizers.groups import Groups
from distir_relax.optimizers.lion import Lion
from distir_relax.optimizers.loss_scale import LOSS_SCALE, LossScale
from distir_relax.optimizers.master_weights import MasterWeights, with_state
from distir_relax.optimizers.muon import Muon
from distir_relax.optimizers.nadam import NAdam, RAdam
from distir_relax.optimizers.optimize import CHANGED, GRADIENT, GRADIENT_NORM, STEP, Optimize, next_value
from distir_relax.optimizers.optimizer import Optimizer, Update, kinds_of, rates_of
from distir_relax.optimizers.order_updates import OrderUpdates
from distir_relax.optimizers.reload_weights import ReloadWeights
from distir_relax.optimizers.rmsprop import RMSprop
from distir_relax.optimizers.sgd import SGD
from distir_relax.optimizers.torch_optimizer import TorchOptimizer
from distir_relax.optimizers.updates import Updates, losses_of

OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__: kind for kind in (SGD, Adam, AdamW, Adadelta, Adafactor, Adagrad, Lion, Muon, NAdam, RAdam, RMSprop)
}
"""The optimizers of single parameters, by name."""

__all__ = [
    "CHANGED",
    "EMA",
    "GRADIENT",
    "GRADIENT_NORM",
    "LOSS_SCALE",
    "OPTIMIZERS",
    "SGD",
    "STEP",
    "SWA",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Averaging",
    "Groups",
    "Lion",
    "LossScale",
    "MasterWeights",
    "Muon",
    "NAdam",
    "Optimize",
    "Optimizer",
    "OrderUpdates",
    "RAdam",
    "RMSprop",
    "ReloadWeights",
    "TorchOptimizer",
    "Update",
    "Updates",
    "from_torch",
    "kinds_of",
    "losses_of",
    "next_value",
    "rates_of",
    "with_state",
]
