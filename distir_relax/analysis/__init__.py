"""What can be said about a program: reference executors."""

from distir_relax.analysis.interpret import interpret
from distir_relax.analysis.reference import execute, execute_program, run_devices
from distir_relax.analysis.scatter import assemble, scatter

__all__ = ["assemble", "execute", "execute_program", "interpret", "run_devices", "scatter"]
