"""Steps of several requests at once, by a program that continues sequences."""

from distir_relax.runtime.requests.pipeline_depth import pipeline_depth
from distir_relax.runtime.requests.rank_requests import RankRequests, Slot
from distir_relax.runtime.requests.session_requests import SessionRequests
from distir_relax.runtime.requests.state_memory import StateBytes
from distir_relax.runtime.requests.thread_requests import ThreadRequests

__all__ = [
    "RankRequests",
    "SessionRequests",
    "Slot",
    "StateBytes",
    "ThreadRequests",
    "pipeline_depth",
]
