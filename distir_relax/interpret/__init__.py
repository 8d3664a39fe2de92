"""Interpretation of programs over domains: tensors, types, sizes, shards of devices."""

from distir_relax.interpret.distributed_executor import execute, execute_program, run_devices
from distir_relax.interpret.global_executor import interpret
from distir_relax.interpret.ranked_executor import run_ranks
from distir_relax.interpret.shard_tensors import assemble, scatter

__all__ = ["assemble", "execute", "execute_program", "interpret", "run_devices", "run_ranks", "scatter"]
