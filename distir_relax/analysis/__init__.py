"""Program analysis: reference executors."""

from distir_relax.analysis.distributed_executor import execute, execute_program, run_devices
from distir_relax.analysis.global_executor import interpret
from distir_relax.analysis.shard_tensors import assemble, scatter

__all__ = ["assemble", "execute", "execute_program", "interpret", "run_devices", "scatter"]
