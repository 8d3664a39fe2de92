"""Schedules of learning rates: ``dr.lr.Cosine(3e-4, steps=1000)``; an optimizer takes one as its `lr`."""

from distir_relax.support.learning_rate import (
    ByEpoch,
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    InverseSqrt,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Schedule,
    StepDecay,
    Tabulated,
    WarmupStableDecay,
)

__all__ = [
    "ByEpoch",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "Exponential",
    "InverseSqrt",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "StepDecay",
    "Tabulated",
    "WarmupStableDecay",
]
