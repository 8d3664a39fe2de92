"""The tvm backend: run a rank's program on TVM's virtual machine."""

from distir_relax.runtime.backends.tvm.program import TvmProgram, load, rank_function

__all__ = ["TvmProgram", "load", "rank_function"]
