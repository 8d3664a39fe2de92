"""The executable stage: what runs once and in each call, packed weights, and the memory of results."""

from distir_relax.executable.batch_requests import BatchRequests
from distir_relax.executable.hoist import Hoist
from distir_relax.executable.plan_memory import PlanMemory
from distir_relax.executable.select_kernels import SelectKernels

__all__ = ["BatchRequests", "Hoist", "PlanMemory", "SelectKernels"]
