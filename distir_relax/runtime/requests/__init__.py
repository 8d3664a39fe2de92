"""Steps of several requests at once, by a program that continues sequences."""

from distir_relax.runtime.requests.pipeline_depth import pipeline_depth
from distir_relax.runtime.requests.rank_requests import RankRequests, Slot
from distir_relax.runtime.requests.session_requests import SessionRequests
from distir_relax.runtime.requests.state_memory import bytes_per_request, bytes_per_token
from distir_relax.runtime.requests.thread_requests import ThreadRequests

__all__ = [
    "RankRequests",
    "SessionRequests",
    "Slot",
    "ThreadRequests",
    "bytes_per_request",
    "bytes_per_token",
    "pipeline_depth",
]
