"""Generation for many requests at once: scheduling, memory, and the engine that runs steps."""

from distir_relax.serving.engine import Engine, EngineOptions, Executor
from distir_relax.serving.request import GenerationRequest
from distir_relax.serving.scheduler import Limits, Scheduler, Span
from distir_relax.serving.start import THREADS, Replica, start_engine

__all__ = [
    "THREADS",
    "Engine",
    "EngineOptions",
    "Executor",
    "GenerationRequest",
    "Limits",
    "Replica",
    "Scheduler",
    "Span",
    "start_engine",
]
