"""What can be said about a program: reference executors."""

from distir_relax.analysis.interpret import interpret
from distir_relax.analysis.layout import assemble, scatter
from distir_relax.analysis.reference import execute, execute_program, run_devices

__all__ = ["assemble", "execute", "execute_program", "interpret", "run_devices", "scatter"]
